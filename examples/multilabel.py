"""
Labels that go together
=======================

A picture of a beach often shows the sea, seldom snow, and never both a ski slope and a palm. Labels
that are predicted one by one know nothing of each other. A pairwise Markov random field adds a
learned score for every pair of labels, and solves for all of them at once.

This tutorial combines detectors of single labels, which are unreliable, with what is learned about
pairs.
"""

# %%
# The data
# --------
#
# A scene is a coast or a mountain, by day or by night, and has some of the labels that belong to
# it. For each label there is a detector. It sees the truth, and a good deal of noise.

import matplotlib.pyplot as plt
import torch
from torch import nn

import factormax as fm

LABELS = ["sea", "beach", "palm", "snow", "ski", "lamp", "moon"]


def make_scenes(size, random):
    """What the detectors say, and the truth; both `(size, 7)`."""
    coast, night = torch.rand(2, size, generator=random) < 0.5
    often = torch.tensor([0.9, 0.8, 0.5, 0.9, 0.6, 0.8, 0.6])
    possible = torch.stack([coast, coast, coast, ~coast, ~coast, night, night], dim=1)
    truth = possible & (torch.rand(size, 7, generator=random) < often)
    return truth + 0.55 * torch.randn(size, 7, generator=random), truth.long()


# %%
# Two models
# ----------
#
# Both turn the output of a detector into a score with a learned scale and shift. One stops there.
# The other has a `PairwiseMRF` with a score for each of the 21 pairs; these scores start at 0,
# where both models are the same.


class Tagger(nn.Module):
    def __init__(self, edges=None):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(7)), nn.Parameter(torch.zeros(7))
        self.mrf = fm.nn.PairwiseMRF(7, edges)

    def scores(self, detected):
        return self.scale * detected + self.shift


STEPS = 150
models = {"alone": Tagger(edges=[]), "in pairs": Tagger()}
test, truth = make_scenes(500, torch.Generator().manual_seed(1))
for name, model in models.items():
    random = torch.Generator().manual_seed(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        detected, labels = make_scenes(64, random)
        loss = model.mrf.loss(model.scores(detected), labels).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        predicted = model.mrf.predict(model.scores(test))
    right = (predicted == truth).float().mean()
    whole = (predicted == truth).all(dim=1).float().mean()
    print(f"{name}: {right:.1%} of the labels right, {whole:.1%} of the scenes")

# %%
# `loss` is the loss of LP-SparseMAP, and `predict` gives the answer it is made for. (With this
# loss, a label that is in no pair is on from a score of ½ upwards, not from 0.)
#
# What was learned
# ----------------
#
# The matrix shows the score of every pair of labels: green for those that go together, purple for
# those that exclude each other. Lamps and the moon have next to no score with the landscape, as
# they should: both coasts and mountains have nights.

coupling = models["in pairs"].mrf.coupling.detach()
limit = coupling.abs().max()
_, ax = plt.subplots(figsize=(5, 4), layout="constrained")
image = ax.imshow(coupling, cmap="PRGn", vmin=-limit, vmax=limit)
ax.figure.colorbar(image, label="score of the pair")
ax.set_xticks(range(7), LABELS, rotation=35)
ax.set_yticks(range(7), LABELS)
ax.tick_params(length=0)
ax.spines[:].set_visible(False)

# %%
# Here is a scene of the test set in which the pairs correct what the detectors got wrong:

with torch.no_grad():
    alone, pairs = (
        (model.mrf.predict(model.scores(test)) != truth).sum(dim=1) for model in models.values()
    )
chosen = int((alone - pairs).argmax())
_, axes = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
for ax, (name, model) in zip(axes, models.items(), strict=True):
    with torch.no_grad():
        marginals = model.mrf(model.scores(test[chosen]))
    fm.plot.marginals(marginals, ax, columns=LABELS)
    ax.set_title(f"labels {name}")
print("the truth:", ", ".join(label for label, on in zip(LABELS, truth[chosen], strict=True) if on))

# %%
# The same graph by hand
# ----------------------
#
# A layer is a graph and its parameters. Here it is with a constraint that no score could enforce:
# palms and skis never occur together. Only the strongest pairs are kept, so that the drawing
# stays readable; the labels are numbered in their order.

first, second = (coupling.triu().abs() > 0.8).nonzero().T
fg = fm.FactorGraph()
u = fg.variable_from(models["in pairs"].scores(test[chosen]).detach(), name="labels")
fg.add(fm.Pair(u[first], u[second], coupling[first, second]))
fg.add(fm.AtMostOne(u[[LABELS.index("palm"), LABELS.index("ski")]]))
fg.solve()
fm.plot.graph(fg)

plt.show()

# %%
# What to try next
# ----------------
#
# * `loss(..., kind="hinge")` is a structured support vector machine.
# * `predict(..., exact=True)` searches until the answer is proved to be the best.
# * Where only some labels are known, `fg.loss({u: labels}, mask=known)` completes the others.
