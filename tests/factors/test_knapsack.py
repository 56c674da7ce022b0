import numpy as np
import oracle
import pytest
from contract import ALONE, CountContract, values_of
from oracle import Problem, Term

import factormax as fm


class TestKnapsack(CountContract):
    kind = "Knapsack"
    parameter = "budget"
    integral = False
    bad = (-1, -0.5, np.nan)  # fractions are fine

    def others(self, d):
        return {"costs": np.linspace(0.5, 1.5, d)}

    def test_is_the_relaxation(self):
        """Not the hull of the 0/1 points, which would give ½, ½ (ALGORITHMS.md, erratum 9)."""
        value = values_of([2, 2], lambda u: fm.Knapsack(u, [2, 2], 3))
        np.testing.assert_allclose(value, [0.75, 0.75], atol=ALONE)

    def test_unit_costs_are_a_budget(self):
        for scores in np.random.default_rng(0).normal(size=(10, 5)) + 1:
            value = values_of(scores, lambda u: fm.Knapsack(u, np.ones(5), 2))
            expected = values_of(scores, lambda u: fm.Budget(u, 2))
            np.testing.assert_allclose(value, expected, atol=ALONE)

    def test_what_costs_nothing_is_free(self):
        value = values_of([0.7, 0.3, 5], lambda u: fm.Knapsack(u, [0, 1, 1], 0))
        np.testing.assert_allclose(value, [0.7, 0, 0], atol=ALONE)

    def test_costs_of_a_list_of_one_scalar(self):
        """A list is concatenated, also of one: its costs have one dimension."""
        value = values_of([3.0, 0.5], lambda u: fm.Knapsack([u[0]], [2.0], 1.0))
        np.testing.assert_allclose(value, [0.5, 0.5], atol=ALONE)

    def test_costs_over_many_magnitudes(self):
        rng = np.random.default_rng(1)
        for _ in range(10):
            costs = 10.0 ** rng.integers(-3, 4, 6)
            term = Term("Knapsack", range(6), params={"costs": costs, "budget": costs.sum() / 3})
            problem = Problem(rng.normal(size=6) + 1, (term,))
            value = values_of(problem.eta, lambda u, t=term: fm.Knapsack(u, **t.params))
            np.testing.assert_allclose(value, oracle.solve(problem).mu, atol=1e-8)

    def test_costs_per_instance(self):
        rng = np.random.default_rng(2)
        eta, costs = rng.normal(size=(3, 4)) + 1, rng.uniform(0, 2, (3, 4))
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta)
        fg.add(fm.Knapsack(u, costs, 1.5))
        fg.solve()
        for row in range(3):
            term = Term("Knapsack", range(4), params={"costs": costs[row], "budget": 1.5})
            exact = oracle.solve(Problem(eta[row], (term,)))
            np.testing.assert_allclose(u.value[row], exact.mu, atol=ALONE)

    @pytest.mark.parametrize("costs", [[1, -1, 1], [1, np.nan, 1], [1, np.inf, 1]])
    def test_bad_costs(self, costs):
        fg = fm.FactorGraph()
        u = fg.variable(3)
        with pytest.raises(fm.GraphError, match=r"Knapsack over u.*cost"):
            fg.add(fm.Knapsack(u, costs, 1))

    @pytest.mark.parametrize("costs", [np.ones(2), np.ones((2, 3))])
    def test_wrong_number_of_costs(self, costs):
        fg = fm.FactorGraph()
        u = fg.variable(3)
        with pytest.raises(fm.ShapeError, match=r"Knapsack over u.*cost"):
            fg.add(fm.Knapsack(u, costs, 1))
