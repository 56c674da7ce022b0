"""OrOut's three branches: against a QP solver, the optimality conditions, finite differences."""

import numpy as np
import pytest

from factormax.reference import or_out, or_out_vjp
from factormax.reference.or_out import _solve

from .instances import clarabel_qp


def rows(delta):
    """(d, d): the implications, then the sum row, on the scaled copies."""
    d = len(delta)
    implications = np.eye(d)[:-1] * delta
    implications[:, -1] = -delta[-1]
    total = np.append(-delta[:-1], delta[-1])
    return np.concatenate([implications, total[None]])


def random_points(seed, count, max_d=7):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        d = rng.integers(1, max_d)
        yield rng.choice([0.3, 1, 3]) * rng.standard_normal(d), np.sqrt(rng.integers(1, 6, d))


def test_equals_the_qp():
    for y, delta in random_points(0, 150):
        d = len(y)
        A = np.concatenate([rows(delta), -np.eye(d), np.eye(d)])
        rhs = np.concatenate([np.zeros(2 * d), 1 / delta])
        x = clarabel_qp(np.eye(d), -y, A, rhs, num_equal=0)
        np.testing.assert_allclose(or_out(y, delta)[0], x, atol=1e-7)


def test_multipliers_prove_optimality_in_every_branch():
    seen = set()
    for y, delta in random_points(1, 500):
        v, t = or_out(y, delta)
        A = rows(delta)
        assert (A @ v <= 1e-12).all()
        assert (t >= 0).all()
        np.testing.assert_allclose(t * (A @ v), 0, atol=1e-12)
        np.testing.assert_allclose(v, np.clip(y - A.T @ t, 0, 1 / delta), atol=1e-12)
        seen.add(_solve(y, delta).number)
    assert seen == {1, 2, 3}


def test_vjp_equals_finite_differences_in_every_branch():
    rng, step, checked = np.random.default_rng(2), 1e-7, {1: 0, 2: 0, 3: 0}
    for y, delta in random_points(3, 300):
        direction, grad_v = rng.standard_normal((2, len(y)))
        at = [or_out(y + s * direction, delta)[0] for s in (-step, 0.0, step)]
        left, right = (at[1] - at[0]) / step, (at[2] - at[1]) / step
        if np.abs(right - left).max() > 1e-5:  # a kink
            continue
        np.testing.assert_allclose(
            or_out_vjp(y, delta, grad_v) @ direction, grad_v @ (left + right) / 2, atol=1e-6
        )
        checked[_solve(y, delta).number] += 1
    assert min(checked.values()) > 40


@pytest.mark.parametrize("second", [-0.5, -5.0])
def test_one_input_on_is_a_tie_between_branches(second):
    # Branch 2 gives ℓ₁ = ℓ₃ and ℓ₂ = 0, so the output equals the sum: up to rounding only.
    rng = np.random.default_rng(4)
    for _ in range(200):
        delta = np.sqrt(rng.integers(1, 6, 3))
        y = np.array([rng.uniform(0.5, 1), second, rng.uniform(0, 0.3)]) / delta
        v, t = or_out(y, delta)
        assert (t >= 0).all()
        np.testing.assert_allclose(delta[0] * v[0], delta[2] * v[2], atol=1e-12)


def test_output_alone_is_off_and_one_input_is_the_output():
    assert or_out(np.array([0.7]), np.ones(1))[0][0] == 0.0
    np.testing.assert_allclose(or_out(np.array([0.2, 0.6]), np.ones(2))[0], [0.4, 0.4])
