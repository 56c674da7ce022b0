r"""One linear row in a box: the local solution of every factor that is a single row.

Equality, inequality and soft rows differ only in the interval $[lo, hi]$ allowed to the
multiplier, so one routine serves them all: docs/math.md (24)–(27).
"""

from __future__ import annotations

import numpy as np

from factormax.reference.rows import Infeasible, Vector

MARGIN = 1e-9
"""Anything closer than this to a bound counts as on it: docs/math.md (40) says why."""


def box_row(
    y: Vector, w: Vector, h: Vector, b: float, lo: float, hi: float
) -> tuple[Vector, float]:
    r"""Minimise over a box with one row, hard or soft: docs/math.md (24).

    $$\min_{0 \le v \le h}\ \tfrac12\|v - y\|^2 + \max_{lo \le t \le hi} t\,(w^\top v - b)$$

    The solution is $v = \mathrm{clip}(y - wt, 0, h)$ and $g(t) = w^\top v(t) - b$ falls
    with $t$, linearly between the points where an entry meets a bound. So: evaluate $g$
    at all of these, find where it changes sign, interpolate. (The core finds the same
    $t$ by Newton's method, without sorting.)

    Args:
        y: (d,) point to project.
        w: (d,) coefficients.
        h: (d,) upper bounds.
        b: right-hand side.
        lo: least multiplier; −inf for an equality.
        hi: largest multiplier; +inf for a hard row.

    Returns:
        (v, t): the solution (d,), and its multiplier. If a whole interval of multipliers
        would do, it is the midpoint, where no entry is exactly at its bound.

    Raises:
        Infeasible: no point of the box satisfies the row, and no bound on t relaxes it.

    >>> box_row(np.array([0.5, 0.1]), np.ones(2), np.ones(2), 1.0, -np.inf, np.inf)
    (array([0.7, 0.3]), -0.2)
    """
    moving = w != 0
    bends = np.concatenate([y[moving] / w[moving], (y - h)[moving] / w[moving], [lo, hi]])
    bends = np.unique(np.clip(bends, lo, hi))
    bends = bends[np.isfinite(bends)] if np.isfinite(bends).any() else np.zeros(1)
    excess = np.clip(y - np.outer(bends, w), 0.0, h) @ w - b  # g at every bend, falling
    tol = 8 * np.finfo(np.float64).eps * (abs(b) + np.abs(w) @ h)
    zeros = bends[np.abs(excess) <= tol]

    # docs/math.md (26), case by case
    if np.isfinite(lo) and excess[0] <= tol:
        t = lo  # the row has slack, or needs no more than the least multiplier
    elif np.isfinite(hi) and excess[-1] >= -tol:
        t = hi  # too expensive to satisfy: a soft row gives in
    elif excess[0] < -tol or excess[-1] > tol:
        raise Infeasible(f"box_row: no point of the box satisfies the row (b = {b:g}).")
    elif zeros.size:
        left = zeros[0] - (zeros[0] == bends[0])  # beyond the outermost bend g is constant
        right = zeros[-1] + (zeros[-1] == bends[-1])
        t = 0.5 * (left + right)
    else:
        i = int(np.argmax(excess < 0))
        t = bends[i - 1] + (bends[i] - bends[i - 1]) * excess[i - 1] / (excess[i - 1] - excess[i])
    return np.clip(y - w * t, 0.0, h), float(t)


def box_band(y: Vector, w: Vector, h: Vector, lower: float, upper: float) -> tuple[Vector, float]:
    r"""Project onto a box with a band, $lower \le w^\top v \le upper$: docs/math.md (27a).

    Returns:
        (v, t): the solution (d,), and the multiplier of the upper bound, or minus that of the
        lower one: at most one of them binds.

    >>> box_band(np.array([0.5, 0.25]), np.ones(2), np.ones(2), 1.0, 2.0)
    (array([0.625, 0.375]), -0.125)
    """
    v, t = box_row(y, w, h, upper, 0.0, np.inf)
    return (v, t) if t > 0 else box_row(y, w, h, lower, -np.inf, 0.0)


def box_row_vjp(
    y: Vector,
    w: Vector,
    h: Vector,
    b: float,
    lo: float,
    hi: float,
    t: float,
    grad_v: Vector,
    margin: float = MARGIN,
) -> tuple[Vector, float]:
    r"""Pull a gradient back through `box_row`: docs/math.md (27).

    On the free entries $v = y - wt$; a row that binds projects $w$ out of them.

    Returns:
        (grad_y, grad_hi): (d,), and the gradient of the upper bound of the multiplier (the
        score of a pair), which is nonzero only if t is at that bound.
    """
    z = y - w * t
    free = (z > margin) & (z < h - margin)
    slack = float(w @ np.clip(z, 0.0, h)) - b
    tight = lo < hi and (lo < t < hi or abs(slack) <= margin)

    grad_y = np.where(free, grad_v, 0.0)
    if tight:
        w_free = np.where(free, w, 0.0)
        norm2 = float(w_free @ w_free)
        if norm2 > 0:
            grad_y -= w_free * (w_free @ grad_v) / norm2
        return grad_y, 0.0
    return grad_y, -float(w @ grad_y) if t == hi else 0.0
