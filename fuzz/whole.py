"""What must hold of `solve_map` and `decode`."""

from __future__ import annotations

import numpy as np

import factormax as fm
from fuzz.case import Case
from fuzz.judge import (
    ENUMERATED,
    EPS,
    FloatArray,
    Infeasible,
    Run,
    per_instance,
    resolution,
    score_of,
    shortened,
    states_of,
)
from fuzz.model import holds
from fuzz.solving import check_infeasible, check_status

__all__ = ["check_decode", "check_map"]


def check_map(run: Run) -> None:
    """`solve_map`: the bound is one, the value is the relaxation's, integral means the best."""
    case = run.case
    try:
        built = run.build(case)
        solution = built.fg.solve_map(on_failure="ignore")
    except Infeasible:
        check_infeasible(run)
        return
    values = per_instance(case, built.u.value).astype(float)
    objective = per_instance(case, solution.objective).astype(float)
    bounds = per_instance(case, solution.upper_bound).astype(float)
    integral = per_instance(case, solution.integral)
    for i, (reference, status) in enumerate(zip(run.references, states_of(solution), strict=True)):
        one, best = reference.case, reference.linear
        if status is fm.Status.INFEASIBLE or reference.infeasible:
            check_status(run, reference, status, i)
            continue
        if best is None or best.gap > 1e-7 * one.largest * max(1, one.n):
            run.skip("reference")
            continue
        value, bound = float(objective[i]), float(bounds[i])
        rounding = 32 * EPS[one.dtype] * one.largest * (1 + len(reference.program.scores))
        feasible = best.value - best.residual * best.reach
        run.expect(
            "upper bound",
            bound >= feasible - rounding,
            f"upper bound {bound!r}, but {feasible!r} can be had",
        )
        if not check_status(run, reference, status, i):
            continue
        slack = 4 * resolution(one, 1e-6) * (best.reach + one.largest) + rounding + best.gap
        slack += 1e-6 * abs(best.bound)  # the gap may be as large, docs/math.md (57)
        run.expect(
            "value",
            abs(value - best.bound) <= slack,
            f"value {value!r}, best {best.bound!r} (± {slack:.2g})",
        )
        off = reference.program.violation(values[i])
        limit = 4 * resolution(one, 1e-6)
        run.expect("rows", off <= limit, f"a row is off by {off:.3g}")
        if integral[i]:
            _check_assignment(run, one, values[i], value, rounding)
            if reference.best is not None:
                top = reference.best[1]
                run.expect(
                    "integral is best",
                    value >= top - rounding - 2e-6 * (one.largest + abs(top)),
                    f"integral answer {value!r}, but {top!r} can be had",
                )


def _check_assignment(run: Run, case: Case, x: FloatArray, value: float, rounding: float) -> None:
    """A 0/1 assignment that every factor allows, worth what is said."""
    binary = bool(np.isin(x, (0, 1)).all())
    run.expect("0/1", binary, f"not 0/1: {shortened(x)}")
    if binary:
        here = case.present
        # With scores in float32 the parameters are taken for numbers of float32 too.
        off = 1e-6 if case.dtype == "float32" else 1e-9
        bad = [t.kind for t in case.terms if not holds(t, x[None], here, off)[0]]
        run.expect("allowed", not bad, f"{bad} do not allow {shortened(x)}")
        score = score_of(case, x)
        run.expect(
            "score",
            abs(score - value) <= rounding + 1e-9 * case.largest,
            f"objective {value!r}, the assignment is worth {score!r}",
        )


def check_decode(run: Run) -> None:
    """`decode`: the best of all assignments, by enumeration or integer programming."""
    case = run.case
    try:
        built = run.build(case)
        solution = built.fg.decode(on_failure="ignore", time_limit=5.0, max_nodes=2000)
    except Infeasible:
        check_infeasible(run)
        return
    values = per_instance(case, built.u.value).astype(float)
    objective = per_instance(case, solution.objective).astype(float)
    bounds = per_instance(case, solution.upper_bound).astype(float)
    for i, (reference, status) in enumerate(zip(run.references, states_of(solution), strict=True)):
        one, best = reference.case, reference.best
        if best is None:
            run.skip("reference")
            continue
        rounding = 32 * EPS[one.dtype] * one.largest * (1 + len(reference.program.scores))
        _, top = best
        if best[0] is None or status is fm.Status.INFEASIBLE:
            run.expect(
                "infeasible",
                best[0] is None and status is fm.Status.INFEASIBLE,
                f"status {status.name}, best score {top!r}",
            )
            continue
        bound, value = float(bounds[i]), float(objective[i])
        slack = rounding + 1e-8 * (one.largest + abs(top))
        run.expect(
            "upper bound",
            bound >= top - slack,
            f"upper bound {bound!r}, but {top!r} can be had",
        )
        if status is fm.Status.NOT_PROVED:
            if one.n > ENUMERATED:
                run.skip("proved")
            else:
                run.expect("proved", False, f"status {status.name}")
            continue
        _check_assignment(run, one, values[i], value, rounding)
        # More than the best of the solver for comparison is more, as the assignment is allowed.
        run.expect("best", value >= top - slack, f"decoded {value!r}, the best is {top!r}")
