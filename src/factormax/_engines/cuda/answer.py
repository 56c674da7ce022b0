"""What the kernels find, and where it is in the memory of the device."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from factormax._engines.cuda.plan import Plan
    from factormax._engines.cuda.program import Machine

__all__ = ["Answer", "Places", "places_of"]

_BYTE, _SHORT, _INT = np.dtype(np.int8), np.dtype(np.int16), np.dtype(np.int32)
_DOUBLE = np.dtype(np.float64)

#: What a gradient needs from an answer.
_KEPT = ("cuts", "structures", "var_side", "row_side")
_OTHERS = ("residual", "objective", "tau", "iterations", "status", "oracle_calls", *_KEPT)


class Answer:
    """What the kernels found, on the device. All but `values` and `mu_v` share one array.

    Args:
        places: where the arrays of a batch of this size are.
        machine: where it is.
        values: a contiguous array of `(B, n)` numbers, in any shape.

    Attributes:
        mu: `(B, n)`, `mu_v`: `(B, scores)`; `objective`: `(B,)`.
    """

    __slots__ = ("_machine", "_rest", "address", "mu_v", "places", "values")

    def __init__(self, places: Places, machine: Machine, values: Any) -> None:
        self._machine, self.places = machine, places
        self.values = values
        self.mu_v = machine.empty(places.scores, places.dtype)
        self._rest = machine.empty(places.size, _BYTE)
        #: Where the array of the rest begins.
        self.address = machine.pointer(self._rest)

    @property
    def mu(self) -> Any:
        """The values of variables, `(B, n)`."""
        values, shape = self.values, self.places.variables
        return values if values.shape == shape else values.reshape(shape)

    def __getattr__(self, name: str) -> Any:
        if name not in _OTHERS:
            raise AttributeError(name)
        start, shape, dtype = self.places.others[name]
        stop = start + math.prod(shape) * dtype.itemsize
        return self._machine.view(self._rest[start:stop], dtype, shape)

    def taken(self, index: Any) -> Answer:
        """What the gradients of these instances need, in this order; `index` is on the device."""
        places = self.places.of(len(index))
        values = self._machine.empty(places.variables, places.dtype)
        found = Answer(places, self._machine, values)
        for name in _KEPT:
            getattr(found, name)[...] = getattr(self, name)[index]
        return found


class Places:
    """Where the arrays of an answer are.

    Args:
        plan: the plan of the model.
        batch: the number of instances.
        dtype: the dtype of the scores.
        saved: the numbers that the structures of an instance take.

    Attributes:
        variables, scores: the shapes of `mu` and `mu_v`.
        size: the bytes of the others, `(bytes,)`.
        start: where each of them begins, in bytes.
        others: the same, with its shape and its dtype.
    """

    def __init__(self, plan: Plan, batch: int, dtype: Any, saved: int) -> None:
        self.dtype, self._made = dtype, (plan, dtype, saved)
        self.variables, self.scores = (batch, plan.n), (batch, plan.scores)
        self.others: dict[str, tuple[int, Any, Any]] = {}
        start = 0
        for name, shape, kind in (
            ("residual", (batch,), _DOUBLE),
            ("objective", (batch,), dtype),
            ("tau", (batch, plan.rows), dtype),
            ("iterations", (batch,), _INT),
            ("status", (batch,), _INT),
            ("oracle_calls", (batch if saved else 0,), _INT),
            ("cuts", (batch, plan.trees.saved), _INT),
            ("structures", (batch, saved), _SHORT),
            ("var_side", (batch, plan.n), _BYTE),
            ("row_side", (batch, plan.rows), _BYTE),
        ):
            self.others[name] = start, shape, kind
            start += math.prod(shape) * kind.itemsize
        self.size = (start,)
        self.start = {name: place for name, (place, _, _) in self.others.items()}

    def of(self, batch: int) -> Places:
        """The same for another number of instances."""
        plan, dtype, saved = self._made
        return places_of(plan, batch, dtype, saved)


places_of = lru_cache(maxsize=64)(Places)
