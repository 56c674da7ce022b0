import numpy as np
import pytest
from contract import ALONE, AxisContract, values_of

import factormax as fm


def sparsemax(z):
    """Martins and Astudillo (2016), by sorting."""
    ordered = np.sort(z)[::-1]
    thresholds = (np.cumsum(ordered) - 1) / np.arange(1, len(z) + 1)
    tau = thresholds[np.flatnonzero(ordered > thresholds)[-1]]
    return np.maximum(z - tau, 0)


class TestXor(AxisContract):
    kind = "Xor"

    @pytest.mark.parametrize("d", [1, 2, 10, 1000])
    @pytest.mark.parametrize("scale", [0.01, 1, 100])
    def test_alone_is_sparsemax(self, d, scale):
        scores = scale * np.random.default_rng(d).normal(size=d)
        np.testing.assert_allclose(values_of(scores, fm.Xor), sparsemax(scores), atol=ALONE)

    def test_gradient_is_that_of_sparsemax(self):
        rng = np.random.default_rng(0)
        fg = fm.FactorGraph()
        u = fg.variable_from(rng.normal(size=50))
        fg.add(fm.Xor(u))
        solution = fg.solve()
        grad, support = rng.normal(size=50), u.value > 0
        expected = np.where(support, grad - grad[support].mean(), 0)
        np.testing.assert_allclose(solution.vjp({u: grad})[u], expected, atol=1e-12)

    def test_over_variables_of_which_none_is_free(self):
        """Both at the corner: an answer of exactly 0 and 1, not nearly."""
        np.testing.assert_array_equal(values_of([5.0, 0.0, -3.0], fm.Xor), [1, 0, 0])
