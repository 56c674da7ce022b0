"""The numbers of a batch of instances, flat, as engines and queries take them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax import _core
from factormax._columns import Columns
from factormax._core import Model
from factormax.arrays import FloatArray, IndexArray

__all__ = ["Inputs", "structured_of"]


@lru_cache(maxsize=64)
def structured_of(model: Model) -> tuple[_core.Structured, ...]:
    """The structured factors of a model."""
    return tuple(model.structured)


class Inputs:
    """The numbers of B instances of a model; never changed.

    Attributes:
        model: the model that the numbers belong to.
        eta_u: `(B, n)`, the scores of the variables, float32 or float64.
        columns: `(B, P)`, the scores of the factors: of the pairs, then of structured factors. The
            argument `eta_v` may also be an array, `(1 | B, P)`.
        params: the parameters of the factors, in their order: numbers, or `(1 | B, size)`.
        mask: `(1 | B, n)`, False for variables that are off; None if none is.
        oracles: one entry per structured factor: it, if user-defined, else None; () if none is.
        held: `(B, n)`, variables held at 0 or 1 (others: −1); it determines B.
        device: where the scores came from.
    """

    def __init__(
        self,
        model: Model,
        eta_u: FloatArray,
        eta_v: FloatArray | Columns,
        params: list[Any],
        mask: npt.NDArray[np.bool_] | None = None,
        oracles: tuple[Any, ...] = (),
        held: npt.NDArray[np.int8] | None = None,
        device: str = "cpu",
    ) -> None:
        self.model = model
        self.eta_u = eta_u
        self._factor_scores = eta_v
        self.params = params
        self.mask = mask
        self.oracles = oracles
        self.held = held
        self.device = device
        self._core: _core.Inputs | None = None

    def replace(self, **changes: Any) -> Inputs:
        """The same with other numbers."""
        names = ("model", "eta_u", "params", "mask", "oracles", "held", "device")
        same = {name: getattr(self, name) for name in names} | {"eta_v": self._factor_scores}
        return Inputs(**same | changes)

    @property
    def eta_v(self) -> FloatArray:
        """The scores of the factors as an array, `(1 | B, P)`; made anew if some are shared."""
        own = self._factor_scores
        return own.full() if isinstance(own, Columns) else own

    @property
    def columns(self) -> Columns:
        """The scores of the factors; not copied."""
        own = self._factor_scores
        return own if isinstance(own, Columns) else Columns.of(own, self.batch)

    @property
    def runs(self) -> tuple[int, ...]:
        """How many scores of factors are shared, not shared, shared, and so on."""
        own = self._factor_scores
        if isinstance(own, Columns):
            return own.runs
        return own.shape[1:] if len(own) == 1 else (0, own.shape[1])

    @property
    def blocks(self) -> tuple[Any, Any, Any]:
        """The factor scores as stored: an array, None, None; or `own`, `shared` and `heat`."""
        own = self._factor_scores
        return (own.own, own.shared, own.heat) if isinstance(own, Columns) else (own, None, None)

    @property
    def core(self) -> _core.Inputs:
        """The numbers as the core takes them: checked, with the rows computed."""
        if self._core is None:
            own, shared, heat = self.blocks
            self._core = _core.Inputs(
                self.model,
                np.ascontiguousarray(self.eta_u),
                np.ascontiguousarray(own),
                self.params,
                None if self.mask is None else np.ascontiguousarray(self.mask),
                None if self.held is None else np.ascontiguousarray(self.held),
                None if shared is None else np.ascontiguousarray(shared),
                () if shared is None else self.runs,
                None if heat is None else np.ascontiguousarray(heat, np.float64),
            )
        return self._core

    @property
    def scores(self) -> Any:
        """The scores of the variables, one after another, whatever the shape of the array."""
        return self.eta_u

    @property
    def batch(self) -> int:
        """B."""
        return len(self.eta_u) if self.held is None else len(self.held)

    @cached_property
    def here(self) -> npt.NDArray[np.bool_] | None:
        """`(B, n)`, the variables that are not masked and do not score −inf; None: all."""
        found: npt.NDArray[np.bool_] | None = self.core.mask
        return found

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        """The same, never None."""
        shape = (self.batch, self.model.num_variables)
        return np.ones(shape, bool) if self.here is None else self.here

    @cached_property
    def rows(self) -> tuple[FloatArray, FloatArray]:
        """The coefficients and bounds of the rows, `(1 | B, entries)` and `(1 | B, R)`, in float64.

        Their columns and kinds are the model's.
        """
        coef, rhs = self.wide().core.rows
        return coef, rhs

    def wide(self) -> Inputs:
        """The same in float64."""
        if self.eta_u.dtype == np.float64:
            return self
        return self.replace(
            eta_u=self.eta_u.astype(np.float64),
            eta_v=self.map_factor_scores(lambda own: own.astype(np.float64)),
        )

    def map_factor_scores(
        self, function: Callable[[FloatArray], FloatArray]
    ) -> FloatArray | Columns:
        """A function of the factor scores, computed once for those that are shared."""
        own = self._factor_scores
        return own.map(function) if isinstance(own, Columns) else function(own)

    def moved_factor_scores(self, function: Callable[[Any], Any]) -> Any:
        """The factor scores with each of their arrays elsewhere; function: moves one."""
        own, shared, heat = self.blocks
        if shared is None:
            return function(own)
        there = None if heat is None else function(heat)
        return Columns(function(shared), function(own), self.runs, there)

    def factor_scores(self, i: int, factor: _core.Structured) -> npt.NDArray[np.float64]:
        """The scores of a structured factor in an instance."""
        begin = factor.score_begin
        row: FloatArray = self.columns.row(i, begin, begin + factor.num_scores)
        return row.astype(np.float64)

    @cached_property
    def oracle_params(self) -> npt.NDArray[np.float64]:
        """The parameter of each structured factor, `(1 | B, S)`; 0 where it has none."""
        found: npt.NDArray[np.float64] = self.core.oracle_params
        return found

    def rows_present(self) -> npt.NDArray[np.bool_] | None:
        """`(B, R)`, False for rows of a factor whose variables are all off; None: all present."""
        if self.here is None or not self.model.num_rows:
            return None
        model = self.model
        first = model.row_ptr[model.block_ptr[:-1]]
        blocks = np.logical_or.reduceat(self.here[:, model.col], first, axis=1)
        return np.repeat(blocks, np.diff(model.block_ptr), axis=1)

    def instances(self, index: IndexArray | list[int]) -> Inputs:
        """The numbers of some instances."""

        def taken(array: Any) -> Any:
            return array if array is None or len(array) == 1 < self.batch else array[index]

        own = self._factor_scores
        params = [p if isinstance(p, float) else taken(p) for p in self.params]
        if self.batch > 1:
            params = [p if isinstance(p, float) else np.ascontiguousarray(p) for p in params]
        return self.replace(
            eta_u=taken(self.eta_u),
            eta_v=own.instances(index) if isinstance(own, Columns) else taken(own),
            params=params,
            mask=taken(self.mask),
            held=taken(self.held),
        )

    def without_oracles(self) -> Inputs:
        """The same without references to the graph; the computed rows are kept."""
        if not self.oracles:
            return self
        kept = self.replace(oracles=())
        kept._core = self.core
        return kept

    def instance(self, i: int) -> Inputs:
        """The numbers of one instance, as a batch of 1."""
        return self if self.batch == 1 else self.instances([i])
