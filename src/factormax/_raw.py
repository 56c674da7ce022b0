"""What an engine returns: flat arrays, which the core owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax import _core
from factormax.arrays import FloatArray
from factormax.structures import joined_structures

__all__ = ["Proof", "RawSolution"]

_FIELDS = (
    "mu",
    "mu_v",
    "tau",
    "var_side",
    "row_side",
    "objective",
    "primal_residual",
    "dual_residual",
    "upper_bound",
    "iterations",
    "status",
    "oracle_calls",
    "integral",
)
_LISTS = ("count", "prob", "on", "features", "dense", "num_cuts", "cuts")


@dataclass(frozen=True)
class Proof:
    """Why an instance is infeasible."""

    multipliers: FloatArray  # (R + P + links,) the certificate, docs/math.md (23)
    impossible: tuple[int, ...] = ()  # structured factors that have no structure at all


class RawSolution(_core.Solution):
    """The answers of a batch. The sides and `structures` serve the backward pass.

    Attributes:
        mu: `(B, n)`, `mu_v`: `(B, P)`, the marginals of variables and of factors' scores.
        tau: `(B, R + P + links)`, the multipliers; `row_side` likewise, `var_side`: `(B, n)`.
        upper_bound: `(B,)`, like all the others; for linear programs only.
        structures: the structures of the structured factors.
        nodes: `(B,)`, the number of nodes; for exact decoding only.
        proofs: the proofs of infeasible instances, by instance.
        engine: where it was solved, and why there.
    """

    nodes: npt.NDArray[np.int64] | None = None
    proofs: Mapping[int, Proof] = MappingProxyType({})
    engine: str = "cpu"
    there: Any = None  # the same solution on a device

    @classmethod
    def of_size(cls, batch: int, n: int, scores: int, dual: int, dtype: Any) -> RawSolution:
        """An empty solution."""
        wide = bool(dtype == np.float64)
        return cls(batch=batch, variables=n, scores=scores, dual=dual, wide=wide)

    @classmethod
    def like(cls, other: RawSolution, batch: int, dtype: Any) -> RawSolution:
        """An empty solution, with the sizes of another."""
        n, scores, dual = other.mu.shape[1], other.mu_v.shape[1], other.tau.shape[1]
        return cls.of_size(batch, n, scores, dual, dtype)

    def fill(self, parts: Sequence[RawSolution]) -> RawSolution:
        """Fills in the answers of other solutions, one after another."""
        start = 0
        proofs: dict[int, Proof] = {}
        for part in parts:
            stop = start + len(part.status)
            for name in _FIELDS:
                getattr(self, name)[start:stop] = getattr(part, name)
            proofs |= {start + i: proof for i, proof in part.proofs.items()}
            start = stop
        self.proofs = proofs
        self.structures = joined_structures([part.structures for part in parts])
        self.engine = parts[0].engine
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = {name: np.array(getattr(self, name)) for name in _FIELDS}
        lists = {name: np.array(getattr(self.structures, name)) for name in _LISTS}
        return _restored, (arrays, lists, self.nodes, dict(self.proofs), self.engine)


def _restored(
    arrays: dict[str, Any], lists: dict[str, Any], nodes: Any, proofs: Any, engine: str
) -> RawSolution:
    """The solution, from a pickle."""
    mu, mu_v, tau = (arrays[name] for name in ("mu", "mu_v", "tau"))
    raw = RawSolution.of_size(len(mu), mu.shape[1], mu_v.shape[1], tau.shape[1], mu.dtype)
    for name in _FIELDS:
        getattr(raw, name)[...] = arrays[name]
    raw.structures = _core.Structures(**lists)
    raw.nodes, raw.proofs, raw.engine = nodes, proofs, engine
    return raw
