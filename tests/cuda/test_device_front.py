"""Torch scores that are solved where they are: on an emulated device, and on a real one."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import emulator
import numpy as np
import pytest

import factormax as fm

torch = pytest.importorskip("torch")

from machine import EmulatedFlag  # noqa: E402

from factormax import _engines  # noqa: E402
from factormax._engines.cuda import driver  # noqa: E402
from factormax._engines.cuda.device import TorchMachine  # noqa: E402
from factormax._engines.cuda.engine import CudaEngine  # noqa: E402
from factormax._fronts import torch as front  # noqa: E402
from factormax._fronts.torch.arrays import Kind  # noqa: E402


class EmulatedTorchMachine(TorchMachine):
    """Torch's memory on the host, and emulated kernels."""

    stream = 0  # type: ignore[assignment]
    capturing = False  # type: ignore[assignment]

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def load(self, variant: str, names: Sequence[str]) -> dict[str, Any]:
        return dict(emulator.load(variant, names))

    @property
    def shared_bytes(self) -> int:
        return emulator.attributes().shared_per_block

    def flag(self) -> Any:
        return EmulatedFlag()


class EmulatedEngine(CudaEngine):
    name = "cpu"

    def __init__(self) -> None:
        super().__init__(lambda device: EmulatedTorchMachine(), lambda number: "")


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where scores are; the emulated device is the host, called something else."""
    front._engine_of.cache_clear()
    request.addfinalizer(front._engine_of.cache_clear)
    if request.param == "cuda":
        return "cuda"
    monkeypatch.setattr(_engines, "ENGINES", [EmulatedEngine(), _engines.ENGINES[-1]])
    monkeypatch.setattr(front, "ENGINES", [EmulatedEngine()])

    def kind_of(scores: Any) -> Kind:
        dtype = scores.dtype if scores.is_floating_point() else torch.get_default_dtype()
        return Kind(scores.device, dtype, False)

    monkeypatch.setattr(front, "kind_of", kind_of)
    return "cpu"


def graph_of(scores: Any, pair: Any, budget: Any = 2, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A matching with a budget and pairs; its solution."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    fg.add(fm.Budget(u[:, :2], budget))
    f = fg.add(fm.Pair(u[0], u[1], pair))
    solution = fg.solve(**{"tol": 1e-9} | options)
    return fg, u, f, solution


def numbers(seed: int = 0, dtype: Any = None) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 3, 5, generator=generator, dtype=dtype or torch.float64)
    return scores, torch.randn(5, generator=generator, dtype=dtype or torch.float64)


def on(device: str, *tensors: Any) -> list[Any]:
    return [t.detach().clone().to(device).requires_grad_() for t in tensors]


def test_values_and_gradients_are_the_hosts(device: str) -> None:
    given = numbers()
    weight = torch.randn(3, 3, 5, dtype=torch.float64)
    found = []
    for where in ("host", device):
        if where == "host":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(front, "ENGINES", [])
                scores, pair = on("cpu", *given)
                _, u, f, solution = graph_of(scores, pair)
        else:
            scores, pair = on(device, *given)
            _, u, f, solution = graph_of(scores, pair)
            assert solution.engine in ("cuda", "cpu") and u.value.device == scores.device
            assert "(" not in solution.engine
        loss = (
            (u.value * weight.to(u.value.device)).sum() + f.value.sum() + solution.objective.sum()
        )
        loss.backward()
        found.append([t.detach().cpu() for t in (u.value, f.value, solution.objective)])
        found[-1] += [scores.grad.cpu(), pair.grad.cpu()]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


def test_second_derivatives(device: str) -> None:
    """Through the host, and back on the device."""
    given = numbers()
    found = []
    for where in ("host", device):
        with pytest.MonkeyPatch.context() as patch:
            if where == "host":
                patch.setattr(front, "ENGINES", [])
            scores, pair = on("cpu" if where == "host" else device, *given)
            _, u, f, _ = graph_of(scores, pair)
            loss = (u.value**2).sum() + (f.value**2).sum()
            first, second = torch.autograd.grad(loss, [scores, pair], create_graph=True)
            ((first**2).sum() + (second**3).sum()).backward()
        found.append([t.grad.cpu() for t in (scores, pair)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


def test_half_precision_goes_through_float(device: str) -> None:
    scores, pair = on(device, *numbers(dtype=torch.bfloat16))
    _, u, f, _ = graph_of(scores, pair, tol=1e-4)
    assert u.value.dtype == f.value.dtype == torch.bfloat16
    u.value.float().pow(2).sum().backward()
    assert scores.grad.dtype == torch.bfloat16 and scores.grad.isfinite().all()


def test_a_temperature_has_its_gradient(device: str) -> None:
    given, pair = numbers()
    temperature = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)

    def value(t: Any, where: str) -> Any:
        _, u, _, _ = graph_of(given.to(where), pair.to(where), temperature=t)
        return (u.value * torch.arange(15.0, dtype=torch.float64, device=where).reshape(3, 5)).sum()

    there = temperature.to(device).requires_grad_()
    value(there, device).backward()
    step = 1e-6
    for i in range(3):
        move = torch.zeros(3, dtype=torch.float64)
        move[i] = step
        ends = [value((temperature + s * move).to(device), device).item() for s in (1, -1)]
        assert there.grad[i].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-4)


def test_masks_and_parameters_of_instances(device: str) -> None:
    scores, _ = on(device, *numbers())
    mask = torch.ones(3, 3, 5, dtype=torch.bool, device=device)
    mask[1, :, 4] = False
    mask[2, 2] = False
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores, mask=mask)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.Budget(u[:, 0], torch.tensor([0, 1, 2])))
    fg.solve()
    assert (u.value[1, :, 4] == 0).all() and (u.value[2, 2] == 0).all()
    assert (u.value[0, :, 0].abs() < 1e-6).all()
    torch.testing.assert_close(u.value[2].sum(1).cpu(), torch.tensor([1.0, 1, 0]).double())


def test_a_bad_score_is_named(device: str) -> None:
    scores, pair = numbers()
    scores[1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match=r"\(1, 2, 3\)"):
        graph_of(scores.to(device), pair.to(device))


def test_what_is_infeasible_is_explained(device: str) -> None:
    scores, _ = numbers()
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores.to(device))
    fg.add(fm.AtLeast(u[0], 3))
    fg.add(fm.Budget(u, torch.tensor([3, 2, 4])))
    with pytest.warns(fm.NotConvergedWarning, match="Budget"):
        solution = fg.solve()
    assert [s.name for s in solution.status.ravel()] == ["CONVERGED", "INFEASIBLE", "CONVERGED"]
    assert "AtLeast" in str(solution.conflict(1))
    assert u.value[1].isnan().all() and u.value[0].isfinite().all()


def test_what_the_kernels_do_not_finish_is_finished_on_the_host(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = dict.fromkeys((np.dtype(np.float32), np.dtype(np.float64)), 4)
    monkeypatch.setattr("factormax._engines.cuda.launcher._PASSES", passes)
    given = numbers()
    scores, pair = on(device, *given)
    _, u, _, solution = graph_of(scores, pair)
    assert "3 of 3 instances were finished on the CPU" in solution.engine
    assert bool(solution.converged.all())
    u.value.pow(2).sum().backward()
    monkeypatch.undo()
    there, own = on("cpu", *given)
    _, wanted, _, _ = graph_of(there, own)
    wanted.value.pow(2).sum().backward()
    torch.testing.assert_close(u.value.cpu(), wanted.value, rtol=0, atol=1e-7)
    torch.testing.assert_close(scores.grad.cpu(), there.grad, rtol=0, atol=1e-6)


def test_nobody_waits_if_failures_are_ignored(device: str) -> None:
    scores, pair = on(device, *numbers())
    *_, solution = graph_of(scores, pair, on_failure="ignore", max_iter=2)
    assert [s.name for s in solution.status.ravel()] == ["MAX_ITER"] * 3


def test_the_structures_of_a_matching_come_from_the_host(device: str) -> None:
    scores, _ = numbers()
    there = scores.to(device).requires_grad_()
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(there)
    f = fg.add(fm.Matching(u))
    fg.solve(tol=1e-10)
    assert f.probs.device == there.device
    torch.testing.assert_close(f.probs.sum(-1).cpu(), torch.ones(3).double())
    (f.probs[:, 0]).sum().backward()
    assert there.grad.isfinite().all()


def test_a_sequence_beside_constraints_is_solved_there(device: str) -> None:
    scores, _ = numbers()
    transitions = torch.randn(5, 5, generator=torch.Generator().manual_seed(1)).double()
    weight = torch.arange(15.0, dtype=torch.float64).reshape(3, 5)
    found = []
    for where in ("host", device):
        with pytest.MonkeyPatch.context() as patch:
            if where == "host":
                patch.setattr(front, "ENGINES", [])
            own, edges = on("cpu" if where == "host" else device, scores, transitions)
            fg = fm.FactorGraph(batch_dims=1)
            u = fg.variable_from(own)
            f = fg.add(fm.Sequence(u, edges))
            fg.add(fm.AtMostOne(u, axis=0))
            solution = fg.solve(tol=1e-9)
        assert "(" not in solution.engine
        loss = (u.value * weight.to(own.device)).sum() + f.value.pow(2).sum()
        (loss + solution.objective.sum()).backward()
        found.append([t.detach().cpu() for t in (u.value, f.value, own.grad, edges.grad)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    torch.testing.assert_close(f.probs.sum(-1).cpu(), torch.ones(3).double())


def test_a_solution_can_be_pickled(device: str) -> None:
    scores, pair = on(device, *numbers())
    *_, solution = graph_of(scores, pair)
    again = pickle.loads(pickle.dumps(solution))
    assert again.engine == solution.engine and bool(again.converged.all())
    torch.testing.assert_close(again.multipliers, solution.multipliers)


def test_a_warm_start_is_taken(device: str) -> None:
    scores, pair = numbers()
    fg, _, _, first = graph_of(scores.to(device), pair.to(device))
    again = fg.solve(warm_start=first, tol=1e-9)
    assert int(again.iterations.max()) <= 3


@pytest.mark.gpu
@pytest.mark.parametrize("query", ["solve_map", "decode"])
def test_other_queries_say_where_they_ran(query: str) -> None:
    scores, pair = numbers()
    fg, *_ = graph_of(scores.cuda(), pair.cuda())
    solution = getattr(fg, query)()
    assert solution.engine.startswith("cpu (") and "no kernel" in solution.engine


def test_a_loss_is_solved_there(device: str) -> None:
    scores, _ = numbers()
    there = scores.to(device).requires_grad_()
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(there)
    fg.add(fm.Xor(u, axis=1))
    target = torch.zeros_like(there)
    target[:, :, 0] = 1
    values = fg.loss({u: target})
    assert values.device == there.device
    values.sum().backward()
    torch.testing.assert_close(there.grad, u.value - target, rtol=0, atol=1e-6)


@pytest.mark.gpu
def test_a_training_step_can_be_captured() -> None:
    given, _ = numbers(dtype=torch.float32)
    scores = given.cuda()

    def step() -> Any:
        own = scores.detach().requires_grad_()  # a leaf of this stream
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(own)
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.AtMostOne(u, axis=0))
        fg.solve(on_failure="ignore")
        return torch.autograd.grad(u.value.pow(2).sum(), own)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        wanted = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.gpu
def test_the_device_is_there() -> None:
    assert driver.unavailable(0) == ""
