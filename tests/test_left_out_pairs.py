"""Pairs of variables that are 0 for certain are left out, docs/math.md (11a), and not missed."""

from __future__ import annotations

import numpy as np
import pytest

import factormax as fm


def solved(eta, scores, first, second, *, held, mask=None, **options):
    """A batch of pairwise models; held: a row that never binds keeps all pairs in."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta, mask=mask)
    pairs = fg.add(fm.Pair(u[first], u[second], scores))
    if held:
        fg.add(fm.Budget(u, eta.shape[1]))
    solution = fg.solve(tol=1e-9, **options)
    return fg, u, pairs, solution


def model(rng, batch=6, n=25, bias=-2.0, scale=0.4, negative=0.5):
    first, second = np.triu_indices(n, 1)
    order = rng.permutation(len(first))
    swap = rng.random(len(first)) < 0.5
    first, second = np.where(swap, second, first)[order], np.where(swap, first, second)[order]
    eta = rng.normal(bias, 1.5, size=(batch, n))
    scores = scale * np.abs(rng.normal(size=(batch, len(first))))
    scores *= np.where(rng.random(scores.shape) < negative, -1, 1)
    return eta, scores, first, second


@pytest.mark.parametrize("negative", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("bias", [-8.0, -3.0, -1.0, 0.0])
def test_the_same_answer_and_gradient(bias, negative):
    rng = np.random.default_rng([int(-bias), int(10 * negative)])
    eta, scores, first, second = model(rng, bias=bias, negative=negative)
    _, u, pairs, solution = solved(eta, scores, first, second, held=False)
    _, v, same, other = solved(eta, scores, first, second, held=True)
    np.testing.assert_allclose(u.value, v.value, rtol=0, atol=1e-8)
    np.testing.assert_allclose(pairs.value, same.value, rtol=0, atol=1e-8)
    np.testing.assert_allclose(solution.objective, other.objective, rtol=0, atol=1e-8)
    grad, grad_v = rng.normal(size=eta.shape), rng.normal(size=scores.shape)
    found, wanted = solution.vjp({u: grad, pairs: grad_v}), other.vjp({v: grad, same: grad_v})
    np.testing.assert_allclose(found[u], wanted[v], rtol=0, atol=1e-7)
    np.testing.assert_allclose(found[pairs], wanted[same], rtol=0, atol=1e-7)


@pytest.mark.parametrize("negative", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("bias", [-4.0, -2.5, -1.0])
def test_the_multipliers_explain_the_answer(bias, negative):
    """With those of the pairs that are left out as well, mu = clip(z): (12)."""
    rng = np.random.default_rng([int(-10 * bias), int(10 * negative), 7])
    eta, scores, first, second = model(rng, batch=40, bias=bias, scale=0.2, negative=negative)
    _, u, _, solution = solved(eta, scores, first, second, held=False)
    tau = solution.multipliers
    assert ((tau >= 0) & (tau <= np.abs(scores) + 1e-12)).all()
    attractive = scores >= 0
    z = eta.copy()
    for i in range(len(eta)):
        np.add.at(z[i], first, np.where(attractive[i], tau[i], -tau[i]))
        np.add.at(z[i], second, np.where(attractive[i], scores[i] - tau[i], -tau[i]))
    np.testing.assert_allclose(u.value, np.clip(z, 0, 1), rtol=0, atol=1e-8)


def test_masks_and_rows():
    """What a row holds is not 0 for certain, however low its score."""
    rng = np.random.default_rng(1)
    eta, scores, first, second = model(rng, bias=-4.0)
    mask = rng.random(eta.shape) > 0.3
    mask[:, :3] = True
    values = []
    for held in (False, True):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta, mask=mask)
        fg.add(fm.Pair(u[first], u[second], scores))
        fg.add(fm.Xor(u[:3]))
        if held:
            fg.add(fm.Budget(u, eta.shape[1]))
        fg.solve(tol=1e-9)
        values.append(u.value)
    np.testing.assert_allclose(values[0], values[1], rtol=0, atol=1e-8)
    np.testing.assert_allclose(values[0][:, :3].sum(axis=1), 1, rtol=0, atol=1e-8)


def test_negated_pairs_are_kept():
    rng = np.random.default_rng(2)
    eta, scores, first, second = model(rng, bias=-4.0)
    values = []
    for held in (False, True):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta)
        fg.add(fm.Pair(~u[first], u[second], 3 * np.abs(scores)))
        if held:
            fg.add(fm.Budget(u, eta.shape[1]))
        fg.solve(tol=1e-9)
        values.append(u.value)
    np.testing.assert_allclose(values[0], values[1], rtol=0, atol=1e-8)


def test_instances_that_leave_out_and_that_do_not():
    """One after the other in a batch, on one thread."""
    rng = np.random.default_rng(3)
    low, high = model(rng, bias=-6.0), model(rng, bias=3.0, negative=0.2)
    first, second = low[2:]
    eta = np.stack([low[0], high[0]], axis=1).reshape(-1, 25)
    scores = np.stack([low[1], high[1]], axis=1).reshape(len(eta), -1)
    before = fm.get_num_threads()
    fm.set_num_threads(1)
    try:
        together = solved(eta, scores, first, second, held=False)[1].value
    finally:
        fm.set_num_threads(before)
    for i in range(len(eta)):
        alone = solved(eta[i : i + 1], scores[i : i + 1], first, second, held=False)[1].value
        np.testing.assert_array_equal(together[i], alone[0])


def test_map_and_warm_start():
    rng = np.random.default_rng(4)
    eta, scores, first, second = model(rng, bias=-3.0)
    fg, u, _, solution = solved(eta, scores, first, second, held=False)
    value = u.value
    fg.solve(warm_start=solution)
    np.testing.assert_allclose(u.value, value, rtol=0, atol=1e-6)
    found = fg.solve_map()
    other = solved(eta, scores, first, second, held=True)[0].solve_map()
    np.testing.assert_allclose(found.objective, other.objective, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.upper_bound, other.upper_bound, rtol=0, atol=1e-5)
