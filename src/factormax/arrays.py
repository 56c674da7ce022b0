"""Functions for NumPy, torch and JAX arrays alike, without importing torch or JAX."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import jax
    import torch
    from typing_extensions import TypeVar

    #: The array type of the scores' library; a plain `Variable` leaves it open.
    ArrayT = TypeVar("ArrayT", default=Any)
else:
    from typing import TypeVar

    ArrayT = TypeVar("ArrayT")  # only type checkers need the default, which needs Python 3.13

__all__ = [
    "Array",
    "ArrayLike",
    "ArrayT",
    "FloatArray",
    "IndexArray",
    "grad_mode_keeper",
    "is_hidden",
    "is_jax",
    "is_real",
    "is_tensor",
    "is_tracer",
    "is_tracing",
    "library_of",
    "may_be_traced",
    "to_numpy",
]

Array: TypeAlias = "npt.NDArray[Any] | torch.Tensor | jax.Array"
ArrayLike: TypeAlias = "npt.ArrayLike | torch.Tensor | jax.Array"
FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
IndexArray: TypeAlias = npt.NDArray[np.int64]


def is_tensor(value: object) -> bool:
    """Whether `value` is a torch tensor; never imports torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_jax(value: object) -> bool:
    """Whether `value` is a JAX array, concrete or traced; never imports JAX."""
    jax = sys.modules.get("jax")
    if jax is None or is_tracing():  # torch's compiler can't trace JAX
        return False
    return hasattr(jax, "Array") and isinstance(value, jax.Array)


def is_tracer(value: object) -> bool:
    """Whether `value` is a JAX array that a transformation traces, so it has no numbers yet."""
    return is_jax(value) and isinstance(value, sys.modules["jax"].core.Tracer)


def library_of(value: object) -> str:
    """What messages call the library of an array."""
    if is_tensor(value):
        return "torch tensors"
    return "JAX arrays" if is_jax(value) else "NumPy arrays"


def is_real(dtype: Any) -> bool:
    """Whether a NumPy or JAX dtype holds real numbers; JAX has floats that NumPy lacks."""
    return dtype.kind in "fiub" or "float" in dtype.name


def is_tracing() -> bool:
    """Whether `torch.compile` is tracing; if so, there are no numbers to check."""
    return "torch._dynamo" in sys.modules and sys.modules["torch"].compiler.is_compiling()


def is_hidden(*values: Any) -> bool:
    """Whether the numbers of any of these can't be read.

    That is so while `torch.compile` is tracing, for tensors inside a transform of `torch.func` such
    as `vmap`, and for arrays that JAX traces.
    """
    if is_tracing() or any([is_tracer(v) for v in values]):
        return True
    torch = sys.modules.get("torch")
    if torch is None or not torch._C._are_functorch_transforms_active():
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any([isinstance(v, torch.Tensor) and wrapped(v) for v in values])


def may_be_traced() -> bool:
    """Whether torch's compiler is in use at all: it may trace any function that is called."""
    return "torch._dynamo" in sys.modules


def grad_mode_keeper() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes functions run in torch's current grad mode, whatever thread calls them."""
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
        torch = sys.modules["torch"]
        if not is_tracing() and torch._C._are_functorch_transforms_active():
            with torch._C._DisableFuncTorch():  # a transform would wrap even plain tensors
                return _numbers_of_tensor(value)
        return _numbers_of_tensor(value)
    return np.asarray(value)


def _numbers_of_tensor(tensor: Any) -> npt.NDArray[Any]:
    plain = tensor.detach().cpu()
    if plain.dtype == sys.modules["torch"].bfloat16:  # NumPy has none
        plain = plain.float()
    return np.asarray(plain.numpy())
