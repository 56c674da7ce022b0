"""Two algorithms, one answer: ADMM on copies against the compact dual."""

import numpy as np
import pytest

from factormax.reference import admm, projected_gradient, solve, vjp

from .instances import NAMES, Factor, Graph, feasible_graphs, matching, oracle, random_factor


def check_against_compact(problem, **options):
    result = admm(problem, **options)
    assert result.converged
    mu, _ = solve(problem)
    np.testing.assert_allclose(result.mu, mu, atol=1e-7)
    # docs/math.md (38): its multipliers solve the compact dual
    assert (problem.lo <= result.tau).all()
    assert (result.tau <= problem.hi * (1 + 1e-12)).all()
    assert np.abs(projected_gradient(problem, result.tau)).max(initial=0) <= 1e-6
    return result


@pytest.mark.parametrize("name", NAMES)
def test_every_factor_twice_and_overlapping(name):
    # degrees 1 and 2, so that the scaling matters
    rng = np.random.default_rng(0)
    factors = [random_factor(rng, name, var) for var in ([0, 1, 2, 3], [2, 3, 4])]
    graph = Graph(rng.standard_normal(5), tuple(factors))
    assert oracle(graph) is not None
    check_against_compact(graph.problem())


def test_overlapping_factors_and_pairs():
    for graph, _ in feasible_graphs(1, 6, n=6, num_factors=3, num_pairs=3, scale=0.5):
        check_against_compact(graph.problem())


@pytest.mark.parametrize("gamma", [0.2, 1.0, 5.0])
def test_any_step_size_ends_at_the_same_point(gamma):
    problem = matching(np.random.default_rng(2), 3, 4, scale=0.5).problem()
    check_against_compact(problem, gamma=gamma)


def test_pairs_only():
    rng = np.random.default_rng(3)
    pairs = np.array([[0, 1], [1, 2], [0, 2], [3, 1]])
    negated = rng.random((4, 2)) < 0.4
    for _ in range(5):
        graph = Graph(rng.standard_normal(4), (), pairs, negated, rng.standard_normal(4))
        check_against_compact(graph.problem())


def test_gradients_from_its_multipliers():
    rng = np.random.default_rng(4)
    problem = matching(rng, 3, 3, scale=0.5).problem()
    result = check_against_compact(problem, tol=1e-12)
    d = rng.standard_normal(9)
    exact = vjp(problem, solve(problem)[1], d).eta_u
    np.testing.assert_allclose(vjp(problem, result.tau, d, margin=1e-8).eta_u, exact, atol=1e-9)


def test_a_variable_in_no_factor_is_clipped():
    graph = Graph(np.array([0.9, 0.8, 1.5, 0.3]), (Factor("Xor", (0, 1), (False,) * 2),))
    np.testing.assert_allclose(admm(graph.problem()).mu, [0.55, 0.45, 1.0, 0.3], atol=1e-8)


def test_one_factor_needs_two_rounds_at_most_to_agree_with_itself():
    graph = Graph(np.array([0.5, 0.1, -0.3]), (Factor("Xor", (0, 1, 2), (False,) * 3),))
    tiny = admm(graph.problem(), gamma=1e-9)
    assert tiny.iterations <= 2


def test_stops_at_max_iter():
    problem = matching(np.random.default_rng(5), 3, 3, scale=1.0).problem()
    result = admm(problem, max_iter=2)
    assert not result.converged
    assert result.iterations == 2
