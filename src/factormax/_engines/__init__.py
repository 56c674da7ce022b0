"""Engines: each solves and differentiates batches on one kind of device.

An engine is chosen by the device of the scores. If it can't answer the query, the CPU does, and
`solution.engine` says why. To add one, write a class with the four members of `Engine`, and put an
instance of it into `ENGINES`, before the CPU's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from factormax._core import Model
from factormax._engines.cpu import CpuEngine
from factormax._engines.cuda.engine import CudaEngine
from factormax._inputs import Inputs, structured_of
from factormax._options import Options
from factormax._raw import RawSolution
from factormax.arrays import FloatArray
from factormax.factors.base import BaseFactor
from factormax.factors.structured import StructuredFactor

__all__ = ["ENGINES", "Engine", "choose", "engine_of", "engine_there", "solve", "vjp"]

_NOTHING = np.zeros((0, 0)), np.zeros((0, 0))


class Engine(Protocol):
    """The interface of every engine."""

    name: str

    def supports(self, inputs: Inputs, options: Options) -> tuple[bool, str]:
        """Whether it can answer this query, and if not, why not."""

    def solve(self, inputs: Inputs, options: Options, warm: FloatArray | None) -> RawSolution:
        """The answers; warm: multipliers to start from, `(B, multipliers)`."""

    def vjp(
        self,
        inputs: Inputs,
        raw: RawSolution,
        grad_mu: FloatArray | None,
        grad_mu_v: FloatArray | None,
        grad_prob: npt.NDArray[np.float64] | None,
        summed: bool = False,
    ) -> tuple[FloatArray, Any, npt.NDArray[np.float64], float]:
        """The gradients of `eta_u` and `eta_v`, `(B, ...)`, given those of the answers (None: 0).

        Also returns the residual of each instance's system, and the largest one. `grad_prob` is the
        gradient of the probabilities of the structures, in their order. `summed` asks for the
        gradient of `eta_v` as `Columns`, summed over the instances that share a score.
        """


#: In the order in which they are tried; the CPU's, which supports everything, comes last.
ENGINES: list[Engine] = [CudaEngine(), CpuEngine()]


def choose(inputs: Inputs, options: Options) -> tuple[Engine, str]:
    """The engine for a query, and why it is not on the device of the scores; "" if it is."""
    kind = inputs.device.split(":")[0]
    reason = f"there is no engine for {kind}"
    for engine in ENGINES:
        if engine.name not in (kind, "cpu"):
            continue
        supported, why = engine.supports(inputs, options)
        if supported:
            return engine, "" if engine.name == kind else reason
        reason = why
    raise NotImplementedError(reason)


@lru_cache(maxsize=64)
def engine_there(model: Model, options: Options, device: str, oracles: bool = False) -> Any:
    """The engine whose `solve_there` solves this model on the device of the scores, or None."""
    kind = device.split(":")[0]
    asked = Inputs(model, *_NOTHING, [], oracles=(None,) * oracles, device=device)
    for engine in ENGINES:
        there = engine.name == kind and hasattr(engine, "solve_there")
        if there and engine.supports(asked, options)[0]:
            return engine
    return None


def engine_of(device: str) -> str:
    """What `solution.engine` says if a traced JAX function solved scores on this device."""
    kind = device.split(":")[0]
    return "cpu" if kind == "cpu" else f"cpu (a compiled solve on {kind} has no engine)"


def solve(inputs: Inputs, options: Options, warm: Any = None) -> RawSolution:
    """Solves a batch. The scores hold no NaN and no +inf where the mask is set."""
    if warm is not None:
        warm = np.ascontiguousarray(warm, inputs.eta_u.dtype)
        if not np.isfinite(warm).all():
            raise ValueError(
                "warm_start: the multipliers of the earlier solution hold NaN or an infinity. "
                "Start from a solution that converged, or without one."
            )
    if inputs.model.num_structured and inputs.here is not None:
        _check_masks(inputs)
    if inputs.device == "cpu":  # the default engine of a solution
        return ENGINES[-1].solve(inputs, options, warm)
    engine, reason = choose(inputs, options)
    raw = engine.solve(inputs, options, warm)
    raw.engine = f"{engine.name} ({reason})" if reason else engine.name
    return raw


def vjp(
    inputs: Inputs,
    raw: RawSolution,
    grad_mu: FloatArray | None = None,
    grad_mu_v: FloatArray | None = None,
    grad_prob: npt.NDArray[np.float64] | None = None,
    summed: bool = False,
) -> tuple[FloatArray, Any, npt.NDArray[np.float64], float]:
    """The derivative of a solve, by the engine that solved it; see `Engine.vjp`."""
    engine = ENGINES[-1]
    if raw.there is not None:
        engine = next(e for e in ENGINES if raw.engine.startswith(e.name))
    return engine.vjp(inputs, raw, grad_mu, grad_mu_v, grad_prob, summed)


def _check_masks(inputs: Inputs) -> None:
    """Raises if the mask removes something that a structured factor needs."""
    assert inputs.here is not None
    nothing = StructuredFactor.__dict__["_check_mask"].__func__
    for factor in structured_of(inputs.model):
        own: Any = BaseFactor._registry.get(factor.name)
        # Most have no rule; do not look at each of thousands of tables.
        if own is not None and own._check_mask.__func__ is not nothing:
            own._check_mask(inputs.here[:, factor.variables], tuple(factor.shape.tolist()))
