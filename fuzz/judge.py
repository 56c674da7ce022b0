"""What must hold of every answer, judged by `model` and `program`.

Tolerances follow from what is documented: `tol` bounds how far the rows, each scaled to norm 1, may
be from holding, and rounding hides what is smaller than a few units of the last place of the
multipliers, which are as large as the scores (`resolution`). How far the marginals are off is a
small multiple of that, or what the rows that are tight make of it where they nearly depend on one
another (`amplification`). The reference adds its own proved gap: the objective is strongly concave,
so a point of gap g lies within √(2g) of the solution.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

import factormax as fm
from fuzz.case import Built, Case, build
from fuzz.model import best_assignment, holds, relaxation, worth
from fuzz.program import Optimum, Program, maximize, violation_of_best

try:
    from scipy import optimize as _optimize
    from scipy import sparse as _sparse
except ImportError:  # pragma: no cover - depends on the machine
    _optimize = None
    _sparse = None

__all__ = [
    "ENUMERATED",
    "EPS",
    "TIGHT",
    "UNSURE",
    "Failure",
    "FloatArray",
    "Infeasible",
    "Reference",
    "Run",
    "Tally",
    "hidden_by_rounding",
    "may_stall",
    "nearness",
    "per_instance",
    "resolution",
    "score_of",
    "shortened",
    "states_of",
    "strict",
]


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


class Infeasible(Exception):
    """The library knew at building that there is no assignment."""


@dataclass(eq=False)
class Reference:
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
    return x, score_of(case, x)


def score_of(case: Case, x: FloatArray) -> float:
    """What an assignment scores."""
    here = case.present
    own = sum(worth(t, x, here) for t in case.terms)
    return float(case.scores[here] @ x[here]) + own


class Run:
    """One case under one check."""

    def __init__(self, case: Case, name: str, seed: int, tally: Tally) -> None:
        self.case, self.name, self.tally = case, name, tally
        self.rng = np.random.default_rng([seed, len(name)])
        self.failures: list[Failure] = []
        self.references = [Reference(one) for one in case.singles()]

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
            raise Infeasible from error

    def solve(self, case: Case, **options: Any) -> tuple[Built, fm.Solution]:
        built = self.build(case)
        return built, built.fg.solve(on_failure="ignore", **options)


@contextmanager
def strict() -> Iterator[None]:
    """Every warning is an error."""
    with warnings.catch_warnings(), np.errstate(all="warn", under="ignore"):
        warnings.simplefilter("error")
        yield


def shortened(array: FloatArray) -> str:
    """As a list; the first of many."""
    listed = ", ".join(f"{v:.6g}" for v in array[:16])
    return f"[{listed}{', …' if len(array) > 16 else ''}]"


def _longest(case: Case) -> int:
    return max([1, *(int(t.index.shape[-1]) for t in case.terms)])


def resolution(case: Case, tol: float) -> float:
    """How far a row may be off: by `tol`, or by what rounding hides (docs/math.md, section 6)."""
    return max(tol, 8 * _longest(case) * EPS[case.dtype] * (1 + case.size))


def hidden_by_rounding(case: Case, multipliers: FloatArray) -> float:
    """What rounding hides beside these multipliers; float32 leaves it to double."""
    if case.dtype == "float32":
        return 0.0
    return float(EPS["float64"] * np.abs(multipliers).max(initial=0.0))


def hidden_in_rows(case: Case) -> float:
    """How far a variable can move while its row is off by no more than its terms are rounded.

    That is far if its coefficient is small beside the others.
    """
    most = 0.0
    for term in case.terms:
        for name in {"costs", "coefs"} & term.params.keys():
            sizes = np.abs(np.asarray(term.params[name], float)).reshape(-1, term.index.shape[-1])
            least = np.where(sizes > 0, sizes, np.inf).min(axis=1)
            most = max(most, float((sizes.sum(axis=1) / least).max(initial=0.0)))
    return 4 * EPS[case.dtype] * most


def nearness(case: Case, tol: float, sure: Optimum | None = None) -> float:
    """How far marginals may be off."""
    unsure = 0.0 if sure is None else float(np.sqrt(2 * sure.gap))
    return 20 * resolution(case, tol) + unsure


def states_of(solution: fm.Solution) -> list[fm.Status]:
    """How each instance ended."""
    return list(np.atleast_1d(np.asarray(solution.status, dtype=object)))


def per_instance(case: Case, array: Any) -> npt.NDArray[Any]:
    """An array of the solution with the batch dimension in front, also if there is none."""
    return np.asarray(array) if case.batched else np.asarray(array)[None]


def may_stall(case: Case) -> bool:
    """Whether the scores are too large for the precision."""
    return resolution(case, 1e-6) > 1e-3


# ---- solve ---------------------------------------------------------------------------------------
