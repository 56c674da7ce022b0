"""
Structured attention
====================

Softmax attention lets every word look for itself. Two words may look at the same one, and a third
may be looked at by nobody: there is no way to say that each word should have a counterpart of its
own. A matching says just that.

Are two sentences made of the same words? "A A B" and "B A A" are, whatever the order. "A A B" and
"B B A" are not, although every word of one is found in the other. The same small network is trained
on this twice: with softmax attention, and with `factormax.nn.Matching`.
"""

# %%
# The data
# --------
#
# The data are pairs of sentences of three to seven letters. Half of the pairs differ: the second
# has one letter too many of one kind and one too few of another.

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import factormax as fm

LETTERS, SHORTEST, LONGEST = 5, 3, 7


def make_batch(size, random):
    """Two sentences per row, `(size, LONGEST)` each, padded; their lengths, and the answers."""
    first, second = torch.zeros(2, size, LONGEST, dtype=torch.long)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (size,), generator=random)
    answers = torch.randint(0, 2, (size,), generator=random)
    for row in range(size):
        n = int(lengths[row])
        two = torch.randperm(LETTERS, generator=random)[:2]  # these are in it, one of them twice
        others = torch.randint(0, LETTERS, (n - 3,), generator=random)
        words = torch.cat([two, two[:1], others])
        first[row, :n] = words[torch.randperm(n, generator=random)]
        if not answers[row]:
            words[2] = two[1]  # the same words, but not as often
        second[row, :n] = words[torch.randperm(n, generator=random)]
    return first, second, lengths, answers


# %%
# Two kinds of attention
# ----------------------
#
# Both take scores `(batch, n, n)` and return weights for both directions. Softmax normalises rows
# for one and columns for the other. A matching is the same seen from either side.


def present(lengths):
    return torch.arange(LONGEST) < lengths[:, None]


class SoftmaxAttention(nn.Module):
    def forward(self, scores, lengths):
        there = present(lengths)[:, :, None] & present(lengths)[:, None, :]
        scores = scores.masked_fill(~there, -1e9)
        return scores.softmax(dim=2) * there, scores.softmax(dim=1) * there


class MatchingAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.matching = fm.nn.Matching()

    def forward(self, scores, lengths):
        weights = self.matching(scores, lengths=(lengths, lengths))
        return weights, weights


# %%
# The network
# -----------
#
# It attends, compares each word with what it attends to, adds up the results, and answers: a
# decomposable attention model.


class Comparer(nn.Module):
    def __init__(self, attention, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, dim)
        self.attention = attention
        self.compare = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 8))
        self.output = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def attend(self, first, second, lengths):
        scores = self.embedding(first) @ self.embedding(second).mT
        return self.attention(scores / 4, lengths)

    def forward(self, first, second, lengths):
        a, b = self.embedding(first), self.embedding(second)
        to_second, to_first = self.attend(first, second, lengths)
        of_first = self.compare(torch.cat([a, to_second @ b], dim=2))
        of_second = self.compare(torch.cat([to_first.mT @ a, b], dim=2))
        heard = (of_first + of_second) * present(lengths)[..., None]
        return self.output(heard.sum(dim=1)).squeeze(1)


# %%
# Training
# --------
#
# Both have the same initial weights and the same batches. Only the answers are shown.

STEPS = 150
test = make_batch(500, torch.Generator().manual_seed(1))
random = torch.Generator().manual_seed(2)
data = [make_batch(64, random) for _ in range(min(STEPS, 100))]
models = {}
for name, attention in (("softmax", SoftmaxAttention()), ("matching", MatchingAttention())):
    torch.manual_seed(0)
    model = models[name] = Comparer(attention)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        *inputs, answers = data[step % len(data)]
        loss = F.binary_cross_entropy_with_logits(model(*inputs), answers.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = ((model(*test[:3]) > 0) == test[3].bool()).float().mean()
    print(f"{name} attention: {right:.0%} right")

# %%
# Softmax attention is no better than chance: each letter finds itself, however often it occurs. The
# picture shows a pair of sentences that agree, on top, and one that does not. Below each key is the
# attention it receives in all; orange is what exceeds 1. The matching never exceeds it. Where the
# sentences differ, one word is left with a counterpart of another kind, and that is what the
# comparison needs to see.

first, second, lengths, answers = test
figure, axes = plt.subplots(2, 2, figsize=(8, 8.6), layout="constrained")
for column, (name, model) in enumerate(models.items()):
    with torch.no_grad():
        weights, _ = model.attend(first, second, lengths)
    for row, answer in enumerate((1, 0)):
        i = int(((lengths == 6) & (answers == answer)).nonzero()[0])
        letters = [["ABCDE"[w] for w in words[i, :6]] for words in (first, second)]
        ax = fm.plot.attention(
            weights[i, :6, :6], axes[row, column], queries=letters[0], keys=letters[1]
        )
        ax.set(xlabel="", ylabel="")
        ax.set_title(f"{name}, {'the same words' if answer else 'not the same words'}")

plt.show()

# %%
# What to try next
# ----------------
#
# * `fm.nn.Matching(temperature=0.2)` makes the attention sharper; `learn_temperature=True` learns
#   how sharp.
# * `complete=False` matches only where it pays, so words may be left without a counterpart.
# * `fm.nn.SequentialAlignment` prefers to align neighbours with neighbours.
