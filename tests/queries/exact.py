"""Exact answers for the tests of the queries: HiGHS on the same polytope, and enumeration.

Graphs come as a `Mixture` of structured factors and others; both answers are worked out from its
`Problem`, which says what the factors mean and knows nothing of factormax.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import product

import numpy as np
import oracle
from factors.test_dep_tree import tree
from factors.test_factor import native, two_of
from factors.test_matching import matching
from factors.test_sequence import sequence
from factors.test_sequence_budget import budgeted
from factors.test_table import table
from oracle import Infeasible, Problem, Term
from problems import ALL, random_problem, random_term
from scipy.optimize import linprog
from structured_contract import Case
from test_structured import Mixture, listed

import factormax as fm
from factormax.reference.structures import column_scores

SCALES = (0.1, 1.0, 10.0, 100.0, 1e3)
HIGHS = {"primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9}


# Answers ------------------------------------------------------------------------------------------


def present(problem: Problem) -> tuple[np.ndarray, list]:
    """What is there: the scores, and the factors over the variables that may be on."""
    eta, terms = problem.present()
    return eta, [t for t in terms if t is not None and len(t.vars)]


def linear_program(problem: Problem) -> float:
    """The value of LP-MAP, by HiGHS. Raises Infeasible."""
    qp = oracle._lower(*present(problem))
    if not len(qp.q):
        return 0.0
    A, b = (qp.A, qp.b) if len(qp.b) else (None, None)
    result = linprog(
        -qp.q, qp.G, qp.h, A, b, bounds=(None, None), method="highs", options={**HIGHS}
    )
    if result.status == 2:
        raise Infeasible
    assert result.status == 0, result.message
    return -result.fun


@cache
def assignments(n: int) -> np.ndarray:
    """All of them, `(2**n, n)`."""
    return np.array(list(product((0, 1), repeat=n)), dtype=np.int64).reshape(2**n, n)


def score_of(problem: Problem, x: np.ndarray) -> np.ndarray:
    """The scores of 0/1 assignments `(k, n)`; −inf where one breaks a factor."""
    gone = np.isneginf(problem.eta)
    eta, terms = present(problem)
    x = np.asarray(x)
    here = x[:, ~gone].astype(np.int64)
    total = here @ eta
    here = np.hstack([here, np.zeros((len(x), 1), np.int64)])  # the last column is `oracle.OFF`
    for t in terms:
        places = 2 ** np.arange(len(t.vars))
        if t.kind == "Structured":  # an assignment may be several structures
            found = np.full(2 ** len(t.vars), -np.inf)
            np.maximum.at(found, places @ t.M.astype(np.int64), t.scores @ t.N)
            total = total + found[here[:, t.vars] @ places]
            continue
        literals = here[:, t.vars] ^ np.array(t.neg)
        if t.kind == "Pair":
            total = total + t.scores * literals.prod(axis=1)
            continue
        found = np.full(2 ** len(t.vars), -np.inf)
        found[[places @ np.array(y) for y in t.assignments()]] = 0
        total = total + found[literals @ places]
    return np.where(x[:, gone].any(axis=1), -np.inf, total)


def best_of(problem: Problem) -> tuple[float, np.ndarray]:
    """The best score, and all assignments that reach it; −inf and none if there is none."""
    gone = np.isneginf(problem.eta)
    x = np.zeros((2 ** int((~gone).sum()), len(gone)), dtype=np.int64)
    x[:, ~gone] = assignments(int((~gone).sum()))
    scores = score_of(problem, x)
    best = scores.max()
    if best == -np.inf:
        return best, x[:0]
    return best, x[scores >= best - 1e-9 * (1 + abs(best))]


def feasible(problem: Problem) -> np.ndarray:
    """All assignments that satisfy every factor."""
    x = assignments(len(problem.eta))
    return x[score_of(problem, x) > -np.inf]


# Graphs -------------------------------------------------------------------------------------------


def native_listed(case: Case) -> Case:
    """The same structures, by a C function."""

    def make(u, **own):
        scores = next(iter(own.values()), None)

        @native
        def best(eta_u, eta_v, m, n, data, instance):
            found = column_scores(case.M, case.N, eta_u, eta_v)
            k = int(np.argmax(found))
            if found[k] == -np.inf:
                return 1
            m[:] = case.M[:, k]
            n[:] = case.N[:, k]
            return 0

        return fm.Factor(u, scores, native_map=best)

    return replace(case, make=make, name=f"native {case.name}")


#: Structured factors of every kind, small enough to enumerate.
SMALL = {
    "tree": tree(3),
    "projective tree": tree(3, projective=True),
    "tree with one root": tree(3, single_root=True),
    "matching": matching(2, 3),
    "square matching": matching(3, 3),
    "sequence": sequence(3, 2),
    "sequence by step": sequence(4, 2, True),
    "sequence with ends": sequence(2, 3, False, True, True),
    "budgeted sequence": budgeted(5, 2),
    "table": table(3, 2),
    "two tables": table(2, 2),
    "listed": listed(table(2, 2)),
    "two of": two_of(4),
    "listed sequence": listed(sequence(3, 2, True)),
}

SMALL["native sequence"] = native_listed(sequence(3, 2, True))


def of_rows(problem: Problem) -> Mixture:
    return Mixture(len(problem.eta), [], problem.terms, problem.eta, [])


def random_mixture(rng, cases=(), n=8, factors=4, kinds=ALL, scale=1.0, negate=True) -> Mixture:
    """Structured factors over random variables, others beside them; a planted assignment holds."""
    planted = np.full(n, -1)
    structured = []
    for case in cases:
        d = case.M.shape[0]
        index = rng.permutation(n)[:d]
        fits = ((planted[index, None] < 0) | (planted[index, None] == case.M)).all(axis=0)
        if len(index) < d or not fits.any():
            continue
        planted[index] = case.M[:, rng.choice(np.flatnonzero(fits))]
        structured.append((case, index.reshape(case.shape)))
    planted = np.where(planted < 0, rng.integers(0, 2, n), planted)
    terms = []
    while len(terms) < factors:
        kind = str(rng.choice(kinds))
        d = 2 if kind == "Pair" else int(rng.integers(1, min(5, n) + 1))
        term = random_term(kind, rng.choice(n, d, replace=False), rng, negate=negate)
        if term.holds(planted):
            terms.append(term)
    return Mixture(n, structured, tuple(terms)).drawn(rng, scale)


def with_ties(mixture: Mixture, rng, values=(-1.0, 0.0, 1.0)) -> Mixture:
    """The same with whole numbers as scores."""
    terms = tuple(
        replace(t, scores=float(rng.choice(values))) if t.kind == "Pair" else t
        for t in mixture.terms
    )
    own = [{k: rng.choice(values, np.shape(v)) for k, v in o.items()} for o in mixture.own]
    return Mixture(mixture.n, mixture.structured, terms, rng.choice(values, mixture.n), own)


def scaled(mixture: Mixture, scale: float) -> Mixture:
    """All scores times `scale`."""
    terms = tuple(replace(t, scores=scale * t.scores) for t in mixture.terms)
    own = [{k: scale * v for k, v in o.items()} for o in mixture.own]
    return Mixture(mixture.n, mixture.structured, terms, scale * mixture.eta, own)


def without_some(mixture: Mixture, rng, share=0.2) -> Mixture | None:
    """Some variables taken out by −inf, but no whole row of a structured factor; None if none is.

    An oracle of one's own is not asked about −inf, and a group of a table needs what it has.
    """
    gone = rng.random(mixture.n) < share
    for case, index in mixture.structured:
        if case.name.startswith(("Table", "Listed", "TwoOf")):
            gone[index.reshape(-1)] = False
    for _, index in mixture.structured:
        for row in index.reshape(-1, index.shape[-1]):
            if gone[row].all():
                return None
    if not gone.any():
        return None
    return replace(mixture, eta=np.where(gone, -np.inf, mixture.eta))


def random_rows(rng, kinds, scale=1.0, n=8, factors=6) -> Mixture:
    return of_rows(random_problem(rng, n, factors, kinds, scale))


class Signed(fm.Factor):
    """The structures are the columns of M; features of any size and sign."""

    def __init__(self, u, scores, M, N):
        super().__init__(u, scores)
        self.M, self.N = M, N

    def map(self, eta_u, eta_v):
        best = int(np.argmax(eta_u @ self.M + eta_v @ self.N))
        return self.M[:, best], self.N[:, best]


def with_large_features(rng, scale=1.0) -> Mixture:
    """One of three, with features of its own; several for the same assignment."""
    M = np.eye(3)[:, [0, 1, 2, *rng.integers(0, 3, 5)]]
    N = rng.integers(-9, 10, (2, 8)).astype(float)
    case = Case((3,), partial(Signed, M=M, N=N), M, N, {"scores": (2,)})
    terms = (Term("Or", (0, 3, 4)), Term("Nand", (1, 3)), Term("Xor", (2, 4), (True, False)))
    return Mixture(5, [(case, np.arange(3))], terms).drawn(rng, scale)
