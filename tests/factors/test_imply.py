import numpy as np
from contract import ALONE, AxisContract, values_of

import factormax as fm


class TestImply(AxisContract):
    kind = "Imply"

    def test_of_two_is_an_order(self):
        """The first is at most the second: where they disagree, they meet in the middle."""
        np.testing.assert_allclose(values_of([0.8, 0.2], fm.Imply), [0.5, 0.5], atol=ALONE)
        np.testing.assert_array_equal(values_of([0.2, 0.8], fm.Imply), [0.2, 0.8])

    def test_of_one_has_no_premises(self):
        np.testing.assert_array_equal(values_of([-9.0], fm.Imply), [1])

    def test_is_or_with_the_premises_negated(self):
        for scores in np.random.default_rng(0).normal(size=(10, 4)):
            expected = values_of(scores, lambda u: fm.Or([~u[:-1], u[-1]]))
            np.testing.assert_allclose(values_of(scores, fm.Imply), expected, atol=ALONE)
