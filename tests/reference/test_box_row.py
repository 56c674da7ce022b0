"""One row in a box: against a QP solver, its optimality conditions, and finite differences."""

import numpy as np
import pytest

from factormax.reference import Infeasible, box_row, box_row_vjp

from .instances import clarabel_qp

INF = np.inf
KINDS = ("equality", "inequality", "soft")


def random_row(rng, kind, d):
    """A feasible row in a box, coefficients of both signs."""
    y = 2 * rng.standard_normal(d)
    w = rng.standard_normal(d) * rng.choice([0.3, 1, 3])
    h = rng.uniform(0.3, 1.5, d)
    b = float(w @ (h * rng.random(d)))
    lo, hi = {
        "equality": (-INF, INF),
        "inequality": (0.0, INF),
        "soft": (0.0, rng.uniform(0, 1)),
    }[kind]
    return y, w, h, b, lo, hi


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [1, 2, 5, 12])
def test_equals_the_qp(kind, d):
    rng = np.random.default_rng(d)
    for _ in range(20):
        y, w, h, b, lo, hi = random_row(rng, kind, d)
        v, _ = box_row(y, w, h, b, lo, hi)

        # min ½‖v‖² − y·v + hi·e  with  w·v ≤ b + e (or =), 0 ≤ v ≤ h, e ≥ 0: e is the excess paid
        cost = hi if kind == "soft" else 0.0
        pays = -1.0 if kind == "soft" else 0.0
        eye = np.eye(d + 1)
        A = np.concatenate([[np.append(w, pays)], -eye, eye[:d]])
        rhs = np.concatenate([[b], np.zeros(d + 1), h])
        P = np.diag(np.append(np.ones(d), 0.0))
        x = clarabel_qp(P, np.append(-y, cost), A, rhs, num_equal=int(kind == "equality"))
        np.testing.assert_allclose(v, x[:d], atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_multiplier_proves_optimality(kind):
    rng = np.random.default_rng(1)
    for _ in range(200):
        y, w, h, b, lo, hi = random_row(rng, kind, rng.integers(1, 9))
        v, t = box_row(y, w, h, b, lo, hi)
        slack = w @ v - b
        np.testing.assert_array_equal(v, np.clip(y - w * t, 0, h))
        assert lo <= t <= hi
        assert slack <= 1e-12 or t == hi
        assert slack >= -1e-12 or t == lo


@pytest.mark.parametrize("kind", KINDS)
def test_vjp_equals_finite_differences(kind):
    rng, step, checked = np.random.default_rng(2), 1e-7, 0
    for _ in range(100):
        y, w, h, b, lo, hi = random_row(rng, kind, rng.integers(1, 7))
        direction, grad_v = rng.standard_normal((2, len(y)))
        d_hi = rng.standard_normal() if kind == "soft" else 0.0

        def value(s, y=y, w=w, h=h, b=b, lo=lo, hi=hi, direction=direction, d_hi=d_hi):
            return box_row(y + s * direction, w, h, b, lo, hi + s * d_hi)[0]

        right, left = (value(step) - value(0)) / step, (value(0) - value(-step)) / step
        if np.abs(right - left).max() > 1e-5:  # a kink
            continue
        _, t = box_row(y, w, h, b, lo, hi)
        grad_y, grad_hi = box_row_vjp(y, w, h, b, lo, hi, t, grad_v)
        np.testing.assert_allclose(
            grad_y @ direction + grad_hi * d_hi, grad_v @ (right + left) / 2, atol=1e-6
        )
        checked += 1
    assert checked > 90


@pytest.mark.parametrize("y", [[2.0, 0.0], [5.0, 1.0], [1.5, 0.5 - 1e-3], [1e9, -1e9]])
def test_zero_one_solution_has_no_gradient(y):
    y, one = np.array(y), np.ones(2)
    v, t = box_row(y, one, one, 1.0, -INF, INF)
    np.testing.assert_array_equal(v, [1.0, 0.0])
    assert y[1] < t < y[0] - 1  # well inside the multipliers that would do
    grad_y, _ = box_row_vjp(y, one, one, 1.0, -INF, INF, t, np.array([1.0, 2.0]))
    np.testing.assert_array_equal(grad_y, 0.0)


def test_one_variable_that_must_be_on():
    one = np.ones(1)
    for y in (-3.0, 0.4, 1.0, 7.0):
        v, t = box_row(np.array([y]), one, one, 1.0, -INF, INF)
        assert v[0] == 1.0
        assert box_row_vjp(np.array([y]), one, one, 1.0, -INF, INF, t, one)[0][0] == 0.0


def test_coefficients_of_zero_leave_a_clip():
    y, h = np.array([0.4, -1.0, 3.0]), np.ones(3)
    v, _ = box_row(y, np.zeros(3), h, 0.0, -INF, INF)
    np.testing.assert_array_equal(v, [0.4, 0.0, 1.0])
    grad, _ = box_row_vjp(y, np.zeros(3), h, 0.0, -INF, INF, 0.0, h)
    np.testing.assert_array_equal(grad, [1.0, 0.0, 0.0])


@pytest.mark.parametrize("b", [-0.1, 2.1])
def test_infeasible_raises(b):
    with pytest.raises(Infeasible, match="no point of the box"):
        box_row(np.zeros(2), np.ones(2), np.ones(2), b, -INF, INF)


def test_soft_row_gives_in():
    # wants v₁ + v₂ ≤ 0.2, but may pay only 0.1 per unit
    v, t = box_row(np.array([0.8, 0.5]), np.ones(2), np.ones(2), 0.2, 0.0, 0.1)
    assert t == 0.1
    np.testing.assert_allclose(v, [0.7, 0.4])
