"""The base classes of factors.

A factor object stands for k factors of one kind over d literals each. It records which variables it
sees (`_scope`) and its parameters. A factor made of linear rows lists them in `rows`, and they are
all that the solvers see of it; structured factors have a MAP oracle instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from factormax import _core
from factormax._core import BlockKind, Row
from factormax._describe import counted, factor_settings
from factormax._names import literals_name, scalar_name
from factormax.arrays import Array, FloatArray, IndexArray, is_hidden, is_tracing
from factormax.checks import shown
from factormax.errors import FactormaxError, GraphError, ShapeError
from factormax.factors.scores import Scores
from factormax.scope import (
    AnyPart,
    ListedPart,
    Scope,
    parts_index,
    parts_negated,
    remembered_scope,
)
from factormax.variable import Variable

if TYPE_CHECKING:
    from factormax.record import Record

__all__ = ["BaseFactor", "BoolArray", "Param", "Row", "RowFactor", "check_whole"]

BoolArray = npt.NDArray[np.bool_]
Param = float | FloatArray  # one number for all, or (1 | B, k) or (1 | B, k * d)

_NUMBERS = count()  # tells classes with the same name apart


class BaseFactor:
    """Base class of all factors."""

    #: All classes, by the name under which a compiled graph finds them; it keeps none alive.
    _registry: ClassVar[WeakValueDictionary[str, type[BaseFactor]]] = WeakValueDictionary()
    _registered: ClassVar[str] = "BaseFactor"
    #: The parameters by name: "factor" is one number per factor, "literal" one per variable.
    _param_shapes: ClassVar[dict[str, str]] = {}
    #: Attributes that say which kind of structure it is; shown where they are true.
    _options: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        """Registers the class."""
        super().__init_subclass__()
        cls._rules = {}
        name = cls.__name__
        if name in BaseFactor._registry:  # another class with that name: tell them apart
            name = f"{cls.__module__}.{cls.__qualname__}.{next(_NUMBERS)}"
        cls._registered = name
        BaseFactor._registry[name] = cls

    _rules: ClassVar[dict[int, _core.Rule]]  # by d; of factors made of rows

    _record: Record  # of its graph
    _scope: tuple[AnyPart, ...]  # the variables of each of the k factors, part beside part
    _count: int  # k
    _size: int  # d, how many variables each has
    _group_shape: tuple[int, ...]  # what `axis` leaves; its size is k
    _axis: int | tuple[int, ...] | None = None  # as given
    _params: tuple[Param, ...] = ()
    _added: bool = False  # whether it was added to its graph
    _score_parts: tuple[Scores, ...] = ()  # its own scores
    _given: Sequence[Variable] = ()
    _listed: bool = False  # whether the variables were given in a list

    def __init__(
        self,
        variables: Variable | Sequence[Variable],
        *others: Variable | int | tuple[int, ...],
        axis: int | tuple[int, ...] | None = None,
    ) -> None:
        if others:
            self._take_side_by_side(variables, others, axis)
        else:
            self._take(variables, axis)

    @property
    def _index(self) -> IndexArray:
        """`(k, d)`, the variables of each factor."""
        return parts_index(self._scope)

    @property
    def _negated(self) -> BoolArray | None:
        """`(k, d)`, or None if no variable is negated."""
        return parts_negated(self._scope)  # type: ignore[no-any-return]

    def _take(
        self, variables: Variable | Sequence[Variable], axis: int | tuple[int, ...] | None
    ) -> None:
        """Records the variables: all of them in one factor, or one factor along `axis`."""
        if isinstance(variables, Variable) and variables.view is not None:  # the usual case
            if axis is None or type(axis) is int:
                along = Scope.along if is_tracing() else remembered_scope
                scope = along(variables.view, variables.negated, axis)
                if scope is not None:
                    self._given, self._axis = [variables], axis
                    self._keep(scope, variables.distinct)
                    return
        several = isinstance(variables, (list, tuple))
        given: list[Any] = list(variables) if several else [variables]
        self._given, self._listed, self._axis = given, several, axis
        if not given:
            raise GraphError(f"{self.kind}: the list of variables is empty.")
        for u in given:
            if not isinstance(u, Variable):
                raise GraphError(
                    f"{self.kind} takes a variable of a FactorGraph or a list of them, "
                    f"got {type(u).__name__}. Make variables with fg.variable_from(scores)."
                )
        shape: tuple[int, ...] = ()
        if axis is None:
            parts = [u.part(tuple(range(u.ndim))) for u in given]
        else:
            axes = [self._last_axes(u, axis) for u in given]
            left = [_left(u.shape, last) for u, last in zip(given, axes, strict=True)]
            shape = left[0]
            if any([other != shape for other in left[1:]]):
                raise ShapeError(
                    f"{self.name}: with axis={axis} the variables must agree in shape except along "
                    f"that axis, got {[u.shape for u in given]}."
                )
            parts = [u.part(last) for u, last in zip(given, axes, strict=True)]
        self._keep(Scope.of(parts, shape), len(given) == 1 and given[0].distinct)

    def _keep(self, scope: Scope, distinct: bool) -> None:
        """Stores its variables, and tells the graph about the factor."""
        given = self._given
        self._record = record = given[0]._record
        if len(given) > 1 and any([u._record is not record for u in given]):
            raise GraphError(f"{self.name}: the variables belong to different graphs.")
        self._scope, self._count, self._size, self._group_shape = scope
        if not self._size and self._count:
            raise GraphError(f"{self.name}: it has no variables.")
        if not distinct:
            self._check_distinct()
        record.made.append(self)

    def _take_side_by_side(
        self,
        variables: Variable | Sequence[Variable],
        others: tuple[Any, ...],
        axis: int | tuple[int, ...] | None,
    ) -> None:
        """Records the variables: side by side if there are others, with one factor per position."""
        if len(others) == 1 and axis is None and not isinstance(others[0], (Variable, list)):
            axis, others = others[0], ()  # the axis may be the second positional argument
            self._check_axis(axis)
        if not others:
            self._take(variables, axis)
            return
        given: list[Any] = [variables, *others]
        self._given = given
        for u in given:
            if not isinstance(u, Variable):
                raise GraphError(
                    f"{self.kind} takes variables side by side (one factor for each position) or "
                    f"one list of them (one factor over all), got {type(u).__name__} among "
                    f"{len(given)} arguments."
                )
        if axis is not None:
            raise GraphError(
                f"{self.name}: axis={axis} is for one variable or a list of them. Variables side "
                f"by side make one factor for each position."
            )
        shape = self._common_shape(given)
        self._keep(Scope.of([_column(u, shape) for u in given], shape), distinct=False)

    def _check_axis(self, axis: Any) -> None:
        axes = axis if isinstance(axis, tuple) else (axis,)
        if axis is not None and not all(isinstance(a, (int, np.integer)) for a in axes):
            raise GraphError(
                f"{self.kind} takes a variable or a list of them and axis=, or variables side by "
                f"side, got {type(axis).__name__}."
            )

    def _common_shape(self, given: list[Variable]) -> tuple[int, ...]:
        """The shape that all are broadcast to, as in NumPy."""
        shapes = [u.shape for u in given]
        ndim = max([len(s) for s in shapes])
        padded = [(1,) * (ndim - len(s)) + s for s in shapes]
        common = tuple(
            [next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True)]
        )
        if any(n not in (1, c) for s in padded for n, c in zip(s, common, strict=True)):
            raise ShapeError(
                f"{self.name}: side by side, the variables must have equal or broadcastable "
                f"shapes, got {shapes}. For one factor over all of them, pass a list."
            )
        return common

    def _last_axes(self, u: Variable, axis: int | tuple[int, ...]) -> tuple[int, ...]:
        """The axes of `u` that `axis` names, as non-negative numbers."""
        ndim = u.ndim
        axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
        for a in axes:
            if not isinstance(a, (int, np.integer)) or not -ndim <= a < ndim:
                raise ShapeError(
                    f"{self.kind} over {u.name}: axis={shown(axis)} does not fit its {ndim} "
                    f"dimensions, not counting batch dimensions."
                )
        last = tuple([a % ndim for a in axes])
        if len(set(last)) != len(last):
            raise ShapeError(f"{self.kind} over {u.name}: axis={axis} names an axis twice.")
        return last

    def _check_distinct(self) -> None:
        if is_tracing():
            return  # the compiled graph checks again
        twice = repeated_variable(self._index)
        if twice is not None:
            raise GraphError(
                f"{self.name}: {scalar_name(self._record, twice)} is in it twice. "
                f"List every variable once."
            )

    @property
    def _complete(self) -> bool:
        """Whether it was built without an error."""
        return len(self._params) == len(self._param_shapes)

    def _check_made(self) -> None:
        """Raises unless its class keeps all that a query needs."""
        if len(self._params) != len(self._param_shapes):
            raise GraphError(
                f"{self.name}: it has the parameters {', '.join(self._param_shapes)}, but keeps "
                f"{len(self._params)}. Define __init__, and call self._set_params in it, with one "
                f"for each."
            )

    @property
    def kind(self) -> str:
        """The name of the factor's class."""
        return type(self).__name__

    @property
    def name(self) -> str:
        """What messages call the factor, for example `Budget over u[:, 3]`."""
        return f"{self.kind} over {self._variables_name}"

    @property
    def _variables_name(self) -> str:
        if not self._given:  # rebuilt from what a compiled function wrote
            flags = self._negated
            negated = None if flags is None else flags.reshape(-1)
            return literals_name(self._record, self._index.reshape(-1), negated)
        names = ", ".join([u.name for u in self._given[:4]])
        return names + (", ..." if len(self._given) > 4 else "")

    def __repr__(self) -> str:
        size = f"{counted(self._count, 'factor')} of {counted(self._size, 'variable')}"
        return f"<{', '.join([self.name, *factor_settings(self)])}: {size}>"

    @property
    def value(self) -> Array:
        """The marginals of the factor's own scores, in their shape, after the batch dimensions."""
        if not self._score_parts:
            raise GraphError(f"{self.name} has no scores of its own, so it has no value.")
        return self._record.factor_value_of(self)

    @property
    def _key(self) -> tuple[Any, ...]:
        """What distinguishes it from other factors, apart from numbers: the key to find graphs."""
        raise NotImplementedError

    def _group(self) -> _core.Group:
        """The factor as the core takes it."""
        raise NotImplementedError

    def _set_params(self, *params: Param) -> None:
        """Stores the parameters, and checks them unless they are traced."""
        if not is_hidden(*params):
            self._check_named(params)
        self._params = params

    def _check_named(self, params: tuple[Param, ...]) -> None:
        """Raises unless the parameters are valid; names the factor and the instance at fault."""
        if self._accepts(params):
            return
        batch = max([1 if isinstance(p, float) else len(p) for p in params])
        for i, k in np.ndindex(batch, self._count):
            one = tuple([p if isinstance(p, float) else self._part(p, i, k) for p in params])
            if not self._accepts(one):
                self._check_params(one, self._size, self._name_of(k, i, batch))

    def _accepts(self, params: tuple[Param, ...]) -> bool:
        try:
            self._check_params(params, self._size, self.kind)
        except FactormaxError:
            return False
        return True

    def _part(self, param: Any, i: int, k: int) -> Any:
        """The part of factor k in instance i, `(1, 1 | d)`."""
        return param[min(i, len(param) - 1)].reshape(self._count, 1, -1)[k]

    def _name_of(self, k: int, i: int, batch: int) -> str:
        """The name of factor k, and of instance i if each of a batch has its own parameters."""
        name = self.name
        if self._count > 1:
            flags = self._negated
            negated = None if flags is None else flags[k]
            name = f"{self.kind} over {literals_name(self._record, self._index[k], negated)}"
        if batch == 1:
            return name
        shape = self._record.batch_shape or ()
        if math.prod(shape) != batch:  # a vmap has made it larger
            shape = (batch,)
        return f"{name}, instance {tuple(int(j) for j in np.unravel_index(i, shape))}"

    @classmethod
    def _check_params(cls, params: tuple[Param, ...], d: int, name: str) -> None:
        """Raises unless the parameters of factors over d variables are valid."""


class RowFactor(BaseFactor):
    """A factor made of linear rows over its literals; subclasses list them in `rows`.

    A literal is a variable or its negation, so the rows need not deal with negation.
    """

    #: How the core treats the rows of a factor: as plain rows, or as a block with its own kernel.
    _block_kind: ClassVar[BlockKind] = BlockKind.row
    #: How many rows a factor has, if that does not depend on d; saves a call of `rows`.
    _fixed_rows: ClassVar[int | None] = None

    @classmethod
    def rows(cls, d: int) -> list[Row]:
        """The rows of one factor over d literals; there must be at least one."""
        raise NotImplementedError(
            f"{cls.__name__}: define the class method rows(d), the list of its rows for d literals."
        )

    @classmethod
    def _num_rows(cls, d: int) -> int:
        """The number of rows. d may be symbolic while `torch.compile` traces."""
        return len(cls.rows(int(d))) if cls._fixed_rows is None else cls._fixed_rows

    @classmethod
    def _rule(cls, d: int) -> _core.Rule:
        """The rows as the core takes them."""
        found = cls._rules.get(d)
        if found is None:
            rows = cls.rows(d)
            if not rows:
                raise GraphError(
                    f"{cls.__name__}: rows({d}) returned no rows. If it does not constrain {d} "
                    f"literals, return [Row([], 0.0)], which always holds."
                )
            per_literal = [shape == "literal" for shape in cls._param_shapes.values()]
            names = list(cls._param_shapes)
            found = _core.Rule(cls._registered, cls._block_kind, d, per_literal, rows, names)
            cls._rules[d] = found
        return found

    @property
    def _key(self) -> tuple[Any, ...]:
        """What distinguishes it from other factors, apart from numbers."""
        return self._rules.get(self._size) or self._rule(self._size), self._scope

    def _group(self) -> _core.Group:
        """The factor as the core takes it."""
        return _core.Group.rows(self._rule(self._size), [p.core() for p in self._scope])


def _left(shape: tuple[int, ...], last: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without these axes."""
    return tuple([s for a, s in enumerate(shape) if a not in last])


def _column(u: Variable, shape: tuple[int, ...]) -> AnyPart:
    """One variable per place of the shape that `u` is broadcast to."""
    if u.view is not None:
        return u.view.spread(shape).part(u.negated, ())
    return ListedPart(np.broadcast_to(2 * u.index + u.negated, shape).reshape(-1, 1))


def repeated_variable(index: IndexArray) -> int | None:
    """A variable that occurs twice in a row of `index`, or None."""
    ordered = np.sort(index, axis=1)
    repeated = np.argwhere(ordered[:, 1:] == ordered[:, :-1])
    return int(ordered[tuple(repeated[0])]) if len(repeated) else None


def check_whole(name: str, word: str, value: Any, instead: str = "") -> None:
    """Raises unless all numbers are whole and not negative; `instead`: what takes fractions."""
    numbers = np.asarray(value)
    bad = ~(np.isfinite(numbers) & (numbers >= 0) & (numbers == np.floor(numbers)))
    if bad.any():
        worst = numbers[bad].ravel()[0]
        rule = "at least 0" if worst < 0 else "a whole number"
        fraction = bool(instead) and np.isfinite(worst) and worst > 0
        hint = f" {instead} takes fractions." if fraction else ""
        raise GraphError(f"{name}: {word} must be {rule}, got {_plain(worst)}.{hint}")


def _plain(value: Any) -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() else str(number)
