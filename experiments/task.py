"""What the training loop asks of an experiment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from experiments.timing import LayerClock

__all__ = ["Task"]


class Task(ABC):
    """A model with its data: batches to train on, a loss, and what to measure.

    The model is built by the subclass's `__init__`, after the seed has been set, on the CPU: so it
    starts from the same weights wherever it is trained. `loss`, `evaluate` and `exhibits` take
    their batches to `device`.
    """

    name: ClassVar[str]
    #: The metric of `evaluate("valid")` by which the best epoch is chosen; higher is better.
    monitor: ClassVar[str]

    model: nn.Module
    clock: LayerClock
    device: torch.device = torch.device("cpu")

    def to(self, device: torch.device | str) -> None:
        """Moves the model, and from now on the batches, to this device."""
        self.device = torch.device(device)
        self.model.to(self.device)

    @abstractmethod
    def batches(self, rng: np.random.Generator) -> Sequence[Any]:
        """One epoch of training batches, in an order drawn from `rng`."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch, a scalar."""

    @abstractmethod
    def evaluate(self, split: str) -> dict[str, float]:
        """Metrics on "valid" or "test", in percent. Empty for a split that does not exist.

        Called in eval mode, without gradients.
        """

    def parameters(self) -> Iterable[Any]:
        """Parameters, or groups of them, for the optimiser."""
        return self.model.parameters()

    def observe(self) -> dict[str, float]:
        """Numbers worth a place in the log after every epoch, such as a learned score."""
        return {}

    def exhibits(self) -> dict[str, Any]:
        """What the report shows of the best model, fit for JSON. Called like `evaluate`."""
        return {}
