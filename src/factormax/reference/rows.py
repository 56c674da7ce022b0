r"""A factor graph as linear rows.

Logic, counting and knapsack factors are rows $a^\top\mu \le b$ or $= b$; a `Pair` is a
*soft* row, whose violation costs its score. All three are one thing, a row with a
multiplier $\tau \in [lo, hi]$: docs/math.md (6).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]
BoolVector = npt.NDArray[np.bool_]
IntVector = npt.NDArray[np.intp]
Scalar = TypeVar("Scalar", bound=np.generic)
_Entries = list[tuple[int, float]]  # (column, coefficient), in the order of the row

INEQUALITY, EQUALITY = 1, 2  # Compiled.kind
ONE_ROW, OR_OUT, BAND = 0, 1, 2  # Compiled.block_kind


class Infeasible(ValueError):
    """No point satisfies the hard rows; `tau`, if not None, proves it: docs/math.md (23)."""

    def __init__(self, message: str, tau: Vector | None = None) -> None:
        super().__init__(message)
        self.tau = tau


@dataclass(frozen=True)
class Pairs:
    r"""The `Pair` factors of a problem, which earn $s_p\,\beta_p$: docs/math.md (9).

    Each joins two literals $\ell = c + \sigma\mu$, with $(\sigma, c) = (1, 0)$, or
    $(-1, 1)$ where negated: docs/math.md (1).
    """

    var: npt.NDArray[np.intp] = field(default_factory=lambda: np.zeros((0, 2), np.intp))
    """(P, 2): the columns of the two variables; −1 for a masked one, which is off."""
    negated: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 2), np.bool_))
    """(P, 2): which of the two literals are negated."""
    eta_v: Vector = field(default_factory=lambda: np.zeros(0))
    """(P,): the scores s."""
    present: BoolVector = field(default_factory=lambda: np.zeros(0, np.bool_))
    """(P,): False where both are masked. Such a pair keeps its number, but does nothing."""

    @property
    def sigma(self) -> Matrix:
        """(P, 2): +1 for a plain literal, −1 for a negated one, 0 where the variable is masked."""
        return np.where(self.negated, -1.0, 1.0) * (self.var >= 0)

    @property
    def rewards(self) -> BoolVector:
        r"""(P,): the pairs with $s \ge 0$, which pull their two literals together."""
        return self.eta_v >= 0

    def literals(self, mu: Vector) -> Matrix:
        r"""(P, 2): $\ell = c + \sigma\mu$, docs/math.md (1), and 0 for an absent pair."""
        ends = np.append(mu, 0.0)[self.var]  # column −1 stands for masked variables
        return np.where(self.negated, 1.0 - ends, ends) * self.present[:, None]

    def __len__(self) -> int:
        return len(self.eta_v)


@dataclass(frozen=True)
class Block:
    """One factor, as ADMM sees it: a set of rows with a closed-form local solution."""

    rows: tuple[int, ...]
    """Its rows of `A`. For an OrOut: the implications in the order of `links`, then the sum; for
    a band: the row of the lower bound, then that of the upper bound."""
    links: tuple[int, ...]
    """The columns of its links; the output of an OrOut comes last."""
    or_out: bool = False
    negated: tuple[bool, ...] = ()
    """For an OrOut: which of its literals are negated."""


@dataclass(frozen=True)
class DenseProblem:
    r"""LP-SparseMAP with every factor written as rows: docs/math.md (6).

    $$\min_{\mu \in [0,1]^n}\ \tfrac12\|\mu\|^2 - \langle\eta', \mu\rangle
      + \sum_r \max_{lo_r \le \tau_r \le hi_r} \tau_r\,(a_r^\top\mu - b_r)$$

    A row that this instance lacks is kept as $0^\top\mu \le 0$ with $\tau \in [0, 0]$, so
    that rows have the same numbers here and in the compiled graph.

    >>> inf = np.array([np.inf])  # two variables, exactly one on: sparsemax
    >>> xor = DenseProblem(np.array([0.5, 0.1]), np.ones((1, 2)), np.ones(1), -inf, inf)
    >>> xor.A.shape
    (1, 2)
    """

    eta: Vector
    """(n,): the scores, the linear part of the pairs included: docs/math.md (11)."""
    A: Matrix
    """(m, n): one row per constraint, the soft rows of the pairs last."""
    b: Vector
    """(m,): right-hand sides."""
    lo: Vector
    """(m,): −inf for an equality, 0 for an inequality or a pair."""
    hi: Vector
    """(m,): +inf for a hard row, |s| for a pair of score s."""
    pairs: Pairs = field(default_factory=Pairs)
    """The pairs behind the last `len(pairs)` rows."""
    blocks: tuple[Block, ...] = ()
    """The factors; empty means that every row is its own factor."""
    variables: IntVector | None = None
    """(n,): the graph's number of each column, if a mask removed some."""
    num_variables: int | None = None
    """How many variables the graph has, masked ones included."""

    @property
    def pair_rows(self) -> slice:
        """Where the soft rows of the pairs are."""
        return slice(len(self.b) - len(self.pairs), len(self.b))

    @property
    def eta_u(self) -> Vector:
        """(n,): the scores as the user gave them, with docs/math.md (11) undone."""
        return np.asarray(self.eta - _linear_part(self.pairs, len(self.eta)))

    def to_graph(self, x: Vector) -> Vector:
        """(num_variables,): values of the columns, and 0 for masked variables."""
        if self.variables is None or self.num_variables is None:
            return np.array(x)
        full = np.zeros(self.num_variables)
        full[self.variables] = x
        return full


@dataclass(frozen=True)
class Compiled:
    """The arrays of a compiled graph; an array with a leading 1 is shared by all instances."""

    num_variables: int
    row_ptr: npt.NDArray[np.int32]
    """(R + 1,): where the entries of each hard row begin."""
    col: npt.NDArray[np.int32]
    """(nnz,): the variable of each entry."""
    coef: Matrix
    """(1 | B, nnz): the coefficient of each entry."""
    rhs: Matrix
    """(1 | B, R): right-hand sides."""
    kind: npt.NDArray[np.int8]
    """(R,): INEQUALITY or EQUALITY."""
    pairs: npt.NDArray[np.int32]
    """(P, 2): the variables of each pair."""
    pair_negated: npt.NDArray[np.bool_]
    """(P, 2): which of them are negated."""
    block_ptr: npt.NDArray[np.int32]
    """(F + 1,): where the rows of each factor begin."""
    block_kind: npt.NDArray[np.int8]
    """(F,): ONE_ROW; OR_OUT: rows (input, output), then the sum row, the output last (with one
    input only the sum row, as an equation); BAND: minus the sum is at most minus the lower bound,
    then the sum is at most the upper bound, which is an equation if the bounds are equal."""


def from_compiled(
    compiled: Compiled,
    instance: int,
    eta_u: Vector,
    eta_v: Vector,
    mask: BoolVector | None = None,
) -> DenseProblem:
    """One instance of a compiled graph, as dense rows.

    Args:
        compiled: the index arrays of the graph.
        instance: which instance of the batch.
        eta_u: (num_variables,) scores of this instance; those of masked variables are not read.
        eta_v: (P,) pair scores of this instance.
        mask: (num_variables,) bool; variables with False are off, and have no column.

    Raises:
        ValueError: a remaining variable has a score that is not finite.
    """
    keep = np.ones(compiled.num_variables, np.bool_) if mask is None else mask.astype(np.bool_)
    if not np.isfinite(eta_u[keep]).all() or not np.isfinite(eta_v).all():
        raise ValueError("from_compiled: scores must be finite; mask variables that score -inf.")
    column = np.where(keep, np.cumsum(keep) - 1, -1)  # graph number → column, −1 if masked
    num_columns = int(keep.sum())

    # Hard rows: copy the entries whose variable remains. A factor without any is absent.
    col, kind = compiled.col, compiled.kind
    coef, rhs = _of(compiled.coef, instance), _of(compiled.rhs, instance)
    num_rows = len(kind)
    hard = np.zeros((num_rows, num_columns))
    present, equality = np.zeros(num_rows, np.bool_), kind == EQUALITY
    bounds = itertools.pairwise(compiled.block_ptr)
    for (first, last), block_kind in zip(bounds, compiled.block_kind, strict=True):
        entry = slice(compiled.row_ptr[first], compiled.row_ptr[last])
        present[first:last] = keep[col[entry]].any()
        if block_kind == BAND and rhs[first] == -rhs[first + 1]:
            present[first], equality[first + 1] = False, True
    entries: list[_Entries] = []
    for r in range(num_rows):
        k = np.arange(compiled.row_ptr[r], compiled.row_ptr[r + 1])
        k = k[keep[col[k]]]
        np.add.at(hard[r], column[col[k]], coef[k])
        entries.append([(int(j), float(a)) for j, a in zip(column[col[k]], coef[k], strict=True)])

    # Soft rows: one per pair, docs/math.md (10) and (11).
    pairs = Pairs(
        var=column[compiled.pairs].astype(np.intp).reshape(-1, 2),
        negated=compiled.pair_negated.astype(np.bool_).reshape(-1, 2),
        eta_v=np.asarray(eta_v, np.float64),
        present=keep[compiled.pairs].any(axis=-1).reshape(-1),
    )
    soft, soft_rhs = _soft_rows(pairs, num_columns)

    return DenseProblem(
        eta=np.asarray(eta_u, np.float64)[keep] + _linear_part(pairs, num_columns),
        A=np.concatenate([hard, soft]),
        b=np.concatenate([np.where(present, rhs, 0.0), soft_rhs]),
        lo=np.concatenate([np.where(present & equality, -np.inf, 0.0), np.zeros(len(pairs))]),
        hi=np.concatenate([np.where(present, np.inf, 0.0), np.abs(pairs.eta_v) * pairs.present]),
        pairs=pairs,
        blocks=(
            *_hard_blocks(compiled, keep, present, entries),
            *_pair_blocks(pairs, first_row=num_rows),
        ),
        variables=np.flatnonzero(keep),
        num_variables=compiled.num_variables,
    )


def _linear_part(pairs: Pairs, num_columns: int) -> Vector:
    r"""(n,): what the pairs add to the scores, $s\,\sigma_2$ each, docs/math.md (11)."""
    offset = np.zeros(num_columns)
    on = (pairs.var[:, 1] >= 0) & pairs.rewards
    np.add.at(offset, pairs.var[on, 1], (pairs.eta_v * pairs.sigma[:, 1])[on])
    return offset


def _soft_rows(pairs: Pairs, num_columns: int) -> tuple[Matrix, Vector]:
    r"""Rows of the pairs, docs/math.md (10), in terms of $\mu$ by docs/math.md (7).

    $\ell_2 - \ell_1 \le 0$ where $s \ge 0$, and $\ell_1 + \ell_2 \le 1$ where $s < 0$.
    """
    A, b = np.zeros((len(pairs), num_columns)), np.zeros(len(pairs))
    for p in np.flatnonzero(pairs.present):
        w1, rhs = (-1.0, 0.0) if pairs.rewards[p] else (1.0, 1.0)
        weight = np.array([w1, 1.0])
        np.add.at(A[p], pairs.var[p], weight * pairs.sigma[p])
        b[p] = rhs - weight @ pairs.negated[p]
    return A, b


def _hard_blocks(
    compiled: Compiled, keep: BoolVector, present: BoolVector, entries: list[_Entries]
) -> list[Block]:
    """The factors that are not pairs and have a variable left."""
    blocks = []
    for f, block_kind in enumerate(compiled.block_kind):
        rows = range(compiled.block_ptr[f], compiled.block_ptr[f + 1])
        first, last = compiled.row_ptr[rows.start], compiled.row_ptr[rows.stop]
        whole = bool(keep[compiled.col[first:last]].all())
        # A variable that occurs twice in the factor is one link, with both coefficients.
        links = {r: tuple(dict.fromkeys(j for j, _ in entries[r])) for r in rows if present[r]}
        if block_kind == BAND and len(links) == 2 and links[rows[0]]:
            blocks.append(Block(tuple(rows), links[rows[0]]))
        elif block_kind != OR_OUT or not whole or len(rows) == 1:  # each row is its own factor
            blocks += [Block((r,), links[r]) for r in rows if links.get(r)]
        else:
            # An implication begins with its input; the sum row −Σ ℓᵢ + ℓₒ ends with the output.
            *implications, total = rows
            (output, sigma), inputs = entries[total][-1], [entries[r][0] for r in implications]
            blocks.append(
                Block(
                    rows=tuple(rows),
                    links=(*(j for j, _ in inputs), output),
                    or_out=True,
                    negated=(*(a < 0 for _, a in inputs), sigma < 0),
                )
            )
    return blocks


def _pair_blocks(pairs: Pairs, first_row: int) -> list[Block]:
    return [
        Block((first_row + int(p),), tuple(dict.fromkeys(int(j) for j in pairs.var[p] if j >= 0)))
        for p in np.flatnonzero(pairs.present)
    ]


def _of(array: npt.NDArray[Scalar], instance: int) -> npt.NDArray[Scalar]:
    """The instance's slice of an array that may be shared by all of them."""
    return np.asarray(array[0 if len(array) == 1 else instance])
