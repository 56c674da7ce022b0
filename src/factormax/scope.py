"""Which variables the factors of one call see: strided views, or lists of places.

A `Part` describes them by a few whole numbers, whatever the number of factors, so that building a
factor needs no array, graphs can be compared quickly, and `torch.compile` can trace them with
changing sizes. The core expands them when it compiles a graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from factormax import _core
from factormax.arrays import IndexArray

__all__ = ["ListedPart", "Part", "Scope", "View", "parts_index", "parts_negated"]


class View(NamedTuple):
    """An array of variables: entry `i` is variable `offset + i · strides` of the graph."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def whole(cls, start: int, shape: tuple[int, ...]) -> View:
        """The view of a whole tensor, in C order."""
        return cls(start, shape, c_strides(shape))

    def taken(self, key: Any) -> View | None:
        """The view that basic indexing by `key` makes; None for keys that NumPy must handle."""
        parts = key if type(key) is tuple else (key,)
        missing = len(self.shape) - sum([p is not None and p is not Ellipsis for p in parts])
        if missing < 0:
            return None
        offset = self.offset
        shape: list[int] = []
        strides: list[int] = []
        axis, open_ended = 0, Ellipsis not in [p for p in parts if type(p) is type(Ellipsis)]
        for p in (*parts, Ellipsis) if open_ended else parts:
            if p is Ellipsis:
                shape += self.shape[axis : axis + missing]
                strides += self.strides[axis : axis + missing]
                axis += missing
                missing = 0
            elif p is None:
                shape.append(1)
                strides.append(0)
            elif type(p) is slice:
                taken = _slice(p, self.shape[axis])
                if taken is None:
                    return None
                first, size, step = taken
                offset += first * self.strides[axis]
                shape.append(size)
                strides.append(step * self.strides[axis])
                axis += 1
            elif type(p) is int or isinstance(p, np.integer):
                size = self.shape[axis]
                if not -size <= p < size:
                    return None
                offset += (int(p) + size if p < 0 else int(p)) * self.strides[axis]
                axis += 1
            else:
                return None
        return View(offset, tuple(shape), tuple(strides))

    def reshaped(self, shape: tuple[int, ...]) -> View | None:
        """The same variables in another shape of the same size; None if that is not a view."""
        if self.strides != c_strides(self.shape):
            return None
        return View(self.offset, shape, c_strides(shape))

    def transposed(self, axes: tuple[int, ...]) -> View:
        """The view with its axes in this order."""
        return View(
            self.offset,
            tuple([self.shape[a] for a in axes]),
            tuple([self.strides[a] for a in axes]),
        )

    def spread(self, shape: tuple[int, ...]) -> View:
        """The view broadcast to a shape, as in NumPy."""
        extra = len(shape) - len(self.shape)
        strides = [
            0 if own == 1 and size != 1 else stride
            for own, size, stride in zip(self.shape, shape[extra:], self.strides, strict=True)
        ]
        return View(self.offset, shape, (*[0] * extra, *strides))

    def part(self, negated: bool, inner: tuple[int, ...]) -> Part:
        """One factor per place of the other axes, over the places of the axes `inner`."""
        outer = [a for a in range(len(self.shape)) if a not in inner]
        return Part(
            negated,
            self.offset,
            tuple([self.shape[a] for a in outer]),
            tuple([self.strides[a] for a in outer]),
            tuple([self.shape[a] for a in inner]),
            tuple([self.strides[a] for a in inner]),
        )

    def places(self) -> IndexArray:
        """The numbers of the variables, in this shape."""
        return strided_places(self.offset, self.shape, self.strides)


class Part(NamedTuple):
    """Variables of k factors, one per place of `outer`, with d each, one per place of `inner`."""

    negated: bool
    offset: int
    outer: tuple[int, ...]
    outer_strides: tuple[int, ...]
    inner: tuple[int, ...]
    inner_strides: tuple[int, ...]

    @property
    def factors(self) -> int:
        """How many factors there are, k."""
        return math.prod(self.outer)

    @property
    def size(self) -> int:
        """How many variables each has, d."""
        return math.prod(self.inner)

    def places(self) -> IndexArray:
        """`(k, d)`, the variables."""
        full = strided_places(
            self.offset, self.outer + self.inner, self.outer_strides + self.inner_strides
        )
        return full.reshape(self.factors, self.size)

    def negations(self) -> Any:
        """`(k, d)`, which of them are negated."""
        return np.full((self.factors, self.size), self.negated)

    def core(self) -> _core.Part:
        """The part as the core takes it."""
        return _core.Part(*self)


class ListedPart:
    """Variables of k factors, d each, as literals `(k, d)`: 2 * variable, and 1 more if negated."""

    def __init__(self, literals: IndexArray) -> None:
        self.literals = literals
        self.factors, self.size = literals.shape

    def __eq__(self, other: object) -> bool:
        """Whether the literals are equal: graphs are looked up by the parts of their factors."""
        return isinstance(other, ListedPart) and np.array_equal(self.literals, other.literals)

    def __hash__(self) -> int:
        return hash((self.literals.shape, self.literals.tobytes()))

    def places(self) -> IndexArray:
        """`(k, d)`, the variables."""
        return self.literals >> 1

    def negations(self) -> Any:
        """`(k, d)`, which of them are negated."""
        return (self.literals & 1).astype(bool)

    def core(self) -> _core.Part:
        """The part as the core takes it."""
        return _core.Part.listed(np.ascontiguousarray(self.literals, np.int64))


AnyPart: TypeAlias = "Part | ListedPart"


class Scope(NamedTuple):
    """The variables of the k factors of one call, d each, with the parts side by side."""

    parts: tuple[AnyPart, ...]
    factors: int  # k
    size: int  # d
    group_shape: tuple[int, ...]  # what `axis` leaves; its size is k

    @classmethod
    def of(cls, parts: Sequence[AnyPart], group_shape: tuple[int, ...]) -> Scope:
        """The scope of these parts."""
        return cls(tuple(parts), parts[0].factors, sum([p.size for p in parts]), group_shape)

    @classmethod
    def along(cls, view: View, negated: bool, axis: int | None) -> Scope | None:
        """One factor over all variables of a view, or along an axis; None without such an axis."""
        shape = view.shape
        if axis is None:
            return cls.of([view.part(negated, tuple(range(len(shape))))], ())
        if not -len(shape) <= axis < len(shape):
            return None
        axis = axis % len(shape)
        return cls.of([view.part(negated, (axis,))], shape[:axis] + shape[axis + 1 :])


#: `Scope.along`, for graphs that are built again and again.
remembered_scope = lru_cache(maxsize=1024)(Scope.along)


#: `View.whole`, likewise.
remembered_whole = lru_cache(maxsize=1024)(View.whole)


def _slice(key: slice, size: int) -> tuple[int, int, int] | None:
    """The start, length and step of a slice of `size` places; None if it has no whole numbers.

    Only compares, so that a size that is symbolic while `torch.compile` traces stays symbolic.
    """
    start, stop, step = key.start, key.stop, key.step
    if step is None and all([n is None or type(n) is int for n in (start, stop)]):
        ends = []
        for end, default in ((start, 0), (stop, size)):
            if end is None:
                end = default
            elif end < 0:
                end = size + end if size + end > 0 else 0
            ends.append(size if end > size else end)
        return (ends[0], ends[1] - ends[0], 1) if ends[1] > ends[0] else (0, 0, 1)
    try:
        first, last, by = key.indices(size)
    except TypeError:
        return None
    count = len(range(first, last, by))
    return (first if count else 0), count, by


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of an array in C order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(strides[::-1])


def strided_places(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> IndexArray:
    """The numbers of the places of a strided array, in its shape."""
    if strides == c_strides(shape):
        return np.arange(offset, offset + math.prod(shape)).reshape(shape)
    places = np.full(shape, offset)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        places = places + (np.arange(size) * stride).reshape(
            (size,) + (1,) * (len(shape) - axis - 1)
        )
    return places


def parts_index(parts: tuple[AnyPart, ...]) -> IndexArray:
    """`(k, d)`, the variables of all parts together."""
    each = [p.places() for p in parts]
    return each[0] if len(each) == 1 else np.concatenate(each, axis=1)


def parts_negated(parts: tuple[AnyPart, ...]) -> Any:
    """`(k, d)`, which of them are negated; None if none is."""
    each = np.concatenate([p.negations() for p in parts], axis=1)
    return each if each.any() else None
