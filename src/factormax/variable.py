"""A tensor of binary variables of a graph, or a slice of one.

A variable is a strided view of the graph's list of variables, and indexing it makes another. Where
no view will do, as after integer-array indexing, it is an array of places. There is no Python
object per scalar variable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from factormax.arrays import (
    ArrayT,
    IndexArray,
    is_jax,
    is_tensor,
    is_tracer,
    is_tracing,
    to_numpy,
)
from factormax.errors import ShapeError, VariableIndexError
from factormax.scope import AnyPart, ListedPart, View

if TYPE_CHECKING:
    from factormax.record import Record

__all__ = ["Variable"]


class Variable(Generic[ArrayT]):
    """Binary variables of a `FactorGraph`, made by `variable_from`, by slicing, or by `~`.

    Indexing ignores the batch dimensions: `u[0]` is the first row of every instance. So do `T`,
    `transpose`, `reshape` and `flatten`, which arrange the same variables in another shape.

    Attributes:
        shape: the shape, without batch dimensions.

    Example:
        >>> import numpy as np, factormax as fm
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable_from(np.array([[0.2, 2.0], [0.7, -1.0]]))
        >>> u[:, 0]
        <Variable u[:, 0] of shape (2,)>
        >>> ~u[0, 1:]
        <Variable ~u[0, 1:] of shape (1,)>
        >>> u.T[1]
        <Variable u.T[1] of shape (2,)>
        >>> _ = fg.solve()
        >>> u[:, 1].value
        array([1., 0.])
    """

    def __init__(
        self,
        record: Record,
        position: int,
        view: View | None,
        index: IndexArray | None = None,
        keys: tuple[Any, ...] = (),
        negated: bool = False,
        distinct: bool = True,
    ) -> None:
        self._record = record  # of its graph
        self.position = position  # of the whole tensor in the graph
        self.view = view  # None if `index` is not a strided view
        self._index = index
        self.keys = keys
        self.negated = negated
        self.distinct = distinct  # True: certainly no variable twice
        self.shape = tuple(index.shape) if view is None else view.shape  # type: ignore[union-attr]

    @property
    def index(self) -> IndexArray:
        """The numbers of the variables in the graph's list, in this shape."""
        if self._index is None:
            self._index = self.view.places()  # type: ignore[union-attr]
        return self._index

    def part(self, inner: tuple[int, ...]) -> AnyPart:
        """The variables of one factor over the axes `inner` per place of the other axes."""
        if self.view is not None:
            return self.view.part(self.negated, inner)
        outer = [a for a in range(self.ndim) if a not in inner]
        rows = math.prod([self.shape[a] for a in outer])
        literals = (2 * self.index + self.negated).transpose([*outer, *inner])
        return ListedPart(literals.reshape(rows, math.prod([self.shape[a] for a in inner])))

    @property
    def ndim(self) -> int:
        """The number of dimensions, without batch dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of binary variables, per instance."""
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """What messages call the variable."""
        text = self._record.tensors[self.position].name + "".join(map(_key_text, self.keys))
        return "~" + text if self.negated else text

    @property
    def value(self) -> ArrayT:
        """The marginals from the last query, `(*batch, *shape)`; of `~u` they are `1 - u.value`.

        Raises:
            GraphError: before any query.
        """
        return self._record.value_of(self)  # type: ignore[no-any-return]

    def negate(self) -> Variable[ArrayT]:
        """The negation, the same as `~u`."""
        return self._like(self.view, self._index, self.keys, self.distinct, not self.negated)

    def __invert__(self) -> Variable[ArrayT]:
        return self.negate()

    def __getitem__(self, key: Any) -> Variable[ArrayT]:
        if type(key) is tuple:
            if any([is_tensor(k) for k in key]):
                key = tuple([to_numpy(k) if is_tensor(k) else k for k in key])
        elif is_tracer(key):
            raise VariableIndexError(
                f"{self.name}: an index can't be traced by JAX, because it says which variables a "
                f"factor sees. Index with concrete numbers, or use a mask."
            )
        elif is_tensor(key) or is_jax(key):
            key = to_numpy(key)
        keys = (*self.keys, key)
        view = None if self.view is None else self.view.taken(key)
        if view is not None:
            return self._like(view, None, keys, self.distinct)
        try:
            index = self.index[key]
        except (IndexError, TypeError) as error:
            raise VariableIndexError(
                f"{self.name}[{_key_text(key)[1:-1]}]: {error} "
                f"({self.name} has shape {self.shape}, not counting batch dimensions)"
            ) from error
        return self._like(None, np.asarray(index), keys, self.distinct and _is_basic(key))

    @property
    def T(self) -> Variable[ArrayT]:
        """The variables with their axes in reverse order."""
        return self._permuted(tuple(range(self.ndim))[::-1], ".T")

    def transpose(self, *axes: int | tuple[int, ...]) -> Variable[ArrayT]:
        """The variables with their axes in this order, by default reversed, as in NumPy."""
        order = _dims(axes)
        ndim = self.ndim
        if order and sorted([a % ndim if -ndim <= a < ndim else -1 for a in order]) != [
            *range(ndim)
        ]:
            raise ShapeError(
                f"{self.name}.transpose{_call_text(order)}: name each of the {ndim} axes once, "
                f"not counting batch dimensions."
            )
        named = tuple([int(a) % ndim for a in order])
        axes = named if order else tuple(range(ndim))[::-1]
        return self._permuted(axes, f".transpose{_call_text(order)}")

    def reshape(self, *shape: int | tuple[int, ...]) -> Variable[ArrayT]:
        """The variables, in C order, in another shape; one of its sizes may be -1."""
        dims = _dims(shape)
        text = f".reshape{_call_text(dims)}"
        full = _full_shape(dims, self.size)
        if full is None:
            raise ShapeError(
                f"{self.name}{text}: {self.name} has shape {self.shape}, that is {self.size} "
                f"variables, not counting batch dimensions."
            )
        return self._reshaped(full, text)

    def flatten(self) -> Variable[ArrayT]:
        """The variables, in C order, in one dimension."""
        return self._reshaped((self.size,), ".flatten()")

    ravel = flatten

    def _permuted(self, axes: tuple[int, ...], text: str) -> Variable[ArrayT]:
        keys = (*self.keys, _Text(text))
        if self.view is not None:
            return self._like(self.view.transposed(axes), None, keys, self.distinct)
        return self._like(None, self.index.transpose(axes), keys, self.distinct)

    def _reshaped(self, shape: tuple[int, ...], text: str) -> Variable[ArrayT]:
        keys = (*self.keys, _Text(text))
        view = None if self.view is None else self.view.reshaped(shape)
        index = self.index.reshape(shape) if view is None else None
        return self._like(view, index, keys, self.distinct)

    def _like(
        self,
        view: View | None,
        index: IndexArray | None,
        keys: tuple[Any, ...],
        distinct: bool,
        negated: bool | None = None,
    ) -> Variable[ArrayT]:
        """Other variables of the same tensor."""
        negated = self.negated if negated is None else negated
        return Variable(self._record, self.position, view, index, keys, negated, distinct)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name} is a single variable, so it has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Variable[ArrayT]]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        tensor = self._record.tensors[self.position]
        text = f"Variable {self.name} of shape {self.shape}"
        if self._record.batch_dims:
            text += f", batch {self._record.batch_shape or 'of unknown shape'}"
        return f"<{text}{'' if tensor.mask is None else ', masked'}>"


class _Text(str):
    """One of the keys of a variable: a view such as `.T`, as messages write it."""


def _dims(given: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape `(2, 3)`, given as `(2, 3)` or `((2, 3),)`."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def _full_shape(dims: tuple[Any, ...], size: int) -> tuple[int, ...] | None:
    """The shape with its −1 worked out; None if it does not hold `size` variables."""
    if not all([isinstance(d, (int, np.integer)) for d in dims]):
        return None
    known = math.prod([int(d) for d in dims if d != -1])
    free = [d for d in dims if d == -1]
    if len(free) > 1 or any([d < -1 for d in dims]):
        return None
    if free:
        if known == 0 or size % known:
            return None
        return tuple([size // known if d == -1 else int(d) for d in dims])
    return tuple([int(d) for d in dims]) if known == size else None


def _call_text(arguments: tuple[int, ...]) -> str:
    return "(" + ", ".join([str(a) for a in arguments]) + ")"


def _is_basic(key: Any) -> bool:
    """Whether NumPy takes `key` as basic indexing, which never repeats an entry."""
    parts = key if isinstance(key, tuple) else (key,)
    return all(p is None or p is Ellipsis or isinstance(p, (int, slice)) for p in parts)


def _key_text(key: Any) -> str:
    if isinstance(key, _Text):
        return key
    if is_tracing():  # arrays can't be looked at
        return "[...]"

    def part(p: Any) -> str:
        if isinstance(p, slice):
            text = f"{'' if p.start is None else p.start}:{'' if p.stop is None else p.stop}"
            return text if p.step is None else f"{text}:{p.step}"
        if p is Ellipsis:
            return "..."
        if isinstance(p, (list, np.ndarray)):  # do not format thousands of indices
            p = np.asarray(p[:9]).tolist() if np.ndim(p) else p
        text = str(p)
        return text if len(text) <= 24 else text[:20] + " ..."

    parts = key if isinstance(key, tuple) else (key,)
    return "[" + ", ".join(map(part, parts)) + "]"
