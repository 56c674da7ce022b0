"""
A factor of your own
====================

A structured factor needs one thing: a function that finds the best structure for given scores, its
*MAP oracle*. Whatever you can maximise exactly, by dynamic programming, a graph algorithm or a
library of your choice, becomes a differentiable layer that returns a sparse mixture of structures
and works together with all other factors.

This tutorial builds paths through a grid: from the top left to the bottom right corner, by steps
down and to the right.
"""

# %%
# The oracle
# ----------
#
# `map` takes the scores of the variables as a NumPy array in their shape, and returns the best
# structure, as an array of 0 and 1, and the features of the factor's own scores, of which it has
# none. A variable that is masked has the score −inf and must stay off.

import matplotlib.pyplot as plt
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
        return path, []


# %%
# Is it right?
# ------------
#
# A solve does not notice an oracle that is not exact: the answer is simply wrong. So put it through
# the checks that every built-in factor passes: optimality, gradients against finite differences,
# masks and batches. `allowed` says in your own words which assignments are structures.

from factormax.testing import check_factor


def is_path(on):
    cells = np.argwhere(on)
    steps = np.diff(cells, axis=0)
    return on[0, 0] and on[2, 2] and len(cells) == 5 and (np.abs(steps).sum(axis=1) == 1).all()


check_factor(GridPath(fm.FactorGraph().variable((3, 3))), allowed=is_path)

# %%
# Solve
# -----
#
# From here on it is a factor like any other. The middle of the grid attracts, so all the paths go
# through it.

torch.manual_seed(1)
scores = torch.randn(5, 7)
scores[1:4, 2:5] += 0.7
scores.requires_grad_()

fg = fm.FactorGraph()
u = fg.variable_from(scores)
path = fg.add(GridPath(u))
fg.solve()

fm.plot.marginals(u)
print("made up of", len(path.probs), "paths:", [round(p, 2) for p in path.probs.tolist()])

# %%
# These are the paths, with their probabilities:

ax = fm.plot.structures(path)

# %%
# It mixes with all other factors. At most one cell of the middle may now be used, in expectation:

fg.add(fm.Budget(u[1:4, 2:5], budget=1))
fg.solve()

ax = fm.plot.marginals(u)
ax.add_patch(plt.Rectangle((1.5, 0.5), 3, 3, fill=False, edgecolor="#D55E00", linewidth=2))
print("made up of", len(path.probs), "paths:", [round(p, 2) for p in path.probs.tolist()])

# %%
# A loss over structures
# ----------------------
#
# The mixture is small, so you can look at each structure and judge it by any function, even one
# that no sum over cells could express. Gradients flow through the probabilities. Here the function
# is how often a path turns:


def turns(structure):
    steps = structure.nonzero().diff(dim=0)
    return (steps[1:] != steps[:-1]).any(dim=1).sum()


loss = torch.stack([turns(structure) for structure in path.structures])
expected = (path.probs * loss).sum()
expected.backward()
print(f"the paths turn {loss.tolist()} times, {expected:.2f} in expectation")

limit = scores.grad.abs().max()
_, ax = plt.subplots(figsize=(4.7, 3), layout="constrained")
image = ax.imshow(scores.grad, cmap="PuOr_r", vmin=-limit, vmax=limit)
ax.figure.colorbar(image, label="turns gained by a higher score")
ax.set(xticks=[], yticks=[])

plt.show()

# %%
# What to try next
# ----------------
#
# * Mask a wall of cells, `fg.variable_from(scores, mask=...)`, with one gap in it.
# * Give the factor scores of its own, `GridPath(u, scores)`, for turning; `map` then receives them
#   as `eta_v` and returns how often each counts.
# * An oracle in Python is called at least once in every pass. Define `map_batch` where it is easy
#   to vectorise, or hand in a C function as `native_map`.
