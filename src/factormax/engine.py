"""The one place that calls the native core: flat NumPy arrays in, flat NumPy arrays out.

Both fronts end here. What the backward pass needs is in the arrays of `RawSolution`; there is no
solver object to keep alive.
"""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from factormax import _core as _typed_core
from factormax.arrays import FloatArray, grad_mode_keeper
from factormax.checks import all_finite
from factormax.compiled import Wiring, compile_wiring
from factormax.errors import GraphError, InfeasibleError, NotConvergedError, NotConvergedWarning
from factormax.rendezvous import Rendezvous
from factormax.status import Status
from factormax.structures import FoundStructures

__all__ = [
    "METHODS",
    "Numbers",
    "Options",
    "Proof",
    "RawSolution",
    "one_instance",
    "report_failures",
    "solve",
    "vjp",
    "warn_caller",
    "working_memory",
]

METHODS = {"admm": 1, "auto": 0}
MAP_METHODS = {"ad3": 3, "auto": 2}
_core: Any = _typed_core  # its overloads are chosen by dtype, at run time
ABSENT_SIDE = 2  # Side::absent of the core
#: Whether trees and matchings are solved by rows, and sequences by flows (ByRows of the core):
#: where it is faster. LISTED: the structures are asked for.
NEVER, WHERE_DENSE, ALWAYS, LISTED = range(4)
BY_ROWS = WHERE_DENSE


@dataclass(frozen=True)
class Options:
    """How to solve; the arguments of `FactorGraph.solve`."""

    method: str = "auto"
    tol: float = 1e-6
    max_iter: int = 1000
    max_inner_iter: int = 100_000
    step_size: float = 1.0
    on_failure: str = "warn"
    linear: bool = False  # LP-MAP
    surrogate: str | None = None  # the gradient of an LP-MAP answer
    whole: bool = False  # LP-MAP: a 0/1 structure also at ties
    search: tuple[int, float | None] | None = None  # exact decoding: most nodes, seconds
    deadline: float | None = None  # of time.monotonic: no pass of LP-MAP begins after it
    list_structures: bool = False  # for marginals can be found without them

    @property
    def query(self) -> Literal["solve", "solve_map", "decode"]:
        """Which method of `FactorGraph` asks."""
        if self.search is not None:
            return "decode"
        return "solve_map" if self.linear else "solve"


@dataclass(eq=False)
class Numbers:
    """The numbers of a batch of instances of one wiring."""

    eta_u: FloatArray  # (B, n) float32 or float64
    eta_v: FloatArray  # (B, P + scores of the structured factors)
    params: FloatArray  # flat float64
    mask: npt.NDArray[np.bool_] | None  # (B, n)
    oracles: tuple[Any, ...] = ()  # the structured factors that are the user's own; None: built in


@dataclass(frozen=True)
class Proof:
    """Why an instance is infeasible."""

    multipliers: FloatArray  # (R + P + links,) the certificate, docs/math.md (23)
    impossible: tuple[int, ...] = ()  # structured factors that have no structure at all


@dataclass(eq=False)
class RawSolution:
    """What the core answers. The sides, `structures` and `mask` serve the backward pass."""

    mu: FloatArray  # (B, n)
    mu_v: FloatArray  # (B, P + scores of the structured factors)
    tau: FloatArray  # (B, R + P + links)
    var_side: npt.NDArray[np.int8]  # (B, n)
    row_side: npt.NDArray[np.int8]  # (B, R + P + links)
    objective: npt.NDArray[np.float64]  # (B,)
    primal_residual: npt.NDArray[np.float64]
    dual_residual: npt.NDArray[np.float64]
    iterations: npt.NDArray[np.int32]
    status: npt.NDArray[np.int32]
    oracle_calls: npt.NDArray[np.int32]
    upper_bound: npt.NDArray[np.float64]  # of linear programs
    integral: npt.NDArray[np.bool_]
    structures: FoundStructures = field(default_factory=FoundStructures.none)
    nodes: npt.NDArray[np.int64] | None = None  # of exact decoding
    mask: npt.NDArray[np.bool_] | None = None  # (B, n) the variables that are there; None: all
    proofs: dict[int, Proof] = field(default_factory=dict)  # of instances that are infeasible

    @classmethod
    def empty(cls, batch: int, n: int, scores: int, dual: int, dtype: Any) -> RawSolution:
        """To be filled by the core."""
        objective, primal_residual, dual_residual, upper_bound = np.empty((4, batch))
        upper_bound.fill(np.inf)
        iterations, status, oracle_calls = np.empty((3, batch), np.int32)
        return cls(
            mu=np.empty((batch, n), dtype),
            mu_v=np.empty((batch, scores), dtype),
            tau=np.empty((batch, dual), dtype),
            var_side=np.empty((batch, n), np.int8),
            row_side=np.empty((batch, dual), np.int8),
            objective=objective,
            primal_residual=primal_residual,
            dual_residual=dual_residual,
            iterations=iterations,
            status=status,
            oracle_calls=oracle_calls,
            upper_bound=upper_bound,
            integral=np.zeros(batch, np.bool_),
        )

    def outputs(self) -> list[npt.NDArray[Any]]:
        """The arrays that the core fills, in its order."""
        return [getattr(self, name) for name in _FILLED] + [self.integral.view(np.uint8)]

    @classmethod
    def joined(cls, parts: list[RawSolution]) -> RawSolution:
        """Of a batch whose instances were solved apart."""
        names = (*_FILLED, "integral")
        arrays: Any = {name: np.concatenate([getattr(p, name) for p in parts]) for name in names}
        masks: Any = [p.mask for p in parts]
        starts = np.cumsum([0, *[len(p.status) for p in parts]])
        return cls(
            **arrays,
            proofs={
                int(start) + i: proof
                for start, p in zip(starts, parts, strict=False)
                for i, proof in p.proofs.items()
            },
            structures=FoundStructures.joined([p.structures for p in parts]),
            mask=None if masks[0] is None else np.concatenate(masks),
        )

    @classmethod
    def for_vjp(
        cls,
        mu: FloatArray,
        mu_v: FloatArray,
        var_side: npt.NDArray[np.int8],
        row_side: npt.NDArray[np.int8],
        status: npt.NDArray[np.int32],
    ) -> RawSolution:
        """Only what `vjp` looks at."""
        none: Any = np.zeros(0)
        raw = cls(
            mu, mu_v, none, var_side, row_side, none, none, none, none, status, none, none, none
        )
        if var_side.max(initial=0) == ABSENT_SIDE:  # the largest
            raw.mask = var_side != ABSENT_SIDE
        return raw


#: The arrays of a `RawSolution` that the core fills, in its order; `integral`, as bytes, is last.
_FILLED = (
    "mu",
    "mu_v",
    "tau",
    "var_side",
    "row_side",
    "objective",
    "primal_residual",
    "dual_residual",
    "iterations",
    "status",
    "oracle_calls",
    "upper_bound",
)


def _structure(
    wiring: Wiring,
    eta_u: FloatArray,
    eta_v: FloatArray,
    params: FloatArray,
    mask: npt.NDArray[np.bool_] | None,
) -> tuple[Any, ...]:
    """The leading arguments of every function of the core."""
    graph = compile_wiring(wiring)
    if mask is not None:
        mask = np.ascontiguousarray(mask)
    lowered = graph.lower(params, eta_u.shape[0], eta_u.dtype)
    return (
        graph.core,
        lowered.coef,
        lowered.rhs,
        graph.oracle_params(params, mask, eta_u.shape[0]),
        None if mask is None else mask.view(np.uint8),
        np.ascontiguousarray(eta_u),
        np.ascontiguousarray(eta_v),
    )


def solve(
    wiring: Wiring, numbers: Numbers, options: Options, warm: FloatArray | None = None
) -> RawSolution:
    """Solves a batch. The scores hold no NaN and no +inf where the mask is set."""
    if warm is not None and not all_finite(warm):
        raise ValueError(
            "warm_start: the multipliers of the earlier solution hold NaN or an infinity. Start "
            "from a solution that converged, or without one."
        )
    mask = numbers.mask
    if not all_finite(numbers.eta_u):  # -inf switches the variable off, like a mask
        here = numbers.eta_u != -np.inf
        mask = here if mask is None else mask & here
    if mask is not None and mask.all():  # then the core lays the rows out once
        mask = None
    if len(numbers.eta_u) > 1 and any(hasattr(o, "map_batch") for o in numbers.oracles):
        return _solve_together(wiring, replace(numbers, mask=mask), options, warm)
    callbacks = _callbacks(numbers) if numbers.oracles else None
    return _solve_with(wiring, numbers, mask, options, warm, callbacks)


def _callbacks(numbers: Numbers) -> list[Any]:
    """What the core calls for each structured factor that is the user's own, None for the others.

    Python functions run in the grad mode of the caller: other threads have one of their own.
    """
    keep = grad_mode_keeper()
    given = [None if o is None else o.callback() for o in numbers.oracles]
    return [keep(c) if callable(c) else c for c in given]


def _solve_with(
    wiring: Wiring,
    numbers: Numbers,
    mask: npt.NDArray[np.bool_] | None,
    options: Options,
    warm: FloatArray | None,
    callbacks: list[Any] | None,
) -> RawSolution:
    if options.linear and numbers.eta_u.dtype == np.float32:
        # What the multipliers resolve in float32 is not enough to close the gap to the bound.
        wide = replace(
            numbers, eta_u=numbers.eta_u.astype(np.float64), eta_v=numbers.eta_v.astype(np.float64)
        )
        raw = _solve_with(wiring, wide, mask, options, warm, callbacks)
        narrow = {name: getattr(raw, name).astype(np.float32) for name in ("mu", "mu_v", "tau")}
        return replace(raw, **narrow)
    graph = compile_wiring(wiring)
    batch, n = numbers.eta_u.shape
    dtype = numbers.eta_u.dtype
    raw = RawSolution.empty(batch, n, graph.num_scores, graph.num_dual, dtype)
    raw.mask = mask
    if batch == 0:
        return raw
    structure = _structure(wiring, numbers.eta_u, numbers.eta_v, numbers.params, mask)
    fault = np.zeros(2, np.int32)  # the structured factor whose oracle is wrong, and how
    found = _core.solve(
        *structure,
        None if warm is None else np.ascontiguousarray(warm, dtype),
        callbacks,
        fault,
        (MAP_METHODS if options.linear else METHODS)[options.method],
        options.tol,
        options.max_iter,
        options.max_inner_iter,
        options.step_size,
        _by_rows(options),
        np.inf if options.deadline is None else max(options.deadline - time.monotonic(), 0.0),
        *raw.outputs(),
    )
    if fault[1]:
        factor = numbers.oracles[fault[0]]
        raise GraphError(f"{factor.name}: {_FAULTS[int(fault[1])]}")
    if found is not None:
        raw.structures = FoundStructures(*found)
    _take_proofs(raw)
    return raw


def _take_proofs(raw: RawSolution) -> None:
    """The core hands the certificate of an infeasible instance out in place of its multipliers."""
    if not np.count_nonzero(raw.status):  # all converged
        return
    for i in np.flatnonzero(raw.status == Status.INFEASIBLE.code):
        cuts = raw.structures.num_cuts.reshape(len(raw.status), -1)[i]
        impossible = tuple(int(s) for s in np.flatnonzero(cuts == _NO_STRUCTURE))
        raw.proofs[int(i)] = Proof(raw.tau[i].copy(), impossible)
        raw.tau[i] = 0


_NO_STRUCTURE = -2  # in place of the number of cuts


def _by_rows(options: Options) -> int:
    """ByRows of the core. A limit on the oracle's calls asks for the oracle."""
    limited = options.max_inner_iter < Options.max_inner_iter
    if limited or BY_ROWS == NEVER:
        return NEVER
    return LISTED if options.list_structures else BY_ROWS


# CallbackFault of the core
_FAULTS = {
    1: "native_map reported a failure.",
    2: "native_map returned an assignment that is not made of 0 and 1.",
    3: "native_map switched on a variable that is masked (its score is -inf).",
    4: "native_map returned a feature that is not finite.",
}


def _solve_together(
    wiring: Wiring, numbers: Numbers, options: Options, warm: FloatArray | None
) -> RawSolution:
    """Solves the instances side by side, so that `map_batch` sees their scores at once."""

    def solve_one(i: int, rendezvous: Rendezvous) -> RawSolution:
        one = one_instance(wiring, numbers, i)
        callbacks = [
            rendezvous.callback(o) if hasattr(o, "map_batch") else own
            for o, own in zip(numbers.oracles, alone, strict=True)
        ]
        start = None if warm is None else warm[i : i + 1]
        return _solve_with(compiled_for_one, one, one.mask, options, start, callbacks)

    batch, alone = len(numbers.eta_u), _callbacks(numbers)
    # Parameters of an instance alone are shared ones.
    compiled_for_one = wiring.for_one_instance()
    return RawSolution.joined(Rendezvous.run(batch, solve_one))


def one_instance(wiring: Wiring, numbers: Numbers, i: int) -> Numbers:
    """The numbers of one instance of a batch, for `wiring.for_one_instance()`."""
    here = slice(i, i + 1)
    batch = len(numbers.eta_u)
    return replace(
        numbers,
        eta_u=numbers.eta_u[here],
        eta_v=numbers.eta_v[here],
        mask=None if numbers.mask is None else numbers.mask[here],
        params=compile_wiring(wiring).params_of_instances(numbers.params, [i], batch),
    )


def working_memory(wiring: Wiring, numbers: Numbers, method: str = "auto") -> int:
    """The bytes that each thread works in, besides the inputs and outputs."""
    structure = _structure(wiring, numbers.eta_u, numbers.eta_v, numbers.params, numbers.mask)
    return int(_core.workspace_bytes(*structure, METHODS[method]))


def vjp(
    wiring: Wiring,
    eta_v: FloatArray,
    params: FloatArray,
    raw: RawSolution,
    grad_mu: FloatArray | None,
    grad_mu_v: FloatArray | None,
    grad_objective: FloatArray | None,
    on_failure: str,
    grad_prob: npt.NDArray[np.float64] | None = None,
) -> tuple[FloatArray, FloatArray]:
    """The gradients of `(mu, mu_v, objective)` with respect to `(eta_u, eta_v)`; None is 0.

    grad_prob: of the probabilities of the structures, in the core's order.
    """
    batch, n = raw.mu.shape
    dtype = raw.mu.dtype
    grad_eta_u = np.empty((batch, n), dtype)
    grad_eta_v = np.empty((batch, raw.mu_v.shape[1]), dtype)
    if batch > 0:
        residual = np.empty(batch)
        worst = _core.vjp(
            # The scores themselves are not needed: their place is taken by mu.
            *_structure(wiring, raw.mu, eta_v, params, raw.mask),
            _dense(grad_mu, raw.mu),
            _dense(grad_mu_v, raw.mu_v),
            raw.var_side,
            raw.row_side,
            raw.status,
            *raw.structures.__dict__.values(),
            grad_prob,
            grad_eta_u,
            grad_eta_v,
            residual,
        )
        limit = 1e-7 if dtype == np.float64 else 1e-3
        if not worst <= limit:  # NaN counts
            _report_backward(residual, limit, on_failure)
    if grad_objective is not None:
        # Danskin: the gradient of the optimal value is the solution itself.
        solved = raw.status != Status.INFEASIBLE.code
        weight = np.where(solved, grad_objective, 0).astype(dtype)[:, None]
        grad_eta_u += np.where(solved[:, None], raw.mu, 0) * weight
        grad_eta_v += np.where(solved[:, None], raw.mu_v, 0) * weight
    return grad_eta_u, grad_eta_v


def _dense(grad: FloatArray | None, like: FloatArray) -> FloatArray:
    if grad is None:
        return np.zeros_like(like) if like.size else like
    return np.ascontiguousarray(grad, like.dtype)


def _report_backward(residual: npt.NDArray[np.float64], limit: float, on_failure: str) -> None:
    if on_failure == "ignore":
        return
    failed = ~(residual <= limit)
    message = (
        f"The backward system of {int(failed.sum())} of {failed.size} instances was solved only to "
        f"a relative residual of {residual.max():.1e}: their gradients are inexact. Scores in "
        f"float64 or smaller scores help."
    )
    if on_failure == "raise":
        raise NotConvergedError(message)
    warn_caller(message)


def report_failures(
    raw: RawSolution, on_failure: str, solution: Any = None, conflicts: Any = None
) -> None:
    """Raises or warns, as asked, if an instance did not converge.

    conflicts: the `Conflicts` of the infeasible instances, for messages to name; None: unknown.
    """
    if on_failure == "ignore" or not np.count_nonzero(raw.status):  # CONVERGED is 0
        return
    failed = raw.status != Status.CONVERGED.code
    codes, counts = np.unique(raw.status[failed], return_counts=True)
    advice = [Status.from_code(int(code)).value for code in codes]
    if conflicts is not None:
        advice[list(codes).index(Status.INFEASIBLE.code)] += conflicts.of_first()
    if on_failure == "warn":
        # Without numbers, so that a training loop is told once and not at every step.
        who = "" if failed.size == 1 else "Some instances were not solved (see solution.status). "
        warn_caller(who + " ".join(advice))
        return
    parts = [
        text if failed.size == 1 else f"{count} of {failed.size} instances: {text}"
        for text, count in zip(advice, counts, strict=True)
    ]
    worst = np.max(np.maximum(raw.primal_residual, raw.dual_residual)[failed])
    error = InfeasibleError if Status.INFEASIBLE.code in codes else NotConvergedError
    raise error(f"{' '.join(parts)} (largest residual {worst:.1e})", solution)


def warn_caller(message: str, category: type[Warning] = NotConvergedWarning) -> None:
    """Warns at the line of the caller's code, whatever lies between."""
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if package not in ("factormax", "torch"):
            break
        frame = frame.f_back
        depth += 1
    warnings.warn(message, category, stacklevel=depth)
