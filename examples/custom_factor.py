"""A factor of one's own: paths through a grid, from nothing but a function that finds the best one.

The structures are the paths from the top left to the bottom right corner, by steps down and right.
Prints the solution (a few paths with probabilities), the same with a budget on the middle of the
grid, and the gradient of an expected loss over the paths.
"""

import numpy as np
import torch

import factormax as fm


class GridPath(fm.Factor):
    """Exactly one path through u, `(rows, columns)`."""

    def map(self, eta_u, eta_v):
        best = np.pad(eta_u, ((1, 0), (1, 0)), constant_values=-np.inf)  # best path to each cell
        for i, j in np.ndindex(eta_u.shape):
            if i or j:
                best[i + 1, j + 1] += max(best[i, j + 1], best[i + 1, j])
        if best[-1, -1] == -np.inf:
            return fm.NO_STRUCTURE  # masked cells leave no way through
        path, (i, j) = np.zeros_like(eta_u), np.array(eta_u.shape) - 1
        path[i, j] = 1
        while i or j:
            i, j = (i - 1, j) if best[i, j + 1] >= best[i + 1, j] else (i, j - 1)
            path[i, j] = 1
        return path, []  # the factor has no scores of its own, hence no features


def show(title, u, path):
    print(title)
    for row in u.value.tolist():
        print("   ", *(f"{cell:5.2f}" if cell else "    ." for cell in row))
    print("    made up of", len(path.probs), "paths:", [round(p, 2) for p in path.probs.tolist()])


def turns(path):
    """How often a path changes direction: no sum over cells can tell."""
    steps = path.nonzero().diff(dim=0)
    return (steps[1:] != steps[:-1]).any(dim=1).sum()


def main():
    torch.set_printoptions(precision=2, sci_mode=False)
    torch.manual_seed(1)
    scores = torch.randn(5, 7)
    scores[1:4, 2:5] += 0.7  # the middle attracts
    scores.requires_grad_()

    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    path = fg.add(GridPath(u))
    fg.solve()
    show("One path:", u, path)

    fg.add(fm.Budget(u[1:4, 2:5], budget=1))  # it mixes with all other factors
    fg.solve()
    show("One path, with at most one cell of the middle (in expectation):", u, path)

    # The loss of each path may be anything: gradients flow through the probabilities.
    loss = torch.stack([turns(structure) for structure in path.structures])
    (path.probs * loss).sum().backward()
    print(f"Their turns are {loss.tolist()}. The expected number, by score:", scores.grad, sep="\n")


if __name__ == "__main__":
    main()
