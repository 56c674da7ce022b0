import numpy as np
from contract import ALONE, AxisContract, values_of

import factormax as fm


class TestXorOut(AxisContract):
    kind = "XorOut"

    def test_is_xor_with_the_output_negated(self):
        for scores in np.random.default_rng(0).normal(size=(10, 4)):
            expected = values_of(scores, lambda u: fm.Xor([u[:-1], ~u[-1]]))
            np.testing.assert_allclose(values_of(scores, fm.XorOut), expected, atol=ALONE)

    def test_of_nothing_is_off(self):
        np.testing.assert_array_equal(values_of([9.0], fm.XorOut), [0])
