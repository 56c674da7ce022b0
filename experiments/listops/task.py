"""The ListOps experiment for the training loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from experiments.listops.data import VALENCIES, Batch, Expressions, Splits
from experiments.listops.model import Tagger
from experiments.task import Task
from experiments.timing import LayerClock

__all__ = ["ListOps", "accuracy_and_f1"]

#: Batches mix all lengths up to this one: those of one length have nearly all the same tag.
SHORT = 16
#: Beyond it, they mix lengths that differ by this factor.
SPREAD = 1.2
EVALUATION_BATCH = 256
#: The length of the expression whose tree is shown.
SHOWN = 15


class ListOps(Task):
    """Trains a `Tagger` on the operators of expressions.

    Args:
        splits: the expressions.
        model: the name of the model.
        batch_size: expressions in a batch.
        limit: use only this many training expressions.
        **settings: passed to `Tagger`.
    """

    name: ClassVar[str] = "listops"
    monitor: ClassVar[str] = "f1"
    model: Tagger

    def __init__(
        self,
        splits: Splits,
        model: str,
        *,
        batch_size: int = 64,
        limit: int | None = None,
        **settings: Any,
    ) -> None:
        self._train = splits.train if limit is None else splits.train.part(slice(limit))
        self._held_out = {"valid": splits.valid, "test": splits.test}
        self._batch_size = batch_size
        self.model = Tagger(model, **settings)
        self.clock = LayerClock()

    def batches(self, rng: np.random.Generator) -> Sequence[Tensor]:
        """Numbers of expressions of similar length, for each batch."""
        lengths = self._train.lengths.numpy().clip(min=SHORT)
        order = torch.from_numpy(np.argsort(lengths * rng.uniform(1, SPREAD, len(lengths))))
        batches = order.split(self._batch_size)
        return [batches[i] for i in rng.permutation(len(batches))]

    def loss(self, batch: Tensor) -> Tensor:
        """The mean cross-entropy of the operators' tags.

        The mean over the batch, so that short expressions, which come in batches with few
        operators, count for more. Training starts with them, and is far slower if every operator
        counts the same.
        """
        expressions = self._train.batch(batch).to(self.device)
        operators, tags = _tags(expressions)
        scores = self.model(expressions, self.clock)[operators]
        # Written out because a small batch may hold no operator at all.
        return functional.cross_entropy(scores, tags, reduction="sum") / max(len(tags), 1)

    def evaluate(self, split: str) -> dict[str, float]:
        """Accuracy and F1 over the operators."""
        size = len(VALENCIES)
        confusion = torch.zeros(size * size, dtype=torch.long)
        for expressions in _by_length(self._held_out[split]):
            batch = expressions.to(self.device)
            operators, tags = _tags(batch)
            found = self.model(batch)[operators].argmax(dim=-1)
            confusion += torch.bincount(tags * size + found, minlength=size * size).cpu()
        return accuracy_and_f1(confusion.reshape(size, size))

    def exhibits(self) -> dict[str, Any]:
        """The marginals of one expression of the test set, and its gold heads."""
        test = self._held_out["test"]
        nearest = (test.lengths - SHOWN).abs().argmin()
        batch = test.batch(nearest[None]).to(self.device)
        return {
            "tokens": batch.words()[0],
            "heads": batch.heads[0].tolist(),
            "arcs": self.model.arcs(batch)[0].round(decimals=3).tolist(),
        }


def accuracy_and_f1(confusion: Tensor) -> dict[str, float]:
    """Accuracy, and the mean F1 of the tags, in percent.

    Args:
        confusion: how often a tag (row) was taken for another (column).
    """
    right = confusion.diagonal().double()
    either = confusion.sum(dim=0) + confusion.sum(dim=1)
    f1 = 2 * right / either.clamp(min=1)  # 0 for a tag that is nowhere
    accuracy = right.sum() / confusion.sum().clamp(min=1)
    return {"accuracy": 100 * float(accuracy), "f1": 100 * float(f1.mean())}


def _tags(batch: Batch) -> tuple[Tensor, Tensor]:
    """Which tokens are operators, `(batch, n)`, and the tags of those, in a row."""
    operators = batch.valency > 0
    return operators, batch.valency[operators] - VALENCIES[0]


def _by_length(expressions: Expressions) -> Iterator[Batch]:
    for index in expressions.lengths.argsort().split(EVALUATION_BATCH):
        yield expressions.batch(index)
