"""The engine of CUDA devices, for graphs of rows, pairs and matchings.

`CudaEngine.solve_there` leaves everything on the device, for fronts whose arrays are there; `solve`
takes and gives NumPy arrays, as every engine does. What the kernels can't finish goes to the CPU,
from the multipliers that they reached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax import _core
from factormax._core import Model
from factormax._engines.cpu import CpuEngine
from factormax._engines.cuda import driver
from factormax._engines.cuda.plan import Plan
from factormax._engines.cuda.program import Machine, Numbers, Program
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._raw import Proof, RawSolution
from factormax.arrays import FloatArray, IndexArray
from factormax.status import Status

__all__ = ["CudaEngine", "DeviceRun", "DeviceSolution", "Launcher", "plan_of", "unsupported"]

#: The status of an instance with a score that is NaN or +inf.
BAD_NUMBER = 6
#: Passes of the kernels, per precision: what takes longer needs a way that they do not have.
_PASSES = {np.dtype(np.float32): 400, np.dtype(np.float64): 1000}
_KEPT = 64
#: The residual from which the CPU goes on where the kernels have stopped.
_CLOSE = 1e-2


@lru_cache(maxsize=_KEPT)
def plan_of(model: Model) -> Plan:
    """The model as the kernels take it."""
    return Plan(model)


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
    return plan_of(inputs.model).unsupported


class _Stage:
    """One precision: the program, and where the numbers of the rows are on the device."""

    def __init__(self, program: Program, numbers: Numbers) -> None:
        self.program = program
        machine = program.machine
        coef, rhs, scale = numbers.coef, numbers.rhs, numbers.scale
        given = {"coef": coef, "rhs": rhs} | ({} if scale is None else {"scale": scale})
        self._kept = {name: machine.upload(array) for name, array in given.items()}
        self.numbers = {name: machine.pointer(array) for name, array in self._kept.items()}
        self.numbers["coef_stride"] = 0 if len(coef) == 1 else coef.shape[1]
        self.numbers["rhs_stride"] = 0 if len(rhs) == 1 else rhs.shape[1]


class DeviceRun:
    """A solve that was queued, and what its gradient takes.

    Attributes:
        found: the answers.
        stages: of each precision, the first one the least precise.
    """

    def __init__(
        self, stages: _Stages, given: tuple[Any, Any, Any], tol: float, max_iter: int
    ) -> None:
        self.stages = stages
        self._given, self._tol, self._max_iter = given, tol, max_iter
        self.found: Any = None

    def solve(self, number: int, warm: Any, unsolved: int) -> None:
        """Queues a stage; all but the first solve what the one before could not."""
        stage = self.stages[number]
        self.found = stage.program.solve(
            stage.numbers,
            *self._given,
            warm,
            self._tol,
            min(self._max_iter, _PASSES[stage.program.choice.precision]),
            unsolved,
            self.found,
        )

    def vjp(self, grad_mu: Any, grad_mu_v: Any) -> tuple[Any, Any, Any]:
        """The gradients of `eta_u` and of `eta_v` `(B, pairs)`, and their relative residuals."""
        eta_u, eta_v, _ = self._given
        out: Any = None
        for number in range(len(self.stages)):
            stage = self.stages[number]
            out = stage.program.vjp(
                stage.numbers, eta_u, eta_v, self.found, grad_mu, grad_mu_v, out
            )
        return out  # type: ignore[no-any-return]


class _Stages:
    """The precisions of a model with its parameters; each is made when it is first needed."""

    def __init__(
        self, launcher: Launcher, model: Model, params: list[Any], dtype: Any, batch: int
    ) -> None:
        self._precisions = plan_of(model).precisions(dtype)
        self._made: dict[int, _Stage] = {}
        self._key = launcher, model, list(params), dtype, batch

    def __len__(self) -> int:
        return len(self._precisions)

    def __getitem__(self, number: int) -> _Stage:
        found = self._made.get(number)
        if found is None:
            launcher, model, params, dtype, batch = self._key
            precision = self._precisions[number]
            numbers = Numbers(plan_of(model), *_rows(model, params), precision, bool(params))
            program = launcher.program(model, numbers, dtype, precision, batch)
            found = self._made.setdefault(number, _Stage(program, numbers))
        return found


class Launcher:
    """Solves batches on one machine; keeps the programs and the numbers of models."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._stages: OrderedDict[Any, _Stages] = OrderedDict()

    def solve(
        self, inputs: Inputs, options: Options, warm: Any = None, unsolved: Any = None
    ) -> DeviceRun:
        """Queues a solve of inputs whose arrays are on the device.

        Args:
            inputs: what to solve; `eta_u`, `eta_v` and `mask` are on the device.
            options: how.
            warm: `(B, rows of the model + pairs)`, multipliers to begin from.
            unsolved: a flag of the machine, to wait for each stage before the next; None queues all
                of them.
        """
        machine, plan = self.machine, plan_of(inputs.model)
        given = (
            machine.plain(inputs.eta_u),
            machine.plain(inputs.eta_v),
            None if inputs.mask is None else machine.plain(inputs.mask),
        )
        stages = self.stages(
            inputs.model, inputs.params, machine.dtype(given[0]), given[0].shape[0]
        )
        run = DeviceRun(stages, given, options.tol, options.max_iter)
        start = None if warm is None else self._all_rows(plan, warm)
        for number in range(len(run.stages)):
            run.solve(number, start, 0 if unsolved is None else unsolved.address)
            if unsolved is not None and not unsolved.wait():
                break
        return run

    def _all_rows(self, plan: Plan, warm: Any) -> Any:
        """With zeros for the rows of matchings, which the model does not have."""
        more = plan.hard - plan.model_rows
        if not more:
            return self.machine.plain(warm)
        return self.machine.with_zeros(warm, plan.model_rows, more)

    def stages(self, model: Model, params: list[Any], dtype: Any, batch: int) -> _Stages:
        """The precisions of a model with these parameters, for batches of about this size."""
        given = tuple([p if isinstance(p, float) else _bytes(p) for p in params])
        key = (model, given, dtype, Plan.batch_size(batch))
        found = self._stages.get(key) or _Stages(self, model, params, dtype, batch)
        return _keep(self._stages, key, found)  # type: ignore[no-any-return]

    def program(
        self, model: Model, numbers: Numbers, dtype: Any, precision: Any, batch: int
    ) -> Program:
        """The kernels for a model, with whatever parameters, in batches of about this size."""
        key = (model, dtype, precision, Plan.batch_size(batch), numbers.scale is None)
        program = self._programs.get(key)
        if program is None:
            plan, shared = plan_of(model), self.machine.shared_bytes
            uneven = bool(numbers.uneven.any())
            choice = plan.choose(dtype, precision, batch, numbers.coefs, uneven, shared)
            program = Program(plan, choice, numbers, self.machine)
        return _keep(self._programs, key, program)  # type: ignore[no-any-return]


def _keep(cache: OrderedDict[Any, Any], key: Any, value: Any) -> Any:
    """Puts it into the cache, or to its end; the oldest goes."""
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > _KEPT:
        cache.popitem(last=False)
    return value


def _bytes(array: Any) -> tuple[Any, ...]:
    return array.shape, array.tobytes()


def _rows(model: Model, params: list[Any]) -> tuple[Any, Any]:
    """The coefficients and bounds of the rows, in float64: they depend on the parameters alone."""
    batch = max([1, *(len(p) for p in params if not isinstance(p, float))])
    none = np.zeros((batch, model.num_variables)), np.zeros((1, model.num_scores))
    coef, rhs = _core.Inputs(model, *none, params, None, None).rows
    return coef, rhs


class DeviceSolution:
    """The answers of a batch, on the device; what a caller asks for is brought to the host then.

    Attributes:
        mu, mu_v, objective: on the device.
        engine: where it was found.
        proofs: why instances are infeasible.
    """

    nodes = None

    def __init__(self, run: DeviceRun, inputs: Inputs, options: Options, machine: Machine) -> None:
        self.run, self.machine = run, machine
        self.mu, self.mu_v, self.objective = run.found.mu, run.found.mu_v, run.found.objective
        self.engine = "cuda"
        self.proofs: dict[int, Proof] = {}
        self.num_rows = plan_of(inputs.model).model_rows
        self._options = options
        self._left: tuple[IndexArray, Inputs, RawSolution] | None = None  # to the CPU
        self.all_converged = True  # as far as anybody has looked

    # ---- at the end of a solve -------------------------------------------------------------------

    def settle(self, unsolved: bool, inputs: Callable[[IndexArray], Inputs], bad: Any) -> None:
        """Does what the kernels have left.

        Args:
            unsolved: whether they have left something.
            inputs: of these instances, on the host.
            bad: called if a score is NaN or +inf.
        """
        if not unsolved:
            return
        status, passes = self.status, self.iterations
        if (status == BAD_NUMBER).any():
            bad()
        limit = passes < self._options.max_iter
        left = (status == Status.STALLED.code) | ((status == Status.MAX_ITER.code) & limit)
        infeasible = status == Status.INFEASIBLE.code
        if self.num_rows < self.run.found.tau.shape[1] - self.mu_v.shape[1]:
            left |= infeasible  # the proof may be about rows of a matching
        self._take_proofs(np.flatnonzero(infeasible & ~left))
        if left.any():
            self._finish(np.flatnonzero(left), inputs)
        self.all_converged = bool((self.status == Status.CONVERGED.code).all())

    def _take_proofs(self, instances: IndexArray) -> None:
        for i in instances:
            proof = np.asarray(self.machine.download(self.run.found.tau[int(i)]), np.float64)
            self.proofs[int(i)] = Proof(proof)

    def _finish(self, index: IndexArray, inputs: Callable[[IndexArray], Inputs]) -> None:
        """Solves on the CPU, from the multipliers that the kernels reached."""
        own = inputs(index)
        start = self.tau[index]
        close = self.primal_residual[index] <= _CLOSE
        warm = np.where(close[:, None] & np.isfinite(start), start, 0).astype(start.dtype)
        raw = CpuEngine().solve(own, self._options, warm if close.any() else None)
        self._left = index, own, raw
        for name in ("mu", "mu_v", "objective"):
            self.machine.put(getattr(self, name), index, getattr(raw, name))
        for name, values in (
            ("status", raw.status),
            ("iterations", self.iterations[index] + raw.iterations),
            ("primal_residual", raw.primal_residual),
            ("tau", raw.tau),
        ):
            getattr(self, name)[index] = values
        self.proofs |= {int(index[i]): proof for i, proof in raw.proofs.items()}
        self.engine = f"cuda ({len(index)} of {len(self.mu)} instances were finished on the CPU)"

    # ---- on the host -----------------------------------------------------------------------------

    @cached_property
    def status(self) -> npt.NDArray[np.int32]:
        """`(B,)`."""
        return self.machine.download(self.run.found.status)

    @cached_property
    def iterations(self) -> npt.NDArray[np.int32]:
        """`(B,)`."""
        return self.machine.download(self.run.found.iterations)

    @cached_property
    def primal_residual(self) -> npt.NDArray[np.float64]:
        """`(B,)`."""
        return self.machine.download(self.run.found.residual)

    @property
    def dual_residual(self) -> npt.NDArray[np.float64]:
        """`(B,)`: the same."""
        return self.primal_residual

    @property
    def oracle_calls(self) -> npt.NDArray[np.int32]:
        """`(B,)`: none."""
        return np.zeros_like(self.iterations)

    @cached_property
    def tau(self) -> FloatArray:
        """`(B, rows of the model + pairs)`, the multipliers."""
        every = self.machine.download(self.run.found.tau)
        rows = every.shape[1] - self.mu_v.shape[1]
        return np.delete(every, np.s_[self.num_rows : rows], axis=1)

    # ---- the gradient ----------------------------------------------------------------------------

    def vjp(self, grad_mu: Any, grad_mu_v: Any) -> tuple[Any, Any, Any]:
        """The gradients of the scores, and how well their systems were solved; see `Engine.vjp`."""
        given = [None if g is None else self.machine.plain(g) for g in (grad_mu, grad_mu_v)]
        grad_u, grad_v, residual = self.run.vjp(*given)
        if self._left is not None:
            index, inputs, raw = self._left
            own = [None if g is None else self.machine.download(g[index]) for g in given]
            found_u, found_v, own_residual, _ = CpuEngine().vjp(inputs, raw, own[0], own[1], None)
            self.machine.put(grad_u, index, found_u)
            self.machine.put(grad_v, index, found_v)
            self.machine.put(residual, index, own_residual)
        return grad_u, grad_v, residual

    def to_raw(self) -> RawSolution:
        """The same on the host."""
        shape = (len(self.mu), self.mu.shape[1], self.mu_v.shape[1], self.tau.shape[1])
        raw = RawSolution.of_size(*shape, self.machine.dtype(self.mu))
        for name in ("mu", "mu_v", "objective"):
            getattr(raw, name)[...] = self.machine.download(getattr(self, name))
        for name in ("status", "iterations", "primal_residual", "dual_residual", "tau"):
            getattr(raw, name)[...] = getattr(self, name)
        for i in self.proofs:
            raw.tau[i] = 0
        raw.proofs, raw.engine = self.proofs, self.engine
        return raw


class CudaEngine:
    """Solves rows, pairs and matchings with kernels of its own.

    Args:
        machine: gives the machine of a device.
        unavailable: why there is none, or "".
    """

    name = "cuda"

    def __init__(
        self,
        machine: Callable[[str], Machine] | None = None,
        unavailable: Callable[[int], str] = driver.unavailable,
    ) -> None:
        self._machine = machine or _torch_machine
        self._unavailable = unavailable
        self._launchers: dict[str, Launcher] = {}

    def supports(self, inputs: Inputs, options: Options) -> tuple[bool, str]:
        """If there is a device that can run kernels, and they know all that the graph has."""
        reason = unsupported(inputs, options) or self._unavailable(_number(inputs.device))
        if not reason and not plan_of(inputs.model).fits(self._machine(inputs.device).shared_bytes):
            reason = "the graph is too large for the shared memory of the device"
        return not reason, reason

    def launcher(self, device: str) -> Launcher:
        """What launches on this device."""
        found = self._launchers.get(device)
        if found is None:
            found = self._launchers.setdefault(device, Launcher(self._machine(device)))
        return found

    def solve_there(
        self, inputs: Inputs, options: Options, warm: Any = None, bad: Any = lambda: None
    ) -> DeviceSolution:
        """The answers of inputs whose arrays are on the device; they stay there.

        Waits for the kernels, to see whether they solved everything, unless failures are ignored.
        `bad` is called if a score is NaN or +inf.
        """
        launcher = self.launcher(inputs.device)
        machine = launcher.machine
        if options.on_failure == "ignore" or machine.capturing:
            return DeviceSolution(launcher.solve(inputs, options, warm), inputs, options, machine)
        with machine.flag() as flag:
            run = launcher.solve(inputs, options, warm, flag)
            unsolved = flag.is_set
        found = DeviceSolution(run, inputs, options, machine)
        found.settle(unsolved, lambda index: _on_host(inputs, machine, index), bad)
        return found

    def solve(self, inputs: Inputs, options: Options, warm: FloatArray | None) -> RawSolution:
        """The answers of inputs on the host."""
        machine = self._machine(inputs.device)
        there = inputs.replace(
            eta_u=machine.upload(np.ascontiguousarray(inputs.eta_u)),
            eta_v=machine.upload(np.ascontiguousarray(inputs.eta_v)),
            mask=None if inputs.mask is None else machine.upload(np.ascontiguousarray(inputs.mask)),
        )
        start = None if warm is None else machine.upload(np.ascontiguousarray(warm))
        found = self.solve_there(there, options, start)
        raw = found.to_raw()
        raw.there = found
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
    ) -> tuple[FloatArray, FloatArray, npt.NDArray[np.float64], float]:
        """The gradients of the scores."""
        assert grad_prob is None, "probabilities come from the CPU"
        there: DeviceSolution = raw.there
        machine, dtype = there.machine, raw.mu.dtype
        given = [
            None if g is None else machine.upload(np.ascontiguousarray(g, dtype))
            for g in (grad_mu, grad_mu_v)
        ]
        grad_u, grad_v, residual = (machine.download(x) for x in there.vjp(*given))
        return grad_u, grad_v, residual, float(residual.max(initial=0))


def _number(device: str) -> int:
    return int(device.split(":")[1]) if ":" in device else 0


@cache
def _torch_machine(device: str) -> Machine:
    from factormax._engines.cuda.device import TorchMachine

    return TorchMachine(_number(device))


def _on_host(inputs: Inputs, machine: Machine, index: IndexArray) -> Inputs:
    """Some of the instances, on the host."""
    mask = None if inputs.mask is None else machine.download(inputs.mask).astype(bool)
    there = inputs.replace(
        eta_u=machine.download(inputs.eta_u),
        eta_v=machine.download(inputs.eta_v),
        mask=mask,
        device="cpu",
    )
    return there.instances(index)


def _no_structures(batch: int, factors: int) -> _core.Structures:
    """Those of a solve by rows: none is listed."""
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
