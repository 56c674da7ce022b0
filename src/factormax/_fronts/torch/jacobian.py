"""The derivative of a solve as a separate operation, which can be differentiated and batched.

Marginals are piecewise linear in the scores, and their Jacobian J is symmetric. So applying J is
the vector–Jacobian product, the Jacobian–vector product, and its own derivative. The probabilities
of structures have a Jacobian A that is not symmetric; there, A and its transpose swap roles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from factormax._options import Options

__all__ = ["Applied", "by_instance", "merged", "require_linear"]

_TRANSPOSED = {"jacobian": "jacobian", "probs": "probs_back", "probs_back": "probs"}


class Applied(torch.autograd.Function):
    """A Jacobian of a solve, applied to vectors.

    Args (of `apply`):
        plan: the plan that holds the solve, as `task`.
        which: "jacobian" (from scores to marginals, and back), "probs" (from scores to the
            probabilities of each structured factor), or "probs_back" (its transpose).
        place: `(N,)`, the instance of the solve that each row belongs to.
        *vectors: `(N, ...)`, what the Jacobian is applied to.
    """

    @staticmethod
    def forward(plan: Any, which: str, place: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        """The product, `(N, ...)` for each result."""
        if which == "jacobian" and plan.task.applies_there:
            return plan.task.applied_there(place, *vectors)  # type: ignore[no-any-return]
        host = plan.task.host
        dtype = host.raw.mu.dtype
        numbers = [v.numpy(force=True).astype(dtype, copy=False) for v in vectors]
        found = host.applied(which, place.cpu().numpy(), numbers)
        return tuple([torch.from_numpy(f).to(place.device, vectors[0].dtype) for f in found])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Remembers which Jacobian it is."""
        ctx.plan, ctx.which, place, *_ = inputs
        ctx.save_for_backward(place)
        ctx.save_for_forward(place)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The transpose applied to the gradients."""
        (place,) = ctx.saved_tensors
        require_linear(ctx.plan.options)
        apply: Any = Applied.apply
        return None, None, None, *apply(ctx.plan, _TRANSPOSED[ctx.which], place, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The same Jacobian applied to the tangents."""
        (place,) = ctx.saved_tensors
        require_linear(ctx.plan.options)
        apply: Any = Applied.apply
        return apply(ctx.plan, ctx.which, place, *tangents[3:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, plan: Any, which: str, *tensors: Tensor) -> Any:
        """Puts the rows of all samples one after another."""
        apply: Any = Applied.apply
        found = apply(plan, which, *merged(info, in_dims[2:], tensors))
        return by_instance(info, found)


def require_linear(options: Options) -> None:
    """Raises unless the gradient is linear in the incoming gradient."""
    if options.surrogate == "spigot":
        raise RuntimeError(
            'factormax: the gradient of surrogate="spigot" can\'t be differentiated, nor used in '
            "forward mode."
        )


def merged(info: Any, in_dims: Any, tensors: Any) -> list[Any]:
    """From `(N, ...)` with another axis of V samples somewhere, or nowhere, to `(V * N, ...)`."""
    found: list[Any] = []
    for tensor, dim in zip(tensors, in_dims, strict=True):
        if not isinstance(tensor, Tensor):
            found.append(tensor)
            continue
        if dim is None:
            full = tensor.expand(info.batch_size, *tensor.shape)
        else:
            full = tensor.movedim(dim, 0)
        # A stride of 0 is kept, so that what all samples share is not copied.
        found.append(full.reshape(full.shape[0] * full.shape[1], *full.shape[2:]))
    return found


def by_instance(info: Any, found: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """From `(V * N, ...)` to `(V, N, ...)`, and where V is then."""
    size = info.batch_size
    split = tuple([t.reshape(size, t.shape[0] // max(size, 1), *t.shape[1:]) for t in found])
    return split, (0,) * len(split)
