"""A graph as text and whole numbers, which are all that a torch operator takes.

The text describes the graph; everything that may change with the sizes of tensors is among the
numbers, which are symbolic while `torch.compile` traces. `read` rebuilds the graph's model from
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from factormax._columns import Columns
from factormax._core import Model
from factormax._fronts.rewired import rewired
from factormax._model import Remembered, is_large, model_of
from factormax._options import Options
from factormax.factors.base import BaseFactor, RowFactor
from factormax.factors.structured import StructuredFactor
from factormax.record import Record, VariableTensor
from factormax.scope import ListedPart, Part

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["Read", "is_structured", "num_dual", "read", "read_again", "written"]

Names = list[tuple[str, tuple[int, ...]]]


@dataclass
class Written:
    """A graph, and how to solve it."""

    text: str
    sizes: list[int] = field(default_factory=list)
    literals: list[Any] = field(default_factory=list)  # of listed parts, `(k, d)`
    numbers: list[float] = field(default_factory=list)  # parameters that are a single number
    params: list[Any] = field(default_factory=list)  # the others, `(1 | B, size)`


@dataclass(frozen=True)
class Read:
    """What was written, except the parameters."""

    factors: tuple[BaseFactor, ...]
    flags: tuple[
        str, ...
    ]  # for each factor: "n" for a parameter that is a single number, "a" for others
    options: Options
    tensors: Names
    scores: Names
    allow_minus_inf: list[bool]
    is_shared: list[bool]  # for each of the factors' scores, if the batch shares some of them

    @cached_property
    def runs(self) -> tuple[int, ...]:
        """The `runs` of the factors' scores as `Columns`, if the batch shares some of them."""
        return Columns.runs_of([math.prod(shape) for _, shape in self.scores], self.is_shared)

    @cached_property
    def model(self) -> Model:
        """The compiled model."""
        return model_of(sum([math.prod(shape) for _, shape in self.tensors]), self.factors)

    def params(self, numbers: Sequence[float], arrays: Sequence[Any], check: bool) -> list[Any]:
        """The parameters of all factors; they could not be checked while tracing."""
        number, array = iter(numbers), iter(arrays)
        found: list[Any] = []
        for factor, flags in zip(self.factors, self.flags, strict=True):
            if flags:
                own = tuple([next(number) if f == "n" else next(array) for f in flags])
                if check:
                    factor._check_named(own)
                found += own
        return found


def written(
    graph: FactorGraph, options: Options, is_shared: Sequence[bool] | None = None
) -> Written:
    """A graph, and how to solve it.

    is_shared: for each of the factors' scores, whether the batch shares them; None if it shares all
    of them or none.
    """
    out = Written("")
    links = _links(graph._structured)
    factors = [
        _write_factor(f, next(links) if isinstance(f, StructuredFactor) else 0, out)
        for f in graph._factors
    ]
    o = options
    numbers = [repr(n) for n in (o.tol, o.max_iter, o.max_inner_iter, o.step_size)]
    tensors = [_write_shape(t.name, t.shape, out) for t in graph._tensors]
    scores = [
        _write_shape(("+" if p.allow_minus_inf else "-") + name, shape, out)
        for p, (name, shape) in zip(graph._score_parts(), graph._score_layout(), strict=True)
    ]
    sections = [factors, [o.method, *numbers, o.on_failure], tensors, scores]
    if is_shared is not None:
        sections.append(["+" if alike else "-" for alike in is_shared])
    out.text = "\x1d".join(["\x1e".join(section) for section in sections])
    return out


def _links(structured: Sequence[StructuredFactor]) -> Iterator[int]:
    """How each is linked: 0, not; 1, all but the first of its call; 2, all of them.

    The variables may not be available to compare, so factors that share a tensor count as sharing
    a variable.
    """
    seen: set[int] = set()
    for f in structured:
        own = {u.position for u in f._given}
        yield 2 if seen & own else int(f._count != 1)
        seen |= own


def _write_shape(name: str, shape: tuple[int, ...], out: Written) -> str:
    out.sizes += shape
    return f"{name}\x1f{len(shape)}"


def _write_factor(factor: BaseFactor, link: int, out: Written) -> str:
    words = [factor._registered]
    for part in factor._scope:
        if isinstance(part, ListedPart):
            words.append("L")
            out.literals.append(part.literals)
            continue
        words.append(f"{'~' if part.negated else '+'}{len(part.outer)},{len(part.inner)}")
        out.sizes += [part.offset, *part.outer, *part.outer_strides]
        out.sizes += [*part.inner, *part.inner_strides]
    flags = ""
    for param in factor._params:
        if isinstance(param, float):
            out.numbers.append(param)
        else:
            out.params.append(param)
        flags += "n" if isinstance(param, float) else "a"
    extra = ""
    if isinstance(factor, StructuredFactor):
        extra = f"{int(factor._oracle)},{link},{len(factor._oracle_shape)}"
        out.sizes += [factor._num_scores, factor._slots, *factor._oracle_shape]
    return "\x1f".join([" ".join(words), flags, extra])


_remembered: Remembered[Read] = Remembered(64)


def read_again(text: str, sizes: Sequence[int], literals: Sequence[Any]) -> Read:
    """What was written, if nothing is symbolic; cached, because it is needed again and again."""
    lists = tuple([(a.shape, a.tobytes()) for a in literals]) if literals else ()
    key = (text, tuple(sizes), lists)
    found = _remembered.get(key)
    if found is None:
        found = read(text, sizes, literals)
        if not is_large(found.factors):
            _remembered.keep(key, found)
    return found


def read(text: str, sizes: Sequence[int], literals: Sequence[Any]) -> Read:
    """What was written. While tracing, sizes are symbolic, and arrays have only a shape."""
    sections = [section.split("\x1e") for section in text.split("\x1d")]
    factors, options, tensors, scores, *more = sections
    size, listed = iter(sizes), iter(literals)
    made, kinds = [], []
    for entry in filter(None, factors):
        words, flags, extra = entry.split("\x1f")
        made.append(_read_factor(words.split(" "), len(flags), extra, size, listed))
        kinds.append(flags)
    method, tol, max_iter, max_inner_iter, step_size, on_failure = options
    named = _read_shapes(tensors, size)
    owned = _read_shapes(scores, size)
    record, start = Record(0), 0  # holds the names of variables, for messages
    for name, shape in named:
        count = math.prod(shape)
        record.tensors.append(VariableTensor(name, start, count, shape, None, None))
        start += count
    for factor in made:
        factor._record = record
    return Read(
        tuple(made),
        tuple(kinds),
        Options(
            method, float(tol), int(max_iter), int(max_inner_iter), float(step_size), on_failure
        ),
        named,
        [(name[1:], shape) for name, shape in owned],
        [name[0] == "+" for name, _ in owned],
        [alike == "+" for alike in more[0]] if more else [],
    )


def _read_shapes(entries: list[str], size: Iterator[int]) -> Names:
    found = []
    for entry in filter(None, entries):
        name, dims = entry.split("\x1f")
        found.append((name, tuple([next(size) for _ in range(int(dims))])))
    return found


def _read_factor(
    words: list[str], params: int, extra: str, size: Iterator[int], listed: Iterator[Any]
) -> BaseFactor:
    def taken(count: int) -> tuple[int, ...]:
        return tuple([next(size) for _ in range(count)])

    parts: list[Any] = []
    for word in words[1:]:
        if word == "L":
            parts.append(ListedPart(next(listed)))
            continue
        outer, inner = (int(n) for n in word[1:].split(","))
        offset = next(size)
        shapes = [taken(count) for count in (outer, outer, inner, inner)]
        parts.append(Part(word[0] == "~", offset, *shapes))
    oracle: list[Any] = []
    if extra:
        kind, link, dims = (int(n) for n in extra.split(","))
        oracle = [kind, link, *taken(2), taken(dims)]
    return rewired(words[0], parts, params, oracle)


def is_structured(text: str) -> bool:
    """Whether there are structured factors."""
    factors = text.split("\x1d")[0].split("\x1e")
    return any([entry.split("\x1f")[-1] != "" for entry in factors])


def num_dual(factors: Sequence[BaseFactor]) -> int:
    """The number of multipliers; sizes may be symbolic."""
    total = 0
    for f in factors:
        if isinstance(f, RowFactor):
            total += f._num_rows(f._size) * f._count
        elif isinstance(f, StructuredFactor):
            total += f._size * (f._count - 1 if f._link == 1 else f._count if f._link else 0)
        else:
            total += f._count
    return total
