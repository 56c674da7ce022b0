r"""Quadratic programs in a box, by an interior point method, with a bound that holds in any case.

$$\max_{0\le x\le 1}\ q\cdot x - \tfrac12\sum_j w_jx_j^2 \quad\text{s.t.}\quad Ax = b,\ Gx\le h.$$

For any multipliers $y$ (not negative for the inequalities) the maximum is at most

$$\sum_j \max_{0\le x\le1}\Big[(q - K^\top y)_jx - \tfrac12w_jx^2\Big] + y\cdot(b, h)$$

with $K = (A; G)$. These are parabolas, evaluated exactly: whatever the method did, the bound is
right. Nothing here is taken from the library. NumPy is enough; SciPy makes large programs fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    from scipy import sparse as _sparse
    from scipy.sparse import linalg as _linalg
except ImportError:  # pragma: no cover - depends on the machine
    _sparse = None
    _linalg = None

__all__ = ["Optimum", "Program", "amplification", "maximize", "violation_of_best"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: The most rows of a program without SciPy: a dense factorisation of more takes too long.
DENSE_ROWS = 1200
#: From this many variables and rows on, a sparse factorisation is the faster one.
SPARSE_FROM = 220
#: Steps are drawn a little to where they start, which keeps multipliers from running away where
#: no point is strictly inside all rows.
PROXIMAL = 1e-7


@dataclass
class Program:
    """Variables in [0, 1] with scores, and rows. The first `n` are those of the graph."""

    n: int
    scores: list[float] = field(default_factory=list)
    off: set[int] = field(default_factory=set)  # variables that must be 0
    rows: list[tuple[IntArray, FloatArray, bool, float]] = field(default_factory=list)
    constant: float = 0.0

    def __post_init__(self) -> None:
        self.scores = [0.0] * self.n

    def extra(self, scores: Any) -> IntArray:
        """More variables, with these scores; −inf forbids."""
        first = len(self.scores)
        for j, score in enumerate(np.ravel(np.asarray(scores, dtype=float))):
            self.scores.append(0.0 if score == -np.inf else float(score))
            if score == -np.inf:
                self.off.add(first + j)
        return np.arange(first, len(self.scores))

    def add_score(self, j: int, score: float) -> None:
        """Adds to the score of a variable; −inf forbids it."""
        if score == -np.inf:
            self.off.add(int(j))
        else:
            self.scores[int(j)] += float(score)

    def row(self, index: Any, coefs: Any, bound: float, equal: bool = False) -> None:
        """Adds coefs · x[index] ≤ bound, or = bound."""
        where = np.asarray(index, dtype=np.int64).reshape(-1)
        factor = np.broadcast_to(np.asarray(coefs, dtype=float).reshape(-1), where.shape)
        self.rows.append((where, np.array(factor), equal, float(bound)))

    def violation(self, mu: FloatArray) -> float:
        """By how much `mu` breaks a row over the graph's variables alone, per unit of its norm."""
        worst = max(0.0, float((-mu).max(initial=0.0)), float((mu - 1).max(initial=0.0)))
        for where, coefs, equal, bound in self.rows:
            if where.size and where.max() < self.n:
                excess = float(coefs @ mu[where] - bound)
                norm = max(float(np.linalg.norm(coefs)), 1e-300)
                worst = max(worst, (abs(excess) if equal else excess) / norm)
        return worst


@dataclass(frozen=True)
class Optimum:
    """What was found, and what is proved.

    Attributes:
        x: nearly feasible and nearly optimal.
        value: the value of x; not a proof, as x is only nearly feasible.
        bound: no feasible point is worth more (up to rounding).
        residual: by how much x breaks a row.
        reach: the sum of the multipliers: what breaking all rows by 1 could earn.
        rounding: how far value and bound may be off for being summed up in doubles.
    """

    x: FloatArray
    value: float
    bound: float
    residual: float
    reach: float
    rounding: float = 0.0

    @property
    def gap(self) -> float:
        """How far the value may be from the maximum; never 0 where a row is broken."""
        price = self.residual * (1 + self.reach)
        return max(0.0, self.bound - self.value) + price + self.rounding


class _Matrix:
    """The rows, dense or sparse, over the variables that are not fixed."""

    def __init__(self, program: Program, kept: IntArray) -> None:
        place = np.full(len(program.scores), -1)
        place[kept] = np.arange(len(kept))
        ordered = sorted(program.rows, key=lambda row: not row[2])
        self.equalities = sum(row[2] for row in ordered)
        self.bound = np.array([row[3] for row in ordered])
        at, cols, values = [], [], []
        for r, (where, coefs, _, _) in enumerate(ordered):
            norm = float(np.linalg.norm(coefs)) or 1.0
            self.bound[r] /= norm
            here = place[where] >= 0
            at.append(np.full(int(here.sum()), r))
            cols.append(place[where[here]])
            values.append(coefs[here] / norm)
        shape = (len(ordered), len(kept))
        none: list[Any] = [np.zeros(0, int)]
        entries = (np.concatenate(none + at), np.concatenate(none + cols))
        numbers = np.concatenate([np.zeros(0), *values])
        self.sparse = _sparse is not None and sum(shape) >= SPARSE_FROM
        if self.sparse:
            self.K: Any = _sparse.csr_matrix((numbers, entries), shape=shape)
        else:
            self.K = np.zeros(shape)
            np.add.at(self.K, entries, numbers)
        self.KT: Any = self.K.T.tocsr() if self.sparse else self.K.T

    def solver(self, theta: FloatArray, corner: FloatArray) -> Any:
        """Solves [Θ Kᵀ; K −E] [dx; dy] = [r1; r2], refined."""
        corner = corner + PROXIMAL
        theta = theta + PROXIMAL
        if self.sparse:
            matrix = _sparse.bmat(
                [[_sparse.diags(theta), self.KT], [self.K, -_sparse.diags(corner)]],
                format="csc",
            )
            # Quasi-definite: pivots from the diagonal will do, and keep the factors sparse.
            lu = _linalg.splu(
                matrix,
                permc_spec="MMD_AT_PLUS_A",
                diag_pivot_thresh=0.0,
                options={"SymmetricMode": True},
            )

            def direct(r1: FloatArray, r2: FloatArray) -> tuple[FloatArray, FloatArray]:
                both = lu.solve(np.concatenate([r1, r2]))
                return both[: len(r1)], both[len(r1) :]
        else:
            scaled = self.K / theta
            normal = scaled @ self.KT + np.diag(corner)
            try:
                inverse = np.linalg.inv(np.linalg.cholesky(normal))
            except np.linalg.LinAlgError:
                normal += np.eye(len(normal)) * 1e-8 * max(1.0, float(np.abs(normal).max()))
                inverse = np.linalg.inv(np.linalg.cholesky(normal))

            def direct(r1: FloatArray, r2: FloatArray) -> tuple[FloatArray, FloatArray]:
                dy = inverse.T @ (inverse @ (scaled @ r1 - r2))
                return (r1 - self.KT @ dy) / theta, dy

        def solve(r1: FloatArray, r2: FloatArray) -> tuple[FloatArray, FloatArray]:
            dx, dy = direct(r1, r2)
            for _ in range(2):
                again = direct(r1 - theta * dx - self.KT @ dy, r2 - (self.K @ dx - corner * dy))
                dx, dy = dx + again[0], dy + again[1]
            return dx, dy

        return solve


def maximize(program: Program, quadratic: bool = True, steps: int = 80) -> Optimum | None:
    """Solves a feasible program; None if it is too large for what is installed.

    Of a program that is not feasible, nothing comes of it: ask `violation_of_best` first.
    """
    total = len(program.scores)
    fixed = np.zeros(total, dtype=bool)
    fixed[list(program.off)] = True
    kept = np.flatnonzero(~fixed)
    m = _Matrix(program, kept)
    if not m.sparse and len(m.bound) > DENSE_ROWS:
        return None
    q = np.array(program.scores)[kept]
    unit = float(np.abs(q).max(initial=0.0)) or 1.0
    if quadratic:
        unit = max(1.0, unit)
    w = np.where(kept < program.n, float(quadratic), 0.0)
    best = _interior(m, q, w, unit, steps)
    x = np.zeros(total)
    x[kept] = best.x
    return Optimum(
        x,
        best.value + program.constant,
        best.bound + program.constant,
        best.residual,
        best.reach,
        4 * float(np.finfo(float).eps) * (abs(best.value) + best.reach + 1),
    )


def _interior(m: _Matrix, q: FloatArray, w: FloatArray, unit: float, steps: int) -> Optimum:
    """Mehrotra's predictor and corrector, from the middle of the box, for q and w over `unit`."""
    c, weight, e = -q / unit, w / unit, m.equalities
    rows = len(m.bound)
    x, y = np.full(len(q), 0.5), np.zeros(rows)
    lower, upper = np.ones(len(q)), np.ones(len(q))
    y[e:] = 1.0
    slack = np.maximum(m.bound[e:] - (m.K @ x)[e:], 1.0)
    best: Optimum | None = None
    since = 0
    for _ in range(steps):
        found = _measure(m, q, w, x, y * unit, e)
        if best is None or found.gap < 0.9 * best.gap:
            since = 0
        if best is None or found.gap < best.gap:
            best = found
        since += 1
        if since > 8 or best.gap <= 1e-15 * unit:
            break
        t = 1 - x
        rd = weight * x + c + m.KT @ y - lower + upper
        rp = m.K @ x - m.bound
        rp[e:] += slack
        corner = np.zeros(rows)
        corner[e:] = slack / y[e:]
        theta = weight + lower / x + upper / t
        try:
            solve = m.solver(theta, corner)
        except (np.linalg.LinAlgError, RuntimeError):
            break
        count = 2 * len(x) + rows - e
        mean = (x @ lower + t @ upper + slack @ y[e:]) / max(1, count)
        # The predictor aims at 0, the corrector at what the predictor has shown to be in reach.
        aim_x = aim_t = np.zeros(len(x))
        aim_s = np.zeros(rows - e)
        step: tuple[FloatArray, ...] = ()
        for corrector in (False, True):
            r1 = -rd + (aim_x / x - lower) - (aim_t / t - upper)
            r2 = -rp
            r2[e:] += slack - aim_s / y[e:]
            dx, dy = solve(r1, r2)
            dl = aim_x / x - lower - lower / x * dx
            du = aim_t / t - upper + upper / t * dx
            ds = aim_s / y[e:] - slack - slack / y[e:] * dy[e:]
            primal = _longest((x, dx), (t, -dx), (slack, ds))
            dual = _longest((lower, dl), (upper, du), (y[e:], dy[e:]))
            step = (dx, dy, dl, du, ds)
            if not corrector:
                after = (
                    (x + primal * dx) @ (lower + dual * dl)
                    + (t - primal * dx) @ (upper + dual * du)
                    + (slack + primal * ds) @ (y[e:] + dual * dy[e:])
                ) / max(1, count)
                target = mean * min(1.0, max(after / mean, 0.0)) ** 3
                aim_x = target - dx * dl
                aim_t = target + dx * du
                aim_s = target - ds * dy[e:]
        if not all(np.isfinite(part).all() for part in step):
            break
        dx, dy, dl, du, ds = step
        if weight.any():  # one step length keeps a quadratic program's residuals in step
            primal = dual = min(primal, dual)
        x, slack = x + 0.995 * primal * dx, slack + 0.995 * primal * ds
        y = y + 0.995 * dual * dy
        lower, upper = lower + 0.995 * dual * dl, upper + 0.995 * dual * du
        tiny = 1e-300
        x = np.clip(x, 1e-16, 1 - 1e-16)
        lower, upper = np.maximum(lower, tiny), np.maximum(upper, tiny)
        slack = np.maximum(slack, tiny)
        y[e:] = np.maximum(y[e:], tiny)
    assert best is not None
    return best


def _longest(*pairs: tuple[FloatArray, FloatArray]) -> float:
    """The longest step, at most 1, that keeps all of them positive."""
    most = 1.0
    for value, change in pairs:
        down = change < 0
        if down.any():
            most = min(most, float((-value[down] / change[down]).min()))
    return most


def _measure(
    m: _Matrix, q: FloatArray, w: FloatArray, x: FloatArray, y: FloatArray, e: int
) -> Optimum:
    y = y.copy()
    y[e:] = np.maximum(y[e:], 0.0)
    z = q - m.KT @ y
    at = np.where(w > 0, np.clip(z, 0, 1), (z > 0).astype(float))
    bound = float(np.sum(z * at - 0.5 * w * at * at) + m.bound @ y)
    excess = m.K @ x - m.bound
    excess[e:] = np.maximum(excess[e:], 0.0)
    residual = float(np.abs(excess).max(initial=0.0))
    value = float(q @ x - 0.5 * (w * x) @ x)
    return Optimum(x, value, bound, residual, float(np.abs(y).sum()))


def amplification(program: Program, best: Optimum) -> float:
    """How far a variable of the graph moves if every tight row is broken by 1, at most.

    Where the same rows are tight and the same variables free, a point that is optimal but for rows
    that are off by e differs from the solution by the shortest change that mends them. The other
    variables, which the quadratic does not hold, follow at no cost. Near dependences count up to
    a thousandfold: beyond, an answer would tell nothing.
    """
    free = (best.x > 1e-6) & (best.x < 1 - 1e-6)
    rows = []
    for where, coefs, equal, bound in program.rows:
        norm = float(np.linalg.norm(coefs)) or 1.0
        if equal or (coefs @ best.x[where] - bound) / norm > -1e-6:
            row = np.zeros(len(program.scores))
            np.add.at(row, where, coefs / norm)
            rows.append(row * free)
    if not rows:
        return 0.0
    tight = np.array(rows)
    own, extra = tight[:, : program.n], tight[:, program.n :]
    beyond = np.eye(len(tight)) - extra @ np.linalg.pinv(extra)  # what extras do not make up for
    response = np.linalg.pinv(beyond @ own, rcond=1e-3) @ beyond
    return float(np.abs(response).sum(axis=1).max(initial=0.0))


def violation_of_best(program: Program) -> tuple[float, float] | None:
    """The least total violation of the rows: (at least, at most); both 0 if it is feasible.

    Every row is allowed to be broken, at a price: that program is always feasible, and its bound
    proves that the rows can't all hold.
    """
    elastic = Program(program.n)
    elastic.extra(np.zeros(len(program.scores) - program.n))
    elastic.off = set(program.off)
    for where, coefs, equal, bound in program.rows:
        norm = float(np.linalg.norm(coefs)) or 1.0
        most = (float(np.abs(coefs).sum()) + abs(bound)) / norm
        (over,) = elastic.extra([-most])
        index, factor = [*where, over], [*(coefs / norm), -most]
        if equal:
            (under,) = elastic.extra([-most])
            index, factor = [*index, under], [*factor, most]
        elastic.row(index, factor, bound / norm, equal)
    found = maximize(elastic, quadratic=False)
    if found is None:
        return None
    return max(0.0, -found.bound), max(0.0, -found.value) + found.residual * max(
        1, len(elastic.rows)
    )
