r"""Gradients of LP-SparseMAP, exactly, from the solution alone.

Near a generic point the solution moves inside one face of the feasible set, so its
Jacobian is the orthogonal projector onto the directions of that face: docs/math.md
(39)–(41). The rest is the chain rule: (43) for pair scores, (44) for pair values, (45)
for the objective.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from factormax.reference.box_row import MARGIN
from factormax.reference.compact import marginals, pair_values
from factormax.reference.rows import BoolVector, DenseProblem, Matrix, Vector


class Face(NamedTuple):
    """What stays fixed when the scores move a little."""

    free: BoolVector
    """(n,): the variables strictly between 0 and 1."""
    tight: BoolVector
    """(m,): the rows that hold with equality."""


class Gradients(NamedTuple):
    """Gradients with respect to what the user gave."""

    eta_u: Vector
    """(n,): of the scores."""
    eta_v: Vector
    """(P,): of the pair scores."""


def face(problem: DenseProblem, tau: Vector, margin: float = MARGIN) -> Face:
    r"""Which variables are free and which rows are tight: docs/math.md (40).

    In doubt, a variable is clipped and a row is tight. Wherever the solution is
    differentiable this gives its derivative, even at 0/1 solutions, where the multipliers
    are not unique and may put $z_j$ exactly on the edge of the box.
    """
    margin = margin + 16 * float(np.finfo(np.float64).eps * np.abs(problem.eta).max(initial=0.0))
    z = problem.eta - problem.A.T @ tau
    slack = problem.A @ np.clip(z, 0.0, 1.0) - problem.b
    inside = (problem.lo + margin < tau) & (tau < problem.hi - margin)
    return Face(
        free=(z > margin) & (z < 1 - margin),
        tight=(problem.lo < problem.hi) & (inside | (np.abs(slack) <= margin)),
    )


def jacobian(problem: DenseProblem, tau: Vector, margin: float = MARGIN) -> Matrix:
    r"""(n, n): $\partial\mu/\partial\eta$, the projector of docs/math.md (41).

    $$P = J - J A_I^\top (A_I J A_I^\top)^+ A_I J, \qquad J = \mathrm{diag}(\text{free})$$
    """
    free, tight = face(problem, tau, margin)
    A_free = problem.A[tight] * free
    return np.asarray(np.diag(free.astype(np.float64)) - np.linalg.pinv(A_free, 1e-10) @ A_free)


def vjp(
    problem: DenseProblem,
    tau: Vector,
    grad_mu: Vector,
    grad_mu_v: Vector | None = None,
    grad_objective: float = 0.0,
    margin: float = MARGIN,
) -> Gradients:
    r"""Pull gradients of the solution back to the scores.

    Args:
        problem: what was solved.
        tau: (m,) the multipliers of its solution.
        grad_mu: (n,) gradient of the loss with respect to the marginals.
        grad_mu_v: (P,) with respect to the pair values, or None.
        grad_objective: with respect to the objective.
        margin: see `face`.

    >>> inf = np.array([np.inf])
    >>> xor = DenseProblem(np.array([0.5, 0.1]), np.ones((1, 2)), np.ones(1), -inf, inf)
    >>> vjp(xor, np.array([-0.2]), grad_mu=np.array([1.0, 0.0])).eta_u.round(12)
    array([ 0.5, -0.5])
    """
    mu = marginals(problem, tau)
    pair_jacobian = _pair_jacobian(problem, mu)

    # docs/math.md (44): the pair values are functions of the marginals.
    d = grad_mu if grad_mu_v is None else grad_mu + pair_jacobian.T @ grad_mu_v
    # (42): the small system.
    y = jacobian(problem, tau, margin) @ d
    # (43): a pair score moves the scores along the gradient of its value, so it receives y there.
    # (45): the objective, by the envelope theorem.
    return Gradients(
        eta_u=y + grad_objective * mu,
        eta_v=pair_jacobian @ y + grad_objective * pair_values(problem, mu),
    )


def _pair_jacobian(problem: DenseProblem, mu: Vector) -> Matrix:
    r"""(P, n): $\partial\beta_p/\partial\mu$, docs/math.md (44).

    At a tie, where the row of the pair is tight, both choices agree on every direction
    that the face allows.
    """
    pairs = problem.pairs
    first, second = pairs.literals(mu).T
    takes_first = np.where(pairs.rewards, first < second, first + second > 1)
    takes_second = np.where(pairs.rewards, first >= second, first + second > 1)
    out = np.zeros((len(pairs), len(mu)))
    for p in np.flatnonzero(pairs.present):
        chosen = np.array([takes_first[p], takes_second[p]])
        np.add.at(out[p], pairs.var[p], pairs.sigma[p] * chosen)
    return out
