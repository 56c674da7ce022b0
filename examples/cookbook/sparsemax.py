"""
Sparsemax, and its constrained relatives
========================================

A single `Xor` is sparsemax: probabilities that sum to 1, many of them exactly 0. With another
factor or two, entries share a limit, or come only together.
"""

# %%
# Sparsemax: scores that are far below the largest get nothing.

import matplotlib.pyplot as plt
import numpy as np

import factormax as fm

fg = fm.FactorGraph()
u = fg.variable_from(np.array([1.0, 0.8, 0.5, 0.1, -0.5]))
fg.add(fm.Xor(u))
fg.solve()
sparsemax = u.value

# %%
# The first two together may have at most half, and the fourth must have as much as the third.

fg.add(fm.Linear(u[:2], [1, 1], upper=0.5))
fg.add(fm.Linear(u[2:4], [1, -1], lower=0, upper=0))
fg.solve()
assert np.allclose(u.value, [0.35, 0.15, 0.25, 0.25, 0])

figure, axes = plt.subplots(figsize=(5, 2.5), layout="constrained")
axes.bar(np.arange(1, 6) - 0.2, sparsemax, width=0.4, label="sparsemax")
axes.bar(np.arange(1, 6) + 0.2, u.value, width=0.4, label="constrained")
axes.set(xlabel="entry", ylabel="probability")
axes.legend(frameon=False)
