"""The engine for CUDA devices, for graphs of rows, pairs, matchings, sequences, tables and trees.

`CudaEngine.solve_there` leaves everything on the device, for fronts whose arrays are there; `solve`
takes and returns NumPy arrays, as every engine does. What the kernels can't finish goes to the CPU,
which starts from the multipliers that they reached. All of this is imported on first use, because
most processes never see a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from factormax import _core
from factormax._columns import Columns
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._raw import RawSolution
from factormax.arrays import FloatArray

if TYPE_CHECKING:
    from factormax._engines.cuda.launcher import Launcher
    from factormax._engines.cuda.program import Machine
    from factormax._engines.cuda.solution import DeviceSolution

__all__ = ["CudaEngine", "unsupported"]


def unsupported(inputs: Inputs, options: Options) -> str:
    """Why the kernels can't solve this, or ""."""
    if options.linear:
        return "LP-MAP has no kernel"
    if options.method != "auto":
        return f"method={options.method!r} has no kernel"
    if inputs.oracles:
        return "oracles in Python run on the CPU"
    if inputs.held is not None:
        return "held variables have no kernel"
    if options.list_structures:
        return "structures are listed on the CPU"
    from factormax._engines.cuda.launcher import plan_of

    plan = plan_of(inputs.model)
    if not plan.unsupported and plan.hubs and options.max_inner_iter < Options.max_inner_iter:
        return "max_inner_iter is only for the CPU"
    return plan.unsupported


class CudaEngine:
    """Solves rows, pairs, matchings, sequences, tables and trees with its own kernels.

    Args:
        machine: returns the machine of a device.
        unavailable: returns why there is none, or "".
        general: whether to use kernels that fit many models, see `Launcher`.
    """

    name = "cuda"

    def __init__(
        self,
        machine: Callable[[str], Machine] | None = None,
        unavailable: Callable[[int], str] | None = None,
        general: bool = False,
    ) -> None:
        self._machine = machine or _torch_machine
        self._unavailable = unavailable or _unavailable
        self._general = general
        self._launchers: dict[str, Launcher] = {}

    def supports(self, inputs: Inputs, options: Options) -> tuple[bool, str]:
        """Whether a device can run kernels, and they support everything in the graph."""
        reason = unsupported(inputs, options) or self._unavailable(_number(inputs.device))
        if not reason:
            from factormax._engines.cuda.launcher import plan_of

            if not plan_of(inputs.model).fits(self._machine(inputs.device).shared_bytes):
                reason = "the graph is too large for the shared memory of the device"
        return not reason, reason

    def launcher(self, device: str) -> Launcher:
        """The launcher for this device."""
        found = self._launchers.get(device)
        if found is None:
            from factormax._engines.cuda.launcher import Launcher

            made = Launcher(self._machine(device), self._general)
            found = self._launchers.setdefault(device, made)
        return found

    def begin(self, inputs: Inputs, options: Options, warm: Any = None) -> DeviceSolution:
        """Queues the solve of inputs whose arrays are on the device.

        The answers stay there. They are final once `settle` was called, which waits for the kernels
        unless failures are ignored, to see whether they solved everything.
        """
        from factormax._engines.cuda.solution import DeviceSolution

        launcher = self.launcher(inputs.device)
        machine = launcher.machine
        flag = None
        if options.on_failure != "ignore" and not machine.capturing:
            flag = machine.flag()
        run = launcher.solve(inputs, options, warm, flag)
        return DeviceSolution(run, options, machine, flag)

    def solve_there(
        self, inputs: Inputs, options: Options, warm: Any = None, bad: Any = lambda: None
    ) -> DeviceSolution:
        """The same, settled. `bad` is called if a score is NaN or +inf."""
        found = self.begin(inputs, options, warm)
        found.settle(bad)
        return found

    def solve(self, inputs: Inputs, options: Options, warm: FloatArray | None) -> RawSolution:
        """The answers of inputs on the host."""
        machine = self._machine(inputs.device)
        there = inputs.replace(
            eta_u=machine.upload(np.ascontiguousarray(inputs.eta_u)),
            eta_v=inputs.moved_factor_scores(lambda a: machine.upload(np.ascontiguousarray(a))),
            mask=None if inputs.mask is None else machine.upload(np.ascontiguousarray(inputs.mask)),
        )
        start = None if warm is None else machine.upload(np.ascontiguousarray(warm))
        raw = self.solve_there(there, options, start).to_raw()
        if inputs.model.num_structured:
            raw.structures = _no_structures(inputs.batch, inputs.model.num_structured)
        return raw

    def vjp(
        self,
        inputs: Inputs,
        raw: RawSolution,
        grad_mu: FloatArray | None,
        grad_mu_v: FloatArray | None,
        grad_prob: npt.NDArray[np.float64] | None,
        summed: bool = False,
    ) -> tuple[FloatArray, Any, npt.NDArray[np.float64], float]:
        """The gradients of the scores."""
        assert grad_prob is None, "probabilities come from the CPU"
        there: DeviceSolution = raw.there
        machine, dtype = there.machine, raw.mu.dtype
        given = [
            None if g is None else machine.upload(np.ascontiguousarray(g, dtype))
            for g in (grad_mu, grad_mu_v)
        ]
        grad_u, found, residual = (machine.download(x) for x in there.vjp(*given))
        grad_v: Any = found
        if summed:
            grad_v = Columns.summed(found, np.ones(inputs.batch), inputs.runs)
        return grad_u, grad_v, residual, float(residual.max(initial=0))


def _unavailable(number: int) -> str:
    from factormax._engines.cuda import driver

    return driver.unavailable(number)


def _number(device: str) -> int:
    return int(device.split(":")[1]) if ":" in device else 0


@cache
def _torch_machine(device: str) -> Machine:
    from factormax._engines.cuda.device import TorchMachine

    return TorchMachine(_number(device))


def _no_structures(batch: int, factors: int) -> _core.Structures:
    """The structures of a solve by rows: none are listed."""
    whole, real = np.zeros(0, np.int32), np.zeros(0)
    zeros = np.zeros(batch * factors, np.int32)
    return _core.Structures(
        count=zeros,
        prob=real,
        on=whole,
        features=whole,
        dense=real,
        num_cuts=zeros,
        cuts=np.zeros(0, np.uint8),
    )
