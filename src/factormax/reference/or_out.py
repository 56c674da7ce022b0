r"""The local solution of `OrOut`: the last literal is the *or* of the others.

Three branches, each a special case of "project, then see whether the rest holds" (the
sifting lemma): docs/math.md (28)–(33). `AndOut` and negated variables are handled here,
too, after flipping their literals.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from factormax.reference.box_row import MARGIN, box_row, box_row_vjp
from factormax.reference.rows import BoolVector, Vector

TIE = 1e-12
"""Rounding allowed when a branch is checked against the rows it left out."""


class _Branch(NamedTuple):
    v: Vector
    t: Vector
    number: int
    tied: BoolVector  # branch 2: the literals that move with the output


def or_out(y: Vector, delta: Vector) -> tuple[Vector, Vector]:
    r"""Project onto OrOut under degree scaling, in literal space: docs/math.md (28).

    $$\min_v\ \tfrac12\|v - y\|^2 \quad\text{s.t.}\quad 0 \le \delta_k v_k \le 1,\quad
      \delta_i v_i \le \delta_o v_o \le \textstyle\sum_i \delta_i v_i$$

    Args:
        y: (d,) point to project, the output last.
        delta: (d,) square roots of the degrees.

    Returns:
        (v, t): the solution (d,), and the multipliers (d,) of the d − 1 rows
        $\delta_i v_i - \delta_o v_o \le 0$, then of $\delta_o v_o - \sum_i \delta_i v_i \le 0$.

    >>> v, t = or_out(np.array([0.8, 0.1, 0.2]), np.ones(3))
    >>> v.round(3), t.round(3)
    (array([0.5, 0.1, 0.5]), array([0.3, 0. , 0. ]))
    """
    branch = _solve(y, delta)
    return branch.v, branch.t


def or_out_vjp(y: Vector, delta: Vector, grad_v: Vector, margin: float = MARGIN) -> Vector:
    """Pull a gradient (d,) back through `or_out`: docs/math.md (33)."""
    branch = _solve(y, delta)
    if branch.number == 3:
        w, h = _sum_row(delta)
        t = float(branch.t[-1])
        return box_row_vjp(y, w, h, 0.0, -np.inf, np.inf, t, grad_v, margin)[0]

    free = (delta * y > margin) & (delta * y < 1 - margin)
    grad_y = np.where(free, grad_v, 0.0)
    if branch.number == 2:
        # The tied literals share one level θ, the weighted mean (30) of their scores.
        weight = np.where(branch.tied, 1 / delta, 0.0)
        theta = float(weight @ y) / float(weight @ weight)
        moves = margin < theta < 1 - margin
        pulled = weight * float(weight @ grad_v) / float(weight @ weight)
        grad_y = np.where(branch.tied, pulled if moves else 0.0, grad_y)
    return grad_y


def _solve(y: Vector, delta: Vector) -> _Branch:
    d = len(y)
    nothing_tied = np.zeros(d, np.bool_)

    def below_output(v: Vector) -> bool:
        return bool((delta[:-1] * v[:-1] <= delta[-1] * v[-1] + TIE).all())

    def output_covered(v: Vector) -> bool:
        return bool(delta[-1] * v[-1] <= delta[:-1] @ v[:-1] + TIE)

    # Branch 1: the box alone, docs/math.md (29).
    v = np.clip(y, 0.0, 1 / delta)
    if below_output(v) and output_covered(v):
        return _Branch(v, np.zeros(d), 1, nothing_tied)

    # Branch 2: no literal above the output, docs/math.md (30)–(31).
    v, t, tied = _cap_by_output(y, delta)
    if output_covered(v):
        return _Branch(v, t, 2, tied)

    # Branch 3: the output is exactly the sum of the others, docs/math.md (32).
    w, h = _sum_row(delta)
    v, t_sum = box_row(y, w, h, 0.0, -np.inf, np.inf)
    return _Branch(v, np.append(np.zeros(d - 1), t_sum), 3, nothing_tied)


def _cap_by_output(y: Vector, delta: Vector) -> tuple[Vector, Vector, BoolVector]:
    r"""Project onto $\delta_i v_i \le \delta_o v_o$, then onto the box: docs/math.md (30)–(31).

    The output pulls down the literals above it, the highest first, until their common
    level $\theta$ is at least the next literal.
    """
    highest_first = np.argsort(-(delta[:-1] * y[:-1]), kind="stable")
    tied = np.zeros(len(y), np.bool_)
    tied[-1] = True
    for i in (*highest_first, None):
        theta = float((y / delta)[tied].sum() / (1 / delta**2)[tied].sum())
        if i is None or theta >= delta[i] * y[i]:
            break
        tied[i] = True

    z = np.where(tied, theta / delta, y)  # the projection before the box
    t = np.where(tied, (y - z) / delta, 0.0)
    t[-1] = 0.0  # the multiplier of the sum row
    return np.clip(z, 0.0, 1 / delta), t, tied


def _sum_row(delta: Vector) -> tuple[Vector, Vector]:
    r"""$\delta_o v_o - \sum_i \delta_i v_i$, and the upper bounds of the box."""
    w = -delta.copy()
    w[-1] = delta[-1]
    return w, 1 / delta
