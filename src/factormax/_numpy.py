"""The NumPy front: arrays in, arrays out, and an explicit vector–Jacobian product."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from factormax import engine
from factormax.arrays import FloatArray
from factormax.checks import check_scores
from factormax.compiled import num_dual
from factormax.engine import Numbers, Options
from factormax.errors import GraphError, ShapeError
from factormax.factors.base import Factor
from factormax.factors.pair import Pair
from factormax.solution import Solution
from factormax.variable import Variable

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["numbers_of", "solve"]


def solve(graph: FactorGraph, options: Options, warm_start: Solution | None) -> Solution:
    """Solves a graph of NumPy scores."""
    batch_shape = graph.known_batch_shape()
    batch = math.prod(batch_shape)
    wiring = graph.wiring()
    numbers = numbers_of(graph, batch_shape)
    layout = [(t.name, t.shape) for t in graph.tensors]
    check_scores(numbers.eta_u, numbers.mask, layout, batch_shape)
    pairs = graph.pairs()
    pair_layout = graph.pair_layout()
    check_scores(numbers.eta_v, None, pair_layout, batch_shape, allow_minus_inf=False)
    warm = None
    if warm_start is not None:
        warm = graph.check_multipliers(warm_start, batch, num_dual(wiring.spec))
    raw = engine.solve(wiring, numbers, options, warm)

    values = []
    for t in graph.tensors:
        value = raw.mu[:, t.start : t.start + t.size].reshape((*batch_shape, *t.shape))
        values.append(value.astype(_value_dtype(t.scores), copy=False))
    factor_values: list[tuple[Factor, Any]] = []
    for f, part in _split(pairs, raw.mu_v):
        own = part.reshape((*batch_shape, *f.group_shape))
        factor_values.append((f, _sum_to(own, len(batch_shape), f)))
    graph.set_answer(values, factor_values)

    tensors = list(graph.tensors)

    def vjp(grads: Mapping[Variable | Factor, Any], objective: Any) -> dict[Any, Any]:
        grad_mu = np.zeros_like(raw.mu)
        grad_mu_v = np.zeros_like(raw.mu_v)
        for key, grad in grads.items():
            _collect(graph, key, grad, batch_shape, pairs, grad_mu, grad_mu_v)
        grad_objective = None
        if objective is not None:
            grad_objective = np.broadcast_to(objective, batch_shape).reshape(batch)
        grad_u, grad_v = engine.vjp(
            wiring,
            numbers.eta_v,
            numbers.params,
            raw,
            grad_mu,
            grad_mu_v,
            grad_objective,
            options.on_failure,
        )
        out: dict[Any, Any] = {}
        for t in tensors:
            part = grad_u[:, t.start : t.start + t.size].reshape((*batch_shape, *t.shape))
            out[t.variable] = part.astype(_value_dtype(t.scores), copy=False)
        for f, part in _split(pairs, grad_v):
            own = part.reshape((*batch_shape, *f.group_shape))
            total = _sum_to_scores(own, len(batch_shape), f)
            out[f] = out[f] + total if f in out else total
        return out

    solution = Solution(
        objective=raw.objective.reshape(batch_shape),
        codes=raw.status.reshape(batch_shape),
        passes=raw.iterations.reshape(batch_shape),
        residuals=(
            raw.primal_residual.reshape(batch_shape),
            raw.dual_residual.reshape(batch_shape),
        ),
        multipliers=raw.tau,
        differentiate=vjp,
    )
    engine.report_failures(raw, options.on_failure)
    return solution


def numbers_of(graph: FactorGraph, batch_shape: tuple[int, ...]) -> Numbers:
    batch = math.prod(batch_shape)
    dtype = _compute_dtype(graph)
    columns = [
        np.zeros((batch, t.size), dtype)
        if t.scores is None
        else t.scores.reshape(batch, t.size).astype(dtype, copy=False)
        for t in graph.tensors
    ]
    mask: npt.NDArray[np.bool_] | None = None
    if any(t.mask is not None for t in graph.tensors):
        masks = [
            np.ones((batch, t.size), dtype=bool)
            if t.mask is None
            else np.broadcast_to(t.mask, (*batch_shape, *t.shape)).reshape(batch, t.size)
            for t in graph.tensors
        ]
        mask = np.concatenate(masks, axis=1)
    scores = [
        np.broadcast_to(f.scores, (*batch_shape, *f.group_shape)).reshape(batch, -1)
        if f.index.size
        else np.zeros((batch, 0))
        for f in graph.pairs()
    ]
    eta_v = np.concatenate([np.zeros((batch, 0)), *scores], axis=1).astype(dtype)
    eta_u = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
    return Numbers(np.ascontiguousarray(eta_u), eta_v, graph.params(), mask)


def _compute_dtype(graph: FactorGraph) -> type[np.floating[Any]]:
    """float32 if all scores are of at most that precision, else float64."""
    given = [t.scores for t in graph.tensors if t.scores is not None]
    given += [f.scores for f in graph.pairs() if f.scores.ndim > 0]
    small = given and all(a.dtype in (np.float32, np.float16) for a in given)
    return np.float32 if small else np.float64


def _value_dtype(scores: npt.NDArray[Any] | None) -> np.dtype[Any]:
    """The caller's dtype; integers become float64."""
    if scores is None or scores.dtype.kind != "f":
        return np.dtype(np.float64)
    return scores.dtype


def _split(pairs: list[Pair], columns: FloatArray) -> list[tuple[Pair, FloatArray]]:
    parts, start = [], 0
    for f in pairs:
        stop = start + f.index.shape[0]
        parts.append((f, columns[:, start:stop]))
        start = stop
    return parts


def _sum_to(own: FloatArray, batch_dims: int, factor: Pair) -> FloatArray:
    """Sums what came from one broadcast score: `(*batch, *shape of the scores as given)`."""
    shape = factor.own_shape
    extra = own.ndim - batch_dims - len(shape)
    own = own.sum(axis=tuple(range(batch_dims, batch_dims + extra)))
    ones = tuple(
        batch_dims + i for i, s in enumerate(shape) if s == 1 and own.shape[batch_dims + i] != 1
    )
    return np.asarray(own.sum(axis=ones, keepdims=True) if ones else own)


def _sum_to_scores(own: FloatArray, batch_dims: int, factor: Pair) -> FloatArray:
    """The gradient of the scores as given: shared ones collect over the batch."""
    total = _sum_to(own, batch_dims, factor)
    given = factor.scores.shape
    if len(given) == len(factor.own_shape):
        return np.asarray(total.sum(axis=tuple(range(batch_dims))))
    ones = tuple(i for i in range(batch_dims) if given[i] == 1 and total.shape[i] != 1)
    return np.asarray(total.sum(axis=ones, keepdims=True) if ones else total)


def _collect(
    graph: FactorGraph,
    key: Variable | Factor,
    grad: Any,
    batch_shape: tuple[int, ...],
    pairs: list[Pair],
    grad_mu: FloatArray,
    grad_mu_v: FloatArray,
) -> None:
    """Adds the gradient with respect to one value to the flat gradients."""
    grad = np.asarray(grad)
    batch = math.prod(batch_shape)
    if isinstance(key, Variable) and key.graph is graph:
        _require_shape(key.name, grad, (*batch_shape, *key.shape))
        sign = -1 if key.negated else 1
        flat = sign * grad.reshape(batch, key.size)
        places: Any = (slice(None), key.index.reshape(-1))
        np.add.at(grad_mu, places, flat)  # a slice may hold a variable twice
        return
    start = 0
    for f in pairs:
        stop = start + f.index.shape[0]
        if f is key:
            _require_shape(f.name, grad, (*batch_shape, *f.own_shape))
            lead = len(batch_shape)
            missing = (1,) * (len(f.group_shape) - len(f.own_shape))
            aligned = grad.reshape((*batch_shape, *missing, *grad.shape[lead:]))
            full = np.broadcast_to(aligned, (*batch_shape, *f.group_shape))
            grad_mu_v[:, start:stop] += full.reshape(batch, stop - start)
            return
        start = stop
    raise GraphError(f"{key!r} has no value in this solution, so it takes no gradient.")


def _require_shape(name: str, grad: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    if grad.shape != shape:
        raise ShapeError(f"{name}: its value has shape {shape}, got a gradient of {grad.shape}.")
