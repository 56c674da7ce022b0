"""The compact dual against the paper's own problem over convex hulls, solved by Clarabel."""

import numpy as np
import pytest

from factormax.reference import (
    DenseProblem,
    Infeasible,
    dual_gradient,
    dual_value,
    farkas,
    marginals,
    objective,
    pair_values,
    projected_gradient,
    solve,
)

from .instances import (
    NAMES,
    Factor,
    Graph,
    feasible_graphs,
    matching,
    oracle,
    random_factor,
    random_graph,
)


def check_against_oracle(graph, answer, atol=1e-7):
    problem = graph.problem()
    mu, tau = solve(problem)
    expected_mu, expected_mu_v, expected_objective = answer
    scale = max(1.0, np.abs(graph.eta_u).max())
    np.testing.assert_allclose(mu, expected_mu, atol=atol)
    np.testing.assert_allclose(pair_values(problem, mu), expected_mu_v, atol=atol)
    assert objective(problem, mu) == pytest.approx(expected_objective, abs=atol * scale)
    assert np.abs(projected_gradient(problem, tau)).max(initial=0) <= 1e-13 * max(1, 100 * scale)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_every_factor_alone(name, scale):
    rng = np.random.default_rng(0)
    for d in (2, 3, 5):
        graph = Graph(scale * rng.standard_normal(d), (random_factor(rng, name, range(d)),))
        answer = oracle(graph)
        if answer is not None:  # only a negated Knapsack can ask for too much
            check_against_oracle(graph, answer)


@pytest.mark.parametrize("score", [-2.0, -0.3, 0.0, 0.3, 2.0])
def test_one_pair_with_every_negation(score):
    rng = np.random.default_rng(1)
    for negated in ([False, False], [True, False], [False, True], [True, True]):
        for _ in range(5):
            graph = Graph(
                rng.standard_normal(2),
                pairs=np.array([[0, 1]]),
                pair_negated=np.array([negated]),
                eta_v=np.array([score]),
            )
            mu, mu_v, value = oracle(graph)
            if score == 0:  # the value of a pair without a score is a convention
                mu_v = pair_values(graph.problem(), mu)
            check_against_oracle(graph, (mu, mu_v, value))


@pytest.mark.parametrize("scale", [0.2, 1.0, 5.0, 100.0, 1e4])
def test_overlapping_factors_and_pairs(scale):
    for graph, answer in feasible_graphs(2, 15, n=8, num_factors=5, num_pairs=5, scale=scale):
        check_against_oracle(graph, answer)


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_matching(scale):
    graph = matching(np.random.default_rng(3), 5, 7, scale)
    check_against_oracle(graph, oracle(graph))


def test_gradient_and_value_of_the_dual_agree():
    rng = np.random.default_rng(4)
    problem = random_graph(rng, n=6, num_factors=4, num_pairs=3, scale=1.0).problem()
    tau = np.clip(rng.standard_normal(len(problem.b)), problem.lo, problem.hi)
    direction = rng.standard_normal(len(tau))
    values = [dual_value(problem, tau + s * direction) for s in (1e-6, -1e-6)]
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(
        dual_gradient(problem, tau) @ direction, abs=1e-7
    )


def test_strong_duality():
    for graph, _ in feasible_graphs(5, 10, n=6, num_factors=3, num_pairs=3, scale=1.0):
        problem = graph.problem()
        mu, tau = solve(problem)
        # the constants that docs/math.md (11) left behind: s·c₂ of the pairs with s ≥ 0
        constant = np.maximum(graph.eta_v, 0) @ graph.pair_negated[:, 1]
        assert objective(problem, mu) == pytest.approx(
            dual_value(problem, tau) + constant, abs=1e-11
        )


def test_no_factor_is_a_clip():
    eta = np.array([-0.5, 0.3, 1.7])
    mu, tau = solve(Graph(eta).problem())
    np.testing.assert_array_equal(mu, np.clip(eta, 0, 1))
    assert tau.shape == (0,)


def test_the_same_constraint_twice_changes_nothing():
    for graph, (mu, _, _) in feasible_graphs(6, 8, n=6, num_factors=3, num_pairs=0, scale=1.0):
        twice = Graph(graph.eta_u, graph.factors * 2)
        np.testing.assert_allclose(solve(twice.problem())[0], mu, atol=1e-8)


def test_de_morgan():
    rng = np.random.default_rng(7)
    var, plain, flipped = tuple(range(4)), (False,) * 4, (True,) * 4
    for a, b in (
        (Factor("Nand", var, plain), Factor("Or", var, flipped)),
        (Factor("AndOut", var, plain), Factor("OrOut", var, flipped)),
        (Factor("AtLeast", var, plain, count=3), Factor("Budget", var, flipped, count=1)),
        (Factor("XorOut", var, plain), Factor("Xor", var, (False, False, False, True))),
        (Factor("Imply", var, plain), Factor("Or", var, (True, True, True, False))),
    ):
        eta = rng.standard_normal(4)
        left, right = (solve(Graph(eta, (f,)).problem())[0] for f in (a, b))
        np.testing.assert_allclose(left, right, atol=1e-12)


def test_knapsack_is_the_relaxation():
    graph = Graph(np.full(2, 2.0), (Factor("Knapsack", (0, 1), (False,) * 2, 3.0, (2.0, 2.0)),))
    np.testing.assert_allclose(solve(graph.problem())[0], [0.75, 0.75])


def test_infeasible_graphs_are_proved_so():
    rng, found = np.random.default_rng(8), 0
    while found < 10:
        graph = random_graph(rng, n=6, num_factors=12, num_pairs=2, scale=1.0)
        if oracle(graph) is not None:
            solve(graph.problem())  # and no false alarm
            continue
        with pytest.raises(Infeasible) as caught:
            solve(graph.problem())
        assert caught.value.tau is None or farkas(graph.problem(), caught.value.tau) < 0
        found += 1


def test_farkas_is_never_negative_on_a_feasible_problem():
    rng = np.random.default_rng(9)
    for graph, _ in feasible_graphs(9, 10, n=6, num_factors=4, num_pairs=3, scale=1.0):
        problem = graph.problem()
        for _ in range(20):
            tau = 10 * rng.standard_normal(len(problem.b))
            assert farkas(problem, np.clip(tau, problem.lo, problem.hi)) >= -1e-9


def test_ties_and_zero_scores():
    graph = matching(np.random.default_rng(10), 4, 4, scale=0.0)
    mu, _ = solve(graph.problem())
    np.testing.assert_allclose(mu, 0.25)


def test_marginals_of_a_problem_written_by_hand():
    problem = DenseProblem(
        eta=np.array([0.9, 0.8]),
        A=np.array([[1.0, 1.0]]),
        b=np.array([1.0]),
        lo=np.array([0.0]),
        hi=np.array([np.inf]),
    )
    mu, tau = solve(problem)
    np.testing.assert_allclose(mu, [0.55, 0.45])
    np.testing.assert_allclose(tau, [0.35])
    np.testing.assert_array_equal(mu, marginals(problem, tau))
