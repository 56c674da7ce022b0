"""What the host does for an eager solve of scores on a CUDA device, measured without a device.

Tensors of the CPU stand in for those of a device, and a driver that launches nothing for the real
one. So there are no answers, and nothing waits: the times are those of Python, of torch and of the
calls of the driver. On a device, torch's own functions and the calls of the driver take longer.
`tests/cuda` runs the same code with emulated kernels, and compares its answers.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import factormax as fm
import factormax.nn
from benchmarks.timing import in_turns, medians, table
from factormax import _engines
from factormax._engines.cuda import compiler, driver
from factormax._engines.cuda.device import TorchMachine
from factormax._engines.cuda.engine import CudaEngine
from factormax._fronts.torch import plan
from factormax._fronts.torch.arrays import Kind

Section = tuple[str, dict[str, Any]]

_TESTS = Path(__file__).parents[1] / "tests" / "cuda"
_BATCH, _SIZE, _TOL = 64, 20, 1e-5


class StandIn(TorchMachine):
    """The host as a device."""

    stream = 0  # type: ignore[assignment]
    capturing = False  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(0)
        self.device = torch.device("cpu")


class StandInEngine(CudaEngine):
    """The engine for it."""

    name = "cpu"

    def __init__(self) -> None:
        machine = StandIn()
        super().__init__(lambda device: machine, lambda number: "")


def _forget() -> None:
    """Makes the driver be looked for again, and the engines."""
    driver._modules.clear()
    for kept in (driver.unavailable, driver._cuda, driver._device, driver._compiler_for):
        kept.cache_clear()
    _engines.engine_there.cache_clear()
    plan._remembered_pattern.cache_clear()


@contextmanager
def stand_in() -> Iterator[None]:
    """Within it, scores on the CPU are treated as if they were on a device."""
    sys.path.append(str(_TESTS))
    from host_compiler import build

    path = str(build((_TESTS / "fake_cuda.cpp").read_text(encoding="utf-8")))
    logger = logging.getLogger("factormax")
    level = logger.level

    def kind_of(place: torch.device, dtype: torch.dtype) -> Kind:
        return Kind(place, dtype, False)

    with ExitStack() as stack:
        enter, patch = stack.enter_context, mock.patch.object
        folder = enter(tempfile.TemporaryDirectory())
        enter(mock.patch.dict(os.environ, {"FACTORMAX_CACHE": folder}))
        enter(patch(driver, "LIBCUDA", path))
        enter(patch(compiler, "_candidates", lambda: iter([path])))
        enter(patch(_engines, "ENGINES", [StandInEngine(), *_engines.ENGINES]))
        enter(patch(Kind, "of", kind_of))
        logger.setLevel(logging.ERROR)  # nothing is compiled
        _forget()
        stack.callback(_forget)
        stack.callback(logger.setLevel, level)
        context = ctypes.c_int64(100)
        ctypes.CDLL(path).cuCtxPushCurrent_v2(context)
        stack.callback(ctypes.CDLL(path).cuCtxPopCurrent_v2, ctypes.byref(context))
        yield


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def operations(step: Callable[[], object]) -> list[str]:
    """The operations of torch in a step, by name."""
    with Operations() as counted:
        step()
    return counted.names


def python_calls(step: Callable[[], object]) -> int:
    """How many functions in Python a step calls."""
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def steps() -> dict[str, Callable[[], object]]:
    """What is timed, by name: a forward and a backward pass each."""
    torch.manual_seed(0)
    scores = torch.randn(_BATCH, _SIZE, _SIZE, requires_grad=True)
    weights = torch.randn_like(scores)
    one, of_one = scores[:1].detach().requires_grad_(), weights[:1]

    def build() -> tuple[fm.FactorGraph, fm.Variable]:
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.AtMostOne(u, axis=0))
        return fg, u

    def solve(fg: fm.FactorGraph, u: fm.Variable, on_failure: Any) -> None:
        fg.solve(tol=_TOL, on_failure=on_failure)
        torch.autograd.grad(u.value, scores, weights)

    def softmax(given: Tensor, weight: Tensor) -> None:
        torch.autograd.grad(given.softmax(dim=-1), given, weight)

    found: dict[str, Callable[[], object]] = {}
    for on_failure in ("warn", "ignore"):
        layer = fm.nn.Matching(tol=_TOL, on_failure=on_failure)
        same = build()
        found |= {
            f"graph anew, {on_failure}": lambda how=on_failure: solve(*build(), how),
            f"same graph, {on_failure}": lambda how=on_failure, same=same: solve(*same, how),
            f"nn.Matching, {on_failure}": lambda layer=layer: torch.autograd.grad(
                layer(scores), scores, weights
            ),
        }
    found["softmax of the batch"] = lambda: softmax(scores, weights)
    found["softmax of one instance"] = lambda: softmax(one, of_one)
    return found


def host(quick: bool) -> Section:
    """The host's part of an eager step, beside a softmax."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with stand_in():
        runs = steps()
        turns = 50 if quick else 300
        times = medians(in_turns(runs, turns, warmup=10, in_a_row=dict.fromkeys(runs, 5)))
        us = {name: 1e6 * seconds for name, seconds in times.items()}
        ops = {name: operations(run) for name, run in runs.items()}
        calls = {name: python_calls(run) for name, run in runs.items()}
    torch.set_num_threads(threads)
    text = table(
        f"Host of an eager step, {_BATCH} LP-matchings {_SIZE}x{_SIZE}, no kernels, one thread",
        ["forward + backward", "µs", "torch operations", "Python calls"],
        [[name, us[name], len(ops[name]), calls[name]] for name in runs],
    )
    return text, {"us": us, "operations": ops, "calls": calls}


SECTIONS: dict[str, Callable[[bool], Section]] = {"host": host}
