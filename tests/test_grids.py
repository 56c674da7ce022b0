"""A matching, whose rows and columns the core sweeps at once: the same as in any other order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import factormax as fm


def solve(scores: np.ndarray, order: np.ndarray, negated: bool) -> tuple[np.ndarray, np.ndarray]:
    """Value and gradient of a batch of matchings whose variables are laid out in this order."""
    batch, m, n = scores.shape
    place = np.argsort(order)
    fg = fm.FactorGraph(batch_dims=1)
    flat = scores.reshape(batch, m * n)[:, order]
    u = fg.variable_from(-flat if negated else flat)
    grid = u[place.reshape(m, n)]
    grid = ~grid if negated else grid
    fg.add(fm.Xor(grid, axis=1) if m <= n else fm.AtMostOne(grid, axis=1))
    fg.add(fm.AtMostOne(grid, axis=0))
    solution = fg.solve(tol=1e-10, on_failure="raise")
    weight = np.linspace(-1, 1, m * n)[order]
    grad = solution.vjp({u: np.broadcast_to(weight, flat.shape)})[u]
    value = 1 - u.value if negated else u.value
    return value[:, place].reshape(scores.shape), grad[:, place].reshape(scores.shape)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize(("m", "n"), [*itertools.product([1, 2, 3, 4, 5, 9], repeat=2)])
def test_order_of_the_variables_does_not_matter(m: int, n: int, negated: bool, dtype: type) -> None:
    rng = np.random.default_rng(10 * m + n)
    scores = rng.standard_normal((8, m, n)).astype(dtype)
    same = np.arange(m * n)
    shuffled = rng.permutation(m * n)
    value, grad = solve(scores, same, negated)
    other_value, other_grad = solve(scores, shuffled, negated)
    tol = 1e-9 if dtype == np.float64 else 1e-5
    np.testing.assert_allclose(value, other_value, atol=tol)
    np.testing.assert_allclose(grad, other_grad, atol=tol)
