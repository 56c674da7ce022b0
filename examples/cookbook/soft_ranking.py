"""
Soft ranking by a matching
==========================

Sorting is a matching of items with places: the sum of value times place is greatest if the largest
value gets the last place. Solved as LP-SparseMAP, the matching is soft where values are close, and
so are the ranks: they have a gradient, and a loss on ranks can train whatever made the values.
"""

import matplotlib.pyplot as plt
import torch

import factormax.nn as fnn

match = fnn.Matching()


def soft_rank(values, temperature=1.0):
    """Ranks from 0, `(*batch, n)`: exact if values are twice the temperature apart, or more."""
    places = torch.arange(values.shape[-1], dtype=values.dtype)
    return match(values[..., None] * places, temperature=temperature) @ places


# %%
# At a low temperature the ranks are whole numbers. At a higher one, close values share their ranks.
# The sum of the ranks never changes.

values = torch.tensor([0.3, 2.1, -0.4, 0.9, 1.0], dtype=torch.float64)
sharp, soft = soft_rank(values, 0.04), soft_rank(values, 1.0)
assert torch.equal(sharp, values.argsort().argsort().double())
torch.testing.assert_close(soft.sum(), sharp.sum())

# %%
# A model that only ever sees the order of its targets learns that order, here through Spearman's
# correlation, a squared distance between ranks.

torch.manual_seed(0)
x = torch.randn(20, 8, 5)  # twenty lists of eight items
order = (x @ torch.randn(5)).argsort().argsort().float()
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for _ in range(60):
    loss = (soft_rank(model(x).squeeze(-1)) - order).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert (model(x).squeeze(-1).argsort().argsort() == order).float().mean() > 0.8

# %%
# The rank of one value as it passes the others:

moving = torch.linspace(-1.5, 3, 200, dtype=torch.float64)
lists = torch.cat([moving[:, None], values[1:].expand(200, -1)], dim=1)
figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
for temperature in (0.05, 0.5, 2.0):
    ax.plot(moving.numpy(), soft_rank(lists, temperature)[:, 0].numpy())
ax.set(xlabel="value", ylabel="rank")
ax.legend(["temperature 0.05", "0.5", "2"])
plt.show()
