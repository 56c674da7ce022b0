"""
Shortest paths by an oracle in C
================================

Where the best structure is found by an algorithm, that algorithm is the factor. A function in C is
called without the GIL, on all cores: here a dynamic program for paths through a grid that go only
right and down, from one corner to the other.
"""

import ctypes
import subprocess
import tempfile

import matplotlib.pyplot as plt
import numpy as np

import factormax as fm

# %%
# It maximises the sum of the scores on the path, and sets ``m``, which comes as zeros, to 1 along
# it. ``data`` is whatever we hand over: here the width of the grid. A masked cell has the score
# −inf; if no path avoids such cells, there is no structure, which the return value 1 reports. The
# function keeps no state, since several threads call it at once.

SOURCE = r"""
#include <math.h>
#include <stdint.h>

int32_t path(const double* eta_u, int64_t d, const double* eta_v, int64_t s,
             double* m, double* n, void* data, int64_t instance) {
  const int64_t w = *(const int64_t*)data;
  double best[d]; /* of the paths that end here */
  for (int64_t i = 0; i < d; ++i) {
    const double left = i % w ? best[i - 1] : -INFINITY;
    const double above = i >= w ? best[i - w] : -INFINITY;
    best[i] = eta_u[i] + (i ? fmax(left, above) : 0);
  }
  if (best[d - 1] == -INFINITY) return 1;
  for (int64_t i = d - 1;;) {
    m[i] = 1;
    if (i == 0) return 0;
    const int from_left = i < w || (i % w && best[i - 1] > best[i - w]);
    i -= from_left ? 1 : w;
  }
}
"""
with tempfile.TemporaryDirectory() as folder:
    command = ["cc", "-O2", "-shared", "-fPIC", "-xc", "-", "-o", f"{folder}/path.so"]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    library = ctypes.CDLL(f"{folder}/path.so")

# %%
# A batch of terrains: the height of a cell is its cost. The factor mixes with all others, has
# gradients, and lists the paths that make up a solution.

costs = np.random.default_rng(0).uniform(0, 1, (8, 12, 12)) ** 2
width = ctypes.c_int64(12)

fg = fm.FactorGraph(batch_dims=1)
cells = fg.variable_from(-costs)
paths = fg.add(fm.Factor(cells, native_map=library.path, native_data=width))
fg.solve_map()
best = cells.value
fg.solve(temperature=0.5)

# %%
# The same dynamic program in NumPy finds paths of the same cost. ``factormax.testing.check_factor``
# would put the oracle through more: masks, ties, gradients.

total = np.full((8, 13, 13), np.inf)
total[:, 0, 1] = 0
for i, j in np.ndindex(12, 12):
    least = np.minimum(total[:, i, j + 1], total[:, i + 1, j])
    total[:, i + 1, j + 1] = costs[:, i, j] + least
np.testing.assert_allclose((best * costs).sum(axis=(1, 2)), total[:, -1, -1], atol=1e-6)

figure, axes = plt.subplots(1, 3, figsize=(9, 3))
for ax, picture in zip(axes, (costs[0], best[0], cells.value[0]), strict=True):
    ax.imshow(picture, cmap="Blues")
figure.suptitle(f"Costs, the best path, and a mixture of {paths.num_structures[0]} paths")
plt.show()
