"""Tensors to NumPy and back, and what laying out takes of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["TorchSpace", "as_numpy", "compute_dtype", "match", "to_cpu", "value_dtype", "wrap"]


class TorchSpace:
    """Torch, as laying out takes it."""

    zeros = staticmethod(torch.zeros)

    @staticmethod
    def ones(shape: tuple[int, ...]) -> Tensor:
        """A boolean tensor, all True."""
        return torch.ones(shape, dtype=torch.bool)

    @staticmethod
    def joined(columns: list[Tensor]) -> Tensor:
        """Matrices side by side."""
        return torch.cat(columns, 1)

    @staticmethod
    def spread(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Broadcast to a shape."""
        return tensor.expand(shape)

    @staticmethod
    def total(tensor: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
        """Summed over some axes."""
        return tensor.sum(axes, keepdim=keep)


def compute_dtype(graph: FactorGraph) -> torch.dtype:
    """float64 if any scores are, else float32; integers count as the default dtype."""
    for given in [t.scores for t in graph._tensors] + [p.given for p in graph._score_parts()]:
        if isinstance(given, Tensor) and value_dtype(given) == torch.float64:
            return torch.float64
    return torch.float32


def value_dtype(scores: Tensor) -> torch.dtype:
    """That of the marginals of such scores."""
    return scores.dtype if scores.is_floating_point() else torch.get_default_dtype()


def to_cpu(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """On the CPU, in this dtype."""
    if scores.dtype == dtype and scores.is_cpu:
        return scores
    return scores.to("cpu", dtype)


def as_numpy(tensor: Tensor) -> Any:
    """The memory of a CPU tensor, without its history."""
    return tensor.detach().numpy()


def match(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The value on the caller's device and in the caller's dtype."""
    if value.dtype == dtype and value.device == device:
        return value
    return value.to(device, dtype)


def wrap(kind: tuple[torch.device, torch.dtype], array: Any) -> Tensor:
    """From NumPy to a tensor on the device; real numbers in the dtype."""
    tensor = torch.as_tensor(np.asarray(array), device=kind[0])
    return tensor.to(kind[1]) if tensor.is_floating_point() else tensor
