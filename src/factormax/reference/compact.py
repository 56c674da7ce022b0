r"""The compact dual: one scalar per row, and no copies of the variables.

Minimises $\varphi(\tau)$ of docs/math.md (13) row by row until nothing moves, and lets
Newton's method correct the last digits. Slow and reliable; the core's projected L-BFGS
must find the same point.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from factormax.reference.box_row import box_row
from factormax.reference.rows import DenseProblem, Infeasible, Vector


def marginals(problem: DenseProblem, tau: Vector) -> Vector:
    r"""(n,): $\mu = \mathrm{clip}(\eta' - A^\top\tau, 0, 1)$, docs/math.md (12)."""
    return np.asarray(np.clip(problem.eta - problem.A.T @ tau, 0.0, 1.0))


def dual_value(problem: DenseProblem, tau: Vector) -> float:
    r"""$\varphi(\tau) = \sum_j \kappa(z_j) + b^\top\tau$, docs/math.md (13)."""
    z = problem.eta - problem.A.T @ tau
    mu = np.clip(z, 0.0, 1.0)
    return float(z @ mu - 0.5 * mu @ mu + problem.b @ tau)


def dual_gradient(problem: DenseProblem, tau: Vector) -> Vector:
    r"""(m,): $\nabla\varphi = b - A\mu$, docs/math.md (14)."""
    return problem.b - problem.A @ marginals(problem, tau)


def projected_gradient(problem: DenseProblem, tau: Vector) -> Vector:
    """(m,): how far a unit gradient step goes within the bounds, docs/math.md (15).

    It is 0 exactly at a solution; for a hard row it is at most the violation of the row.
    """
    step = np.clip(tau - dual_gradient(problem, tau), problem.lo, problem.hi)
    return np.asarray(tau - step)


def pair_values(problem: DenseProblem, mu: Vector) -> Vector:
    """(P,): the marginal of "both on" for each pair, docs/math.md (9); 0 if absent."""
    first, second = problem.pairs.literals(mu).T
    value = np.where(
        problem.pairs.rewards, np.minimum(first, second), np.maximum(0.0, first + second - 1)
    )
    return np.asarray(value * problem.pairs.present)


def objective(problem: DenseProblem, mu: Vector) -> float:
    r"""The value $\langle\eta,\mu\rangle + \langle s,\beta\rangle - \tfrac12\|\mu\|^2$: (16)."""
    earned = problem.pairs.eta_v @ pair_values(problem, mu)
    return float(problem.eta_u @ mu + earned - 0.5 * mu @ mu)


def farkas(problem: DenseProblem, tau: Vector) -> float:
    r"""Negative only if no point satisfies the hard rows: docs/math.md (23).

    Every $\mu$ that does has $\tau^\top A\mu \le \tau^\top b$, but the left side is never
    below its minimum over the box. Soft rows guarantee nothing, and are left out.
    """
    tau = np.where(np.isfinite(problem.hi), 0.0, tau)
    return float(problem.b @ tau + np.maximum(0.0, -(problem.A.T @ tau)).sum())


def solve(
    problem: DenseProblem, tol: float = 1e-13, max_sweeps: int = 100_000
) -> tuple[Vector, Vector]:
    """Solve LP-SparseMAP: docs/math.md (6), through its dual (13).

    Args:
        problem: n variables and m rows.
        tol: largest projected gradient (15) accepted; never below what rounding allows.
        max_sweeps: the most sweeps over the rows.

    Returns:
        (mu, tau): marginals (n,) and multipliers (m,).

    Raises:
        Infeasible: the rows contradict each other; it holds multipliers that prove it.
        RuntimeError: `max_sweeps` were not enough.

    >>> inf = np.array([np.inf])
    >>> xor = DenseProblem(np.array([0.5, 0.1]), np.ones((1, 2)), np.ones(1), -inf, inf)
    >>> mu, tau = solve(xor)
    >>> mu.round(12), tau.round(12)
    (array([0.7, 0.3]), array([-0.2]))
    """
    largest = float(np.abs(problem.eta).max(initial=1.0))
    row_norm = float(np.abs(problem.A).sum(axis=1).max(initial=1.0))
    tol = max(tol, 8 * float(np.finfo(np.float64).eps) * largest * row_norm)
    tau = np.clip(0.0, problem.lo, problem.hi)
    if largest > 10:
        # The multipliers are far away: start from those for a tenth of the scores, recursively.
        tenth = replace(
            problem,
            eta=problem.eta / 10,
            hi=problem.hi / 10,
            pairs=replace(problem.pairs, eta_v=problem.pairs.eta_v / 10),
        )
        tau = 10 * solve(tenth, tol, max_sweeps)[1]
    next_try = 1

    for sweep in range(1, max_sweeps + 1):
        tau = _one_sweep(problem, tau, tol)
        if np.abs(projected_gradient(problem, tau)).max(initial=0.0) <= tol:
            return marginals(problem, tau), tau
        if farkas(problem, tau) < -1e-9 * (1.0 + np.abs(tau).sum()):
            raise Infeasible("solve: the hard rows contradict each other.", tau)
        if sweep >= next_try:
            finished = _newton_finish(problem, tau, tol)
            if finished is not None:
                return marginals(problem, finished), finished
            next_try = 2 * sweep
    raise RuntimeError(f"solve: not converged after {max_sweeps} sweeps; try more.")


def _one_sweep(problem: DenseProblem, tau: Vector, tol: float) -> Vector:
    """Minimise φ exactly over each multiplier in turn, with one `box_row` each.

    A row that is already optimal is left alone, so that every move is a descent.
    """
    tau = tau.copy()
    z = problem.eta - problem.A.T @ tau
    for r in range(len(tau)):
        a, b, lo, hi = problem.A[r], problem.b[r], problem.lo[r], problem.hi[r]
        gradient = b - a @ np.clip(z, 0.0, 1.0)
        if abs(tau[r] - np.clip(tau[r] - gradient, lo, hi)) <= 0.1 * tol:
            continue
        on = a != 0
        _, t = box_row((z + a * tau[r])[on], a[on], np.ones(on.sum()), b, lo, hi)
        z += a * (tau[r] - t)
        tau[r] = t
    return tau


def _newton_finish(
    problem: DenseProblem, tau: Vector, tol: float, steps: int = 20
) -> Vector | None:
    r"""Newton's method on the rows that seem to bind: docs/math.md (21).

    $\varphi$ is quadratic around a solution, so once the binding rows $I$ and the free
    variables $J$ are right, one step lands on it. If they are wrong, it fails, harmlessly.
    """
    for _ in range(steps):
        step = tau - dual_gradient(problem, tau)
        binding = (problem.lo < step) & (step < problem.hi)
        tau = np.where(binding, tau, np.clip(step, problem.lo, problem.hi))

        z = problem.eta - problem.A.T @ tau
        gradient = problem.b - problem.A @ np.clip(z, 0.0, 1.0)
        free = (z > 0) & (z < 1)
        A_free = problem.A[np.ix_(binding, free)]
        newton = np.linalg.lstsq(A_free @ A_free.T, -gradient[binding], rcond=1e-12)[0]
        if (np.abs(newton) > 10 * (1 + np.abs(tau).max(initial=0.0))).any():
            return None  # a singular system: the step is meaningless

        tau[binding] += newton
        tau = np.clip(tau, problem.lo, problem.hi)
        if np.abs(projected_gradient(problem, tau)).max(initial=0.0) <= tol:
            return tau
    return None
