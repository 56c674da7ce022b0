"""Torch scores that are solved where they are: on an emulated device, and on a real one."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import factormax as fm

torch = pytest.importorskip("torch")

from devices import EmulatedTorchMachine, compiles, on, on_the_host  # noqa: E402
from machine import EmulatedFlag  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from factormax import _engines  # noqa: E402
from factormax._engines.cuda import driver  # noqa: E402
from factormax._engines.cuda.device import TorchMachine, _Flag  # noqa: E402
from factormax._engines.cuda.engine import CudaEngine  # noqa: E402
from factormax._fronts import torch as front  # noqa: E402


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


def test_values_and_gradients_are_the_hosts(device: str) -> None:
    given = numbers()
    weight = torch.randn(3, 3, 5, dtype=torch.float64)
    found = []
    for where in ("host", device):
        if where == "host":
            with on_the_host():
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
    given = numbers()
    found = []
    for where in ("host", device):
        with on_the_host() if where == "host" else nullcontext():
            scores, pair = on("cpu" if where == "host" else device, *given)
            _, u, f, _ = graph_of(scores, pair)
            loss = (u.value**2).sum() + (f.value**2).sum()
            first, second = torch.autograd.grad(loss, [scores, pair], create_graph=True)
            ((first**2).sum() + (second**3).sum()).backward()
        found.append([t.grad.cpu() for t in (scores, pair)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


def matched(scores: Any, pair: Any) -> tuple[Any, Any]:
    """The marginals of a matching, one instance, and its objective."""
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    f = fg.add(fm.Pair(u[0], u[1], pair))
    solution = fg.solve(tol=1e-10)
    return torch.cat([u.value.reshape(-1), f.value]), solution.objective


def tagged(scores: Any, transitions: Any) -> tuple[Any, Any]:
    """The same of a sequence beside rows."""
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    fg.add(fm.Sequence(u, transitions))
    fg.add(fm.AtMostOne(u, axis=0))
    solution = fg.solve(tol=1e-10)
    return u.value.reshape(-1), solution.objective


def budgeted(scores: Any, budget: Any) -> tuple[Any, Any]:
    """The same with a parameter for each instance."""
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    fg.add(fm.AtMostOne(u, axis=1))
    fg.add(fm.Budget(u, budget.detach()))
    solution = fg.solve(tol=1e-10)
    return u.value.reshape(-1), solution.objective


def vmapped(function: Callable[..., Any], *given: Any) -> Any:
    return torch.func.vmap(function)(*given)


def jacobians(function: Callable[..., Any], *given: Any) -> Any:
    """The Jacobian of each instance, many rows at once."""
    return torch.func.vmap(torch.func.jacrev(lambda *x: function(*x)[0]))(*given)


def pushed(function: Callable[..., Any], *given: Any) -> Any:
    moves = tuple(torch.cos(x) for x in given)
    return torch.func.jvp(torch.func.vmap(function), given, moves)


def curvature(function: Callable[..., Any], *given: Any) -> Any:
    return torch.func.hessian(lambda x: function(x, *[g[0] for g in given[1:]])[1])(given[0][0])


@pytest.mark.parametrize("transform", [vmapped, jacobians, pushed, curvature])
@pytest.mark.parametrize("function", [matched, tagged, budgeted])
def test_transforms_are_done_there(device: str, function: Any, transform: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64)
    shape = {matched: (3, 4), tagged: (3, 4, 4), budgeted: (3,)}[function]
    own = torch.randn(shape, generator=generator, dtype=torch.float64)
    if function is budgeted:
        own = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    with on_the_host():
        wanted = transform(function, scores, own)
    found = transform(function, scores.to(device), own.to(device))
    kept = torch.utils._pytree.tree_leaves(found)
    for ours, theirs in zip(kept, torch.utils._pytree.tree_leaves(wanted), strict=True):
        assert ours.device == scores.to(device).device
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=1e-7)


def test_a_transform_goes_on_where_the_host_has_finished(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = dict.fromkeys((np.dtype(np.float32), np.dtype(np.float64)), 4)
    monkeypatch.setattr("factormax._engines.cuda.launcher._PASSES", passes)
    scores, pair = numbers()
    found = jacobians(matched, scores.to(device), pair.expand(3, 5).to(device))
    with on_the_host():
        wanted = jacobians(matched, scores, pair.expand(3, 5))
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=1e-7)


def test_a_bad_score_is_named_in_a_transform(device: str) -> None:
    scores, pair = numbers()
    scores[1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        vmapped(matched, scores.to(device), pair.expand(3, 5).to(device))


@compiles
@pytest.mark.parametrize("function", [matched, tagged])
def test_a_compiled_solve_is_done_there(device: str, function: Any) -> None:
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    own = torch.randn((4,) if function is matched else (4, 4), generator=generator).double()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = []
    for run, place in ((function, "cpu"), (compiled, device)):
        with on_the_host() if run is function else nullcontext():
            given = on(place, scores, own)
            values, objective = run(*given)
            weight = torch.arange(float(len(values)), dtype=torch.float64, device=place)
            (values @ weight + objective).backward()
        found.append([t.detach().cpu() for t in (values, objective, *(g.grad for g in given))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


@compiles
def test_a_compiled_solve_goes_on_where_the_host_has_finished(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = dict.fromkeys((np.dtype(np.float32), np.dtype(np.float64)), 3)
    monkeypatch.setattr("factormax._engines.cuda.launcher._PASSES", passes)
    test_a_compiled_solve_is_done_there(device, matched)


def test_second_derivatives_of_some_variables_at_a_temperature(device: str) -> None:
    """Variables that the loss does not see, and a temperature that is a number."""
    given = numbers()
    found = []
    for where in ("host", device):
        with on_the_host() if where == "host" else nullcontext():
            scores, other = on("cpu" if where == "host" else device, given[0], given[0] / 2)
            fg = fm.FactorGraph(batch_dims=1)
            u, v = fg.variable_from(scores), fg.variable_from(other)
            fg.add(fm.Xor(u, axis=1))
            fg.add(fm.AtMostOne([u[:, 0], v[:, 0]]))
            fg.solve(tol=1e-10, temperature=2.0)
            (first,) = torch.autograd.grad((u.value**2).sum(), scores, create_graph=True)
            (first**2).sum().backward()
        found.append(scores.grad.cpu())
    torch.testing.assert_close(*found, rtol=0, atol=1e-7)


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
    assert solution.objective.isfinite().all()  # its values count as unchanged
    u.value.pow(2).sum().backward()
    monkeypatch.undo()
    there, own = on("cpu", *given)
    _, wanted, _, _ = graph_of(there, own)
    wanted.value.pow(2).sum().backward()
    torch.testing.assert_close(u.value.cpu(), wanted.value, rtol=0, atol=1e-7)
    torch.testing.assert_close(scores.grad.cpu(), there.grad, rtol=0, atol=1e-6)


def given_in_rows(scores: Any) -> Any:
    return scores


def given_in_columns(scores: Any) -> Any:
    return scores.mT.contiguous().mT


@pytest.mark.parametrize("passes", [1000, 4])
@pytest.mark.parametrize("given", [given_in_rows, given_in_columns])
@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("temperature", [None, 0.5])
def test_every_layout_of_scores(
    device: str,
    passes: int,
    given: Callable[[Any], Any],
    tensors: int,
    temperature: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two batch dimensions, factor values that are sums; answered by kernels or by the host."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(2, 3, 3, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(2, 3, 3, 5, generator=generator, dtype=torch.float64)
    limit = dict.fromkeys((np.dtype(np.float32), np.dtype(np.float64)), passes)
    monkeypatch.setattr("factormax._engines.cuda.launcher._PASSES", limit)
    found = []
    for where in ("host", device):
        with on_the_host() if where == "host" else nullcontext():
            own, pair = on("cpu" if where == "host" else device, scores, torch.tensor([0.3]))
            fg = fm.FactorGraph(batch_dims=2)
            u = fg.variable_from(given(own))
            others = [fg.variable_from(own[..., 0].cos()) for _ in range(tensors - 1)]
            fg.add(fm.Xor(u, axis=1))
            fg.add(fm.AtMostOne(u, axis=0))
            for v in others:
                fg.add(fm.Budget([u[0], v], 1))
            f = fg.add(fm.Pair(u[0], u[1], pair.double()))
            solution = fg.solve(tol=1e-9, temperature=temperature)
        if where != "host":
            assert ("finished on the CPU" in solution.engine) == (passes == 4)
        values = [v.value for v in (u, *others)]
        loss = (u.value * weight.to(own.device)).sum() + f.value.pow(2).sum()
        loss = loss + sum(v.pow(2).sum() for v in values[1:])
        first = torch.autograd.grad(loss, [own, pair], retain_graph=True)
        objective = torch.autograd.grad(solution.objective.sum(), [own, pair], retain_graph=True)
        second = torch.autograd.grad(loss, own, create_graph=True)[0].pow(2).sum()
        third = torch.autograd.grad(second, own)
        shown = [*values, f.value, solution.objective, *first, *objective, *third]
        found.append([t.detach().cpu() for t in shown])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_an_answer_is_freed_without_the_garbage_collector(device: str) -> None:
    gc.collect()
    gc.disable()
    try:
        scores, pair = on(device, *numbers())
        fg, u, f, solution = graph_of(scores, pair)
        (u.value.sum() + f.value.sum()).backward()
        kept = weakref.ref(solution.raw)
        del fg, u, f, solution
        assert kept() is None
    finally:
        gc.enable()


class Operations(TorchDispatchMode):
    """The names of torch's operations without `detach`, whose number depends on the version."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function is not torch.ops.aten.detach.default:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("on_failure", ["warn", "ignore"])
def test_the_operations_of_a_step(device: str, on_failure: str) -> None:
    """Each takes the host some microseconds, and a copy from the device would wait for it."""
    scores, _ = on(device, *numbers(dtype=torch.float32))
    weight = torch.ones_like(scores)

    def step() -> tuple[list[str], list[str]]:
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.AtMostOne(u, axis=0))
        with Operations() as forward:
            fg.solve(tol=1e-5, on_failure=on_failure)
        with Operations() as backward:
            torch.autograd.grad(u.value, scores, weight)
        return forward.names, backward.names

    step()
    forward, backward = step()
    # Values and what goes with them; gradients and how good they are.
    assert forward == ["empty_like", "empty"]
    assert backward == ["empty_like", "empty"]


@pytest.mark.parametrize("passes", [1000, 4])
def test_values_are_made_while_the_kernel_runs(
    device: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(where: Any, name: str) -> None:
        call = getattr(where, name)

        def note(*args: Any) -> Any:
            done.append(name)
            return call(*args)

        monkeypatch.setattr(where, name, note)

    noted(front, "apply_solve")
    noted(EmulatedFlag if device == "cpu" else _Flag, "wait")
    limit = dict.fromkeys((np.dtype(np.float32), np.dtype(np.float64)), passes)
    monkeypatch.setattr("factormax._engines.cuda.launcher._PASSES", limit)
    graph_of(*on(device, *numbers()))
    # What the host had to finish is handed out again.
    assert done == ["apply_solve", "wait"] + ["apply_solve"] * (passes == 4)


def test_a_layer_looks_at_its_scores_once(device: str) -> None:
    scores, _ = on(device, *numbers(dtype=torch.float32))
    layer = fm.nn.Matching(tol=1e-5)
    layer(scores)
    with Operations() as counted:
        layer(scores)
    assert counted.names == ["amin", "_local_scalar_dense", "empty_like", "empty"]


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


def test_structures_are_those_of_the_solve(device: str) -> None:
    """Whatever becomes of the scores before the structures are asked for."""
    found = []
    for changed in (False, True):
        there = numbers()[0].to(device)
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(there)
        f = fg.add(fm.Matching(u))
        fg.solve(tol=1e-10)
        if changed:
            there.neg_()
        found.append((f.structures * f.probs[..., None, None]).sum(1))
        torch.testing.assert_close(found[-1], u.value, rtol=0, atol=1e-8)
    torch.testing.assert_close(*found)


def test_a_sequence_beside_constraints_is_solved_there(device: str) -> None:
    scores, _ = numbers()
    transitions = torch.randn(5, 5, generator=torch.Generator().manual_seed(1)).double()
    weight = torch.arange(15.0, dtype=torch.float64).reshape(3, 5)
    found = []
    for where in ("host", device):
        with on_the_host() if where == "host" else nullcontext():
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


def lossy(scores: Any, pair: Any, target: Any, mask: Any = None, **options: Any) -> tuple[Any, Any]:
    """A loss of rows and pairs, with negations and a factor that a mask may take out."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores, mask=mask)
    fg.add(fm.Or([u[0, 0], ~u[1, 1]]))
    fg.add(fm.AtMostOne(u, axis=0))
    fg.add(fm.Knapsack(u[:, :2], torch.full((3, 2), 0.125), 0.25))
    fg.add(fm.AtLeast(u[2], 1))
    fg.add(fm.Pair(u[0], ~u[1], pair))
    return fg.loss({u: target}, tol=1e-10, **options), u


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", [None, 2.0])
def test_a_loss_is_worked_out_there(device: str, masked: bool, temperature: Any) -> None:
    given = numbers()
    given[0][0, 0, 4] = -torch.inf
    target = torch.zeros(3, 3, 5, dtype=torch.float64)
    target[:, 0, 0] = target[:, 2, 1] = target[:, 1, 3] = 1
    mask = torch.ones(3, 3, 5, dtype=torch.bool)
    if masked:
        mask[1, 2] = False
        target[1, 2] = 0
    found = []
    for where in ("host", device):
        with on_the_host() if where == "host" else nullcontext():
            place = "cpu" if where == "host" else device
            scores, pair = on(place, *given)
            own = mask.to(place) if masked else None
            values, u = lossy(scores, pair, target.to(place), own, temperature=temperature)
            assert values.device == scores.device
            (values * torch.tensor([1.0, 2.0, -1.0], device=place)).sum().backward()
        found.append([t.detach().cpu() for t in (values, u.value, scores.grad, pair.grad)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("value", "message"), [(2.0, "hold only 0 and 1"), (1.0, r"instance \(1,\) breaks AtMostOne")]
)
def test_what_is_no_target_is_named(device: str, value: float, message: str) -> None:
    scores, pair = (x.to(device) for x in numbers())
    target = torch.zeros(3, 3, 5, dtype=torch.float64, device=device)
    target[:, 0, 0] = target[:, 2, 1] = 1
    target[1, 1, 1] = value
    with pytest.raises(fm.GraphError, match=message):
        lossy(scores, pair, target)
    values, _ = lossy(scores, pair, target, on_failure="ignore")  # where nobody waits
    assert values.isnan().tolist() == [False, True, False]


def test_a_target_that_is_on_where_a_variable_is_masked_is_named(device: str) -> None:
    scores, pair = (x.to(device) for x in numbers())
    target = torch.zeros(3, 3, 5, dtype=torch.float64, device=device)
    target[:, 0, 0] = target[:, 2, 1] = target[:, 1, 3] = 1
    mask = torch.ones(3, 3, 5, dtype=torch.bool, device=device)
    mask[1, 1, 3] = False
    with pytest.raises(fm.GraphError, match=r"instance \(1,\) is on at u\[1, 3\], which is masked"):
        lossy(scores, pair, target, mask)
    values, _ = lossy(scores, pair, target, mask, on_failure="ignore")
    assert values.isnan().tolist() == [False, True, False]


def sample_losses(device: str) -> Any:
    """The gradients of a loss for each sample."""
    scores, pair = (x.to(device) for x in numbers())
    target = torch.zeros(3, 3, 5, dtype=torch.float64, device=device)
    target[:, 0, 0] = target[:, 2, 1] = target[:, 1, 3] = 1

    def value(scores: Any, target: Any, pair: Any) -> Any:
        return lossy(scores[None], pair, target[None])[0][0]

    return torch.func.vmap(torch.func.grad_and_value(value, (0, 2)), (0, 0, None))(
        scores, target, pair
    )


def test_a_loss_of_each_sample_is_worked_out_there(device: str) -> None:
    (grads, values), own = sample_losses(device), torch.utils._pytree.tree_leaves
    assert values.device == torch.zeros((), device=device).device
    with on_the_host():
        wanted = sample_losses("cpu")
    for ours, theirs in zip(own((grads, values)), own(wanted), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=1e-8)


def test_what_is_no_target_of_a_sample_is_named(device: str) -> None:
    scores, pair = (x.to(device) for x in numbers())
    target = torch.zeros(3, 3, 5, dtype=torch.float64, device=device)

    def value(scores: Any, target: Any) -> Any:
        return lossy(scores[None], pair, target[None])[0][0]

    with pytest.raises(fm.GraphError, match="breaks AtLeast"):
        torch.func.vmap(value)(scores, target)
    with pytest.raises(fm.GraphError, match="hold only 0 and 1"):
        torch.func.vmap(value)(scores, target + 2)


def test_what_is_infeasible_sends_no_gradient_back(device: str) -> None:
    scores = numbers()[0].to(device).requires_grad_()
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    fg.add(fm.AtLeast(u[0], 1))
    fg.add(fm.Budget(u, torch.tensor([1, 0, 2])))
    target = torch.zeros_like(scores)
    target[:, 0, 0] = 1
    with pytest.raises(fm.GraphError, match="breaks Budget"):
        fg.loss({u: target}, on_failure="raise")
    values = fg.loss({u: target}, on_failure="ignore")
    assert values.isfinite().tolist() == [True, False, True]
    values[0].backward()
    assert scores.grad.isfinite().all() and (scores.grad[1] == 0).all()


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
def test_a_layer_can_be_captured() -> None:
    layer = fm.nn.Matching(on_failure="ignore").cuda()
    scores = numbers(dtype=torch.float32)[0].cuda()
    # Some have more rows, some more columns: a wiring is recorded for both.
    lengths = (torch.tensor([3, 2, 3], device="cuda"), torch.tensor([2, 5, 4], device="cuda"))
    with torch.no_grad():
        wanted = layer(scores, lengths=lengths)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(scores, lengths=lengths)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layer(scores, lengths=lengths)
    graph.replay()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.gpu
def test_what_was_never_solved_can_not_be_captured() -> None:
    layer = fm.nn.Matching(on_failure="ignore")
    scores = torch.zeros(2, 7, 11, device="cuda")
    with torch.no_grad(), pytest.raises(fm.GraphError, match="solve it once before recording"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer(scores + 1)  # an empty graph would be warned of


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_stays_on_the_device(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Inductor, whose CUDA graphs are split around the solve."""
    torch._dynamo.reset()
    scores, pair = on("cuda", *numbers(dtype=torch.float32))
    host = _engines.ENGINES[-1]
    monkeypatch.setattr(type(host), "solve", lambda *_: pytest.fail("solved on the host"))

    def step(scores: Any, pair: Any) -> Any:
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores * 2)
        fg.add(fm.Xor(u, axis=1))
        f = fg.add(fm.Pair(u[0], u[1], pair))
        fg.solve()
        return u.value.pow(2).sum() + f.value.sum()

    wanted = torch.autograd.grad(step(scores, pair), [scores, pair])
    compiled = torch.compile(step, mode=None if mode == "default" else mode)
    for _ in range(3):
        found = torch.autograd.grad(compiled(scores, pair), [scores, pair])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_every_device_has_its_own_machine() -> None:
    asked: list[str] = []
    engine = CudaEngine(lambda device: asked.append(device) or EmulatedTorchMachine(), str)
    first, second = engine.launcher("cuda:0"), engine.launcher("cuda:1")
    assert first is not second and first.machine is not second.machine
    assert engine.launcher("cuda:1") is second and asked == ["cuda:0", "cuda:1"]
    assert TorchMachine(1).device == torch.device("cuda", 1)


@pytest.mark.gpu
def test_the_device_is_there() -> None:
    assert driver.unavailable(0) == ""


@pytest.mark.gpu
def test_a_solve_on_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    given = numbers(dtype=torch.float32)
    found = []
    for device in ("cpu", "cuda:0", "cuda:1"):
        scores, pair = on(device, *given)
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u, axis=1))
        f = fg.add(fm.Pair(u[0], u[1], pair))
        with torch.cuda.device(0):
            assert fg.solve(tol=1e-6).engine == device.split(":")[0]
            assert str(u.value.device) == str(f.value.device) == device
            (u.value.pow(2).sum() + f.value.sum()).backward()
        found.append([x.cpu() for x in (u.value.detach(), scores.grad, pair.grad)])
    for other in found[1:]:
        for ours, theirs in zip(other, found[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
