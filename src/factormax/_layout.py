"""From the arrays of a graph to flat ones and back, for any array library.

The flat arrays have one row per instance: the variables of all tensors one after another, and the
factors' own scores likewise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from factormax._columns import Columns
from factormax._space import NumpySpace
from factormax.factors.scores import Scores

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["Layout"]


class TensorSlot(NamedTuple):
    """Where a variable tensor is in the flat arrays, and its shape."""

    start: int
    size: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ScoreSlot:
    """Shapes of a factor's scores: as it needs them, as given without and with the batch."""

    count: int
    shape: tuple[int, ...]
    own_shape: tuple[int, ...]
    given_shape: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether all instances share the scores, which have no batch dimensions then."""
        return len(self.given_shape) == len(self.own_shape)

    @property
    def alike(self) -> bool:
        """Whether all instances have the same scores; batch dimensions may all be 1."""
        dims = len(self.given_shape) - len(self.own_shape)
        return all([s == 1 for s in self.given_shape[:dims]])


class Layout:
    """Where the arrays of a graph are in the flat ones. It holds only shapes, not the graph.

    Args:
        batch_shape: the batch dimensions.
        tensors: a start, a size and a shape for each tensor of variables.
        parts: the scores of factors, in the order of the core.
    """

    def __init__(
        self,
        batch_shape: tuple[int, ...],
        tensors: list[TensorSlot],
        parts: Sequence[Scores],
    ) -> None:
        self.batch_shape = batch_shape
        self.batch = math.prod(batch_shape)  # B
        self.tensors = tensors
        self.flat_shapes = [(self.batch, t.size) for t in tensors]
        self.full_shapes = [(*batch_shape, *t.shape) for t in tensors]
        self.parts = [ScoreSlot(p.count, p.shape, p.own_shape, tuple(p.given.shape)) for p in parts]
        self.is_shared = [self.batch == 1 or f.alike for f in self.parts]  # whether one row will do

    @classmethod
    def of(cls, graph: FactorGraph) -> Layout:
        """The layout of a graph."""
        tensors = [TensorSlot(t.start, t.size, t.shape) for t in graph._tensors]
        return cls(graph._known_batch_shape(), tensors, graph._score_parts())

    # ---- flat ------------------------------------------------------------------------------------

    def flat_scores(self, xp: Any, scores: list[Any], dtype: Any) -> Any:
        """`(B, n)`, from arrays `(*batch, *shape)` in this dtype; None means 0."""
        if len(scores) == 1 and scores[0] is not None:
            return scores[0].reshape(self.flat_shapes[0])
        columns = [
            xp.zeros(shape, dtype=dtype) if s is None else s.reshape(shape)
            for s, shape in zip(scores, self.flat_shapes, strict=True)
        ]
        return xp.joined(columns)

    def flat_factor_scores(self, xp: Any, scores: list[Any], dtype: Any) -> Any:
        """`(1 | B, P)`; one row if the instances share all of them."""
        own, shared = self.factor_blocks(xp, scores, dtype)
        return own if shared is None else Columns(shared, own, self.runs).full(xp)

    def factor_blocks(
        self, xp: Any, scores: list[Any], dtype: Any, copy: bool = False
    ) -> tuple[Any, Any]:
        """`(1 | B, P)` and None, or `Columns.own` and `.shared` if only some of them are shared."""
        per_instance: list[Any] = []
        shared: list[Any] = []
        for s, f, alike in zip(scores, self.parts, self.is_shared, strict=True):
            own = s.reshape(f.own_shape) if alike and f.given_shape != f.own_shape else s
            shape = f.shape if alike else (*self.batch_shape, *f.shape)
            full = own if own.shape == shape else xp.spread(own, shape)
            columns = full.reshape((1 if alike else self.batch, f.count))
            (shared if alike else per_instance).append(columns)
        blocks = [some for some in (per_instance, shared) if some]
        found = [xp.joined(some) if copy or len(some) > 1 else some[0] for some in blocks]
        if not found:
            return xp.zeros((1, 0), dtype=dtype), None
        return found[0], found[1] if len(found) == 2 else None

    def cooled(
        self, xp: Any, eta_u: Any, own: Any, shared: Any, temperature: Any, divide: Any
    ) -> tuple[Any, Any, Any, Any]:
        """The scores of variables and the blocks above, divided by a temperature.

        The last is what is still to divide `shared`, `(B, 1)`, if each instance has a temperature.

        temperature: broadcastable to the batch; divide: from scores and `(1 | B, 1)` to a quotient.
        """
        if math.prod(temperature.shape) == 1:
            heat = temperature.reshape((1, 1))
            alike = None if shared is None else divide(shared, heat)
            return divide(eta_u, heat), divide(own, heat), alike, None
        heat = xp.spread(temperature, self.batch_shape).reshape((-1, 1))
        if self.is_shared and all(self.is_shared):
            own, shared = xp.zeros((self.batch, 0), dtype=own.dtype), own
        return divide(eta_u, heat), divide(own, heat), shared, None if shared is None else heat

    @property
    def is_mixed(self) -> bool:
        """Whether the instances share some factor scores, but not all."""
        return len(set(self.is_shared)) == 2

    @cached_property
    def runs(self) -> tuple[int, ...]:
        """The `runs` of the parts as `Columns`."""
        return Columns.runs_of([f.count for f in self.parts], self.is_shared)

    def flat_mask(self, xp: Any, masks: list[Any]) -> Any:
        """`(B, n)`; a mask that is None is True everywhere."""
        columns = [
            xp.ones((self.batch, t.size))
            if mask is None
            else xp.spread(mask, (*self.batch_shape, *t.shape)).reshape((self.batch, t.size))
            for mask, t in zip(masks, self.tensors, strict=True)
        ]
        return columns[0] if len(columns) == 1 else xp.joined(columns)

    def flat_factor_grads(self, xp: Any, grads: list[Any], dtype: Any) -> Any:
        """`(B, P)`, from gradients of the values of factors; None means 0."""
        columns = []
        for grad, f in zip(grads, self.parts, strict=True):
            if grad is None:
                columns.append(xp.zeros((self.batch, f.count), dtype=dtype))
                continue
            missing = (1,) * (len(f.shape) - len(f.own_shape))
            aligned = grad.reshape((*self.batch_shape, *missing, *f.own_shape))
            full = xp.spread(aligned, (*self.batch_shape, *f.shape))
            columns.append(full.reshape((self.batch, f.count)))
        return columns[0] if len(columns) == 1 else xp.joined(columns)

    # ---- and back --------------------------------------------------------------------------------

    def by_tensor(self, columns: Any) -> list[Any]:
        """From `(B, n)` to `(*batch, *shape)` of each tensor; the only one may have it already."""
        if len(self.tensors) == 1:
            shape = self.full_shapes[0]
            return [columns if columns.shape == shape else columns.reshape(shape)]
        return [
            columns[:, t.start : t.start + t.size].reshape(shape)
            for t, shape in zip(self.tensors, self.full_shapes, strict=True)
        ]

    def by_part(self, xp: Any, columns: Any) -> list[Any]:
        """From `(B, P)` to `(*batch, *shape as given)`; sums what came from the same score."""
        found, start = [], 0
        for f in self.parts:
            stop = start + f.count
            own = columns[:, start:stop].reshape((*self.batch_shape, *f.shape))
            found.append(_summed(xp, own, f, len(self.batch_shape)))
            start = stop
        return found

    def by_given(self, xp: Any, columns: Any) -> list[Any]:
        """The same in the shape of the scores as given; shared ones are summed over the batch."""
        found = self.by_part(xp, columns)
        return [self._as_given(xp, own, f) for own, f in zip(found, self.parts, strict=True)]

    def by_summed(self, columns: Columns) -> list[Any]:
        """The same from NumPy columns that are summed already, where the scores are shared."""
        found, start = [], 0
        for f, alike in zip(self.parts, self.is_shared, strict=True):
            batch = () if alike else self.batch_shape
            own = columns.part(start, start + f.count, len(batch) == 0)
            own = _summed(NumpySpace, own.reshape((*batch, *f.shape)), f, len(batch))
            found.append(
                own.reshape(f.given_shape) if alike else self._as_given(NumpySpace, own, f)
            )
            start += f.count
        return found

    def _as_given(self, xp: Any, own: Any, f: ScoreSlot) -> Any:
        """Sums over those batch dimensions, of `(*batch, *shape as given)`, that scores share."""
        dims = len(self.batch_shape)
        if f.shared:
            return xp.total(own, tuple(range(dims)), False) if dims else own
        ones = tuple([i for i in range(dims) if f.given_shape[i] == 1 and own.shape[i] != 1])
        return xp.total(own, ones, True) if ones else own


def _summed(xp: Any, own: Any, f: ScoreSlot, dims: int) -> Any:
    """Sums what came from the same broadcast score. dims: the number of batch dimensions."""
    extra = own.ndim - dims - len(f.own_shape)
    if extra:
        own = xp.total(own, tuple(range(dims, dims + extra)), False)
    ones = tuple(
        [dims + i for i, s in enumerate(f.own_shape) if s == 1 and own.shape[dims + i] != 1]
    )
    return xp.total(own, ones, True) if ones else own
