"""Is an answer right? A certificate that knows nothing of the solver.

For a projection onto {A mu <= b, C mu = d, 0 <= mu <= 1}, a dense QP solver gives the answer; the
benchmarks compare with it before they print a time.
"""

from __future__ import annotations

import clarabel
import numpy as np
from scipy import sparse


def matching_qp(scores: np.ndarray) -> np.ndarray:
    """The LP-matching of `(m, n)` scores, rows exactly one, columns at most one, by Clarabel."""
    m, n = scores.shape
    size = m * n
    rows = sparse.kron(sparse.eye(m), np.ones((1, n)))
    columns = sparse.kron(np.ones((1, m)), sparse.eye(n))
    eye = sparse.eye(size)
    a = sparse.vstack([rows, columns, -eye]).tocsc()
    b = np.concatenate([np.ones(m), np.ones(n), np.zeros(size)])
    cones = [clarabel.ZeroConeT(m), clarabel.NonnegativeConeT(n + size)]
    return _solve(eye.tocsc(), -scores.ravel(), a, b, cones).reshape(m, n)


def mrf_qp(scores: np.ndarray, first: np.ndarray, second: np.ndarray, coupling: np.ndarray):
    """The solution of a binary pairwise MRF over its local polytope, by Clarabel."""
    n, pairs = len(scores), len(first)
    p = sparse.block_diag([sparse.eye(n), sparse.csc_matrix((pairs, pairs))]).tocsc()
    q = -np.concatenate([scores, coupling])
    one = sparse.eye(pairs)
    u = sparse.csr_matrix((np.ones(pairs), (np.arange(pairs), first)), (pairs, n))
    v = sparse.csr_matrix((np.ones(pairs), (np.arange(pairs), second)), (pairs, n))
    a = sparse.vstack(
        [
            sparse.hstack([-u, one]),
            sparse.hstack([-v, one]),
            sparse.hstack([u + v, -one]),
            sparse.hstack([sparse.csr_matrix((pairs, n)), -one]),
            sparse.hstack([sparse.eye(n), sparse.csr_matrix((n, pairs))]),
            sparse.hstack([-sparse.eye(n), sparse.csr_matrix((n, pairs))]),
        ]
    ).tocsc()
    zeros = np.zeros
    b = np.concatenate([zeros(2 * pairs), np.ones(pairs), zeros(pairs), np.ones(n), zeros(n)])
    return _solve(p, q, a, b, [clarabel.NonnegativeConeT(len(b))])[:n]


def _solve(p, q, a, b, cones) -> np.ndarray:
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-11
    solution = clarabel.DefaultSolver(sparse.triu(p).tocsc(), q, a, b, cones, settings).solve()
    return np.array(solution.x)


def best_sequence(scores: np.ndarray, transitions: np.ndarray) -> float:
    """The score of the best sequence: Viterbi, step by step."""
    best = scores[0]
    for step in scores[1:]:
        best = (best[:, None] + transitions).max(axis=0) + step
    return float(best.max())


def best_within_budget(scores: np.ndarray, transitions: np.ndarray, budget: int) -> float:
    """The score of the best binary sequence with at most `budget` on, for each number so far."""
    off = np.full(budget + 2, -np.inf)  # with so many on, and one that is too many
    off[0] = 0
    on = np.full(budget + 2, -np.inf)
    for step, pair in zip(scores, [0.0, *transitions], strict=True):
        joined = np.maximum(off, on + pair)[:-1] + step
        off = np.maximum(off, on)
        on = np.concatenate([[-np.inf], joined])
    return float(max(off[:-1].max(), on[:-1].max()))


def best_tree(scores: np.ndarray) -> float:
    """The score of the best dependency tree, several roots allowed: Chu and Liu's contraction.

    scores: `(n, n)`, of the arc from head h to word m at [m, h], root arcs on the diagonal.
    """
    n = len(scores)
    arcs = np.full((n + 1, n + 1), -np.inf)  # [word, head], the root is number 0
    arcs[1:, 1:] = np.where(np.eye(n, dtype=bool), -np.inf, scores)
    arcs[1:, 0] = np.diag(scores)
    return _contract(arcs)


def _contract(arcs: np.ndarray) -> float:
    nodes = len(arcs)
    head = np.concatenate([[0], arcs[1:].argmax(axis=1)])
    cycle = _cycle(head)
    if not cycle:
        return float(sum(arcs[m, head[m]] for m in range(1, nodes)))
    inside = np.zeros(nodes, dtype=bool)
    inside[cycle] = True
    kept = np.flatnonzero(~inside)
    within = arcs[cycle, head[cycle]]
    smaller = np.full((len(kept) + 1, len(kept) + 1), -np.inf)
    smaller[:-1, :-1] = arcs[np.ix_(kept, kept)]
    smaller[:-1, -1] = arcs[np.ix_(kept, cycle)].max(axis=1)  # out of the cycle
    # Into the cycle: the arc that it replaces is given back.
    smaller[-1, :-1] = (arcs[np.ix_(cycle, kept)] - within[:, None]).max(axis=0)
    return float(within.sum()) + _contract(smaller)


def _cycle(head: np.ndarray) -> list[int]:
    seen = np.zeros(len(head), dtype=int)
    for start in range(1, len(head)):
        node = start
        while node != 0 and seen[node] == 0:
            seen[node] = start
            node = head[node]
        if node != 0 and seen[node] == start:
            cycle, other = [node], head[node]
            while other != node:
                cycle.append(other)
                other = head[other]
            return cycle
    return []
