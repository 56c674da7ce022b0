"""Local search: good structures quickly, without a proof.

The core searches over units: binary variables, and one-hot groups, which are the groups of the
tables and the rows of the form x₁ + … + x_K = 1. Other structured factors are not taken apart:
their variables stay fixed while the others move, and a factor as a whole moves to the structure
that its oracle finds best given the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax import _core
from factormax._core import OracleKind, RowKind, best_structures
from factormax._inputs import Inputs, structured_of
from factormax.arrays import FloatArray

__all__ = ["LocalSearch"]

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

_LARGEST_TABLES = 1 << 25  # numbers in all tables made of pairs
_ROUNDS = 8  # over the structured factors


@dataclass(frozen=True)
class _Rows:
    """Rows of coefficients over variables, flat."""

    row: IntArray
    col: IntArray
    coef: FloatArray
    rhs: FloatArray
    equal: BoolArray

    def without(self, gone: BoolArray, absent: BoolArray) -> _Rows:
        """Without the rows `gone` and the variables `absent`, which are 0."""
        kept = ~gone[self.row] & ~absent[self.col] & (self.coef != 0)
        number = np.cumsum(~gone) - 1
        return _Rows(
            number[self.row[kept]],
            self.col[kept],
            self.coef[kept],
            self.rhs[~gone],
            self.equal[~gone],
        )


class LocalSearch:
    """The local search of one instance.

    Attributes:
        size: the work of one pass, in units of work.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._inputs, self._model = inputs, inputs.model
        self._structured = structured_of(inputs.model)
        n = inputs.model.num_variables
        present = inputs.present[0]
        self._eta_u = np.where(present, inputs.eta_u[0], 0.0).astype(np.float64)
        rows = _lowered(inputs)
        self.present = present
        used = self._tables(present)
        # Variables of structured factors that have no tables in the core stay fixed.
        self._held = np.zeros(n, bool)
        for place in self._blocks:
            self._held[self._variables(place)] = True
        gone = self._one_hot_rows(rows, present)
        self._number_states(n)
        self._rows = rows.without(gone, ~present)
        self._core = self._build(used)

    # ---- units -----------------------------------------------------------------------------------

    def _variables(self, place: int) -> IntArray:
        return np.asarray(self._structured[place].variables, dtype=np.int64)

    def _tables(self, present: BoolArray) -> list[tuple[int, list[int]]]:
        """Turns the groups of tables into units; returns the tables with the units of each.

        A table whose groups overlap others, or have no state left, is a block like any structure.
        """
        self._groups: list[IntArray] = []
        self._blocks: list[int] = []
        self._unit_of = np.full(len(present), -1)
        used = []
        for place, factor in enumerate(self._structured):
            if factor.kind != OracleKind.table:
                self._blocks.append(place)
                continue
            parts = np.split(self._variables(place), np.cumsum(factor.shape)[:-1])
            fits = all(present[part].any() and self._is_unit(part) for part in parts)
            if not fits:
                self._blocks.append(place)
                continue
            used.append((place, [self._unit(part) for part in parts]))
        return used

    def _is_unit(self, part: IntArray) -> bool:
        unit = self._unit_of[part[0]]
        if unit < 0:
            return bool((self._unit_of[part] < 0).all())
        return np.array_equal(self._groups[unit], part)

    def _unit(self, part: IntArray) -> int:
        if self._unit_of[part[0]] < 0:
            self._unit_of[part] = len(self._groups)
            self._groups.append(part)
        return int(self._unit_of[part[0]])

    def _one_hot_rows(self, rows: _Rows, present: BoolArray) -> BoolArray:
        """Turns rows that require exactly one of their variables into units; returns which ones."""
        gone = np.zeros(len(rows.rhs), bool)
        of_tables = len(self._groups)
        ones = np.bincount(rows.row[rows.coef != 1], minlength=len(gone)) == 0
        length = np.bincount(rows.row, minlength=len(gone))
        ends = np.cumsum(length)
        for r in np.flatnonzero(rows.equal & (rows.rhs == 1) & ones & (length > 1)):
            part = rows.col[ends[r] - length[r] : ends[r]]
            if present[part].any() and not self._held[part].any() and self._is_unit(part):
                self._unit(part)
                gone[r] = True
        if self._pair_numbers() > max(_LARGEST_TABLES, 8 * self._model.num_pairs):
            # Groups with few pairs between them would make large tables of zeros.
            self._groups = self._groups[:of_tables]
            self._unit_of[self._unit_of >= of_tables] = -1
            gone[:] = False
        return gone

    def _pair_numbers(self) -> int:
        """The most numbers that the tables made of pairs can have."""
        sizes = np.array([len(g) for g in self._groups] + [2])
        unit = self._unit_of[self._model.pairs]
        return int((sizes[unit[:, 0]] * sizes[unit[:, 1]]).sum())

    def _number_states(self, n: int) -> None:
        """Numbers the states: groups first, then variables that are in none, each off or on."""
        alone = np.flatnonzero(self._unit_of < 0)
        groups = len(self._groups)
        self._unit_of[alone] = groups + np.arange(len(alone))
        sizes = np.array([len(g) for g in self._groups] + [2] * len(alone), dtype=np.int64)
        self._ptr = np.concatenate([[0], np.cumsum(sizes)])
        self._state_of = np.empty(n, np.int64)  # the state in which each variable is on
        self._state_of[alone] = self._ptr[groups:-1] + 1
        if groups:
            self._state_of[np.concatenate(self._groups)] = np.arange(self._ptr[groups])

    # ---- the model -------------------------------------------------------------------------------

    def _build(self, used: list[tuple[int, list[int]]]) -> Any:
        sizes = np.diff(self._ptr)
        score = np.zeros(self._ptr[-1])
        score[self._state_of] = self._eta_u
        allowed = np.ones(len(score), bool)
        allowed[self._state_of] = self.present
        units, pair_sizes, tables = self._pair_tables(score)
        scopes = [units.reshape(-1)]
        orders = [np.full(len(units), 2)]
        table_sizes = [pair_sizes]
        parts = [tables]
        for place, own in used:
            values = self._inputs.factor_scores(0, self._structured[place])
            scopes.append(np.array(own))
            orders.append(np.array([len(own)]))
            table_sizes.append(np.array([len(values)]))
            parts.append(values)
        table = np.concatenate(parts)
        forbidden = np.isneginf(table)
        if forbidden.any():  # use a score that all the others can't outweigh
            finite = np.abs(np.where(forbidden, 0.0, table))
            table = np.where(forbidden, -(1 + 4 * finite.max() * len(orders)), table)
            table[forbidden] -= 2 * np.abs(score).sum()
        self._allowed, self._score = allowed, score
        rows = self._rows
        order = np.argsort(rows.row, kind="stable")
        row_ptr = _offsets(np.bincount(rows.row, minlength=len(rows.rhs)))
        scope = np.concatenate(scopes).astype(np.int32)
        self.size = int(len(score) + len(rows.row) + 2 * len(scope))
        self._arrays = (
            self._ptr.astype(np.int32),
            score,
            allowed.view(np.uint8),
            _offsets(np.concatenate(orders)),
            scope,
            _offsets(np.concatenate(table_sizes), np.int64),
            np.ascontiguousarray(table),
            row_ptr,
            self._state_of[rows.col[order]].astype(np.int32),
            np.ascontiguousarray(rows.coef[order], np.float64),
            np.ascontiguousarray(rows.rhs, np.float64),
            rows.equal.view(np.uint8),
        )
        held = np.ones(len(sizes), bool)
        held[self._unit_of[self._held]] = False
        self._movable = held.view(np.uint8)
        return _core.LocalSearch(*self._arrays)

    def _pair_tables(self, score: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
        """The pairs as tables over units; their linear terms are added to the scores.

        For negated literals, w (1 − x) y = w y − w x y, and so on.
        """
        model, sizes = self._model, np.diff(self._ptr)
        pairs = model.pairs.astype(np.int64)
        weight = self._inputs.eta_v[0, : len(pairs)].astype(np.float64)
        negated = np.asarray(model.pair_negated)
        for k in (0, 1):  # w (1 − x_k) y: the 1 stays with y, if y is a variable
            own = negated[:, k] & ~negated[:, 1 - k]
            np.add.at(score, self._state_of[pairs[own, 1 - k]], weight[own])
        both = negated.all(axis=1)
        for k in (0, 1):
            np.add.at(score, self._state_of[pairs[both, k]], -weight[both])
        signed = np.where(negated.sum(axis=1) == 1, -weight, weight)
        kept = (signed != 0) & self.present[pairs].all(axis=1)
        unit, state = self._unit_of[pairs[kept]], self._state_of[pairs[kept]]
        signed = signed[kept]
        apart = unit[:, 0] != unit[:, 1]  # two variables of a group are never both on
        unit, state, signed = unit[apart], state[apart], signed[apart]
        swap = unit[:, 0] > unit[:, 1]
        unit[swap], state[swap] = unit[swap, ::-1], state[swap, ::-1]
        key, which = np.unique(unit[:, 0] * len(sizes) + unit[:, 1], return_inverse=True)
        first, second = key // max(len(sizes), 1), key % max(len(sizes), 1)
        numbers = sizes[first] * sizes[second]
        begin = np.concatenate([[0], np.cumsum(numbers)])
        table = np.zeros(begin[-1])
        local = state - self._ptr[unit]
        at = begin[which.reshape(-1)] + local[:, 0] * sizes[unit[:, 1]] + local[:, 1]
        np.add.at(table, at, signed)
        return np.stack([first, second], axis=1), numbers, table

    # ---- queries ---------------------------------------------------------------------------------

    def improve(
        self,
        x: FloatArray,
        work: int,
        seed: int = 0,
        over: Callable[[], bool] = lambda: False,
    ) -> Iterator[FloatArray]:
        """Assignments near x, `(n,)`, which may be fractional; the caller must check them.

        Args:
            x: where to start.
            work: how much to do, in units of about a nanosecond. Equal work gives equal results.
            seed: the seed of the random moves.
            over: called now and then; returns whether to stop.
        """
        if not self._blocks:
            yield self._improved(x, work, seed, over)
            return
        share = work // (_ROUNDS * len(self._blocks) + 1)
        x = self._improved(self._whole_structures(x), share, seed, over)
        yield x
        # Rows that the structures break get a price, which grows as long as they are broken.
        rows = self._rows
        price = np.zeros(len(rows.rhs))
        step = (np.ptp(self._score) or 1.0) / 2
        for _ in range(_ROUNDS):
            before = x
            for place in self._blocks:
                if over():
                    return
                moved = self._moved_block(x, place, price)
                if moved is not None and (moved != x).any():
                    x = self._improved(moved, share, seed, over)
                    yield x
            excess = np.bincount(rows.row, rows.coef * x[rows.col], len(rows.rhs)) - rows.rhs
            if (x == before).all() and not ((excess > 0) | (rows.equal & (excess < 0))).any():
                return
            price += step * np.clip(excess, -1, 1)
            price = np.where(rows.equal, price, np.maximum(price, 0))

    def _improved(
        self, x: FloatArray, work: int, seed: int, over: Callable[[], bool]
    ) -> FloatArray:
        """Improves x, in slices, so that a deadline is noticed soon."""
        states = self._states(x)
        slice_work = 10_000_000
        while work > 0:
            self._core.run(states, self._movable, min(work, slice_work), seed)
            work -= slice_work
            seed += 1
            if over():
                break
        return self._assignment(states)

    def _states(self, x: FloatArray) -> npt.NDArray[np.int32]:
        """The states nearest to x; where x says nothing about a group, the one that scores best."""
        spread = np.ptp(self._score) if len(self._score) else 0.0
        leaning = np.zeros(len(self._score))
        leaning[self._state_of] = np.where(self.present, x, 0.0)
        leaning += 1e-6 * self._score / (spread or 1.0)
        groups = len(self._groups)
        leaning[self._ptr[groups : len(self._ptr) - 1]] = 0.5  # off
        leaning[~self._allowed] = -np.inf
        states = np.empty(len(self._ptr) - 1, np.int32)
        size_of = np.diff(self._ptr)
        for size in np.unique(size_of):
            units = np.flatnonzero(size_of == size)
            own = self._ptr[units][:, None] + np.arange(size)
            states[units] = np.argmax(leaning[own], axis=1)
        return states

    def _assignment(self, states: npt.NDArray[np.int32]) -> FloatArray:
        on = np.zeros(self._ptr[-1])
        on[self._ptr[:-1] + states] = 1
        return np.asarray(on[self._state_of])

    # ---- structured factors ----------------------------------------------------------------------

    def _whole_structures(self, x: FloatArray) -> FloatArray:
        """The assignment with the nearest structure of each structured factor."""
        x = x.copy()
        for place in self._blocks:
            var = self._variables(place)
            found = self._best(place, 2 * x[var] - 1, np.zeros(self._structured[place].num_scores))
            if found is not None:
                x[var] = found
        return x

    def _moved_block(self, x: FloatArray, place: int, price: FloatArray) -> FloatArray | None:
        """The assignment with one factor at its best structure given all other variables.

        price: one price per row, subtracted from the scores of its variables.
        """
        var = self._variables(place)
        given = np.empty(self._ptr[-1])
        self._core.conditional(self._states(x), given)
        # The score of on minus the score of off: these variables are in no group.
        scores = given[self._state_of] - given[self._ptr[self._unit_of]]
        rows = self._rows
        scores -= np.bincount(rows.col, rows.coef * price[rows.row], len(x))
        own = self._inputs.factor_scores(0, self._structured[place])
        found = self._best(place, scores[var], own)
        if found is None:
            return None
        moved = x.copy()
        moved[var] = found
        return np.asarray(moved)

    def _best(self, place: int, scores: FloatArray, own: FloatArray) -> FloatArray | None:
        kind = self._structured[place].kind
        present = self.present[self._variables(place)]
        if not present.any():
            return np.zeros(len(scores))
        scores = np.where(present, scores, -np.inf)
        if kind == OracleKind.callback:
            answer = self._inputs.oracles[place]._ask(scores, own)
            return None if answer is None else np.asarray(answer[0])
        on, _, found = best_structures(
            kind,
            self._structured[place].shape,
            scores[None].astype(np.float64),
            own[None].astype(np.float64),
            self._inputs.oracle_params[0, place : place + 1],
        )
        if not found[0]:
            return None
        return np.bincount(on[on >= 0], minlength=len(scores)).astype(np.float64)


def _lowered(inputs: Inputs) -> _Rows:
    """The rows that are present."""
    model = inputs.model
    if model.num_rows == 0:
        none = np.zeros(0, np.int64)
        return _Rows(none, none, np.zeros(0), np.zeros(0), np.zeros(0, bool))
    coef, rhs = inputs.rows
    number = np.repeat(np.arange(model.num_rows), np.diff(model.row_ptr))
    equal = model.row_kind == int(RowKind.equality)
    all_rows = _Rows(number, model.col.astype(np.int64), coef[0], rhs[0], equal)
    present = inputs.rows_present()
    if present is None:
        return all_rows
    return all_rows.without(~present[0], np.zeros(model.num_variables, bool))


def _offsets(lengths: npt.NDArray[Any], dtype: npt.DTypeLike = np.int32) -> npt.NDArray[Any]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)
