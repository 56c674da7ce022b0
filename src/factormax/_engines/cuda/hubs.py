"""What the kernels need for structured factors with oracles: their tables and their memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax._core import Model, OracleKind
from factormax._inputs import structured_of

__all__ = ["HubMemory", "Hubs"]

#: The kinds with an oracle in `oracles.cuh`, and their numbers there.
_KINDS = {OracleKind.sequence: 0, OracleKind.sequence_budget: 1, OracleKind.table: 2}
#: The structures that a factor has room for: instances that need more go to the CPU.
_LEAST_ROOM, _MOST_ROOM, _PER_SLOT = 96, 256, 6
#: To fit into shared memory, there is less room: down to the first number if two instances then
#: fit, and down to the second if one does.
_FEWER_PER_SLOT, _SMALL_ROOM = 4, 48
#: The shared memory of a block that the driver reserves for itself.
_RESERVED = 1024
#: The numbers that a set of structures keeps from call to call, and arrays over its structures.
_STATE, _ARRAYS = 6, 7
#: Variables are 16-bit numbers, and scores are copied for each instance.
_MOST_VARS, _MOST_SCORES = 1 << 15, 1 << 16


def _aligned(size: int) -> int:
    return (size + 15) & ~15


@dataclass(frozen=True)
class HubMemory:
    """The memory of all hubs of an instance.

    Attributes:
        table: `(hubs, 11)`, see `Hub` in `oracles.cuh`.
        offsets: where the arrays are in it, by the names of the arguments.
        bytes, more: its size, and the additional size for systems and faces.
        shared, more_shared: whether these are in shared memory.
        saved: the length of what is kept of the structures, in 16-bit numbers.
    """

    table: npt.NDArray[np.int32]
    offsets: dict[str, int]
    bytes: int
    more: int
    shared: bool
    more_shared: bool
    saved: int

    @property
    def chunks(self) -> int:
        """The chunks of 32 numbers of a vector over structures: one for the candidate, two more."""
        return -(-(int(self.table[:, 6].max()) + 3) // 32)

    @property
    def work_stride(self) -> int:
        """Bytes per instance that are not in shared memory."""
        return self.bytes * (not self.shared) + self.more * (not self.more_shared)

    @property
    def in_shared(self) -> list[tuple[str, int]]:
        """What is in shared memory, and its size."""
        return [("hubs", self.bytes)] * self.shared + [("hub_more", self.more)] * self.more_shared

    @property
    def in_work(self) -> dict[str, int]:
        """Where the rest is, in global memory."""
        found = {} if self.shared else {"at_hubs": 0}
        behind = 0 if self.shared else self.bytes
        return found | ({} if self.more_shared else {"at_hub_more": behind})


class Hubs:
    """The structured factors of a model that have an oracle on the device.

    Attributes:
        count: how many there are.
        var: the variables of all of them, one after another; `slot`: where in a structure each can
            be.
        scores: the number of their scores.
    """

    def __init__(self, model: Model) -> None:
        every = structured_of(model)
        self._factors = [(i, f) for i, f in enumerate(every) if f.kind in _KINDS]
        self.count = len(self._factors)
        self.kinds = {f.kind for _, f in self._factors}
        sizes = [len(f.variables) for _, f in self._factors]
        self._first = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
        lists = [np.asarray(f.variables) for _, f in self._factors]
        slots = [_slots_of(f) for _, f in self._factors]
        self.var = np.concatenate([np.zeros(0, np.int32), *lists]).astype(np.int32)
        self.slot = np.concatenate([np.zeros(0, np.uint16), *slots]).astype(np.uint16)
        self.shape = np.concatenate(
            [np.zeros(0, np.int32), *(np.asarray(f.shape) for _, f in self._factors)]
        ).astype(np.int32)
        self.scores = sum(f.num_scores for _, f in self._factors)
        self.longest = max(sizes, default=0)

    @staticmethod
    def reason(factor: Any) -> str:
        """Why a structured factor has no kernel, or ""."""
        if factor.kind == OracleKind.callback:
            return "oracles in Python run on the CPU"
        if factor.kind not in _KINDS and factor.kind != OracleKind.matching:
            projective = "a projective " * (factor.kind == OracleKind.projective_tree)
            return f"{projective}{factor.name} has no kernel"
        if len(factor.variables) > _MOST_VARS or factor.num_scores > _MOST_SCORES:
            return f"{factor.name} is too large for the kernels"
        return ""

    def at(self, size: int) -> npt.NDArray[np.int32]:
        """`(size,)`, the place of each variable in `var`, or −1."""
        found = np.full(size, -1, np.int32)
        found[self.var] = np.arange(len(self.var))
        return found

    def memory(self, shared_bytes: int, taken: int, active: int) -> HubMemory:
        """The memory if `taken` of the shared bytes are taken, for systems of `active` rows."""
        room = [
            min(len(f.variables) + 1, _MOST_ROOM, max(_LEAST_ROOM, _PER_SLOT * f.slots))
            for _, f in self._factors
        ]
        fewer = [max(_LEAST_ROOM, _FEWER_PER_SLOT * f.slots) for _, f in self._factors]
        few = [_SMALL_ROOM] * self.count
        wanted = self._layout(room, active)
        found = self._shrunk(room, fewer, active, shared_bytes // 2 - _RESERVED - taken, True)
        if found is None:
            found = self._shrunk(room, few, active, shared_bytes - taken, False)
        if found is None:
            return wanted
        more = found.bytes + found.more <= shared_bytes - taken
        return replace(found, shared=True, more_shared=more)

    def _shrunk(
        self, room: list[int], least: list[int], active: int, limit: int, whole: bool
    ) -> HubMemory | None:
        """The memory with as much room as fits; whole: including that for systems and faces."""
        while True:
            found = self._layout(room, active)
            if found.bytes + found.more * whole <= limit:
                return found
            smaller = [min(c, max(s, c * 7 // 8)) for c, s in zip(room, least, strict=True)]
            if smaller == room:
                return None
            room = smaller

    def _layout(self, room: list[int], active: int) -> HubMemory:
        """The memory with room for this many structures each, all of it in global memory."""
        start, offsets = 0, {}
        for name, size in (
            ("hub_x", 8 * len(self.var)),
            ("hub_v", 8 * len(self.var)),
            ("hub_rest", 8 * len(self.var)),
            ("hub_score", 8 * self.scores),
            ("hub_scratch", max(_scratch(f) for _, f in self._factors)),
        ):
            offsets[name] = start
            start += _aligned(size)
        rows, score, saved, shape = [], 0, 0, 0
        for (i, f), first, capacity in zip(self._factors, self._first, room, strict=False):
            sizes = (len(f.variables), score, f.num_scores, f.slots, capacity)
            rows.append((_KINDS[f.kind], first, *sizes, start, saved, i, shape))
            places = capacity + 1
            numbers = _STATE + places * (places + 1) // 2 + _ARRAYS * places
            start += _aligned(8 * numbers + 2 * places * f.slots)
            score += f.num_scores
            saved += 1 + capacity * f.slots
            shape += len(f.shape)
        more = 8 * max(2 * self.longest, active * max(room))
        table = np.array(rows, np.int32)
        return HubMemory(table, offsets, start, _aligned(more), False, False, saved)


def _slots_of(factor: Any) -> Any:
    """The slot of a structure that each variable can be in."""
    shape = [int(s) for s in factor.shape]
    if factor.kind == OracleKind.sequence:
        return np.repeat(np.arange(shape[0]), shape[1])
    if factor.kind == OracleKind.sequence_budget:
        return np.arange(shape[0])
    return np.repeat(np.arange(len(shape)), shape)


def _scratch(factor: Any) -> int:
    """The bytes that its oracle works in."""
    shape = [int(s) for s in factor.shape]
    if factor.kind == OracleKind.sequence:
        return 8 * shape[0] * shape[1]
    if factor.kind == OracleKind.sequence_budget:
        most = max(0, min(shape[2], shape[0])) + 1
        return 40 * most + shape[0] * most
    return 0
