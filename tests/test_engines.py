"""What every engine must do: the same answers, bit for bit from run to run, and reasons."""

import numpy as np
import pytest

import factormax as fm
from factormax import _engines
from factormax._fronts.numpy import start
from factormax._options import Options
from factormax._raw import RawSolution


def graph(kind, seed=0, batch=4):
    rng = np.random.default_rng(seed)
    fg = fm.FactorGraph(batch_dims=1)
    mask = rng.random((batch, 4, 5)) < 0.9
    u = fg.variable_from(rng.normal(size=(batch, 4, 5)), mask=mask if kind == "masked" else None)
    if kind in ("rows", "masked"):
        fg.add(fm.AtMostOne(u, axis=1))
        fg.add(fm.Budget(u, rng.integers(1, 3, (batch, 5)), axis=0))
        fg.add(fm.Or([~u[0, :2], u[1]]))
    elif kind == "pairs":
        fg.add(fm.Pair(u[:-1], u[1:], rng.normal(size=(3, 5))))
    elif kind == "sequence":
        fg.add(fm.Sequence(u, rng.normal(size=(5, 5))))
        fg.add(fm.AtMostOne(u[:, 1:], axis=0))
    elif kind == "tree":
        fg.add(fm.DepTree(u[:, :4]))
        fg.add(fm.Budget([u[1, 0], u[2, 0], u[0, 4], ~u[1, 4]], 1))
    else:
        fg.add(fm.Matching(u))
        fg.add(fm.Knapsack(u[0], rng.random(5), 0.5))
    return start(fg).inputs


@pytest.fixture(params=[*_engines.ENGINES, "emulated"], ids=lambda e: getattr(e, "name", e))
def engine(request):
    if request.param != "emulated":
        return request.param
    from machine import EmulatedMachine

    from factormax._engines.cuda.engine import CudaEngine

    return CudaEngine(lambda device: EmulatedMachine(), lambda number: "")


KINDS = ["rows", "masked", "pairs", "structured", "sequence", "tree"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_solves_as_the_cpu_does(engine, kind):
    inputs = graph(kind)
    supported, reason = engine.supports(inputs, Options())
    if not supported:
        assert reason
        return
    found = engine.solve(inputs, Options(tol=1e-10), None)
    wanted = _engines.ENGINES[-1].solve(inputs, Options(tol=1e-10), None)
    assert isinstance(found, RawSolution)
    np.testing.assert_array_equal(found.status, wanted.status)
    np.testing.assert_allclose(found.mu, wanted.mu, atol=1e-8)
    grad = np.random.default_rng(1).normal(size=found.mu.shape)
    ours, theirs = (
        e.vjp(inputs, r, grad, None, None)
        for e, r in ((engine, found), (_engines.ENGINES[-1], wanted))
    )
    np.testing.assert_allclose(ours[0], theirs[0], atol=1e-7)
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_an_instance_alone_is_the_same_bit_for_bit(engine, kind):
    inputs = graph(kind)
    if not engine.supports(inputs, Options())[0]:
        return
    together = engine.solve(inputs, Options(), None)
    for i in range(inputs.batch):
        alone = engine.solve(inputs.instance(i), Options(), None)
        np.testing.assert_array_equal(alone.mu[0], together.mu[i])


def test_held_variables_are_bounds_of_a_solve(engine):
    inputs = graph("rows", batch=1)
    held = np.full((3, 20), -1, np.int8)
    held[1, 3], held[2, 3] = 0, 1
    if not engine.supports(inputs.replace(held=held), Options())[0]:
        return
    raw = engine.solve(inputs.replace(held=held), Options(tol=1e-9), None)
    free = engine.solve(inputs, Options(tol=1e-9), None)
    np.testing.assert_allclose(raw.mu[0], free.mu[0], atol=1e-8)
    np.testing.assert_allclose(raw.mu[1:, 3], [0, 1], atol=1e-9)


class Refusing(_engines.CpuEngine):
    """On a device of its own, it can't do anything."""

    name = "moon"

    def supports(self, inputs, options):
        return False, "the moon has no solver"


def test_the_cpu_takes_over_and_says_why(monkeypatch):
    inputs = graph("rows").replace(device="moon:1")
    assert _engines.solve(inputs, Options()).engine == "cpu (there is no engine for moon)"
    monkeypatch.setattr(_engines, "ENGINES", [Refusing(), *_engines.ENGINES])
    raw = _engines.solve(inputs, Options())
    assert raw.engine == "cpu (the moon has no solver)"
    assert _engines.vjp(inputs, raw, raw.mu)[0].shape == raw.mu.shape
    assert _engines.solve(inputs.replace(device="cpu"), Options()).engine == "cpu"


def test_an_engine_is_chosen_by_its_device(monkeypatch):
    class Willing(Refusing):
        def supports(self, inputs, options):
            return True, ""

    monkeypatch.setattr(_engines, "ENGINES", [Willing(), *_engines.ENGINES])
    raw = _engines.solve(graph("rows").replace(device="moon:0"), Options())
    assert raw.engine == "moon"
    assert _engines.solve(graph("rows"), Options()).engine == "cpu"
