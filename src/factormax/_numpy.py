"""The NumPy front: arrays in, arrays out, and an explicit vector–Jacobian product.

`Solve` lays the arrays of a graph out flat for the engine, and its answers back in their shapes;
the torch front uses it in eager mode too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from factormax import engine
from factormax.arrays import FloatArray, to_numpy
from factormax.checks import all_finite, check_scores, shown
from factormax.compiled import num_dual
from factormax.conflict import conflicts_of
from factormax.engine import Numbers, Options, RawSolution, one_instance
from factormax.errors import GraphError, ShapeError
from factormax.factors.base import BaseFactor
from factormax.factors.factor import Factor
from factormax.factors.structured import StructuredFactor
from factormax.queries.decode import decode, decoded_solution
from factormax.queries.whole import whole_structures
from factormax.solution import Solution
from factormax.status import Status
from factormax.structures import Answer, Support
from factormax.temperature import cooled, spread_temperature, sum_to_temperature
from factormax.variable import Variable

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["Solve", "solve"]


class Slot(NamedTuple):
    """Where a variable tensor lies in the flat arrays, and its shape."""

    start: int
    size: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ScoreSlot:
    """The shapes of a factor's scores: as it needs them, as given without and with the batch."""

    count: int
    shape: tuple[int, ...]
    own_shape: tuple[int, ...]
    given_shape: tuple[int, ...]


class Gradients(NamedTuple):
    """Of the scores of each variable tensor, of each factor's own scores, of the temperature."""

    variables: list[FloatArray]
    factors: list[FloatArray]
    temperature: FloatArray | None


class Solve:
    """One solve of a graph: its arrays laid out flat, the answer, and the way back.

    It holds shapes and arrays, nothing of the graph: autograd may keep it for long.

    Args:
        graph: what to solve.
        scores: of each variable tensor, `(*batch, *shape)` in the compute dtype; None is zero.
        factor_scores: the factors' own (`graph.score_parts()`), in the compute dtype, as given.
        dtype: float32 or float64.
        temperature: broadcastable to the batch, divides all scores; None is 1.
    """

    def __init__(
        self,
        graph: FactorGraph,
        scores: list[npt.NDArray[Any] | None],
        factor_scores: list[npt.NDArray[Any]],
        dtype: type[np.floating[Any]],
        temperature: npt.NDArray[Any] | None = None,
    ) -> None:
        self.batch_shape = graph.known_batch_shape()
        self.batch = math.prod(self.batch_shape)
        self.slots = [Slot(t.start, t.size, t.shape) for t in graph.tensors]
        parts = graph.score_parts()
        self.parts = [ScoreSlot(p.count, p.shape, p.own_shape, tuple(p.given.shape)) for p in parts]
        structured = graph.structured()
        counts = np.array([f.index.shape[0] for f in structured], np.int64)
        self.oracle_slots = np.repeat(np.array([f.slots for f in structured], np.int64), counts)
        ends = counts.cumsum()
        self.oracles = [range(end - k, end) for end, k in zip(ends, counts, strict=True)]
        self.groups = [f.group_shape for f in structured]
        self.wiring = graph.wiring()
        self.numbers = Numbers(
            self._flat_scores(scores, dtype),
            self._flat_factor_scores(factor_scores, dtype),
            graph.params(),
            self._flat_mask([t.mask for t in graph.tensors]),
            own_oracles(structured),
        )
        if not all_finite(self.numbers.eta_u):
            layout = [(t.name, t.shape) for t in graph.tensors]
            check_scores(self.numbers.eta_u, self.numbers.mask, layout, self.batch_shape)
        if self.parts and not all_finite(self.numbers.eta_v):
            names = graph.score_layout()
            allowed = [p.allow_minus_inf for p in parts]
            check_scores(self.numbers.eta_v, None, names, self.batch_shape, allowed)
        self.temperature: FloatArray | None = None  # (B, 1)
        if temperature is not None:
            self.temperature = spread_temperature(temperature, self.batch_shape)
            self.temperature_shape = tuple(temperature.shape)
            self.numbers = replace(
                self.numbers,
                eta_u=cooled(self.numbers.eta_u, self.temperature),
                eta_v=cooled(self.numbers.eta_v, self.temperature),
            )

    def _flat_scores(
        self, scores: list[npt.NDArray[Any] | None], dtype: type[np.floating[Any]]
    ) -> FloatArray:
        columns = [
            np.zeros((self.batch, t.size), dtype) if s is None else s.reshape(self.batch, t.size)
            for s, t in zip(scores, self.slots, strict=True)
        ]
        return np.ascontiguousarray(
            columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
        )

    def _flat_factor_scores(
        self, factor_scores: list[npt.NDArray[Any]], dtype: type[np.floating[Any]]
    ) -> FloatArray:
        columns = [
            np.broadcast_to(s, (*self.batch_shape, *f.shape)).reshape(self.batch, f.count)
            for s, f in zip(factor_scores, self.parts, strict=True)
        ]
        if not columns:
            return np.zeros((self.batch, 0), dtype)
        # A copy: the backward pass looks at the signs, whatever became of the caller's array. Row
        # by row, also of scores that all instances share, which have no order of their own.
        if len(columns) == 1:
            return np.array(columns[0], order="C")
        return np.ascontiguousarray(np.concatenate(columns, axis=1))

    def _flat_mask(self, masks: list[Any]) -> npt.NDArray[np.bool_] | None:
        if all(mask is None for mask in masks):
            return None
        columns = []
        for mask, t in zip(masks, self.slots, strict=True):
            given = True if mask is None else to_numpy(mask)
            full = np.broadcast_to(given, (*self.batch_shape, *t.shape))
            columns.append(full.reshape(self.batch, t.size))
        return np.concatenate(columns, axis=1)

    def run(self, options: Options, warm: FloatArray | None = None) -> RawSolution:
        """Solves; `values`, `factor_values`, `supports` and `pull_back` then work."""
        if options.search is not None:
            self.options = options
            self.raw = self._decode(options)
        else:
            self.ask(self.numbers, options, warm)
            if options.whole:
                self.raw = whole_structures(self.wiring, self.numbers, options, self.raw)
        if options.surrogate is None:
            self.forget_oracles()
        return self.raw

    def ask(
        self, numbers: Numbers, options: Options, warm: FloatArray | None = None
    ) -> RawSolution:
        """Solves with other numbers; the answer is then this solve's."""
        self.options = options
        self.raw = engine.solve(self.wiring, numbers, options, warm)
        self._to_list: Numbers | None = None
        if not self.raw.structures.is_complete:
            # Copied: they may be the caller's, who may write into them before asking.
            self._to_list = replace(numbers, eta_u=numbers.eta_u.copy())
        return self.raw

    def forget_oracles(self) -> None:
        """The user's own oracles lead back to the graph."""
        if self.numbers.oracles:
            self.numbers = replace(self.numbers, oracles=())

    def _decode(self, options: Options) -> RawSolution:
        assert options.search is not None
        found = [
            decode(
                self.wiring, one_instance(self.wiring, self.numbers, i), options, *options.search
            )
            for i in range(self.batch)
        ]
        return decoded_solution(self.wiring, self.numbers, found)

    def values(self) -> list[FloatArray]:
        """The marginals of each variable tensor, `(*batch, *shape)`."""
        return self._by_tensor(self.raw.mu)

    def factor_values(self) -> list[FloatArray]:
        """The marginals of the factors' scores, `(*batch, *shape as given)`."""
        return [
            _sum_to(own, len(self.batch_shape), f)
            for own, f in zip(self._by_part(self.raw.mu_v), self.parts, strict=True)
        ]

    @cached_property
    def listed(self) -> RawSolution:
        """The solution with its structures: solved again, to list them, if it was found without."""
        if self.raw.structures.is_complete:
            return self.raw
        assert self._to_list is not None
        listed = engine.solve(
            self.wiring, self._to_list, replace(self.options, list_structures=True)
        )
        engine.report_failures(listed, self.options.on_failure)
        return listed

    @cached_property
    def supports(self) -> list[Support]:
        """The structures of each structured factor."""
        return [
            Support(self.listed.structures, own, self.oracle_slots, self.batch)
            for own in self.oracles
        ]

    def answer(self, graph: FactorGraph) -> tuple[list[Any], list[Any], list[Any]]:
        """What the variables and factors of a NumPy graph then hand out: copies, to write into."""
        dtypes = [_value_dtype(t.scores) for t in graph.tensors]
        values = [v.astype(d) for v, d in zip(self.values(), dtypes, strict=True)]
        factor_values = [np.array(v) for v in self.factor_values()]
        structured = graph.structured()
        answers = self.answers(structured, self.found, np.asarray)
        return (
            values,
            list(zip(graph.score_parts(), factor_values, strict=True)),
            answers,
        )

    def answers(
        self,
        structured: Sequence[StructuredFactor],
        find: Callable[[int], tuple[Support, Any]],
        wrap: Callable[[Any], Any],
    ) -> list[tuple[StructuredFactor, Answer]]:
        """What the structured factors hand out."""
        return [
            (f, Answer(partial(find, i), self.shape_of(i), f.index.shape[1], f.laid_out, wrap))
            for i, f in enumerate(structured)
        ]

    def shape_of(self, factor: int) -> tuple[int, ...]:
        """The batch, and the number of factors where one call made several."""
        return (*self.batch_shape, *self.groups[factor])

    def found(self, factor: int) -> tuple[Support, FloatArray]:
        """The structures of a structured factor, and their probabilities, `(*batch, K)`."""
        s = self.supports[factor]
        shape = (*self.shape_of(factor), s.width)
        probs = s.probs.astype(self.raw.mu.dtype).reshape(
            self.batch, *shape[len(self.batch_shape) :]
        )
        probs[self.raw.status == Status.INFEASIBLE.code] = np.nan  # like the values
        return s, probs.reshape(shape)

    def pull_back(
        self,
        grads: list[npt.NDArray[Any] | None],
        factor_grads: list[npt.NDArray[Any] | None],
        objective: npt.NDArray[Any] | None,
    ) -> Gradients:
        """From gradients of what `values` and `factor_values` gave to those of scores."""
        columns = [
            np.zeros((self.batch, t.size)) if g is None else g.reshape(self.batch, t.size)
            for g, t in zip(grads, self.slots, strict=True)
        ]
        grad_mu = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
        grad_mu_v = None
        if any(g is not None for g in factor_grads):
            spread = [self._spread(g, f) for g, f in zip(factor_grads, self.parts, strict=True)]
            grad_mu_v = np.concatenate(spread, axis=1)
        weight = None if objective is None else np.asarray(objective).reshape(self.batch)
        if self.options.linear:
            return self.to_scores(*self._pull_back_linear(grad_mu, grad_mu_v, weight))
        grad_u, grad_v = engine.vjp(
            self.wiring,
            self.numbers.eta_v,
            self.numbers.params,
            self.raw,
            grad_mu,
            grad_mu_v,
            weight,
            self.options.on_failure,
        )
        return self.to_scores(grad_u, grad_v)

    def pull_back_probs(self, grads: list[npt.NDArray[Any] | None]) -> Gradients:
        """From gradients of the probabilities of structures to those of scores."""
        raw = self.listed
        if self.options.linear:
            return self.to_scores(np.zeros_like(raw.mu), np.zeros_like(raw.mu_v))
        flat = np.zeros_like(raw.structures.prob)
        for g, s in zip(grads, self.supports, strict=True):
            if g is not None:
                s.collect(g.reshape(len(s.counts), s.width), flat)
        grad_u, grad_v = engine.vjp(
            self.wiring,
            self.numbers.eta_v,
            self.numbers.params,
            raw,
            None,
            None,
            None,
            self.options.on_failure,
            flat,
        )
        return self.to_scores(grad_u, grad_v)

    def _pull_back_linear(
        self, grad_mu: FloatArray, grad_mu_v: FloatArray | None, weight: FloatArray | None
    ) -> tuple[FloatArray, FloatArray]:
        """The answer of a linear program is piecewise constant: its gradient is 0, or a surrogate.

        The optimal value has the answer itself as its gradient.
        """
        raw = self.raw
        dtype = raw.mu.dtype
        grad_u, grad_v = np.zeros_like(raw.mu), np.zeros_like(raw.mu_v)
        solved = np.isfinite(raw.objective)[:, None]
        mu, mu_v = np.where(solved, raw.mu, 0), np.where(solved, raw.mu_v, 0)
        here = np.broadcast_to(True, mu.shape) if self.numbers.mask is None else self.numbers.mask
        here = here & (self.numbers.eta_u != -np.inf) & solved
        if self.options.surrogate == "straight-through":
            grad_u = np.where(here, grad_mu, 0).astype(dtype)
            if grad_mu_v is not None:
                grad_v = np.where(solved, grad_mu_v, 0).astype(dtype)
        elif self.options.surrogate == "spigot":
            # mu - the projection of mu - grad onto the polytope, which is an LP-SparseMAP.
            moved = np.where(here, mu - grad_mu, 0).astype(dtype)
            allowed = np.where(self.numbers.eta_v == -np.inf, -np.inf, 0).astype(dtype)
            numbers = replace(self.numbers, eta_u=moved, eta_v=allowed, mask=here)
            projected = engine.solve(self.wiring, numbers, Options())
            engine.report_failures(projected, self.options.on_failure)
            grad_u = np.where(here, mu - projected.mu, 0).astype(dtype)
        if weight is not None:
            grad_u = grad_u + mu * weight[:, None]
            grad_v = grad_v + mu_v * weight[:, None]
        return grad_u.astype(dtype), grad_v.astype(dtype)

    def to_scores(self, grad_u: FloatArray, grad_v: FloatArray) -> Gradients:
        """Gradients of the flat scores as those of the scores that were given."""
        of_temperature = None
        if self.temperature is not None:
            # d(eta / T) = d eta / T - (eta / T) dT / T
            inner = _dot(grad_u, self.numbers.eta_u) + _dot(grad_v, self.numbers.eta_v)
            per_instance = -inner / self.temperature[:, 0]
            of_temperature = sum_to_temperature(
                per_instance, self.temperature_shape, self.batch_shape
            )
            grad_u = (grad_u / self.temperature).astype(grad_u.dtype)
            grad_v = (grad_v / self.temperature).astype(grad_v.dtype)
        totals = [
            _sum_to_scores(own, len(self.batch_shape), f)
            for own, f in zip(self._by_part(grad_v), self.parts, strict=True)
        ]
        return Gradients(self._by_tensor(grad_u), totals, of_temperature)

    def _spread(self, grad: npt.NDArray[Any] | None, factor: ScoreSlot) -> npt.NDArray[Any]:
        """The gradient of a factor's value, for each of its scores."""
        if grad is None:
            return np.zeros((self.batch, factor.count))
        missing = (1,) * (len(factor.shape) - len(factor.own_shape))
        aligned = grad.reshape((*self.batch_shape, *missing, *factor.own_shape))
        full = np.broadcast_to(aligned, (*self.batch_shape, *factor.shape))
        return full.reshape(self.batch, factor.count)

    def _by_tensor(self, columns: FloatArray) -> list[FloatArray]:
        if len(self.slots) == 1:
            return [columns.reshape((*self.batch_shape, *self.slots[0].shape))]
        return [
            columns[:, t.start : t.start + t.size].reshape((*self.batch_shape, *t.shape))
            for t in self.slots
        ]

    def _by_part(self, columns: FloatArray) -> list[FloatArray]:
        parts, start = [], 0
        for f in self.parts:
            stop = start + f.count
            parts.append(columns[:, start:stop].reshape((*self.batch_shape, *f.shape)))
            start = stop
        return parts


def start(graph: FactorGraph, temperature: Any = None) -> Solve:
    """The arrays of a graph of NumPy scores, ready to be solved."""
    dtype = _compute_dtype(graph)
    scores = [
        None if t.scores is None else t.scores.astype(dtype, copy=False) for t in graph.tensors
    ]
    own = [p.given.astype(dtype, copy=False) for p in graph.score_parts()]
    return Solve(graph, scores, own, dtype, temperature)


def solve(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any = None
) -> Solution:
    """Answers a query of a graph of NumPy scores."""
    task = start(graph, temperature)
    parts, structured = graph.score_parts(), graph.structured()
    warm = None
    if warm_start is not None:
        warm = graph.check_multipliers(warm_start, task.batch, num_dual(task.wiring.spec))
    raw = task.run(options, warm)
    tensors = list(graph.tensors)
    dtypes = [_value_dtype(t.scores) for t in tensors]
    graph.set_answer(*task.answer(graph))

    def vjp(
        grads: Mapping[Variable | BaseFactor, Any],
        probs: Mapping[BaseFactor, Any],
        objective: Any,
    ) -> dict[Any, Any]:
        value_grads: list[Any] = [None] * len(tensors)
        factor_grads: list[Any] = [None] * len(parts)
        prob_grads: list[Any] = [None] * len(structured)
        for key, grad in grads.items():
            place = next((i for i, p in enumerate(parts) if p.factor is key), None)
            if isinstance(key, Variable) and key.graph is graph and key.position < len(tensors):
                _add_slice(task, key, np.asarray(grad), value_grads)
            elif place is not None:
                shape = (*task.batch_shape, *task.parts[place].own_shape)
                _require_shape(parts[place].factor.name, np.asarray(grad), shape)
                factor_grads[place] = np.asarray(grad)
            else:
                raise GraphError(f"{key!r} has no value in this solution: it takes no gradient.")
        for factor, grad in probs.items():
            place = next((i for i, f in enumerate(structured) if f is factor), None)
            if place is None:
                raise GraphError(f"{factor!r} has no probabilities in this solution.")
            shape = (*task.shape_of(place), task.supports[place].width)
            _require_shape(f"probs of {structured[place].name}", np.asarray(grad), shape)
            prob_grads[place] = np.asarray(grad, dtype=np.float64)
        if objective is not None:
            given, objective = objective, np.asarray(objective)
            if objective.dtype.kind not in "fiub" or objective.shape not in ((), task.batch_shape):
                raise ShapeError(
                    f"vjp: the gradient of the objective must be made of numbers, in the shape "
                    f"{task.batch_shape}, got {shown(given)}."
                )
            objective = np.broadcast_to(objective, task.batch_shape)
        found = [task.pull_back(value_grads, factor_grads, objective)]
        if probs:
            found.append(task.pull_back_probs(prob_grads))
        out: dict[Any, Any] = {}
        for t, d, *grad in zip(tensors, dtypes, *[f.variables for f in found], strict=True):
            out[t.variable] = sum(grad[1:], grad[0]).astype(d, copy=False)
        if task.temperature is not None:
            out["temperature"] = sum(f.temperature for f in found)
        for part, *own in zip(parts, *[f.factors for f in found], strict=True):
            grad = sum(own[1:], own[0])
            first = part is part.factor.score_parts[0]
            name = part.factor if first else (part.factor, part.label)
            out[name] = out[name] + grad if name in out else grad
        return out

    solution = Solution(
        raw.objective.reshape(task.batch_shape),
        raw,
        task.batch_shape,
        options.query,
        differentiate=vjp,
        conflicts=conflicts_of(graph.factors, task.wiring, task.numbers, raw),
    )
    engine.report_failures(raw, options.on_failure, solution, solution.conflicts)
    return solution


def own_oracles(structured: Sequence[StructuredFactor]) -> tuple[Any, ...]:
    """The structured factors that are the user's own, None for the built-in ones; () if all are."""
    if not any(isinstance(f, Factor) for f in structured):
        return ()
    own = [(f if isinstance(f, Factor) else None, f.index.shape[0]) for f in structured]
    return tuple(factor for factor, count in own for _ in range(count))


def _compute_dtype(graph: FactorGraph) -> type[np.floating[Any]]:
    """float32 if all scores are of at most that precision, else float64."""
    given = [t.scores for t in graph.tensors if t.scores is not None]
    given += [p.given for p in graph.score_parts() if p.given.ndim > 0]
    small = given and all(a.dtype in (np.float32, np.float16) for a in given)
    return np.float32 if small else np.float64


def _value_dtype(scores: npt.NDArray[Any] | None) -> np.dtype[Any]:
    """The caller's dtype; integers become float64."""
    if scores is None or scores.dtype.kind != "f":
        return np.dtype(np.float64)
    return scores.dtype


def _sum_to(own: FloatArray, batch_dims: int, factor: ScoreSlot) -> FloatArray:
    """Sums what came from one broadcast score: `(*batch, *shape of the scores as given)`."""
    shape = factor.own_shape
    extra = own.ndim - batch_dims - len(shape)
    own = own.sum(axis=tuple(range(batch_dims, batch_dims + extra)))
    ones = tuple(
        batch_dims + i for i, s in enumerate(shape) if s == 1 and own.shape[batch_dims + i] != 1
    )
    return np.asarray(own.sum(axis=ones, keepdims=True) if ones else own)


def _sum_to_scores(own: FloatArray, batch_dims: int, factor: ScoreSlot) -> FloatArray:
    """The gradient of the scores as given: shared ones collect over the batch."""
    total = _sum_to(own, batch_dims, factor)
    given = factor.given_shape
    if len(given) == len(factor.own_shape):
        return np.asarray(total.sum(axis=tuple(range(batch_dims))))
    ones = tuple(i for i in range(batch_dims) if given[i] == 1 and total.shape[i] != 1)
    return np.asarray(total.sum(axis=ones, keepdims=True) if ones else total)


def _add_slice(task: Solve, key: Variable, grad: npt.NDArray[Any], value_grads: list[Any]) -> None:
    """Adds the gradient of a variable's or a slice's value to that of the whole tensor."""
    _require_shape(key.name, grad, (*task.batch_shape, *key.shape))
    slot = task.slots[key.position]
    if not key.keys and not key.negated and value_grads[key.position] is None:
        value_grads[key.position] = grad
        return
    if value_grads[key.position] is None:
        value_grads[key.position] = np.zeros((task.batch, slot.size))
    value_grads[key.position] = np.array(value_grads[key.position]).reshape(task.batch, slot.size)
    flat = grad.reshape(task.batch, key.size)
    places: Any = (slice(None), key.index.reshape(-1) - slot.start)
    # A slice may hold a variable twice.
    np.add.at(value_grads[key.position], places, -flat if key.negated else flat)


def _dot(grad: FloatArray, scores: FloatArray) -> npt.NDArray[np.float64]:
    """For each instance the sum of the products; what is not finite has no gradient."""
    terms = grad * np.where(np.isfinite(scores), scores, 0)
    return np.asarray(terms.sum(axis=1, dtype=np.float64))


def _require_shape(name: str, grad: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    if grad.shape != shape:
        raise ShapeError(f"{name}: its value has shape {shape}, got a gradient of {grad.shape}.")
