import numpy as np
from contract import ALONE, AxisContract, values_of

import factormax as fm


class TestOr(AxisContract):
    kind = "Or"

    def test_slack_means_clip(self):
        scores = [0.4, 1.3, -2]
        np.testing.assert_array_equal(values_of(scores, fm.Or), np.clip(scores, 0, 1))

    def test_tight_means_xor(self):
        scores = np.random.default_rng(0).normal(size=8) - 5
        expected = values_of(scores, fm.Xor)
        np.testing.assert_allclose(values_of(scores, fm.Or), expected, atol=ALONE)
