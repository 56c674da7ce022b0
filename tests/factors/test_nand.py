import numpy as np
from contract import ALONE, AxisContract, values_of

import factormax as fm


class TestNand(AxisContract):
    kind = "Nand"

    def test_is_or_of_the_negations(self):
        for scores in np.random.default_rng(0).normal(size=(10, 4)) + 1:
            expected = values_of(scores, lambda u: fm.Or(~u))
            np.testing.assert_allclose(values_of(scores, fm.Nand), expected, atol=ALONE)

    def test_one_variable_is_off(self):
        np.testing.assert_array_equal(values_of([9.0], fm.Nand), [0])
