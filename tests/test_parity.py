"""The core, its NumPy twin and the fronts give the same answers on tangled graphs."""

import numpy as np
import pytest
from graphs import build
from problems import fuzzed_problem

from factormax import engine, reference
from factormax._numpy import Solve
from factormax.testing import dense_problem


@pytest.mark.parametrize("seed", range(0, 60, 6))
def test_core_equals_reference(seed):
    problem = fuzzed_problem(seed)
    rng = np.random.default_rng(seed)
    built = build(problem)
    pair_scores = [p.given for p in built.fg.score_parts()]
    task = Solve(built.fg, [problem.eta], pair_scores, np.float64)
    numbers, wiring = task.numbers, task.wiring
    raw = engine.solve(wiring, numbers, engine.Options(tol=1e-11, on_failure="ignore"))
    dense = dense_problem(wiring, numbers, 0)
    mu, tau = reference.solve(dense)
    np.testing.assert_allclose(raw.mu[0], mu, rtol=0, atol=1e-8)
    np.testing.assert_allclose(raw.mu_v[0], reference.pair_values(dense, mu), rtol=0, atol=1e-8)
    grad, grad_v = rng.normal(size=raw.mu.shape), rng.normal(size=raw.mu_v.shape)
    ours = engine.vjp(wiring, numbers.eta_v, numbers.params, raw, grad, grad_v, None, "raise")
    twin = reference.vjp(dense, tau, grad[0], grad_v[0])
    np.testing.assert_allclose(ours[0][0], twin.eta_u, rtol=0, atol=1e-7)
    np.testing.assert_allclose(ours[1][0], twin.eta_v, rtol=0, atol=1e-7)
