"""The answer of a query, per instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from factormax._describe import counted
from factormax.arrays import Array, is_hidden, is_tensor, is_tracing, to_numpy
from factormax.errors import GraphError
from factormax.status import Status

if TYPE_CHECKING:
    from factormax.conflict import Conflicts, FactorName
    from factormax.factors.base import BaseFactor
    from factormax.variable import Variable

__all__ = ["Details", "Solution"]


def _same(array: Any) -> Any:
    return array


class _Forgotten:
    """Replaces `differentiate` in a solution that was pickled."""

    def __call__(self, *_: Any) -> dict[Any, Any]:
        raise GraphError(
            "This solution was pickled (or deep-copied), and no longer knows its graph. "
            "Solve the graph again, with warm_start=solution."
        )

    jvp = __call__


@dataclass(eq=False)
class Details:
    """What a solution says about each instance, `(B,)`, and its multipliers, `(B, R)`."""

    status: Array
    iterations: Array
    oracle_calls: Array
    primal_residual: Array
    dual_residual: Array
    tau: Array
    engine: str = "cpu"
    upper_bound: Array | None = None  # for linear programs only
    integral: Array | None = None  # likewise


@dataclass(eq=False, repr=False)
class Solution:
    r"""How a query ended, for each instance of the batch.

    `status`, `converged`, `iterations`, `primal_residual` and `dual_residual` are per instance. A
    pickled solution can still serve as a warm start, but it has lost its gradients.
    """

    optimum: Array | Callable[[], Array]  # the objective, or a function that finds it
    raw: Any  # a `RawSolution`, which lives as long as this, or `Details`
    batch_shape: tuple[int, ...]
    query: Literal["solve", "solve_map", "decode"] = "solve"
    wrap: Callable[[Any], Any] = _same  # from the arrays held to the caller's library
    differentiate: Callable[..., dict[Any, Any]] | None = None
    conflicts: Conflicts | None = None  # of infeasible instances; None if there are none

    def __copy__(self) -> Solution:
        return replace(self)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: everything but the way back to the scores, which needs the graph."""
        state = dict(self.__dict__)
        objective: Any = self.objective
        state["optimum"] = objective.detach() if is_tensor(objective) else objective
        if self.differentiate is not None:
            state["differentiate"] = _Forgotten()
        return state

    @property
    def objective(self) -> Array:
        r"""The optimal value, `(*batch,)`, differentiable.

        It is $\eta \cdot \mu$ + the factor-score part − ½‖μ‖² (without the last term for LP-MAP),
        with all scores divided by the temperature, if there is one.
        """
        if callable(self.optimum):  # computed on demand, to keep small solves fast
            self.optimum = self.optimum()
        return self.optimum

    @property
    def multipliers(self) -> Array:
        """What a warm start starts from, `(batch size, number of multipliers)`."""
        return self.wrap(self.raw.tau)  # type: ignore[no-any-return]

    @property
    def engine(self) -> str:
        """Where it was solved, such as "cpu", and why there if not on the device of the scores.

        Example:
            >>> import numpy as np, factormax as fm
            >>> fg = fm.FactorGraph()
            >>> u = fg.variable_from(np.zeros(3))
            >>> fg.solve().engine
            'cpu'
        """
        return self.raw.engine  # type: ignore[no-any-return]

    @property
    def converged(self) -> Array:
        """Whether each instance converged, `(*batch,)`."""
        return self._batch(self.raw.status) == Status.CONVERGED.code

    @property
    def iterations(self) -> Array:
        """Passes over the graph, or over the component or part that took the most, `(*batch,)`."""
        return self._batch(self.raw.iterations)

    @property
    def oracle_calls(self) -> Array:
        """Calls of the structured factors' MAP oracles, `(*batch,)`; 0 if rows replaced them."""
        return self._batch(self.raw.oracle_calls)

    @property
    def upper_bound(self) -> Array:
        """No structure scores more than this, `(*batch,)`; after `solve_map` and `decode`."""
        self._require("upper_bound", "solve_map", "decode")
        return self._batch(self.raw.upper_bound)

    @property
    def integral(self) -> Array:
        """Whether the answer is a 0/1 structure, `(*batch,)`; after `solve_map` and `decode`."""
        self._require("integral", "solve_map", "decode")
        return self._batch(self.raw.integral)

    @property
    def optimal(self) -> Array:
        """Whether the answer of `decode` is proved to be the best structure, `(*batch,)`."""
        self._require("optimal", "decode")
        return self.converged

    @property
    def nodes(self) -> Array:
        """How many relaxations `decode` solved, `(*batch,)`."""
        self._require("nodes", "decode")
        return self._batch(self.raw.nodes)

    def _require(self, word: str, *queries: str) -> None:
        if self.query not in queries:
            names = " and ".join([f"fg.{query}()" for query in queries])
            raise GraphError(f"`{word}` is only available after {names}.")

    def _batch(self, array: Any) -> Array:
        return self.wrap(array.reshape(self.batch_shape))  # type: ignore[no-any-return]

    @property
    def primal_residual(self) -> Array:
        """By how much the constraints are violated, `(*batch,)`."""
        return self._batch(self.raw.primal_residual)

    @property
    def dual_residual(self) -> Array:
        """The size of the last step ("admm"), or of the projected gradient, `(*batch,)`."""
        return self._batch(self.raw.dual_residual)

    @property
    def status(self) -> Any:
        """A `Status`, or an array of them, `(*batch,)`; its value says what to do.

        While JAX traces, and inside a transform of `torch.func`, it is an array of their codes,
        which are whole numbers: see `Status.from_code`.
        """
        found = self._batch(self.raw.status)
        if self._is_transformed:
            return found
        codes = to_numpy(found)
        if codes.ndim == 0:
            return Status.from_code(int(codes))
        statuses = np.empty(codes.shape, dtype=object)
        for place in np.ndindex(codes.shape):
            statuses[place] = Status.from_code(int(codes[place]))
        return statuses

    def conflict(self, instance: int | tuple[int, ...] = ()) -> list[FactorName]:
        """The factors that exclude each other in an infeasible instance, by name.

        Each name is a string with two attributes: `factor`, the factor itself, and `row`, which
        says which one it is if `axis=` made several.

        Args:
            instance: an index into the batch; not needed without batch dimensions.

        Returns:
            The factors that the solver's proof of infeasibility uses; it needs every one of them,
            though another proof may need fewer. Empty if the instance is feasible, if `decode`
            proved it infeasible only by searching, and inside `torch.compile`.

        Raises:
            GraphError: for an index that does not fit the batch.

        Example:
            >>> import numpy as np, factormax as fm
            >>> fg = fm.FactorGraph()
            >>> u = fg.variable_from(np.zeros((3, 4)))
            >>> _ = fg.add(fm.AtLeast(u[1:], 3))
            >>> _ = fg.add(fm.AtMostOne(u, axis=1))
            >>> fg.solve(on_failure="ignore").conflict()
            ['AtLeast over u[1:]', 'AtMostOne over u[1, :]', 'AtMostOne over u[2, :]']
        """
        place = instance if isinstance(instance, tuple) else (instance,)
        if not self.batch_shape and place == (0,):
            place = ()
        try:
            flat = int(np.ravel_multi_index(place, self.batch_shape)) if place else 0
            fits = len(place) == len(self.batch_shape)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise GraphError(
                f"conflict: {instance!r} is not an index into a batch of shape {self.batch_shape}."
            )
        if self._is_transformed:
            raise GraphError(
                "conflict: there are no numbers to look at inside a transform. Solve the instance "
                "again outside of it."
            )
        return [] if self.conflicts is None else self.conflicts(flat)

    @property
    def _is_transformed(self) -> bool:
        """Whether JAX is tracing it, or it is inside a transform of `torch.func`."""
        return not is_tracing() and is_hidden(self.raw.status)

    def __repr__(self) -> str:
        if self._is_transformed:
            return f"<Solution of fg.{self.query}(), traced, batch {self.batch_shape}>"
        codes, counts = np.unique(to_numpy(self.raw.status), return_counts=True)
        passes = to_numpy(self.iterations)
        most = int(passes.max()) if passes.size else 0
        of = f"Solution of fg.{self.query}()"
        of += "" if self.engine == "cpu" else f" ({self.engine})"
        after = counted(most, "iteration")
        if passes.ndim == 0:
            objective = float(to_numpy(self.objective))
            proved = self._proved()
            return f"<{of}: {self.status.name} after {after}, objective {objective:.6g}{proved}>"
        states = [
            f"{count} {Status.from_code(int(code)).name}"
            for code, count in zip(codes, counts, strict=True)
        ]
        what = ", ".join(states) or "no instances"
        return f"<{of}, batch {self.batch_shape}: {what} after at most {after}{self._proved()}>"

    def _proved(self) -> str:
        """What the repr says about the answers of `solve_map` and `decode`."""
        if self.query not in ("solve_map", "decode"):
            return ""
        word = "integral" if self.query == "solve_map" else "proved optimal"
        found = to_numpy(self.integral if self.query == "solve_map" else self.optimal)
        if found.ndim:
            return f", {int(found.sum())} of {found.size} {word}"
        return f", {word}" if found else f", not {word}"

    def vjp(
        self,
        grads: Mapping[Variable | BaseFactor, Any] | None = None,
        *,
        probs: Mapping[BaseFactor, Any] | None = None,
        objective: Any = None,
    ) -> dict[Any, Any]:
        """The vector–Jacobian product; for NumPy, which has no automatic differentiation.

        Args:
            grads: for variables (or slices) and factors with scores, the gradient of a loss with
                respect to their `value`.
            probs: for structured factors, the gradient with respect to their `probs`.
            objective: the gradient with respect to `objective`, `(*batch,)`.

        Returns:
            The gradient with respect to the scores of every variable and factor. Further scores of
            the same factor have keys such as `(sequence, "initial")`; a temperature has the key
            "temperature".

        Raises:
            GraphError: for a key that has no value, or if the scores were not NumPy arrays.
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
        derivative = self._derivative(
            "vjp", "call backward() on what you compute from the values", "use jax.grad or jax.vjp"
        )
        if grads is None:
            grads = {}
        if not isinstance(grads, Mapping):
            raise GraphError(
                f"vjp takes a dict from variables to gradients, as in vjp({{u: grad}}), "
                f"got {type(grads).__name__}."
            )
        return derivative(grads, probs or {}, objective)  # type: ignore[no-any-return]

    def jvp(self, moves: Mapping[Any, Any]) -> dict[Any, Any]:
        """The Jacobian–vector product; for NumPy. It says how the values move with the scores.

        Args:
            moves: for variables (or slices) and factors with scores, the direction in which their
                scores move, in the shape of the scores. Further scores of the same factor have
                keys such as `(sequence, "initial")`; a temperature has the key "temperature".

        Returns:
            The direction in which the value of every variable and factor moves; the key
            "objective" holds the direction of the objective.

        Raises:
            GraphError: for a key that has no scores, or if the scores were not NumPy arrays.
            ShapeError: if a direction does not have the shape of the scores.

        Example:
            >>> import numpy as np, factormax as fm
            >>> fg = fm.FactorGraph()
            >>> u = fg.variable_from(np.array([1.0, 0.5, -1.0]))
            >>> _ = fg.add(fm.Xor(u))
            >>> solution = fg.solve()
            >>> solution.jvp({u: np.array([1.0, 0.0, 0.0])})[u]
            array([ 0.5, -0.5,  0. ])
        """
        if not isinstance(moves, Mapping):
            raise GraphError(
                f"jvp takes a dict from variables to directions, as in jvp({{u: direction}}), "
                f"got {type(moves).__name__}."
            )
        derivative = self._derivative(
            "jvp", "use torch.func.jvp or torch.autograd.forward_ad", "use jax.jvp"
        )
        return derivative.jvp(moves)  # type: ignore[no-any-return]

    def _derivative(self, word: str, in_torch: str, in_jax: str) -> Any:
        if self.differentiate is None:
            raise GraphError(
                f"{word} is for NumPy scores; with torch tensors, {in_torch}; with JAX arrays, "
                f"{in_jax}."
            )
        return self.differentiate
