import numpy as np
import pytest
from contract import ALONE, CountContract, values_of

import factormax as fm


class TestExactly(CountContract):
    kind = "Exactly"
    parameter = "count"

    def test_one_is_xor(self):
        for scores in np.random.default_rng(0).normal(size=(10, 4)):
            value = values_of(scores, lambda u: fm.Exactly(u, 1))
            np.testing.assert_allclose(value, values_of(scores, fm.Xor), atol=ALONE)

    def test_all_or_none(self):
        np.testing.assert_allclose(values_of([-3, 0.5], lambda u: fm.Exactly(u, 2)), 1, atol=ALONE)
        np.testing.assert_allclose(values_of([3, 0.5], lambda u: fm.Exactly(u, 0)), 0, atol=ALONE)

    @pytest.mark.parametrize("count", [4, np.array([1, 4])])
    def test_more_than_there_are_is_infeasible(self, count):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(np.zeros((2, 3)))
        with pytest.raises(fm.InfeasibleError, match="Exactly over u"):
            fg.add(fm.Exactly(u, count))
