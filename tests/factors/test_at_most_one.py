import numpy as np
from contract import ALONE, AxisContract, values_of

import factormax as fm


class TestAtMostOne(AxisContract):
    kind = "AtMostOne"

    def test_slack_means_clip(self):
        scores = [0.4, -0.3, 0.5]
        np.testing.assert_array_equal(values_of(scores, fm.AtMostOne), np.clip(scores, 0, 1))

    def test_tight_means_xor(self):
        scores = np.random.default_rng(0).normal(size=20) + 1
        expected = values_of(scores, fm.Xor)
        np.testing.assert_allclose(values_of(scores, fm.AtMostOne), expected, atol=ALONE)
