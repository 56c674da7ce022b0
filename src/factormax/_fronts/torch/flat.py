"""From the tensors of a graph to flat ones, and from flat answers to a solution.

All of it is ordinary torch, which torch transforms and compiles itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from factormax._fronts.torch.arrays import compute_dtype, match, put, space_of
from factormax._layout import Layout
from factormax._options import Options
from factormax.errors import ShapeError
from factormax.solution import Details, Solution

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = [
    "FlatNumbers",
    "cooled",
    "first_tensor",
    "flat_numbers",
    "flat_target",
    "set_answer",
]


class FlatNumbers(NamedTuple):
    """The numbers of a graph on a device, in a row per instance.

    Attributes:
        eta_u: `(B, n)`, the scores of variables.
        eta_v: `(1 | B, P)`, the scores of factors, or those of `Columns.own`, `(B, P − S)`.
        shared, heat: the rest of `Columns`, `(1, S)` and `(B, 1)`, or None.
        mask: `(B, n)`, or None.
    """

    eta_u: Tensor
    eta_v: Tensor
    shared: Tensor | None
    heat: Tensor | None
    mask: Tensor | None


def flat_target(
    graph: FactorGraph, what: str, targets: Any, place: Any = "cpu", dtype: Any = torch.float64
) -> Tensor:
    """The targets laid out flat, `(B, n)`; 0 where a variable has none."""
    shape = graph._known_batch_shape()
    rows = math.prod(shape)
    index = [u.index.reshape(-1) for u in targets]
    columns = []
    for u, target in targets.items():
        tensor = torch.as_tensor(target).detach().to(place, dtype)
        try:
            full = tensor.expand((*shape, *u.shape))
        except RuntimeError:
            raise ShapeError(
                f"loss: {what} of {u.name} must have shape {(*shape, *u.shape)}, got "
                f"{tuple(tensor.shape)}."
            ) from None
        columns.append(full.reshape(rows, u.size))
    given = np.bincount(np.concatenate(index), minlength=graph._num_variables)
    missing = np.flatnonzero(given == 0)
    if len(missing):
        columns.append(torch.zeros((rows, len(missing)), dtype=dtype, device=place))
    values = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
    laid_out = np.concatenate([*index, missing])
    if (np.diff(laid_out) < 0).any():
        values = values[:, torch.from_numpy(np.argsort(laid_out)).to(place)]
    return values


def flat_numbers(
    graph: FactorGraph, layout: Layout, temperature: Any, place: torch.device
) -> FlatNumbers:
    """The numbers of a graph on a device; a temperature divides all scores but `shared`."""
    parts, space = graph._score_parts(), space_of(place)
    dtype = compute_dtype([t.scores for t in graph._tensors] + [p.given for p in parts])
    scores = [None if t.scores is None else put(t.scores, place, dtype) for t in graph._tensors]
    own = [put(torch.as_tensor(p.given), place, dtype) for p in parts]
    mask = None
    if graph._masked:
        masks = [
            None if t.mask is None else torch.as_tensor(t.mask).to(place) for t in graph._tensors
        ]
        mask = layout.flat_mask(space, masks)
    eta_u = layout.flat_scores(space, scores, dtype)
    eta_v, shared = layout.factor_blocks(space, own, dtype)
    if temperature is None:
        return FlatNumbers(eta_u, eta_v, shared, None, mask)
    given = put(torch.as_tensor(temperature), place, dtype)
    heat = torch.where(given > 0, given, torch.nan)  # the solve reports NaN
    return FlatNumbers(*layout.cooled(space, eta_u, eta_v, shared, heat, cooled), mask)


def cooled(scores: Tensor, temperature: Tensor) -> Tensor:
    """Scores divided by a temperature that may require a gradient; −inf stays −inf."""
    quotient = (scores / temperature).detach()
    finite = quotient.isfinite()
    # Infinite scores must not reach the gradient of the temperature: 0 times inf is NaN.
    return torch.where(finite, torch.where(finite, scores, 0) / temperature, quotient)


def set_answer(
    graph: FactorGraph,
    layout: Layout,
    mu: Tensor,
    mu_v: Tensor,
    objective: Tensor,
    tau: Tensor,
    report: Tensor,
    options: Options,
    structures: list[Any],
    engine: str,
) -> Solution:
    """Stores the values of variables and factors, given flat, and returns the solution."""
    first, space = first_tensor(graph), space_of(mu_v.device)
    values = [
        match(value, first if t.scores is None else t.scores)
        for value, t in zip(layout.by_tensor(mu), graph._tensors, strict=True)
    ]
    factor_values = [
        match(own, part.given if isinstance(part.given, Tensor) else first)
        for own, part in zip(layout.by_part(space, mu_v), graph._score_parts(), strict=True)
    ]
    graph._set_answer(values, factor_values, structures)
    details = Details(
        status=report[3].to(torch.int32),
        iterations=report[2].to(torch.int32),
        oracle_calls=report[4].to(torch.int32),
        primal_residual=report[0].detach(),
        dual_residual=report[1].detach(),
        tau=tau.detach(),
        engine=engine,
        upper_bound=report[5].detach() if len(report) > 5 else None,
        integral=report[6] > 0 if len(report) > 6 else None,
    )
    shape = layout.batch_shape
    return Solution(match(objective.reshape(shape), first), details, shape, options.query)


def first_tensor(graph: FactorGraph) -> Tensor:
    """The first scores that are a tensor."""
    given = [t.scores for t in graph._tensors] + [p.given for p in graph._score_parts()]
    return next(s for s in given if isinstance(s, Tensor))
