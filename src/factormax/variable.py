"""A tensor of binary variables of a graph, or a slice of one.

A variable is an array of integers into the graph's list of variables, so that indexing is NumPy's
own, and no Python object exists for a single scalar variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from factormax.arrays import Array, IndexArray, is_tensor, is_tracing
from factormax.errors import ShapeError, VariableIndexError

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["Variable"]


class Variable:
    """Binary variables of a `FactorGraph`, made by `variable_from`, by slicing, or by `~`.

    Indexing never sees the batch dimensions: `u[0]` is the first row of every instance. Nor do
    `T`, `transpose`, `reshape` and `flatten`, which arrange the same variables in another shape.

    Attributes:
        shape: the shape, without batch dimensions.
        value: after a query, the marginals, `(*batch, *shape)`.

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
        graph: FactorGraph,
        position: int,
        index: IndexArray,
        keys: tuple[Any, ...] = (),
        negated: bool = False,
        distinct: bool = True,
    ) -> None:
        self.graph = graph
        self.position = position  # of the whole tensor in the graph
        self.index = index
        self.keys = keys
        self.negated = negated
        self.distinct = distinct  # surely no variable twice

    @property
    def start(self) -> int:
        """Where the whole tensor begins in the graph's list of variables."""
        return self.graph.tensors[self.position].start

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, without batch dimensions."""
        return tuple(self.index.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions, without batch dimensions."""
        return self.index.ndim

    @property
    def size(self) -> int:
        """The number of binary variables, per instance."""
        return int(self.index.size)

    @property
    def name(self) -> str:
        """How the variable is called in messages."""
        text = self.graph.variable_name(self.position) + "".join(map(_key_text, self.keys))
        return "~" + text if self.negated else text

    @property
    def value(self) -> Array:
        """The marginals of the last query, `(*batch, *shape)`; `1 - value` of what is negated.

        Raises:
            GraphError: before any query.
        """
        return self.graph.value_of(self)

    def negate(self) -> Variable:
        """The negation, the same as `~u` (which `torch.compile` can't trace)."""
        return Variable(
            self.graph, self.position, self.index, self.keys, not self.negated, self.distinct
        )

    def __invert__(self) -> Variable:
        return self.negate()

    def __getitem__(self, key: Any) -> Variable:
        if is_tensor(key):
            key = np.asarray(key)
        basic = _is_basic(key)
        try:
            index = self.index[key]
        except (IndexError, TypeError) as error:
            raise VariableIndexError(
                f"{self.name}[{_key_text(key)[1:-1]}]: {error} "
                f"({self.name} has shape {self.shape}, batch dimensions aside)"
            ) from error
        return Variable(
            self.graph,
            self.position,
            np.asarray(index),
            (*self.keys, key),
            self.negated,
            self.distinct and basic,
        )

    @property
    def T(self) -> Variable:
        """The variables with their axes in reverse order."""
        return self._view(self.index.T, ".T")

    def transpose(self, *axes: int | tuple[int, ...]) -> Variable:
        """The variables with their axes in this order, reversed by default, as in NumPy."""
        order = _dims(axes)
        ndim = self.ndim
        if order and sorted([a % ndim if -ndim <= a < ndim else -1 for a in order]) != [
            *range(ndim)
        ]:
            raise ShapeError(
                f"{self.name}.transpose{_call_text(order)}: name each of the {ndim} axes once, "
                f"batch dimensions aside."
            )
        index = self.index.transpose(order) if order else self.index.T
        return self._view(index, f".transpose{_call_text(order)}")

    def reshape(self, *shape: int | tuple[int, ...]) -> Variable:
        """The variables, in C order, in another shape, of which one size may be -1."""
        dims = _dims(shape)
        try:
            index = self.index.reshape(dims)
        except (ValueError, RuntimeError, TypeError) as error:
            raise ShapeError(
                f"{self.name}.reshape{_call_text(dims)}: {self.name} has shape {self.shape}, that "
                f"is {self.size} variables, batch dimensions aside."
            ) from error
        return self._view(index, f".reshape{_call_text(dims)}")

    def flatten(self) -> Variable:
        """The variables, in C order, in one dimension."""
        return self._view(self.index.reshape(-1), ".flatten()")

    ravel = flatten

    def _view(self, index: IndexArray, text: str) -> Variable:
        keys = (*self.keys, _View(text))
        return Variable(self.graph, self.position, index, keys, self.negated, self.distinct)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name} is a single variable: it has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Variable]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"<Variable {self.name} of shape {self.shape}>"


class _View(str):
    """Among the keys of a variable: a view such as `.T`, as messages write it."""


def _dims(given: tuple[Any, ...]) -> tuple[int, ...]:
    """From `(2, 3)` or `((2, 3),)`."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def _call_text(arguments: tuple[int, ...]) -> str:
    return "(" + ", ".join([str(a) for a in arguments]) + ")"


def _is_basic(key: Any) -> bool:
    """Whether NumPy takes `key` as basic indexing, which never repeats an entry."""
    parts = key if isinstance(key, tuple) else (key,)
    return all(p is None or p is Ellipsis or isinstance(p, (int, slice)) for p in parts)


def _key_text(key: Any) -> str:
    if isinstance(key, _View):
        return key
    if is_tracing():  # arrays can't be looked at
        return "[...]"

    def part(p: Any) -> str:
        if isinstance(p, slice):
            text = f"{'' if p.start is None else p.start}:{'' if p.stop is None else p.stop}"
            return text if p.step is None else f"{text}:{p.step}"
        if p is Ellipsis:
            return "..."
        if isinstance(p, (list, np.ndarray)):  # never the text of thousands of indices
            p = np.asarray(p[:9]).tolist() if np.ndim(p) else p
        text = str(p)
        return text if len(text) <= 24 else text[:20] + " ..."

    parts = key if isinstance(key, tuple) else (key,)
    return "[" + ", ".join(map(part, parts)) + "]"
