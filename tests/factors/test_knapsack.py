import numpy as np
import oracle
import pytest
from contract import ALONE, CountContract, values_of
from oracle import Problem, Term

import factormax as fm


class TestKnapsack(CountContract):
    kind = "Knapsack"
    parameter = "budget"
    bad = (-1, -0.5, np.nan)  # fractions are fine

    def others(self, d):
        return {"costs": np.linspace(0.5, 1.5, d)}

    def test_is_the_relaxation(self):
        """Not the hull of the 0/1 points, which would give ½, ½ (docs/math.md, erratum 10)."""
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

    def test_a_lone_factor_with_costs_of_any_size(self):
        """Bisection in extended precision says what is right."""
        rng = np.random.default_rng(3)
        for k in range(200):
            d = int(rng.integers(2, 8))
            costs, scores = 10 ** rng.uniform(-8, 8, d), 3 * rng.normal(size=d)
            most = rng.choice([0, costs.min(), rng.choice(costs), costs.sum()])
            budget = float(rng.uniform(0, 1) * most)
            value = values_of(scores, lambda u, c=costs, b=budget: fm.Knapsack(u, c, b))
            expected = _by_bisection(scores, costs, budget)
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6, err_msg=str(k))

    @pytest.mark.parametrize("kind", ["AtMostOne", "Imply", "Nand"])
    def test_a_small_cost_beside_a_large_one(self, kind):
        """Without a budget nothing that costs anything is on, be it little."""
        fg = fm.FactorGraph()
        u = fg.variable_from([-0.5, 0.9, 0.3])
        fg.add(fm.Knapsack(u[:2], costs=[3000, 0.002], budget=0))
        fg.add(getattr(fm, kind)(u[1:]))
        assert fg.solve().converged
        np.testing.assert_allclose(u.value, [0, 0, 0.3], rtol=0, atol=1e-6)

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


def _by_bisection(scores, costs, budget):
    y, c = np.longdouble(scores), np.longdouble(costs)
    left, right = np.longdouble(0), max(np.longdouble(0), (y / c).max())
    if c @ np.clip(y, 0, 1) <= budget:
        right = left
    for _ in range(200):
        middle = (left + right) / 2
        if c @ np.clip(y - c * middle, 0, 1) > budget:
            left = middle
        else:
            right = middle
    return np.float64(np.clip(y - c * right, 0, 1))
