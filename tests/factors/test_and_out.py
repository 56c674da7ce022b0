import numpy as np
from contract import ALONE, AxisContract, values_of

import factormax as fm


class TestAndOut(AxisContract):
    kind = "AndOut"

    def test_of_nothing_is_on(self):
        np.testing.assert_array_equal(values_of([-9.0], fm.AndOut), [1])

    def test_is_or_out_of_the_negations(self):
        for scores in np.random.default_rng(0).normal(size=(10, 4)):
            expected = values_of(scores, lambda u: fm.OrOut(~u))
            np.testing.assert_allclose(values_of(scores, fm.AndOut), expected, atol=ALONE)
