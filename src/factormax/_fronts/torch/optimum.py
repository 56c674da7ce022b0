"""The optimal value of a solve, whose gradient is the solution itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Optimum"]


class Optimum(torch.autograd.Function):
    """An optimal value that is known, as a function of the scores it came from.

    By Danskin's theorem its gradient is the solution. That is handed on with its history, so that
    derivatives of any order are right, in reverse and in forward mode.

    Args (of `apply`):
        value: `(*batch,)`, the number itself.
        temperature: broadcastable to the batch, or None.
        *terms: the scores, `(*batch, *shape)` or shared by the instances, and then, for each of
            them, their marginals, `(*batch, *shape)`.
    """

    generate_vmap_rule = True

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
        ctx.save_for_forward(*kept)
        ctx.cooled = temperature is not None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The marginals, times the gradient."""
        (weight,) = grads
        scores, marginals, temperature = _split(ctx)
        found = [
            (_beside(weight if temperature is None else weight / temperature, m) * m)
            .sum_to_size(s.shape)
            .to(s.dtype)
            for s, m in zip(scores, marginals, strict=True)
        ]
        of_temperature = None
        if temperature is not None:
            inner = -weight * _inner(scores, marginals, weight) / temperature**2
            of_temperature = inner.sum_to_size(temperature.shape).to(temperature.dtype)
        return None, of_temperature, *found, *[None] * len(marginals)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """How the value moves with the scores."""
        value, of_temperature, *moved = tangents
        scores, marginals, temperature = _split(ctx)
        pairs = zip(scores, moved[: len(scores)], strict=True)
        moves = [torch.zeros_like(s) if t is None else t for s, t in pairs]
        found = _inner(moves, marginals, value)
        if temperature is not None:
            found = found / temperature
            if of_temperature is not None:
                found = found - _inner(scores, marginals, value) * of_temperature / temperature**2
        return found.to(value.dtype)


def _split(ctx: Any) -> tuple[tuple[Tensor, ...], list[Tensor], Tensor | None]:
    """The scores, their marginals (0 where there is no solution), and the temperature."""
    kept = ctx.saved_tensors
    temperature = kept[-1] if ctx.cooled else None
    count = len(kept) // 2
    return kept[:count], [torch.nan_to_num(m) for m in kept[count : 2 * count]], temperature


def _beside(weight: Tensor, marginals: Tensor) -> Tensor:
    """One number for each instance, to be multiplied with its marginals."""
    shape = (*weight.shape, *[1] * (marginals.ndim - weight.ndim))
    return weight.to(marginals.device, marginals.dtype).reshape(shape)


def _inner(scores: Any, marginals: list[Tensor], like: Tensor) -> Tensor:
    """The scores times their marginals, summed for each instance; those of -inf do not count."""
    total = torch.zeros_like(like)
    for s, m in zip(scores, marginals, strict=True):
        terms = torch.where(s.isfinite(), s, 0).to(m.dtype) * m
        axes = tuple(range(like.ndim, terms.ndim))
        total = total + (terms.sum(axes) if axes else terms).to(like.device, like.dtype)
    return total
