r"""All structures of a structured factor, one per column: slow, and obviously right.

Column $k$ of $M$ (d, K) says which variables structure $k$ switches on, and column $k$ of
$N$ (s, K) how often it uses each of the factor's own scores. So the scores of all
structures are $M^\top\eta_u + N^\top\eta_v$, and the marginals of a distribution $p$ over
them are $Mp$ and $Np$.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from factormax.reference.rows import BoolVector, Matrix, Vector

LIMIT = 200_000
"""The most structures, or candidates for one, that are enumerated."""


def sequences(
    length: int,
    states: int,
    per_step: bool = False,
    has_initial: bool = False,
    has_final: bool = False,
) -> tuple[Matrix, Matrix]:
    """One state per step: variable (t, s) is number t · states + s.

    Scores: transitions [from, to], or [step, from, to] if `per_step`; then the initial and
    the final scores, if any, by state.

    >>> M, N = sequences(3, 2)
    >>> M.shape, N.shape  # 2 ** 3 sequences, 2 * 2 transitions
    ((6, 8), (4, 8))
    >>> M[:, 1], N[:, 1]  # the states 0, 0, 1
    (array([1., 0., 1., 0., 0., 1.]), array([1., 1., 0., 0.]))
    """
    _check_count("sequences", states**length)
    square = states * states
    initial = square * (length - 1 if per_step else 1)
    final = initial + (states if has_initial else 0)

    on: list[list[int]] = []
    features: list[list[int]] = []
    for path in itertools.product(range(states), repeat=length):
        on.append([t * states + s for t, s in enumerate(path)])
        used = [
            (t * square if per_step else 0) + path[t] * states + path[t + 1]
            for t in range(length - 1)
        ]
        if has_initial:
            used.append(initial + path[0])
        if has_final:
            used.append(final + path[-1])
        features.append(used)
    num_scores = final + (states if has_final else 0)
    return _columns(on, length * states), _columns(features, num_scores)


def budget_sequences(length: int, per_step: bool, budget: int) -> tuple[Matrix, Matrix]:
    """At most `budget` of a sequence of binary variables; two neighbours both on use a score.

    Scores: one for all neighbours, or length − 1 if `per_step`.

    >>> M, N = budget_sequences(3, False, 2)
    >>> M.astype(int)
    array([[0, 0, 0, 0, 1, 1, 1],
           [0, 0, 1, 1, 0, 0, 1],
           [0, 1, 0, 1, 0, 1, 0]])
    >>> N.astype(int)
    array([[0, 0, 0, 1, 0, 0, 1]])
    """
    _check_count("budget_sequences", 2**length)
    on: list[list[int]] = []
    features: list[list[int]] = []
    for bits in itertools.product((0, 1), repeat=length):
        if sum(bits) > budget:
            continue
        on.append([t for t in range(length) if bits[t]])
        both = [t for t in range(length - 1) if bits[t] and bits[t + 1]]
        features.append(both if per_step else [0] * len(both))
    return _columns(on, length), _columns(features, length - 1 if per_step else 1)


def tables(sizes: Sequence[int]) -> tuple[Matrix, Matrix]:
    """One state of each group, and a score for each joint state, in C order.

    >>> M, N = tables([2, 2])
    >>> M.astype(int)
    array([[1, 1, 0, 0],
           [0, 0, 1, 1],
           [1, 0, 1, 0],
           [0, 1, 0, 1]])
    """
    _check_count("tables", math.prod(sizes))
    starts = np.concatenate([[0], np.cumsum(sizes)])
    joint = itertools.product(*(range(size) for size in sizes))
    on = [[int(starts[g]) + state for g, state in enumerate(one)] for one in joint]
    return _columns(on, sum(sizes)), np.eye(math.prod(sizes))


def trees(words: int, projective: bool = False, single_root: bool = False) -> tuple[Matrix, Matrix]:
    """Dependency trees: variable (m, h), number m · words + h, is "the head of m is h".

    (m, m) is "the head of m is the root", which is left of the first word. No scores.

    Args:
        words: the number of words.
        projective: no two arcs, drawn above the sentence, cross, those of the root included.
        single_root: exactly one word has the root as its head.

    >>> M, _ = trees(2)
    >>> M.astype(int)
    array([[1, 1, 0],
           [0, 0, 1],
           [1, 0, 0],
           [0, 1, 1]])
    """
    _check_count("trees", words**words)
    on = [
        [m * words + h for m, h in enumerate(heads)]
        for heads in itertools.product(range(words), repeat=words)
        if _is_tree(heads)
        and not (projective and _crosses(heads))
        and not (single_root and sum(h == m for m, h in enumerate(heads)) != 1)
    ]
    return _columns(on, words * words), np.zeros((0, len(on)))


def matchings(rows: int, cols: int) -> tuple[Matrix, Matrix]:
    """Each row is matched to its own column: variable (i, j) is number i · cols + j. No scores.

    Raises:
        ValueError: there are more rows than columns.

    >>> matchings(2, 3)[0].shape
    (6, 6)
    """
    if rows > cols:
        raise ValueError(f"matchings: {rows} rows need at least as many columns, got {cols}.")
    _check_count("matchings", math.perm(cols, rows))
    on = [
        [i * cols + j for i, j in enumerate(chosen)]
        for chosen in itertools.permutations(range(cols), rows)
    ]
    return _columns(on, rows * cols), np.zeros((0, len(on)))


def column_scores(M: Matrix, N: Matrix, eta_u: Vector, eta_v: Vector) -> Vector:
    r"""(K,): the scores $M^\top\eta_u + N^\top\eta_v$; −inf where a structure uses a −inf."""
    unary = np.where(M > 0, eta_u[:, None], 0.0) * M
    own = np.where(N > 0, eta_v[:, None], 0.0) * N
    return np.asarray(unary.sum(axis=0) + own.sum(axis=0))


def best(M: Matrix, N: Matrix, eta_u: Vector, eta_v: Vector) -> int:
    """The column with the best score, the first among ties: what a MAP oracle returns."""
    return int(np.argmax(column_scores(M, N, eta_u, eta_v)))


def allowed(M: Matrix, mask: BoolVector) -> BoolVector:
    """(K,): the columns that use no masked variable; mask: (d,), True where masked."""
    return np.asarray((M[mask] == 0).all(axis=0))


def _check_count(name: str, count: int) -> None:
    if count > LIMIT:
        raise ValueError(
            f"{name}: there are {count} structures to enumerate, more than {LIMIT}; "
            "use smaller sizes."
        )


def _columns(used: Iterable[Iterable[int]], size: int) -> Matrix:
    """(size, K): how often each list names each index."""
    lists = [list(indices) for indices in used]
    out = np.zeros((size, len(lists)))
    for k, indices in enumerate(lists):
        for i in indices:
            out[i, k] += 1.0
    return out


def _is_tree(heads: Sequence[int]) -> bool:
    """Whether every word leads to the root, that is, to a word that is its own head."""
    for m in range(len(heads)):
        at = m
        for _ in heads:
            at = heads[at]
        if heads[at] != at:
            return False
    return True


def _crosses(heads: Sequence[int]) -> bool:
    """Whether two arcs cross. The root is at −1, left of word 0."""
    arcs = [tuple(sorted((m, -1 if h == m else h))) for m, h in enumerate(heads)]
    return any(a < c < b < d for a, b in arcs for c, d in arcs)
