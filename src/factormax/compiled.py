"""From a list of factors to the index arrays of the core.

A graph is described by a `Wiring`: a text that names each factor's kind and size, and the
concatenated indices. `compile_wiring` turns it into a `CompiledGraph`, once: graphs built again
and again with the same wiring, as a training loop does, share it. `CompiledGraph.lower` adds what
depends on parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax import _core
from factormax.arrays import FloatArray, IndexArray, spread
from factormax.errors import GraphError
from factormax.factors.base import BaseFactor, Group, RowBlocks, repeated_variable

__all__ = ["CompiledGraph", "Lowered", "Wiring", "compile_wiring", "num_dual"]


@dataclass(frozen=True)
class Wiring:
    """What is in a graph, without the numbers.

    `spec` is one entry a factor, joined by `;`: `kind,k,d,flags`, where flags has a letter a
    parameter: `s` shared by the instances, `b` one for each. Structured factors add a fifth, whole
    numbers joined by dots: the oracle, a digit for each of the k factors (1 if linked), the number
    of scores, slots, and the shape.
    """

    num_variables: int
    spec: str
    literals: IndexArray  # all factors' (k, d) literals, flat: 2 * variable + (1 if negated)
    checked: bool = False  # whether it is known that no factor has a variable twice
    compiled: CompiledGraph | None = field(default=None, repr=False, compare=False)

    def for_one_instance(self) -> Wiring:
        """The same for an instance alone: all its parameters are shared ones."""
        entries = []
        for text in filter(None, self.spec.split(";")):
            kind, k, d, flags, *rest = text.split(",")
            entries.append(",".join([kind, k, d, flags.replace("b", "s"), *rest]))
        return replace(self, spec=";".join(entries), compiled=None)


@dataclass(eq=False)
class Entry:
    """One factor of a spec."""

    cls: type[BaseFactor]
    k: int
    d: int
    flags: str
    oracle: int = -1
    linked: str = ""  # a digit for each of the k factors
    num_scores: int = 0
    slots: int = 0
    shape: tuple[int, ...] = ()


@lru_cache(maxsize=256)
def parse_spec(spec: str) -> tuple[Entry, ...]:
    """The entries of a wiring's spec."""
    entries = []
    for text in filter(None, spec.split(";")):
        kind, k, d, flags, *structured = text.split(",")
        entry = Entry(BaseFactor.registry[kind], int(k), int(d), flags)
        if structured:
            oracle, linked, *sizes = structured[0].split(".")
            num_scores, slots, *shape = map(int, sizes)
            entry = replace(
                entry,
                oracle=int(oracle),
                linked=linked,
                num_scores=num_scores,
                slots=slots,
                shape=tuple(shape),
            )
        entries.append(entry)
    return tuple(entries)


@lru_cache(maxsize=256)
def num_dual(spec: str) -> int:
    """The number of multipliers: one a row, one a pair, one a variable of a linked factor."""
    return sum(
        e.d * e.linked.count("1") if e.cls.structured else len(e.cls.row_lengths(e.d)) * e.k
        for e in parse_spec(spec)
    )


@dataclass
class _Bundle:
    """All factors of one kind and size: lowered together.

    Whether parameters are shared must not matter here: the order of the rows, and so the last bit
    of an answer, would differ between an instance alone and the same in a batch.
    """

    cls: type[BaseFactor]
    index: IndexArray  # (k, d)
    negated: npt.NDArray[np.bool_]  # (k, d)
    entries: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Lowered:
    """The numbers of a batch's rows. A leading dimension of 1 is shared by all instances."""

    coef: FloatArray  # (1 | B, nnz)
    rhs: FloatArray  # (1 | B, R)


@dataclass(frozen=True)
class Oracles:
    """The structured factors of a graph, S of them: what the core needs of each."""

    positions: npt.NDArray[np.int64]  # (S,) among the factors of the graph
    kind: npt.NDArray[np.int8]  # (S,)
    linked: npt.NDArray[np.uint8]  # (S,)
    var_ptr: npt.NDArray[np.int32]  # (S + 1,) where the variables of each begin
    var: npt.NDArray[np.int32]
    shape_ptr: npt.NDArray[np.int32]  # (S + 1,)
    shape: npt.NDArray[np.int32]
    score_ptr: npt.NDArray[np.int32]  # (S + 1,) where its scores begin, after those of the pairs

    @classmethod
    def of(cls, entries: tuple[Entry, ...], given: list[tuple[int, IndexArray]]) -> Oracles:
        """Those at these positions, with these variables."""
        if not given:
            return _no_oracles()
        return cls._of_some(entries, given)

    @classmethod
    def _of_some(cls, entries: tuple[Entry, ...], given: list[tuple[int, IndexArray]]) -> Oracles:
        chosen = [entries[position] for position, _ in given]
        count = np.array([e.k for e in chosen], dtype=np.int64)

        def each(values: list[int]) -> npt.NDArray[np.int64]:
            """The number of an entry for each of its factors."""
            return np.repeat(np.array(values, dtype=np.int64), count)

        shapes = [np.tile(np.array(e.shape, dtype=np.int32), e.k) for e in chosen]
        none = np.zeros(0, dtype=np.int32)
        digits = "".join([e.linked for e in chosen]).encode()
        return cls(
            positions=each([position for position, _ in given]),
            kind=each([e.oracle for e in chosen]).astype(np.int8),
            linked=np.frombuffer(digits, dtype=np.uint8) - np.uint8(ord("0")),
            var_ptr=_offsets(each([e.d for e in chosen])),
            var=np.concatenate([none, *[v for _, v in given]]).astype(np.int32),
            shape_ptr=_offsets(each([len(e.shape) for e in chosen])),
            shape=np.concatenate([none, *shapes]),
            score_ptr=_offsets(each([e.num_scores for e in chosen])),
        )

    def number(self, place: int) -> tuple[int, int]:
        """The factor of the graph that one of them belongs to, and which of its k it is."""
        position = int(self.positions[place])
        return position, place - int(np.searchsorted(self.positions, position))

    @property
    def num_scores(self) -> int:
        """Of all of them, per instance."""
        return int(self.score_ptr[-1])


@lru_cache(maxsize=1)
def _no_oracles() -> Oracles:
    return Oracles._of_some((), [])


_NO_PARAMS = np.zeros((1, 0))


class CompiledGraph:
    """The immutable index arrays of a graph.

    Attributes:
        row_ptr: `(R + 1,)`, where the entries of each row begin; `col`: `(nnz,)`, their variables;
            `row_kind`: `(R,)`, equations and inequalities.
        pairs: `(P, 2)`, the variables of each pair; `pair_negated` likewise.
        block_ptr: `(F + 1,)`, where the rows of each factor begin; `block_kind`: `(F,)`.
        block_isolated: `(F + P,)`, factors that share no variable with another.
        oracles: the structured factors.
        num_dual: the multipliers: of rows, of pairs, of links.
        num_scores: the factors' own scores.
        core: all of this, as the core holds it.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self.num_variables = wiring.num_variables
        self.entries = parse_spec(wiring.spec)
        pairs: list[IndexArray] = []
        pair_negated: list[npt.NDArray[np.bool_]] = []
        bundles: dict[tuple[type[BaseFactor], int], list[int]] = {}
        structured: list[tuple[int, IndexArray]] = []
        index: list[IndexArray] = []
        negated: list[npt.NDArray[np.bool_]] = []
        variables, signs = wiring.literals >> 1, (wiring.literals & 1).astype(bool)
        start = 0
        for position, entry in enumerate(self.entries):
            stop = start + entry.k * entry.d
            index.append(variables[start:stop].reshape(entry.k, entry.d))
            negated.append(signs[start:stop].reshape(entry.k, entry.d))
            start = stop
            twice = None if wiring.checked else repeated_variable(index[-1])
            if twice is not None:
                raise GraphError(f"{entry.cls.__name__}: variable {twice} is in it twice.")
            if entry.cls.structured:
                structured.append((position, index[-1].reshape(-1)))
            elif entry.cls.soft:
                pairs.append(index[-1])
                pair_negated.append(negated[-1])
            elif entry.k > 0:
                bundles.setdefault((entry.cls, entry.d), []).append(position)
        self.bundles = [
            _Bundle(
                cls,
                _rows([index[i] for i in members]),
                _rows([negated[i] for i in members]),
                members,
            )
            for (cls, _), members in bundles.items()
        ]
        self.pairs = _stack(pairs, np.int32)
        self.pair_negated = _stack(pair_negated, np.uint8)
        self._last: tuple[Any, Lowered] | None = None
        self._shared_params = not any("b" in e.flags for e in self.entries)

        self._lay_out_blocks()
        self.oracles = Oracles.of(self.entries, structured)
        self.block_isolated = self._isolated(variables)
        o = self.oracles
        arrays: list[Any] = [self.row_ptr, self.col, self.row_kind, self.pairs, self.pair_negated]
        arrays += [
            self.block_ptr,
            self.block_kind,
            self.block_isolated,
            o.kind,
            o.linked,
            o.var_ptr,
            o.var,
        ]
        arrays += [o.shape_ptr, o.shape, o.score_ptr]
        for array in arrays:  # checked once, so nobody may change them
            array.setflags(write=False)
        self.core = _core.Graph(self.num_variables, *arrays)
        self.num_dual = num_dual(wiring.spec)
        self.num_scores = len(self.pairs) + self.oracles.num_scores

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled by compiling again: the core's part lives in this process."""
        return CompiledGraph, (self._wiring,)

    def _lay_out_blocks(self) -> None:
        """The rows, the variables of their entries, and the blocks they make up."""
        count = sum([len(b.index) for b in self.bundles])
        rows = np.empty(count, dtype=np.int32)  # of each block
        self.block_kind = np.empty(count, dtype=np.int8)
        none: npt.NDArray[Any] = np.zeros(0, dtype=np.int32)
        lengths, kinds, columns, start = [none], [none], [none], 0
        for b in self.bundles:
            k, d = b.index.shape
            own = np.array([b.cls.row_lengths(d), b.cls.row_kinds(d)], dtype=np.int32)
            every = own.repeat(k, axis=1) if own.shape[1] == 1 else np.tile(own, k)
            lengths.append(every[0])
            kinds.append(every[1])
            columns.append(b.cls.columns(b.index).reshape(-1))
            rows[start : start + k] = own.shape[1]
            self.block_kind[start : start + k] = b.cls.block_kind
            start += k
        self.row_ptr, self.block_ptr = _offsets(np.concatenate(lengths)), _offsets(rows)
        self.row_kind = np.concatenate(kinds).astype(np.int8)
        self.col = np.concatenate(columns, dtype=np.int32, casting="same_kind")

    def _isolated(self, variables: IndexArray) -> npt.NDArray[np.uint8]:
        """variables: of all factors, as often as they are in one."""
        degree = np.bincount(variables, minlength=self.num_variables)
        blocks = [b.index for b in self.bundles] + [self.pairs]
        if degree.min(initial=2) > 1:
            return np.zeros(sum(map(len, blocks)), dtype=np.uint8)
        alone = [(degree[i] == 1).all(axis=1) for i in blocks]
        return np.concatenate(alone).astype(np.uint8)

    @property
    def num_rows(self) -> int:
        """The number of hard rows."""
        return len(self.row_ptr) - 1

    def rows_present(self, here: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """`(B, R)`: False for the rows of a factor all of whose variables are masked.

        here: `(B, n)`, the variables that are not.
        """
        blocks = [here[:, b.index].any(axis=-1) for b in self.bundles]
        each = np.concatenate([np.zeros((len(here), 0), dtype=bool), *blocks], axis=1)
        return np.repeat(each, np.diff(self.block_ptr), axis=1)

    def lower(self, params: FloatArray, batch: int, dtype: npt.DTypeLike) -> Lowered:
        """The rows of a batch with these parameters (flat)."""
        key = (np.dtype(dtype), params.tobytes()) if self._shared_params else None
        last = self._last
        if last is not None and key is not None and last[0] == key:
            return last[1]
        blocks = [self._lower_bundle(b, self._params_of(b, params, batch)) for b in self.bundles]
        lowered = Lowered(
            coef=_join([r.coef for r in blocks], dtype),
            rhs=_join([r.rhs for r in blocks], dtype),
        )
        if key is not None:
            self._last = (key, lowered)
        return lowered

    def oracle_params(
        self, params: FloatArray, mask: npt.NDArray[np.bool_] | None, batch: int
    ) -> npt.NDArray[np.float64]:
        """The parameter of each structured factor, `(1 | B, S)`; 0 where it has none.

        Checks the parameters and the masks of these factors.
        """
        positions = self.oracles.positions
        if not len(positions):
            return _NO_PARAMS
        structured = [e for e in self.entries if e.cls.structured]
        lead = batch if any("b" in e.flags for e in structured) else 1
        out = np.zeros((lead, len(positions)))
        if mask is None and not any(e.flags for e in structured):
            return out
        offsets, stop = self._param_offsets(batch), 0
        for position, entry in enumerate(self.entries):
            if not entry.cls.structured:
                continue
            place, stop = stop, stop + entry.k
            if entry.flags:
                own = batch if entry.flags == "b" else 1
                number = params[offsets[position] :][:own]
                entry.cls.check_params((number,), entry.d, entry.cls.__name__)
                out[:, place] = number
            if mask is not None:
                first, last = self.oracles.var_ptr[[place, stop]]
                present = mask[:, self.oracles.var[first:last]].reshape(-1, entry.d)
                entry.cls.check_mask(present, entry.shape)  # type: ignore[attr-defined]
        return out

    def params_of_instances(
        self, params: FloatArray, instances: IndexArray | list[int], batch: int
    ) -> FloatArray:
        """The parameters of some instances of a batch, flat, as a batch of them has them."""
        parts: list[FloatArray] = [np.zeros(0)]
        start = 0
        for entry in self.entries:
            for shape, flag in zip(entry.cls.param_shapes, entry.flags, strict=True):
                size = entry.k * (entry.d if shape == "literal" else 1)
                lead = batch if flag == "b" else 1
                own = params[start : start + lead * size]
                parts.append(own.reshape(lead, size)[instances].reshape(-1) if flag == "b" else own)
                start += lead * size
        return np.concatenate(parts)

    def _params_of(self, bundle: _Bundle, params: FloatArray, batch: int) -> list[FloatArray]:
        """The bundle's parameters, each `(1 | B, k)` or `(1 | B, k, d)`."""
        if not bundle.cls.param_shapes:
            return []
        offsets = self._param_offsets(batch)
        d = bundle.index.shape[1]
        collected = []
        for slot, shape in enumerate(bundle.cls.param_shapes):
            parts = []
            for position in bundle.entries:
                entry = self.entries[position]
                size = entry.k * (entry.d if shape == "literal" else 1)
                lead = batch if entry.flags[slot] == "b" else 1
                start = offsets[position] + self._slot_offset(entry, slot, batch)
                parts.append(params[start : start + lead * size].reshape(lead, size))
            lead = max([len(p) for p in parts])
            same = [p if len(p) == lead else spread(p, (lead, p.shape[1])) for p in parts]
            joined = np.concatenate(same, axis=1)
            literal = shape == "literal"
            collected.append(joined.reshape(len(joined), -1, d) if literal else joined)
        return collected

    @staticmethod
    def _slot_offset(entry: Entry, slots: int, batch: int) -> int:
        """The numbers that the first `slots` parameters of a factor take."""
        offset = 0
        for shape, flag in list(zip(entry.cls.param_shapes, entry.flags, strict=True))[:slots]:
            size = entry.k * (entry.d if shape == "literal" else 1)
            offset += size * (batch if flag == "b" else 1)
        return offset

    def _param_offsets(self, batch: int) -> list[int]:
        offsets, start = [], 0
        for entry in self.entries:
            offsets.append(start)
            start += self._slot_offset(entry, len(entry.flags), batch)
        return offsets

    @staticmethod
    def _lower_bundle(bundle: _Bundle, params: list[FloatArray]) -> RowBlocks:
        bundle.cls.check_params(tuple(params), bundle.index.shape[1], bundle.cls.__name__)
        blocks = bundle.cls.lower(Group(bundle.negated, tuple(params)))
        if params:  # a bound beyond all reason never binds, and must not become infinite
            blocks.rhs = np.clip(blocks.rhs, -1e30, 1e30)
        return blocks


def _rows(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _stack(parts: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    if not parts:
        return np.zeros((0, 2), dtype=dtype)
    return np.ascontiguousarray(np.concatenate(parts), dtype=dtype)


def _offsets(lengths: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """0, and the sums of the lengths up to each."""
    given = np.asarray(lengths, dtype=np.int32)
    ends = np.zeros(len(given) + 1, dtype=np.int32)
    np.cumsum(given, out=ends[1:])
    return ends


def _join(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Concatenates `(1 | B, k, ...)` blocks to `(1 | B, total)`."""
    if not parts:
        return np.zeros((1, 0), dtype=dtype)
    lead = max([len(p) for p in parts])
    if lead == 1:
        flat = np.concatenate(parts, axis=None, dtype=dtype, casting="unsafe")
        return flat.reshape(1, -1)
    same = [p if p.shape[0] == lead else spread(p, (lead, *p.shape[1:])) for p in parts]
    columns = [p.reshape(lead, -1) for p in same]
    return np.ascontiguousarray(np.concatenate(columns, axis=1), dtype=dtype)


_LARGEST_REMEMBERED = 200_000  # literals; larger graphs are remembered by their wiring alone


@lru_cache(maxsize=64)
def _compile(num_variables: int, spec: str, literals: bytes, checked: bool) -> CompiledGraph:
    flat = np.frombuffer(literals, dtype=np.int64)
    return CompiledGraph(Wiring(num_variables, spec, flat, checked))


def compile_wiring(wiring: Wiring) -> CompiledGraph:
    """The compiled graph of a wiring; the last few are remembered, and by the wiring itself."""
    if wiring.compiled is None:
        if wiring.literals.size > _LARGEST_REMEMBERED:
            found = CompiledGraph(replace(wiring))  # which does not lead back to it
        else:
            literals = wiring.literals.tobytes()
            found = _compile(wiring.num_variables, wiring.spec, literals, wiring.checked)
        object.__setattr__(wiring, "compiled", found)
        return found
    return wiring.compiled
