"""Rebuilds factors from what a front wrote down: names and whole numbers, no code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from factormax._core import OracleKind
from factormax.errors import GraphError
from factormax.factors.base import BaseFactor
from factormax.factors.scores import Scores

__all__ = ["rewired"]


def rewired(name: str, scope: list[Any], params: int, oracle: Sequence[Any]) -> BaseFactor:
    """A factor with a registered name, this scope and this many parameters, without numbers.

    oracle: for a structured factor, the kind, the link, the scores, the slots and the shape.

    Raises:
        GraphError: if there is no such factor here.
    """
    cls = BaseFactor._registry.get(name)
    if cls is None:
        raise GraphError(
            f"An exported function uses the factor {name}, which this process does not know. "
            f"Import the module that defines it."
        )
    factor: Any = cls.__new__(cls)
    factor._scope = tuple(scope)
    factor._count, factor._size = scope[0].factors, sum([p.size for p in scope])
    factor._group_shape = (factor._count,)
    factor._params = (math.nan,) * params  # placeholders; the numbers come with the scores
    if oracle:
        kind, factor._link, scores, factor._slots, shape = oracle
        factor._oracle, factor._oracle_shape = OracleKind(kind), tuple(shape)
        count = (scores * factor._count,)
        factor._score_parts = (Scores("scores", None, count, count),)
    return factor  # type: ignore[no-any-return]
