"""What a factor is made of, and how it says so.

A factor object records which variables it sees (`index`, a `(k, d)` array: k factors of the same
kind over d literals each) and its parameters. Its class knows how such a group becomes rows of the
compact dual (`lower`); the solvers see only those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from factormax.arrays import Array, FloatArray, IndexArray, is_tracing, spread
from factormax.checks import shown
from factormax.errors import GraphError, ShapeError
from factormax.factors.scores import Scores
from factormax.variable import Variable

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = [
    "BAND",
    "EQUALITY",
    "INEQUALITY",
    "ONE",
    "OR_OUT",
    "ROW",
    "BaseFactor",
    "Group",
    "LinearFactor",
    "RowBlocks",
]

INEQUALITY, EQUALITY = 1, 2  # RowKind of the core
ROW, OR_OUT, BAND = 0, 1, 2  # BlockKind of the core

BoolArray = npt.NDArray[np.bool_]

ONE: FloatArray = np.ones((1, 1))  # the same for every factor of every instance
ONE.setflags(write=False)

_NUMBERS = count()  # that tell classes of one name apart


@dataclass(eq=False)
class Group:
    """k factors of one kind over d literals each, for a batch of instances.

    A leading dimension of 1 stands for "the same in every instance".
    """

    negated: BoolArray  # (k, d)
    params: tuple[FloatArray, ...]  # each (1 | B, k) or (1 | B, k, d)


@dataclass(eq=False)
class RowBlocks:
    """The numbers of k blocks of r sparse rows each, over the columns of `BaseFactor.columns`."""

    coef: FloatArray  # (1 | B, k, sum of lengths)
    rhs: FloatArray  # (1 | B, k, r)


class BaseFactor:
    """Base class of all factors.

    Attributes:
        graph: the graph of its variables.
        index: `(k, d)`, the variables of each of the k factors that the object stands for.
        negated: `(k, d)`, or None if no variable is negated.
    """

    #: All classes by the name under which a compiled graph finds them; it keeps none alive.
    registry: ClassVar[WeakValueDictionary[str, type[BaseFactor]]] = WeakValueDictionary()
    registered: ClassVar[str] = "BaseFactor"
    #: Shapes of the parameters: "factor" is one number a factor, "literal" one a variable.
    param_shapes: ClassVar[tuple[str, ...]] = ()
    #: What the rows of one factor are to the core.
    block_kind: ClassVar[int] = ROW
    #: Whether it is a pair with a score: a soft row, which the core makes itself.
    soft: ClassVar[bool] = False
    #: Whether it has a MAP oracle instead of rows: see `factormax.factors.structured`.
    structured: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        name = cls.__name__
        if name in BaseFactor.registry:  # another one of that name: tell them apart
            name = f"{cls.__module__}.{cls.__qualname__}.{next(_NUMBERS)}"
        cls.registered = name
        BaseFactor.registry[name] = cls

    graph: FactorGraph
    index: IndexArray
    negated: BoolArray | None
    group_shape: tuple[int, ...]
    params: tuple[FloatArray, ...] = ()  # each (1 | B, k) or (1 | B, k * d)
    added: bool = False  # to its graph
    score_parts: tuple[Scores, ...] = ()  # its own scores

    def _take(
        self, variables: Variable | Sequence[Variable], axis: int | tuple[int, ...] | None
    ) -> None:
        """Records the variables: all of them in one factor, or one factor along `axis`."""
        several = isinstance(variables, (list, tuple))
        given: list[Any] = list(variables) if several else [variables]
        self._given = given
        if not given:
            raise GraphError(f"{self.kind}: the list of variables is empty.")
        for u in given:
            if not isinstance(u, Variable):
                raise GraphError(
                    f"{self.kind} takes a variable of a FactorGraph or a list of them, "
                    f"got {type(u).__name__}. Make variables with fg.variable_from(scores)."
                )
            if u.graph is not given[0].graph:
                raise GraphError(f"{self.name}: the variables belong to different graphs.")
        self._listed = several
        self.graph = given[0].graph
        if axis is None:
            parts = [u.index.reshape(1, -1) for u in given]
            self.group_shape = ()
        else:
            parts = [self._rows_along(u, axis) for u in given]
            self.group_shape = _drop_axes(given[0].index.shape, axis)
            if any(_drop_axes(u.index.shape, axis) != self.group_shape for u in given[1:]):
                raise ShapeError(
                    f"{self.name}: with axis={axis} the variables must agree in shape but for "
                    f"that axis, got {[u.shape for u in given]}."
                )
        self.index = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        self.negated = None
        if any(u.negated for u in given):
            flags = [np.full(p.shape, u.negated) for u, p in zip(given, parts, strict=True)]
            self.negated = np.concatenate(flags, axis=1)
        if self.index.shape[1] == 0 and self.index.shape[0] > 0:
            raise GraphError(f"{self.name}: there is no variable in it.")
        if len(given) > 1 or not given[0].distinct:
            self._check_distinct()
        self.graph.made.append(self)

    def _take_side_by_side(
        self,
        variables: Variable | Sequence[Variable],
        others: tuple[Any, ...],
        axis: int | tuple[int, ...] | None,
    ) -> None:
        """Records the variables: side by side if there are others, one factor for each position."""
        if len(others) == 1 and axis is None and not isinstance(others[0], (Variable, list)):
            axis, others = others[0], ()  # the axis may come second, without its name
            self._check_axis(axis)
        if not others:
            self._take(variables, axis)
            return
        given: list[Any] = [variables, *others]
        self._given = given
        self._listed = False
        for u in given:
            if not isinstance(u, Variable):
                raise GraphError(
                    f"{self.kind} takes variables side by side, one factor for each position, or "
                    f"one list of them, which is one factor; got {type(u).__name__} among "
                    f"{len(given)} arguments."
                )
            if u.graph is not given[0].graph:
                raise GraphError(f"{self.name}: the variables belong to different graphs.")
        if axis is not None:
            raise GraphError(
                f"{self.name}: axis={axis} is for one variable or a list of them. Variables side "
                f"by side make one factor for each position."
            )
        self.graph = given[0].graph
        self.group_shape = self._common_shape(given)
        columns = [np.broadcast_to(u.index, self.group_shape).reshape(-1) for u in given]
        self.index = np.stack(columns, axis=1)
        self.negated = None
        if any(u.negated for u in given):
            flags = [np.full(c.shape, u.negated) for u, c in zip(given, columns, strict=True)]
            self.negated = np.stack(flags, axis=1)
        self._check_distinct()
        self.graph.made.append(self)

    def _check_axis(self, axis: Any) -> None:
        axes = axis if isinstance(axis, tuple) else (axis,)
        if axis is not None and not all(isinstance(a, (int, np.integer)) for a in axes):
            raise GraphError(
                f"{self.kind} takes a variable or a list of them and axis=, or variables side by "
                f"side, got {type(axis).__name__}."
            )

    def _common_shape(self, given: list[Variable]) -> tuple[int, ...]:
        """The shape that all are broadcast to, as by NumPy."""
        shapes = [u.shape for u in given]
        ndim = max([len(s) for s in shapes])
        padded = [(1,) * (ndim - len(s)) + s for s in shapes]
        common = tuple(
            [next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True)]
        )
        if any(n not in (1, c) for s in padded for n, c in zip(s, common, strict=True)):
            raise ShapeError(
                f"{self.name}: side by side, the variables must have equal or broadcastable "
                f"shapes, got {shapes}. A list of them is one factor over all."
            )
        return common

    def _rows_along(self, u: Variable, axis: int | tuple[int, ...]) -> IndexArray:
        """The index of `u` as `(k, d)`: the axes of `axis` flattened last."""
        last = self._last_axes(u, axis)
        if u.keys or u.index.size > _REMEMBERED or is_tracing():
            return axes_last(u.index, last)
        return _whole_axes_last(u.start, u.shape, last)

    def _last_axes(self, u: Variable, axis: int | tuple[int, ...]) -> tuple[int, ...]:
        """The axes of `u` that `axis` names, from 0."""
        ndim = u.index.ndim
        axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
        for a in axes:
            if not isinstance(a, (int, np.integer)) or not -ndim <= a < ndim:
                raise ShapeError(
                    f"{self.kind} over {u.name}: axis={shown(axis)} does not fit its {ndim} "
                    f"dimensions, batch dimensions aside."
                )
        last = tuple([a % ndim for a in axes])
        if len(set(last)) != len(last):
            raise ShapeError(f"{self.kind} over {u.name}: axis={axis} names an axis twice.")
        return last

    def _check_distinct(self) -> None:
        if is_tracing():
            return  # the compiled graph checks again
        twice = repeated_variable(self.index)
        if twice is not None:
            raise GraphError(
                f"{self.name}: {self.graph.scalar_name(twice)} is in it twice. "
                f"List every variable once."
            )

    @property
    def complete(self) -> bool:
        """Whether it was built without an error."""
        return len(self.params) == len(self.param_shapes)

    @property
    def kind(self) -> str:
        """The name of the factor's class."""
        return type(self).__name__

    @property
    def name(self) -> str:
        """How the factor is called in messages, for example `Budget over u[:, 3]`."""
        names = ", ".join(u.name for u in self._given[:4])
        return f"{self.kind} over {names}" + (", ..." if len(self._given) > 4 else "")

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def value(self) -> Array:
        """The marginals of the factor's own scores, in their shape, batch dimensions in front.

        Raises:
            GraphError: if the factor has no scores, or before any query.
        """
        if not self.score_parts:
            raise GraphError(f"{self.name} has no scores of its own, so it has no value.")
        return self.graph.factor_value_of(self.score_parts[0])

    @property
    def structures(self) -> Array:
        """The structures of a factor that is solved from a MAP oracle; see `StructuredFactor`."""
        raise GraphError(
            f"{self.name} is made of rows, and has no structures: those are of DepTree, Matching, "
            f"Sequence, SequenceBudget, Table, and factors of your own."
        )

    @property
    def probs(self) -> Array:
        """The probabilities of its structures."""
        return self.structures

    @property
    def spec(self) -> str:
        """What a `Wiring` says of the factor."""
        k, d = self.index.shape
        flags = "".join(["s" if p.shape[0] == 1 else "b" for p in self.params])
        return f"{self.registered},{k},{d},{flags}"

    @property
    def literals(self) -> IndexArray:
        """`(k * d,)`: 2 * variable, and 1 more if it is negated."""
        doubled = self.index * 2
        return (doubled if self.negated is None else doubled + self.negated).reshape(-1)

    def _set_params(self, *params: FloatArray) -> None:
        """Keeps the parameters, and checks them unless `torch.compile` is tracing."""
        if not is_tracing():
            self.check_params(params, self.index.shape[1], self.name)
        self.params = params

    @classmethod
    def check_params(cls, params: tuple[FloatArray, ...], d: int, name: str) -> None:
        """Raises unless the parameters of factors over d variables make sense."""

    @classmethod
    def row_lengths(cls, d: int) -> list[int]:
        """The number of entries of each row of one factor over d variables."""
        return [d]

    @classmethod
    def row_kinds(cls, d: int) -> list[int]:
        """The kind of each row of one factor over d variables."""
        return [INEQUALITY]

    @classmethod
    def columns(cls, index: IndexArray) -> IndexArray:
        """The variable of each entry of the rows of k factors, `(k, sum of lengths)`."""
        return index

    @classmethod
    def lower(cls, group: Group) -> RowBlocks:
        """The coefficients and right-hand sides of a group of such factors."""
        raise NotImplementedError


_REMEMBERED = 4096  # variables, of a tensor whose index is


def axes_last(index: IndexArray, last: tuple[int, ...]) -> IndexArray:
    """As `(k, d)`, with the axes `last` flattened to the second."""
    first = [a for a in range(index.ndim) if a not in last]
    rows = math.prod([index.shape[a] for a in first])
    size = math.prod([index.shape[a] for a in last])
    return np.asarray(index.transpose([*first, *last]).reshape(rows, size))


@lru_cache(maxsize=256)
def _whole_axes_last(start: int, shape: tuple[int, ...], last: tuple[int, ...]) -> IndexArray:
    """The same of a whole tensor. Graphs are built again and again in training: remembered."""
    index = axes_last(np.arange(start, start + math.prod(shape)).reshape(shape), last)
    index.setflags(write=False)
    return index


def repeated_variable(index: IndexArray) -> int | None:
    """A variable that a row of `index` holds twice, if there is one."""
    ordered = np.sort(index, axis=1)
    repeated = np.argwhere(ordered[:, 1:] == ordered[:, :-1])
    return int(ordered[tuple(repeated[0])]) if len(repeated) else None


def _drop_axes(shape: tuple[int, ...], axis: int | tuple[int, ...]) -> tuple[int, ...]:
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    drop = {a % len(shape) for a in axes}
    return tuple(s for i, s in enumerate(shape) if i not in drop)


class LinearFactor(BaseFactor):
    """A factor that is one linear row over its literals: `s · l <= c`, or `s · l = c`.

    A literal l is a variable or its negation. Subclasses give `s` and `c`.
    """

    equality: ClassVar[bool] = False

    def __init__(
        self,
        variables: Variable | Sequence[Variable],
        *others: Variable | int | tuple[int, ...],
        axis: int | tuple[int, ...] | None = None,
    ) -> None:
        self._take_side_by_side(variables, others, axis)

    @classmethod
    def row_kinds(cls, d: int) -> list[int]:
        """An equation or an inequality."""
        return [EQUALITY if cls.equality else INEQUALITY]

    @classmethod
    def coefficients(cls, group: Group) -> FloatArray:
        """`s`, broadcastable to `(1 | B, k, d)`."""
        return ONE[None]

    @classmethod
    def bound(cls, group: Group) -> FloatArray:
        """`c`, `(1 | B, 1 | k)`."""
        raise NotImplementedError

    @classmethod
    def lower(cls, group: Group) -> RowBlocks:
        """One row per factor. `l = 1 - mu` flips the sign of an entry and moves the bound."""
        k, d = group.negated.shape
        coef, c = cls.coefficients(group), cls.bound(group)
        coef = spread(coef, (coef.shape[0], k, d))
        if group.negated.any():
            c = difference(c, coef * group.negated)
            coef = np.where(group.negated, -coef, coef)
        return RowBlocks(coef, spread(c, (len(c), k))[..., None])


def difference(bound: FloatArray, terms: FloatArray) -> FloatArray:
    """`bound`, `(1 | B, k)`, less the terms along the last axis; 0 where only rounding is left.

    A bound that the negated literals meet exactly must not become one that nothing meets.
    """
    total = bound - np.sum(terms, axis=-1)
    size = np.abs(bound) + np.sum(np.abs(terms), axis=-1)
    rounded = np.isfinite(bound) & (np.abs(total) <= 8 * np.finfo(np.float64).eps * size)
    return np.where(rounded, 0.0, total)


def last_negative(group: Group) -> FloatArray:
    """Coefficients 1, and -1 for the last variable."""
    d = group.negated.shape[1]
    return np.where(np.arange(d) == d - 1, -1.0, 1.0)[None, None]


def check_whole(name: str, word: str, value: FloatArray) -> None:
    """Raises unless every number is whole and not negative."""
    bad = ~(np.isfinite(value) & (value >= 0) & (value == np.floor(value)))
    if bad.any():
        worst = value[bad].ravel()[0]
        rule = "at least 0" if worst < 0 else "a whole number"
        raise GraphError(f"{name}: {word} must be {rule}, got {_plain(worst)}.")


def _plain(value: Any) -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() else str(number)
