r"""The paper's Algorithm 1, with its errata corrected: docs/math.md (34)–(38).

Each factor keeps its own scaled copy $v_f$ of its variables, and solves its own small
problem in closed form; averaging and one multiplier per copy make the copies agree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from factormax.reference.box_row import box_band, box_row
from factormax.reference.or_out import or_out
from factormax.reference.rows import Block, DenseProblem, IntVector, Vector


class AdmmResult(NamedTuple):
    """Where the iteration stopped."""

    mu: Vector
    """(n,): marginals."""
    tau: Vector
    """(m,): multipliers of the rows, as in the compact dual: docs/math.md (38)."""
    iterations: int
    converged: bool


def admm(
    problem: DenseProblem, gamma: float = 1.0, tol: float = 1e-9, max_iter: int = 100_000
) -> AdmmResult:
    r"""Solve LP-SparseMAP by ADMM on scaled copies.

    Args:
        problem: n variables and m rows, with their factors in `problem.blocks`.
        gamma: step size $\gamma > 0$.
        tol: bound on the primal residual $\|\tilde C\mu - v\|_\infty$ and on the dual residual
            $\gamma\|\mu - \mu^{old}\|_\infty$.
        max_iter: the most rounds.

    >>> inf = np.array([np.inf])
    >>> xor = DenseProblem(np.array([0.5, 0.1]), np.ones((1, 2)), np.ones(1), -inf, inf)
    >>> admm(xor).mu.round(6)
    array([0.7, 0.3])
    """
    blocks = problem.blocks or _every_row_a_block(problem)
    links = [np.array(block.links, np.intp) for block in blocks]
    deg = np.zeros(len(problem.eta))
    for var_index in links:
        np.add.at(deg, var_index, 1.0)
    delta = np.sqrt(np.maximum(deg, 1.0))
    alone = np.clip(problem.eta_u, 0.0, 1.0)  # the answer for a variable in no factor

    mu = alone
    tau = np.zeros(len(problem.b))
    lam = [np.zeros(len(var_index)) for var_index in links]
    for iteration in range(1, max_iter + 1):
        mu_old = mu
        # docs/math.md (34): every factor by itself, from scores η̃ that include +λ
        v = []
        for block, var_index, lam_f in zip(blocks, links, lam, strict=True):
            scaled = (problem.eta_u + gamma * mu_old)[var_index] / delta[var_index]
            y = (scaled + lam_f) / (1 + gamma)
            v_f, t_f = _local_solution(problem, block, y, delta[var_index], gamma)
            tau[list(block.rows)] = (1 + gamma) * t_f  # docs/math.md (38)
            v.append(v_f)
        # (35): average the copies, μ = C̃ᵀ v
        mu = np.where(deg > 0, 0.0, alone)
        for var_index, v_f in zip(links, v, strict=True):
            np.add.at(mu, var_index, v_f / delta[var_index])
        # (36): charge for disagreement, λ += γ (C̃ μ − v)
        primal = 0.0
        for var_index, lam_f, v_f in zip(links, lam, v, strict=True):
            gap = mu[var_index] / delta[var_index] - v_f
            lam_f += gamma * gap
            primal = max(primal, float(np.abs(gap).max(initial=0.0)))
        dual = gamma * float(np.abs(mu - mu_old).max(initial=0.0))
        if primal <= tol and dual <= tol:
            return AdmmResult(mu, tau, iteration, True)
    return AdmmResult(mu, tau, max_iter, False)


def _local_solution(
    problem: DenseProblem, block: Block, y: Vector, delta: Vector, gamma: float
) -> tuple[Vector, Vector]:
    r"""The factor's own problem, docs/math.md (37): its copy v, and one multiplier per row."""
    if block.or_out:
        # Into literal space: a negated copy is 1/δ minus itself, docs/math.md (28).
        negated = np.array(block.negated)
        sigma, flip = np.where(negated, -1.0, 1.0), np.where(negated, 1 / delta, 0.0)
        literals, t = or_out(flip + sigma * y, delta)
        return flip + sigma * literals, t

    if len(block.rows) == 2:  # −aᵀμ ≤ −lower, and aᵀμ ≤ upper
        below, above = block.rows
        w = problem.A[above, list(block.links)] * delta
        v, t_band = box_band(y, w, 1 / delta, -float(problem.b[below]), float(problem.b[above]))
        return v, np.array([max(-t_band, 0.0), max(t_band, 0.0)])

    (r,) = block.rows
    var_index = np.array(block.links, np.intp)
    w = problem.A[r, var_index] * delta
    p = r - problem.pair_rows.start
    if p >= 0 and problem.pairs.rewards[p]:
        # The linear part s·ℓ₂ of a pair, docs/math.md (10), stays inside its factor.
        second = var_index == problem.pairs.var[p, 1]
        y = y + second * delta * problem.pairs.sigma[p, 1] * problem.pairs.eta_v[p] / (1 + gamma)
    lo, hi = problem.lo[r] / (1 + gamma), problem.hi[r] / (1 + gamma)
    v, t_row = box_row(y, w, 1 / delta, float(problem.b[r]), float(lo), float(hi))
    return v, np.array([t_row])


def _every_row_a_block(problem: DenseProblem) -> tuple[Block, ...]:
    links: list[IntVector] = [np.flatnonzero(a) for a in problem.A]
    return tuple(Block((r,), tuple(int(j) for j in on)) for r, on in enumerate(links))
