import numpy as np
import pytest
from contract import CountContract, values_of

import factormax as fm


class TestBudget(CountContract):
    kind = "Budget"
    parameter = "budget"

    @pytest.mark.parametrize("budget", [4, 5, 10**9])
    def test_a_budget_for_all_is_no_constraint(self, budget):
        scores = np.array([0.3, 2.0, -1.0, 0.9])
        value = values_of(scores, lambda u: fm.Budget(u, budget))
        np.testing.assert_array_equal(value, np.clip(scores, 0, 1))

    def test_a_budget_of_zero_turns_all_off(self):
        np.testing.assert_array_equal(values_of([0.3, 2.0], lambda u: fm.Budget(u, 0)), 0)

    def test_message_of_the_guide(self):
        fg = fm.FactorGraph()
        u = fg.variable((5, 5))
        with pytest.raises(fm.GraphError) as error:
            fg.add(fm.Budget(u[:, 3], budget=-1))
        assert "Budget over u[:, 3]: budget must be at least 0, got -1." in str(error.value)

    def test_whole_floats_are_counts(self):
        as_float = values_of([0.9, 2.0, 3.0], lambda u: fm.Budget(u, np.float64(2)))
        np.testing.assert_array_equal(
            as_float, values_of([0.9, 2.0, 3.0], lambda u: fm.Budget(u, 2))
        )

    def test_a_fraction_is_refused_with_what_takes_one(self):
        u = fm.FactorGraph().variable(3)
        with pytest.raises(fm.GraphError) as error:
            fm.Budget(u, 1.5)
        assert str(error.value) == (
            "Budget over u: budget must be a whole number, got 1.5. Linear takes fractions."
        )
