"""What runs on the CPU when a traced solve runs: NumPy arrays in, NumPy arrays out.

Each function takes `quiet`: a compiled function can't raise errors, so instances whose numbers are
invalid get NaN and `Status.INVALID` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from factormax import _engines
from factormax._core import Side
from factormax._fronts.jax.plan import Plan
from factormax._inputs import Inputs
from factormax._model import Remembered
from factormax._raw import RawSolution
from factormax._report import report_backward, report_failures
from factormax.errors import GraphError
from factormax.queries.assignment import check_assignment
from factormax.queries.solve import answer, pull_back_linear
from factormax.status import Status

__all__ = ["apply_jacobian", "features", "pull_back", "solve", "write"]

Arrays: TypeAlias = "list[npt.NDArray[Any]]"
_MOST_BYTES = 1 << 22  # of scores whose solution is remembered


def solve(plan: Plan, arrays: Sequence[Any], quiet: bool) -> Arrays:
    """Marginals, objective, multipliers, sides, and how each instance ended."""
    if quiet:
        return _each_if_some_fail(_solve, plan, arrays, partial(_invalid, plan, arrays[0].dtype))
    return _solve(plan, arrays)


def _solve(plan: Plan, arrays: Sequence[Any], quiet: bool = False, place: Any = None) -> Arrays:
    # What is remembered must not be in memory that JAX owns.
    kept = [np.array(a) for a in arrays] if plan.is_structured else arrays
    inputs, warm = plan.inputs(kept, check=True, place=place)
    raw = answer(inputs, plan.options, warm)
    if not quiet:
        conflicts = plan.conflicts_of(inputs, raw)
        report_failures(raw, plan.options.on_failure, conflicts=conflicts)
    if plan.is_structured and not plan.options.linear:
        _remember(plan, arrays, inputs, raw)
    dtype, report = inputs.eta_u.dtype, raw.report()
    if plan.options.linear:
        report = np.stack([*report, raw.upper_bound, raw.integral])
    objective = raw.objective.astype(dtype)[:, None]
    return [raw.mu, raw.mu_v, objective, raw.tau, raw.sides(), report.T.astype(dtype)]


def apply_jacobian(plan: Plan, arrays: Sequence[Any], quiet: bool) -> Arrays:
    """The Jacobian of the marginals times directions, `(D, B, n)` and `(D, B, P)`.

    After the directions come the arrays of the solve, except the multipliers to start from; then
    its answer: sides and multipliers, or for a linear program marginals and objective.
    """
    if plan.options.linear:
        require_forward_mode(plan)
        return pull_back(plan, arrays, quiet)
    if quiet:

        def nothing() -> Arrays:
            return [np.zeros_like(a[:, :1]) for a in arrays[:2]]

        return _each_if_some_fail(_apply_jacobian, plan, arrays, nothing, directions=2)
    return _apply_jacobian(plan, arrays)


def _apply_jacobian(
    plan: Plan, arrays: Sequence[Any], quiet: bool = False, place: Any = None
) -> Arrays:
    d_u, d_v, *given, sides, tau = arrays
    inputs, raw = _solved(plan, given, sides, tau, place)
    out_u, out_v = np.empty_like(d_u), np.empty_like(d_v)
    for k in range(len(d_u)):
        out_u[k], out_v[k], residual, worst = _engines.vjp(inputs, raw, d_u[k], d_v[k])
        if not quiet:
            report_backward(residual, worst, d_u.dtype, plan.options.on_failure)
    return [out_u, out_v]


def require_forward_mode(plan: Plan) -> None:
    """Raises if there is only a gradient, no derivative in forward mode."""
    if plan.options.surrogate == "spigot":
        raise GraphError(
            'surrogate="spigot" has a gradient, but no derivative in forward mode: use jax.grad, '
            'jax.vjp or jax.jacrev, or surrogate="straight-through".'
        )


def pull_back(plan: Plan, arrays: Sequence[Any], quiet: bool) -> Arrays:
    """The surrogate gradients of a linear program; the arrays are those of `apply_jacobian`."""
    d_u, d_v, *given, mu, objective = arrays
    inputs, _ = plan.cold.inputs(given, check=False)
    raw = RawSolution(inputs.core)
    raw.mu[...], raw.objective[...] = mu, objective[:, 0]
    raw.mu_v[...] = 0
    options = replace(plan.options, on_failure="ignore") if quiet else plan.options
    out_u, out_v = np.empty_like(d_u), np.empty_like(d_v)
    for k in range(len(d_u)):
        out_u[k], out_v[k] = pull_back_linear(inputs, raw, options, d_u[k], d_v[k], None)
    return [out_u, out_v]


def features(plan: Plan, arrays: Sequence[Any], quiet: bool) -> Arrays:
    """What the factors' scores are multiplied by at a target; whether it is valid, `(B, 1)`.

    The first array is the target, `(B, n)`; then come those of the solve.
    """
    if quiet:

        def nothing() -> Arrays:
            scores = plan.model.num_scores
            return [np.zeros((1, scores), arrays[0].dtype), np.zeros((1, 1), bool)]

        return _each_if_some_fail(_features, plan, arrays, nothing)
    return _features(plan, arrays)


def _features(plan: Plan, arrays: Sequence[Any], quiet: bool = False, place: Any = None) -> Arrays:
    y, *given = arrays
    inputs, _ = plan.inputs(given, check=True, place=place)
    binary = ((y == 0) | (y == 1)).all(axis=1)
    checked = check_assignment(inputs, np.where(binary[:, None], y, 0).astype(np.float64))
    good = checked.feasible & binary
    if not quiet and not good.all():
        first = int(np.argmin(good))
        if not binary[first]:
            raise GraphError(f"loss: the target of instance {first} must hold only 0 and 1.")
        position, _ = checked.broken[first] or (0, 0)
        raise GraphError(
            f"The target of instance {first} breaks {plan.factors[position].name}. A target must "
            f"satisfy every factor; mask the entries that are unknown."
        )
    return [checked.features.astype(y.dtype), good[:, None]]


def write(
    run: Callable[..., Arrays], plan: Plan, arrays: Sequence[Any], places: Sequence[Any]
) -> None:
    """Writes what one of the functions above returns into `places`, quietly."""
    for place, own in zip(places, run(plan, arrays, quiet=True), strict=True):
        place[...] = own


# ---- Remembered solutions ------------------------------------------------------------------------

_remembered: Remembered[tuple[Inputs, RawSolution]] = Remembered(4)


def _key(plan: Plan, arrays: Sequence[Any]) -> Any:
    return (plan, *[a.tobytes() for a in arrays])


def _remember(plan: Plan, arrays: Sequence[Any], inputs: Inputs, raw: RawSolution) -> None:
    """Keeps a solution for its derivative, since structures are not arrays that JAX can keep."""
    if arrays[0].nbytes <= _MOST_BYTES:
        _remembered.keep(_key(plan, plan.without_warm(arrays)), (inputs, raw))


def _solved(
    plan: Plan, given: list[Any], sides: Any, tau: Any, place: Any
) -> tuple[Inputs, RawSolution]:
    """The solved problem and its solution, from what JAX kept."""
    if plan.is_structured:
        found = _remembered.get(_key(plan, given))
        if found is not None:
            return found
    inputs, _ = plan.cold.inputs(given, check=plan.is_structured, place=place)
    if plan.is_structured:
        return inputs, answer(inputs, plan.options, tau)
    raw = RawSolution(inputs.core)
    raw.take_sides(np.ascontiguousarray(sides))
    return inputs, raw


# ---- Invalid instances ---------------------------------------------------------------------------


def _each_if_some_fail(
    function: Callable[..., Arrays],
    plan: Plan,
    arrays: Sequence[Any],
    nothing: Callable[[], Arrays],
    directions: int = 0,
) -> Arrays:
    """What a function returns, with `nothing` for instances for which it raises.

    directions: how many of the first arrays, given and returned, have instances as second axis.
    """
    if plan.oracles:  # errors raised by a user-defined oracle must not be hidden
        return function(plan, arrays, True)
    try:
        return function(plan, arrays, True)
    except ValueError:
        pass
    batch = len(arrays[directions])
    found = []
    for i in range(batch):
        own = [a[:, i : i + 1] for a in arrays[:directions]]
        own += [a if len(a) == 1 else a[i : i + 1] for a in arrays[directions:]]
        try:
            found.append(function(plan, own, True, i))
        except ValueError:
            found.append(nothing())
    return [np.concatenate(each, axis=int(directions > 0)) for each in zip(*found, strict=True)]


def _invalid(plan: Plan, dtype: Any) -> Arrays:
    """The answer to an invalid instance."""
    model = plan.model
    sides = np.full((1, plan.num_sides), int(Side.absent), np.int8)
    sides[:, -1] = Status.INFEASIBLE.code  # its gradient is 0
    return [
        np.full((1, model.num_variables), np.nan, dtype),
        np.full((1, model.num_scores), np.nan, dtype),
        np.full((1, 1), np.nan, dtype),
        np.zeros((1, plan.num_dual), dtype),
        sides,
        np.array([[np.nan, np.nan, 0, Status.INVALID.code, 0, np.nan, 0]], dtype)[
            :, : plan.num_reported
        ],
    ]
