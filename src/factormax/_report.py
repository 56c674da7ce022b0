"""Warnings and errors for instances that were not solved, as `on_failure` says."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax._raw import RawSolution
from factormax.errors import InfeasibleError, NotConvergedError, NotConvergedWarning
from factormax.status import Status

__all__ = ["SURELY_EXACT", "report_backward", "report_failures", "warn_caller"]

#: A relative residual of the backward system that float64 always reaches, and float32 may not.
SURELY_EXACT = 1e-7


def report_failures(
    raw: RawSolution, on_failure: str, solution: Any = None, conflicts: Any = None
) -> None:
    """Raises or warns, as `on_failure` says, if an instance did not converge.

    conflicts: the `Conflicts` of the infeasible instances, for messages; None if unknown.
    """
    if raw.all_converged or on_failure == "ignore":
        return
    failed = raw.status != Status.CONVERGED.code
    codes, counts = np.unique(raw.status[failed], return_counts=True)
    advice = [Status.from_code(int(code)).value for code in codes]
    if conflicts is not None:
        advice[list(codes).index(Status.INFEASIBLE.code)] += conflicts.of_first()
    if on_failure == "warn":
        # Without numbers, so that a training loop is warned once and not at every step.
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


def report_backward(
    residual: npt.NDArray[np.float64], worst: float, dtype: np.dtype[Any], on_failure: str
) -> None:
    """The same for the linear system of the backward pass, by the residual of each instance."""
    limit = SURELY_EXACT if dtype.itemsize == 8 else 1e-3
    if worst <= limit or on_failure == "ignore":  # False if worst is NaN
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


def warn_caller(message: str, category: type[Warning] = NotConvergedWarning) -> None:
    """Warns at the line of the caller's code, whatever frames lie between."""
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if package not in ("factormax", "jax", "torch"):
            break
        frame = frame.f_back
        depth += 1
    warnings.warn(message, category, stacklevel=depth)
