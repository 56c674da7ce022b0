"""
Extracting a rationale
======================

A rationale extractor predicts a label and shows the few words that the prediction rests on: all
others are masked before the classifier sees them. The mask must be sparse, short and contiguous, or
nobody can read it, and it must be differentiable, because only labels are known, never rationales.

`SequenceBudget` is such a mask. Its weights sum to at most a given number, neighbours that pass
together earn a bonus, and gradients flow through it to the scores of the words and to the bonus.
While the model is unsure, more words than that pass, with a small weight each.
"""

# %%
# The data
# --------
#
# The sentences have 10 to 18 words. Each holds one planted span of four neighbouring words of the
# same class, which is the label; words of all classes are scattered around it as a distraction.

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import factormax as fm

CLASSES, PLAIN, SPAN, LONGEST = 6, 9, 4, 18  # word ids below CLASSES carry a class


def make_batch(size, random):
    """Words `(size, LONGEST)`, which of them are there, which are the span, and the labels."""
    place = torch.arange(LONGEST)
    lengths = torch.randint(10, LONGEST + 1, (size, 1), generator=random)
    words = torch.randint(CLASSES, CLASSES + PLAIN, (size, LONGEST), generator=random)
    distracting = torch.rand(size, LONGEST, generator=random) < 0.2
    distractor = torch.randint(0, CLASSES, (size, LONGEST), generator=random)
    words = torch.where(distracting, distractor, words)
    labels = torch.randint(0, CLASSES, (size,), generator=random)
    start = (torch.rand(size, 1, generator=random) * (lengths - SPAN + 1)).long()
    span = (place >= start) & (place < start + SPAN)
    return torch.where(span, labels[:, None], words), place < lengths, span, labels


# %%
# The model
# ---------
#
# It scores every word, and every pair of neighbours by how alike they are. The graph is one
# variable per word and one factor. What passes the mask is all that the classifier sees.


class Extractor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES + PLAIN, 16)
        self.scorer = nn.Linear(16, 1)
        nn.init.zeros_(self.scorer.weight)  # all words alike at first
        nn.init.constant_(self.scorer.bias, 0.2)
        self.together = nn.Parameter(torch.full((16,), 0.02))
        self.classifier = nn.Linear(16, CLASSES, bias=False)

    def mask(self, words, present):
        """How much of each word passes, `(batch, LONGEST)`; padding is masked, hence 0."""
        x = self.embedding(words)
        scores = self.scorer(x).squeeze(-1)
        bonus = (x[:, 1:] * x[:, :-1]) @ self.together  # of two neighbours, (batch, LONGEST - 1)
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores, mask=present)
        fg.add(fm.SequenceBudget(u, bonus, budget=SPAN))
        fg.solve()
        return u.value

    def forward(self, words, present):
        weights = self.mask(words, present)
        return self.classifier((weights[..., None] * self.embedding(words)).sum(dim=1))


# %%
# Training
# --------
#
# The model is shown only the labels.

STEPS = 100
torch.manual_seed(0)
model = Extractor()
words, present, span, labels = make_batch(256, torch.Generator().manual_seed(1))  # held out
before = model.mask(words, present).detach()

random = torch.Generator().manual_seed(2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
for _ in range(STEPS):
    batch_words, batch_present, _, batch_labels = make_batch(32, random)
    loss = F.cross_entropy(model(batch_words, batch_present), batch_labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

after = model.mask(words, present).detach()
right = (model(words, present).argmax(dim=1) == labels).float().mean()
print(f"of the mask on the span: {(before * span).sum() / before.sum():.0%} before", end=", ")
print(f"{(after * span).sum() / after.sum():.0%} after; labels right: {right:.0%}")

# %%
# The picture shows in blue what the mask lets pass, for ten held-out sentences. Letters are words
# that carry a class; the planted span, which the model was never shown, is outlined.

figure, axes = plt.subplots(2, 1, figsize=(9, 6.4), layout="constrained")
for ax, weights, title in zip(axes, (before, after), ("before", "after"), strict=True):
    fm.plot.marginals(weights[:10], ax, mask=present[:10], numbers=False)
    for i, j in present[:10].nonzero().tolist():
        letter = "ABCDEF"[words[i, j]] if words[i, j] < CLASSES else "·"
        dark = weights[i, j] > 0.6
        ax.text(j, i, letter, ha="center", va="center", color="white" if dark else "#444444")
    for i in range(10):
        start = span[i].nonzero()[0].item() - 0.5
        outline = plt.Rectangle((start, i - 0.5), SPAN, 1, fill=False, ec="#D55E00", lw=2)
        ax.add_patch(outline)
    ax.set(xticks=[], yticks=[], title=f"{title} training")

plt.show()

# %%
# What to try next
# ----------------
#
# * Start `together` at 0, so that neighbours earn no bonus at first, and watch the mask.
# * `fm.nn.ContiguousSelection` is this mask as a layer, with one learned bonus for all neighbours
#   and a temperature.
# * Keep the factor that `fg.add` returns: its `structures` and `probs` are the few masks that the
#   solution mixes, and `fm.plot.structures` draws them.
# * In `eval()` a single, hard rationale may be wanted: `fg.solve_map()` returns the best one.
