import numpy as np
import pytest
from contract import ALONE, AxisContract, values_of

import factormax as fm


class TestOrOut(AxisContract):
    kind = "OrOut"

    def test_of_nothing_is_off(self):
        np.testing.assert_array_equal(values_of([9.0], fm.OrOut), [0])

    def test_of_one_is_equality(self):
        np.testing.assert_allclose(values_of([0.8, 0.4], fm.OrOut), [0.6, 0.6], atol=ALONE)

    @pytest.mark.parametrize("scores", [[0.8, 0.4], [0.5, 0.5]])
    def test_of_one_is_equality_for_the_gradient_too(self, scores):
        """Also where the scores agree already, and no multiplier is needed."""
        fg = fm.FactorGraph()
        u = fg.variable_from(np.array(scores))
        fg.add(fm.OrOut(u))
        gradient = fg.solve().vjp({u: np.array([1.0, 0.0])})[u]
        np.testing.assert_allclose(gradient, [0.5, 0.5], atol=1e-9)

    def test_is_the_rows_of_imply_and_or(self):
        """out ⇒ some input, and every input ⇒ out, as separate factors."""
        for scores in np.random.default_rng(0).normal(size=(10, 4)):
            parts = [lambda u, k=k: fm.Imply([u[k], u[-1]]) for k in range(3)]
            expected = values_of(scores, lambda u: fm.Or([u[:-1], ~u[-1]]), *parts)
            np.testing.assert_allclose(values_of(scores, fm.OrOut), expected, atol=1e-5)
