"""The structures that make up a solution, as the core lists them and as the user sees them.

The core lists every structure of its active sets, instance by instance and factor by factor: the
variables that are on (padded with −1), and a probability. It is 0 for those that only complete the
face, which the backward pass needs and the user does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax._core import Structures
from factormax.arrays import Array, FloatArray, IndexArray

__all__ = ["Answer", "Support", "joined_structures", "lists_structures"]


def lists_structures(found: Structures) -> bool:
    """Whether the structures of all factors are listed; solves by rows or flows list none."""
    return not found.num_cuts.size or bool(found.num_cuts.max() < 0)


def joined_structures(parts: Sequence[Structures]) -> Structures:
    """The structures of a batch whose instances were solved separately."""
    names = ("count", "prob", "on", "features", "dense", "num_cuts", "cuts")
    return Structures(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in names})


class Support:
    """The structures of one factor that have positive probability, the most probable first.

    If one call made k factors, they count like instances: B is then k times as large.

    Attributes:
        instance, rank: `(N,)`, the instance of each structure, and its place within the instance.
        position: `(N,)`, where its probability is in the flat list.
        probs: `(B, K)`, padded with 0.
    """

    def __init__(self, found: Structures, factors: range, slots: IndexArray, batch: int) -> None:
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
        self.width = int(self.counts.max(initial=1))  # at least 1: NaN where there is no structure
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
    """What `structures`, `probs` and `num_structures` of a factor return after a query."""

    find: Callable[[], tuple[Support, Array]]  # the support, and its probabilities (*batch, K)
    batch_shape: tuple[int, ...]  # with the number of factors, if one call made several
    size: int  # of an assignment
    laid_out: Callable[[Any], Any]  # from the oracle's order to the shape of the variables
    wrap: Callable[[Any], Any]  # from NumPy to the caller's library and device

    @cached_property
    def _found(self) -> tuple[Support, Array]:
        return self.find()

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: what was found, not how to find it."""
        return {**self.__dict__, "find": None, "_found": self._found}

    @property
    def support(self) -> Support:
        """The structures themselves."""
        return self._found[0]

    @property
    def probs(self) -> Array:
        """`(*batch, K)`."""
        return self._found[1]

    @property
    def structures(self) -> Array:
        """`(*batch, K, *shape of the variables)`."""
        dense = self.laid_out(self.support.structures(self.size))
        shape = (*self.batch_shape, *dense.shape[1:])
        return self.wrap(dense.reshape(shape))  # type: ignore[no-any-return]

    @property
    def num_structures(self) -> Array:
        """`(*batch,)`."""
        return self.wrap(self.support.counts.reshape(self.batch_shape))  # type: ignore[no-any-return]


def _starts(count: IndexArray) -> IndexArray:
    """Where each entry of `(B, S)` begins if they are laid out one after another."""
    flat = count.reshape(-1)
    return np.asarray((np.cumsum(flat) - flat).reshape(count.shape))
