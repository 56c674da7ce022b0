r"""SparseMAP of one structured factor, by the active-set method over all its structures.

The core's version asks a MAP oracle for the next structure; this one searches the columns
of `structures`. Otherwise it is the same method, with dense solves where the core updates
a factorisation.
"""

from __future__ import annotations

import numpy as np

from factormax.reference.rows import Matrix, Vector
from factormax.reference.structures import column_scores

TIE = 1e-9
"""Structures whose reduced scores are this close, relative to the scores, tie."""


def sparsemap(
    M: Matrix,
    N: Matrix,
    x: Vector,
    eta_v: Vector,
    w: Vector | None = None,
    tol: float = 1e-13,
) -> tuple[Vector, Vector, Vector]:
    r"""Solve SparseMAP over the columns of $M$ and $N$.

    $$\max_{p \in \triangle}\ x^\top Mp + \eta_v^\top Np - \tfrac12 \sum_j w_j (Mp)_j^2$$

    With $A = \mathrm{diag}(\sqrt w) M$ and scores $c = M^\top x + N^\top\eta_v$, a column
    improves $p$ exactly if its reduced score $r = c - A^\top A p$ exceeds that of the
    support, $\tau$. So: solve on the support as if $p$ had no bounds; walk there, and drop
    the first column that reaches 0; at the solution, add the best column. The columns of
    the support stay affinely independent, hence every system has one solution.

    Args:
        M: (d, K) structures.
        N: (s, K) their features.
        x: (d,) scores of the variables; −inf forbids the structures that use one.
        eta_v: (s,) scores of the features; likewise.
        w: (d,) weights of the squares, at least 0; all 1 by default.
        tol: largest $\max_k r_k - \tau$ accepted, relative to the largest score if that is
            above 1.

    Returns:
        (p, mu, mu_v): probabilities (K,), marginals $Mp$ (d,) and $Np$ (s,).

    Raises:
        ValueError: every structure is forbidden, or there is none.
        RuntimeError: rounding errors kept the method from ending.

    >>> p, mu, _ = sparsemap(np.eye(2), np.zeros((0, 2)), np.array([0.5, 0.1]), np.zeros(0))
    >>> mu.round(12)
    array([0.7, 0.3])
    """
    A, c = _weighted(M, w), column_scores(M, N, x, eta_v)
    finite = np.isfinite(c)
    if not finite.any():
        raise ValueError("sparsemap: no structure is allowed: each uses a score of −inf.")
    tol *= max(1.0, float(np.abs(c[finite]).max()))

    support = [int(np.argmax(c - 0.5 * (A * A).sum(axis=0)))]  # the best single column
    p = np.ones(1)  # on the support
    entered = -1  # the column added last, until p moves
    for _ in range(100 + 20 * len(c)):
        # Solve on the support, and walk there as far as p >= 0.
        target = _affine_solution(A[:, support], c[support])
        falling = target <= 0
        if falling.any():
            ratio = np.full(len(p), np.inf)
            ratio[falling] = 0.0  # a column may be at 0 already, if two arrived at once
            moving = falling & (p > 0)
            ratio[moving] = p[moving] / (p[moving] - target[moving])
            first = int(np.argmin(ratio))
            dropped = support.pop(first)
            p = np.delete(np.maximum(0.0, p + ratio[first] * (target - p)), first)
            if dropped == entered and ratio[first] == 0:  # its gain was a rounding error
                return _result(M, N, support, p)
            entered = entered if ratio[first] == 0 else -1
            continue
        p = target

        # Add the best column.
        r = c - A.T @ (A[:, support] @ p)
        tau = float(r[support] @ p)
        k = int(np.argmax(r))
        if r[k] <= tau + tol or k in support:
            return _result(M, N, support, p)
        combination = _affine_combination(A[:, support], A[:, k])
        if combination is None:
            support.append(k)
            p = np.append(p, 0.0)
            entered = k
            continue
        # A_k is among the affine combinations of the support: exchanging leaves A p as it is and
        # earns r_k − tau for each unit moved. One column leaves: the first to reach 0.
        ratio = np.full(len(p), np.inf)
        leaving = combination > 1e-12
        ratio[leaving] = p[leaving] / combination[leaving]
        first = int(np.argmin(ratio))
        p = np.maximum(0.0, p - ratio[first] * combination)
        p[first], support[first], entered = ratio[first], k, -1
    raise RuntimeError("sparsemap: rounding errors kept the active set from settling.")


def sparsemap_vjp(
    M: Matrix,
    N: Matrix,
    p: Vector,
    x: Vector,
    eta_v: Vector,
    w: Vector | None,
    grad_mu: Vector,
    grad_mu_v: Vector,
    grad_p: Vector | None = None,
) -> tuple[Vector, Vector]:
    r"""Pull gradients back through `sparsemap`.

    Around a solution $p$ moves within its face, the structures whose reduced score is the
    best: $dp = Q\,(M^\top dx + N^\top d\eta_v)$ with

    $$Q = Z - \frac{Z 1 1^\top Z}{1^\top Z 1},\qquad Z = (A^\top A + 1 1^\top)^{-1}$$

    over as many columns of the face as are affinely independent, those of the support first.

    Args:
        M: (d, K) structures.
        N: (s, K) their features.
        p: (K,) the solution.
        x: (d,) scores of the variables.
        eta_v: (s,) scores of the features.
        w: (d,) weights, or None for 1.
        grad_mu: (d,) gradient of $Mp$.
        grad_mu_v: (s,) gradient of $Np$.
        grad_p: (K,) gradient of $p$ itself, if any.

    Returns:
        (grad_x, grad_eta_v): (d,) and (s,).
    """
    A, c = _weighted(M, w), column_scores(M, N, x, eta_v)
    r = c - A.T @ (A @ p)
    tie = TIE * max(1.0, float(np.abs(c[np.isfinite(c)]).max()))

    face: list[int] = []
    for k in np.argsort(-p, kind="stable"):
        if r[k] < r.max() - tie:
            continue
        if not face or _affine_combination(A[:, face], A[:, k]) is None:
            face.append(int(k))

    Z = np.linalg.inv(A[:, face].T @ A[:, face] + 1.0)
    Z1 = Z.sum(axis=1)
    Q = Z - np.outer(Z1, Z1) / Z1.sum()
    pull = M[:, face].T @ grad_mu + N[:, face].T @ grad_mu_v
    if grad_p is not None:
        pull = pull + grad_p[face]
    grad_c = Q @ pull  # Q is symmetric
    return M[:, face] @ grad_c, N[:, face] @ grad_c


def _weighted(M: Matrix, w: Vector | None) -> Matrix:
    return M if w is None else np.asarray(np.sqrt(w)[:, None] * M)


def _affine_solution(A: Matrix, c: Vector) -> Vector:
    r"""The maximiser of $c^\top p - \tfrac12\|Ap\|^2$ with $1^\top p = 1$ alone.

    $A^\top A p + \tau 1 = c$ and $1^\top p = 1$ give $(A^\top A + 1 1^\top) p = c + \nu 1$,
    with $\nu$ such that $p$ sums to 1.
    """
    system = A.T @ A + 1.0
    c = c - c.max()  # a shift that ν absorbs: small numbers keep more digits
    from_c, from_one = np.linalg.solve(system, np.stack([c, np.ones(len(c))], axis=1)).T
    p = from_c + (1.0 - from_c.sum()) / from_one.sum() * from_one
    return np.asarray(p)


def _affine_combination(A: Matrix, a: Vector) -> Vector | None:
    """Coefficients that sum to 1 and combine the columns of A to `a`; None if there are none."""
    stacked = np.vstack([A, np.ones(A.shape[1])])
    wanted = np.append(a, 1.0)
    coefficients = np.linalg.lstsq(stacked, wanted, rcond=None)[0]
    gap = np.abs(stacked @ coefficients - wanted).max()
    return np.asarray(coefficients) if gap <= 1e-9 * np.abs(wanted).max() else None


def _result(M: Matrix, N: Matrix, support: list[int], p: Vector) -> tuple[Vector, Vector, Vector]:
    full = np.zeros(M.shape[1])
    full[support] = p
    return full, M[:, support] @ p, N[:, support] @ p
