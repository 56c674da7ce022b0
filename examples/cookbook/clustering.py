"""
Clustering with transitivity
============================

How many clusters are there, and who is in which? Give every pair a score, positive if the two seem
to belong together, and ask for the best *consistent* choice of pairs: if a and b are together, and
b and c, then so are a and c. That is ``Imply``, for all triples at once, in the three orders.
"""

from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np

import factormax as fm

rng = np.random.default_rng(0)
truth = np.repeat([0, 1, 2], [5, 4, 3])
points = np.array([[0, 0], [3, 0], [1.5, 2.5]])[truth] + rng.normal(0, 0.6, (12, 2))

# %%
# There is a variable for each pair, and ``pair`` finds it from either side. The score says how much
# closer the two are than 2, so the number of clusters need not be given.

first, second = np.triu_indices(len(points), k=1)
pair = np.zeros((len(points), len(points)), dtype=int)
pair[first, second] = pair[second, first] = np.arange(len(first))

fg = fm.FactorGraph()
scores = 2 - np.linalg.norm(points[first] - points[second], axis=1)
together = fg.variable_from(scores)
a, b, c = np.array(list(combinations(range(len(points)), 3))).T
for x, y, z in ((a, b, c), (b, c, a), (c, a, b)):
    fg.add(fm.Imply(together[pair[x, y]], together[pair[y, z]], together[pair[x, z]]))
solution = fg.decode()

# %%
# Each point's cluster is named after its first member. Pairs taken one by one would not do: some
# points of different clusters are closer than 2.

same = np.eye(len(points), dtype=bool) | (together.value > 0.5)[pair]
cluster = same.argmax(axis=1)
assert solution.optimal
assert (same == (truth[:, None] == truth)).all()
assert ((scores > 0) != (truth[first] == truth[second])).any()

figure, ax = plt.subplots(figsize=(5, 3.5))
for i, j in zip(first, second, strict=True):
    ax.plot(*points[[i, j]].T, color="lightgray", linewidth=2 * same[i, j], zorder=0)
ax.scatter(*points.T, c=cluster, cmap="tab10", s=60)
ax.set(title=f"{len(set(cluster))} clusters", aspect="equal")
plt.show()
