"""Queries as functions of their numbers, independent of any front, and their backward passes."""

from __future__ import annotations

import numpy as np

from factormax import _engines
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._raw import RawSolution
from factormax._report import report_failures
from factormax.arrays import FloatArray
from factormax.queries.decode import decode, decoded_solution
from factormax.queries.whole import whole_structures
from factormax.status import Status

__all__ = ["answer", "pull_back_linear", "with_objective"]


def answer(inputs: Inputs, options: Options, warm: FloatArray | None = None) -> RawSolution:
    """The answer to `solve`, `solve_map` or `decode`, depending on the options."""
    if options.search is not None:
        here = inputs.replace(device="cpu")
        found = [decode(here.instance(i), options, *options.search) for i in range(here.batch)]
        raw = decoded_solution(here, found)
        if inputs.device != "cpu":
            raw.engine = "cpu (exact decoding has no kernel)"
        return raw
    raw = _engines.solve(inputs, options, warm)
    return whole_structures(inputs, options, raw) if options.whole else raw


def with_objective(
    raw: RawSolution, grad_u: FloatArray, grad_v: FloatArray, weight: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Adds the objective's gradient (by Danskin, the solution itself) times `weight`, `(B,)`."""
    solved = raw.status != Status.INFEASIBLE.code
    scale = np.where(solved, weight, 0).astype(raw.mu.dtype)[:, None]
    grad_u += np.where(solved[:, None], raw.mu, 0) * scale
    grad_v += np.where(solved[:, None], raw.mu_v, 0) * scale
    return grad_u, grad_v


def pull_back_linear(
    inputs: Inputs,
    raw: RawSolution,
    options: Options,
    grad_mu: FloatArray,
    grad_mu_v: FloatArray | None,
    weight: FloatArray | None,
) -> tuple[FloatArray, FloatArray]:
    """The gradient of a linear program's answer, which is piecewise constant: 0 or a surrogate.

    The gradient of the optimal value is the answer itself; `weight`, `(B,)`, multiplies it.
    """
    dtype = raw.mu.dtype
    grad_u, grad_v = np.zeros_like(raw.mu), np.zeros_like(raw.mu_v)
    solved = np.isfinite(raw.objective)[:, None]
    mu, mu_v = np.where(solved, raw.mu, 0), np.where(solved, raw.mu_v, 0)
    here = inputs.present & solved
    if options.surrogate == "straight-through":
        grad_u = np.where(here, grad_mu, 0).astype(dtype)
        if grad_mu_v is not None:
            grad_v = np.where(solved, grad_mu_v, 0).astype(dtype)
    elif options.surrogate == "spigot":
        # mu minus the projection of (mu - grad) onto the polytope, which is an LP-SparseMAP.
        moved = np.where(here, mu - grad_mu, 0).astype(dtype)
        allowed = inputs.map_factor_scores(_only_forbidden)
        asked = inputs.replace(eta_u=moved, eta_v=allowed, mask=here)
        projected = _engines.solve(asked, Options())
        report_failures(projected, options.on_failure)
        grad_u = np.where(here, mu - projected.mu, 0).astype(dtype)
    if weight is not None:
        grad_u = grad_u + mu * weight[:, None]
        grad_v = grad_v + mu_v * weight[:, None]
    return grad_u.astype(dtype), grad_v.astype(dtype)


def _only_forbidden(scores: FloatArray) -> FloatArray:
    """Scores that forbid what the given ones forbid, and are 0 elsewhere."""
    return np.where(scores == -np.inf, scores, 0)
