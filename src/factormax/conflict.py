"""Which factors of an infeasible instance exclude each other, by the solver's certificate.

The certificate has a multiplier for every row (docs/math.md, equation 23): the rows with a nonzero
multiplier can't hold together. Structured factors enter it through their best structures. To name
few factors, multipliers that the proof does not need are set to 0 first. If propagation from row to
row finds a smaller set of rows that exclude each other, as with contradictory clues, that is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax import _core
from factormax._core import OracleKind, best_structures
from factormax._inputs import Inputs, structured_of
from factormax._names import literals_name, scalar_name
from factormax._raw import RawSolution
from factormax.arrays import FloatArray
from factormax.factors.base import BaseFactor

__all__ = ["Conflicts", "FactorName", "conflicts_of", "name_of"]


class FactorName(str):
    """The name of a factor, or of one row of a factor with `axis=`, for example `Xor over u[3, :]`.

    Attributes:
        factor: the factor itself; None after pickling.
        row: the place of the row in the factor, an index into the shape that `axis` leaves; () if
            there is only one.
    """

    factor: BaseFactor | None
    row: tuple[int, ...]

    def __new__(
        cls, text: str, factor: BaseFactor | None = None, row: tuple[int, ...] = ()
    ) -> FactorName:
        """The name `text` of this row of the factor."""
        name = super().__new__(cls, text)
        name.factor, name.row = factor, row
        return name

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without the factor, which refers to the graph and all its arrays."""
        return FactorName, (str(self), None, self.row)


def name_of(factor: BaseFactor, k: int) -> FactorName:
    """The name of the k-th of the factors that the object stands for."""
    if factor._count == 1:
        return FactorName(factor.name, factor)
    negated = None if factor._negated is None else factor._negated[k]
    text = f"{factor.kind} over {literals_name(factor._record, factor._index[k], negated)}"
    whole = math.prod(factor._group_shape) == factor._count
    shape = factor._group_shape if whole else (k + 1,)
    return FactorName(text, factor, tuple(int(i) for i in np.unravel_index(k, shape)))


class Conflicts:
    """The conflicts of the infeasible instances of a batch, each found on demand.

    Args:
        factors: the factors of the graph, in order.
        inputs: the numbers of the batch.
        raw: the solution.
        batch_shape: the batch dimensions, for messages; None if only B is known.
    """

    def __init__(
        self,
        factors: Sequence[BaseFactor],
        inputs: Inputs,
        raw: RawSolution,
        batch_shape: tuple[int, ...] | None = None,
    ) -> None:
        self._factors = list(factors)
        self._batch_shape = (inputs.batch,) if batch_shape is None else batch_shape
        self._inputs = inputs
        self._present = inputs.present
        self._proofs = raw.proofs
        self._found: dict[int, list[FactorName]] = {}

    def __call__(self, instance: int) -> list[FactorName]:
        """The factors that exclude each other in an instance of the flat batch."""
        if instance not in self._found:
            self._found[instance] = self._find(instance)
        return list(self._found[instance])

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: only the names."""
        return {"_found": {i: self(i) for i in [*self._found, *self._proofs]}, "_proofs": {}}

    def describe(self, instance: int) -> str:
        """A sentence that names the factors, and what is masked; empty if they are unknown."""
        names = self(instance)
        if not names:
            return ""
        parts = [name + self._masked(name, instance) for name in names[:_NAMED]]
        if len(names) == 1:
            return f"{parts[0]} can't hold, whatever the other factors are."
        more = f"; and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return f"These exclude each other: {'; '.join(parts)}{more}."

    def of_first(self) -> str:
        """What a message adds about the first infeasible instance and its conflict."""
        first = min(self._proofs)
        text = self.describe(first)
        if len(self._present) == 1:
            return text and f" {text}"
        place = tuple(int(i) for i in np.unravel_index(first, self._batch_shape))
        return f" The first is instance {place}." + (text and f" {text}")

    def _masked(self, name: FactorName, instance: int) -> str:
        factor = name.factor
        if factor is None:
            return ""
        k = int(np.ravel_multi_index(name.row, factor._group_shape)) if name.row else 0
        index = factor._index[k]
        there = index[self._present[instance, index]]
        if len(there) == len(index):
            return ""
        if len(there) <= 3:
            left = [scalar_name(factor._record, int(j)) for j in there]
            return f" (all but {', '.join(left)} masked)" if left else " (all masked)"
        return f" ({len(index) - len(there)} of its {len(index)} variables masked)"

    def _find(self, instance: int) -> list[FactorName]:
        proof = self._proofs.get(instance)
        if proof is None:
            return []
        if proof.impossible:
            first = structured_of(self._inputs.model)[proof.impossible[0]]
            return [name_of(self._factors[first.factor], 0)]
        one = _Instance(self._inputs.instance(instance), self._factors)
        places = one.conflict(np.asarray(proof.multipliers, dtype=np.float64))
        return [name_of(self._factors[f], k) for f, k in places if f < len(self._factors)]


def conflicts_of(
    factors: Sequence[BaseFactor],
    inputs: Inputs,
    raw: RawSolution,
    batch_shape: tuple[int, ...] | None = None,
) -> Conflicts | None:
    """The conflicts of a solution; None if no instance is proved to be infeasible."""
    return Conflicts(factors, inputs, raw, batch_shape) if raw.proofs else None


_NAMED = 8  # the most factors that a message names
_MOST = 128  # the most rows that are tried one by one
_MOST_ROUNDS = 200  # of propagation, in which all rows switch variables on or off at once


@dataclass
class _Structured:
    """A structured factor in a certificate: what its best structure adds."""

    place: int
    factor: _core.Structured
    var: npt.NDArray[np.int32]
    links: slice | None  # where its multipliers are, if it is linked
    support: Callable[[FloatArray], float]  # the best score of a structure, from variable scores


@dataclass
class _Instance:
    """One instance: the terms of its certificate, docs/math.md (23)."""

    inputs: Inputs
    factors: list[BaseFactor]

    @cached_property
    def model(self) -> _core.Model:
        held = self.inputs.held is not None
        return self.inputs.model.bounded if held else self.inputs.model

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.inputs.present[0])

    @cached_property
    def structured(self) -> list[_Structured]:
        """The structured factors that are present."""
        link = self.model.num_rows + self.model.num_pairs
        out = []
        for place, factor in enumerate(structured_of(self.model)):
            var = factor.variables
            links = None
            if factor.linked:
                links = slice(link, link + len(var))
                link += len(var)
            if self.present[var].any():
                support = self._support_of(place, factor)
                out.append(_Structured(place, factor, var, links, support))
        return out

    def conflict(self, y: FloatArray) -> list[tuple[int, int]]:
        """The factors that the certificate needs, and which of their k."""
        y[np.abs(y) < 1e-9 * np.abs(y).max(initial=0)] = 0
        needed = {s.place for s in self.structured}
        if self.proves(y, needed):
            y = self.fewer(y, needed)
            for s in self.structured:  # try without it: the box, or nothing, takes its place
                without = y.copy()
                if s.links is not None:
                    without[s.links] = 0
                if self.proves(without, needed - {s.place}):
                    y, needed = without, needed - {s.place}
            y = self.fewer(y, needed)
        found = [self.named(y, needed)]
        if len(found[0]) > 2:
            for rows in self.propagated():
                y = np.zeros(len(y))
                y[rows] = 1
                found.append(self.named(y, set()))
        return min(found, key=len)

    def named(self, y: FloatArray, needed: set[int]) -> list[tuple[int, int]]:
        rows = np.flatnonzero(y[: self.model.num_rows])
        blocks = np.unique(np.searchsorted(self.model.block_ptr, rows, side="right") - 1)
        places = {self.model.place_of_block(int(b)) for b in blocks}
        v = self.pull(y)
        for s in self.structured:
            touched = v[s.var] if s.links is None else y[s.links]
            if s.place in needed and np.any(touched != 0):
                places.add((s.factor.factor, s.factor.number))
        return sorted(places)

    def fewer(self, y: FloatArray, needed: set[int]) -> FloatArray:
        """Drops multipliers, small ones first, in ever smaller portions, while y is a proof."""
        order = np.flatnonzero(y[: self.model.num_rows])
        order = order[np.argsort(np.abs(y[order]), kind="stable")]
        portion = (len(order) + 1) // 2
        least = 1 if len(order) <= _MOST else len(order) // 64
        while portion >= least and len(order) > 1:
            kept = []
            for start in range(0, len(order), portion):
                part = order[start : start + portion]
                without = y.copy()
                without[part] = 0
                if self.proves(without, needed):
                    y = without
                else:
                    kept.append(part)
            order = np.concatenate([*kept, np.zeros(0, dtype=np.int64)])
            portion //= 2
        return y

    def propagated(self) -> list[list[int]]:
        """Sets of rows that exclude each other, each switching variables on or off for the next."""
        model, (coef, bounds), total = self.model, self.inputs.rows, self.model.num_rows
        if not total:
            return []
        row = np.repeat(np.arange(total), np.diff(model.row_ptr))
        block = np.repeat(np.arange(len(model.block_ptr) - 1), np.diff(model.block_ptr))
        there = np.bincount(block[row], self.present[model.col], minlength=len(model.block_ptr) - 1)
        holds = (there[block] == 0) | (model.row_kind == int(_core.RowKind.absent))
        bound = np.where(holds, np.inf, bounds[0])
        # An equation is two inequalities; the second has its own number.
        equal = model.row_kind == int(_core.RowKind.equality)
        twice = equal[row]
        row = np.concatenate([row, row[twice] + total])
        col = np.concatenate([model.col, model.col[twice]])
        a = np.concatenate([coef[0], -coef[0][twice]])
        bound = np.concatenate([bound, np.where(equal & ~holds, -bound, np.inf)])

        low, high = np.zeros(len(self.present)), self.present.astype(np.float64)
        why = np.full(len(self.present), -1)  # the row that switched a variable on or off,
        when = np.full(len(self.present), -1)  # and in which round
        for now in range(_MOST_ROUNDS):
            least = a * np.where(a > 0, low[col], high[col])
            activity = np.bincount(row, least, minlength=2 * total)
            broken = np.flatnonzero(activity > bound + 1e-6 * (1 + np.abs(bound)))
            if len(broken):
                break
            room = bound[row] - activity[row] + least
            off = (a > 0) & (high[col] > 0) & (room <= 1e-9 * a)
            on = (a < 0) & (low[col] < 1) & (room <= (1 - 1e-9) * a)
            fixed = np.flatnonzero(off | on)
            if not len(fixed):
                return []
            fixed = fixed[np.unique(col[fixed], return_index=True)[1]]
            why[col[fixed]], when[col[fixed]] = row[fixed], now
            high[col[fixed[off[fixed]]]] = 0
            low[col[fixed[on[fixed]]]] = 1
        else:
            return []

        order = np.argsort(row, kind="stable")
        ends = np.searchsorted(row[order], np.arange(2 * total + 1))

        def against(r: int, before: int) -> list[int]:
            """The variables of a row that other rows switched against it before a round."""
            entries = order[ends[r] : ends[r + 1]]
            switched = np.where(a[entries] > 0, low[col[entries]] == 1, high[col[entries]] == 0)
            j = col[entries[switched]]
            return [int(v) for v in j[(why[j] >= 0) & (when[j] < before)]]

        def reasons(last: int) -> list[int]:
            """The row, the rows that switched its variables against it, theirs, and so on."""
            rows, seen, left = {last % total}, set[int](), against(last, now)
            while left:
                v = left.pop()
                if v not in seen:
                    seen.add(v)
                    rows.add(int(why[v]) % total)
                    left += against(int(why[v]), int(when[v]))
            return sorted(rows)

        return [reasons(int(r)) for r in broken[:_NAMED]]

    def pull(self, y: FloatArray) -> FloatArray:
        """The transpose of all rows, links included, times y, `(n,)`."""
        model, (coef, _) = self.model, self.inputs.rows
        lengths = np.diff(model.row_ptr)
        terms = coef[0] * np.repeat(y[: model.num_rows], lengths)
        v = np.bincount(model.col, terms, minlength=model.num_variables).astype(np.float64)
        for s in self.structured:
            if s.links is not None:
                v[s.var] += y[s.links]
        v[~self.present] = 0
        return np.asarray(v)

    def proves(self, y: FloatArray, needed: set[int]) -> bool:
        """Whether y certifies infeasibility, with the box in place of hubs not in `needed`."""
        if not y.any():
            return False
        v, hard = self.pull(y), y[: self.model.num_rows]
        coef, bounds = self.inputs.rows
        rhs = np.where(hard == 0, 0, bounds[0]) * hard
        size = np.abs(rhs).sum() + np.abs(coef[0]) @ np.repeat(
            np.abs(hard), np.diff(self.model.row_ptr)
        )
        value, box = float(rhs.sum()), self.present.copy()
        for s in self.structured:
            if s.place not in needed:
                continue
            if s.links is None:
                box[s.var] = False
                value += s.support(-v[s.var])
            else:
                value += s.support(y[s.links])
        value += float(np.maximum(-v[box], 0).sum())
        return bool(value < -self.resolution * (size or np.abs(y).sum()))

    @property
    def resolution(self) -> float:
        return 1e-10 if self.inputs.eta_u.dtype == np.float64 else 1e-5

    def _support_of(self, place: int, factor: _core.Structured) -> Callable[[FloatArray], float]:
        own: Any = self.factors[factor.factor]
        barrier = np.where(self.inputs.factor_scores(0, factor) == -np.inf, -np.inf, 0.0)
        param = self.inputs.oracle_params[0, place : place + 1]

        def support(scores: FloatArray) -> float:
            if not scores.any():
                return 0.0
            here = self.present[factor.variables]
            given = np.asarray(np.where(here, scores, -np.inf), dtype=np.float64)
            if factor.kind == OracleKind.callback:
                found = own._ask(given, barrier)
                return np.inf if found is None else float(given[found[0] == 1].sum())
            on, _, exists = best_structures(
                factor.kind, factor.shape, given[None], barrier[None], param
            )
            return float(given[on[on >= 0]].sum()) if exists[0] else np.inf

        return support
