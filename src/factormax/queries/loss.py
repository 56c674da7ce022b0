"""Losses: the score of the best answer minus that of the target.

All three have the same form: the value of a query (with the quadratic term, without it, or with a
cost) minus the score of the target. By Danskin's theorem the gradient is the answer minus the
target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from factormax import _engines
from factormax._inputs import Inputs
from factormax._names import scalar_name
from factormax._options import Options
from factormax._raw import RawSolution
from factormax.arrays import FloatArray, is_hidden, to_numpy
from factormax.checks import one_of, shown
from factormax.conflict import Conflicts, name_of
from factormax.errors import GraphError, ShapeError
from factormax.factors.base import BaseFactor
from factormax.queries.assignment import check_assignment, score_features
from factormax.queries.decode import FREE
from factormax.record import Record
from factormax.status import Status
from factormax.variable import Variable

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = [
    "KINDS",
    "Target",
    "by_variable",
    "check_features",
    "check_target",
    "evaluate",
    "flat_target",
    "values_there",
]

KINDS = ("sparsemap", "perceptron", "hinge")


@dataclass(frozen=True)
class Target:
    """What a loss compares the answer with, flat."""

    kind: str
    values: FloatArray  # (B, n) of 0 and 1
    known: npt.NDArray[np.bool_] | None  # (B, n), None: all
    cost: FloatArray | None  # (B, n) of "hinge"
    factors: list[BaseFactor]  # of the graph
    batch_shape: tuple[int, ...]
    record: Record  # of the graph

    def of_instance(self, i: int) -> str:
        """How a message says which instance it is about."""
        if not self.batch_shape:
            return ""
        return f" of instance {tuple(int(k) for k in np.unravel_index(i, self.batch_shape))}"


def evaluate(
    inputs: Inputs,
    target: Target,
    options: Options,
    ask: Callable[[Inputs, Options], RawSolution],
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The loss of each instance, `(B,)`, and its gradients with respect to the flat scores.

    ask: a function that answers a query.
    """
    here = inputs.present
    y = values_there(inputs, target).astype(inputs.eta_u.dtype)
    asked = inputs
    constant: Any = 0.0
    if target.cost is not None:  # sum of cost * (mu + y - 2 mu y), where y is known
        cost = target.cost if target.known is None else np.where(target.known, target.cost, 0)
        more = np.where(here, cost * (1 - 2 * y), 0)
        asked = inputs.wide().replace(eta_u=inputs.eta_u + more)
        constant = (cost * y).sum(axis=1)
    raw = ask(asked, options)
    room = None  # for the gradient of factors' scores, which may be as large as all the rest
    if target.known is None or not len(y):
        n_y = check_features(inputs, target, y)
        score = np.where(y > 0, inputs.eta_u, 0).sum(axis=1, dtype=np.float64)
        score = score + score_features(inputs, n_y)
        room = n_y if n_y.dtype == raw.mu_v.dtype else None
        if not options.linear:
            score = score - 0.5 * (y * y).sum(axis=1, dtype=np.float64)
    else:
        other = _best_completion(inputs, target, y, options)
        y, n_y, score = other.mu, other.mu_v, other.objective
    solved = (raw.status != Status.INFEASIBLE.code) & np.isfinite(score)
    # The answer of a linear program may fall short of the target's score by its tolerance.
    values = np.where(solved, np.maximum(raw.objective + constant - score, 0), np.inf)
    grad_u, grad_v = raw.mu - y, np.subtract(raw.mu_v, n_y, out=room)
    if not solved.all():
        grad_u[~solved] = grad_v[~solved] = 0
    return values, grad_u, grad_v


def values_there(inputs: Inputs, target: Target) -> FloatArray:
    """The target, `(B, n)`; raises if a known entry is on where the variable is absent."""
    if inputs.here is None:
        return target.values
    wrong = ~inputs.here & (target.values > 0)
    if target.known is not None:
        wrong &= target.known
    if wrong.any():
        instance, j = (int(k) for k in np.argwhere(wrong)[0])
        is_masked = inputs.mask is not None and not inputs.mask[instance % len(inputs.mask), j]
        why = "which is masked" if is_masked else "whose score is -inf"
        raise GraphError(
            f"loss: the target{target.of_instance(instance)} is on at "
            f"{scalar_name(target.record, j)}, {why}."
        )
    return np.where(inputs.here, target.values, 0)


def check_features(inputs: Inputs, target: Target, y: FloatArray) -> FloatArray:
    """What the factors' scores are multiplied by at the target, which must satisfy all factors."""
    checked = check_assignment(inputs, y.astype(np.float64))
    if not checked.feasible.all():
        first = int(np.argmin(checked.feasible))
        position, k = checked.broken[first] or (0, 0)
        name = name_of(target.factors[position], k)
        raise GraphError(
            f"The target{target.of_instance(first)} breaks {name}. A target must satisfy every "
            f"factor; mask the entries that are unknown."
        )
    return checked.features


def _best_completion(
    inputs: Inputs, target: Target, y: FloatArray, options: Options
) -> RawSolution:
    """The same query with the known entries held at the target."""
    assert target.known is not None
    held = np.where(target.known & inputs.present, y, FREE).astype(np.int8)
    asked = inputs.replace(held=held)
    raw = _engines.solve(asked, options)
    bad = raw.status == Status.INFEASIBLE.code
    if bad.any():
        first = int(np.argmax(bad))
        names = Conflicts(target.factors, asked, raw)(first)
        broken = f" It breaks {'; '.join(names)}." if names else ""
        raise GraphError(
            f"No completion of the known entries of the target{target.of_instance(first)} "
            f"satisfies every factor.{broken}"
        )
    return raw


# ---- Laying the targets out ----------------------------------------------------------------------


def check_target(
    graph: FactorGraph, targets: Mapping[Variable, Any], kind: str, cost: Any
) -> npt.NDArray[np.bool_]:
    """Raises unless the arguments of `FactorGraph.loss` are valid, apart from numbers and shapes.

    Returns:
        Which variables have a target, `(n,)`.
    """
    one_of("kind", kind, KINDS)
    if cost is not None and kind != "hinge":
        raise ValueError(f'cost is only for kind="hinge", not for {kind!r}.')
    if not isinstance(targets, Mapping) or not targets:
        raise GraphError("loss takes a dict from variables to 0/1 targets, as in loss({u: y}).")
    for u in targets:
        if not isinstance(u, Variable) or u._record is not graph._record:
            raise GraphError(f"loss: {u!r} is not a variable of this graph.")
        if u.negated:
            raise GraphError(f"loss: give the target of {u.negate().name}, not of its negation.")
    counts = np.zeros(graph._num_variables, dtype=np.int64)
    for u in targets:
        counts += np.bincount(u.index.reshape(-1), minlength=graph._num_variables)
    if counts.max(initial=0) > 1:
        twice = scalar_name(graph._record, int(np.argmax(counts)))
        raise GraphError(f"loss: {twice} has two targets. Give one for every variable.")
    given = counts > 0
    if given.all():  # no need to look at masks, which may be on a device
        return given
    needed = np.ones(graph._num_variables, dtype=bool)
    for t in graph._tensors:
        if t.mask is not None:
            needed[t.start : t.start + t.size] = _may_be_there(graph, t)
    missing = np.flatnonzero(needed & ~given)
    if len(missing):
        raise GraphError(
            f"loss: {scalar_name(graph._record, int(missing[0]))} has no target. Give one for "
            f"every variable; use mask= for entries that are unknown."
        )
    return given


def _may_be_there(graph: FactorGraph, tensor: Any) -> npt.NDArray[np.bool_]:
    """Which variables of a masked tensor are present in some instance; none if it is traced."""
    if is_hidden(tensor.mask):
        return np.zeros(tensor.size, dtype=bool)
    full = np.broadcast_to(to_numpy(tensor.mask), (*graph._known_batch_shape(), *tensor.shape))
    return np.asarray(full.reshape(-1, tensor.size).any(axis=0))


def flat_target(
    graph: FactorGraph, targets: Mapping[Variable, Any], kind: str, cost: Any, mask: Any
) -> Target:
    """The arguments of `FactorGraph.loss`, checked and laid out."""
    given = check_target(graph, targets, kind, cost)
    shape = graph._known_batch_shape()
    batch = int(np.prod(shape, dtype=np.int64))
    values = np.zeros((batch, graph._num_variables))
    for u, target in targets.items():
        array = to_numpy(target)
        wrong = ~np.isin(array, (0, 1))
        if wrong.any():
            index = tuple(map(int, np.argwhere(wrong)[0]))
            at = f" at index {index}" if index else ""
            got = array[index].item() if array.dtype != object else array[index]
            raise GraphError(
                f"loss: the target of {u.name} must hold only 0 and 1, got {shown(got)}{at}."
            )
        check_shape(u, array.shape, shape)
        values[:, u.index.reshape(-1)] = _fit(u, "the target", array, shape)
    known = None
    if mask is not None:
        known = np.broadcast_to(given, values.shape).copy()
        for u, part in by_variable(graph, "mask", mask, targets):
            array = to_numpy(part)
            if array.dtype != np.bool_:
                raise GraphError(
                    f"loss: the mask of the target of {u.name} must be boolean, got dtype "
                    f"{array.dtype}."
                )
            known[:, u.index.reshape(-1)] = _fit(u, "the mask of the target", array, shape)
    costs = None
    if kind == "hinge":
        costs = np.ones((batch, graph._num_variables))
        for u, part in by_variable(graph, "cost", 1.0 if cost is None else cost, targets):
            array = to_numpy(part)
            if array.dtype.kind not in "fiub" or not np.isfinite(array).all():
                raise ValueError(
                    f"loss: the cost of {u.name} must hold finite numbers, got {shown(part)}."
                )
            costs[:, u.index.reshape(-1)] = _fit(u, "the cost", array, shape)
    return Target(kind, values, known, costs, list(graph._factors), shape, graph._record)


def check_shape(u: Variable, given: Any, batch: tuple[int, ...]) -> None:
    """Raises unless there is one target per instance, or one whole target that all share."""
    wanted, found = (*batch, *u.shape), tuple(given)
    if found not in (wanted, u.shape):
        shared = f", or {u.shape} if all instances share it" if batch else ""
        raise ShapeError(
            f"loss: the target of {u.name} must have shape {wanted}{shared}, got {found}."
        )


def by_variable(
    graph: FactorGraph, word: str, given: Any, targets: Mapping[Variable, Any]
) -> Iterable[tuple[Variable, Any]]:
    """A cost or a mask for each variable: one for all targets, or a dict for some."""
    if not isinstance(given, Mapping):
        return [(u, given) for u in targets]
    for u in given:
        if not isinstance(u, Variable) or u._record is not graph._record or u.negated:
            raise GraphError(f"loss: {word} has {u!r}, which is not a variable of this graph.")
    return given.items()


def _fit(u: Variable, what: str, array: npt.NDArray[Any], batch: tuple[int, ...]) -> Any:
    """The array broadcast to one entry per instance and variable, `(B, size)`."""
    try:
        full = np.broadcast_to(array, (*batch, *u.shape))
    except ValueError:
        raise ShapeError(
            f"loss: {what} of {u.name} must have shape {(*batch, *u.shape)}, got {array.shape}."
        ) from None
    return full.reshape(-1, u.size)
