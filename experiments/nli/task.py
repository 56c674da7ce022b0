"""The NLI task: decomposable attention on SNLI, MultiNLI, or pairs made up for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.nli.data import LABELS, Batch, Corpus
from experiments.nli.model import (
    ATTENTIONS,
    DecomposableAttention,
    JointAttention,
    SoftmaxAttention,
)
from experiments.task import Task
from experiments.timing import LayerClock

__all__ = ["NLITask"]

EVAL_BATCH = 256
#: The exhibits: of each label the first pairs of the validation set with this many words per side.
EXHIBITS, FEWEST, MOST = 5, 8, 14


class NLITask(Task):
    """Which of three labels two sentences have.

    Args:
        corpus: the sentences.
        attention: a name in `ATTENTIONS`.
        batch_size: the size of training batches.
        dropout: as of the model.
        temperature: as of the model.
        tol: tolerance of the structured layer.
    """

    name: ClassVar[str] = "nli"
    monitor: ClassVar[str] = "accuracy"
    model: DecomposableAttention

    def __init__(
        self,
        corpus: Corpus,
        attention: str,
        *,
        batch_size: int = 128,
        dropout: float = 0.33,
        temperature: float = 1.0,
        tol: float = 1e-6,
    ) -> None:
        self.corpus = corpus
        self.batch_size = batch_size
        self.clock = LayerClock()
        make_layer = ATTENTIONS[attention]
        self.layer = make_layer(tol) if make_layer else None
        attend = JointAttention(self.layer, self.clock) if self.layer else SoftmaxAttention()
        self.model = DecomposableAttention(
            corpus.vectors, attend, dropout=dropout, temperature=temperature
        )
        self._held_out = {
            split: corpus.splits[split].batches(EVAL_BATCH) for split in ("valid", "test")
        }

    def batches(self, rng: np.random.Generator) -> Sequence[Batch]:
        """Batches of sentences of similar lengths."""
        return self.corpus.splits["train"].batches(self.batch_size, rng)

    def loss(self, batch: Batch) -> Tensor:
        """The cross-entropy of the labels."""
        there = batch.to(self.device)
        return F.cross_entropy(self.model(there), there.labels)

    def evaluate(self, split: str) -> dict[str, float]:
        """The accuracy, in percent."""
        right = total = 0
        for held_out in self._held_out[split]:
            batch = held_out.to(self.device)
            right += int((self.model(batch).argmax(dim=1) == batch.labels).sum())
            total += len(batch.labels)
        return {"accuracy": 100 * right / total}

    def observe(self) -> dict[str, float]:
        """The learned transition score of the sequential alignment."""
        transition = getattr(self.layer, "transition", None)
        return {} if transition is None else {"transition": float(transition.detach())}

    def exhibits(self) -> dict[str, Any]:
        """What was trained on, and the attention in some pairs of the validation set."""
        valid = self.corpus.splits["valid"]
        lengths = torch.stack([valid.premise_lengths, valid.hypothesis_lengths])
        fits = ((lengths >= FEWEST) & (lengths <= MOST)).all(dim=0)
        rows = [
            int(row)
            for label in range(len(LABELS))
            for row in (fits & (valid.labels == label)).nonzero()[:EXHIBITS, 0]
        ]
        return {"data": self.corpus.facts, "pairs": self._show(rows) if rows else []}

    def _show(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        batch = self.corpus.splits["valid"].take(torch.tensor(rows)).to(self.device)
        answers = self.model(batch).argmax(dim=1).tolist()
        both = self.model.attend(batch)
        shown = []
        for i, row in enumerate(rows):
            m, n = int(batch.premise_lengths[i]), int(batch.hypothesis_lengths[i])
            to_hypothesis, to_premise = (_rounded(weights[i, :m, :n]) for weights in both)
            pair = self.corpus.valid_pairs[row]
            shown.append(
                {
                    "premise": pair.premise[:m],
                    "hypothesis": pair.hypothesis[:n],
                    "label": LABELS[pair.label],
                    "answer": LABELS[answers[i]],
                    "to_hypothesis": to_hypothesis,
                    "to_premise": to_premise,
                }
            )
        return shown


def _rounded(weights: Tensor) -> list[list[float]]:
    return [[round(value, 3) for value in row] for row in weights.tolist()]
