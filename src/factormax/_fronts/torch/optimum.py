"""The optimal value of a solve, whose gradient is the solution itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Optimum", "optimum"]


class Optimum(torch.autograd.Function):
    """An optimal value that is known, as a function of the scores it came from.

    By Danskin's theorem its gradient is the solution, which is passed on with its history, so that
    derivatives of any order are right. For the transforms, use `optimum`.

    Args (of `apply`):
        value: `(*batch,)`, the number itself.
        temperature: broadcastable to the batch, or None.
        *terms: the scores, `(*batch, *shape)` or shared by the instances, and then, for each of
            them, their marginals, `(*batch, *shape)`.
    """

    @staticmethod
    def forward(value: Tensor, temperature: Tensor | None, *terms: Tensor) -> Tensor:
        """The value itself."""
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps the marginals."""
        _, temperature, *terms = inputs
        kept = terms if temperature is None else [*terms, temperature]
        ctx.save_for_backward(*kept)
        ctx.cooled = temperature is not None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The marginals times the gradient."""
        (weight,) = grads
        scores, marginals, temperature = _split(ctx)
        scale = weight if temperature is None else weight / temperature
        found = [
            _weighted(scale, m, s.shape).to(s.dtype) for s, m in zip(scores, marginals, strict=True)
        ]
        of_temperature = None
        if temperature is not None:
            inner = -weight * _inner(scores, marginals, weight) / temperature**2
            of_temperature = inner.sum_to_size(temperature.shape).to(temperature.dtype)
        return None, of_temperature, *found, *[None] * len(marginals)


def optimum(value: Tensor, *terms: Tensor) -> Tensor:
    """The same in torch's own operations, for every order of transforms; without a temperature.

    The marginals are piecewise linear in the scores, so the values at two points differ by the mean
    of their marginals times the step. A `torch.autograd.Function` would not do: torch keeps no
    outer tangents of what it saves for forward mode.
    """
    count = len(terms) // 2
    scores = [torch.where(s.isfinite(), s, 0) for s in terms[:count]]
    marginals = [torch.nan_to_num(m) for m in terms[count:]]
    ways = [s - s.detach() for s in scores]
    means = [(m + m.detach()) / 2 for m in marginals]
    return value.detach() + _inner(ways, means, value)


def _split(ctx: Any) -> tuple[tuple[Tensor, ...], list[Tensor], Tensor | None]:
    """The scores, their marginals (0 where there is no solution), and the temperature."""
    kept = ctx.saved_tensors
    temperature = kept[-1] if ctx.cooled else None
    count = len(kept) // 2
    return kept[:count], [_finite(m) for m in kept[count : 2 * count]], temperature


def _finite(marginals: Tensor) -> Tensor:
    """The marginals, 0 where there is no solution; not copied if there always is one."""
    # The sum is NaN if anything is. On a device, looking at it would take longer than a copy.
    known = marginals.is_cpu and not marginals.detach().sum().isnan()
    return marginals if known else torch.nan_to_num(marginals)


def _weighted(weight: Tensor, marginals: Tensor, shape: torch.Size) -> Tensor:
    """The marginals of each instance times its weight, summed to a shape."""
    own = marginals.shape[weight.ndim :]
    if own != shape:
        return (_beside(weight, marginals) * marginals).sum_to_size(shape)
    # All instances share the scores: without a tensor of all products.
    rows = marginals.reshape(weight.numel(), own.numel())
    scale = weight.to(marginals.device, marginals.dtype).reshape(1, -1)
    return (scale @ rows).reshape(shape)


def _beside(weight: Tensor, marginals: Tensor) -> Tensor:
    """One number per instance, in a shape to multiply its marginals with."""
    shape = (*weight.shape, *[1] * (marginals.ndim - weight.ndim))
    return weight.to(marginals.device, marginals.dtype).reshape(shape)


def _inner(scores: Any, marginals: list[Tensor], like: Tensor) -> Tensor:
    """The scores times their marginals, summed per instance; scores of -inf do not count."""
    total = torch.zeros_like(like)
    for s, m in zip(scores, marginals, strict=True):
        terms = torch.where(s.isfinite(), s, 0).to(m.dtype) * m
        axes = tuple(range(like.ndim, terms.ndim))
        total = total + (terms.sum(axes) if axes else terms).to(like.device, like.dtype)
    return total
