"""One query of a graph: its numbers laid out flat, the answer, and the way back to the scores.

The NumPy front and the eager torch front share it. It holds shapes and arrays, but no reference to
the graph, since autograd may keep it for a long time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from factormax import _engines
from factormax._columns import Columns
from factormax._core import Numbers
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._raw import RawSolution
from factormax._report import SURELY_EXACT, report_backward, report_failures
from factormax._space import NumpySpace
from factormax.arrays import FloatArray, IndexArray, to_numpy
from factormax.checks import check_scores
from factormax.factors.structured import StructuredFactor
from factormax.queries.solve import answer, pull_back_linear, with_objective
from factormax.status import Status
from factormax.structures import Answer, Support, lists_structures
from factormax.temperature import (
    cooled,
    cooled_columns,
    spread_temperature,
    sum_to_temperature,
)

if TYPE_CHECKING:
    from factormax._form import Form
    from factormax.graph import FactorGraph

__all__ = ["Gradients", "Task"]


#: The scores of factors that have none, by dtype.
_NO_SCORES: dict[Any, FloatArray] = {t: np.zeros((1, 0), t) for t in (np.float32, np.float64)}


class Gradients(NamedTuple):
    """The gradients of each variable tensor's scores, each factor's scores, the temperature."""

    variables: list[Any]
    factors: list[Any]
    temperature: Any


class Task:
    """The numbers of a query; after `run` or `ask`, also its answer.

    Args:
        graph: the graph to solve.
        scores: one per variable tensor, `(*batch, *shape)`, in the compute dtype; None means 0.
        factor_scores: the factors' own scores, in the compute dtype, as given.
        dtype: float32 or float64.
        temperature: broadcastable to the batch, divides all scores; None means 1.
        device: where the scores came from.
    """

    temperature: FloatArray | None = None  # (B, 1)
    _one: FloatArray | None = None  # (1, 1), if all instances have the same
    _to_list: Inputs | None = None  # what to solve again if the structures are needed

    def __init__(
        self,
        graph: FactorGraph,
        scores: list[npt.NDArray[Any] | None],
        factor_scores: list[npt.NDArray[Any]],
        dtype: Any,
        temperature: npt.NDArray[Any] | None = None,
        device: str = "cpu",
    ) -> None:
        self.form = form = graph._form()
        self.layout = layout = form.layout
        self.batch_shape, self.batch = layout.batch_shape, layout.batch
        eta_v: FloatArray | Columns = _NO_SCORES[dtype]
        if layout.parts:
            # A copy: the backward pass reads the signs, and the caller may change the array.
            own, shared = layout.factor_blocks(NumpySpace, factor_scores, dtype, copy=True)
            eta_v = own if shared is None else Columns(shared, own, layout.runs)
        mask = None
        if graph._masked:
            masks = [None if t.mask is None else to_numpy(t.mask) for t in graph._tensors]
            mask = layout.flat_mask(NumpySpace, masks)
        self.inputs = inputs = Inputs(
            form.model,
            layout.flat_scores(NumpySpace, scores, dtype),
            eta_v,
            graph._params(),
            mask,
            graph._own_oracles() if graph._structured else (),
            None,
            device,
        )
        if inputs.core.needs_a_look:
            self._check_scores(graph)
        if temperature is not None:
            self.temperature = spread_temperature(temperature, self.batch_shape)
            self.temperature_shape = tuple(temperature.shape)
            if temperature.size == 1:
                self._one = np.asarray(temperature, np.float64).reshape(1, 1)
                eta_v = inputs.map_factor_scores(partial(cooled, temperature=self._one))
            else:
                eta_v = cooled_columns(inputs.columns, self.temperature)
            self.inputs = inputs.replace(eta_u=cooled(inputs.eta_u, self.temperature), eta_v=eta_v)
            self._check_cooled()

    @classmethod
    def answered(
        cls,
        form: Form,
        inputs: Inputs,
        options: Options,
        raw: RawSolution,
        batch: int | None = None,
        listed: bool = False,
    ) -> Task:
        """A task whose answer is known.

        batch: the number of instances, if not that of the form; listed: whether the structures are
        known, too.
        """
        self = cls.__new__(cls)
        self.form, self.layout, self.inputs = form, form.layout, inputs
        self.batch_shape, self.batch = form.layout.batch_shape, form.layout.batch
        if batch is not None:
            self.batch_shape, self.batch = (batch,), batch
        self.options, self.raw = options, raw
        self._to_list = None if listed else inputs
        return self

    def _check_scores(self, graph: FactorGraph) -> None:
        inputs = self.host_inputs
        core = inputs.core
        if core.scores == Numbers.bad:
            names = [(t.name, t.shape) for t in graph._tensors]
            check_scores(inputs.eta_u, inputs.mask, names, self.batch_shape)
        if core.factor_scores != Numbers.finite:
            allowed = [p.allow_minus_inf for p in graph._score_parts()]
            names, columns = graph._score_layout(), inputs.columns
            for own, shape, alike in (
                (columns.shared, (), True),
                (columns.own, self.batch_shape, False),
            ):
                some = [k for k, other in enumerate(self.layout.is_shared) if other == alike]
                check_scores(own, None, [names[k] for k in some], shape, [allowed[k] for k in some])

    def _check_cooled(self) -> None:
        """Raises if scores that were right are too large now."""
        core = self.inputs.core
        if core.needs_a_look and Numbers.bad in (core.scores, core.factor_scores):
            assert self.temperature is not None
            raise ValueError(
                f"temperature: {self.temperature.min():g} is too small for these scores, which "
                f"would become infinite in {self.inputs.eta_u.dtype}."
            )

    # ---- the answer ------------------------------------------------------------------------------

    def run(self, options: Options, warm: FloatArray | None = None) -> RawSolution:
        """Solves; `values`, `factor_values`, `supports` and `pull_back` then work."""
        raw = self.ask(self.inputs, options, warm)
        if self.inputs.oracles and options.surrogate is None:
            self.forget_oracles()
        return raw

    #: Begins to solve; `settle` ends it. On a device there is time in between.
    begin = run

    def settle(self) -> bool:
        """Ends what `begin` began; returns whether any numbers have changed since."""
        return False

    def ask(self, inputs: Inputs, options: Options, warm: FloatArray | None = None) -> RawSolution:
        """Solves with other numbers, and stores the answer in this task."""
        self.options = options
        find = answer if options.linear else _engines.solve
        self.raw = raw = find(inputs, options, warm)
        if self.form.places:
            # Copied: they may be the caller's, who may change them before reading structures.
            all_there = lists_structures(raw.structures)
            self._to_list = None if all_there else inputs.replace(eta_u=inputs.eta_u.copy())
        return raw

    def forget_oracles(self) -> None:
        """Drops user-defined oracles, which refer to the graph."""
        self.inputs = self.inputs.without_oracles()

    @property
    def host(self) -> Task:
        """The same task in NumPy."""
        return self

    @property
    def applies_there(self) -> bool:
        """Whether the Jacobian can be applied on the device of the scores."""
        return False

    @property
    def host_inputs(self) -> Inputs:
        """The numbers in NumPy."""
        return self.inputs

    def values(self) -> list[FloatArray]:
        """The marginals of each variable tensor, `(*batch, *shape)`."""
        return self.layout.by_tensor(self.raw.mu)

    def objective(self) -> FloatArray:
        """The optimal value of each instance, `(*batch,)`."""
        return self.raw.objective.astype(self.inputs.eta_u.dtype).reshape(self.batch_shape)

    def factor_values(self) -> list[FloatArray]:
        """The marginals of the factors' scores, `(*batch, *shape as given)`."""
        return self.layout.by_part(NumpySpace, self.raw.mu_v) if self.layout.parts else []

    @cached_property
    def listed(self) -> RawSolution:
        """The solution with its structures, solved again if it was found without them."""
        if self._to_list is None:
            return self.raw
        # Start from its multipliers, so that the structures are those of the same solution.
        warm = None if self.options.linear else self.raw.tau
        listed = _engines.solve(self._to_list, replace(self.options, list_structures=True), warm)
        report_failures(listed, self.options.on_failure)
        return listed

    @cached_property
    def supports(self) -> list[Support]:
        """The structures of each structured factor."""
        slots = np.array(self.form.slots, np.int64)
        listed = self.listed.structures
        return [Support(listed, own, slots, self.batch) for own in self.form.places]

    def answers(
        self,
        structured: Sequence[StructuredFactor],
        find: Callable[[int], tuple[Support, Any]],
        wrap: Callable[[Any], Any],
    ) -> list[tuple[StructuredFactor, Answer]]:
        """What the structured factors return."""
        return [
            (f, Answer(partial(find, i), self.shape_of(i), f._size, f._laid_out, wrap))
            for i, f in enumerate(structured)
        ]

    def shape_of(self, factor: int) -> tuple[int, ...]:
        """The batch shape, with the number of factors if one call made several."""
        return (*self.batch_shape, *self.form.groups[factor])

    def found(self, factor: int) -> tuple[Support, FloatArray]:
        """The structures of a structured factor, and their probabilities, `(*batch, K)`."""
        s = self.supports[factor]
        shape = (*self.shape_of(factor), s.width)
        probs = s.probs.astype(self.raw.mu.dtype).reshape(
            self.batch, *shape[len(self.batch_shape) :]
        )
        probs[self.raw.status == Status.INFEASIBLE.code] = np.nan  # like the values
        return s, probs.reshape(shape)

    # ---- the way back ----------------------------------------------------------------------------

    def pull_back(
        self,
        grads: list[npt.NDArray[Any] | None],
        factor_grads: list[npt.NDArray[Any] | None],
        objective: npt.NDArray[Any] | None = None,
    ) -> Gradients:
        """Turns gradients of `values` and `factor_values` into gradients of the scores."""
        layout, dtype = self.layout, self.inputs.eta_u.dtype
        grad_mu: Any = layout.flat_scores(NumpySpace, grads, dtype)
        grad_mu_v = weight = None
        if factor_grads and any([g is not None for g in factor_grads]):
            grad_mu_v = layout.flat_factor_grads(NumpySpace, factor_grads, dtype)
        if objective is not None:
            weight = np.asarray(objective).reshape(self.batch)
        found: tuple[FloatArray, FloatArray | Columns]
        if self.options.linear:
            found = pull_back_linear(
                self.inputs, self.raw, self.options, grad_mu, grad_mu_v, weight
            )
        else:
            found = self._pull_back(self.raw, grad_mu, grad_mu_v, weight, summed=True)
        return self.to_scores(*found)

    @property
    def _can_sum(self) -> bool:
        """Whether gradients may be summed over the batch before a temperature divides them."""
        alike = self.temperature is None or self._one is not None
        return alike and len(self.layout.parts) > 0

    def _pull_back(
        self,
        raw: RawSolution,
        grad_mu: FloatArray | None,
        grad_mu_v: FloatArray | None,
        weight: FloatArray | None,
        grad_prob: npt.NDArray[np.float64] | None = None,
        summed: bool = False,
    ) -> tuple[FloatArray, Any]:
        """The gradients of the flat scores; summed: see `Engine.vjp`, but only if possible."""
        summed = summed and self.batch > 1 and weight is None and self._can_sum
        given = grad_mu, grad_mu_v, grad_prob
        grad_u, grad_v, residual, worst = _engines.vjp(self.inputs, raw, *given, summed)
        if not worst <= SURELY_EXACT:  # True if worst is NaN
            report_backward(residual, worst, grad_u.dtype, self.options.on_failure)
        return (grad_u, grad_v) if weight is None else with_objective(raw, grad_u, grad_v, weight)

    def pull_back_probs(self, grads: list[npt.NDArray[Any] | None]) -> Gradients:
        """Turns gradients of the probabilities of structures into gradients of the scores."""
        return self.to_scores(*self._pull_back_probs(grads, summed=True))

    def pull_back_probs_flat(
        self, grads: list[npt.NDArray[Any] | None]
    ) -> tuple[FloatArray, FloatArray]:
        """The same, for the flat scores."""
        return self._pull_back_probs(grads)

    def _pull_back_probs(
        self, grads: list[npt.NDArray[Any] | None], summed: bool = False
    ) -> tuple[FloatArray, Any]:
        raw = self.listed
        if self.options.linear:
            return np.zeros_like(raw.mu), np.zeros_like(raw.mu_v)
        flat = np.zeros_like(raw.structures.prob)
        for g, s in zip(grads, self.supports, strict=True):
            if g is not None:
                s.collect(g.reshape(len(s.counts), s.width), flat)
        return self._pull_back(raw, None, None, None, flat, summed)

    def push_forward(
        self,
        moves: list[npt.NDArray[Any] | None],
        factor_moves: list[npt.NDArray[Any] | None],
        temperature: Any = None,
    ) -> tuple[list[FloatArray], list[FloatArray], FloatArray]:
        """How values, factor values and the objective move with the scores; None means 0."""
        layout, dtype = self.layout, self.inputs.eta_u.dtype
        given = [
            np.zeros(slot.given_shape, dtype) if move is None else move.astype(dtype, copy=False)
            for move, slot in zip(factor_moves, layout.parts, strict=True)
        ]
        moved_u = layout.flat_scores(NumpySpace, moves, dtype)
        moved_v = layout.flat_factor_scores(NumpySpace, given, dtype)
        if self.temperature is not None:
            # d(eta / T) = (d eta - (eta / T) dT) / T
            heat = 0.0 if temperature is None else spread_temperature(temperature, self.batch_shape)
            eta_u, eta_v = (_finite(e) for e in (self.inputs.eta_u, self.inputs.eta_v))
            moved_u = ((moved_u - eta_u * heat) / self.temperature).astype(dtype)
            moved_v = ((moved_v - eta_v * heat) / self.temperature).astype(dtype)
        mu, mu_v = np.nan_to_num(self.raw.mu), np.nan_to_num(self.raw.mu_v)
        objective = (mu * moved_u).sum(1, np.float64) + (mu_v * moved_v).sum(1, np.float64)
        if self.options.linear:  # piecewise constant
            found = np.zeros_like(mu), np.zeros_like(mu_v)
        else:
            wide = np.broadcast_to(moved_v, mu_v.shape)
            found = self._pull_back(self.raw, moved_u, wide, None)
        values = layout.by_tensor(found[0])
        own = layout.by_part(NumpySpace, found[1]) if layout.parts else []
        return values, own, objective.reshape(self.batch_shape)

    def applied(
        self, which: str, index: IndexArray, vectors: Sequence[FloatArray]
    ) -> tuple[FloatArray, ...]:
        """A Jacobian of the solve applied to vectors `(N, ...)`; index: the instance of each.

        which: "jacobian", from flat scores to flat marginals; "probs", from flat scores to the
        probabilities of each structured factor; "probs_back", its transpose.
        """
        if np.array_equal(index, np.arange(self.batch)):
            return self._applied(which, vectors)
        # In rounds, with each instance at most once per round.
        order = np.argsort(index, kind="stable")
        ordered = index[order]
        turn = np.empty(len(index), np.int64)
        turn[order] = np.arange(len(index)) - np.searchsorted(ordered, ordered)
        rounds = int(turn.max(initial=-1)) + 1
        out: list[FloatArray] = []
        for k in range(max(rounds, 1)):
            rows = np.flatnonzero(turn == k)
            full = [np.zeros((self.batch, *v.shape[1:]), v.dtype) for v in vectors]
            for whole, vector in zip(full, vectors, strict=True):
                whole[index[rows]] = vector[rows]
            found = self._applied(which, full)
            if not out:
                out = [np.zeros((len(index), *f.shape[1:]), f.dtype) for f in found]
            for total, part in zip(out, found, strict=True):
                total[rows] = part[index[rows]]
        return tuple(out)

    def _applied(self, which: str, vectors: Sequence[FloatArray]) -> tuple[FloatArray, ...]:
        """The same with one vector for each instance."""
        if which == "probs_back":
            return self.pull_back_probs_flat([np.asarray(v, np.float64) for v in vectors])
        moved_u, moved_v = vectors
        if which == "probs":
            return self._push_probs(moved_u, moved_v)
        if self.options.linear:
            return pull_back_linear(self.inputs, self.raw, self.options, moved_u, moved_v, None)
        return self._pull_back(self.raw, moved_u, moved_v, None)

    def _push_probs(self, moved_u: FloatArray, moved_v: FloatArray) -> tuple[FloatArray, ...]:
        """How probabilities move with the scores, one row of the Jacobian at a time."""
        out = []
        for factor, s in enumerate(self.supports):
            members = len(self.form.places[factor])
            found = np.zeros((self.batch, members, s.width), self.raw.mu.dtype)
            for member, rank in np.ndindex(members, s.width):
                one = np.zeros(found.shape)
                one[:, member, rank] = 1
                grads: list[Any] = [None] * len(self.supports)
                grads[factor] = one
                row_u, row_v = self.pull_back_probs_flat(grads)
                found[:, member, rank] = (row_u * moved_u).sum(1) + (row_v * moved_v).sum(1)
            out.append(found.reshape(self.batch, *self.form.groups[factor], s.width))
        return tuple(out)

    def to_scores(self, grad_u: FloatArray, grad_v: FloatArray | Columns) -> Gradients:
        """Turns gradients of the flat scores into gradients of the scores as given."""
        if isinstance(grad_v, Columns):
            return self._to_scores_summed(grad_u, grad_v)
        of_temperature, factors = None, []
        if self.temperature is not None:
            # d(eta / T) = d eta / T - (eta / T) dT / T
            inner = _dot(grad_u, self.inputs.eta_u) + self.inputs.columns.dot(grad_v)
            per_instance = -inner / self.temperature[:, 0]
            of_temperature = sum_to_temperature(
                per_instance, self.temperature_shape, self.batch_shape
            )
            grad_u = (grad_u / self.temperature).astype(grad_u.dtype)
            if self.layout.parts:
                summed = Columns.summed(grad_v, 1 / self.temperature[:, 0], self.inputs.runs)
                factors = self.layout.by_summed(summed)
        elif self.layout.parts:
            factors = self.layout.by_given(NumpySpace, grad_v)
        return Gradients(self.layout.by_tensor(grad_u), factors, of_temperature)

    def _to_scores_summed(self, grad_u: FloatArray, grad_v: Columns) -> Gradients:
        of_temperature, one = None, self._one
        if one is not None:
            scores = self.inputs.columns
            inner = _dot(grad_u, self.inputs.eta_u).sum()
            inner += _dot(grad_v.shared, scores.shared).sum() + _dot(grad_v.own, scores.own).sum()
            of_temperature = (-inner / one).reshape(self.temperature_shape)
            grad_u = (grad_u / one).astype(grad_u.dtype)
            grad_v = grad_v.map(lambda grad: (grad / one).astype(grad.dtype))
        variables, factors = self.layout.by_tensor(grad_u), self.layout.by_summed(grad_v)
        return Gradients(variables, factors, of_temperature)

    def weighted(
        self, grad_u: FloatArray, grad_v: FloatArray, weight: npt.NDArray[np.float64]
    ) -> Gradients:
        """The same from gradients of the flat scores that are still to be multiplied, `(B,)`."""
        dtype = self.raw.mu.dtype
        grad_u, grad_v = (g.astype(dtype, copy=False) for g in (grad_u, grad_v))
        scale = weight.astype(dtype)
        grad_u = grad_u * scale[:, None]
        if not self._can_sum:
            return self.to_scores(grad_u, grad_v * scale[:, None])
        return self.to_scores(grad_u, Columns.summed(grad_v, scale, self.inputs.runs))


def _dot(grad: FloatArray, scores: FloatArray) -> npt.NDArray[np.float64]:
    """The sum of the products for each instance; scores that are not finite count as 0."""
    return np.asarray((grad * _finite(scores)).sum(axis=1, dtype=np.float64))


def _finite(scores: FloatArray) -> FloatArray:
    """The scores, with 0 for those that are not finite: what is off stays off."""
    return np.where(np.isfinite(scores), scores, 0)
