"""The options of the queries of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from factormax._core import Method

__all__ = ["MAP_METHODS", "METHODS", "Options"]

METHODS = {"admm": Method.admm, "auto": Method.compact}
MAP_METHODS = {"ad3": Method.ad3, "auto": Method.proximal}


@dataclass(frozen=True, eq=False)
class Options:
    """The arguments of the queries of `FactorGraph`. Compared by identity: graphs remember them."""

    method: str = "auto"
    tol: float = 1e-6
    max_iter: int = 10_000
    max_inner_iter: int = 100_000
    step_size: float = 1.0
    on_failure: str = "warn"
    linear: bool = False  # LP-MAP
    surrogate: str | None = None  # the gradient of an LP-MAP answer
    whole: bool = False  # LP-MAP: a 0/1 structure even at ties
    search: tuple[int, float | None] | None = None  # exact decoding: most nodes, seconds
    deadline: float | None = None  # by time.monotonic; no pass of LP-MAP begins after it
    list_structures: bool = False  # else marginals may be found without structures

    @property
    def query(self) -> Literal["solve", "solve_map", "decode"]:
        """The method of `FactorGraph` that these are options of."""
        if self.search is not None:
            return "decode"
        return "solve_map" if self.linear else "solve"
