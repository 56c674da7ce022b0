"""
The listings of the paper
=========================

LP-SparseMAP was introduced by `Niculae and Martins (2020) <https://arxiv.org/abs/2001.04437>`_. The
paper shows two programs: a linear assignment, and a dependency parser that limits how many
modifiers a word may have. Both run here with only the import changed: `TorchFactorGraph` is
`FactorGraph` under the paper's name.
"""

# %%
# A linear assignment
# -------------------
#
# Every row is assigned to exactly one column, and every column to at most one row. The solution is
# sparse. Its gradient is exact: no iterations are unrolled. (The listing calls it `x.grad`, where
# it means `eta.grad`.)

import matplotlib.pyplot as plt
import torch

import factormax as fm
from factormax import AtMostOne, Budget, DepTree, TorchFactorGraph, Xor

torch.manual_seed(7)
torch.set_printoptions(precision=2, sci_mode=False)

m, n = 3, 5

eta = torch.randn(m, n, requires_grad=True)

fg = TorchFactorGraph()
u = fg.variable_from(eta)

for i in range(m):
    fg.add(Xor(u[i, :]))

for j in range(n):
    fg.add(AtMostOne(u[:, j]))  # some columns may be 0

fg.solve()
print(u.value)

u.value[0, -1].backward()
print(eta.grad)

# %%
# The graph has a box for each factor, and a circle for each variable, filled according to its
# value:

ax = fm.plot.graph(fg)

# %%
# `Xor(u, axis=1)` and `AtMostOne(u, axis=0)` would say the same in two lines, without loops, and
# faster.
#
# Parsing with valencies
# ----------------------
#
# `u[m, h]` means that word `h` is the head of word `m`; on the diagonal, that the word's head is
# the root. With `constrain=True` no word may have more than two modifiers.


def parsing(n=5, constrain=False):
    print(f"n={n}, constrain={constrain}")

    torch.manual_seed(4)

    x = torch.randn(n, n, requires_grad=True)

    fg = TorchFactorGraph()
    u = fg.variable_from(x)
    fg.add(DepTree(u, packed=True, projective=True))

    if constrain:
        for k in range(n):
            # don't constrain the diagonal (root arc)
            ix = list(range(k)) + list(range(k + 1, n))

            fg.add(Budget(u[ix, k], budget=2))

    fg.solve()
    print(u.value)

    u.value[1, -1].backward()
    print(x.grad)
    return u


free = parsing(constrain=False)
constrained = parsing(constrain=True)

# %%
# The last word is the busiest head: without the constraint it has 2.02 modifiers in expectation,
# and with it exactly 2. So small a difference changes the solution only a little, but its gradient
# a lot: what the last word gains as the head of one word, it now loses as the head of another. Blue
# arcs are those that the solution mixes, with their weights.

_, axes = plt.subplots(2, 1, figsize=(6, 4.6), layout="constrained")
fm.plot.tree(free, axes[0]).set_title("without a constraint")
fm.plot.tree(constrained, axes[1]).set_title("at most two modifiers")

plt.show()

# %%
# What to try next
# ----------------
#
# * The reference implementation's projective trees have a single root: `single_root=True` gives its
#   numbers.
# * `fg.solve(method="admm")` is the paper's algorithm; the default takes fewer passes and gives the
#   same answer.
# * :ref:`sphx_glr_tutorials_dependency_parsing.py` trains a parser with valencies.
