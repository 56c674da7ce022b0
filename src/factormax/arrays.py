"""What is done alike to NumPy arrays and torch tensors, without importing torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = [
    "Array",
    "ArrayLike",
    "FloatArray",
    "IndexArray",
    "is_tensor",
    "is_tracing",
    "spread",
    "to_numpy",
]

Array: TypeAlias = "npt.NDArray[Any] | torch.Tensor"
ArrayLike: TypeAlias = "npt.ArrayLike | torch.Tensor"
FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
IndexArray: TypeAlias = npt.NDArray[np.int64]


def is_tensor(value: object) -> bool:
    """Whether `value` is a torch tensor; never imports torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_tracing() -> bool:
    """Whether `torch.compile` is tracing: then numbers are not there to be checked."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def spread(array: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A copy, broadcast to the shape; for small arrays faster than NumPy's view."""
    out = np.empty(shape, array.dtype)
    out[...] = array
    return out


def to_numpy(value: Any) -> npt.NDArray[Any]:
    """The numbers of a parameter that takes no gradient, as a NumPy array."""
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    return np.asarray(value)
