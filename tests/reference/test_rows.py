"""From compiled index arrays to dense rows: negation, masks, instances, pairs."""

import dataclasses

import numpy as np
import pytest

from factormax.reference import admm, from_compiled, pair_values, solve

from .instances import NAMES, Factor, Graph, allows, compile_graph, random_factor

NONE = np.zeros(0)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Knapsack"])
def test_rows_hold_exactly_where_the_factor_allows(name):
    rng = np.random.default_rng(0)
    for d in (2, 3, 4, 5):
        factor = random_factor(rng, name, range(d))
        problem = Graph(np.zeros(d), (factor,)).problem()
        for bits in np.ndindex(*(2,) * d):
            excess = problem.A @ np.array(bits, float) - problem.b
            holds = (np.where(np.isneginf(problem.lo), np.abs(excess), excess) <= 1e-12).all()
            assert holds == allows(factor, bits), (factor, bits)


def test_pairs_become_soft_rows():
    graph = Graph(
        eta_u=np.array([0.1, 0.2, 0.3]),
        pairs=np.array([[0, 1], [1, 2]]),
        pair_negated=np.array([[False, True], [True, False]]),
        eta_v=np.array([2.0, -3.0]),
    )
    problem = graph.problem()
    # 2·min(μ₀, 1−μ₁): the score goes to literal 1−μ₁, and (1−μ₁) − μ₀ ≤ 0 is worth 2.
    # −3·max(0, (1−μ₁) + μ₂ − 1): (1−μ₁) + μ₂ ≤ 1 is worth 3.
    np.testing.assert_allclose(problem.eta, [0.1, -1.8, 0.3])
    np.testing.assert_array_equal(problem.A, [[-1, -1, 0], [0, -1, 1]])
    np.testing.assert_array_equal(problem.b, [-1, 0])
    np.testing.assert_array_equal(problem.lo, 0)
    np.testing.assert_array_equal(problem.hi, [2, 3])
    np.testing.assert_allclose(problem.eta_u, graph.eta_u)
    np.testing.assert_allclose(pair_values(problem, np.array([0.5, 0.2, 0.9])), [0.5, 0.7])


def test_a_masked_variable_is_off():
    graph = Graph(
        eta_u=np.array([0.3, np.nan, 0.2, 0.9]),
        factors=(
            Factor("Xor", (0, 1, 2), (False,) * 3),
            Factor("Or", (1,), (False,)),  # absent: nothing of it is left
            Factor("Or", (1, 3), (True, False)),  # holds by the negation
        ),
        pairs=np.array([[0, 1], [2, 3], [1, 3]]),
        pair_negated=np.array([[False, False], [False, False], [True, False]]),
        eta_v=np.array([5.0, -0.4, -0.6]),
    )
    mask = np.array([True, False, True, True])
    problem = from_compiled(compile_graph(graph), 0, graph.eta_u, graph.eta_v, mask)
    assert problem.A.shape == (6, 3)
    np.testing.assert_array_equal(problem.hi, [np.inf, 0, np.inf, 5, 0.4, 0.6])

    mu, _ = solve(problem)
    without = Graph(
        np.array([0.3, 0.2, 0.9 - 0.6]),  # the last pair is a score of the last variable
        (Factor("Xor", (0, 1), (False,) * 2),),
        np.array([[1, 2]]),
        np.zeros((1, 2), bool),
        graph.eta_v[1:2],
    )
    expected, _ = solve(without.problem())
    np.testing.assert_allclose(mu, expected, atol=1e-12)
    np.testing.assert_allclose(problem.to_graph(mu)[mask], expected, atol=1e-12)
    assert problem.to_graph(mu)[1] == 0
    (middle,) = pair_values(without.problem(), expected)
    np.testing.assert_allclose(pair_values(problem, mu), [0, middle, expected[2]], atol=1e-12)


def test_instances_have_their_own_parameters():
    graph = Graph(np.array([0.9, 0.8, 0.7]), (Factor("Budget", (0, 1, 2), (False,) * 3, count=1),))
    compiled = dataclasses.replace(compile_graph(graph), rhs=np.array([[1.0], [2.0]]))
    for instance, budget in enumerate((1.0, 2.0)):
        problem = from_compiled(compiled, instance, graph.eta_u, NONE)
        assert solve(problem)[0].sum() == pytest.approx(budget, abs=1e-12)


def test_or_out_block_knows_its_literals():
    factor = Factor("OrOut", (2, 0, 1), (True, False, True))
    (block,) = Graph(np.zeros(3), (factor,)).problem().blocks
    assert block.links == (2, 0, 1)
    assert block.negated == (True, False, True)
    assert block.rows == (0, 1, 2)


def test_or_out_whose_output_is_masked_switches_its_inputs_off():
    compiled = compile_graph(Graph(np.zeros(3), (Factor("OrOut", (0, 1, 2), (False,) * 3),)))
    mask = np.array([True, True, False])
    problem = from_compiled(compiled, 0, np.array([0.2, 0.6, 0.0]), NONE, mask)
    assert not any(block.or_out for block in problem.blocks)
    np.testing.assert_allclose(solve(problem)[0], [0, 0], atol=1e-12)


def test_or_out_with_one_input_is_one_equality():
    graph = Graph(np.array([0.2, 0.6]), (Factor("OrOut", (0, 1), (False, True)),))
    problem = graph.problem()
    (block,) = problem.blocks
    assert block.links == (0, 1)
    assert not block.or_out
    np.testing.assert_allclose(solve(problem)[0], [0.3, 0.7], atol=1e-12)
    np.testing.assert_allclose(admm(problem).mu, [0.3, 0.7], atol=1e-8)


def test_a_score_that_is_not_finite_raises():
    compiled = compile_graph(Graph(np.zeros(2)))
    with pytest.raises(ValueError, match="must be finite"):
        from_compiled(compiled, 0, np.array([0.0, -np.inf]), NONE)
