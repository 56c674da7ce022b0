"""
Sparsemax, and its constrained relatives
========================================

A single `Xor` is sparsemax: probabilities that sum to 1, many of them exactly 0. One more factor
each, and some entries share a limit, or come only together.
"""

# %%
# The largest score takes most, and scores far below it take nothing:

import numpy as np

import factormax as fm

scores = np.array([1.0, 0.8, 0.5, 0.1, -0.5])


def probabilities(*factors):
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    for factor in (fm.Xor, *factors):
        fg.add(factor(u))
    fg.solve()
    return u.value


print(probabilities().round(3))

# %%
# The first two together may have half at most, and the fourth must have as much as the third:

print(
    probabilities(
        lambda u: fm.Linear(u[:2], [1, 1], upper=0.5),
        lambda u: fm.Linear(u[2:4], [1, -1], lower=0, upper=0),
    ).round(3)
)
