"""The oracle itself: its rows against enumeration, its answers against other solvers."""

from itertools import product

import cvxpy as cp
import numpy as np
import oracle
import pytest
from meaning import MEANING, RELAXED, random_params
from oracle import Infeasible, Problem, Term
from problems import ALL, random_problem, random_term
from scipy.optimize import linprog

from factormax import factors
from factormax.factors.structured import StructuredFactor

HULLS = [kind for kind in MEANING if kind not in (*RELAXED, "Pair")]


def parameters(kind, d):
    match kind:
        case "Budget":
            return [{"budget": k} for k in range(d + 2)]
        case "AtLeast" | "Exactly":
            return [{"count": k} for k in range(d + 1)]
        case _:
            drawn = [random_params(kind, d, np.random.default_rng(seed)) for seed in range(6)]
            return drawn if any(drawn) else [{}]


@pytest.mark.parametrize("d", range(1, 6))
@pytest.mark.parametrize("kind", HULLS)
def test_rows_describe_the_convex_hull(kind, d):
    rng = np.random.default_rng(d)
    for params, negate in product(parameters(kind, d), (False, True)):
        neg = rng.random(d) < 0.5 if negate else np.zeros(d, bool)
        term = Term(kind, range(d), neg, params)
        qp = oracle._lower(np.zeros(d), [term])
        vertices = [y for y in product((0, 1), repeat=d) if term.holds(y)]
        for y in product((0, 1), repeat=d):
            inside = (qp.G @ y <= qp.h).all() and (qp.A @ y == qp.b).all()
            assert inside == (y in vertices)
        for direction in rng.normal(size=(10, d)):
            A, b = (qp.A, qp.b) if len(qp.b) else (None, None)
            best = linprog(-direction, qp.G, qp.h, A, b, bounds=(None, None))
            assert -best.fun == pytest.approx(max(vertices @ direction), abs=1e-9)


@pytest.mark.parametrize("neg", list(product((False, True), repeat=2)))
def test_pair_is_the_hull_of_its_four_states(neg):
    qp = oracle._lower(np.zeros(2), [Term("Pair", (0, 1), neg, scores=1.0)])
    states = [(*y, (y[0] ^ neg[0]) * (y[1] ^ neg[1])) for y in product((0, 1), repeat=2)]
    for direction in np.random.default_rng(0).normal(size=(30, 3)):
        best = linprog(-direction, qp.G, qp.h, bounds=(None, None))
        assert -best.fun == pytest.approx(max(states @ direction), abs=1e-9)


def test_every_kind_has_a_meaning():
    kinds = {kind: getattr(factors, kind) for kind in factors.__all__}
    rows = {kind for kind, cls in kinds.items() if not issubclass(cls, StructuredFactor)}
    assert set(MEANING) == rows and set(ALL) <= rows


@pytest.mark.parametrize("scale", [0.1, 1, 10, 1e4])
@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_cvxpy_on_the_mixture_of_assignments(seed, scale):
    """Factors as mixtures of enumerated assignments, instead of rows (no Knapsack)."""
    rng = np.random.default_rng(seed)
    kinds = [kind for kind in ALL if kind != "Knapsack"]
    problem = random_problem(rng, n=6, factors=4, kinds=kinds, scale=scale, max_size=4)
    mu = cp.Variable(len(problem.eta))
    value = problem.eta @ mu - 0.5 * cp.sum_squares(mu)
    rules = [mu >= 0, mu <= 1]
    for term in problem.terms:
        states = np.array(term.assignments())
        p = cp.Variable(len(states), nonneg=True)
        literals = np.where(term.neg, 1 - states, states)
        rules += [cp.sum(p) == 1, literals.T @ p == mu[list(term.vars)]]
        value += term.scores * (states.all(axis=1) @ p)
    cp.Problem(cp.Maximize(value / scale), rules).solve(
        cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11
    )
    exact = oracle.solve(problem)
    np.testing.assert_allclose(exact.mu, mu.value, atol=2e-5)
    assert exact.objective == pytest.approx(value.value, rel=1e-7, abs=1e-7)


def test_known_answers():
    xor = Term("Xor", range(3))
    np.testing.assert_allclose(
        oracle.solve(Problem(np.array([0.4, 0.1, -9]), (xor,))).mu, [0.65, 0.35, 0]
    )
    knapsack = Term("Knapsack", range(2), params={"costs": [2, 2], "budget": 3})
    np.testing.assert_allclose(oracle.solve(Problem(np.array([2.0, 2.0]), (knapsack,))).mu, 0.75)
    np.testing.assert_array_equal(oracle.solve(Problem(np.array([-1, 0.3, 2]))).mu, [0, 0.3, 1])
    pair = Problem(np.array([0.2, 0.3]), (Term("Pair", (0, 1), scores=0.2),))
    exact = oracle.solve(pair)
    np.testing.assert_allclose([*exact.mu, *exact.mu_pair], 0.35)


def test_minus_infinity_switches_the_variable_off():
    terms = (Term("Xor", range(3)), Term("Or", (1, 0), (True, False)), Term("Or", (1,)))
    problem = Problem(np.array([0.4, -np.inf, 0.1]), terms)
    np.testing.assert_allclose(oracle.solve(problem).mu, [0.65, 0, 0.35])
    with pytest.raises(oracle.Infeasible):
        oracle.solve(Problem(problem.eta, (terms[0], Term("OrOut", (0, 2, 1)))))


@pytest.mark.parametrize("seed", range(12))
def test_jacobian_is_that_of_finite_differences(seed):
    rng = np.random.default_rng(seed)
    scale = (0.3, 1, 10, 100)[seed % 4]
    problem = random_problem(rng, n=6, factors=5, scale=scale)
    if oracle.kink_distance(problem) > 1e-3:
        np.testing.assert_allclose(
            oracle.exact_jacobian(problem), oracle.finite_difference(problem), atol=1e-8
        )


def test_kink_distance():
    """At a vertex the multipliers are not unique; the best dual counts."""
    xor = (Term("Xor", range(2)),)
    assert oracle.kink_distance(Problem(np.array([5.0, 0.0]), xor)) == pytest.approx(1)
    assert oracle.kink_distance(Problem(np.array([1.0, 0.0]), xor)) < 1e-9
    assert oracle.kink_distance(Problem(np.array([0.6, 0.0]), xor)) == pytest.approx(0.2)
    assert not oracle.exact_jacobian(Problem(np.array([5.0, 0.0]), xor)).any()


def test_infeasible():
    terms = (Term("AtMostOne", range(3)), Term("AtLeast", range(3), params={"count": 2}))
    with pytest.raises(Infeasible):
        oracle.solve(Problem(np.zeros(3), terms))


@pytest.mark.parametrize("kind", ALL)
def test_ties_and_huge_scores_can_be_polished(kind):
    rng = np.random.default_rng(1)
    for _ in range(20):
        d = 2 if kind == "Pair" else int(rng.integers(1, 7))
        term = random_term(kind, range(d), rng, negate=True)
        for values in ([0.0], [1.0, 0.5], [1e9, -1e9, 0.0, 0.3]):
            exact = oracle.solve(Problem(rng.choice(values, d), (term,)))
            assert exact.mu.min() >= -1e-12 and exact.mu.max() <= 1 + 1e-12
