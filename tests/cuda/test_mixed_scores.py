"""Factor scores of which the instances share some, on an emulated device and on a real one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from answers import check, inputs_of
from machine import EmulatedMachine

import factormax as fm
from factormax._engines.cuda.engine import CudaEngine
from factormax._engines.cuda.launcher import DeviceRun, Launcher
from factormax._inputs import Inputs
from factormax._options import Options

try:
    from devices import compiles, on, on_the_host
except ImportError:  # there is no torch
    compiles = pytest.mark.skip

BATCH = 4
DTYPES = [np.float64, np.float32]


def pairs(rng: Any, dtype: Any) -> fm.FactorGraph:
    """Shared scores before, between and after those of each instance."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(rng.standard_normal((BATCH, 8)).astype(dtype))
    i, j = np.triu_indices(8, 1)
    fg.add(fm.Pair(u[i], u[j], rng.standard_normal(len(i)).astype(dtype)))
    fg.add(fm.Pair(u[:3], ~u[3:6], rng.standard_normal((BATCH, 3)).astype(dtype)))
    fg.add(fm.Pair(u[1:4], u[5:8], rng.standard_normal(1).astype(dtype)))
    fg.add(fm.Pair(u[:2], u[6:], rng.standard_normal((BATCH, 2)).astype(dtype)))
    fg.add(fm.Budget(u, 3))
    return fg


def hubs(rng: Any, dtype: Any) -> fm.FactorGraph:
    """The same with factors that have an oracle, one of which is forbidden something."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(rng.standard_normal((BATCH, 4, 3)).astype(dtype))
    v = fg.variable_from(rng.standard_normal((BATCH, 5)).astype(dtype))
    transitions = rng.standard_normal((3, 3)).astype(dtype)
    transitions[0, 1] = -np.inf
    ends = rng.standard_normal((2, BATCH, 3)).astype(dtype)
    fg.add(fm.Pair(u[0], v[:3], rng.standard_normal(3).astype(dtype)))
    fg.add(fm.Sequence(u, transitions, initial=ends[0], final=ends[1, :1]))
    fg.add(fm.Table([v[:2], v[2:4]], rng.standard_normal((BATCH, 2, 2)).astype(dtype)))
    fg.add(fm.AtMostOne([u[2, 1], v[4]]))
    return fg


def beside(rng: Any, dtype: Any) -> fm.FactorGraph:
    """Scores of each instance between shared ones, and one kind of factor without any score."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(rng.standard_normal((BATCH, 8)).astype(dtype))
    fg.add(fm.Pair(u[:-1], u[1:], rng.standard_normal(7).astype(dtype)))
    fg.add(fm.Pair(u[:0], u[:0], np.zeros((BATCH, 0), dtype)))
    fg.add(fm.Pair(u[:1], u[2:3], rng.standard_normal(1).astype(dtype)))
    fg.add(fm.Pair(u[:4], u[4:], rng.standard_normal((BATCH, 4)).astype(dtype)))
    fg.add(fm.Pair(u[:3], ~u[5:], rng.standard_normal(3).astype(dtype)))
    fg.add(fm.Xor(u[::3]))
    return fg


MODELS = [pairs, hubs, beside]


def heated(inputs: Inputs) -> Inputs:
    """Under a temperature for each instance."""
    columns, heat = inputs.columns, np.array([[0.5], [1.0], [1.5], [2.0]])
    own = (columns.own / heat).astype(columns.own.dtype)
    return inputs.replace(
        eta_u=(inputs.eta_u / heat).astype(inputs.eta_u.dtype),
        eta_v=type(columns)(columns.shared, own, columns.runs, heat),
    )


def given(model: Any, dtype: Any, hot: bool) -> Inputs:
    inputs = inputs_of(model(np.random.default_rng(0), dtype), dtype)
    assert inputs.blocks[1] is not None
    return heated(inputs) if hot else inputs


def gradients(run: DeviceRun) -> Any:
    rng, found = np.random.default_rng(1), run.found
    grads = [rng.standard_normal(a.shape).astype(a.dtype) for a in (found.mu, found.mu_v)]
    place = np.array([2, 0, 2, 3])
    return [*run.vjp(*grads), *run.vjp_at(place, *[g[place] for g in grads])]


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_repeating_them_changes_no_bit(model: Any, dtype: Any, hot: bool, general: bool) -> None:
    inputs, options = given(model, dtype, hot), Options(tol=1e-9 if dtype == np.float64 else 1e-5)
    launcher, answers = Launcher(EmulatedMachine(), general), []
    for own in (inputs, inputs.replace(eta_v=np.ascontiguousarray(inputs.eta_v))):
        run = launcher.solve(own, options)
        found = run.found
        answers.append([found.mu, found.mu_v, found.tau, found.objective, *gradients(run)])
        if own is inputs:
            check(inputs, run, dtype)
            mixed = run.stages[0].program.choice.constants["kMixed"]
            assert mixed == (1 if model is beside else 2)
    for one, two in zip(*answers, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_scores_on_the_host(model: Any, hot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are moved as they are, and what the kernels leave is finished on the CPU."""
    inputs = given(model, np.float64, hot)
    wanted = inputs.replace(eta_v=inputs.eta_v)
    engine = CudaEngine(lambda device: EmulatedMachine(), lambda number: "")
    for passes in (1000, 3):
        limits = dict.fromkeys((np.dtype(np.float32), np.dtype(np.float64)), passes)
        monkeypatch.setattr("factormax._engines.cuda.launcher._PASSES", limits)
        answers = []
        for own in (inputs, wanted):
            raw = engine.solve(own, Options(tol=1e-9), None)
            ones = np.ones_like(raw.mu), np.ones_like(raw.mu_v)
            answers.append([raw.mu, raw.mu_v, *engine.vjp(own, raw, *ones, None)[:2]])
        assert ("finished on the CPU" in raw.engine) == (passes == 3)
        for one, two in zip(*answers, strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-12)


# ---- Tensors -------------------------------------------------------------------------------------


def graph_of(scores: Any, shared: Any, own: Any, heat: Any, **options: Any) -> Any:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    factors = [fg.add(fm.Pair(u[:-1], u[1:], shared)), fg.add(fm.Pair(u[:2], ~u[3:5], own))]
    fg.add(fm.AtMostOne(u[::2]))
    return fg, u, factors, fg.solve(temperature=heat, **{"tol": 1e-10} | options)


def tensors(heat: Any) -> list[Any]:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    shapes = (BATCH, 5), (4,), (BATCH, 2)
    found = [torch.tensor(rng.standard_normal(shape)) for shape in shapes]
    if heat is None:
        return found
    return [*found, torch.tensor(np.linspace(0.5, 2, BATCH) if heat == "each" else heat)]


def answers_of(given: list[Any]) -> Any:
    """Values, gradients of two kinds, and second derivatives."""
    import torch

    scores, shared, own, *heat = given
    _, u, factors, solution = graph_of(scores, shared, own, heat[0] if heat else None)
    total = (u.value**3).sum() + sum([(f.value**2).sum() for f in factors])
    first = torch.autograd.grad(total, given, create_graph=True)
    second = torch.autograd.grad(sum([(g**2).sum() for g in first]), given, retain_graph=True)
    optimum = torch.autograd.grad(solution.objective.sum(), given)
    found = [u.value, *[f.value for f in factors], solution.objective, *first, *second, *optimum]
    return [t.detach().cpu() for t in found]


@pytest.mark.parametrize("heat", [None, 0.5, "each"])
def test_torch(device: str, heat: Any) -> None:
    with on_the_host():
        wanted = answers_of(on("cpu", *tensors(heat)))
    found = answers_of(on(device, *tensors(heat)))
    for one, two in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-7)


@pytest.mark.parametrize("heat", [None, "each"])
def test_they_are_stored_once(device: str, heat: Any) -> None:
    scores, shared, own, *more = on(device, *tensors(heat))
    _, _, _, solution = graph_of(scores, shared, own, more[0] if more else None)
    blocks = solution.raw.run.inputs.blocks
    assert blocks[0].shape == (BATCH, 2) and blocks[1].shape == (1, 4)
    assert (blocks[2] is None) == (heat is None)


@pytest.mark.parametrize("heat", [None, 0.5, "each"])
def test_losses(device: str, heat: Any) -> None:
    answers = []
    for place in ("host", device):

        def worked_out(place: str) -> list[Any]:
            given = on(place, *tensors(heat))
            scores, shared, own, *more = given
            fg, u, *_ = graph_of(scores, shared, own, None)
            target = (scores.detach() > 1).to(scores.dtype)
            target[:, ::2] = 0
            loss = fg.loss({u: target}, temperature=more[0] if more else None, tol=1e-10)
            (loss**2).sum().backward()
            return [loss.detach().cpu(), *[t.grad.cpu() for t in given]]

        if place == "host":
            with on_the_host():
                answers.append(worked_out("cpu"))
        else:
            answers.append(worked_out(place))
    for one, two in zip(*answers, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-7)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=compiles)])
@pytest.mark.parametrize("heat", [None, 0.5, "each"])
def test_transforms(device: str, heat: Any, compiled: bool) -> None:
    """Gradients by a function that torch transforms, or compiles, too."""
    torch = pytest.importorskip("torch")

    def total(scores: Any, shared: Any, own: Any, heat: Any = None) -> Any:
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        pair = fg.add(fm.Pair(u[:-1], u[1:], shared))
        fg.add(fm.Pair(u[:2], u[3:5].negate(), own))
        solution = fg.solve(tol=1e-10, temperature=heat)
        return (u.value**3).sum() + (pair.value**2).sum() + solution.objective.sum()

    def slope(place: str) -> Any:
        given = on(place, *tensors(heat))
        if not compiled:
            return torch.func.grad(total, tuple(range(len(given))))(*[t.detach() for t in given])
        torch.compiler.reset()
        value = torch.compile(total, backend="aot_eager", fullgraph=True)(*given)
        return torch.autograd.grad(value, given)

    with on_the_host():
        wanted = slope("cpu")
    for one, two in zip(slope(device), wanted, strict=True):
        np.testing.assert_allclose(one.cpu(), two, rtol=0, atol=1e-7)


def test_a_bad_score_is_named(device: str) -> None:
    for which, pattern in ((1, r"at index \(2,\)"), (2, r"at index \(3, 1\)")):
        given = [t.to(device) for t in tensors(None)]
        given[which].reshape(-1)[2 if which == 1 else 7] = float("nan")
        with pytest.raises(ValueError, match=pattern):
            graph_of(*given, None)


@pytest.mark.parametrize("heat", [1e-9, [1.0, 1e-9, 1.0, 1.0]])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_temperature_that_is_too_small(device: str, which: int, heat: Any) -> None:
    """The same error as on the host, not one about scores that nobody has given."""
    torch = pytest.importorskip("torch")
    given = [t.to(device) for t in tensors(None)]
    given[which] *= 1e301
    with pytest.raises(ValueError, match="temperature: 1e-09 is too small for these scores"):
        graph_of(*given, torch.tensor(heat, dtype=torch.float64, device=device))
