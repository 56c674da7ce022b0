"""Numbers for the factors' scores of a batch, of which the instances share some."""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from factormax._space import NumpySpace
from factormax.arrays import FloatArray, IndexArray

__all__ = ["Columns"]


def _weighted_sum(weight: FloatArray, rows: FloatArray) -> FloatArray:
    """Rows `(B, P)` times their weights, `(B,)`, summed, without a matrix of the products."""
    total = np.zeros(rows.shape[1], rows.dtype)
    step = 256  # sums of long lists round less if they are taken in blocks
    for i in range(0, len(rows), step):
        total += np.einsum("b,bp->p", weight[i : i + step], rows[i : i + step])
    return total


@dataclass(frozen=True)
class Columns:
    """A matrix `(B, P)` in two parts: what all instances share is stored once.

    The arrays may be those of any library; only `full` and `split` then work.

    Attributes:
        shared: `(1, S)`, the columns that all rows share.
        own: `(B, P − S)`, the other columns.
        runs: how many columns, from the first on, are shared, not shared, shared, and so on.
        heat: `(B, 1)` in float64, what divides the shared columns of each row; None: nothing does.
    """

    shared: Any
    own: Any
    runs: tuple[int, ...]
    heat: Any = None

    @classmethod
    def of(cls, array: FloatArray, batch: int) -> Columns:
        """A matrix `(1 | B, P)`; one row is shared."""
        if len(array) == 1:
            return cls(array, np.empty((batch, 0), array.dtype), (array.shape[1],))
        return cls(np.empty((1, 0), array.dtype), array, (0, array.shape[1]))

    @classmethod
    def summed(cls, array: FloatArray, weight: FloatArray, runs: tuple[int, ...]) -> Columns:
        """Rows `(B, P)` times their weights, `(B,)`, summed where the instances share a column."""
        pieces: tuple[list[FloatArray], list[FloatArray]] = [], []
        weight = weight.astype(array.dtype)
        for run in _spans(runs):
            rows = array[:, run.start : run.stop]
            if run.is_shared:
                pieces[0].append(_weighted_sum(weight, rows)[None])
            else:
                pieces[1].append(rows * weight[:, None])
        shared, own = (
            np.concatenate([np.empty((rows, 0), array.dtype), *some], axis=1)
            for rows, some in zip((1, len(array)), pieces, strict=True)
        )
        return cls(shared, own, runs)

    @staticmethod
    def runs_of(counts: Sequence[int], is_shared: Sequence[bool]) -> tuple[int, ...]:
        """The `runs` of parts of these sizes, one after another."""
        runs = [0]
        for count, alike in zip(counts, is_shared, strict=True):
            if alike != (len(runs) % 2 == 1):
                runs.append(0)
            runs[-1] += count
        return tuple(runs)

    @staticmethod
    def own_runs(runs: tuple[int, ...]) -> list[tuple[int, int]]:
        """The first and the last column, plus one, of each run that is not shared."""
        return [(run.start, run.stop) for run in _spans(runs) if not run.is_shared]

    @staticmethod
    def places(runs: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """`(P,)`: for each column its place in `own`, or ~ its place in `shared`."""
        found = np.empty(sum(runs), np.int32)
        for run in _spans(runs):
            columns = np.arange(run.column, run.column + run.stop - run.start, dtype=np.int32)
            found[run.start : run.stop] = ~columns if run.is_shared else columns
        return found

    @staticmethod
    def split(xp: Any, array: Any, runs: tuple[int, ...]) -> tuple[Any, Any]:
        """From `(B, P)` of any library the columns `(B, P − S)` and `(B, S)`, not summed."""
        pieces: tuple[list[Any], list[Any]] = [], []
        for run in _spans(runs):
            pieces[run.is_shared].append(array[:, run.start : run.stop])
        own, shared = (
            xp.joined(some) if len(some) > 1 else some[0] if some else array[:, :0]
            for some in pieces
        )
        return own, shared

    def full(self, xp: Any = NumpySpace) -> Any:
        """The matrix, `(1 | B, P)`: one row if all rows are the same. xp: the arrays' `Space`."""
        if len(self.runs) == 1:
            return self._cooled(self.shared)
        if len(self.runs) == 2 and self.runs[0] == 0:
            return self.own
        rows = self.own.shape[0]
        runs = _spans(self.runs)
        pieces = [self._piece(k, run.start, run.stop) for k, run in enumerate(runs)]
        return xp.joined([xp.spread(p, (rows, p.shape[1])) for p in pieces])

    def map(self, function: Callable[[FloatArray], FloatArray]) -> Columns:
        """The same with other numbers."""
        return Columns(function(self.shared), function(self.own), self.runs, self.heat)

    def instances(self, index: IndexArray | list[int]) -> Columns:
        """Some of the rows."""
        heat = None if self.heat is None else self.heat[index]
        return Columns(self.shared, self.own[index], self.runs, heat)

    def part(self, start: int, stop: int, is_shared: bool) -> Any:
        """Columns that are all shared, `(1 | B, count)`, or all not, `(B, count)`."""
        if start == stop:
            return self._cooled(self.shared[:, :0]) if is_shared else self.own[:, :0]
        return self._piece(bisect(_starts(self.runs), start) - 1, start, stop)

    def row(self, i: int, start: int, stop: int) -> Any:
        """Some columns of a row."""
        if start == stop:
            return self.own[i, :0]
        starts = _starts(self.runs)
        runs = range(bisect(starts, start) - 1, bisect_left(starts, stop))
        one = self.instances([i])
        return np.concatenate([one._piece(k, start, stop)[0] for k in runs])

    def at(self, rows: IndexArray, columns: IndexArray) -> FloatArray:
        """The numbers at some places."""
        found = np.empty(len(rows), self.own.dtype)
        place = np.searchsorted(_starts(self.runs), columns, "right") - 1
        begin = np.array([run.column - run.start for run in _spans(self.runs)], np.int64)
        is_shared = np.array([run.is_shared for run in _spans(self.runs)], bool)[place]
        column = columns + begin[place]
        found[is_shared] = self.shared[0, column[is_shared]]
        if self.heat is not None:
            found[is_shared] /= self.heat[rows[is_shared], 0]
        found[~is_shared] = self.own[rows[~is_shared], column[~is_shared]]
        return found

    def dot(self, rows: FloatArray) -> FloatArray:
        """Each row of `(B, P)` times that of the matrix, `(B,)`; what is not finite counts as 0."""
        total = np.zeros(len(rows))
        for run in _spans(self.runs):
            some = rows[:, run.start : run.stop]
            array = self.shared if run.is_shared else self.own
            columns = array[:, run.column : run.column + run.stop - run.start]
            columns = np.broadcast_to(np.where(np.isfinite(columns), columns, 0), some.shape)
            part = np.einsum("bp,bp->b", some, columns, dtype=np.float64)
            total += part if self.heat is None or not run.is_shared else part / self.heat[:, 0]
        return total

    def _piece(self, k: int, start: int, stop: int) -> Any:
        """The columns from `start` to `stop` that are in a run."""
        run = _spans(self.runs)[k]
        array = self.shared if run.is_shared else self.own
        first, last = max(start, run.start), min(stop, run.stop)
        piece = array[:, run.column + first - run.start : run.column + last - run.start]
        return self._cooled(piece) if run.is_shared else piece

    def _cooled(self, shared: Any) -> Any:
        """Shared columns as each row has them, `(1 | B, count)`."""
        if self.heat is None:
            return shared
        with np.errstate(over="ignore"):
            cooled = shared / self.heat
            return cooled if cooled.dtype == shared.dtype else cooled.astype(shared.dtype)


class _Run(NamedTuple):
    """Columns from `start` to `stop`, all shared or all not; `column`: the first among its like."""

    start: int
    stop: int
    is_shared: bool
    column: int


@lru_cache(maxsize=64)
def _spans(runs: tuple[int, ...]) -> list[_Run]:
    """The runs that are not empty."""
    found, start, columns = [], 0, [0, 0]
    for k, count in enumerate(runs):
        is_shared = k % 2 == 0
        if count:
            found.append(_Run(start, start + count, is_shared, columns[is_shared]))
        columns[is_shared] += count
        start += count
    return found


@lru_cache(maxsize=64)
def _starts(runs: tuple[int, ...]) -> list[int]:
    """Where the runs begin."""
    return [run.start for run in _spans(runs)]
