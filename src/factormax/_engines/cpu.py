"""The native core, on all cores of the CPU."""

from __future__ import annotations

import math
import time
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax import _core
from factormax._columns import Columns
from factormax._core import ByRows, CallbackFault, Settings
from factormax._inputs import Inputs
from factormax._options import MAP_METHODS, METHODS, Options
from factormax._raw import Proof, RawSolution
from factormax.arrays import FloatArray, grad_mode_keeper
from factormax.errors import GraphError
from factormax.rendezvous import Rendezvous
from factormax.status import Status

__all__ = ["CpuEngine", "working_memory"]

#: Whether trees and matchings are solved by rows, and sequences by flows.
BY_ROWS = ByRows.dense

_FAULTS = {
    CallbackFault.raised: "native_map reported a failure.",
    CallbackFault.not_binary: "native_map returned an assignment that is not all 0 and 1.",
    CallbackFault.forbidden: "native_map switched on a variable that is masked (its score is "
    "-inf).",
    CallbackFault.not_finite: "native_map returned a feature that is not finite.",
}
_NO_STRUCTURE = -2  # in place of the number of cuts


class CpuEngine:
    """Solves everything."""

    name = "cpu"

    def supports(self, inputs: Inputs, options: Options) -> tuple[bool, str]:
        """Always True."""
        return True, ""

    def solve(self, inputs: Inputs, options: Options, warm: FloatArray | None) -> RawSolution:
        """The answers of a batch."""
        if not inputs.oracles:
            return _solve(inputs, options, warm)
        if inputs.batch > 1 and any([hasattr(o, "map_batch") for o in inputs.oracles]):
            return _solve_together(inputs, options, warm)
        return _solve(inputs, options, warm, _callbacks(inputs))

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
        dtype = inputs.eta_u.dtype
        if grad_mu is not None:
            grad_mu = np.ascontiguousarray(grad_mu, dtype)
        if grad_mu_v is not None:
            grad_mu_v = np.ascontiguousarray(grad_mu_v, dtype)
        given = raw, grad_mu, grad_mu_v, grad_prob
        grad_u, grad_v, residual, worst = _core.vjp(inputs.core, *given, summed)
        if summed:
            shared, own = grad_v
            grad_v = Columns(shared, own, inputs.runs)
        return grad_u, grad_v, residual, worst


def _solve(
    inputs: Inputs, options: Options, warm: FloatArray | None, oracles: list[Any] | None = None
) -> RawSolution:
    if options.linear and inputs.eta_u.dtype == np.float32:
        # Multipliers in float32 are not precise enough to close the gap to the bound.
        start = None if warm is None else warm.astype(np.float64)
        wide = _solve(inputs.wide(), options, start, oracles)
        return RawSolution.like(wide, inputs.batch, np.float32).fill([wide])
    core = inputs.core
    raw = RawSolution(core)
    if options.deadline is None:
        settings = _settings(options, BY_ROWS)
    else:
        settings = _settings(options, BY_ROWS, max(options.deadline - time.monotonic(), 0.0))
    place, fault = _core.solve(core, settings, warm, oracles, raw)
    if fault:
        raise GraphError(f"{inputs.oracles[place].name}: {_FAULTS[CallbackFault(fault)]}")
    if not raw.all_converged:
        _take_proofs(raw)
    return raw


@lru_cache(maxsize=64)
def _settings(options: Options, by_rows: ByRows, seconds: float = math.inf) -> Settings:
    limited = options.max_inner_iter < Options.max_inner_iter  # a limit implies use of the oracle
    if limited or by_rows == ByRows.never:
        by_rows = ByRows.never
    elif options.list_structures:
        by_rows = ByRows.listed
    return Settings(
        method=(MAP_METHODS if options.linear else METHODS)[options.method],
        tol=options.tol,
        max_iter=options.max_iter,
        max_inner_iter=options.max_inner_iter,
        step_size=options.step_size,
        by_rows=by_rows,
        seconds=seconds,
    )


def _take_proofs(raw: RawSolution) -> None:
    """Takes the certificates of infeasible instances, returned in place of their multipliers."""
    proofs = {}
    for i in np.flatnonzero(raw.status == Status.INFEASIBLE.code):
        cuts = raw.structures.num_cuts.reshape(len(raw.status), -1)[i]
        impossible = tuple(int(s) for s in np.flatnonzero(cuts == _NO_STRUCTURE))
        proofs[int(i)] = Proof(raw.tau[i].copy(), impossible)
        raw.tau[i] = 0
    raw.proofs = proofs


def _callbacks(inputs: Inputs) -> list[Any]:
    """What the core calls for each user-defined structured factor; None for the others.

    Python functions run in the caller's grad mode, because other threads have their own.
    """
    keep = grad_mode_keeper()
    given = [None if o is None else o._callback() for o in inputs.oracles]
    return [keep(c) if callable(c) else c for c in given]


def _solve_together(inputs: Inputs, options: Options, warm: FloatArray | None) -> RawSolution:
    """Solves the instances concurrently, so that `map_batch` sees their scores at once."""
    alone = _callbacks(inputs)

    def solve_one(i: int, rendezvous: Rendezvous) -> RawSolution:
        oracles = [
            rendezvous.callback(o, i) if hasattr(o, "map_batch") else own
            for o, own in zip(inputs.oracles, alone, strict=True)
        ]
        start = None if warm is None else warm[i : i + 1]
        return _solve(inputs.instance(i), options, start, oracles)

    parts = Rendezvous.run(inputs.batch, solve_one)
    return RawSolution.like(parts[0], inputs.batch, inputs.eta_u.dtype).fill(parts)


def working_memory(inputs: Inputs, method: str = "auto") -> int:
    """The bytes that each thread works in, besides the inputs and outputs."""
    return inputs.core.workspace_bytes(METHODS[method])
