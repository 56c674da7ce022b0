"""What is done alike to NumPy arrays and torch tensors, without importing torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
    "grad_mode_keeper",
    "is_hidden",
    "is_tensor",
    "is_tracing",
    "may_be_traced",
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
    return "torch._dynamo" in sys.modules and sys.modules["torch"].compiler.is_compiling()


def is_hidden(*values: Any) -> bool:
    """Whether numbers among these can't be looked at.

    That is so while `torch.compile` is tracing, and for the tensors that a transform of
    `torch.func`, such as `vmap`, calls a function with.
    """
    if is_tracing():
        return True
    torch = sys.modules.get("torch")
    if torch is None or not torch._C._are_functorch_transforms_active():
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any([isinstance(v, torch.Tensor) and wrapped(v) for v in values])


def may_be_traced() -> bool:
    """Whether torch's compiler is in use at all: it may look into any function that is called."""
    return "torch._dynamo" in sys.modules


def grad_mode_keeper() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes functions run in torch's grad mode of here and now, from whatever thread."""
    torch = sys.modules.get("torch")
    if torch is None:
        return lambda function: function
    enabled = torch.is_grad_enabled()

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if torch.is_grad_enabled() == enabled:
                return function(*args)
            with torch.set_grad_enabled(enabled):
                return function(*args)

        return call

    return keep


def to_numpy(value: Any) -> npt.NDArray[Any]:
    """The numbers of a parameter that takes no gradient, as a NumPy array."""
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    return np.asarray(value)
