"""From a list of factors to the model that the core compiles, once: graphs built again and again
with the same factors, as a training loop does, share it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from factormax._core import Model
from factormax.errors import GraphError

if TYPE_CHECKING:
    from factormax.factors.base import BaseFactor

__all__ = ["model_of"]

_MOST = 64  # models that are remembered
_LARGEST = 200_000  # variables of all factors together; larger ones are remembered by their graph

_remembered: OrderedDict[tuple[Any, ...], Model] = OrderedDict()
_lock = Lock()


def model_of(num_variables: int, factors: Sequence[BaseFactor]) -> Model:
    """The compiled model of these factors.

    Raises:
        GraphError: if they make no sense together.
    """
    if sum([f._count * f._size for f in factors]) > _LARGEST:
        return _compiled(num_variables, factors)
    key = (num_variables, *[f._key for f in factors])
    with _lock:
        found = _remembered.get(key)
        if found is not None:
            _remembered.move_to_end(key)
            return found
    made = _compiled(num_variables, factors)
    with _lock:
        _remembered[key] = made
        while len(_remembered) > _MOST:
            _remembered.popitem(last=False)
    return made


def _compiled(num_variables: int, factors: Sequence[BaseFactor]) -> Model:
    try:
        return Model(num_variables, [f._group() for f in factors])
    except ValueError as error:
        raise GraphError(str(error)) from None
