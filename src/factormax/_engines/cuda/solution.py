"""What was found on a device, and what happens to instances that were not solved there."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax._engines.cpu import CpuEngine
from factormax._engines.cuda.launcher import DeviceRun
from factormax._engines.cuda.program import Machine
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._raw import Proof, RawSolution
from factormax.arrays import FloatArray, IndexArray
from factormax.status import Status

__all__ = ["DeviceSolution"]

#: The kernels' status of an instance with a score that is NaN or +inf.
_BAD_NUMBER = 6
#: The kernels' names of arrays, where they differ.
_ON_DEVICE = {"primal_residual": "residual", "dual_residual": "residual"}
#: Up to this residual, the CPU continues from where the kernels stopped.
_CLOSE = 1e-2


class DeviceSolution:
    """The answers of a batch, on the device; copied to the host on access.

    Args:
        run: the solve, of which the first stage was queued, or all of them.
        options: its options.
        machine: where it runs.
        flag: what the first stage sets if it leaves anything unsolved; None: all were queued.

    Attributes:
        engine: where it was solved.
        proofs: the proofs of infeasible instances.
    """

    nodes = None

    def __init__(self, run: DeviceRun, options: Options, machine: Machine, flag: Any) -> None:
        self.run, self.machine = run, machine
        self.engine = "cuda"
        self.proofs: dict[int, Proof] = {}
        self._plan = run.stages.plan
        self.num_rows = self._plan.model_rows
        self._options, self._flag = options, flag
        self._left: list[tuple[IndexArray, Inputs, RawSolution]] = []  # left to the CPU
        self.all_converged = True  # as far as is known

    # ---- at the end of a solve -------------------------------------------------------------------

    def settle(self, bad: Any) -> bool:
        """Waits, if failures matter, and solves what the first kernel left unsolved.

        Returns whether it left anything, so that the numbers have changed since.

        bad: called if a score is NaN or +inf.
        """
        flag, self._flag = self._flag, None
        if flag is None:
            return False
        with flag:
            if not flag.wait():
                return False
            unsolved = self.run.go_on(flag)
        if unsolved:
            self._finish_rest(bad)
        return True

    def _finish_rest(self, bad: Any) -> None:
        """Deals with what the kernels left unsolved."""
        status, passes = self.status, self.iterations
        if (status == _BAD_NUMBER).any():
            bad()
        limit = passes < self._options.max_iter
        left = (status == Status.STALLED.code) | ((status == Status.MAX_ITER.code) & limit)
        infeasible = status == Status.INFEASIBLE.code
        if self.num_rows < self._plan.hard:
            left |= infeasible  # the proof may be about rows of a matching
        self._take_proofs(np.flatnonzero(infeasible & ~left))
        if left.any():
            self._finish_all(np.flatnonzero(left))
        self.all_converged = bool((self.status == Status.CONVERGED.code).all())

    def _take_proofs(self, instances: IndexArray) -> None:
        for i in instances:
            proof = np.asarray(self.machine.download(self.run.found.tau[int(i)]), np.float64)
            self.proofs[int(i)] = Proof(proof)

    def _finish_all(self, index: IndexArray) -> None:
        """Solves on the CPU: instances that are close, from the multipliers that kernels reached.

        The others are solved separately, from scratch, so that each starts as it would alone.
        """
        own, start = self._on_host(index), self.tau[index]
        close = (self.primal_residual[index] <= _CLOSE) & np.isfinite(start).all(axis=1)
        for part, warm in ((np.flatnonzero(close), start[close]), (np.flatnonzero(~close), None)):
            if len(part):
                self._finish(index[part], own.instances(part), warm)
        self.engine = f"cuda ({len(index)} of {len(self.mu)} instances were finished on the CPU)"

    def _finish(self, index: IndexArray, own: Inputs, warm: FloatArray | None) -> None:
        raw = CpuEngine().solve(own, self._options, warm)
        self._left.append((index, own, raw))
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

    def _on_host(self, index: IndexArray) -> Inputs:
        """The inputs of some instances, on the host."""
        inputs, download = self.run.inputs, self.machine.download
        mask = None if inputs.mask is None else download(inputs.mask).astype(bool)
        eta_u, eta_v = download(inputs.eta_u), inputs.moved_factor_scores(download)
        return inputs.replace(eta_u=eta_u, eta_v=eta_v, mask=mask, device="cpu").instances(index)

    @property
    def mu(self) -> Any:
        """`(B, n)`, on the device."""
        return self.run.found.mu

    @property
    def mu_v(self) -> Any:
        """`(B, scores)`, on the device."""
        return self.run.found.mu_v

    @property
    def objective(self) -> Any:
        """`(B,)`, on the device."""
        return self.run.found.objective

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
        """`(B,)`, the same."""
        return self.primal_residual

    @property
    def oracle_calls(self) -> npt.NDArray[np.int32]:
        """`(B,)`, of the kernels."""
        if not self._plan.hubs:
            return np.zeros_like(self.iterations)
        return self.machine.download(self.run.found.oracle_calls)

    @cached_property
    def tau(self) -> FloatArray:
        """`(B, rows of the model + pairs)`, the multipliers."""
        return self.machine.download(self._model_rows(self.run.found.tau))

    def _model_rows(self, multipliers: Any) -> Any:
        """The multipliers without those of the rows of matchings and trees."""
        if self.num_rows == self._plan.hard:
            return multipliers
        return self.machine.without(multipliers, self.num_rows, self._plan.hard)

    # ---- the gradient ----------------------------------------------------------------------------

    def vjp(self, grad_mu: Any, grad_mu_v: Any) -> tuple[Any, Any, Any]:
        """The gradients of the scores, and how well their systems were solved; see `Engine.vjp`.

        The first has the shape of `grad_mu`, which may be any that holds B × n numbers.
        """
        given = [None if g is None else self.machine.plain(g) for g in (grad_mu, grad_mu_v)]
        found = self.run.vjp(*given)
        if self._left:
            self._finish_vjp(found, *given)
        return found

    def _finish_vjp(self, found: tuple[Any, Any, Any], grad_mu: Any, grad_mu_v: Any) -> None:
        """Overwrites the gradients of what the CPU solved."""
        flat, download = self.run.found.places.variables, self.machine.download
        rows = found[0].reshape(flat), *found[1:]
        given = (None if grad_mu is None else grad_mu.reshape(flat)), grad_mu_v
        for index, inputs, raw in self._left:
            own = [None if g is None else download(g[index]) for g in given]
            *gradients, _ = CpuEngine().vjp(inputs, raw, own[0], own[1], None)
            for array, values in zip(rows, gradients, strict=True):
                self.machine.put(array, index, values)

    @property
    def finished_there(self) -> bool:
        """Whether the CPU solved none of the instances."""
        return not self._left

    def vjp_at(self, index: Any, grad_mu: Any, grad_mu_v: Any) -> tuple[Any, Any, Any]:
        """The same for these instances, `(N,)` on the device, if the CPU solved none."""
        given = [self.machine.plain(g) for g in (grad_mu, grad_mu_v)]
        return self.run.vjp_at(index, *given)

    # ---- on the device ---------------------------------------------------------------------------

    def there(self, name: str) -> Any:
        """One of the arrays above, by name, as it is on the device."""
        if self._left:
            return self.machine.upload(np.ascontiguousarray(getattr(self, name)))
        if name == "oracle_calls" and not self._plan.hubs:
            return self.run.found.status * 0
        found = getattr(self.run.found, _ON_DEVICE.get(name, name))
        return self._model_rows(found) if name == "tau" else found

    def sides_there(self) -> Any:
        """The sides of variables and rows, for a graph without structures."""
        found = self.run.found
        for index, _, raw in self._left:
            self.machine.put(found.var_side, index, raw.var_side)
            self.machine.put(found.row_side, index, raw.row_side)
        return found.var_side, found.row_side

    def __reduce__(self) -> Any:
        """What is pickled: the solution on the host."""
        return _same, (self.to_raw(),)

    def to_raw(self) -> RawSolution:
        """The solution on the host; its derivative is still computed on the device."""
        shape = (len(self.mu), self.mu.shape[1], self.mu_v.shape[1], self.tau.shape[1])
        raw = RawSolution.of_size(*shape, self.machine.dtype(self.mu))
        for name in ("mu", "mu_v", "objective"):
            getattr(raw, name)[...] = self.machine.download(getattr(self, name))
        names = ("status", "iterations", "oracle_calls", "primal_residual", "dual_residual", "tau")
        for name in names:
            getattr(raw, name)[...] = getattr(self, name)
        for i in self.proofs:
            raw.tau[i] = 0
        raw.proofs, raw.engine, raw.there = self.proofs, self.engine, self
        return raw


def _same(raw: RawSolution) -> RawSolution:
    """The solution, from a pickle."""
    return raw
