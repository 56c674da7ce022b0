"""Entries of rows and of variables, as lists for teams of threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from factormax.arrays import IndexArray

__all__ = ["Lists", "even_packs", "lanes_for", "offsets"]


def offsets(counts: Any) -> IndexArray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


@dataclass(frozen=True)
class Lists:
    """Entries by rows, or by variables, in packs, one after another for each thread."""

    first: IndexArray  # (rounds + 1,) packs
    code: IndexArray  # (packs, team, width)
    place: IndexArray
    packs: int  # per round, if all rounds have the same number, else 0

    @classmethod
    def laid_out(
        cls,
        ptr: IndexArray,
        code: IndexArray,
        place: IndexArray,
        shape: tuple[int, int, int],
        nothing: int,
    ) -> Lists:
        """Lists for (team members, lanes per item, entries per pack), padded with `nothing`."""
        team, lanes, width = shape
        count, lengths, groups = len(ptr) - 1, np.diff(ptr), team // lanes
        rounds = -(-count // groups)
        widest = np.zeros(rounds * groups, np.int64)
        widest[:count] = -(-lengths // (lanes * width))
        packs = widest.reshape(rounds, groups).max(axis=1, initial=1)
        first = offsets(packs)
        codes = np.full((int(first[-1]) * team, width), nothing, np.int64)
        places = np.full_like(codes, -1)
        item = np.repeat(np.arange(count), lengths)
        entry = np.arange(len(code)) - np.repeat(ptr[:-1], lengths)
        at = (first[item // groups] + entry // (lanes * width)) * team
        at += item % groups * lanes + entry // width % lanes
        codes[at, entry % width] = code
        places[at, entry % width] = place
        even = (
            int(packs[0])
            if team > 1 and rounds and (packs == packs[0]).all() and packs[0] <= 4
            else 0
        )
        return cls(first, codes, places.astype(np.int32), even)


def even_packs(lengths: IndexArray, shape: tuple[int, int, int]) -> int:
    nothing = np.zeros(int(lengths.sum()), np.int64)
    return Lists.laid_out(offsets(lengths), nothing, nothing, shape, 0).packs


def lanes_for(lengths: IndexArray, width: int, team: int) -> int:
    """How many lanes share an item, so that a sweep over all items is short."""
    longest = int(lengths.max(initial=1))

    def cost(lanes: int) -> float:
        rounds = -(-len(lengths) * lanes // team)
        packs = -(-longest // (lanes * width))
        return float(rounds * (packs * (2 * width + 4) + 6 * np.log2(lanes) + 8))

    return min((1, 2, 4, 8, 16, 32) if team >= 32 else (1,), key=cost)
