"""What the kernels need for trees, which they solve by rows and cuts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from factormax._core import Model, OracleKind
from factormax._inputs import structured_of

__all__ = ["Trees", "rows_of_tree"]

_EQUALITY = 2
#: Words are 8-bit numbers.
_MOST_WORDS = 255


def rows_of_tree(factor: Any) -> tuple[list[Any], list[int]]:
    """The variables of its rows, and their kinds: one head per word and, if required, one root."""
    words, single_root = (int(s) for s in factor.shape)
    arcs = np.asarray(factor.variables).reshape(words, words)
    rows = [*arcs, arcs.diagonal()] if single_root else [*arcs]
    return rows, [_EQUALITY] * len(rows)


class Trees:
    """The trees of a model.

    Attributes:
        var: the variables of their arcs, one tree after another.
        table: `(trees, 2)`, the first arc of each tree, and its number of words.
        most_cuts: how many cuts there is room for.
    """

    def __init__(self, model: Model) -> None:
        own = [f for f in structured_of(model) if self.has(f)]
        words = [int(f.shape[0]) for f in own]
        first = np.concatenate([[0], np.cumsum(np.square(words))]).astype(np.int64)
        self.table = np.stack([first[:-1], words], axis=1).astype(np.int32)
        lists = [np.asarray(f.variables) for f in own]
        self.var = np.concatenate([np.zeros(0, np.int32), *lists]).astype(np.int32)
        self.most_words = max(words, default=0)
        self.most_cuts = sum(w + 16 for w in words)
        self.cut_words = -(-self.most_words // 32)

    @staticmethod
    def rows_of_words(model: Model) -> npt.NDArray[np.int64]:
        """Which constraints say that a word has one head."""
        found, start = [np.zeros(0, np.int64)], model.num_rows
        for f in structured_of(model):
            if f.kind == OracleKind.matching:
                start += int(sum(f.shape))
            elif f.kind == OracleKind.tree:
                words, single_root = (int(s) for s in f.shape)
                found.append(start + np.arange(words))
                start += words + (single_root != 0)
        return np.concatenate(found)

    def __bool__(self) -> bool:
        return bool(len(self.table))

    @staticmethod
    def has(factor: Any) -> bool:
        """Whether a structured factor is a non-projective tree."""
        return bool(factor.kind == OracleKind.tree)

    @staticmethod
    def reason(factor: Any) -> str:
        """Why a tree has no kernel, or ""."""
        many = int(factor.shape[0]) > _MOST_WORDS
        return f"{factor.name} has more than {_MOST_WORDS} words" if many else ""

    def arc_of(self, size: int) -> npt.NDArray[np.int32]:
        """`(size,)`: tree, word and head of each variable, or −1."""
        found = np.full(size, -1, np.int32)
        for f, (first, words) in enumerate(self.table):
            word, head = np.divmod(np.arange(words * words), words)
            found[self.var[first : first + words * words]] = 65536 * f + 256 * word + head
        return found

    @property
    def saved(self) -> int:
        """How many numbers are kept of the cuts: their count, and each one's tree and words."""
        return (1 + self.most_cuts * (1 + self.cut_words)) if self else 0

    @property
    def memory(self) -> list[tuple[str, int]]:
        """The memory that a team needs, in bytes."""
        if not self:
            return []
        words = self.most_words
        return [
            ("cuts", 4 * self.saved),
            ("cut_lists", self.most_cuts * (4 + words)),
            ("cut_scratch", 26 * words + 8),
        ]
