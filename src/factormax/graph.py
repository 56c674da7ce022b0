"""The graph: add variables and factors to it, then ask it queries."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import is_
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from factormax._describe import counted, summary
from factormax._form import Form, form_of
from factormax._options import MAP_METHODS, METHODS, Options
from factormax._report import warn_caller
from factormax.arrays import (
    ArrayLike,
    is_jax,
    is_real,
    is_tensor,
    is_tracer,
    is_tracing,
    library_of,
    may_be_traced,
    to_numpy,
)
from factormax.checks import one_of, positive_number, shown, whole_number
from factormax.errors import GraphError, GraphWarning, ShapeError
from factormax.factors.base import BaseFactor
from factormax.factors.factor import Factor
from factormax.factors.scores import Scores
from factormax.factors.structured import StructuredFactor
from factormax.record import Record, VariableTensor
from factormax.scope import View, remembered_whole
from factormax.solution import Solution
from factormax.temperature import checked_temperature
from factormax.variable import Variable

if TYPE_CHECKING:
    import jax
    import torch

__all__ = ["FactorGraph", "TorchFactorGraph", "checked_options"]

F = TypeVar("F", bound=BaseFactor)
OnFailure: TypeAlias = Literal["warn", "raise", "ignore"]
MOST = 2**31 - 1  # the largest count that the core can hold


class FactorGraph:
    r"""A factor graph over binary variables, for NumPy, torch and JAX arrays alike.

    `solve` finds the maximum of $\eta \cdot \mu + \sum_f \eta_f \cdot \mu_f - \tfrac12 \|\mu\|^2$
    over the $\mu$ that all factors agree with: sparse, unique and differentiable. The instances of
    a batch (the first `batch_dims` dimensions of all scores) share the factors; scores, masks and
    parameters may differ. docs/reference/queries.md describes every option of the queries.

    Example:
        >>> import numpy as np, factormax as fm
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable_from(np.array([[1.0, 0.9], [0.8, 0.1]]))
        >>> rows, columns = fg.add(fm.Xor(u, axis=1)), fg.add(fm.AtMostOne(u, axis=0))
        >>> solution = fg.solve()
        >>> u.value.round(2).tolist()
        [[0.35, 0.65], [0.65, 0.35]]
    """

    def __init__(self, batch_dims: int = 0) -> None:
        if type(batch_dims) is not int or batch_dims < 0:
            batch_dims = _checked_dims(batch_dims)
        self._record = record = Record(batch_dims)
        self.batch_dims, self.batch_shape = batch_dims, record.batch_shape
        self._tensors = record.tensors
        self._variables: list[Variable] = []  # one per tensor
        self._factors: list[BaseFactor] = []
        self._structured: list[StructuredFactor] = []

    # The defaults of a new graph; set on the instance when they change. Types are in comments,
    # because annotations would show up in `help`.
    _num_variables = 0
    _masked = False  # whether any variable has a mask
    _uses_torch = False  # whether any scores are torch tensors
    _uses_jax = False  # whether any scores are JAX arrays
    _formed = None  # type: Form | None
    _parts = ()  # type: Sequence[Scores] | None
    _traced = None  # type: tuple[Any, ...] | None  # how a compiled function solved it

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, without the compiled model."""
        return {**self.__dict__, "_formed": None}

    # ---- building --------------------------------------------------------------------------------

    @overload
    def variable_from(
        self, scores: torch.Tensor, mask: ArrayLike | None = None, name: str | None = None
    ) -> Variable[torch.Tensor]: ...

    @overload  # before NumPy's, because JAX arrays are array-like too
    def variable_from(  # type: ignore[overload-overlap]
        self, scores: jax.Array, mask: ArrayLike | None = None, name: str | None = None
    ) -> Variable[jax.Array]: ...

    @overload
    def variable_from(
        self, scores: npt.ArrayLike, mask: ArrayLike | None = None, name: str | None = None
    ) -> Variable[npt.NDArray[Any]]: ...

    def variable_from(
        self, scores: ArrayLike, mask: ArrayLike | None = None, name: str | None = None
    ) -> Variable:
        """Adds binary variables with these scores, `(*batch, *shape)`; messages use `name`.
        A variable is off (0 for every factor) where the boolean `mask` is False or its score −inf.
        """
        label = name or (self._default_name() if self._tensors else "u")
        torch_scores = is_tensor(scores)
        given: Any = scores if torch_scores else _as_array(label, scores)
        if self._tensors:
            self._check_library(label, given)
        if given.is_complex() if torch_scores else not is_real(given.dtype):
            raise GraphError(f"{label}: scores must be real numbers, got dtype {given.dtype}.")
        if torch_scores:
            self._uses_torch = True
        elif is_jax(given):
            self._uses_jax = True
        full = tuple(given.shape)
        record = self._record
        k = record.batch_dims
        if len(full) < k:
            raise ShapeError(
                f"{label}: scores of shape {full} have fewer dimensions than batch_dims={k}."
            )
        if k:
            if record.batch_shape is None:
                self.batch_shape = record.batch_shape = full[:k]
            elif record.batch_shape != full[:k]:
                raise ShapeError(
                    f"{label}: the batch dimensions must be {record.batch_shape}, like those of "
                    f"earlier variables, got scores of shape {full}."
                )
        if mask is not None:
            mask = _checked_mask(label, mask, full)
            self._masked = True
        return self._append(label, full[k:], given, mask)

    def variable(self, shape: int | tuple[int, ...], name: str | None = None) -> Variable:
        """Adds binary variables with zero scores; they are regularised like all others."""
        dims = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        if any(not isinstance(s, (int, np.integer)) or not 0 <= s <= MOST for s in dims):
            raise ShapeError(
                f"A shape must consist of whole numbers from 0 to {MOST}, got {shown(shape)}."
            )
        return self._append(name or self._default_name(), tuple(int(s) for s in dims), None, None)

    def add(self, factor: F) -> F:
        """Adds a factor over variables of this graph, and returns it."""
        made = self._record.made
        if made and made[-1] is factor:  # the usual case: new, and over variables of this graph
            made.pop()
        else:
            self._check_addable(factor)
            self._record.expect_no_more_of(factor)
        factor._added = True
        if factor._score_parts:
            self._take_scores(factor)
        self._factors.append(factor)
        self._formed = None
        if isinstance(factor, StructuredFactor):
            factor._place = len(self._structured)
            self._structured.append(factor)
        return factor

    def _check_addable(self, factor: BaseFactor) -> None:
        if not isinstance(factor, BaseFactor):
            raise GraphError(f"add takes a factor, such as fm.Xor(u), got {type(factor).__name__}.")
        if factor._record is not self._record:
            raise GraphError(f"{factor.name}: the variables belong to another graph.")
        if factor._added:
            raise GraphError(f"{factor.name} was already added. To add it twice, make another.")

    def _take_scores(self, factor: BaseFactor) -> None:
        """Notes which library the scores of an added factor belong to."""
        self._parts = None
        for part in factor._score_parts:
            if is_tensor(part.given):
                if not is_tracing():
                    self._check_library(factor, part.given)
                self._uses_torch = True
            elif is_jax(part.given):
                self._check_library(factor, part.given)
                self._uses_jax = True

    def _warn_of_forgotten(self) -> None:
        """Warns once of factors that were made but never added."""
        names = [f.name for f in self._record.made if f._complete]
        self._record.made.clear()
        if names:
            more = f"; and {len(names) - 4} more" if len(names) > 4 else ""
            was, it_has = ("was", "it has") if len(names) == 1 else ("were", "they have")
            warn_caller(
                f"{'; '.join(names[:4])}{more} {was} created but never added to the graph, so "
                f"{it_has} no effect. Write fg.add(...).",
                GraphWarning,
            )

    def _default_name(self) -> str:
        return f"u{len(self._tensors)}" if self._tensors else "u"

    def _append(self, name: str, shape: tuple[int, ...], scores: Any, mask: Any) -> Variable:
        start = self._num_variables
        size = math.prod(shape)
        whole = View.whole if is_tracing() else remembered_whole
        variable = Variable(self._record, len(self._tensors), whole(start, shape))
        self._tensors.append(VariableTensor(name, start, size, shape, scores, mask))
        self._variables.append(variable)
        self._num_variables = start + size
        self._formed = None
        return variable

    def _check_library(self, owner: str | BaseFactor, scores: Any) -> None:
        own = library_of(scores)
        for other in self._tensors:
            if other.scores is not None and library_of(other.scores) != own:
                label = owner if isinstance(owner, str) else owner.name
                raise GraphError(
                    f"{label}: one graph holds {library_of(other.scores)} or {own}, not both; "
                    f"convert the scores of {label} or of {other.name}."
                )

    # ---- queries ---------------------------------------------------------------------------------

    def solve(
        self,
        *,
        method: Literal["auto", "admm"] = "auto",
        tol: float = 1e-6,
        max_iter: int = 10_000,
        max_inner_iter: int = 100_000,
        step_size: float = 1.0,
        on_failure: OnFailure = "warn",
        warm_start: Solution | None = None,
        temperature: ArrayLike | None = None,
    ) -> Solution:
        """Finds the LP-SparseMAP solution; read it from `value` of the variables and factors.
        `on_failure` says what to do if the constraints do not hold to within `tol` after `max_iter`
        passes. `temperature` divides all scores. `method="admm"` is the paper's algorithm.
        """
        options = checked_options(method, tol, max_iter, max_inner_iter, step_size, on_failure)
        if temperature is not None:
            temperature = self._checked_temperature(temperature)
        return self._ask(options, warm_start, temperature)

    def _checked_temperature(self, temperature: ArrayLike) -> Any:
        """The temperature as an array, or as a tensor that may require a gradient."""
        given = checked_temperature(temperature, self._known_batch_shape())
        if is_jax(given) and not self._uses_jax:
            if is_tracer(given):
                raise GraphError(
                    "temperature is traced by JAX, but the scores are not JAX arrays. Pass the "
                    "scores as JAX arrays."
                )
            return to_numpy(given)
        if not is_tensor(given) or self._uses_torch:
            return given
        if given.requires_grad:
            raise GraphError(
                "temperature: the tensor requires a gradient, but the scores are NumPy arrays. "
                "Pass temperature.detach(), or the scores as tensors."
            )
        return to_numpy(given)

    def _ask(
        self, options: Options, warm_start: Solution | None, temperature: Any = None
    ) -> Solution:
        if self._record.made and not is_tracing():
            self._warn_of_forgotten()
        front = self._front()
        return front.solve(self, options, warm_start, temperature)  # type: ignore[no-any-return]

    def _refuse_tracers(self) -> None:
        """Raises if JAX traces a mask or a parameter while the scores are NumPy arrays."""
        traced = [t.name + ": the mask" for t in self._tensors if is_tracer(t.mask)]
        traced += [f.name for f in self._factors if any([is_tracer(p) for p in f._params])]
        if traced:
            raise GraphError(
                f"{traced[0]} is traced by JAX, but the scores are NumPy arrays. Pass the scores "
                f"as JAX arrays."
            )

    def _front(self) -> Any:
        """The module that handles the library of the scores."""
        if self._uses_torch:
            import factormax._fronts.torch as front
        elif self._uses_jax:
            import factormax._fronts.jax as front  # type: ignore[no-redef]
        else:
            if "jax" in sys.modules:
                self._refuse_tracers()
            import factormax._fronts.numpy as front  # type: ignore[no-redef]
        return front

    def solve_map(
        self,
        *,
        method: Literal["auto", "ad3"] = "auto",
        tol: float = 1e-6,
        max_iter: int = 10_000,
        max_inner_iter: int = 100_000,
        step_size: float = 1.0,
        surrogate: Literal["straight-through", "spigot"] | None = None,
        on_failure: OnFailure = "warn",
        warm_start: Solution | None = None,
    ) -> Solution:
        """Finds the LP-MAP answer, without the quadratic term: the best structure if `integral`.
        No structure scores above `upper_bound`. `surrogate` replaces the gradient, which is 0.
        """
        one_of("surrogate", surrogate, (None, "straight-through", "spigot"))
        checked = checked_options(
            method, tol, max_iter, max_inner_iter, step_size, on_failure, linear=True
        )
        return self._ask(replace(checked, surrogate=surrogate), warm_start)

    def _solve_whole(
        self, *, tol: float, max_iter: int, max_inner_iter: int, on_failure: str
    ) -> Solution:
        """The LP-MAP answer as a 0/1 structure, even if several tie; for the layers."""
        checked = checked_options(
            "auto", tol, max_iter, max_inner_iter, 1.0, on_failure, linear=True
        )
        return self._ask(replace(checked, whole=True), None)

    def decode(
        self,
        *,
        max_nodes: int = 10_000,
        time_limit: float | None = None,
        tol: float = 1e-6,
        max_iter: int = 1000,
        on_failure: OnFailure = "warn",
    ) -> Solution:
        """Finds the best structure by branch and bound: proved best if `optimal`, else the best
        found in `max_nodes` relaxations or `time_limit` seconds per instance (NaN if none was).
        """
        checked = checked_options("auto", tol, max_iter, 100_000, 1.0, on_failure, linear=True)
        nodes = whole_number("max_nodes", max_nodes, 1, MOST)
        if isinstance(time_limit, float) and time_limit == math.inf:
            time_limit = None
        if time_limit is not None:
            time_limit = positive_number("time_limit", time_limit)
        return self._ask(replace(checked, search=(nodes, time_limit)), None)

    def loss(
        self,
        targets: Mapping[Variable, ArrayLike],
        kind: Literal["sparsemap", "perceptron", "hinge"] = "sparsemap",
        *,
        cost: ArrayLike | Mapping[Variable, ArrayLike] | None = None,
        mask: ArrayLike | Mapping[Variable, ArrayLike] | None = None,
        tol: float = 1e-6,
        max_iter: int = 10_000,
        on_failure: OnFailure = "warn",
        temperature: ArrayLike | None = None,
    ) -> Any:
        """The loss per instance, `(*batch,)`: 0 if the answer is the 0/1 `targets`, which must be 0
        if masked. Where `mask` is False, the best completion is used. `cost` is for "hinge".
        """
        args = (targets, kind, cost, mask, tol, max_iter, on_failure, temperature)
        if may_be_traced() and self._uses_torch:
            from factormax._fronts.torch import untraced

            return untraced.loss(self, *args)
        return self._loss(*args)

    def _loss(
        self,
        targets: Mapping[Variable, ArrayLike],
        kind: str,
        cost: ArrayLike | Mapping[Variable, ArrayLike] | None,
        mask: ArrayLike | Mapping[Variable, ArrayLike] | None,
        tol: float,
        max_iter: int,
        on_failure: str,
        temperature: ArrayLike | None,
    ) -> Any:
        from factormax.queries.loss import flat_target

        if self._record.made:
            self._warn_of_forgotten()
        linear = kind != "sparsemap"
        options = checked_options("auto", tol, max_iter, 100_000, 1.0, on_failure, linear=linear)
        if temperature is not None:
            temperature = self._checked_temperature(temperature)
        if self._uses_torch:
            from factormax._fronts.torch.transformed import is_transformed, loss_transformed

            if is_transformed():
                return loss_transformed(self, targets, kind, cost, mask, options, temperature)
        front = self._front()
        lay_out = getattr(front, "flat_target", flat_target)  # JAX may trace targets
        target = lay_out(self, targets, kind, cost, mask)
        return front.loss(self, target, options, temperature)

    # ---- for the fronts --------------------------------------------------------------------------

    def _form(self) -> Form:
        """The content of the graph without its numbers."""
        if self._formed is None:
            self._formed = form_of(self)
        return self._formed

    def _params(self) -> list[Any]:
        """The parameters of all factors."""
        return [param for f in self._factors if f._params for param in f._params]

    def _own_oracles(self) -> tuple[Any, ...]:
        """One entry per structured factor: it, if user-defined, else None; () if none is."""
        if not self._structured or not any([isinstance(f, Factor) for f in self._structured]):
            return ()
        own = [(f if isinstance(f, Factor) else None, f._count) for f in self._structured]
        return tuple([factor for factor, count in own for _ in range(count)])

    def _score_parts(self) -> Sequence[Scores]:
        """The factors' own scores, in the order in which the core lays them out: pairs first."""
        if self._parts is None:
            self._parts = [part for f in self._scored() for part in f._score_parts]
        return self._parts

    def _score_owners(self) -> list[BaseFactor]:
        """The factor that owns each of the `_score_parts`."""
        return [f for f in self._scored() for _ in f._score_parts]

    def _scored(self) -> list[BaseFactor]:
        """All factors, in the order in which the core lays out their scores."""
        return [f for f in self._factors if not isinstance(f, StructuredFactor)] + self._structured

    def _score_layout(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the factors' scores, for messages."""
        owned = list(zip(self._score_owners(), self._score_parts(), strict=True))
        if len(owned) > 16 or is_tracing():  # names take time, or can't be had
            return [(f"{f.kind} (number {i})", p.shape) for i, (f, p) in enumerate(owned)]
        return [(f"{f.name}: {p.label}", p.shape) for f, p in owned]

    def _known_batch_shape(self) -> tuple[int, ...]:
        """The batch dimensions.

        Raises:
            GraphError: if nothing in the graph determines them.
        """
        if not self._tensors:
            raise GraphError("The graph has no variables: add some with fg.variable_from(scores).")
        shape = self._record.batch_shape
        if shape is None:
            raise GraphError(
                f"The batch size is unknown: no variable has scores. With batch_dims="
                f"{self.batch_dims}, add one with fg.variable_from(scores)."
            )
        return shape

    def _check_multipliers(self, warm_start: Solution, batch: int, dual: int) -> Any:
        """The multipliers of an earlier solution, if they fit this graph."""
        if not isinstance(warm_start, Solution):
            raise GraphError(f"warm_start takes a Solution, got {type(warm_start).__name__}.")
        if warm_start.query == "decode":
            raise GraphError(
                "warm_start: a solution of fg.decode() has no multipliers to start from. Pass one "
                "of fg.solve() or fg.solve_map()."
            )
        tau = warm_start.multipliers
        if tuple(tau.shape) != (batch, dual):
            raise ShapeError(
                f"warm_start: the earlier solution has multipliers of shape {tuple(tau.shape)}; "
                f"this graph needs {(batch, dual)}. It must have the same factors and batch size."
            )
        return tau

    def _set_answer(
        self,
        values: Sequence[Any],
        factor_values: Sequence[Any],
        structures: Sequence[tuple[StructuredFactor, Any]],
    ) -> None:
        """Stores the answer of a query, which `value`, `structures` and `probs` return."""
        record = self._record
        record.values, record.factor_values = values, factor_values
        record.scored = self._score_parts()
        record.structures = [answer for _, answer in structures] if structures else ()
        if structures and structures[0][1] is None:
            record.compiled = self

    def summary(self) -> None:
        """Prints a table of the variables and a table of the factors."""
        print(summary(self))

    def to_dot(self) -> str:
        """The graph as text for Graphviz; `fm.plot.graph` draws it without Graphviz."""
        from factormax.plot import to_dot

        return to_dot(self)

    def __repr__(self) -> str:
        shapes = ", ".join([f"{t.name}: {t.shape}" for t in self._tensors[:4]])
        shapes += ", ..." if len(self._tensors) > 4 else ""
        counts: Counter[str] = Counter()
        for f in self._factors:
            counts[f.kind] += f._count
        kinds = ", ".join([f"{count} {kind}" for kind, count in counts.items()])
        variables = counted(self._num_variables, "variable") + (f" ({shapes})" if shapes else "")
        factors = counted(counts.total(), "factor") + (f" ({kinds})" if kinds else "")
        batch = f", batch {self.batch_shape or 'of unknown shape'}" if self.batch_dims else ""
        return f"<FactorGraph of {variables} and {factors}{batch}>"


#: The same class under the name used in the paper.
TorchFactorGraph = FactorGraph


def _checked_dims(batch_dims: Any) -> int:
    whole = isinstance(batch_dims, (int, np.integer)) and not isinstance(batch_dims, bool)
    if not whole or batch_dims < 0:
        raise GraphError(
            f"batch_dims must be a non-negative whole number, got {shown(batch_dims)}."
        )
    return int(batch_dims)


def _as_array(label: str, scores: Any) -> npt.NDArray[Any]:
    if isinstance(scores, np.ma.MaskedArray):
        raise GraphError(
            f"{label}: scores are a NumPy masked array. Pass array.data, and mask=~array.mask."
        )
    return scores if is_jax(scores) else np.asarray(scores)


def _checked_mask(label: str, mask: Any, shape: tuple[int, ...]) -> Any:
    if not is_tensor(mask) and not is_jax(mask):
        mask = np.asarray(mask)
    if "bool" not in str(mask.dtype):
        raise GraphError(f"{label}: the mask must be boolean, got dtype {mask.dtype}.")
    given = tuple(mask.shape)
    fits = len(given) <= len(shape) and all(
        m in (1, s) for m, s in zip(given[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ShapeError(
            f"{label}: the mask must be broadcastable to the scores' shape {shape}, got {given}."
        )
    return mask


def checked_options(*given: Any, linear: bool = False) -> Options:
    """The arguments of a query, checked; in the order of `_made_options`."""
    make: Callable[..., Options] = _made_options
    if is_tracing():
        return make(*given, linear)
    last, found = _last_options.get(linear, ((), None))
    if found is not None and all(map(is_, given, last)):
        return found
    if tuple(map(type, given)) != (str, float, int, int, float, str):  # may be mutable
        return make(*given, linear)
    found = _remembered_options(*given, linear)
    _last_options[linear] = given, found
    return found


def _made_options(
    method: str,
    tol: float,
    max_iter: int,
    max_inner_iter: int,
    step_size: float,
    on_failure: str,
    linear: bool,
) -> Options:
    return Options(
        one_of("method", method, MAP_METHODS if linear else METHODS),
        positive_number("tol", tol),
        whole_number("max_iter", max_iter, 1, MOST),
        whole_number("max_inner_iter", max_inner_iter, 1, MOST),
        positive_number("step_size", step_size),
        one_of("on_failure", on_failure, ("warn", "raise", "ignore")),
        linear,
    )


#: For a training loop that repeats the same options: those of recent queries, and for the last
#: quadratic and the last linear query also the objects they were made from.
_remembered_options = lru_cache(maxsize=64)(_made_options)
_last_options: dict[bool, tuple[tuple[Any, ...], Options | None]] = {}
