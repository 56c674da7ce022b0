"""
Shortest paths from Linear flows
================================

A path is a flow of one unit: what enters a node also leaves it, except at the source and the
target. Each node is one equation over its edges, and so one ``Linear``. Further constraints, such
as nodes to be avoided or a budget of tolls, would be one more line each.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import dijkstra

import factormax as fm

SIZE = 6
rng = np.random.default_rng(0)
node = np.arange(SIZE * SIZE).reshape(SIZE, SIZE)
first = np.append(node[:, :-1], node[:-1])  # neighbours: beside and below
second = np.append(node[:, 1:], node[1:])
tail, head = np.append(first, second), np.append(second, first)  # edges in both directions
costs = rng.uniform(0.1, 1, len(tail))
graph = coo_matrix((costs, (tail, head)))

# %%
# ``solve_map`` gives the best flow. The matrix of the equations is totally unimodular, so the best
# flow is a path.

fg = fm.FactorGraph()
edge = fg.variable_from(-costs)
for n in range(SIZE * SIZE):
    at = np.flatnonzero((tail == n) | (head == n))
    supply = float(n == node[0, 0]) - float(n == node[-1, -1])
    fg.add(fm.Linear(edge[at], np.where(tail[at] == n, 1.0, -1.0), supply, supply))
solution = fg.solve_map()
path = edge.value

assert solution.integral
np.testing.assert_allclose(-solution.objective, dijkstra(graph, indices=0)[-1], atol=1e-5)

# %%
# ``solve`` spreads the unit over a few good paths, with gradients to all costs; the temperature
# says how many.

fg.solve(temperature=0.3)

figure, axes = plt.subplots(1, 2, figsize=(8, 4))
for ax, flow, title in zip(axes, (path, edge.value), ("solve_map", "solve"), strict=True):
    for a, b, f in zip(tail, head, flow, strict=True):
        ax.plot([a % SIZE, b % SIZE], [a // SIZE, b // SIZE], color="tab:blue", linewidth=6 * f)
    ax.set(title=title, aspect="equal", ylim=(SIZE - 0.5, -0.5))
plt.show()
