"""The two listings of the LP-SparseMAP paper: a linear assignment, and parsing with valencies.

Only the import differs from the paper (and, in the first one, `x.grad` is `eta.grad`; a script can
have only one `main`). Each prints a sparse solution, then the gradient of one of its entries with
respect to all scores.
"""

import torch

from factormax import AtMostOne, Budget, DepTree, TorchFactorGraph, Xor


def matching():
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


if __name__ == "__main__":
    matching()
    parsing(constrain=False)
    parsing(constrain=True)
