import numpy as np
import pytest
from contract import ALONE, CountContract, values_of

import factormax as fm


class TestAtLeast(CountContract):
    kind = "AtLeast"
    parameter = "count"

    def test_one_is_or(self):
        for scores in np.random.default_rng(0).normal(size=(10, 4)) - 1:
            value = values_of(scores, lambda u: fm.AtLeast(u, 1))
            np.testing.assert_allclose(value, values_of(scores, fm.Or), atol=ALONE)

    def test_is_a_budget_of_the_negations(self):
        for scores in np.random.default_rng(0).normal(size=(10, 5)):
            value = values_of(scores, lambda u: fm.AtLeast(u, 3))
            expected = values_of(scores, lambda u: fm.Budget(~u, 2))
            np.testing.assert_allclose(value, expected, atol=ALONE)

    @pytest.mark.parametrize("count", [4, np.array([1, 4])])
    def test_more_than_there_are_is_infeasible(self, count):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(np.zeros((2, 3)))
        with pytest.raises(fm.InfeasibleError, match="AtLeast over u"):
            fg.add(fm.AtLeast(u, count))
