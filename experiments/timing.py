"""How long a training step spends in the structured layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["LayerClock"]


class LayerClock:
    """Calls a layer and adds up the seconds of its forward and of its backward.

    The backward is timed between two marks in the graph of operations, one behind the layer and one
    in front of it. So what autograd does in between for other branches counts too; the share is an
    upper bound. On a CUDA device the clock waits for all that was queued before it is read.

    Example:
        >>> clock = LayerClock()
        >>> x = torch.ones(3, requires_grad=True)
        >>> clock(torch.softmax, x, dim=0).max().backward()
        >>> clock.take() > 0, clock.take()
        (True, 0.0)
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._backward_since: float | None = None

    def __call__(self, layer: Callable[..., Tensor], scores: Tensor, **kwargs: Any) -> Tensor:
        """`layer(scores, **kwargs)`, timed."""
        marked = _Mark.apply(scores, self._end_of_backward)
        start = _now(scores.device)
        result = layer(marked, **kwargs)
        self._seconds += _now(scores.device) - start
        return _Mark.apply(result, self._start_of_backward)

    def take(self) -> float:
        """The seconds since the last call of `take`."""
        seconds, self._seconds = self._seconds, 0.0
        self._backward_since = None
        return seconds

    def _start_of_backward(self, device: torch.device) -> None:
        self._backward_since = _now(device)

    def _end_of_backward(self, device: torch.device) -> None:
        if self._backward_since is not None:
            self._seconds += _now(device) - self._backward_since
            self._backward_since = None


def _now(device: torch.device) -> float:
    """The time when the device has done what it was given so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _Mark(torch.autograd.Function):
    """The identity; tells when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Callable[[torch.device], None]) -> Tensor:
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.passed(grads[0].device)
        return grads[0], None
