"""Structured factors with oracles, on emulated warps and blocks, against the core."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from answers import check, check_order, check_start, check_teams, inputs_of, solve
from machine import EmulatedMachine

import factormax as fm
from factormax._engines.cpu import CpuEngine
from factormax._engines.cuda import hubs
from factormax._engines.cuda.engine import CudaEngine, unsupported
from factormax._engines.cuda.launcher import Launcher
from factormax._engines.cuda.plan import Plan
from factormax._options import Options
from factormax.status import Status


def sequence(rng: Any, dtype: Any, scale: float = 1.0) -> fm.FactorGraph:
    """Every state but the first at most once."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from((scale * rng.standard_normal((3, 5, 4))).astype(dtype))
    fg.add(fm.Sequence(u, (scale * rng.standard_normal((3, 4, 4))).astype(dtype)))
    fg.add(fm.AtMostOne(u[:, 1:], axis=0))
    return fg


def ends(rng: Any, dtype: Any) -> fm.FactorGraph:
    """Alone, with all the scores that a sequence can have, some of which forbid something."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(rng.standard_normal((3, 4, 3)).astype(dtype))
    transitions = rng.standard_normal((3, 3, 3, 3)).astype(dtype)
    transitions[rng.random(transitions.shape) < 0.2] = -np.inf
    first, last = rng.standard_normal((2, 3, 3)).astype(dtype)
    fg.add(fm.Sequence(u, transitions, initial=first, final=last))
    return fg


def several(rng: Any, dtype: Any) -> fm.FactorGraph:
    """Hubs of all kinds, and what ties them to each other and to variables of the box."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(rng.standard_normal((3, 4, 3)).astype(dtype))
    v = fg.variable_from(rng.standard_normal((3, 6)).astype(dtype))
    w = [fg.variable_from(rng.standard_normal((3, k)).astype(dtype)) for k in (2, 3, 2)]
    x = fg.variable_from(rng.standard_normal((3, 5)).astype(dtype))
    m = fg.variable_from(rng.standard_normal((3, 2, 3)).astype(dtype))
    fg.add(fm.Matching(m))
    fg.add(fm.Sequence(u, rng.standard_normal((3, 3)).astype(dtype)))
    fg.add(fm.SequenceBudget(v, rng.standard_normal((3, 5)).astype(dtype), np.array([2, 3, 6])))
    fg.add(fm.Table(w, rng.standard_normal((3, 2, 3, 2)).astype(dtype)))
    fg.add(fm.Knapsack([u[0, 1], v[2], w[0][1], x[0], ~x[1]], [0.5, 2.0, 1.0, 1.5, 0.7], 2.5))
    fg.add(fm.Or([u[3, 2], ~v[0], m[0, 1]]))
    fg.add(fm.Pair(u[1], x[1:4], rng.standard_normal((3, 3)).astype(dtype)))
    fg.add(fm.Xor(x[2:]))
    return fg


MODELS = [sequence, ends, several]


@pytest.mark.parametrize(
    ("model", "dtype"), [*((m, np.float64) for m in MODELS), (several, np.float32)]
)
def test_answers_and_gradients_are_the_cores(model: Any, dtype: Any) -> None:
    fg = model(np.random.default_rng(0), dtype)
    run = solve(fg, dtype)
    assert run.stages[0].program.choice.precision == np.float64
    assert (run.found.oracle_calls > 1).all()
    check(inputs_of(fg, dtype), run, dtype)


@pytest.mark.parametrize("team", [1, 32, 64])
def test_any_team_gives_the_same_answer(team: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_teams(several, team, monkeypatch)


def test_the_order_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    check_order(several, monkeypatch)


@pytest.mark.parametrize("scale", [0.1, 10.0, 1000.0])
def test_scores_of_any_size(scale: float) -> None:
    fg = sequence(np.random.default_rng(0), np.float64, scale)
    check(inputs_of(fg, np.float64), solve(fg, np.float64), np.float64)


def test_ties() -> None:
    """Whole scores: many structures are as good as the best, and faces have many of them."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(rng.integers(-1, 2, (3, 5, 4)).astype(float))
        fg.add(fm.Sequence(u, rng.integers(-1, 2, (3, 4, 4)).astype(float)))
        fg.add(fm.Budget(u[:, 0], 2))
        found = solve(fg, np.float64).found
        wanted = CpuEngine().solve(inputs_of(fg, np.float64), Options(tol=1e-12), None)
        assert (found.status == 0).all()
        np.testing.assert_allclose(found.mu, wanted.mu, rtol=0, atol=1e-8)
        np.testing.assert_allclose(found.objective, wanted.objective, rtol=0, atol=1e-8)


def test_masked_variables_are_off() -> None:
    """States, whole steps at the end, groups of a table, and variables of a budget."""
    rng = np.random.default_rng(3)
    fg = several(rng, np.float64)
    inputs = inputs_of(fg, np.float64)
    off = np.zeros(inputs.eta_u.shape, bool)
    off[0, 9:12] = True  # the last step
    off[1, [0, 4, 13]] = True
    off[2, 20:23] = True  # a group
    inputs = inputs.replace(mask=~off)
    wanted = CpuEngine().solve(inputs, Options(tol=1e-12), None)
    run = Launcher(EmulatedMachine()).solve(inputs, Options(tol=1e-9))
    np.testing.assert_array_equal(run.found.status, wanted.status)
    np.testing.assert_allclose(run.found.mu, wanted.mu, rtol=0, atol=1e-7)
    np.testing.assert_allclose(run.found.mu_v, wanted.mu_v, rtol=0, atol=1e-7)
    assert (run.found.mu[off] == 0).all()
    grad, own = rng.standard_normal(off.shape), rng.standard_normal(wanted.mu_v.shape)
    got = run.vjp(grad, own)
    expected = CpuEngine().vjp(inputs, wanted, grad, own, None)
    np.testing.assert_allclose(got[0], expected[0], rtol=0, atol=1e-7)
    np.testing.assert_allclose(got[1], expected[1], rtol=0, atol=1e-7)


def test_infeasible_instances_come_with_a_certificate() -> None:
    """Sequences that stay in one state, and each state twice at most."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.random.default_rng(0).standard_normal((2, 3, 2)))
    transitions = np.zeros((2, 1, 2, 2))
    transitions[0] = [[0, -np.inf], [-np.inf, 0]]
    fg.add(fm.Sequence(u, transitions))
    fg.add(fm.Budget(u[:, 0], 2))
    fg.add(fm.Budget(u[:, 1], 2))
    fg.add(fm.Budget(u[:2, 0], 0))
    engine = CudaEngine(lambda device: EmulatedMachine(), lambda number: "")
    inputs = inputs_of(fg, np.float64)
    raw = engine.solve(inputs, Options(tol=1e-9), None)
    wanted = CpuEngine().solve(inputs, Options(tol=1e-9), None)
    np.testing.assert_array_equal(raw.status, wanted.status)
    assert raw.status[0] == Status.INFEASIBLE.code and raw.engine == "cuda"
    y = raw.proofs[0].multipliers
    assert (y >= 0).all()
    # b . y + the best sequence for -A^T y < 0; those of the instance stay where they begin.
    first, second, third = y
    best = max(-3 * first - 2 * third, -3 * second)
    assert 2 * first + 2 * second + best < 0


def test_without_any_structure_the_cpu_says_so() -> None:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.zeros((2, 3, 2)))
    transitions = np.zeros((2, 1, 2, 2))
    transitions[1] = -np.inf
    fg.add(fm.Sequence(u, transitions))
    engine = CudaEngine(lambda device: EmulatedMachine(), lambda number: "")
    raw = engine.solve(inputs_of(fg, np.float64), Options(), None)
    assert list(raw.status) == [Status.CONVERGED.code, Status.INFEASIBLE.code]
    assert raw.proofs[1].impossible == (0,)
    assert raw.engine == "cuda (1 of 2 instances were finished on the CPU)"


@pytest.mark.parametrize(("shared", "more"), [(False, False), (True, False)])
def test_what_is_not_in_shared_memory(
    shared: bool, more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory(self: hubs.Hubs, total: int, taken: int, active: int) -> hubs.HubMemory:
        found = self._layout([24] * self.count, active)
        return dataclasses.replace(found, shared=shared, more_shared=more)

    monkeypatch.setattr(hubs.Hubs, "memory", memory)
    fg = several(np.random.default_rng(0), np.float64)
    check(inputs_of(fg, np.float64), solve(fg, np.float64), np.float64)


def test_two_instances_share_a_multiprocessor_if_they_can() -> None:
    def of_sequence(length: int, states: int) -> hubs.HubMemory:
        fg = fm.FactorGraph()
        u = fg.variable((length, states))
        fg.add(fm.Sequence(u, np.zeros((states, states))))
        found = Plan(fg._form().model).hubs
        assert found is not None
        return found.memory(232_448, 20_000, 24)

    small, middle, large = of_sequence(20, 25), of_sequence(60, 40), of_sequence(200, 60)
    assert small.shared and small.more_shared and small.bytes + small.more < 232_448 // 2 - 20_000
    assert middle.shared and middle.bytes > 232_448 // 2 - 20_000
    assert not large.shared and large.work_stride == large.bytes + large.more
    assert list(large.in_work) == ["at_hubs", "at_hub_more"]


def test_too_many_structures_are_left_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LEAST_ROOM", "_PER_SLOT", "_FEWER_PER_SLOT", "_SMALL_ROOM"):
        monkeypatch.setattr(hubs, name, 1)
    monkeypatch.setattr(hubs, "_MOST_ROOM", 4)
    fg = sequence(np.random.default_rng(0), np.float64)
    inputs = inputs_of(fg, np.float64)
    engine = CudaEngine(lambda device: EmulatedMachine(), lambda number: "")
    raw = engine.solve(inputs, Options(tol=1e-9), None)
    wanted = CpuEngine().solve(inputs, Options(tol=1e-9), None)
    assert "were finished on the CPU" in raw.engine
    np.testing.assert_array_equal(raw.status, wanted.status)
    np.testing.assert_allclose(raw.mu, wanted.mu, rtol=0, atol=1e-7)
    np.testing.assert_allclose(raw.mu_v, wanted.mu_v, rtol=0, atol=1e-7)
    grad = np.random.default_rng(1).standard_normal(raw.mu.shape)
    got, own, *_ = engine.vjp(inputs, raw, grad, None, None)
    expected, expected_own, *_ = CpuEngine().vjp(inputs, wanted, grad, None, None)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-7)
    np.testing.assert_allclose(own, expected_own, rtol=0, atol=1e-7)


def test_what_is_no_score_gives_no_answer() -> None:
    inputs = inputs_of(ends(np.random.default_rng(0), np.float64), np.float64)
    eta_v = inputs.eta_v.copy()
    eta_v[1, 3] = np.nan
    found = Launcher(EmulatedMachine()).solve(inputs.replace(eta_v=eta_v), Options()).found
    assert list(found.status) == [0, 6, 0]


def test_the_solution_is_a_good_start() -> None:
    check_start(sequence)


def test_what_has_no_kernel_says_why() -> None:
    inputs = inputs_of(sequence(np.random.default_rng(0), np.float64), np.float64)
    assert unsupported(inputs, Options()) == ""
    assert "max_inner_iter" in unsupported(inputs, Options(max_inner_iter=5))
    assert "structures" in unsupported(inputs, Options(list_structures=True))
    fg = fm.FactorGraph()
    u = fg.variable((3, 3))
    fg.add(fm.Sequence(u, np.zeros((3, 3))))
    fg.add(fm.Sequence(u.T, np.zeros((3, 3))))
    assert "share variables" in Plan(fg._form().model).unsupported
    fg = fm.FactorGraph()
    u = fg.variable((2, 300))
    fg.add(fm.Table(u, np.zeros((300, 300))))
    assert "Table" in Plan(fg._form().model).unsupported
