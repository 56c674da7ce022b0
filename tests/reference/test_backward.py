"""Gradients against finite differences of the exact solution, at kinks and corners too."""

import numpy as np
import pytest

from factormax.reference import (
    DenseProblem,
    face,
    jacobian,
    objective,
    pair_values,
    solve,
    vjp,
)

from .instances import NAMES, Factor, Graph, feasible_graphs, matching, oracle, random_factor


def check_gradient(graph, rng, step=1e-6):
    """True if a random gradient of everything matches; False if the point is a kink."""
    n, num_pairs = len(graph.eta_u), len(graph.eta_v)
    grad_mu, grad_mu_v = rng.standard_normal(n), rng.standard_normal(num_pairs)
    grad_objective = rng.standard_normal() / max(1.0, np.abs(graph.eta_u).max())
    du, dv = rng.standard_normal(n), rng.standard_normal(num_pairs)

    def loss(s):
        problem = graph.problem(graph.eta_u + s * du, graph.eta_v + s * dv)
        mu, _ = solve(problem)
        earned = grad_mu_v @ pair_values(problem, mu)
        return grad_mu @ mu + earned + grad_objective * objective(problem, mu)

    right, left = (loss(step) - loss(0)) / step, (loss(0) - loss(-step)) / step
    if abs(right - left) > 1e-4:
        return False
    problem = graph.problem()
    _, tau = solve(problem)
    grads = vjp(problem, tau, grad_mu, grad_mu_v, grad_objective)
    expected = (right + left) / 2
    assert grads.eta_u @ du + grads.eta_v @ dv == pytest.approx(expected, rel=1e-6, abs=1e-6)
    return True


@pytest.mark.parametrize("name", NAMES)
def test_every_factor_alone(name):
    rng = np.random.default_rng(0)
    for scale in (0.3, 1.0, 10.0):
        for d in (2, 3, 5):
            graph = Graph(scale * rng.standard_normal(d), (random_factor(rng, name, range(d)),))
            if oracle(graph) is not None:
                assert check_gradient(graph, rng)


@pytest.mark.parametrize("score", [-2.0, -0.3, 0.3, 2.0])
def test_one_pair_with_every_negation(score):
    rng = np.random.default_rng(1)
    for negated in ([False, False], [True, False], [False, True], [True, True]):
        for _ in range(5):
            pair = np.array([[0, 1]])
            graph = Graph(rng.standard_normal(2), (), pair, np.array([negated]), np.array([score]))
            assert check_gradient(graph, rng)


@pytest.mark.parametrize("scale", [0.2, 1.0, 5.0, 100.0])
def test_overlapping_factors_and_pairs(scale):
    rng = np.random.default_rng(2)
    for graph, _ in feasible_graphs(3, 15, n=8, num_factors=5, num_pairs=5, scale=scale):
        assert check_gradient(graph, rng)


def test_jacobian_is_an_orthogonal_projector():
    for graph, _ in feasible_graphs(4, 10, n=8, num_factors=4, num_pairs=4, scale=1.0):
        problem = graph.problem()
        P = jacobian(problem, solve(problem)[1])
        np.testing.assert_allclose(P, P.T, atol=1e-12)
        np.testing.assert_allclose(P, P @ P, atol=1e-12)


def test_small_system_in_its_dual_form():
    # docs/math.md (42): t from (A_I J A_Iᵀ) t = A_I J d, then y = J (d − A_Iᵀ t)
    rng = np.random.default_rng(5)
    for graph, _ in feasible_graphs(5, 10, n=8, num_factors=4, num_pairs=4, scale=1.0):
        problem = graph.problem()
        _, tau = solve(problem)
        free, tight = face(problem, tau)
        d, A = rng.standard_normal(8), problem.A[tight]
        t = np.linalg.pinv((A * free) @ A.T, 1e-10) @ (A * free) @ d
        np.testing.assert_allclose(vjp(problem, tau, d).eta_u, free * (d - A.T @ t), atol=1e-10)


def test_equals_the_projector_of_the_link_form():
    # docs/math.md (47): every factor by itself, under degree scaling, and the eigenvalue 1
    for graph, _ in feasible_graphs(6, 10, n=8, num_factors=4, num_pairs=4, scale=0.7):
        problem = graph.problem()
        _, tau = solve(problem)
        free, tight = face(problem, tau)
        deg = np.zeros(8)
        for block in problem.blocks:
            deg[list(block.links)] += 1
        K = np.diag(np.where(deg == 0, free, 0.0))
        for block in problem.blocks:
            links, rows = list(block.links), [r for r in block.rows if tight[r]]
            delta = np.sqrt(deg[links])
            A = problem.A[np.ix_(rows, links)] * delta * free[links]
            local = np.diag(free[links].astype(float)) - np.linalg.pinv(A, 1e-10) @ A
            K[np.ix_(links, links)] += local / np.outer(delta, delta)
        eigenvalues, vectors = np.linalg.eigh(K)
        fixed = vectors[:, eigenvalues > 1 - 1e-9]
        np.testing.assert_allclose(fixed @ fixed.T, jacobian(problem, tau), atol=1e-10)


# ------------------------------------------------------------------------------------------
# Corners: multipliers are not unique, and may put z on the edge of the box


@pytest.mark.parametrize("seed", range(5))
def test_zero_one_matching_has_no_gradient_whatever_the_multipliers(seed):
    rng = np.random.default_rng(seed)
    problem = matching(rng, 4, 4, scale=50.0).problem()
    mu, tau = solve(problem)
    assert set(np.unique(mu)) == {0.0, 1.0}
    # Walk from the multipliers found, along any line, to the edge of those that are optimal.
    for _ in range(20):
        direction = rng.standard_normal(len(tau))
        far = _farthest_optimal(problem, mu, tau, direction)
        np.testing.assert_array_equal(jacobian(problem, tau + far * direction), 0.0)


def _farthest_optimal(problem, mu, tau, direction):
    """The largest s such that the 0/1 solution μ is still explained by τ + s·direction."""
    z, dz = problem.eta - problem.A.T @ tau, -problem.A.T @ direction
    leaves = np.where(mu == 1, dz < 0, dz > 0)  # z ≥ 1 where μ = 1, and z ≤ 0 where μ = 0
    bound = np.where(direction > 0, problem.hi, problem.lo)
    reach = np.concatenate([((mu - z) / dz)[leaves], (bound - tau) / direction])
    return max(0.0, reach.min())


def test_two_opposite_rows_without_multipliers_are_tight():
    # x ≤ ½ and x ≥ ½ with score ½: both multipliers are 0, and still x cannot move.
    problem = DenseProblem(
        eta=np.array([0.5]),
        A=np.array([[1.0], [-1.0]]),
        b=np.array([0.5, -0.5]),
        lo=np.zeros(2),
        hi=np.full(2, np.inf),
    )
    mu, tau = solve(problem)
    assert mu[0] == 0.5
    np.testing.assert_array_equal(tau, 0.0)
    np.testing.assert_allclose(jacobian(problem, tau), 0.0, atol=1e-15)


def test_at_a_kink_the_jacobian_is_that_of_a_point_nearby():
    # A clip at its corner, and a budget that is met exactly without being needed.
    assert jacobian(Graph(np.array([1.0])).problem(), np.zeros(0))[0, 0] == 0.0
    budget = Factor("Budget", (0, 1), (False, False), count=1)
    problem = Graph(np.array([0.7, 0.3]), (budget,)).problem()
    P = jacobian(problem, solve(problem)[1])
    np.testing.assert_allclose(P, [[0.5, -0.5], [-0.5, 0.5]], atol=1e-12)


def test_a_multiplier_a_rounding_below_its_bound_is_on_it():
    # 10·(s/10) is often not s, so "τ < hi" must not be taken at its word.
    pair = np.array([[0, 1]])
    plain = np.zeros((1, 2), bool)
    problem = Graph(np.array([0.2, 0.9]), (), pair, plain, np.array([0.1])).problem()
    _, tau = solve(problem)
    assert tau[0] == problem.hi[0]
    for nudged in (tau, np.nextafter(tau, 0)):
        np.testing.assert_array_equal(jacobian(problem, nudged), np.eye(2))


def test_pair_of_score_zero_does_not_bind():
    plain = np.zeros((1, 2), bool)
    graph = Graph(np.array([0.4, 0.4]), (), np.array([[0, 1]]), plain, np.zeros(1))
    problem = graph.problem()
    _, tau = solve(problem)
    np.testing.assert_array_equal(jacobian(problem, tau), np.eye(2))


def test_a_clipped_variable_has_no_gradient_and_a_lone_one_all():
    grads = vjp(Graph(np.array([-1.0, 0.4, 3.0])).problem(), np.zeros(0), np.ones(3))
    np.testing.assert_array_equal(grads.eta_u, [0.0, 1.0, 0.0])
