"""The multilabel experiment for the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from experiments.multilabel.data import Dataset
from experiments.multilabel.metrics import best_threshold, example_f1
from experiments.multilabel.model import Labeller
from experiments.task import Task
from experiments.timing import LayerClock

__all__ = ["Multilabel"]


class Multilabel(Task):
    """Trains a `Labeller`; part of the training set is held out to choose epoch and threshold.

    Args:
        data: train and test.
        model: the name of the model.
        batch_size: examples in a batch.
        validation: the fraction of the training set that is held out, the same examples for all
            seeds. 0: nothing is, and the last epoch counts.
        threshold: the least confidence; None: the best on validation, after each epoch anew.
        limit: use only this many training examples (before any are held out).
        **settings: passed to `Labeller`.
    """

    name: ClassVar[str] = "multilabel"
    monitor: ClassVar[str] = "f1"
    model: Labeller

    def __init__(
        self,
        data: Dataset,
        model: str,
        *,
        batch_size: int = 32,
        validation: float = 0.1,
        threshold: float | None = None,
        limit: int | None = None,
        **settings: Any,
    ) -> None:
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(data.X_train))[:limit])
        held_out = round(validation * len(order))
        parts = {"valid": order[:held_out], "train": order[held_out:]}
        x, y = torch.from_numpy(data.X_train), torch.from_numpy(data.Y_train)
        self._splits = {split: (x[index], y[index]) for split, index in parts.items()}
        self._splits["test"] = torch.from_numpy(data.X_test), torch.from_numpy(data.Y_test)
        self._batch_size = batch_size
        self._tune = threshold is None and held_out > 0
        self.model = Labeller(x.shape[1], y.shape[1], model, **settings)
        if threshold is not None:
            self.model.threshold.fill_(threshold)
        self.clock = LayerClock()

    def batches(self, rng: np.random.Generator) -> Sequence[Tensor]:
        """Which examples are in each batch."""
        order = torch.from_numpy(rng.permutation(len(self._splits["train"][0])))
        return order.split(self._batch_size)

    def loss(self, batch: Tensor) -> Tensor:
        """The mean loss of the examples."""
        x, y = self._splits["train"]
        return self.model.loss(x[batch].to(self.device), y[batch].to(self.device), self.clock)

    def evaluate(self, split: str) -> dict[str, float]:
        """Example F1 with the threshold, which validation sets, and with ½ in its place."""
        x, y = (part.to(self.device) for part in self._splits[split])
        if not len(x):
            return {}
        confidence = self.model.confidence(x)
        if split == "valid" and self._tune:
            self.model.threshold.fill_(best_threshold(confidence, y))
        return {
            "f1": example_f1(confidence > self.model.threshold, y),
            "f1 at ½": example_f1(confidence > 0.5, y),
        }

    def observe(self) -> dict[str, float]:
        """The threshold, and the greatest scores of pairs, for and against."""
        observed = {"threshold": round(float(self.model.threshold), 4)}
        if self.model.mrf is not None and self.model.mrf.weight.numel():
            weight = self.model.mrf.weight.detach()
            observed |= {"least pair": float(weight.min()), "greatest pair": float(weight.max())}
        return observed
