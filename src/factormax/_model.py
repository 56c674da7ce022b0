"""Compiles a list of factors to a model of the core, once: graphs that are built repeatedly with
the same factors, as in a training loop, share it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

from factormax._core import Model
from factormax.errors import GraphError

if TYPE_CHECKING:
    from factormax.factors.base import BaseFactor

__all__ = ["Remembered", "is_large", "model_of"]

T = TypeVar("T")

_LARGEST = 200_000  # variables of all factors together; many larger models would fill the memory
_LARGEST_OF_ALL = 4_000_000  # about 100 MB; beyond, only the graph itself keeps the model


class Remembered(Generic[T]):
    """A cache of recent results, by key; the least recently used is forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = Lock()
        self._is_full = False

    def get(self, key: Hashable) -> T | None:
        """What was kept under this key; None if it is not there."""
        found = self._found.get(key)
        if found is not None and self._is_full:  # until then, nothing is forgotten anyway
            with self._lock:
                if key in self._found:
                    self._found.move_to_end(key)
        return found

    def keep(self, key: Hashable, value: T) -> None:
        """Remembers it."""
        with self._lock:
            self._found[key] = value
            while len(self._found) > self._most:
                self._found.popitem(last=False)
            self._is_full = len(self._found) == self._most

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._found.clear()
            self._is_full = False


_remembered: Remembered[Model] = Remembered(64)
_remembered_large: Remembered[Model] = Remembered(2)


def is_large(factors: Sequence[BaseFactor]) -> bool:
    """Whether these have too many variables for their model to be cached freely."""
    return _size(factors) > _LARGEST


def model_of(num_variables: int, factors: Sequence[BaseFactor]) -> Model:
    """The compiled model of these factors.

    Raises:
        GraphError: if they do not fit together.
    """
    key = (num_variables, *[f._key for f in factors])
    remembered = _remembered_large if is_large(factors) else _remembered
    found = remembered.get(key)
    if found is None:
        found = _compiled(num_variables, factors)
        if _size(factors) <= _LARGEST_OF_ALL:
            remembered.keep(key, found)
    return found


def _size(factors: Sequence[BaseFactor]) -> int:
    return sum([f._count * f._size for f in factors])


def _compiled(num_variables: int, factors: Sequence[BaseFactor]) -> Model:
    for factor in factors:
        factor._check_made()
    try:
        return Model(num_variables, [f._group() for f in factors])
    except ValueError as error:
        raise GraphError(str(error)) from None
