"""Conversion between tensors and NumPy, and the torch functions for layouts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "DeviceSpace",
    "Kind",
    "TorchSpace",
    "as_numpy",
    "as_tensor",
    "compute_dtype",
    "device_numbers",
    "match",
    "numbers_of",
    "one_row",
    "plain_numbers_of",
    "put",
    "space_of",
]


class TorchSpace:
    """The `Space` of torch."""

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


class DeviceSpace(TorchSpace):
    """The same, with new tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self.zeros: Any = partial(torch.zeros, device=device)
        self.ones: Any = partial(torch.ones, dtype=torch.bool, device=device)


def space_of(device: torch.device) -> Any:
    """The `Space` of a device."""
    return TorchSpace if device.type == "cpu" else DeviceSpace(device)


def compute_dtype(given: Iterable[Any]) -> torch.dtype:
    """float64 if any scores are, else float32; integers count as the default dtype."""
    for scores in given:
        if isinstance(scores, Tensor) and value_dtype(scores) == torch.float64:
            return torch.float64
    return torch.float32


def value_dtype(scores: Tensor) -> torch.dtype:
    """The dtype of the marginals of these scores."""
    return scores.dtype if scores.is_floating_point() else torch.get_default_dtype()


def put(scores: Tensor, place: torch.device, dtype: torch.dtype) -> Tensor:
    """The scores on a device, in this dtype."""
    if scores.dtype == dtype and scores.device == place:
        return scores
    return scores.to(place, dtype)


def as_numpy(tensor: Tensor) -> Any:
    """The memory of a CPU tensor, or a copy of another tensor's, without its history."""
    return plain_numbers_of(tensor if tensor.is_cpu else tensor.detach().cpu())


def as_tensor(param: Any) -> Tensor:
    """The parameter as a tensor; an array is copied, as torch warns of read-only ones."""
    return param if isinstance(param, Tensor) else torch.tensor(param)


def numbers_of(tensor: Tensor, dtype: torch.dtype) -> Any:
    """The numbers of a tensor in this dtype, without its history."""
    if tensor.dtype != dtype or not tensor.is_cpu:
        tensor = tensor.to("cpu", dtype)
    return (tensor.detach() if tensor.requires_grad else tensor).numpy()


def plain_numbers_of(tensor: Tensor) -> Any:
    """The same for a tensor that is on the CPU and has the dtype already."""
    return (tensor.detach() if tensor.requires_grad else tensor).numpy()


def device_numbers(device: torch.device, dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The same on a device."""
    if tensor.dtype != dtype or tensor.device != device:
        tensor = tensor.to(device, dtype)
    return tensor.detach() if tensor.requires_grad else tensor


def match(value: Tensor, scores: Tensor) -> Tensor:
    """The value on the device of the scores, in the dtype of their marginals."""
    return value.to(scores.device, value_dtype(scores))


def one_row(tensor: Tensor) -> Tensor:
    """The same tensor, `(1, ...)` if all of its rows are in the same memory."""
    return tensor[:1] if tensor.stride(0) == 0 and len(tensor) > 1 else tensor


class Kind(NamedTuple):
    """Where the marginals of some scores go, and in which dtype."""

    device: torch.device
    dtype: torch.dtype
    is_cpu: bool
    same: bool = True  # whether the scores have this dtype (integer scores do not)

    def tensor(self, array: Any) -> Tensor:
        """An array or a tensor of real numbers as a tensor of this kind."""
        found = array if isinstance(array, Tensor) else torch.from_numpy(array)
        if found.dtype == self.dtype and found.device == self.device:
            return found
        return found.to(self.device, self.dtype)

    def wrap(self, array: Any) -> Tensor:
        """Any array as a tensor on the device; real numbers in the dtype."""
        tensor = torch.as_tensor(np.asarray(array), device=self.device)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> Kind:
        """The kind of the marginals of scores on this device, in this dtype."""
        same = dtype.is_floating_point
        value = dtype if same else torch.get_default_dtype()
        return cls(device, value, device.type == "cpu", same)
