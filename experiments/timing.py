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
    upper bound. A layer on a GPU is measured only as far as it waits for its result, which every
    factormax layer does.

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
        start = time.perf_counter()
        result = layer(marked, **kwargs)
        self._seconds += time.perf_counter() - start
        return _Mark.apply(result, self._start_of_backward)

    def take(self) -> float:
        """The seconds since the last call of `take`."""
        seconds, self._seconds = self._seconds, 0.0
        self._backward_since = None
        return seconds

    def _start_of_backward(self) -> None:
        self._backward_since = time.perf_counter()

    def _end_of_backward(self) -> None:
        if self._backward_since is not None:
            self._seconds += time.perf_counter() - self._backward_since
            self._backward_since = None


class _Mark(torch.autograd.Function):
    """The identity; tells when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Callable[[], None]) -> Tensor:
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.passed()
        return grads[0], None
