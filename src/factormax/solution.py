"""The answer of a query, per instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from factormax.arrays import Array, to_numpy
from factormax.errors import GraphError
from factormax.status import Status

if TYPE_CHECKING:
    from factormax.factors.base import BaseFactor
    from factormax.variable import Variable

__all__ = ["Solution"]


def _same(array: Any) -> Any:
    return array


@dataclass(eq=False, repr=False)
class Solution:
    r"""How a query ended, for each instance of the batch.

    `status`, `converged`, `iterations`, `primal_residual` and `dual_residual` are per instance.

    Attributes:
        objective: `(*batch,)`, $\eta \cdot \mu$ + the factor-score part − ½‖μ‖²; differentiable.
        multipliers: `(batch size, multipliers)`, what a warm start begins from.
    """

    objective: Array
    codes: Array
    passes: Array
    residuals: tuple[Array, Array]
    multipliers: Array
    wrap: Callable[[Any], Any] = _same  # from what is held to the caller's library
    differentiate: Callable[..., dict[Any, Any]] | None = None
    calls: Array | None = None
    bound: Array | None = None
    whole: Array | None = None
    visited: Array | None = None

    @property
    def converged(self) -> Array:
        """Whether each instance converged, `(*batch,)`."""
        return self.wrap(self.codes) == Status.CONVERGED.code  # type: ignore[no-any-return]

    @property
    def iterations(self) -> Array:
        """Passes over the graph, `(*batch,)`."""
        return self.wrap(self.passes)  # type: ignore[no-any-return]

    @property
    def oracle_calls(self) -> Array:
        """Calls of the structured factors' MAP oracles, `(*batch,)`; 0 if rows took their place."""
        return self.wrap(self.calls)  # type: ignore[no-any-return]

    @property
    def upper_bound(self) -> Array:
        """No structure scores more than this, `(*batch,)`; of `solve_map` and `decode`."""
        return self._of_map("upper_bound", self.bound)

    @property
    def integral(self) -> Array:
        """Whether the answer is a 0/1 structure, `(*batch,)`; of `solve_map` and `decode`."""
        return self._of_map("integral", self.whole)

    @property
    def optimal(self) -> Array:
        """Whether the answer of `decode` is proved to be the best structure, `(*batch,)`."""
        self._of_map("optimal", self.visited)
        return self.converged

    @property
    def nodes(self) -> Array:
        """How many relaxations `decode` solved, `(*batch,)`."""
        return self._of_map("nodes", self.visited)

    def _of_map(self, word: str, array: Any) -> Array:
        if array is None:
            query = "decode" if word in ("optimal", "nodes") else "solve_map and decode"
            raise GraphError(f"This solution has no {word}: that is of {query}.")
        return self.wrap(array)  # type: ignore[no-any-return]

    @property
    def primal_residual(self) -> Array:
        """How far the constraints are from holding, `(*batch,)`."""
        return self.wrap(self.residuals[0])  # type: ignore[no-any-return]

    @property
    def dual_residual(self) -> Array:
        """How far the last step moved ("admm"), or the projected gradient, `(*batch,)`."""
        return self.wrap(self.residuals[1])  # type: ignore[no-any-return]

    @property
    def status(self) -> Any:
        """A `Status`, or for a batch an array of them, `(*batch,)`; its value is the advice."""
        codes = to_numpy(self.codes)
        if codes.ndim == 0:
            return Status.from_code(int(codes))
        statuses = np.empty(codes.shape, dtype=object)
        for place in np.ndindex(codes.shape):
            statuses[place] = Status.from_code(int(codes[place]))
        return statuses

    def __repr__(self) -> str:
        codes, counts = np.unique(to_numpy(self.codes), return_counts=True)
        passes = to_numpy(self.passes)
        most = int(passes.max()) if passes.size else 0
        if passes.ndim == 0:
            return f"<Solution: {self.status.name}, iterations: {most}>"
        states = [
            f"{count} {Status.from_code(int(code)).name}"
            for code, count in zip(codes, counts, strict=True)
        ]
        what = ", ".join(states) or "no instances"
        return f"<Solution: {what}, iterations: at most {most}>"

    def vjp(
        self,
        grads: Mapping[Variable | BaseFactor, Any] | None = None,
        *,
        probs: Mapping[BaseFactor, Any] | None = None,
        objective: Any = None,
    ) -> dict[Variable | BaseFactor, Any]:
        """The vector–Jacobian product, for NumPy, which has no tape.

        Args:
            grads: for variables (or slices) and factors with scores, the gradient of a loss with
                respect to their `value`.
            probs: for structured factors, the gradient with respect to their `probs`.
            objective: the gradient with respect to `objective`, `(*batch,)`.

        Returns:
            The gradient with respect to every variable's and factor's scores. Further scores of
            the same factor have keys such as `(sequence, "initial")`.

        Raises:
            GraphError: for a key that has no value, or if the scores were torch tensors.
            ShapeError: if a gradient does not have the shape of the value.

        Example:
            >>> import numpy as np, factormax as fm
            >>> fg = fm.FactorGraph()
            >>> u = fg.variable_from(np.array([1.0, 0.5, -1.0]))
            >>> _ = fg.add(fm.Xor(u))
            >>> solution = fg.solve()
            >>> solution.vjp({u: np.array([1.0, 0.0, 0.0])})[u]
            array([ 0.5, -0.5,  0. ])
        """
        if self.differentiate is None:
            raise GraphError(
                "vjp is for NumPy scores; with torch tensors, call backward() on what you compute "
                "from the values."
            )
        if grads is None:
            grads = {}
        if not isinstance(grads, Mapping):
            raise GraphError(
                f"vjp takes a dict from variables to gradients, as in vjp({{u: grad}}), "
                f"got {type(grads).__name__}."
            )
        return self.differentiate(grads, probs or {}, objective)
