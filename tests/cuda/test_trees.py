"""Trees by rows and cuts, on emulated warps and blocks, against the core."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from answers import check, check_order, check_teams, inputs_of, solve
from machine import EmulatedMachine

import factormax as fm
from factormax._engines.cpu import CpuEngine
from factormax._engines.cuda import launcher
from factormax._engines.cuda.engine import CudaEngine
from factormax._engines.cuda.hubs import Hubs
from factormax._engines.cuda.launcher import Launcher, plan_of
from factormax._engines.cuda.memory import Layout, Sizes
from factormax._engines.cuda.plan import Plan
from factormax._engines.cuda.trees import Trees
from factormax._inputs import Inputs
from factormax._options import Options
from factormax.status import Status


def tree(
    rng: Any, dtype: Any, n: int = 8, scale: float = 1.0, single_root: bool = False
) -> fm.FactorGraph:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from((scale * rng.standard_normal((3, n, n))).astype(dtype))
    fg.add(fm.DepTree(u, single_root=single_root))
    return fg


def budgets(
    rng: Any, dtype: Any, n: int = 6, most: int = 1, batch: int = 3, scale: float = 2.0
) -> fm.FactorGraph:
    """No word is the head of more than one other, or of more than `most`."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from((scale * rng.standard_normal((batch, n, n))).astype(dtype))
    fg.add(fm.DepTree(u))
    for h in range(n):
        fg.add(fm.Budget(u[np.delete(np.arange(n), h), h], most))
    return fg


def single_root(rng: Any, dtype: Any) -> fm.FactorGraph:
    return tree(rng, dtype, n=6, scale=2.0, single_root=True)


def several(rng: Any, dtype: Any) -> fm.FactorGraph:
    """Two trees, a sequence, and what ties them to each other: rows with weights, and pairs."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from((2 * rng.standard_normal((3, 5, 5))).astype(dtype))
    v = fg.variable_from((2 * rng.standard_normal((3, 4, 4))).astype(dtype))
    w = fg.variable_from(rng.standard_normal((3, 4, 3)).astype(dtype))
    fg.add(fm.DepTree(v, single_root=True))
    fg.add(fm.DepTree(u))
    fg.add(fm.Sequence(w, rng.standard_normal((3, 3)).astype(dtype)))
    fg.add(fm.Knapsack([*u[:3, 1], *w[:, 2]], rng.uniform(0.5, 2, 7), 2.5))
    fg.add(fm.Pair(u[0, 1:], v[1], rng.standard_normal((3, 4)).astype(dtype)))
    fg.add(fm.Imply([u[1, 0], ~w[1, 1], v[2, 1]]))
    return fg


MODELS = [budgets, single_root, several]


@pytest.mark.parametrize(
    ("model", "dtype"), [*((m, np.float64) for m in MODELS), (several, np.float32)]
)
def test_answers_and_gradients_are_the_cores(model: Any, dtype: Any) -> None:
    fg = model(np.random.default_rng(0), dtype)
    check(inputs_of(fg, dtype), solve(fg, dtype), dtype)


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 10.0, 300.0])
def test_scores_of_any_size(scale: float) -> None:
    for seed in range(4):
        fg = tree(np.random.default_rng(seed), np.float64, scale=scale)
        check(inputs_of(fg, np.float64), solve(fg, np.float64), np.float64)


@pytest.mark.parametrize("team", [1, 32, 64])
def test_any_team_gives_the_same_answer(team: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_teams(several, team, monkeypatch)


def test_the_order_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    check_order(several, monkeypatch)


def test_cuts_are_met_in_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all arcs within, rows of large sets nearly equal those of their words: 36 passes."""
    monkeypatch.setattr(Plan, "_team", lambda self, batch: 1)
    graph = budgets(np.random.default_rng(2), np.float64, n=10, most=2, batch=16, scale=1.0)
    run = solve(graph, np.float64)
    assert run.found.iterations.mean() < 25
    check(inputs_of(graph, np.float64), run, np.float64)


def _same_with(inputs: Inputs) -> Any:
    """Compares with the core; returns what the engine gave."""
    engine = CudaEngine(lambda device: EmulatedMachine(), lambda number: "")
    raw = engine.solve(inputs, Options(tol=1e-9), None)
    wanted = CpuEngine().solve(inputs, Options(tol=1e-12), None)
    np.testing.assert_array_equal(raw.status, wanted.status)
    good = wanted.status == 0
    np.testing.assert_allclose(raw.mu[good], wanted.mu[good], rtol=0, atol=1e-7)
    grad = np.random.default_rng(1).standard_normal(raw.mu.shape)
    got = engine.vjp(inputs, raw, grad, None, None)[0]
    expected = CpuEngine().vjp(inputs, wanted, grad, None, None)[0]
    np.testing.assert_allclose(got[good], expected[good], rtol=0, atol=1e-7)
    return raw


@pytest.mark.parametrize("by", ["mask", "score"])
@pytest.mark.parametrize("model", [budgets, single_root])
def test_absent_words_and_forbidden_arcs(model: Any, by: str) -> None:
    rng = np.random.default_rng(3)
    inputs = inputs_of(model(rng, np.float64), np.float64)
    off = np.zeros((3, 6, 6), bool)
    off[0, 4:] = True  # absent, though nothing is said of arcs from them
    off[1, 2, [0, 1, 2]] = True
    off[2, 5] = off[2, :, 5] = True
    off = off.reshape(3, 36)
    if by == "mask":
        inputs = inputs.replace(mask=~off)
    else:
        inputs = inputs.replace(eta_u=np.where(off, -np.inf, inputs.eta_u))
    raw = _same_with(inputs)
    assert raw.engine == "cuda" and (raw.status == 0).all()
    assert (raw.mu.reshape(3, 6, 6)[0, :, 4:] == 0).all()


def test_a_factor_of_arcs_that_are_left_out_is_for_the_cpu() -> None:
    """An arc from an absent word is off, but the factor is there: nothing is feasible."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.random.default_rng(0).standard_normal((3, 6, 6)))
    fg.add(fm.DepTree(u))
    fg.add(fm.Xor(u[:3, 5]))
    off = np.zeros((3, 6, 6), bool)
    off[1, 5] = True
    raw = _same_with(inputs_of(fg, np.float64).replace(mask=~off.reshape(3, 36)))
    assert raw.engine == "cuda (1 of 3 instances were finished on the CPU)"


def test_infeasible_trees_are_for_the_cpu() -> None:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.random.default_rng(0).standard_normal((3, 4, 4)))
    fg.add(fm.DepTree(u))
    fg.add(fm.Budget([u[i, i] for i in range(4)], 0))
    raw = _same_with(inputs_of(fg, np.float64))
    assert (raw.status == Status.INFEASIBLE.code).all() and len(raw.proofs) == 3


def test_too_many_cuts_are_left_to_the_cpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_of.cache_clear()  # models that are alike are one
    request.addfinalizer(plan_of.cache_clear)
    plain = Trees.__init__

    def with_little_room(self: Trees, model: Any) -> None:
        plain(self, model)
        self.most_cuts = 1

    monkeypatch.setattr(Trees, "__init__", with_little_room)
    fg = tree(np.random.default_rng(0), np.float64, scale=2.0)
    raw = _same_with(inputs_of(fg, np.float64))
    assert "were finished on the CPU" in raw.engine


def test_too_many_arcs_are_left_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Sizes.forward

    def with_little_room(self: Sizes, team: int, active: int, rows: bool) -> Layout:
        found = plain(self, team, active, rows)
        found.offsets["most_arcs"] = 4
        return found

    monkeypatch.setattr(Sizes, "forward", with_little_room)
    raw = _same_with(inputs_of(tree(np.random.default_rng(0), np.float64), np.float64))
    assert raw.engine == "cuda (3 of 3 instances were finished on the CPU)"


def test_what_is_left_begins_as_it_would_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of those that the CPU finishes is close to its solution, the others are not."""
    monkeypatch.setattr(launcher, "_TREE_PASSES", 10)
    engine = CudaEngine(lambda device: EmulatedMachine(), lambda number: "")
    inputs = inputs_of(budgets(np.random.default_rng(0), np.float64, batch=6), np.float64)
    raw = engine.solve(inputs, Options(tol=1e-9), None)
    assert raw.engine == "cuda (4 of 6 instances were finished on the CPU)"
    grad = np.random.default_rng(1).standard_normal(raw.mu.shape)
    all_grads = engine.vjp(inputs, raw, grad, None, None)[0]
    for i in range(6):
        own = inputs.instances(np.array([i]))
        alone = engine.solve(own, Options(tol=1e-9), None)
        np.testing.assert_array_equal(alone.mu[0], raw.mu[i])
        found = engine.vjp(own, alone, grad[i : i + 1], None, None)[0]
        np.testing.assert_array_equal(found[0], all_grads[i])


def test_multipliers_of_the_graph_are_a_start() -> None:
    inputs = inputs_of(budgets(np.random.default_rng(0), np.float64), np.float64)
    there = Launcher(EmulatedMachine())
    first = there.solve(inputs, Options(tol=1e-9)).found
    again = there.solve(inputs, Options(tol=1e-9), first.tau[:, :6].copy()).found
    np.testing.assert_allclose(again.mu, first.mu, rtol=0, atol=1e-8)


def test_projective_trees_have_no_kernel() -> None:
    fg = fm.FactorGraph()
    fg.add(fm.DepTree(fg.variable((3, 3)), projective=True))
    assert "a projective DepTree has no kernel" in Plan(fg._form().model).unsupported
    fg = fm.FactorGraph()
    fg.add(fm.DepTree(fg.variable((300, 300))))
    assert "more than 255 words" in Plan(fg._form().model).unsupported
    assert Hubs.reason(SimpleNamespace(kind=99, name="Window")) == "Window has no kernel"
