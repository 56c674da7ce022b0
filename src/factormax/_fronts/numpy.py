"""The NumPy front: arrays in, arrays out, and an explicit vector–Jacobian product."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from factormax._options import Options
from factormax._report import report_failures
from factormax._task import Task
from factormax.checks import shown
from factormax.conflict import conflicts_of
from factormax.errors import GraphError, ShapeError
from factormax.factors.base import BaseFactor
from factormax.queries.loss import Target, evaluate
from factormax.solution import Solution
from factormax.variable import Variable

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["loss", "solve", "start"]


def start(graph: FactorGraph, temperature: Any = None) -> Task:
    """The arrays of a graph, ready to be solved."""
    dtype = _compute_dtype(graph)
    scores = [
        None if t.scores is None else t.scores.astype(dtype, copy=False) for t in graph._tensors
    ]
    own = [p.given.astype(dtype, copy=False) for p in graph._score_parts()]
    return Task(graph, scores, own, dtype, temperature)


def solve(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any = None
) -> Solution:
    """Answers a query of a graph."""
    task = start(graph, temperature)
    warm = None
    if warm_start is not None:
        warm = graph._check_multipliers(warm_start, task.batch, task.inputs.model.num_dual)
    raw = task.run(options, warm)
    derivative = _Derivative(graph, task)
    _set_answer(graph, task, derivative)
    solution = Solution(
        raw.objective.reshape(task.batch_shape),
        raw,
        task.batch_shape,
        options.query,
        differentiate=derivative,
        conflicts=conflicts_of(graph._factors, task.inputs, raw, task.batch_shape),
    )
    report_failures(raw, options.on_failure, solution, solution.conflicts)
    return solution


def loss(
    graph: FactorGraph, target: Target, options: Options, temperature: Any = None
) -> npt.NDArray[Any]:
    """The losses of a graph's instances; see `factormax.queries.loss`."""
    task = start(graph, temperature)
    values, _, _ = evaluate(task.inputs, target, options, task.ask)
    task.forget_oracles()
    _set_answer(graph, task)
    conflicts = conflicts_of(graph._factors, task.inputs, task.raw, task.batch_shape)
    report_failures(task.raw, options.on_failure, conflicts=conflicts)
    return values.reshape(task.batch_shape)


def _set_answer(graph: FactorGraph, task: Task, derivative: _Derivative | None = None) -> None:
    """Stores what the variables and factors return afterwards, as writable arrays."""
    own = task.factor_values()
    graph._set_answer(
        _Values(task.values(), [_value_dtype(t.scores) for t in graph._tensors], derivative),
        _Values(own, [v.dtype for v in own], derivative) if own else (),
        task.answers(graph._structured, task.found, np.asarray),
    )


class _Values(Sequence[npt.NDArray[Any]]):
    """The marginals of each tensor of variables, or of each factor's scores, as writable arrays.

    Derivatives of the objective read them, so they are copied on first access, but only if a
    derivative can still be requested.
    """

    def __init__(
        self, found: list[Any], dtypes: list[np.dtype[Any]], derivative: _Derivative | None
    ) -> None:
        self._found, self._dtypes = found, dtypes
        self._handed_out = [False] * len(self._found)
        self._derivative = None if derivative is None else weakref.ref(derivative)

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, place: Any) -> Any:
        if not self._handed_out[place]:
            in_use = self._derivative is not None and self._derivative() is not None
            found = self._found[place].astype(self._dtypes[place], copy=in_use)
            self._found[place] = np.asarray(found, order="C")
            self._handed_out[place] = True
        return self._found[place]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([v.astype(d) for v, d in zip(self._found, self._dtypes, strict=True)],)


class _Derivative:
    """What `Solution.vjp` calls: turns gradients of values into gradients of scores."""

    def __init__(self, graph: FactorGraph, task: Task) -> None:
        self.graph, self.task = graph, task
        self.tensors, self.variables = list(graph._tensors), list(graph._variables)
        self.parts, self.owners = graph._score_parts(), graph._score_owners()
        self.structured = list(graph._structured)

    def __call__(
        self,
        grads: Mapping[Variable | BaseFactor, Any],
        probs: Mapping[BaseFactor, Any],
        objective: Any,
    ) -> dict[Any, Any]:
        task = self.task
        values, factors = self._of_values(grads)
        found = [task.pull_back(values, factors, self._of_objective(objective))]
        if probs:
            found.append(task.pull_back_probs(self._of_probs(probs)))
        out: dict[Any, Any] = {}
        by_tensor = zip(self.variables, self.tensors, *[f.variables for f in found], strict=True)
        for u, t, *grad in by_tensor:
            total = sum(grad[1:], grad[0])
            out[u] = total.astype(_value_dtype(t.scores), copy=False)
        if task.temperature is not None:
            out["temperature"] = sum([f.temperature for f in found])
        for name, *own in zip(self._names(), *[f.factors for f in found], strict=True):
            grad = sum(own[1:], own[0])
            out[name] = out[name] + grad if name in out else grad
        return out

    def jvp(self, moves: Mapping[Any, Any]) -> dict[Any, Any]:
        """How the values move if the scores of these variables and factors move like this."""
        task = self.task
        scores: list[Any] = [None] * len(self.tensors)
        own: list[Any] = [None] * len(self.parts)
        heat = None
        names = self._names()
        for key, given in moves.items():
            move = np.asarray(given)
            if isinstance(key, str) and key == "temperature" and task.temperature is not None:
                _require_shape(key, move, task.temperature_shape, "a direction")
                heat = move
            elif self._is_own(key):
                self._add_slice(key, move, scores, "direction")
            elif key in names:
                place = names.index(key)
                label = f"{self.owners[place].name}: {self.parts[place].label}"
                shape = self.task.layout.parts[place].given_shape
                _require_shape(label, move, shape, "a direction")
                own[place] = move
            else:
                raise GraphError(f"jvp: {key!r} has no scores in this solution.")
        values, factor_values, objective = task.push_forward(scores, own, heat)
        out: dict[Any, Any] = {
            u: value.astype(_value_dtype(t.scores), copy=False)
            for u, t, value in zip(self.variables, self.tensors, values, strict=True)
        }
        out |= dict(zip(names, factor_values, strict=True))
        return out | {"objective": objective}

    def _is_own(self, key: Any) -> bool:
        """Whether it is a variable that was solved for."""
        own = isinstance(key, Variable) and key._record is self.graph._record
        return own and key.position < len(self.tensors)

    def _names(self) -> list[Any]:
        """The keys of factors' scores: the factor, with a label unless they are its first."""
        return [
            factor if part is factor._score_parts[0] else (factor, part.label)
            for factor, part in zip(self.owners, self.parts, strict=True)
        ]

    def _of_values(self, grads: Mapping[Any, Any]) -> tuple[list[Any], list[Any]]:
        values: list[Any] = [None] * len(self.tensors)
        factors: list[Any] = [None] * len(self.parts)
        for key, given in grads.items():
            grad = np.asarray(given)
            place = next((i for i, f in enumerate(self.owners) if f is key), None)
            if self._is_own(key):
                self._add_slice(key, grad, values)
                continue
            if place is None:
                raise GraphError(f"{key!r} has no value in this solution, so it takes no gradient.")
            shape = (*self.task.batch_shape, *self.parts[place].own_shape)
            _require_shape(self.owners[place].name, grad, shape)
            factors[place] = grad
        return values, factors

    def _of_probs(self, probs: Mapping[BaseFactor, Any]) -> list[Any]:
        grads: list[Any] = [None] * len(self.structured)
        for factor, grad in probs.items():
            place = next((i for i, f in enumerate(self.structured) if f is factor), None)
            if place is None:
                raise GraphError(f"{factor!r} has no probabilities in this solution.")
            shape = (*self.task.shape_of(place), self.task.supports[place].width)
            _require_shape(f"probs of {self.structured[place].name}", np.asarray(grad), shape)
            grads[place] = np.asarray(grad, dtype=np.float64)
        return grads

    def _of_objective(self, objective: Any) -> Any:
        if objective is None:
            return None
        array, shape = np.asarray(objective), self.task.batch_shape
        if array.dtype.kind not in "fiub" or array.shape not in ((), shape):
            raise ShapeError(
                f"vjp: the gradient of the objective must be an array of numbers of shape {shape}, "
                f"got {shown(objective)}."
            )
        return np.broadcast_to(array, shape)

    def _add_slice(
        self, key: Variable, grad: npt.NDArray[Any], values: list[Any], what: str = "gradient"
    ) -> None:
        """Adds the gradient of a variable's or a slice's value to that of the whole tensor."""
        task, place = self.task, key.position
        _require_shape(key.name, grad, (*task.batch_shape, *key.shape), f"a {what}")
        if not key.keys and not key.negated and values[place] is None:
            values[place] = grad
            return
        slot = task.layout.tensors[place]
        before = np.zeros((task.batch, slot.size)) if values[place] is None else values[place]
        values[place] = np.array(before).reshape(task.batch, slot.size)
        flat = grad.reshape(task.batch, key.size)
        places: Any = (slice(None), key.index.reshape(-1) - slot.start)
        # A slice may hold a variable twice.
        np.add.at(values[place], places, -flat if key.negated else flat)


def _compute_dtype(graph: FactorGraph) -> type[np.floating[Any]]:
    """float32 if no scores have more precision than that, else float64."""
    given = [t.scores for t in graph._tensors if t.scores is not None]
    given += [p.given for p in graph._score_parts() if p.given.ndim > 0]
    small = given and all([a.dtype in (np.float32, np.float16) for a in given])
    return np.float32 if small else np.float64


def _value_dtype(scores: npt.NDArray[Any] | None) -> np.dtype[Any]:
    """The caller's dtype; integers become float64."""
    if scores is None or scores.dtype.kind != "f":
        return np.dtype(np.float64)
    return scores.dtype


def _require_shape(
    name: str,
    given: npt.NDArray[Any],
    shape: tuple[int, ...],
    what: str = "a gradient",
) -> None:
    if given.shape != shape:
        raise ShapeError(f"{name}: its value has shape {shape}, got {what} of {given.shape}.")
