"""The structures that make up a solution, as the core lists them, and as the user sees them.

The core lists, instance after instance and factor after factor, every structure of its active sets:
the variables that are on (or −1), and a probability. It is 0 for those that only complete the face,
which the backward pass needs and the user does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax.arrays import Array, FloatArray, IndexArray

__all__ = ["Answer", "FoundStructures", "Support"]


@dataclass(frozen=True)
class FoundStructures:
    """The flat lists of the core, for a batch of B instances with S structured factors."""

    count: npt.NDArray[np.int32]  # (B * S,) structures
    prob: npt.NDArray[np.float64]
    on: npt.NDArray[np.int32]  # `slots` a structure
    features: npt.NDArray[np.int32]
    dense: npt.NDArray[np.float64]
    num_cuts: npt.NDArray[np.int32]  # (B * S,) lists of flags if solved by rows or flows; else −1,
    # or −2 if there is no structure
    cuts: npt.NDArray[np.uint8]  # these flags: `RowForm` and `SequenceFlow` of the core

    @classmethod
    @lru_cache(maxsize=1)
    def none(cls) -> FoundStructures:
        """Of a graph without structured factors."""
        whole, real = np.zeros(0, dtype=np.int32), np.zeros(0)
        return cls(whole, real, whole, whole, real, whole, np.zeros(0, dtype=np.uint8))

    @property
    def is_complete(self) -> bool:
        """Whether the structures of all factors are there: rows and flows do without."""
        return not self.num_cuts.size or bool(self.num_cuts.max() < 0)

    @classmethod
    def joined(cls, parts: list[FoundStructures]) -> FoundStructures:
        """Of a batch whose instances were solved apart."""
        fields = ("count", "prob", "on", "features", "dense", "num_cuts", "cuts")
        return cls(*(np.concatenate([getattr(p, f) for p in parts]) for f in fields))


class Support:
    """The structures of one factor with positive probability: the most probable first.

    Several factors of one call, k of them, count like instances: B is then k times as large.

    Attributes:
        instance, rank: `(N,)`, whose each structure is, and its place among them.
        position: `(N,)`, where its probability stands in the flat list.
        probs: `(B, K)`, padded with 0.
    """

    def __init__(
        self, found: FoundStructures, factors: range, slots: IndexArray, batch: int
    ) -> None:
        chosen = slice(factors.start, factors.stop)
        count = found.count.reshape(batch, len(slots)).astype(np.int64)
        begin = _starts(count)[:, chosen].reshape(-1)
        own = count[:, chosen].reshape(-1)
        room = int(slots[factors.start]) if factors else 0
        within = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
        instance = np.repeat(np.arange(len(own)), own)
        position = np.repeat(begin, own) + within
        kept = found.prob[position] > 0
        instance, position, within = instance[kept], position[kept], within[kept]
        order = np.lexsort((-found.prob[position], instance))
        self.instance: IndexArray = instance[order]
        self.position: IndexArray = position[order]
        self.counts: IndexArray = np.bincount(instance, minlength=len(own))
        first = np.cumsum(self.counts) - self.counts
        self.rank: IndexArray = np.arange(len(instance)) - first[self.instance]
        self.width = int(self.counts.max(initial=1))  # room for NaN where there is none
        self.probs = self.spread(found.prob)
        lists = _starts(count * slots)[:, chosen].reshape(-1)[self.instance]
        places = (lists + within[order] * room)[:, None] + np.arange(room)
        self.on = found.on[places] if len(instance) else np.zeros((0, room), np.int32)

    def spread(self, flat: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """From the flat list to `(B, K)`."""
        out = np.zeros((len(self.counts), self.width))
        out[self.instance, self.rank] = flat[self.position]
        return out

    def collect(self, grad: npt.NDArray[Any], flat: npt.NDArray[np.float64]) -> None:
        """Adds `(B, K)` to the flat list."""
        flat[self.position] += grad[self.instance, self.rank]

    def structures(self, size: int) -> FloatArray:
        """The 0/1 assignments, `(B, K, size)`."""
        out = np.zeros((len(self.counts), self.width, size))
        row, slot = np.nonzero(self.on >= 0)
        out[self.instance[row], self.rank[row], self.on[row, slot]] = 1
        return out


@dataclass(eq=False)
class Answer:
    """What `structures`, `probs` and `num_structures` of a factor hand out after a query."""

    find: Callable[[], tuple[Support, Array]]  # the support, and its probabilities (*batch, K)
    batch_shape: tuple[int, ...]  # with the number of factors, if one call made several
    size: int  # of an assignment
    laid_out: Callable[[Any], Any]  # from the oracle's order to the shape of the variables
    wrap: Callable[[Any], Any]  # from NumPy to the caller's library and device

    @cached_property
    def _found(self) -> tuple[Support, Array]:
        return self.find()

    @property
    def support(self) -> Support:
        """The structures themselves."""
        return self._found[0]

    @property
    def probs(self) -> Array:
        """`(*batch, K)`."""
        return self._found[1]

    def structures(self) -> Array:
        """`(*batch, K, *shape of the variables)`."""
        dense = self.laid_out(self.support.structures(self.size))
        shape = (*self.batch_shape, *dense.shape[1:])
        return self.wrap(dense.reshape(shape))  # type: ignore[no-any-return]

    def num_structures(self) -> Array:
        """`(*batch,)`."""
        return self.wrap(self.support.counts.reshape(self.batch_shape))  # type: ignore[no-any-return]


def _starts(count: IndexArray) -> IndexArray:
    """Where each entry of `(B, S)` begins, if they follow one another."""
    flat = count.reshape(-1)
    return np.asarray((np.cumsum(flat) - flat).reshape(count.shape))
