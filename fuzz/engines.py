"""Engines to be fuzzed in the place of the CPU's."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from factormax import _engines
from factormax._engines.cpu import CpuEngine
from factormax._engines.cuda.engine import CudaEngine
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._raw import RawSolution

__all__ = ["NAMES", "use"]

#: "emulated" is "cuda" on emulated warps and blocks, which needs a C++ compiler and no device.
NAMES = ("cpu", "cuda", "emulated")

#: One in so many models has kernels of its own, which take seconds to compile.
_OWN_KERNELS = 12


class _Cuda(CpuEngine):
    """The CUDA engine where it can, the CPU's elsewhere."""

    def __init__(self, machine: Any = None, unavailable: Any = None) -> None:
        self._own = CudaEngine(machine, unavailable)
        self._general = CudaEngine(machine, unavailable, general=True)

    def solve(self, inputs: Inputs, options: Options, warm: Any) -> RawSolution:
        there = inputs.replace(device="cuda:0")
        if not self._own.supports(there, options)[0]:
            return super().solve(inputs, options, warm)
        model = inputs.model
        size = 5 * model.num_variables + 3 * model.num_rows + model.num_pairs + len(model.col)
        engine = self._general if size % _OWN_KERNELS else self._own
        # Where failures are ignored nobody waits, and the CPU does not finish what is left.
        return engine.solve(there, replace(options, on_failure="warn"), warm)


def use(name: str) -> None:
    """Lets this engine, one of `NAMES`, solve whatever is solved from now on."""
    if name == "cuda":
        why = CudaEngine()._unavailable(0)
        if why:
            raise SystemExit(f"--engine cuda: {why}.")
        _engines.ENGINES[-1] = _Cuda()
    elif name == "emulated":
        sys.path.append(str(Path(__file__).parents[1] / "tests" / "cuda"))
        machine = import_module("machine").EmulatedMachine("shuffled")
        _engines.ENGINES[-1] = _Cuda(lambda device: machine, lambda number: "")
