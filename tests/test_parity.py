"""The core, its NumPy twin and the fronts give the same answers on tangled graphs."""

import numpy as np
import pytest
from graphs import build
from problems import fuzzed_problem

from factormax import _engines, reference
from factormax._fronts.numpy import start
from factormax._options import Options
from factormax.testing import dense_problem


@pytest.mark.parametrize("seed", range(0, 60, 6))
def test_core_equals_reference(seed):
    problem = fuzzed_problem(seed)
    rng = np.random.default_rng(seed)
    built = build(problem)
    inputs = start(built.fg).inputs
    raw = _engines.solve(inputs, Options(tol=1e-11, on_failure="ignore"))
    dense = dense_problem(inputs, 0)
    mu, tau = reference.solve(dense)
    np.testing.assert_allclose(raw.mu[0], mu, rtol=0, atol=1e-8)
    np.testing.assert_allclose(raw.mu_v[0], reference.pair_values(dense, mu), rtol=0, atol=1e-8)
    grad, grad_v = rng.normal(size=raw.mu.shape), rng.normal(size=raw.mu_v.shape)
    ours = _engines.vjp(inputs, raw, grad, grad_v)
    twin = reference.vjp(dense, tau, grad[0], grad_v[0])
    np.testing.assert_allclose(ours[0][0], twin.eta_u, rtol=0, atol=1e-7)
    np.testing.assert_allclose(ours[1][0], twin.eta_v, rtol=0, atol=1e-7)
