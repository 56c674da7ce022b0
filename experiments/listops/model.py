"""The tagger: all it knows about a token is how a tree over the sentence connects it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import factormax as fm
from experiments.listops.data import VALENCIES, VOCABULARY, Batch
from experiments.timing import LayerClock

__all__ = ["MODELS", "BiLSTM", "GraphConvolution", "LatentTree", "Tagger"]

#: Where the tree comes from: fixed, gold, or latent.
MODELS = ("left-to-right", "gold", "tree", "tree+budget")


class Tagger(nn.Module):
    r"""Tags operators with the number of their arguments, seen only through a tree.

    A BiLSTM reads the tokens and scores the arcs,

    $$\eta_{i \to j} = \langle W_{hd} h_i + b_{hd},\; \mathrm{ReLU}(W_{mo} h_j + b_{mo}) \rangle$$

    (i the head of j, and $\eta_{j \to j}$ for j hanging from the root, as `DepTree` has it); a
    latent tree turns the scores into marginals; and a graph convolution passes messages along them.
    What it passes is the same learned vector for all tokens, so nothing but the tree tells them
    apart.

    Args:
        model: one of `MODELS`. "left-to-right" hangs each token from the one before it, "gold"
            takes the gold tree; both know nothing of the tokens, and have no BiLSTM.
        hidden: the size of embeddings and hidden layers; the BiLSTM has half of it each way.
        budget: the most dependents a token may have, for "tree+budget".
        **settings: passed to `LatentTree`.
    """

    def __init__(self, model: str, *, hidden: int = 50, budget: int = 5, **settings: Any) -> None:
        super().__init__()
        if model not in MODELS:
            raise ValueError(f"There is no model {model!r}: choose from {', '.join(MODELS)}.")
        self.kind = model
        if model in ("tree", "tree+budget"):
            self.embedding = nn.Embedding(len(VOCABULARY) + 1, hidden)
            self.encoder = BiLSTM(hidden, hidden // 2)
            self.head = nn.Linear(hidden, hidden)
            self.modifier = nn.Linear(hidden, hidden)
            self.tree = LatentTree(budget if model == "tree+budget" else None, **settings)
        self.convolution = GraphConvolution(hidden)
        self.output = nn.Linear(hidden, len(VALENCIES))

    def arcs(self, batch: Batch, clock: LayerClock | None = None) -> Tensor:
        """The tree or its marginals, `(batch, modifier, head)`, the root on the diagonal."""
        if self.kind == "gold":
            return _arcs_of(batch.heads, batch.present)
        if self.kind == "left-to-right":
            position = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
            before = (position - 1).clamp(min=0)
            return _arcs_of(before.expand_as(batch.tokens), batch.present)
        h = self.encoder(self.embedding(batch.tokens), batch.lengths)
        scores = torch.relu(self.modifier(h)) @ self.head(h).mT
        if clock is None:
            return self.tree(scores, batch.present)
        return clock(self.tree, scores, present=batch.present)

    def forward(self, batch: Batch, clock: LayerClock | None = None) -> Tensor:
        """Scores of the tags of every token, `(batch, n, 4)`; only those of operators count."""
        return self.output(self.convolution(self.arcs(batch, clock)))


class BiLSTM(nn.Module):
    """A layer of LSTM in both directions over padded sequences.

    The backward one runs over the sequences turned around, each by its own length, so it starts at
    their last token as over packed ones. On a CPU that takes half the time of packing them.

    Shapes:
        `(batch, n, inputs)` to `(batch, n, 2 outputs)`; `lengths` `(batch,)`.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.forwards = nn.LSTM(inputs, outputs, batch_first=True)
        self.backwards = nn.LSTM(inputs, outputs, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Both outputs, side by side. What stands in the padding means nothing."""
        position = torch.arange(x.shape[1], device=x.device)
        mirrored = lengths[:, None] - 1 - position
        mirrored = torch.where(mirrored >= 0, mirrored, position)
        there = self.forwards(x)[0]
        back = _take(self.backwards(_take(x, mirrored))[0], mirrored)
        return torch.cat([there, back], dim=-1)


class LatentTree(nn.Module):
    """Marginals of dependency trees, with a budget of dependents for every token or without.

    The root has no budget, and any number of tokens may hang from it.

    Args:
        budget: the most dependents of a token; None: no bound, and the layer is SparseMAP.
        temperature: what the scores are divided by. At 1 the marginals are spread out at first, so
            that nearly all arcs have a gradient.
        **options: passed to `FactorGraph.solve`.

    Shapes:
        scores and marginals `(batch, modifier, head)`; `present` `(batch, n)`.
    """

    def __init__(self, budget: int | None, *, temperature: float = 1.0, **options: Any) -> None:
        super().__init__()
        self.budget = budget
        self.temperature = temperature
        self.options = options

    def forward(self, scores: Tensor, present: Tensor) -> Tensor:
        """The marginals; 0 where a token is not there."""
        n = scores.shape[-1]
        fg = fm.FactorGraph(batch_dims=1)
        mask = present[:, :, None] & present[:, None, :]
        arcs = fg.variable_from(scores / self.temperature, mask=mask)
        fg.add(fm.DepTree(arcs))
        if self.budget is not None and n > 1:
            head, other = np.arange(n), np.arange(n - 1)[:, None]
            modifier = other + (other >= head)  # all but the head itself, which stands for the root
            fg.add(fm.Budget(arcs[modifier, head], self.budget, axis=0))
        fg.solve(**self.options)
        return torch.as_tensor(arcs.value)


class GraphConvolution(nn.Module):
    r"""One step of graph convolution (Marcheggiani and Titov, 2017), with the same v at all tokens.

    $$g_i = \mathrm{ReLU}\big(W v + b + \sum_{j \ne i} \mu_{i \to j} W' v
        + \sum_{j \ne i} \mu_{j \to i} W'' v\big)$$

    As all messages in a direction are the same, what counts is how much comes in: how many
    dependents a token has on average, and how likely it has a head other than the root.

    Shapes:
        arcs `(batch, modifier, head)` to `(batch, n, size)`.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(size))
        self.itself = nn.Linear(size, size)
        self.from_modifiers = nn.Linear(size, size, bias=False)
        self.from_head = nn.Linear(size, size, bias=False)

    def forward(self, arcs: Tensor) -> Tensor:
        """What every token gathers."""
        root = arcs.diagonal(dim1=-2, dim2=-1)  # passes no message
        modifiers = (arcs.sum(dim=-2) - root)[..., None]
        heads = (arcs.sum(dim=-1) - root)[..., None]
        v = self.vector
        own = self.itself(v)
        return torch.relu(own + modifiers * self.from_modifiers(v) + heads * self.from_head(v))


def _arcs_of(heads: Tensor, present: Tensor) -> Tensor:
    """The tree in which these are the heads, `(batch, modifier, head)`."""
    n = heads.shape[-1]
    return torch.nn.functional.one_hot(heads, n).float() * present[..., None]


def _take(x: Tensor, position: Tensor) -> Tensor:
    """The vectors at these positions, `(batch, n)`."""
    return x.gather(1, position[..., None].expand(-1, -1, x.shape[-1]))
