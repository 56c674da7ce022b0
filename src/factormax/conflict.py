"""Which factors of an infeasible instance exclude each other, by the certificate of the solver.

The certificate is a multiplier for every row (docs/math.md, equation 23): the rows with a
multiplier can't hold together. Where structured factors take part, they stand in it with their best
structures. Multipliers that the proof can do without are set to 0 first: few factors are named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax._core import best_structures
from factormax.arrays import FloatArray
from factormax.compiled import CompiledGraph, Lowered, Wiring, compile_wiring
from factormax.engine import Numbers, RawSolution, one_instance
from factormax.factors.base import BaseFactor
from factormax.factors.structured import CALLBACK

__all__ = ["Conflicts", "FactorName", "conflicts_of", "name_of", "place_of_block"]


class FactorName(str):
    """The name of a factor, or of one row of a factor with `axis=`, for example `Xor over u[3, :]`.

    Attributes:
        factor: the factor itself; None once it was pickled.
        row: where in the factor the row is, an index into the shape that `axis` leaves; () if the
            factor is only one.
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
        """Pickled without the factor, which leads to the graph and all its arrays."""
        return FactorName, (str(self), None, self.row)


def name_of(factor: BaseFactor, k: int) -> FactorName:
    """The name of number k of the factors that the object stands for."""
    if len(factor.index) == 1:
        return FactorName(factor.name, factor)
    negated = None if factor.negated is None else factor.negated[k]
    text = f"{factor.kind} over {factor.graph.literals_name(factor.index[k], negated)}"
    shape = factor.group_shape if np.prod(factor.group_shape) == len(factor.index) else (k + 1,)
    return FactorName(text, factor, tuple(int(i) for i in np.unravel_index(k, shape)))


def place_of_block(graph: CompiledGraph, block: int) -> tuple[int, int]:
    """The factor of the graph that a block of rows belongs to, and which of its k it is."""
    for bundle in graph.bundles:
        for position in bundle.entries:
            if block < graph.entries[position].k:
                return position, block
            block -= graph.entries[position].k
    raise IndexError(block)


class Conflicts:
    """The conflicts of the infeasible instances of a batch, each found when it is asked for.

    Args:
        factors: those of the graph, in its order.
        wiring: of the graph; it may have more factors, which are not named.
        numbers: of the batch.
        raw: the solution.
    """

    def __init__(
        self, factors: Sequence[BaseFactor], wiring: Wiring, numbers: Numbers, raw: RawSolution
    ) -> None:
        self._factors = list(factors)
        self._wiring, self._numbers = wiring, numbers
        here = numbers.eta_u != -np.inf
        self._present = here if numbers.mask is None else here & numbers.mask
        self._proofs = raw.proofs
        self._found: dict[int, list[FactorName]] = {}

    def __call__(self, instance: int) -> list[FactorName]:
        """The factors that exclude each other in an instance of the flat batch."""
        if instance not in self._found:
            self._found[instance] = self._find(instance)
        return list(self._found[instance])

    def __getstate__(self) -> dict[str, Any]:
        """The names alone."""
        return {"_found": {i: self(i) for i in [*self._found, *self._proofs]}, "_proofs": {}}

    def describe(self, instance: int) -> str:
        """A sentence that names them, and what is masked; empty if they are not known."""
        names = self(instance)
        if not names:
            return ""
        parts = [name + self._masked(name, instance) for name in names[:_NAMED]]
        if len(names) == 1:
            return f"{parts[0]} can't hold, whatever the other factors say."
        more = f"; and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return f"These exclude each other: {'; '.join(parts)}{more}."

    def of_first(self) -> str:
        """What a message adds: the conflict of the first infeasible instance."""
        text = self.describe(min(self._proofs))
        return text and (" For example: " if len(self._present) > 1 else " ") + text

    def _masked(self, name: FactorName, instance: int) -> str:
        factor = name.factor
        if factor is None:
            return ""
        k = int(np.ravel_multi_index(name.row, factor.group_shape)) if name.row else 0
        index = factor.index[k]
        there = index[self._present[instance, index]]
        if len(there) == len(index):
            return ""
        if len(there) <= 3:
            left = [factor.graph.scalar_name(int(j)) for j in there]
            return f" (all but {', '.join(left)} masked)" if left else " (all masked)"
        return f" ({len(index) - len(there)} of its {len(index)} variables masked)"

    def _find(self, instance: int) -> list[FactorName]:
        proof = self._proofs.get(instance)
        if proof is None:
            return []
        if proof.impossible:
            position = compile_wiring(self._wiring).oracles.positions[proof.impossible[0]]
            return [name_of(self._factors[position], 0)]
        numbers = one_instance(self._wiring, self._numbers, instance)
        one = _Instance(
            compile_wiring(self._wiring.for_one_instance()),
            numbers,
            self._present[instance],
            self._factors,
        )
        places = one.conflict(np.asarray(proof.multipliers, dtype=np.float64))
        return [name_of(self._factors[f], k) for f, k in places if f < len(self._factors)]


def conflicts_of(
    factors: Sequence[BaseFactor], wiring: Wiring, numbers: Numbers, raw: RawSolution
) -> Conflicts | None:
    """The conflicts of a solution; None if no instance is proved to be infeasible."""
    return Conflicts(factors, wiring, numbers, raw) if raw.proofs else None


_NAMED = 8  # factors that a message names
_MOST = 128  # rows that are tried one by one


@dataclass
class _Structured:
    """A structured factor in a certificate: what its best structure adds."""

    place: int
    position: int
    var: npt.NDArray[np.int32]
    links: slice | None  # where its multipliers are, if it is linked
    support: Callable[[FloatArray], float]  # of scores of its variables


@dataclass
class _Instance:
    """One instance: the terms of its certificate, docs/math.md (23)."""

    graph: CompiledGraph
    numbers: Numbers
    present: npt.NDArray[np.bool_]
    factors: list[BaseFactor]

    @cached_property
    def rows(self) -> Lowered:
        return self.graph.lower(self.numbers.params, 1, np.float64)

    @cached_property
    def structured(self) -> list[_Structured]:
        """Those that are present."""
        oracles = self.graph.oracles
        link = self.graph.num_rows + len(self.graph.pairs)
        out = []
        for place, position in enumerate(oracles.positions):
            var = oracles.var[slice(*oracles.var_ptr[place : place + 2])]
            links = None
            if oracles.linked[place]:
                links = slice(link, link + len(var))
                link += len(var)
            if self.present[var].any():
                out.append(_Structured(place, position, var, links, self._support_of(place)))
        return out

    def conflict(self, y: FloatArray) -> list[tuple[int, int]]:
        """The factors that the certificate needs, and which of their k."""
        y[np.abs(y) < 1e-9 * np.abs(y).max(initial=0)] = 0
        needed = {s.place for s in self.structured}
        if self.proves(y, needed):
            y = self.fewer(y, needed)
            for s in self.structured:  # without what it says the box, or nothing, is left
                without = y.copy()
                if s.links is not None:
                    without[s.links] = 0
                if self.proves(without, needed - {s.place}):
                    y, needed = without, needed - {s.place}
            y = self.fewer(y, needed)
        return self.named(y, needed)

    def named(self, y: FloatArray, needed: set[int]) -> list[tuple[int, int]]:
        rows = np.flatnonzero(y[: self.graph.num_rows])
        blocks = np.unique(np.searchsorted(self.graph.block_ptr, rows, side="right") - 1)
        places = {place_of_block(self.graph, int(b)) for b in blocks}
        v = self.pull(y)
        for s in self.structured:
            touched = v[s.var] if s.links is None else y[s.links]
            if s.place in needed and np.any(touched != 0):
                places.add(self.graph.oracles.number(s.place))
        return sorted(places)

    def fewer(self, y: FloatArray, needed: set[int]) -> FloatArray:
        """Drops multipliers, small ones first, in ever smaller portions, while y proves it."""
        order = np.flatnonzero(y[: self.graph.num_rows])
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

    def pull(self, y: FloatArray) -> FloatArray:
        """The transpose of all rows times y, `(n,)`, the links among the rows."""
        graph, rows = self.graph, self.rows
        lengths = np.diff(graph.row_ptr)
        terms = rows.coef[0] * np.repeat(y[: graph.num_rows], lengths)
        v = np.bincount(graph.col, terms, minlength=graph.num_variables).astype(np.float64)
        for s in self.structured:
            if s.links is not None:
                v[s.var] += y[s.links]
        v[~self.present] = 0
        return np.asarray(v)

    def proves(self, y: FloatArray, needed: set[int]) -> bool:
        """Whether y certifies that nothing is feasible, with the box in place of other hubs."""
        if not y.any():
            return False
        v, hard = self.pull(y), y[: self.graph.num_rows]
        rhs = np.where(hard == 0, 0, self.rows.rhs[0]) * hard
        size = np.abs(rhs).sum() + np.abs(self.rows.coef[0]) @ np.repeat(
            np.abs(hard), np.diff(self.graph.row_ptr)
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
        return 1e-10 if self.numbers.eta_u.dtype == np.float64 else 1e-5

    def _support_of(self, place: int) -> Callable[[FloatArray], float]:
        graph, oracles = self.graph, self.graph.oracles
        entry = graph.entries[oracles.positions[place]]
        factor: Any = self.factors[oracles.positions[place]]
        var = oracles.var[slice(*oracles.var_ptr[place : place + 2])]
        first = len(graph.pairs) + oracles.score_ptr[place]
        own = self.numbers.eta_v[0, first : first + entry.num_scores]
        barrier = np.where(own == -np.inf, -np.inf, 0.0)
        param = graph.oracle_params(self.numbers.params, None, 1)[0, place : place + 1]

        def support(scores: FloatArray) -> float:
            if not scores.any():
                return 0.0
            given = np.asarray(np.where(self.present[var], scores, -np.inf), dtype=np.float64)
            if entry.oracle == CALLBACK:
                found = factor.ask(given, barrier)
                return np.inf if found is None else float(given[found[0] == 1].sum())
            on, _, exists = best_structures(
                entry.oracle,
                np.array(entry.shape, dtype=np.int32),
                given[None],
                barrier[None],
                param,
            )
            return float(given[on[on >= 0]].sum()) if exists[0] else np.inf

        return support
