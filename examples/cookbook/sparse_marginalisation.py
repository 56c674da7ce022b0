"""
Sparse marginalisation over structures
======================================

An expected loss over all structures is out of reach: there are too many. But a solution of
``Matching`` is a mixture of a few, and lists them. The loss of each is computed as it is, however
nonlinear; the expectation is an exact sum; and the gradient flows through the probabilities. There
is no sampling, and nothing has to be relaxed.
"""

from itertools import permutations

import matplotlib.pyplot as plt
import torch

import factormax as fm

# %%
# Six machines are to be placed on six sites, so that those that exchange a lot are close together.
# What a pair costs depends on where *both* are: this is the quadratic assignment problem.

torch.manual_seed(0)
exchange = torch.rand(6, 6, dtype=torch.float64) ** 3
distance = torch.cdist(*[torch.rand(6, 2, dtype=torch.float64)] * 2)


def cost(place):  # (*batch, machine, site), of 0 and 1
    return (exchange * (place @ distance @ place.mT)).sum(dim=(-2, -1))


# %%
# The scores are all that is learned. The temperature falls from a high one, with many structures,
# to a low one:

scores = torch.zeros(6, 6, dtype=torch.float64, requires_grad=True)
optimizer = torch.optim.Adam([scores], lr=0.1)
expected = []
for step in range(100):
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    matching = fg.add(fm.Matching(u))
    fg.solve(temperature=4 * 0.97**step)
    loss = (matching.probs * cost(matching.structures)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    expected.append(loss.item())

# %%
# All 720 placements can be tried here. The mixture ends as a single one, which is among the best
# seven. Had the temperature been low from the start, it would have been a single one at once; its
# probability is then 1 whatever the scores, and the gradient is 0.

every = torch.eye(6, dtype=torch.float64)[list(permutations(range(6)))]
found = cost(matching.structures[0])
assert (cost(every) < found - 1e-9).sum() < 7

figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
ax.plot(expected)
ax.axhline(cost(every).min(), color="gray", linestyle="--")
ax.set(xlabel="step", title="Expected cost; dashed: the best")
plt.show()
