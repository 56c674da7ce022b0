"""Engines to be fuzzed in the place of the CPU's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from factormax import _engines
from factormax._engines.cpu import CpuEngine
from factormax._engines.cuda.engine import CudaEngine
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._raw import RawSolution

__all__ = ["use"]


#: One in so many models has kernels of its own, which take seconds to compile.
_OWN_KERNELS = 12


class _Cuda(CpuEngine):
    """The CUDA engine where it can, the CPU's elsewhere."""

    def __init__(self) -> None:
        self._own, self._general = CudaEngine(), CudaEngine(general=True)

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
    """Lets this engine solve whatever is solved from now on: "cpu" or "cuda"."""
    if name == "cuda":
        why = CudaEngine()._unavailable(0)
        if why:
            raise SystemExit(f"--engine cuda: {why}.")
        _engines.ENGINES[-1] = _Cuda()
