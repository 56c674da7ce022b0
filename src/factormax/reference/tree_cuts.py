"""Sets of words to which marginals of arcs give no head outside the set, docs/math.md (60)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["max_flow", "violated_set"]

Matrix = npt.NDArray[np.floating[Any]]


def max_flow(
    capacity: Matrix, source: int, sink: int, least: float = 1e-12
) -> tuple[float, npt.NDArray[np.bool_]]:
    """The maximum flow, and the sink's side of a minimum cut, by augmenting paths.

    Args:
        capacity: `(n, n)`, from row to column.
        source: where the flow begins.
        sink: where it ends.
        least: a remaining capacity counts only if it is larger than this.

    Returns:
        The flow, and the nodes from which more could be sent to the sink, `(n,)`.
    """
    left = np.array(capacity, dtype=float)
    total = 0.0
    while True:
        towards = {sink: sink}  # the next node on the way to the sink
        queue = [sink]
        while queue and source not in towards:
            at = queue.pop(0)
            for node in np.flatnonzero(left[:, at] > least):
                if int(node) not in towards:
                    towards[int(node)] = at
                    queue.append(int(node))
        if source not in towards:
            side = np.zeros(len(left), dtype=bool)
            side[list(towards)] = True
            return total, side
        path = [source]
        while path[-1] != sink:
            path.append(towards[path[-1]])
        arcs = tuple(path[:-1]), tuple(path[1:])
        step = left[arcs].min()
        left[arcs] -= step
        left[arcs[::-1]] += step
        total += float(step)


def violated_set(mu: Matrix, tolerance: float = 1e-9) -> npt.NDArray[np.bool_] | None:
    """A set of words whose heads outside it sum to less than 1; None if `mu` is a mix of trees.

    Args:
        mu: `(n, n)`; `mu[m, h]` is the marginal of h as the head of m, `mu[m, m]` of the root.
        tolerance: by how much less.

    Returns:
        The words, `(n,)`, or None. Among equally violated sets, it is the smallest; the core takes
        the largest.

    Example:
        Two words that are each other's heads:

        >>> violated_set(np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
        array([ True,  True, False])
    """
    n = len(mu)
    capacity = np.zeros((n + 1, n + 1))  # the root comes last
    capacity[:n, :n] = mu.T * (1 - np.eye(n))
    capacity[n, :n] = np.diag(mu)
    for word in range(n):
        flow, side = max_flow(capacity, n, word)
        if flow < 1 - tolerance:
            return side[:n]
    return None
