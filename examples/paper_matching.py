"""The first listing of the LP-SparseMAP paper: a linear assignment, and a gradient through it.

Only the import differs from the paper (and `x.grad` is `eta.grad`). It prints a sparse 3 x 5
matching, then the gradient of one of its entries with respect to all scores.
"""

import torch

from factormax import AtMostOne, TorchFactorGraph, Xor


def main():
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


if __name__ == "__main__":
    main()
