"""
Parsing with valencies
======================

"The woman saw the man with the telescope" and "the woman put the book on the table" look alike to a
parser that knows only the parts of speech. Does the last phrase belong to the verb or to the noun?
The verb knows: "to see" takes a subject and an object, "to put" also a place. How many modifiers a
word takes is its *valency*, which a lexicon lists.

This tutorial trains a small parser on a toy language in which valency decides. The lexicon goes in
as a constraint, a budget for each head. The network need not learn what the constraint says, only
what it leaves open.
"""

# %%
# A toy treebank
# --------------
#
# A sentence is a subject, a verb, an object and one or two phrases. The verb takes two or three
# modifiers: its subject and its object, and, if it has the valency for it, the first phrase. A
# phrase that finds no place at the verb belongs to the noun before it.
#
# The parser sees tags, not words, so it cannot tell the two kinds of verbs apart.

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import factormax as fm

TAGS = "DNVP"  # determiner, noun, verb, preposition
LONGEST = 11


def make_batch(size, random):
    """Tags and heads `(size, LONGEST)`, a word that is its own head being the root; lengths, and
    the valency of each word.
    """
    tags = torch.zeros(size, LONGEST, dtype=torch.long)
    heads = torch.arange(LONGEST).repeat(size, 1)
    valency = torch.zeros(size, LONGEST, dtype=torch.long)
    lengths = torch.zeros(size, dtype=torch.long)
    for row in range(size):
        takes_phrase, phrases = torch.randint(0, 2, (2,), generator=random).tolist()
        phrases += 1
        words = "DNVDN" + phrases * "PDN"
        head = [1, 2, 2, 4, 2]  # of the determiners, the subject, the verb and the object
        for k in range(phrases):
            at = len(head)
            noun_before = at - 1
            head += [2 if k == 0 and takes_phrase else noun_before, at + 2, at]
        n = lengths[row] = len(words)
        tags[row, :n] = torch.tensor([TAGS.index(word) for word in words])
        heads[row, :n] = torch.tensor(head)
        most = {"D": 0, "N": 2, "V": 2 + takes_phrase, "P": 1}
        valency[row, :n] = torch.tensor([most[word] for word in words])
    return tags, heads, lengths, valency


# %%
# The graph
# ---------
#
# `arcs[m, h]` means that `h` is the head of `m`; on the diagonal, that the head of `m` is the root.
# The budget of head `h` covers its column, without the diagonal, and every instance has budgets of
# its own, `(batch, n)`. Words that are not there are masked.


def graph_of(scores, lengths, valency=None):
    n = scores.shape[-1]
    there = torch.arange(n) < lengths[:, None]
    fg = fm.FactorGraph(batch_dims=1)
    arcs = fg.variable_from(scores, mask=there[:, :, None] & there[:, None, :], name="arcs")
    fg.add(fm.DepTree(arcs, projective=True, single_root=True))
    if valency is not None:
        other, head = np.arange(n - 1)[:, None], np.arange(n)
        modifiers = arcs[other + (other >= head), head]  # (n - 1, n): all but the diagonal
        fg.add(fm.Budget(modifiers, valency, axis=0))
    return fg, arcs


tags, heads, lengths, valency = make_batch(1, torch.Generator().manual_seed(3))
n = 5
fg, _ = graph_of(torch.zeros(1, n, n), torch.tensor([n]), valency[:, :n])
fm.plot.graph(fg)
fg.summary()

# %%
# The parser
# ----------
#
# A recurrent network reads the tags; every pair of words is scored as head and modifier.


class Parser(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embedding = nn.Embedding(len(TAGS), dim)
        self.read = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.modifier, self.head = nn.Linear(2 * dim, dim), nn.Linear(2 * dim, dim)
        self.root = nn.Linear(2 * dim, 1)

    def forward(self, tags):
        states, _ = self.read(self.embedding(tags))
        scores = self.modifier(states) @ self.head(states).mT / 4
        return scores + torch.diag_embed(self.root(states).squeeze(-1))


# %%
# Training, with and without valencies
# ------------------------------------
#
# `fg.loss` is 0 where the solution is the gold tree, and its gradient needs no differentiation
# through the solver. It is computed on the graph with its constraints, so that the network is not
# pushed to explain what they already say.

STEPS = 50
test = make_batch(200, torch.Generator().manual_seed(1))


def gold_arcs(heads, lengths):
    there = torch.arange(LONGEST) < lengths[:, None]
    return nn.functional.one_hot(heads, LONGEST) * there[..., None]


def train(use_valency):
    torch.manual_seed(0)
    model, random = Parser(), torch.Generator().manual_seed(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        tags, heads, lengths, valency = make_batch(16, random)
        fg, arcs = graph_of(model(tags), lengths, valency if use_valency else None)
        loss = fg.loss({arcs: gold_arcs(heads, lengths)}).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def accuracy(model, use_valency):
    """Accuracy over all heads, and over those of the first phrase of each sentence."""
    tags, heads, lengths, valency = test
    with torch.no_grad():
        fg, arcs = graph_of(model(tags), lengths, valency if use_valency else None)
        fg.solve_map()
    right = arcs.value.argmax(dim=-1) == heads
    there = torch.arange(LONGEST) < lengths[:, None]
    return right[there].float().mean(), right[:, 5].float().mean()


models = {}
for name, use_valency in (("without valencies", False), ("with valencies", True)):
    models[name] = train(use_valency)
    heads_right, phrases_right = accuracy(models[name], use_valency)
    print(f"{name}: {heads_right:.0%} of the heads right, {phrases_right:.0%} of the phrases")

# %%
# Without valencies, the parser has to guess where the first phrase belongs. With them it knows.
#
# Two sentences, the same tags
# ----------------------------
#
# The marginals show it. Without the lexicon, both sentences get the same mixture of trees. With it,
# there is one tree for each.

# sphinx_gallery_thumbnail_number = 2
sentences = {
    "the woman saw the man with the telescope": 2,
    "the woman put the book on the table": 3,
}
tags = torch.tensor([[TAGS.index(tag) for tag in "DNVDNPDN"]])
_, axes = plt.subplots(3, 1, figsize=(8, 7), layout="constrained")
with torch.no_grad():
    scores = {name: model(tags) for name, model in models.items()}
fg, arcs = graph_of(scores["without valencies"], torch.tensor([8]))
fg.solve()
fm.plot.tree(arcs.value[0], axes[0], words="D N V D N P D N".split())
axes[0].set_title("either verb, without valencies")
for ax, (sentence, takes) in zip(axes[1:], sentences.items(), strict=True):
    valency = torch.tensor([[0, 2, takes, 0, 2, 1, 0, 2]])
    fg, arcs = graph_of(scores["with valencies"], torch.tensor([8]), valency)
    fg.solve()
    words = sentence.split()
    fm.plot.tree(arcs.value[0], ax, words=words)
    ax.set_title(f"“{words[2]}” takes {takes}")

plt.show()

# %%
# What to try next
# ----------------
#
# * `fm.nn.DependencyTree(projective=True, valency=3)` is this graph as a layer, with one valency
#   for all words.
# * `fm.Exactly` in place of `fm.Budget` says that a verb has no fewer modifiers either.
# * A tree need not be supervised. Use `arcs.value` as the weights of a network that passes messages
#   along it, and train it for another task.
