"""
The trees that make up a solution
=================================

Who has the telescope, and who is on the hill? *She saw the man on the hill with a telescope* can be
read in several ways. A parser that returns one tree has to choose, and one that returns a
probability for every tree hides the choice in a sum. A sparse solution keeps the few readings that
a person would think of, each with its probability.
"""

# %%
# Scores of arcs
# --------------
#
# `scores[m, h]` says how well `h` suits `m` as its head; on the diagonal, how well the root does.
# Most arcs are clear. Where "on" and "with" attach is close to a tie.

import matplotlib.pyplot as plt
import numpy as np

import factormax as fm

words = "She saw the man on the hill with a telescope".split()
likely = {
    (0, 1): 2.0,  # She ← saw
    (1, 1): 2.0,  # the head of saw is the root
    (2, 3): 2.0,  # the ← man
    (3, 1): 2.0,  # man ← saw
    (4, 3): 1.2,  # the man is on the hill,
    (4, 1): 1.0,  # or that is where she saw him
    (5, 6): 2.0,  # the ← hill
    (6, 4): 2.0,  # hill ← on
    (7, 1): 1.2,  # she has the telescope,
    (7, 3): 1.0,  # or the man has it,
    (7, 6): 0.9,  # or it stands on the hill
    (8, 9): 2.0,  # a ← telescope
    (9, 7): 2.0,  # telescope ← with
}
scores = np.full((len(words), len(words)), -1.0)
for arc, score in likely.items():
    scores[arc] = score

# %%
# A tree factor
# -------------
#
# `DepTree` says that the arcs form a tree. `projective` forbids arcs that cross, and `single_root`
# allows only one word whose head is the root. After a solve, the factor has `structures`, the
# trees, and `probs`, their probabilities; `u.value`, the marginals, is their average.

fg = fm.FactorGraph()
u = fg.variable_from(scores)
tree = fg.add(fm.DepTree(u, projective=True, single_root=True))
solution = fg.solve()

for structure, prob in zip(tree.structures, tree.probs, strict=True):
    heads = structure.argmax(axis=1)
    arcs = [f"{words[m]} ← {words[heads[m]]}" for m in (4, 7)]
    print(f"{prob:.2f}  {', '.join(arcs)}")

ax = fm.plot.structures(tree, words=words)

# %%
# Arcs in grey are in all the trees, arcs in blue only in some. Their average shows how certain each
# arc is:

ax = fm.plot.tree(u, words=words)

# %%
# Temperature
# -----------
#
# The scale of the scores decides how many trees there are. Dividing them by a small temperature
# leaves only the best tree; a large one mixes more of them.

for temperature in (0.1, 0.3, 1.0, 3.0):
    fg.solve(temperature=temperature)
    print(f"temperature {temperature}: {[round(float(p), 2) for p in tree.probs]}")

plt.show()

# %%
# What to try next
# ----------------
#
# * Add `fm.Budget(u[[0, 2, 3, 4, 5, 6, 7, 8, 9], 1], 3)`: "saw" has at most three modifiers. It
#   mixes with the tree, as every factor does.
# * `fg.decode()` returns the best tree, with a proof that there is none better.
# * With torch or JAX scores, `tree.probs` is differentiable: the expected loss over a few trees,
#   each of which you may judge by any function, has an exact gradient.
