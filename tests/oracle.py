"""An exact, independent oracle: LP-SparseMAP as a dense quadratic program.

It knows what the factors *mean* (`MEANING`), the rows of their convex hulls (`rows`), and
nothing of factormax. A `Problem` is lowered to

    max  eta·mu + sum_pairs s·mu12 - ½|mu|²    s.t.  G x <= h,  A x = b,   x = (mu, mu12),

solved by Clarabel and then polished to rounding error: the active rows are identified, the
equality-constrained problem on them is solved directly, and the answer is accepted only if it
is feasible and has multipliers of the right sign.

A structured factor (`Structured`) is given by its vertices: it adds their probabilities p to x,
with M p = mu on its variables, and its own scores earn by its features N p.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import clarabel
import numpy as np
import scipy.sparse as sp
from meaning import MEANING
from scipy.linalg import null_space
from scipy.optimize import linprog, nnls

OFF = -1  # the column of a variable that is masked
PRIMAL_TOL = 1e-10
DUAL_TOL = 1e-9  # plus the resolution of the scores, see `_dual_tol`


class Infeasible(Exception):
    """No point satisfies the rows."""


@dataclass(frozen=True)
class Term:
    """One factor over the literals `vars[k]`, negated where `neg[k]`.

    `params` holds `budget`, `count`, `costs`, `coefs` or bounds; `scores` is a Pair's own score.
    """

    kind: str
    vars: tuple[int, ...]
    neg: tuple[bool, ...] = ()
    params: dict = field(default_factory=dict)
    scores: float = 0.0

    def __post_init__(self):
        object.__setattr__(self, "vars", tuple(map(int, self.vars)))
        object.__setattr__(self, "neg", tuple(map(bool, self.neg)) or (False,) * len(self.vars))

    def literals(self, y) -> tuple[int, ...]:
        """The literals' values under the 0/1 assignment y of all the variables."""
        return tuple(int(y[j]) ^ negated for j, negated in zip(self.vars, self.neg, strict=True))

    def holds(self, y) -> bool:
        return bool(MEANING[self.kind](self.literals(y), self.params))

    def placed(self, place) -> "Term | None":
        """The factor over the columns `place`, `OFF` where a variable is; None if all of them are.

        A variable that is off is 0, so its literal is false and its negation true.
        """
        columns = [int(place[j]) for j in self.vars]
        return None if set(columns) == {OFF} else replace(self, vars=tuple(columns))

    def assignments(self) -> list[tuple[int, ...]]:
        """The allowed 0/1 assignments of the literals, by enumeration."""
        d = len(self.vars)
        return [x for x in product((0, 1), repeat=d) if MEANING[self.kind](x, self.params)]


@dataclass(frozen=True, eq=False)
class Structured:
    """A structured factor over `vars`: its structures are the columns of M, with features N."""

    vars: tuple[int, ...]
    M: np.ndarray  # (d, K)
    N: np.ndarray  # (s, K)
    scores: np.ndarray  # (s,); -inf forbids what uses it
    kind: str = "Structured"

    def __post_init__(self):
        object.__setattr__(self, "vars", tuple(map(int, self.vars)))

    def placed(self, place) -> "Structured":
        """The same over the columns that remain: no structure uses a variable that is off."""
        columns = np.array([place[j] for j in self.vars], int)
        gone = columns == OFF
        allowed = (self.M[gone] == 0).all(axis=0)
        allowed &= (self.N[np.isneginf(self.scores)] == 0).all(axis=0)
        scores = np.where(np.isneginf(self.scores), 0.0, self.scores)
        return replace(
            self,
            vars=tuple(columns[~gone]),
            M=self.M[~gone][:, allowed],
            N=self.N[:, allowed],
            scores=scores,
        )


@dataclass(frozen=True)
class Problem:
    """Scores `eta` of shape (n,), and factors. A score of -inf: the variable is off."""

    eta: np.ndarray
    terms: tuple[Term | Structured, ...] = ()

    def with_eta(self, eta) -> "Problem":
        return replace(self, eta=np.asarray(eta, float))

    def with_pair_scores(self, scores) -> "Problem":
        scores = iter(scores)
        terms = (
            replace(t, scores=float(next(scores))) if t.kind == "Pair" else t for t in self.terms
        )
        return replace(self, terms=tuple(terms))

    @property
    def pair_scores(self) -> np.ndarray:
        return np.array([t.scores for t in self.terms if t.kind == "Pair"])

    @property
    def structured(self) -> list[Structured]:
        return [t for t in self.terms if t.kind == "Structured"]

    def masked(self, mask) -> "Problem":
        return self.with_eta(np.where(mask, self.eta, -np.inf))

    def present(self) -> tuple[np.ndarray, list["Term | Structured | None"]]:
        """The scores of the variables that may be on, and the factors over those; None: absent."""
        gone = np.isneginf(self.eta)
        place = np.where(gone, OFF, np.cumsum(~gone) - 1)
        return self.eta[~gone], [term.placed(place) for term in self.terms]


# Rows ------------------------------------------------------------------------------------


def rows(kind: str, d: int, params: dict) -> Iterable[tuple[np.ndarray, bool, float]]:
    """The convex hull within the box, as rows (a, is_equality, b): a·x <= b or a·x = b."""
    ones = np.ones(d)
    all_but_last, last = np.append(np.ones(d - 1), 0.0), np.eye(d)[-1]
    unit = np.eye(d)
    match kind:
        case "Xor":
            yield ones, True, 1
        case "AtMostOne":
            yield ones, False, 1
        case "Or":
            yield -ones, False, -1
        case "Nand":
            yield ones, False, d - 1
        case "Imply":
            yield all_but_last - last, False, d - 2
        case "XorOut":
            yield all_but_last - last, True, 0
        case "OrOut":
            yield last - all_but_last, False, 0
            yield from ((unit[k] - last, False, 0) for k in range(d - 1))
        case "AndOut":
            yield all_but_last - last, False, d - 2
            yield from ((last - unit[k], False, 0) for k in range(d - 1))
        case "Budget":
            yield ones, False, params["budget"]
        case "AtLeast":
            yield -ones, False, -params["count"]
        case "Exactly":
            yield ones, True, params["count"]
        case "Knapsack":
            yield np.asarray(params["costs"], float), False, params["budget"]
        case "Linear":
            coefs = np.asarray(params["coefs"], float)
            lower, upper = params.get("lower", -np.inf), params.get("upper", np.inf)
            if lower == upper:
                yield coefs, True, upper
            else:
                if np.isfinite(lower):
                    yield -coefs, False, -lower
                if np.isfinite(upper):
                    yield coefs, False, upper
        case _:
            raise ValueError(kind)


@dataclass(frozen=True)
class _QP:
    """min ½ Σ_{j<n} x_j² - q·x  s.t.  G x <= h, A x = b."""

    n: int
    q: np.ndarray
    G: sp.csr_array
    h: np.ndarray
    A: sp.csr_array
    b: np.ndarray

    @property
    def P(self) -> np.ndarray:
        return np.diag(np.arange(len(self.q)) < self.n).astype(float)


class _RowList:
    def __init__(self, equations):
        self.equations = equations
        self.data, self.col, self.row, self.rhs = [], [], [], []

    def add(self, cols, coefficients, rhs):
        here = [(c, a) for c, a in zip(cols, coefficients, strict=True) if c != OFF]
        if not here and (rhs == 0 or (rhs > 0 and not self.equations)):
            return  # it holds, whatever the variables
        self.row += [len(self.rhs)] * len(here)
        self.col += [c for c, _ in here]
        self.data += [a for _, a in here]
        self.rhs.append(float(rhs))

    def matrix(self, width):
        shape = (len(self.rhs), width)
        return sp.csr_array((self.data, (self.row, self.col)), shape=shape, dtype=float)


def _lower(eta: np.ndarray, terms: Iterable[Term | Structured]) -> _QP:
    """Columns: the variables, the pairs, then the probabilities of the structures; terms alike."""
    n = len(eta)
    q = list(eta)
    less, equal = _RowList(equations=False), _RowList(equations=True)
    for j in range(n):
        less.add([j], [-1], 0)
        less.add([j], [1], 1)
    for term in terms:
        if term.kind == "Pair":  # the local polytope, in the literals
            k, (i, j) = len(q), term.vars
            q.append(term.scores)
            (si, bi), (sj, bj) = ((-1, 1) if negated else (1, 0) for negated in term.neg)
            less.add([k], [-1], 0)
            less.add([k, i], [1, -si], bi)
            less.add([k, j], [1, -sj], bj)
            less.add([k, i, j], [-1, si, sj], 1 - bi - bj)
            continue
        if term.kind == "Structured":
            p = range(len(q), len(q) + term.M.shape[1])
            q.extend(term.scores @ term.N)
            for k in p:
                less.add([k], [-1], 0)
            equal.add(p, np.ones(len(p)), 1)
            for j, row in zip(term.vars, term.M, strict=True):
                equal.add([*p, j], [*row, -1.0], 0)
            continue
        flip = np.array(term.neg)
        for a, is_equality, b in rows(term.kind, len(term.vars), term.params):
            target = equal if is_equality else less
            target.add(term.vars, np.where(flip, -a, a), b - a[flip].sum())
    width = len(q)
    return _QP(
        n,
        np.array(q, float),
        less.matrix(width),
        np.array(less.rhs),
        equal.matrix(width),
        np.array(equal.rhs),
    )


# Solving ---------------------------------------------------------------------------------


def _feasible(qp: _QP) -> bool:
    A, b = (qp.A, qp.b) if len(qp.b) else (None, None)
    result = linprog(np.zeros(len(qp.q)), qp.G, qp.h, A, b, bounds=(None, None), method="highs")
    return result.status != 2


def _interior_point(qp: _QP, tol: float = 1e-10) -> tuple[np.ndarray, np.ndarray]:
    """Clarabel's x, and the multipliers of G x <= h; the scores' scale is divided out."""
    scale = max(1.0, np.abs(qp.q).max(initial=0.0))
    P = sp.csc_array(sp.diags_array((np.arange(len(qp.q)) < qp.n) / scale))
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.max_iter = 500
    settings.max_threads = 1
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = tol
    settings.tol_ktratio = 1e-9
    cones = [clarabel.ZeroConeT(len(qp.b)), clarabel.NonnegativeConeT(len(qp.h))]
    K = sp.csc_array(sp.vstack([qp.A, qp.G]))
    solver = clarabel.DefaultSolver(
        P, -qp.q / scale, K, np.concatenate([qp.b, qp.h]), cones, settings
    )
    result = solver.solve()
    if "Infeasible" in str(result.status):
        raise Infeasible
    return np.array(result.x), np.array(result.z)[len(qp.b) :] * scale


def _dual_tol(qp: _QP) -> float:
    return DUAL_TOL + 4e-15 * np.abs(qp.q).max(initial=0.0)


def _on_face(qp: _QP, G, A, P, active, near) -> tuple[np.ndarray, float]:
    """The minimiser with the active rows as equations, and by how much they contradict.

    Where there are several, as of the probabilities of structures, the one that is near.
    """
    # Rows of a single entry fix their column, and there are many.
    single = (G[active] != 0).sum(axis=1) == 1
    x = np.array(near, float)
    fixed = np.zeros(len(x), bool)
    for row in active[single]:
        column = np.flatnonzero(G[row])[0]
        x[column], fixed[column] = qp.h[row] / G[row, column], True
    rest = active[~single]
    K, k = np.vstack([A, G[rest]]), np.concatenate([qp.b, qp.h[rest]])
    k = k - K[:, fixed] @ x[fixed]
    L, P = K[:, ~fixed], P[np.ix_(~fixed, ~fixed)]
    y = x[~fixed]
    y = y - np.linalg.lstsq(L, L @ y - k, rcond=None)[0] if L.size else np.zeros(len(y))
    N = null_space(L) if L.size else np.eye(len(y))
    if N.size:
        curvature, basis = np.linalg.eigh(N.T @ P @ N)
        N = N @ basis[:, curvature > 1e-11]
        y = y + N @ (N.T @ (qp.q[~fixed] - P @ y) / curvature[curvature > 1e-11])
    x[~fixed] = y
    at = np.concatenate([K @ x - (k + K[:, fixed] @ x[fixed]), G[active] @ x - qp.h[active]])
    return x, np.abs(at).max(initial=0.0)


def _multipliers(qp: _QP, G, A, P, active, x) -> tuple[np.ndarray, float]:
    """The best λ >= 0 on the active rows, and the stationarity that it leaves."""
    slope = qp.q - P @ x
    generators = np.hstack([G[active].T, A.T, -A.T])
    if not generators.size:
        return np.zeros(0), np.abs(slope).max(initial=0.0)
    # Again on what is left, where large weights may fall too: scores of 1e9 hide those of 1.
    weights, total, left = np.zeros(generators.shape[1]), generators.shape[1], slope
    for _ in range(2):
        scale = max(1.0, np.abs(left).max(initial=0.0))
        large = weights > 1e3
        columns = np.hstack([generators, -generators[:, large]])
        step, _ = nnls(columns, left / scale, maxiter=50 * columns.shape[1] + 100)
        weights += scale * step[:total]
        weights[large] -= scale * step[total:]
        left = slope - generators @ weights
    sign_error = -min(weights.min(), 0.0)
    residual = max(sign_error, np.abs(left).max())
    return weights[: len(active)], residual


def _polish(qp: _QP, x: np.ndarray, lam: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From an approximate solution to the exact one: (x, its active rows)."""
    G, A, P = qp.G.toarray(), qp.A.toarray(), qp.P
    near = x if len(qp.q) > qp.n else np.zeros(len(x))
    slack = qp.h - G @ x
    guesses = [np.flatnonzero(slack <= tol) for tol in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-8)]
    guesses.insert(1, np.flatnonzero(slack < lam))
    for active in guesses:
        for _ in range(30):
            y, contradiction = _on_face(qp, G, A, P, active, near)
            slack = qp.h - G @ y
            if contradiction > PRIMAL_TOL:  # too many rows: keep those that carry weight
                weights, _ = _multipliers(qp, G, A, P, active, y)
                smaller = active[weights > 0]
                if len(smaller) == len(active):
                    break
                active = smaller
                continue
            if slack.min() < -PRIMAL_TOL:
                active = np.union1d(active, slack.argmin())
                continue
            at = np.flatnonzero(slack <= PRIMAL_TOL)
            weights, residual = _multipliers(qp, G, A, P, at, y)
            if residual <= _dual_tol(qp):
                return y, at
            smaller = at[weights > 0]
            if np.array_equal(smaller, active):
                break
            active = smaller
    # Interior-point methods are vague about infeasibility; the LP is not.
    if not _feasible(qp):
        raise Infeasible
    raise AssertionError("the oracle could not polish this problem")


@dataclass(frozen=True)
class Exact:
    """The exact solution, with everything that it implies about derivatives."""

    problem: Problem
    mu: np.ndarray  # (n,); 0 where the variable is not there
    mu_pair: np.ndarray  # one for each Pair of the problem, in order; 0 where it is absent
    objective: float
    _qp: _QP
    _x: np.ndarray
    _active: np.ndarray | None
    _index: np.ndarray  # where the QP's columns lie in (eta, pair scores)
    mu_v: tuple[np.ndarray, ...] = ()  # one for each Structured: its expected features

    @cached_property
    def kink_distance(self) -> float:
        """The margin of strict complementarity: how far the nearest change of active set is.

        The slack of the inactive rows, and the smallest multiplier of the active ones in the
        dual solution that makes it largest: at 0/1 solutions multipliers are rarely unique.
        """
        if (self.problem.pair_scores == 0).any():
            return 0.0
        G, A, P = self._qp.G.toarray(), self._qp.A.toarray(), self._qp.P
        slack = self._qp.h - G @ self._x
        slack[self._active] = np.inf
        margin = slack.min(initial=np.inf)
        if not len(self._active):
            return margin
        # max t  s.t.  G_actᵀλ + Aᵀν = q - P x,  λ >= t
        k, e = len(self._active), len(self._qp.b)
        slope = self._qp.q - P @ self._x
        generators = np.hstack([G[self._active].T, A.T])
        weights, _, rank, _ = np.linalg.lstsq(generators, slope, rcond=None)
        if rank == k + e:  # only one λ
            return min(margin, max(weights[:k].min(), 0.0))
        scale = max(1.0, np.abs(slope).max())
        stationarity = np.hstack([generators, np.zeros((len(slope), 1))])
        above_t = np.hstack([-np.eye(k), np.zeros((k, e)), np.ones((k, 1))])
        result = linprog(
            np.append(np.zeros(k + e), -1.0),
            above_t,
            np.zeros(k),
            stationarity,
            slope / scale,
            bounds=[(0, None)] * k + [(None, None)] * e + [(None, 10.0)],
            method="highs",
        )
        return min(margin, -result.fun * scale) if result.status == 0 else 0.0

    @cached_property
    def jacobian(self) -> np.ndarray:
        """∂(mu, mu_pair) / ∂(eta, pair scores), symmetric; meaningful away from kinks."""
        K = np.vstack([self._qp.A.toarray(), self._qp.G.toarray()[self._active]])
        N = null_space(K) if len(K) else np.eye(len(self._x))
        size = len(self.mu) + len(self.mu_pair)
        J = np.zeros((size, size))
        if N.size:
            J[np.ix_(self._index, self._index)] = N @ np.linalg.solve(N.T @ self._qp.P @ N, N.T)
        return J

    def vjp(self, grad_mu, grad_pair=None) -> tuple[np.ndarray, np.ndarray]:
        """The exact (grad_eta, grad_pair_scores) of `grad_mu·mu + grad_pair·mu_pair`."""
        grad_pair = np.zeros(len(self.mu_pair)) if grad_pair is None else grad_pair
        out = self.jacobian @ np.concatenate([grad_mu, grad_pair])
        return out[: len(self.mu)], out[len(self.mu) :]


def solve(problem: Problem, polish: bool = True) -> Exact:
    """The exact LP-SparseMAP solution; with `polish=False` Clarabel's own, for large problems.

    Raises Infeasible.
    """
    eta = np.asarray(problem.eta, float)
    gone = np.isneginf(eta)
    kept_eta, placed = replace(problem, eta=eta).present()
    terms, pair_place, free_pairs = [], [], []
    number_of_pairs = 0
    both_ways = zip(problem.terms, placed, strict=True)
    for term, kept in sorted(both_ways, key=lambda t: t[0].kind == "Structured"):
        if kept is not None and term.kind == "Pair" and term.scores == 0:
            free_pairs.append((number_of_pairs, term))
        elif kept is not None:
            terms.append(kept)
            if term.kind == "Pair":
                pair_place.append(number_of_pairs)
        number_of_pairs += term.kind == "Pair"
    index = np.concatenate([np.flatnonzero(~gone), len(eta) + np.array(pair_place, int)]).astype(
        int
    )

    qp = _lower(kept_eta, terms)
    both = np.zeros(len(eta) + number_of_pairs)
    x, active = np.zeros(0), np.zeros(0, int) if polish else None
    if len(qp.q):
        x, lam = _interior_point(qp)
        if polish:
            x, active = _polish(qp, x, lam)
        x = np.where(np.abs(x) <= 1e-15, 0.0, x)
        both[index] = x[: len(index)]
    mu = both[: len(eta)]
    mu_v, start = [], len(index)
    for term in terms:
        if term.kind == "Structured":
            stop = start + term.M.shape[1]
            mu_v.append(term.N @ x[start:stop])
            start = stop
    for k, term in free_pairs:  # a score of exactly 0 leaves mu12 open: the largest, by convention
        both[len(eta) + k] = min(np.where(term.neg, 1 - mu[list(term.vars)], mu[list(term.vars)]))
    objective = float(qp.q @ x - 0.5 * mu @ mu)
    return Exact(problem, mu, both[len(eta) :], objective, qp, x, active, index, tuple(mu_v))


def kink_distance(problem: Problem) -> float:
    return solve(problem).kink_distance


def exact_jacobian(problem: Problem) -> np.ndarray:
    return solve(problem).jacobian


def finite_difference(problem: Problem, step: float = 1e-5) -> np.ndarray:
    """`exact_jacobian` again, by central differences of polished solutions."""
    point = np.concatenate([problem.eta, problem.pair_scores])

    def at(values):
        n = len(problem.eta)
        exact = solve(problem.with_eta(values[:n]).with_pair_scores(values[n:]))
        return np.concatenate([exact.mu, exact.mu_pair])

    columns = [
        (at(point + step * e) - at(point - step * e)) / (2 * step) for e in np.eye(len(point))
    ]
    return np.array(columns).T
