"""The shared memory of a team of threads: which arrays it holds, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from factormax._engines.cuda.hubs import HubMemory

if TYPE_CHECKING:
    from factormax._engines.cuda.plan import Plan

__all__ = ["Layout", "Sizes"]

#: The number of arrays over all rows in a solve, and of more with uneven rows, with conjugate
#: gradients, and in the gradient.
_ROW_ARRAYS, _UNEVEN_ARRAYS, _CONJUGATE_ARRAYS, _BACKWARD_ROW_ARRAYS = 21, 2, 3, 4
#: A dense system with more rows is not worth its memory, and is never shrunk to fewer.
_MOST_ACTIVE, _LEAST_ACTIVE = 240, 8


class Layout:
    """Where the arrays of a team are in shared memory, in bytes, and what depends on that.

    Args:
        start: the bytes before them.
        wanted: their names and lengths. A pair of names stands for two arrays in the same place.
    """

    def __init__(self, start: int, wanted: list[tuple[Any, int]]) -> None:
        self.offsets: dict[str, int] = {}
        for names, length in wanted:
            for name in (names,) if isinstance(names, str) else names:
                self.offsets[f"at_{name}"] = start
            start += (length + 15) & ~15
        self.offsets["team_bytes"] = self.bytes = start


@dataclass(frozen=True)
class Sizes:
    """The memory of a team, by purpose."""

    plan: Plan
    size: int  # of a real number
    uneven: bool
    hubs: HubMemory | None = None

    def most_active(self, shared_bytes: int) -> int:
        """The rows of the largest dense system that fits."""
        active = min(self.plan.rows, _MOST_ACTIVE)
        while active > _LEAST_ACTIVE and self.forward(512, active, False).bytes > shared_bytes:
            active = active * 7 // 8
        return active

    def row_arrays(self, active: int) -> int:
        """The number of arrays over rows: odd, so that interleaved they spread over all banks."""
        conjugate = _CONJUGATE_ARRAYS * (active < self.plan.rows)
        return (_ROW_ARRAYS + _UNEVEN_ARRAYS * self.uneven + conjugate) | 1

    def backward_row_arrays(self, active: int) -> int:
        """The same for the gradient."""
        return (_BACKWARD_ROW_ARRAYS + 2 * (active < self.plan.rows)) | 1

    def forward(self, team: int, active: int, rows: bool) -> Layout:
        """The layout of a solve. What its finish needs can be where the errors will be."""
        arrays = self.row_arrays(active) if rows else 0
        n = self._vars(team)
        shared = max(n, active * (active + 1) // 2) * self.size
        zero = n if self.plan.zeros else 0
        own: list[tuple[Any, int]] = [(("v", "matrix"), shared), ("zero", zero)]
        found = Layout(_scratch(team), [*self._common(team, active, arrays), *own])
        # During the search for cuts, the arcs of a tree and their flows are there.
        found.offsets["most_arcs"] = shared // (2 * self.size + 2)
        return found

    def backward(self, team: int, active: int, rows: bool) -> Layout:
        """The layout of a gradient."""
        arrays = self.backward_row_arrays(active) if rows else 0
        matrix = active * (active + 1) // 2 * self.size
        own = [("v", self._vars(team) * self.size), ("matrix", matrix)]
        return Layout(_scratch(team), [*self._common(team, active, arrays), *own])

    def _vars(self, team: int) -> int:
        """The number of variables, padded to a full round, at least one."""
        return self.plan.n + team

    def _common(self, team: int, active: int, arrays: int) -> list[tuple[Any, int]]:
        plan, size = self.plan, self.size
        return [
            ("sums", 40 * size),
            ("eta", self._vars(team) * size),
            ("mu", self._vars(team) * size),
            ("t", (plan.rows + 1) * size),
            ("found", (plan.hard + team) * size),
            ("rows", arrays * plan.padded_rows * size),
            ("b", active * size),
            ("inverse", active * size),
            ("place", plan.rows * 4),
            ("active", active * 4),
            *plan.trees.memory,
            *(self.hubs.in_shared if self.hubs else ()),
        ]


def _scratch(team: int) -> int:
    """What a block needs to communicate across its warps: 40 numbers each."""
    return team // 32 * 40 * 8 if team > 32 else 0
