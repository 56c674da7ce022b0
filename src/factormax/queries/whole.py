"""LP-MAP answers made whole: a 0/1 structure even where several tie and the relaxation mixes them.

Only instances whose answer is fractional are solved again, together, with slightly changed scores
that break ties: first with a preference for variables that come first, then with noise. What is
found is rated by the original scores, and accepted if it is as good as the relaxation, up to `tol`.
If nothing is, the relaxation is not tight, and `decode` searches.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from factormax import _engines
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._raw import RawSolution
from factormax.arrays import FloatArray, IndexArray
from factormax.queries.assignment import check_assignment, score_assignment
from factormax.queries.decode import decode, structures_of
from factormax.status import Status

__all__ = ["whole_structures"]

# How much to change the scores, relative to their spread, and whether by noise.
_CHANGES = ((1e-3, False), (1e-3, True), (1e-5, True))
_MOST_NODES = 16  # per instance whose relaxation is not tight


def whole_structures(inputs: Inputs, options: Options, raw: RawSolution) -> RawSolution:
    """The solution, changed in place: a structure for every instance where one is found.

    An instance whose structure is not proved to be the best gets the status NOT_PROVED. If no
    structure is found, it keeps its fractions.
    """
    fractional = ~raw.integral & (raw.status != Status.INFEASIBLE.code)
    if not fractional.any():
        return raw
    left = np.flatnonzero(fractional)
    for share, noise in _CHANGES:
        left = _solve_apart(inputs, options, raw, left, share, noise)
        if not left.size:
            break
    search = replace(options, whole=False, search=(_MOST_NODES, None))
    for i in left:
        found = decode(inputs.instance(int(i)), search, _MOST_NODES, None)
        raw.iterations[i] += found.passes
        raw.oracle_calls[i] += found.calls
        raw.upper_bound[i] = min(raw.upper_bound[i], found.upper_bound)
        if found.assignment is not None and found.features is not None:
            _take(raw, int(i), found.assignment, found.features, found.value)
        raw.status[i] = found.status.code
        raw.dual_residual[i] = max(raw.upper_bound[i] - raw.objective[i], 0.0)
        if found.status is Status.INFEASIBLE:
            raw.mu[i] = raw.mu_v[i] = np.nan
            raw.objective[i] = raw.upper_bound[i] = -np.inf
    if raw.integral.all():
        raw.structures = structures_of(inputs.model, list(raw.mu))
    return raw


def _solve_apart(
    inputs: Inputs,
    options: Options,
    raw: RawSolution,
    index: IndexArray,
    share: float,
    noise: bool,
) -> IndexArray:
    """Solves these instances with slightly changed scores; returns those that are still open."""
    some = inputs.instances(index).wide()
    scores = some.eta_u
    finite = np.where(some.present, scores, np.nan)
    count = np.maximum(np.isfinite(finite).sum(axis=1), 1)
    mean = np.nansum(finite, axis=1) / count
    size = np.sqrt(np.nansum((finite - mean[:, None]) ** 2, axis=1) / count)
    size = np.where(size > 0, size, np.maximum(np.abs(mean), 1e-3))[:, None]
    n = scores.shape[1]
    random = np.random.default_rng(0).random(n)
    # Variables that come first win; where the sums of their places tie, a little noise decides.
    change = random if noise else (np.arange(n)[::-1] + 0.25 * random) / n
    noisy = some.replace(eta_u=scores + share * size * change)
    tight = replace(options, whole=False, tol=min(options.tol, 1e-9), surrogate=None)
    again = _engines.solve(noisy, tight)
    raw.iterations[index] += again.iterations
    raw.oracle_calls[index] += again.oracle_calls
    x = np.where(np.isfinite(again.mu), np.round(again.mu), 0.0)
    checked = check_assignment(some, x)
    values = score_assignment(some, x, checked)
    relaxed = raw.objective[index]
    good = checked.feasible & (values >= relaxed - options.tol * (1 + np.abs(relaxed)))
    good &= raw.status[index] == Status.CONVERGED.code
    for k in np.flatnonzero(good):
        _take(raw, int(index[k]), x[k], checked.features[k], float(values[k]))
    return np.asarray(index[~good])


def _take(raw: RawSolution, i: int, x: FloatArray, features: FloatArray, value: float) -> None:
    raw.mu[i], raw.mu_v[i], raw.objective[i] = x, features, value
    raw.integral[i] = True
    raw.primal_residual[i] = 0
