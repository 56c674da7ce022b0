"""The kernels on emulated warps and blocks, against the core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from answers import check, check_order, check_start, inputs_of, solve
from machine import EmulatedMachine

import factormax as fm
from factormax._engines.cpu import CpuEngine
from factormax._engines.cuda.launcher import Launcher
from factormax._engines.cuda.plan import Plan
from factormax._options import Options
from factormax.status import Status


def matching(rng: Any, dtype: Any, batch: int = 3, scale: float = 1.0) -> fm.FactorGraph:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from((scale * rng.standard_normal((batch, 6, 7))).astype(dtype))
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    return fg


def matching_factor(rng: Any, dtype: Any) -> fm.FactorGraph:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(rng.standard_normal((3, 5, 6)).astype(dtype))
    fg.add(fm.Matching(u))
    fg.add(fm.Budget(u[:, 0], 1))
    return fg


def logic(rng: Any, dtype: Any) -> fm.FactorGraph:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(rng.standard_normal((3, 12)).astype(dtype))
    fg.add(fm.Or([u[0], ~u[1], u[2]]))
    fg.add(fm.Imply([u[2], ~u[3], u[4]]))
    fg.add(fm.OrOut([u[4], u[5], ~u[6], u[7]]))
    fg.add(fm.AndOut([u[7], ~u[8], u[9]]))
    fg.add(fm.XorOut([u[9], u[10], u[11]]))
    fg.add(fm.Nand([u[0], u[5], u[10]]))
    return fg


def pairs(rng: Any, dtype: Any) -> fm.FactorGraph:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(rng.standard_normal((3, 10)).astype(dtype))
    i, j = rng.permutation(10), rng.permutation(10)
    keep = i != j
    scores = rng.standard_normal((3, int(keep.sum()))).astype(dtype)
    fg.add(fm.Pair(u[i[keep]], ~u[j[keep]], scores))
    fg.add(fm.Xor(u[:4]))
    fg.add(fm.Budget(u[3:], 2))
    return fg


def weights(rng: Any, dtype: Any) -> fm.FactorGraph:
    """Coefficients of different sizes, per instance."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(rng.standard_normal((3, 10)).astype(dtype))
    costs = rng.uniform(0.1, 3.0, (3, 6))
    fg.add(fm.Knapsack(u[:6], costs, 0.3 * costs.sum(axis=1)))
    coefs = rng.standard_normal((3, 5))
    fg.add(fm.Linear(u[5:], coefs, 0.4 * coefs.sum(axis=1), 0.4 * coefs.sum(axis=1)))
    fg.add(fm.Budget(u[3:8], np.array([1, 2, 3])))
    return fg


def mrf(rng: Any, dtype: Any) -> fm.FactorGraph:
    """Many pairs per variable: some variables are 0 for certain, and sums need double."""
    i, j = np.triu_indices(18, 1)
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from((rng.standard_normal((3, 18)) - 1).astype(dtype))
    fg.add(fm.Pair(u[i], u[j], (0.4 * rng.standard_normal((3, len(i)))).astype(dtype)))
    return fg


def isolated(rng: Any, dtype: Any) -> fm.FactorGraph:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(rng.standard_normal((3, 5, 9)).astype(dtype))
    fg.add(fm.Xor(u[:2], axis=1))
    fg.add(fm.Exactly(u[2], 3))
    fg.add(fm.Budget(~u[3], 4))
    return fg


MODELS = [matching, matching_factor, logic, pairs, weights, mrf, isolated]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("model", MODELS)
def test_answers_and_gradients_are_the_cores(model: Any, dtype: Any) -> None:
    fg = model(np.random.default_rng(0), dtype)
    check(inputs_of(fg, dtype), solve(fg, dtype), dtype)


@pytest.mark.parametrize("team", [1, 32, 64])
def test_any_team_gives_the_same_answer(team: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "_team", lambda self, batch: team)
    monkeypatch.setattr("factormax._engines.cuda.plan._ENOUGH_THREADS", 0)
    fg = pairs(np.random.default_rng(0), np.float64)
    run = solve(fg, np.float64)
    assert run.stages[0].program.choice.team == team
    check(inputs_of(fg, np.float64), run, np.float64)


@pytest.mark.parametrize("model", [matching, pairs])
def test_the_order_of_threads_changes_no_bit(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_order(model, monkeypatch)


def test_an_instance_is_the_same_alone_and_in_a_batch() -> None:
    fg = matching(np.random.default_rng(0), np.float32, batch=5)
    inputs = inputs_of(fg, np.float32)
    launcher = Launcher(EmulatedMachine())
    together = launcher.solve(inputs, Options(tol=1e-5)).found
    for i in range(5):
        alone = launcher.solve(inputs.instance(i), Options(tol=1e-5)).found
        np.testing.assert_array_equal(alone.mu[0], together.mu[i])


@pytest.mark.parametrize("by", ["mask", "score"])
@pytest.mark.parametrize("model", [matching, logic, pairs])
def test_masked_variables_are_off(model: Any, by: str) -> None:
    rng = np.random.default_rng(3)
    fg = model(rng, np.float64)
    inputs = inputs_of(fg, np.float64)
    off = rng.random(inputs.eta_u.shape) < 0.2
    if model is matching:  # a source all of whose variables are masked is absent
        off.reshape(3, 6, 7)[1, 2] = True
    if by == "mask":
        inputs = inputs.replace(mask=~off)
    else:
        inputs = inputs.replace(eta_u=np.where(off, -np.inf, inputs.eta_u))
    wanted = CpuEngine().solve(inputs, Options(tol=1e-12, on_failure="ignore"), None)
    run = Launcher(EmulatedMachine()).solve(inputs, Options(tol=1e-9))
    np.testing.assert_array_equal(run.found.status, wanted.status)
    good = wanted.status == 0
    assert good.any()
    np.testing.assert_allclose(run.found.mu[good], wanted.mu[good], rtol=0, atol=1e-7)
    assert (run.found.mu[off & good[:, None]] == 0).all()
    grad = rng.standard_normal(off.shape)
    got, own, _ = run.vjp(grad, np.ones_like(run.found.mu_v))
    expected, expected_own, _, _ = CpuEngine().vjp(
        inputs, wanted, grad, np.ones_like(run.found.mu_v), None
    )
    np.testing.assert_allclose(got[good], expected[good], rtol=0, atol=1e-7)
    np.testing.assert_allclose(own[good], expected_own[good], rtol=0, atol=1e-7)


def test_infeasible_instances_come_with_a_certificate() -> None:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.random.default_rng(0).standard_normal((2, 4)))
    fg.add(fm.Budget(u, np.array([1, 3])))
    fg.add(fm.AtLeast(u[:3], np.array([2, 2])))
    found = solve(fg, np.float64).found
    assert list(found.status) == [Status.INFEASIBLE.code, Status.CONVERGED.code]
    assert np.isnan(found.mu[0]).all() and np.isfinite(found.mu[1]).all()
    assert found.iterations[0] < 200
    y = found.tau[0]
    assert (y >= 0).all()
    # y . b + sum max(0, -A^T y) < 0, with the rows sum u <= 1 and -sum u[:3] <= -2
    columns = y[0] - y[1] * np.array([1, 1, 1, 0])
    assert y[0] * 1 - y[1] * 2 + np.maximum(0, -columns).sum() < 0


def test_a_row_that_cannot_hold_by_itself_is_infeasible() -> None:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.zeros((2, 3)), mask=np.array([[True] * 3, [True, False, False]]))
    fg.add(fm.AtLeast(u, 2))
    found = solve(fg, np.float64).found
    assert list(found.status) == [Status.CONVERGED.code, Status.INFEASIBLE.code]
    assert found.tau[1, 0] == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_score_gives_no_answer(bad: float) -> None:
    inputs = inputs_of(matching(np.random.default_rng(0), np.float64), np.float64)
    eta_u = inputs.eta_u.copy()
    eta_u[1, 5] = bad
    found = Launcher(EmulatedMachine()).solve(inputs.replace(eta_u=eta_u), Options()).found
    assert list(found.status) == [0, 6, 0]
    assert np.isnan(found.mu[1]).all()


def test_large_scores_are_approached_in_stages() -> None:
    fg = matching(np.random.default_rng(0), np.float64, scale=1000.0)
    inputs = inputs_of(fg, np.float64)
    found = solve(fg, np.float64, tol=1e-6).found
    wanted = CpuEngine().solve(inputs, Options(tol=1e-9), None)
    assert (found.status == 0).all()
    np.testing.assert_allclose(found.mu, wanted.mu, rtol=0, atol=1e-6)


def test_what_float_cannot_resolve_is_solved_in_double() -> None:
    fg = matching(np.random.default_rng(0), np.float32, scale=3e4)
    run = solve(fg, np.float32)
    assert [s.program.choice.precision for s in run.stages] == [np.float32, np.float64]
    wanted = CpuEngine().solve(inputs_of(fg, np.float32).wide(), Options(tol=1e-9), None)
    assert (run.found.status == 0).all()
    np.testing.assert_allclose(run.found.mu, wanted.mu, rtol=0, atol=1e-5)


def test_kernels_that_fit_many_models() -> None:
    launcher = Launcher(EmulatedMachine(), general=True)
    sources = set()
    for model in (matching, matching_factor, logic, weights):
        inputs = inputs_of(model(np.random.default_rng(0), np.float64), np.float64)
        run = launcher.solve(inputs, Options(tol=1e-9))
        sources.add(run.stages[0].program.choice.source)
        check(inputs, run, np.float64)
    assert len(sources) == 1


def test_the_solution_is_a_good_start() -> None:
    check_start(pairs)


def test_passes_run_out() -> None:
    fg = matching(np.random.default_rng(0), np.float64, scale=5.0)
    found = solve(fg, np.float64, max_iter=3).found
    assert (found.status == Status.MAX_ITER.code).all() and (found.iterations == 3).all()


def test_an_empty_batch_is_no_launch() -> None:
    fg = matching(np.random.default_rng(0), np.float64, batch=0)
    run = Launcher(EmulatedMachine()).solve(inputs_of(fg, np.float64), Options())
    assert run.found.mu.shape == (0, 42)


def test_other_structures_have_no_kernel() -> None:
    fg = fm.FactorGraph()
    fg.add(fm.DepTree(fg.variable((3, 3)), projective=True))
    assert "DepTree" in Plan(fg._form().model).unsupported


@pytest.mark.parametrize("score", [0.3, 500.0, 1e5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_is_free_by_rounding_alone(score: float, dtype: Any) -> None:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.array([[score, 0, 0]], dtype))
    fg.add(fm.Exactly([u[2], u[1], ~u[0]], 0))  # one point; the multiplier is 0 but for rounding
    run = solve(fg, dtype)
    assert run.found.mu.tolist() == [[1, 0, 0]]
    assert not run.vjp(np.array([[0.3, 1, -0.7]], dtype), None)[0].any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_pair_without_a_score_between_equal_variables(dtype: Any) -> None:
    """A row ties them, so that neither slope of the pair alone is its derivative, which is 0."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.full((1, 2), -0.5, dtype))
    fg.add(fm.Or(u))
    fg.add(fm.Pair(u[0], u[1], np.zeros(1, dtype)))
    run = solve(fg, dtype)
    np.testing.assert_allclose(run.found.mu, 0.5, rtol=8 * np.finfo(dtype).eps)
    grad_u, grad_s, _ = run.vjp(np.array([[1, 0]], dtype), None)
    np.testing.assert_allclose(grad_u, [[0.5, -0.5]], atol=8 * np.finfo(dtype).eps)
    np.testing.assert_allclose(grad_s, 0, atol=8 * np.finfo(dtype).eps)
