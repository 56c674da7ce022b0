"""What must hold of every answer, judged by `model` and `program`.

Tolerances follow from what is documented: `tol` bounds how far the rows, each scaled to norm 1, may
be from holding, and rounding hides what is smaller than a few units of the last place of the
multipliers, which are as large as the scores (`_resolution`). How far the marginals are off is a
small multiple of that, or what the rows that are tight make of it where they nearly depend on one
another (`amplification`). The reference adds its own proved gap: the objective is strongly concave,
so a point of gap g lies within √(2g) of the solution.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

import factormax as fm
from fuzz.case import SCORES, STRUCTURED, Built, Case, Term, build
from fuzz.model import best_assignment, holds, relaxation, valid_structure, worth
from fuzz.program import Optimum, Program, amplification, maximize, violation_of_best

try:
    from scipy import optimize as _optimize
    from scipy import sparse as _sparse
except ImportError:  # pragma: no cover - depends on the machine
    _optimize = None
    _sparse = None

__all__ = ["CHECKS", "QUERIES", "Failure", "Tally", "check"]

FloatArray = npt.NDArray[np.float64]
EPS = {"float64": float(np.finfo(np.float64).eps), "float32": float(np.finfo(np.float32).eps)}
TIGHT = 1e-10
#: Up to this many free variables all assignments are tried.
ENUMERATED = 13
#: How far a reference may be unsure of its own answer before it is of no use.
UNSURE = 1e-3


@dataclass(frozen=True)
class Failure:
    """A check that failed: its name, the part of it, and what came."""

    check: str
    part: str
    message: str

    @property
    def label(self) -> str:
        """What a shrunk case must fail too."""
        return f"{self.check}: {self.part}"


@dataclass
class Tally:
    """How often every part of every check passed, failed, or could not be told."""

    passed: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)


class _Infeasible(Exception):
    """The library knew at building that there is no assignment."""


@dataclass(eq=False)
class _Reference:
    """The independent answers for one instance, found when asked for."""

    case: Case  # without a batch

    @cached_property
    def program(self) -> Program:
        return relaxation(self.case)

    @cached_property
    def _projected(self) -> Optimum | None:
        return maximize(self.program)

    @cached_property
    def violation(self) -> tuple[float, float] | None:
        """The least total violation of the rows, from below and from above."""
        found = self._projected
        if found is not None and found.residual * len(self.program.rows) < 1e-9:
            return 0.0, 1e-9  # here is a point that meets them all
        return violation_of_best(self.program)

    @property
    def infeasible(self) -> bool | None:
        """Whether there is no point at all; None if it is too close to call, or too large."""
        if self.violation is None:
            return None
        least, most = self.violation
        return True if least > 1e-5 else False if most < 1e-8 else None

    @cached_property
    def optimum(self) -> Optimum | None:
        return None if self.infeasible is not False else self._projected

    @cached_property
    def linear(self) -> Optimum | None:
        return None if self.infeasible is not False else maximize(self.program, quadratic=False)

    @cached_property
    def best(self) -> tuple[FloatArray | None, float] | None:
        """The best 0/1 assignment and its score; None if that can't be found out."""
        if int(self.case.present.sum()) <= ENUMERATED:
            return best_assignment(self.case)
        return _best_by_milp(self.case, self.program)


def _best_by_milp(case: Case, program: Program) -> tuple[FloatArray | None, float] | None:
    if _optimize is None or any(t.kind == "DepTree" and len(t.index) > 6 for t in case.terms):
        return None
    rows, cols, values = [], [], []
    low, high = [], []
    for r, (where, coefs, equal, bound) in enumerate(program.rows):
        rows.append(np.full(len(where), r))
        cols.append(where)
        values.append(coefs)
        low.append(bound if equal else -np.inf)
        high.append(bound)
    total = len(program.scores)
    upper = np.ones(total)
    upper[list(program.off)] = 0
    constraints = []
    if rows:
        entries = (np.concatenate(rows), np.concatenate(cols))
        matrix = _sparse.csr_matrix((np.concatenate(values), entries), shape=(len(rows), total))
        constraints.append(_optimize.LinearConstraint(matrix, low, high))
    # HiGHS stops at a gap of 1e-6: with scores of size 1e3 that is nothing.
    unit = 1e-3 * max(abs(s) for s in program.scores) or 1.0
    for presolve in (True, False):  # which calls what has an answer infeasible now and then
        found = _optimize.milp(
            -np.array(program.scores) / unit,
            integrality=np.arange(total) < case.n,
            bounds=_optimize.Bounds(np.zeros(total), upper),
            constraints=constraints,
            options={"time_limit": 10, "mip_rel_gap": 1e-9, "presolve": presolve},
        )
        if found.status != 2:
            break
    else:
        return None, -np.inf
    if found.status != 0:
        return None
    x = np.round(found.x[: case.n])
    present = case.present
    if not all(holds(t, x[None], present)[0] for t in case.terms):
        return None
    return x, _score(case, x)


def _score(case: Case, x: FloatArray) -> float:
    here = case.present
    own = sum(worth(t, x, here) for t in case.terms)
    return float(case.scores[here] @ x[here]) + own


class _Run:
    """One case under one check."""

    def __init__(self, case: Case, name: str, seed: int, tally: Tally) -> None:
        self.case, self.name, self.tally = case, name, tally
        self.rng = np.random.default_rng([seed, len(name)])
        self.failures: list[Failure] = []
        self.references = [_Reference(one) for one in case.singles()]

    def expect(self, part: str, good: Any, message: str) -> bool:
        label = f"{self.name}: {part}"
        if good:
            self.tally.passed[label] += 1
        else:
            self.tally.failed[label] += 1
            self.failures.append(Failure(self.name, part, message))
        return bool(good)

    def skip(self, part: str) -> None:
        self.tally.skipped[f"{self.name}: {part}"] += 1

    # ---- the library -----------------------------------------------------------------------------

    def build(self, case: Case, convert: Any = None) -> Built:
        try:
            return build(case, convert)
        except fm.InfeasibleError as error:
            raise _Infeasible from error

    def solve(self, case: Case, **options: Any) -> tuple[Built, fm.Solution]:
        built = self.build(case)
        return built, built.fg.solve(on_failure="ignore", **options)


@contextmanager
def _strict() -> Iterator[None]:
    """Every warning is an error."""
    with warnings.catch_warnings(), np.errstate(all="warn", under="ignore"):
        warnings.simplefilter("error")
        yield


def _short(array: FloatArray) -> str:
    """As a list; the first of many."""
    listed = ", ".join(f"{v:.6g}" for v in array[:16])
    return f"[{listed}{', …' if len(array) > 16 else ''}]"


def _longest(case: Case) -> int:
    return max([1, *(int(t.index.shape[-1]) for t in case.terms)])


def _resolution(case: Case, tol: float) -> float:
    """How far a row may be off: by `tol`, or by what rounding hides (docs/math.md, section 6)."""
    return max(tol, 8 * _longest(case) * EPS[case.dtype] * (1 + case.size))


def _hidden(case: Case, multipliers: FloatArray) -> float:
    """What rounding hides beside these multipliers; float32 leaves it to double."""
    if case.dtype == "float32":
        return 0.0
    return float(EPS["float64"] * np.abs(multipliers).max(initial=0.0))


def _near(case: Case, tol: float, sure: Optimum | None = None) -> float:
    """How far marginals may be off."""
    unsure = 0.0 if sure is None else float(np.sqrt(2 * sure.gap))
    return 20 * _resolution(case, tol) + unsure


def _states(solution: fm.Solution) -> list[fm.Status]:
    return list(np.atleast_1d(np.asarray(solution.status, dtype=object)))


def _per_instance(case: Case, array: Any) -> npt.NDArray[Any]:
    """An array of the solution with the batch dimension in front, also if there is none."""
    return np.asarray(array) if case.batched else np.asarray(array)[None]


def _may_stall(case: Case) -> bool:
    """Whether the scores are too large for the precision."""
    return _resolution(case, 1e-6) > 1e-3


# ---- solve ---------------------------------------------------------------------------------------


def _check_solve(run: _Run, tol: float = 1e-6) -> None:
    """Status, feasibility, optimality and structures of `solve`."""
    case = run.case
    try:
        built, solution = run.solve(case, tol=tol)
    except _Infeasible:
        _check_infeasible(run)
        return
    values = _per_instance(case, built.u.value).astype(float)
    objective = _per_instance(case, solution.objective).astype(float)
    multipliers = np.asarray(solution.multipliers, dtype=float)
    factor_values = _factor_values(case, built)
    for i, (reference, status) in enumerate(zip(run.references, _states(solution), strict=True)):
        if not _check_status(run, reference, status, i):
            continue
        one, mu = reference.case, values[i]
        if not run.expect("finite", np.isfinite(mu).all(), f"values {_short(mu)}"):
            continue
        run.expect("masked", not mu[~one.present].any(), f"masked values {_short(mu)}")
        own = [v if v is None else v[i] for v in factor_values]
        _check_feasible(run, reference, mu, own, max(tol, _hidden(run.case, multipliers[i])))
        _check_optimal(run, reference, mu, own, float(objective[i]), tol)
        _check_structures(run, built, one, i, mu, tol)


def _check_infeasible(run: _Run) -> None:
    """The library knew at building: one instance at least must be infeasible."""
    known = [r.infeasible for r in run.references]
    if None in known and True not in known:
        run.skip("raised at building")
    else:
        run.expect("raised at building", True in known, "InfeasibleError, but it is not")


def _check_status(run: _Run, reference: _Reference, status: fm.Status, i: int) -> bool:
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
    if status is not fm.Status.CONVERGED and _may_stall(run.case):
        run.skip("converged")
        return False
    return run.expect("converged", status is fm.Status.CONVERGED, f"instance {i}: status {name}")


def _factor_values(case: Case, built: Built) -> list[Any]:
    """`factor.value` of each term with scores, the batch dimension in front."""
    return [
        _per_instance(case, f.value).astype(float) if _score_name(t) else None
        for t, f in zip(case.terms, built.factors, strict=True)
    ]


def _score_name(term: Term) -> str | None:
    return next((name for name in SCORES if name in term.params), None)


def _check_feasible(
    run: _Run, reference: _Reference, mu: FloatArray, own: list[Any], tol: float
) -> None:
    case = reference.case
    off, limit = reference.program.violation(mu), 4 * _resolution(case, tol)
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
        most = 4 * _resolution(case, tol)
        run.expect("pair values", error <= most, f"pair values off by {error:.3g}")


def _own_worth(case: Case, mu: FloatArray, own: list[Any]) -> float:
    """What the factors' scores earn, from the marginals that the library reports."""
    total = 0.0
    for term, value in zip(case.terms, own, strict=True):
        name = _score_name(term)
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
    run: _Run, reference: _Reference, mu: FloatArray, own: list[Any], objective: float, tol: float
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
    error = 4 * _resolution(case, tol)
    above = error * (best.reach + case.n) + best.gap + rounding
    below = above + error * _pair_slope(case)
    run.expect(
        "optimal",
        -below <= value - best.bound <= above,
        f"value {value!r}, the best is {best.bound!r} (+ {above:.2g}, - {below:.2g})",
    )
    distance = float(np.abs(mu - best.x[: case.n]).max(initial=0.0))
    near = _near(case, tol, best)
    if distance > near:
        near += amplification(reference.program, best) * _resolution(case, tol)
    run.expect(
        "marginals",
        distance <= near,
        f"off by {distance:.3g} (> {near:.2g}) from {_short(best.x[: case.n])}",
    )


def _check_structures(
    run: _Run, built: Built, case: Case, i: int, mu: FloatArray, tol: float
) -> None:
    """The structures are what the factor allows, and their mean is the value."""
    for term, factor in zip(case.terms, built.factors, strict=True):
        if term.kind not in STRUCTURED or not case.present[term.index].any():
            continue
        count = int(_per_instance(run.case, factor.num_structures)[i])
        probs = _per_instance(run.case, factor.probs)[i][:count].astype(float)
        found = _per_instance(run.case, factor.structures)[i][:count]
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
            error <= _near(case, max(tol, 1e-6)),  # structures may come from a second solve
            f"{term.kind}: structures average to {error:.3g} off the value",
        )


def _check_tight(run: _Run) -> None:
    """The same to ten digits."""
    if run.case.dtype == "float32":
        run.skip("float32")
    else:
        _check_solve(run, TIGHT)


# ---- LP-MAP and decoding -------------------------------------------------------------------------


def _check_map(run: _Run) -> None:
    """`solve_map`: the bound is one, the value is the relaxation's, integral means the best."""
    case = run.case
    try:
        built = run.build(case)
        solution = built.fg.solve_map(on_failure="ignore")
    except _Infeasible:
        _check_infeasible(run)
        return
    values = _per_instance(case, built.u.value).astype(float)
    objective = _per_instance(case, solution.objective).astype(float)
    bounds = _per_instance(case, solution.upper_bound).astype(float)
    integral = _per_instance(case, solution.integral)
    for i, (reference, status) in enumerate(zip(run.references, _states(solution), strict=True)):
        one, best = reference.case, reference.linear
        if status is fm.Status.INFEASIBLE or reference.infeasible:
            _check_status(run, reference, status, i)
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
        if not _check_status(run, reference, status, i):
            continue
        slack = 4 * _resolution(one, 1e-6) * (best.reach + one.largest) + rounding + best.gap
        slack += 1e-6 * abs(best.bound)  # the gap may be as large, docs/math.md (57)
        run.expect(
            "value",
            abs(value - best.bound) <= slack,
            f"value {value!r}, best {best.bound!r} (± {slack:.2g})",
        )
        off = reference.program.violation(values[i])
        limit = 4 * _resolution(one, 1e-6)
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


def _check_assignment(run: _Run, case: Case, x: FloatArray, value: float, rounding: float) -> None:
    """A 0/1 assignment that every factor allows, worth what is said."""
    binary = bool(np.isin(x, (0, 1)).all())
    run.expect("0/1", binary, f"not 0/1: {_short(x)}")
    if binary:
        here = case.present
        # With scores in float32 the parameters are taken for numbers of float32 too.
        off = 1e-6 if case.dtype == "float32" else 1e-9
        bad = [t.kind for t in case.terms if not holds(t, x[None], here, off)[0]]
        run.expect("allowed", not bad, f"{bad} do not allow {_short(x)}")
        score = _score(case, x)
        run.expect(
            "score",
            abs(score - value) <= rounding + 1e-9 * case.largest,
            f"objective {value!r}, the assignment is worth {score!r}",
        )


def _check_decode(run: _Run) -> None:
    """`decode`: the best of all assignments, by enumeration or integer programming."""
    case = run.case
    try:
        built = run.build(case)
        solution = built.fg.decode(on_failure="ignore", time_limit=5.0, max_nodes=2000)
    except _Infeasible:
        _check_infeasible(run)
        return
    values = _per_instance(case, built.u.value).astype(float)
    objective = _per_instance(case, solution.objective).astype(float)
    bounds = _per_instance(case, solution.upper_bound).astype(float)
    for i, (reference, status) in enumerate(zip(run.references, _states(solution), strict=True)):
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


# ---- gradients -----------------------------------------------------------------------------------


def _moved(case: Case, direction: dict[Any, Any], h: float) -> Case:
    """The case with its scores, and its factors' scores, moved along a direction."""
    terms = tuple(
        replace(t, params={**t.params, name: t.params[name] + h * direction[i]})
        if (name := _score_name(t))
        else t
        for i, t in enumerate(case.terms)
    )
    return replace(case, scores=case.scores + h * direction["u"], terms=terms)


def _random_direction(run: _Run, case: Case, own: bool = True) -> dict[Any, Any]:
    out: dict[Any, Any] = {"u": np.where(case.present, run.rng.normal(size=case.n), 0.0)}
    for i, term in enumerate(case.terms):
        if name := _score_name(term):
            shape = np.shape(term.params[name])
            drawn = np.asarray(run.rng.normal(size=shape))
            finite = np.isfinite(term.params[name])
            out[i] = np.where(finite, drawn, 0.0) if own else np.zeros(shape)
    return out


def _grads(built: Built, weights: dict[Any, Any]) -> dict[Any, Any]:
    return {(built.u if k == "u" else built.factors[k]): v for k, v in weights.items()}


def _one_instance(run: _Run) -> Case | None:
    """An instance in double precision that can be differentiated."""
    one = run.case.instance(int(run.rng.integers(len(run.references))))
    reference = _Reference(one)
    if one.dtype == "float32" or reference.infeasible is not False:
        run.skip("instance")
        return None
    return one


def _is_tie(
    run: _Run, one: Case, loss: Callable[..., float], slope: float, noise: float, h: float
) -> bool:
    """Whether pieces with smaller and with larger slopes meet here.

    At such a point the answer has no derivative, although it may have the same one-sided slope, 0
    for instance, on both sides of a line through it; what `vjp` gives is between the slopes of the
    pieces.
    """
    slopes = []
    for _ in range(12):
        beside = _moved(one, _random_direction(run, one), 10 * h)
        slopes.append((loss(h / 10, beside) - loss(-h / 10, beside)) * 5 / h)
    return min(slopes) - noise <= slope <= max(slopes) + noise and max(slopes) - min(slopes) > noise


def _check_gradient(run: _Run) -> None:
    """`vjp` against finite differences: the answer is piecewise linear, so these are exact."""
    one = _one_instance(run)
    if one is None:
        return
    tol, h = 1e-12 * max(1.0, one.size), 1e-5
    try:
        built, solution = run.solve(one, tol=tol)
    except _Infeasible:
        return
    if not solution.converged:
        run.skip("converged")
        return
    for _ in range(2):
        weights = _random_direction(run, one, own=one.generic)
        direction = _random_direction(run, one)

        residuals: list[float] = []

        def loss(
            h: float,
            at: Case = one,
            d: Any = direction,
            w: Any = weights,
            off: Any = residuals,
        ) -> float:
            moved, answer = run.solve(_moved(at, d, h), tol=tol)
            if not answer.converged:
                return np.nan
            off.append(float(answer.primal_residual))
            total = float(w["u"] @ moved.u.value)
            return total + sum(
                float(np.sum(v * moved.factors[i].value)) for i, v in w.items() if i != "u"
            )

        down, here, up = loss(-h), loss(0.0), loss(h)
        before, after = (here - down) / h, (up - here) / h
        noise = 1e-5 + 100 * EPS["float64"] * one.size * one.n / h
        # Marginals are off by a small multiple of the residual: see `_near`.
        weight = sum(float(np.abs(w).sum()) for w in weights.values())
        unsure = 20 * max(residuals, default=0.0) * weight / h
        if not abs(before - after) <= noise or unsure > noise:
            run.skip("finite differences")  # a kink is near, or the re-solves are not exact
            continue
        grads = solution.vjp(_grads(built, weights))
        slope = float(grads[built.u] @ direction["u"]) + sum(
            float(np.sum(grads[built.factors[i]] * d)) for i, d in direction.items() if i != "u"
        )
        size = 1 + abs(slope)
        right = abs(slope - (up - down) / (2 * h)) <= 2 * noise * size
        if not right and _is_tie(run, one, loss, slope, 10 * noise * size, h):
            run.skip("finite differences")
            continue
        run.expect(
            "finite differences",
            right,
            f"vjp {slope!r}, finite differences {((up - down) / (2 * h))!r}",
        )
        run.expect(
            "masked",
            not grads[built.u][~one.present].any(),
            "a masked variable has a gradient",
        )


def _check_symmetry(run: _Run) -> None:
    """The Jacobian is the Hessian of a convex function: symmetric, of scores and factor scores."""
    one = _one_instance(run)
    if one is None:
        return
    try:
        built, solution = run.solve(one, tol=TIGHT)
    except _Infeasible:
        return
    if not solution.converged:
        run.skip("converged")
        return
    a, b = (_random_direction(run, one, own=one.generic) for _ in range(2))
    products = []
    for x, y in ((a, b), (b, a)):
        grads = solution.vjp(_grads(built, x))
        products.append(
            sum(
                float(np.sum(grads[built.u if k == "u" else built.factors[k]] * v))
                for k, v in y.items()
            )
        )
    size = 1 + sum(float(np.sum(v**2)) for v in (*a.values(), *b.values()))
    run.expect(
        "Jacobian",
        abs(products[0] - products[1]) <= 1e-7 * size,
        f"a·J·b = {products[0]!r}, b·J·a = {products[1]!r}",
    )


# ---- the same question, asked otherwise ----------------------------------------------------------


def _check_batch(run: _Run) -> None:
    """An instance of a batch gets the answer it gets alone, bit for bit."""
    case = run.case
    if not case.batched:
        run.skip("no batch")
        return
    try:
        built, solution = run.solve(case)
        singles = [run.solve(one) for one in case.singles()]
    except _Infeasible:
        return
    values = np.asarray(built.u.value)
    for i, (one, alone) in enumerate(singles):
        same = np.array_equal(values[i], np.asarray(one.u.value), equal_nan=True)
        error = float(np.nanmax(np.abs(values[i] - one.u.value), initial=0.0))
        run.expect("values", same, f"instance {i}: {error:.3g} off from alone")
        same = bool(_states(solution)[i] is _states(alone)[0])
        run.expect("status", same, f"instance {i}: another status alone")
        if one.factors and case.batched:
            a, b = _factor_values(case, built), _factor_values(case.instance(i), one)
            same = all(
                x is None or np.array_equal(x[i], y[0], equal_nan=True)
                for x, y in zip(a, b, strict=True)
            )
            run.expect("factor values", same, f"instance {i}: other factor values")


def _check_warm(run: _Run) -> None:
    """A warm start, from the same scores or from others, changes nothing."""
    case = run.case
    other = replace(case, scores=case.scores + 0.1 * run.rng.normal(size=case.scores.shape))
    tol = 1e-6 if case.dtype == "float32" else TIGHT
    try:
        built, solution = run.solve(case, tol=tol)
        cold = np.array(built.u.value)
        start = run.solve(other, tol=tol)[1] if run.rng.random() < 0.5 else solution
        again = built.fg.solve(on_failure="ignore", tol=tol, warm_start=start)
    except _Infeasible:
        return
    _compare(run, case, cold, solution, np.asarray(built.u.value), again, tol)


def _compare(
    run: _Run,
    case: Case,
    value: Any,
    solution: fm.Solution,
    other_value: Any,
    other: fm.Solution,
    tol: float,
) -> None:
    """Two ways to the same answer."""
    near = 2 * _near(case, tol) + 1e-8
    pairs = zip(_states(solution), _states(other), strict=True)
    for i, (status, second) in enumerate(pairs):
        if fm.Status.CONVERGED not in (status, second):
            continue
        if _may_stall(case) and status is not second:
            run.skip("status")
            continue
        run.expect(
            "status",
            status is second,
            f"status {status.name} and {second.name}",
        )
        if status is second:
            a, b = _per_instance(case, value)[i], _per_instance(case, other_value)[i]
            error = float(np.abs(a.astype(float) - b).max(initial=0.0))
            run.expect("values", error <= near, f"{error:.3g} apart (> {near:.2g})")


def _check_permuted(run: _Run) -> None:
    """The order of variables and factors does not matter."""
    case = run.case
    order = run.rng.permutation(case.n)
    place = np.argsort(order)
    terms = [replace(t, index=place[t.index]) for t in case.terms]
    shuffled = tuple(terms[k] for k in run.rng.permutation(len(terms)))
    mask = None if case.mask is None else case.mask[..., order]
    moved = replace(case, scores=case.scores[..., order], terms=shuffled, mask=mask)
    tol = 1e-6 if case.dtype == "float32" else TIGHT
    try:
        built, solution = run.solve(case, tol=tol)
        second, other = run.solve(moved, tol=tol)
    except _Infeasible:
        return
    back = np.asarray(second.u.value)[..., place]
    _compare(run, case, built.u.value, solution, back, other, tol)


def _check_precision(run: _Run) -> None:
    """Float32 answers what float64 does, as far as it can tell."""
    case = replace(run.case, dtype="float32")
    small = np.asarray(case.scores.astype(np.float32), dtype=float)
    terms = tuple(
        replace(
            t,
            params={
                k: np.asarray(v, np.float32).astype(float) if k in SCORES else v
                for k, v in t.params.items()
            },
        )
        for t in case.terms
    )
    case = replace(case, scores=small, terms=terms)
    try:
        built, solution = run.solve(case)
        second, other = run.solve(replace(case, dtype="float64"))
    except _Infeasible:
        return
    _compare(run, case, built.u.value, solution, second.u.value, other, 1e-6)
    dtype = np.asarray(built.u.value).dtype
    run.expect("dtype", dtype == np.float32, f"values of {dtype}")


def _check_torch(run: _Run) -> None:
    """The torch front gives the same values, and its tape the gradients of `vjp`."""
    try:
        import torch
    except ImportError:  # pragma: no cover - depends on the machine
        run.skip("torch")
        return
    case = run.case

    leaves: list[Any] = []  # in the order in which the graph is built

    def convert(array: FloatArray) -> Any:
        leaves.append(torch.from_numpy(array.astype(case.dtype)).requires_grad_())
        return leaves[-1]

    try:
        built, solution = run.solve(case)
        second = run.build(case, convert)
        other = second.fg.solve(on_failure="ignore")
    except _Infeasible:
        return
    value: Any = second.u.value
    ours = np.asarray(built.u.value)
    same = np.array_equal(ours, value.detach().numpy(), equal_nan=True)
    run.expect("values", same, "other values than with NumPy")
    if any(s is not fm.Status.CONVERGED for s in (*_states(solution), *_states(other))):
        run.skip("gradients")
        return
    weights = run.rng.normal(size=ours.shape).astype(case.dtype)
    (value * torch.from_numpy(weights)).sum().backward()
    expected = solution.vjp({built.u: weights})
    keys: list[Any] = [built.u]
    for term, factor in zip(case.terms, built.factors, strict=True):
        names = [name for name in term.params if name in SCORES]
        keys += [factor if name == _score_name(term) else (factor, name) for name in names]
    for leaf, key in zip(leaves, keys, strict=True):
        taped = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        error = float(np.abs(taped - expected[key]).max(initial=0.0))
        size = 1 + float(np.abs(expected[key]).max(initial=0.0))
        run.expect("gradients", error <= 1e-6 * size, f"gradients {error:.3g} apart")


#: The checks, and how likely each is for graphs of each size.
CHECKS: dict[str, tuple[Callable[[_Run], None], dict[str, float]]] = {
    "solve": (_check_solve, {"small": 1.0, "mid": 1.0, "large": 1.0}),
    "tight": (_check_tight, {"small": 0.6, "mid": 0.5, "large": 0.2}),
    "map": (_check_map, {"small": 0.4, "mid": 0.4, "large": 0.2}),
    "decode": (_check_decode, {"small": 0.35, "mid": 0.2, "large": 0.0}),
    "gradient": (_check_gradient, {"small": 0.4, "mid": 0.3, "large": 0.1}),
    "symmetry": (_check_symmetry, {"small": 0.3, "mid": 0.3, "large": 0.3}),
    "batch": (_check_batch, {"small": 0.5, "mid": 0.5, "large": 0.5}),
    "warm": (_check_warm, {"small": 0.2, "mid": 0.3, "large": 0.3}),
    "permuted": (_check_permuted, {"small": 0.2, "mid": 0.3, "large": 0.3}),
    "precision": (_check_precision, {"small": 0.2, "mid": 0.2, "large": 0.2}),
    "torch": (_check_torch, {"small": 0.1, "mid": 0.1, "large": 0.1}),
}
#: What to write into a snippet for each.
QUERIES = {
    "tight": "fg.solve(tol=1e-10)",
    "map": "fg.solve_map()",
    "decode": "fg.decode()",
    "gradient": "fg.solve(tol=1e-12)",
    "symmetry": "fg.solve(tol=1e-10)",
}


def check(
    case: Case, seed: int, size: str = "small", only: str | None = None, tally: Tally | None = None
) -> list[Failure]:
    """Puts a case through the checks that fall to it, or through those named, as in "solve,map"."""
    tally = Tally() if tally is None else tally
    lots = np.random.default_rng([seed, 1])
    failures: list[Failure] = []
    references: list[_Reference] | None = None
    for name, (function, odds) in CHECKS.items():
        drawn = lots.random() < odds[size]
        if not (drawn if only is None else name in only.split(",")):
            continue
        run = _Run(case, name, seed, tally)
        if references is not None:
            run.references = references
        references = run.references
        try:
            with _strict():
                function(run)
        except Exception as error:
            kind = type(error).__name__
            run.expect(kind, False, f"{kind}: {error}")
        failures += run.failures
    return failures
