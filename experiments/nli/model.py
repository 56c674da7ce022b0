"""Decomposable attention (Parikh et al., 2016), with softmax or a structured layer to attend."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import factormax.nn as fnn
from experiments.nli.data import LABELS, Batch
from experiments.timing import LayerClock

__all__ = ["ATTENTIONS", "DecomposableAttention", "JointAttention", "SoftmaxAttention"]

#: The structured layers, made for a tolerance; None for softmax.
ATTENTIONS: dict[str, Callable[[float], fnn.StructuredLayer] | None] = {
    "softmax": None,
    "matching": lambda tol: fnn.Matching("coarse", tol=tol),
    "lp-matching": lambda tol: fnn.Matching("lp", tol=tol),
    "lp-sequential": lambda tol: fnn.SequentialAlignment(tol=tol),
}

Lengths = tuple[Tensor, Tensor]


class SoftmaxAttention(nn.Module):
    """Every word attends for itself: a softmax over each row, and one over each column."""

    def forward(self, scores: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor]:
        """Weights `(batch, m, n)`: of the columns for each row, and of the rows for each column."""
        rows = _present(lengths[0], scores.shape[1])[:, :, None]
        columns = _present(lengths[1], scores.shape[2])[:, None, :]
        to_columns = scores.masked_fill(~columns, -torch.inf).softmax(dim=2) * rows
        to_rows = scores.masked_fill(~rows, -torch.inf).softmax(dim=1) * columns
        return to_columns, to_rows


class JointAttention(nn.Module):
    """One alignment for both directions.

    Every word of the shorter side is aligned with one word in all. The paper, which stops its
    solver after ten iterations, rescales to make this so; here the solver converges, and the sums
    are 1 as they are. A word of the longer side may be aligned with less, and its context is then
    as much smaller: 0 for a word that is left over. (With all contexts scaled to a sum of 1,
    LP-matching was far behind on SNLI after six epochs: 57 % in place of 68 %, with one seed.)

    Args:
        layer: scores to marginals.
        clock: times the layer.
    """

    def __init__(self, layer: fnn.StructuredLayer, clock: LayerClock) -> None:
        super().__init__()
        self.layer = layer
        self.clock = clock

    def forward(self, scores: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor]:
        """Weights `(batch, m, n)`, the same for rows and columns."""
        mu = self.clock(self.layer, scores, lengths=lengths)
        return mu, mu


class DecomposableAttention(nn.Module):
    """Attend, compare, aggregate: three classes from two sentences, without intra-attention.

    Weights start as Glorot's and biases at 0, as in DyNet, which the paper used.

    Args:
        vectors: one per word, `(words, size)`; they stay as they are, and a projection is learned.
        attention: scores and lengths to weights in both directions.
        hidden: the size of all hidden layers.
        dropout: in the networks that compare and aggregate, between their two layers.
        temperature: what the scores are divided by.
    """

    vectors: Tensor

    def __init__(
        self,
        vectors: Tensor,
        attention: nn.Module,
        *,
        hidden: int = 100,
        dropout: float = 0.33,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.register_buffer("vectors", vectors, persistent=False)
        self.attention = attention
        self.temperature = temperature
        self.project = nn.Linear(vectors.shape[1], hidden)
        self.score = _two_layers(hidden, hidden, 0.0)
        self.compare = _two_layers(2 * hidden, hidden, dropout)
        self.aggregate = _two_layers(2 * hidden, hidden, dropout)
        self.output = nn.Linear(hidden, len(LABELS))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, batch: Batch) -> Tensor:
        """Scores of the labels, `(batch, 3)`."""
        words, sizes, lengths = self._project(batch)
        to_hypothesis, to_premise = self._attend(words, sizes, lengths)
        premise, hypothesis = words.split(sizes, dim=1)
        # Both sentences side by side: one product of matrices in place of two.
        context = torch.cat([to_hypothesis @ hypothesis, to_premise.mT @ premise], dim=1)
        compared = self.compare(torch.cat([words, context], dim=2))
        present = [_present(count, size) for count, size in zip(lengths, sizes, strict=True)]
        # Sums over the words that are there, each as a product with a row of ones and zeros.
        sums = [
            (there[:, None].to(part.dtype) @ part).squeeze(1)
            for there, part in zip(present, compared.split(sizes, dim=1), strict=True)
        ]
        return self.output(self.aggregate(torch.cat(sums, dim=1)))

    def attend(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Attention weights `(batch, m, n)`, for each word of the premise and of the hypothesis."""
        return self._attend(*self._project(batch))

    def _project(self, batch: Batch) -> tuple[Tensor, list[int], Lengths]:
        """Words of the premise and then of the hypothesis, how many, and how many are there."""
        words = self.vectors[torch.cat([batch.premise, batch.hypothesis], dim=1)]
        sizes = [batch.premise.shape[1], batch.hypothesis.shape[1]]
        return self.project(words), sizes, (batch.premise_lengths, batch.hypothesis_lengths)

    def _attend(self, words: Tensor, sizes: list[int], lengths: Lengths) -> tuple[Tensor, Tensor]:
        premise, hypothesis = self.score(words).split(sizes, dim=1)
        scores = premise @ hypothesis.mT
        weights: tuple[Tensor, Tensor] = self.attention(scores / self.temperature, lengths)
        return weights


class _Dropout(nn.Module):
    """Dropout like torch's, from 16 random bits an entry: on a CPU several times as fast."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device)
        bits = draws.random_(-(2**63), None).view(torch.int16)[: x.numel()].view(x.shape)
        keep = bits >= round(self.p * 2**16) - 2**15
        return x * keep.to(x.dtype).mul_(1 / (1 - self.p))


def _two_layers(inputs: int, hidden: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        _Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
    )


def _present(lengths: Tensor, size: int) -> Tensor:
    """Which positions are there, `(batch, size)`."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]
