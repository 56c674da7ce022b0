"""What must hold of `solve`, at the default tolerance and at a tight one."""

from __future__ import annotations

from typing import Any

import numpy as np

import factormax as fm
from fuzz.case import SCORES, STRUCTURED, Built, Case, Term
from fuzz.judge import (
    EPS,
    TIGHT,
    UNSURE,
    FloatArray,
    Infeasible,
    Reference,
    Run,
    hidden_by_rounding,
    may_stall,
    nearness,
    per_instance,
    resolution,
    shortened,
    states_of,
)
from fuzz.model import valid_structure
from fuzz.program import amplification

__all__ = [
    "check_infeasible",
    "check_solve",
    "check_status",
    "check_tight",
    "score_name",
    "values_of_factors",
]


def check_solve(run: Run, tol: float = 1e-6) -> None:
    """Status, feasibility, optimality and structures of `solve`."""
    case = run.case
    try:
        built, solution = run.solve(case, tol=tol)
    except Infeasible:
        check_infeasible(run)
        return
    values = per_instance(case, built.u.value).astype(float)
    objective = per_instance(case, solution.objective).astype(float)
    multipliers = np.asarray(solution.multipliers, dtype=float)
    factor_values = values_of_factors(case, built)
    for i, (reference, status) in enumerate(zip(run.references, states_of(solution), strict=True)):
        if not check_status(run, reference, status, i):
            continue
        one, mu = reference.case, values[i]
        if not run.expect("finite", np.isfinite(mu).all(), f"values {shortened(mu)}"):
            continue
        run.expect("masked", not mu[~one.present].any(), f"masked values {shortened(mu)}")
        own = [v if v is None else v[i] for v in factor_values]
        _check_feasible(
            run, reference, mu, own, max(tol, hidden_by_rounding(run.case, multipliers[i]))
        )
        _check_optimal(run, reference, mu, own, float(objective[i]), tol)
        _check_structures(run, built, one, i, mu, tol)


def check_infeasible(run: Run) -> None:
    """The library knew at building: one instance at least must be infeasible."""
    known = [r.infeasible for r in run.references]
    if None in known and True not in known:
        run.skip("raised at building")
    else:
        run.expect("raised at building", True in known, "InfeasibleError, but it is not")


def check_status(run: Run, reference: Reference, status: fm.Status, i: int) -> bool:
    """Whether there is an answer to look at."""
    infeasible = reference.infeasible
    name = status.name
    if status is fm.Status.INFEASIBLE:
        if infeasible is None:
            run.skip("infeasible")
        else:
            run.expect("infeasible", infeasible, f"instance {i} is feasible, status {name}")
        return False
    if infeasible:
        assert reference.violation is not None
        least = reference.violation[0]
        run.expect(
            "feasible",
            False,
            f"instance {i} is infeasible (rows off by {least:.3g}), status {name}",
        )
        return False
    if status is not fm.Status.CONVERGED and may_stall(run.case):
        run.skip("converged")
        return False
    return run.expect("converged", status is fm.Status.CONVERGED, f"instance {i}: status {name}")


def values_of_factors(case: Case, built: Built) -> list[Any]:
    """`factor.value` of each term with scores, the batch dimension in front."""
    return [
        per_instance(case, f.value).astype(float) if score_name(t) else None
        for t, f in zip(case.terms, built.factors, strict=True)
    ]


def score_name(term: Term) -> str | None:
    """The parameter of a factor that holds its scores."""
    return next((name for name in SCORES if name in term.params), None)


def _check_feasible(
    run: Run, reference: Reference, mu: FloatArray, own: list[Any], tol: float
) -> None:
    case = reference.case
    off, limit = reference.program.violation(mu), 4 * resolution(case, tol)
    run.expect("rows", off <= limit, f"a row is off by {off:.3g}, more than {limit:.2g}")
    for term, value in zip(case.terms, own, strict=True):
        if term.kind != "Pair":
            continue
        here = case.present[term.index].any(axis=1)
        ends = mu[term.index]
        first, second = np.where(np.array(term.negated), 1 - ends, ends).T
        s = np.broadcast_to(term.params["scores"], first.shape)
        both = np.where(s >= 0, np.minimum(first, second), np.maximum(0, first + second - 1)) * here
        unclear = s == 0
        error = float(np.abs(np.where(unclear, 0, both - value)).max(initial=0.0))
        most = 4 * resolution(case, tol)
        run.expect("pair values", error <= most, f"pair values off by {error:.3g}")


def _own_worth(case: Case, mu: FloatArray, own: list[Any]) -> float:
    """What the factors' scores earn, from the marginals that the library reports."""
    total = 0.0
    for term, value in zip(case.terms, own, strict=True):
        name = score_name(term)
        if name is None:
            continue
        scores = np.asarray(term.params[name], dtype=float)
        possible = np.isfinite(scores)
        total += float(np.sum(np.where(possible, scores, 0) * value))
        if (np.abs(np.where(possible, 0, value)) > 1e-5).any():
            return np.inf  # a forbidden state has weight: never right
        steps = term.index[case.present[term.index].any(axis=-1)]
        for end, step in (("initial", 0), ("final", -1)):
            if end in term.params and len(steps):
                ends = np.asarray(term.params[end], dtype=float)
                total += float(np.where(np.isfinite(ends), ends, 0) @ mu[steps[step]])
    return total


def _pair_slope(case: Case) -> float:
    """What pairs may lose if marginals are off by 1: their slopes are larger than multipliers."""
    pairs = [
        np.broadcast_to(t.params["scores"], len(t.index)) for t in case.terms if t.kind == "Pair"
    ]
    return float(sum(np.abs(s[np.isfinite(s)]).sum() for s in pairs))


def _check_optimal(
    run: Run, reference: Reference, mu: FloatArray, own: list[Any], objective: float, tol: float
) -> None:
    case, best = reference.case, reference.optimum
    here = case.present
    linear = float(case.scores[here] @ mu[here]) + _own_worth(case, mu, own)
    value = linear - 0.5 * float(mu @ mu)
    rounding = 16 * EPS[case.dtype] * (case.size * (case.n + len(reference.program.scores)) + 1)
    run.expect(
        "objective",
        abs(value - objective) <= rounding + 1e-9 * case.size,
        f"objective {objective!r}, its value is worth {value!r}",
    )
    if best is None or np.sqrt(2 * best.gap) > UNSURE:
        run.skip("optimal")
        return
    error = 4 * resolution(case, tol)
    above = error * (best.reach + case.n) + best.gap + rounding
    below = above + error * _pair_slope(case)
    run.expect(
        "optimal",
        -below <= value - best.bound <= above,
        f"value {value!r}, the best is {best.bound!r} (+ {above:.2g}, - {below:.2g})",
    )
    distance = float(np.abs(mu - best.x[: case.n]).max(initial=0.0))
    near = nearness(case, tol, best)
    if distance > near:
        near += amplification(reference.program, best) * resolution(case, tol)
    run.expect(
        "marginals",
        distance <= near,
        f"off by {distance:.3g} (> {near:.2g}) from {shortened(best.x[: case.n])}",
    )


def _check_structures(
    run: Run, built: Built, case: Case, i: int, mu: FloatArray, tol: float
) -> None:
    """The structures are what the factor allows, and their mean is the value."""
    for term, factor in zip(case.terms, built.factors, strict=True):
        if term.kind not in STRUCTURED or not case.present[term.index].any():
            continue
        count = int(per_instance(run.case, factor.num_structures)[i])
        probs = per_instance(run.case, factor.probs)[i][:count].astype(float)
        found = per_instance(run.case, factor.structures)[i][:count]
        found = found.reshape(count, *term.index.shape)
        good = all(valid_structure(term, s, case.present) for s in found)
        run.expect("structures", good, f"{term.kind}: not a structure")
        total = float(probs.sum())
        run.expect(
            "probs",
            (probs > 0).all() and abs(total - 1) < 1e-5,
            f"{term.kind}: probs {probs}",
        )
        error = float(np.abs(np.tensordot(probs, found, 1) - mu[term.index]).max(initial=0.0))
        run.expect(
            "mean of structures",
            error <= nearness(case, max(tol, 1e-6)),  # structures may come from a second solve
            f"{term.kind}: structures average to {error:.3g} off the value",
        )


def check_tight(run: Run) -> None:
    """The same to ten digits."""
    if run.case.dtype == "float32":
        run.skip("float32")
    else:
        check_solve(run, TIGHT)
