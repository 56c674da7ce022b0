"""Solves inside the transforms of `torch.func`, and in forward mode.

There, a tensor stands for others (one for each sample of a `vmap`, or one with a tangent), so that
its numbers can't be looked at. Everything around the solve is ordinary torch, which transforms it
by itself; `FlatSolve` has a rule for each transform. What that costs, a solve that is not
transformed need not pay: see `factormax._fronts.torch.EagerSolve`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from factormax import _engines
from factormax._fronts.torch.arrays import as_numpy, as_tensor, compute_dtype, match, put, space_of
from factormax._fronts.torch.jacobian import Applied, by_instance, merged, require_linear
from factormax._fronts.torch.optimum import Optimum
from factormax._inputs import Inputs
from factormax._layout import Layout
from factormax._options import Options
from factormax._raw import RawSolution
from factormax._report import report_failures
from factormax._task import Task
from factormax.checks import check_scores
from factormax.conflict import conflicts_of
from factormax.errors import GraphError, ShapeError
from factormax.queries.loss import (
    Target,
    check_features,
    check_shape,
    check_target,
    evaluate,
    values_there,
)
from factormax.queries.solve import answer
from factormax.solution import Details, Solution
from factormax.structures import Support, lists_structures

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = [
    "cooled",
    "first_tensor",
    "flat_numbers",
    "flat_target",
    "is_transformed",
    "loss_transformed",
    "set_answer",
    "solve_transformed",
]

_forward_ad: Any = torch.autograd.forward_ad


def is_transformed() -> bool:
    """Whether scores may be those of a transform, or have a tangent."""
    return torch._C._are_functorch_transforms_active() or _forward_ad._current_level >= 0


class FlatSolve(torch.autograd.Function):
    """A solve of flat scores, with a rule for every transform.

    Args (of `apply`):
        plan: the rest of what is solved.
        eta_u, eta_v: `(N, n)` and `(N, P)`, the scores of variables and of factors.
        mask: `(N, n)`, or None.
        warm: `(N, multipliers)`, or None.
        *params: the parameters of factors, `(N, size)`, or numbers.
    """

    @staticmethod
    def forward(plan: FlatPlan, *numbers: Any) -> tuple[Tensor, ...]:
        """The marginals of both, the objective, the multipliers, a report, and the places."""
        return plan.run(*numbers)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps the solve."""
        ctx.plan, *rest = inputs
        ctx.count, ctx.outputs = len(rest), len(output)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(output[-1])
        ctx.save_for_forward(output[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The Jacobian, applied to the gradients."""
        (place,) = ctx.saved_tensors
        apply: Any = Applied.apply
        found = apply(ctx.plan, "jacobian", place, *grads[:2])
        return None, *found, *[None] * (ctx.count - 2)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The Jacobian, applied to the tangents."""
        (place,) = ctx.saved_tensors
        require_linear(ctx.plan.options)
        apply: Any = Applied.apply
        return *apply(ctx.plan, "jacobian", place, *tangents[1:3]), *[None] * (ctx.outputs - 2)

    @staticmethod
    def vmap(info: Any, in_dims: Any, plan: FlatPlan, *numbers: Any) -> Any:
        """The instances of all samples in one batch."""
        apply: Any = FlatSolve.apply
        return by_instance(info, apply(plan, *merged(info, in_dims[1:], numbers)))


class FlatProbs(torch.autograd.Function):
    """The probabilities of the structures of a solve, with the same rules.

    Args (of `apply`): the plan, and `place`, `eta_u` and `eta_v` as above.
    """

    @staticmethod
    def forward(plan: FlatPlan, place: Tensor, *scores: Tensor) -> tuple[Tensor, ...]:
        """Those of each structured factor, `(N, ..., K)`."""
        task, rows = plan.task, place.cpu().numpy()
        found = [task.found(i)[1][rows] for i in range(len(task.form.places))]
        return tuple([torch.from_numpy(f).to(place.device) for f in found])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the solve."""
        ctx.plan, place, *_ = inputs
        ctx.save_for_backward(place)
        ctx.save_for_forward(place)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The transposed Jacobian, applied to the gradients."""
        (place,) = ctx.saved_tensors
        apply: Any = Applied.apply
        return None, None, *apply(ctx.plan, "probs_back", place, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The Jacobian, applied to the tangents."""
        (place,) = ctx.saved_tensors
        apply: Any = Applied.apply
        return apply(ctx.plan, "probs", place, *tangents[2:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, plan: FlatPlan, *tensors: Tensor) -> Any:
        """The instances of all samples in one batch."""
        apply: Any = FlatProbs.apply
        return by_instance(info, apply(plan, *merged(info, in_dims[1:], tensors)))


class FlatPlan:
    """What a transformed solve is told besides its numbers; autograd keeps it with the values."""

    task: Task  # the solve, once there is one: of the instances of all samples
    stays = True  # on the device of the scores, if it has an engine

    def __init__(self, graph: FactorGraph, options: Options) -> None:
        self.graph: FactorGraph | None = graph  # until it is solved
        self.form, self.options = graph._form(), options
        self.grad_enabled = torch.is_grad_enabled()
        self.engine: Any = None
        self.device = first_tensor(graph).device
        if self.stays:
            asked = str(self.device), bool(graph._own_oracles())
            self.engine = _engines.engine_there(self.form.model, options, *asked)
        if self.engine is None:
            self.device = torch.device("cpu")

    def run(self, eta_u: Tensor, eta_v: Tensor, mask: Any, warm: Any, *more: Any) -> Any:
        """Solves, of real numbers by now."""
        graph, self.graph = self.graph, None
        assert graph is not None
        count = len(graph._params())
        params = [p if isinstance(p, float) else as_numpy(_shared(p)) for p in more[:count]]
        start = iter(params)
        for f in graph._factors:
            own = tuple([next(start) for _ in f._params])
            f._check_named(own)
        if self.engine is not None:
            return self._run_there(graph, params, eta_u, eta_v, mask, warm, *more[count:])
        inputs = Inputs(
            self.form.model,
            as_numpy(eta_u).copy(),  # the caller may write into them
            as_numpy(_shared(eta_v)).copy(),
            params,
            None if mask is None else as_numpy(_shared(mask)),
            graph._own_oracles(),
        )
        if inputs.core.needs_a_look:
            check_flat(graph, inputs)
        with torch.set_grad_enabled(self.grad_enabled):
            found = self.answer(inputs, warm, *more[count:])
        raw = self.task.raw
        conflicts = conflicts_of(graph._factors, inputs, raw)
        report_failures(raw, self.options.on_failure, conflicts=conflicts)
        report = np.concatenate([raw.report(), [raw.upper_bound, raw.integral]]).T
        found += (raw.tau, np.ascontiguousarray(report))
        return *map(torch.from_numpy, found), torch.arange(len(eta_u))

    def _run_there(
        self, graph: FactorGraph, params: Any, eta_u: Tensor, eta_v: Tensor, mask: Any, *rest: Any
    ) -> Any:
        """The same on the device of the scores."""
        from factormax._fronts.torch.device import DeviceTask

        shared = None if mask is None else _shared(mask)
        scores = eta_u.clone(), _shared(eta_v).clone()  # the caller may write into them
        given: Any = (self.form.model, *scores, params, shared, (), None, str(self.device))
        inputs = Inputs(*given)
        self.task = task = DeviceTask.of_inputs(self.engine, self.form, inputs)
        found = self.answer_there(task, lambda: check_flat(graph, task.host_inputs), *rest)
        if not task.raw.all_converged:
            conflicts = conflicts_of(graph._factors, task.host_inputs, task.raw, task.batch_shape)
            report_failures(task.raw, self.options.on_failure, conflicts=conflicts)
        return *found, task.multipliers(), task.report(7).T, task.place

    def answer_there(self, task: Any, refuse: Any, warm: Any) -> tuple[Any, ...]:
        """The same as `answer`, on a device; refuse: called if a score is NaN or +inf."""
        raw = task.run(self.options, warm, refuse)
        return raw.mu, raw.mu_v, raw.objective

    def answer(self, inputs: Inputs, warm: Any) -> tuple[Any, ...]:
        """What is differentiable of it, and the objective; the task is then there."""
        raw = self.ask(inputs, self.options, None if warm is None else as_numpy(warm))
        return raw.mu, raw.mu_v, raw.objective.astype(raw.mu.dtype, copy=False)

    def ask(self, inputs: Inputs, options: Options, warm: Any = None) -> RawSolution:
        """Solves; the answer is then the task's."""
        raw = answer(inputs, options, warm)
        listed, kept = lists_structures(raw.structures), inputs.without_oracles()
        self.task = Task.answered(self.form, kept, options, raw, len(inputs.eta_u), listed)
        return raw


class FlatLossPlan(FlatPlan):
    """The same for a loss, whose gradient is what is differentiable.

    Args:
        graph, options: as above.
        kind: of the loss.
        given: `(n,)`, the variables that have a target.
    """

    def __init__(self, graph: FactorGraph, options: Options, kind: str, given: Any) -> None:
        whole = not graph._structured and bool(given.all())
        self.stays = kind == "sparsemap" and whole  # see `factormax._fronts.torch.device_loss`
        super().__init__(graph, options)
        self.kind, self.given, self.factors = kind, given, list(graph._factors)
        self.record = graph._record

    def answer_there(self, task: Any, refuse: Any, warm: Any, *of_target: Any) -> tuple[Any, ...]:
        """The gradients of the flat scores, the loss, and the marginals."""
        from factormax._fronts.torch.device_loss import DeviceTarget, evaluate_there

        (values,) = of_target

        def refuse_target(inputs: Inputs) -> None:
            target = self._target(as_numpy(values))
            check_features(inputs, target, values_there(inputs, target))

        target = DeviceTarget(values, refuse_target)
        losses, grad_u, grad_v = evaluate_there(task, target, self.options, refuse)
        raw = task.raw
        return grad_u, grad_v, losses.to(raw.mu.dtype), raw.mu, raw.mu_v

    def answer(self, inputs: Inputs, warm: Any, *of_target: Any) -> tuple[Any, ...]:
        """The gradients of the flat scores, the loss, and the marginals."""
        target = self._target(*[as_numpy(t) for t in of_target])
        if (~self.given & inputs.present.any(axis=0)).any():
            raise GraphError("loss: a variable has no target. Give one for every variable.")
        losses, grad_u, grad_v = evaluate(inputs, target, self.options, self.ask)
        raw, dtype = self.task.raw, inputs.eta_u.dtype
        found = (grad_u, grad_v, losses, raw.mu, raw.mu_v)
        return tuple([np.ascontiguousarray(a, dtype) for a in found])

    def _target(self, values: Any, cost: Any = None) -> Target:
        """What the loss compares with, on the host."""
        if not np.isin(values, (0, 1)).all():
            raise GraphError("loss: the targets must be made of 0 and 1.")
        return Target(self.kind, values, None, cost, self.factors, (len(values),), self.record)


def check_flat(graph: FactorGraph, inputs: Inputs) -> None:
    """Raises for scores that are NaN or +inf, or -inf where that makes no sense."""
    names = [(t.name, t.shape) for t in graph._tensors]
    check_scores(inputs.eta_u, inputs.mask, names, ())
    allowed = [p.allow_minus_inf for p in graph._score_parts()]
    check_scores(inputs.eta_v, None, graph._score_layout(), (), allowed)


def _shared(tensor: Tensor) -> Tensor:
    """The same, `(1, ...)` if all instances share it."""
    return tensor[:1] if tensor.stride(0) == 0 and len(tensor) > 1 else tensor


# ---- The front -----------------------------------------------------------------------------------


def solve_transformed(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any
) -> Solution:
    """Solves a graph whose scores are those of a transform."""
    plan = FlatPlan(graph, options)
    layout = plan.form.layout
    warm = None
    if warm_start is not None:
        tau = graph._check_multipliers(warm_start, layout.batch, plan.form.model.num_dual)
        warm = torch.as_tensor(tau).detach()
    eta_u, eta_v, found = _applied_to(plan, graph, warm, temperature)
    mu, mu_v, objective, tau, report, place = found
    listing = FlatListing(plan, place, eta_u, eta_v)
    apply: Any = Optimum.apply
    objective = apply(objective, None, eta_u, eta_v, mu, mu_v)
    like = first_tensor(graph)
    answers = [(f, FlatAnswer(listing, i, f, like)) for i, f in enumerate(graph._structured)]
    numbers = (mu, mu_v, objective, tau, report.T)
    return set_answer(graph, layout, *numbers, options, answers, plan.task.raw.engine)


def _applied_to(
    plan: FlatPlan, graph: FactorGraph, warm: Tensor | None, temperature: Any, *more: Tensor
) -> tuple[Tensor, Tensor, Any]:
    """The flat scores of a graph, and what `FlatSolve` makes of them."""
    layout = plan.form.layout
    eta_u, eta_v, mask = flat_numbers(graph, layout, temperature, plan.device)
    rows = layout.batch
    eta_v = eta_v.expand(rows, eta_v.shape[1])
    if mask is not None:
        mask = mask.expand(rows, mask.shape[1])
    if warm is not None:
        warm = warm.to(plan.device, eta_u.dtype)
    params = [
        p if isinstance(p, float) else as_tensor(p).expand(rows, p.shape[1])
        for p in graph._params()
    ]
    apply: Any = FlatSolve.apply
    return eta_u, eta_v, apply(plan, eta_u, eta_v, mask, warm, *params, *more)


def loss_transformed(
    graph: FactorGraph,
    targets: Any,
    kind: str,
    cost: Any,
    mask: Any,
    options: Options,
    temperature: Any,
) -> Tensor:
    """The losses of a graph whose scores are those of a transform."""
    given = check_target(graph, targets, kind, cost)
    if mask is not None:
        raise GraphError(
            "loss: mask= is not supported inside the transforms of torch.func. Call loss outside "
            "of them, or give the whole target."
        )
    for u, target in targets.items():
        check_shape(u, torch.as_tensor(target).shape, graph._known_batch_shape())
    plan = FlatLossPlan(graph, options, kind, given)
    more = [flat_target(graph, "the target", targets, plan.device)]
    if kind == "hinge":
        costs = cost if isinstance(cost, Mapping) else dict.fromkeys(targets, cost)
        filled = {u: 1.0 if costs.get(u) is None else costs[u] for u in targets}
        more.append(flat_target(graph, "the cost", filled))
    eta_u, eta_v, found = _applied_to(plan, graph, None, temperature, *more)
    grad_u, grad_v, losses, mu, mu_v, tau, report, place = found
    listing = FlatListing(plan, place, eta_u.detach(), eta_v.detach())
    apply: Any = Optimum.apply
    value = apply(losses, None, eta_u, eta_v, grad_u, grad_v)
    like = first_tensor(graph)
    answers = [(f, FlatAnswer(listing, i, f, like)) for i, f in enumerate(graph._structured)]
    layout = plan.form.layout
    numbers = (mu, mu_v, value, tau, report.T)
    solution = set_answer(graph, layout, *numbers, options, answers, plan.task.raw.engine)
    return solution.objective  # type: ignore[return-value]


def flat_target(
    graph: FactorGraph, what: str, targets: Any, place: Any = "cpu", dtype: Any = torch.float64
) -> Tensor:
    """The targets as they lie in flat arrays, `(B, n)`; 0 where a variable has none."""
    shape = graph._known_batch_shape()
    rows = math.prod(shape)
    index = [u.index.reshape(-1) for u in targets]
    columns = []
    for u, target in targets.items():
        tensor = torch.as_tensor(target).detach().to(place, dtype)
        try:
            full = tensor.expand((*shape, *u.shape))
        except RuntimeError:
            raise ShapeError(
                f"loss: {what} of {u.name} must have shape {(*shape, *u.shape)}, got "
                f"{tuple(tensor.shape)}."
            ) from None
        columns.append(full.reshape(rows, u.size))
    given = np.bincount(np.concatenate(index), minlength=graph._num_variables)
    missing = np.flatnonzero(given == 0)
    if len(missing):
        columns.append(torch.zeros((rows, len(missing)), dtype=dtype, device=place))
    values = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
    laid_out = np.concatenate([*index, missing])
    if (np.diff(laid_out) < 0).any():
        values = values[:, torch.from_numpy(np.argsort(laid_out)).to(place)]
    return values


def flat_numbers(
    graph: FactorGraph, layout: Layout, temperature: Any, place: torch.device
) -> tuple[Any, Any, Any]:
    """The scores of a graph on a device, `(B, n)` and `(1 | B, P)`, and its mask, if it has one."""
    parts, space = graph._score_parts(), space_of(place)
    dtype = compute_dtype([t.scores for t in graph._tensors] + [p.given for p in parts])
    scores = [None if t.scores is None else put(t.scores, place, dtype) for t in graph._tensors]
    own = [put(torch.as_tensor(p.given), place, dtype) for p in parts]
    mask = None
    if graph._masked:
        masks = [
            None if t.mask is None else torch.as_tensor(t.mask).to(place) for t in graph._tensors
        ]
        mask = layout.flat_mask(space, masks)
    eta_u = layout.flat_scores(space, scores, dtype)
    eta_v = layout.flat_factor_scores(space, own, dtype)
    if temperature is not None:
        heat = put(torch.as_tensor(temperature), place, dtype)
        divisor = heat.expand(layout.batch_shape).reshape((-1, 1))
        eta_u, eta_v = cooled(eta_u, divisor), cooled(eta_v, divisor)
    return eta_u, eta_v, mask


def cooled(scores: Tensor, temperature: Tensor) -> Tensor:
    """Scores divided by a temperature that may need a gradient; −inf stays −inf.

    A temperature that is not positive makes them NaN, which a solve reports.
    """
    finite = scores.isfinite()
    divisor = torch.where(temperature > 0, temperature, torch.nan)
    # What is not finite must not reach the gradient of the temperature: 0 times it is NaN.
    return torch.where(finite, torch.where(finite, scores, 0) / divisor, scores)


def set_answer(
    graph: FactorGraph,
    layout: Layout,
    mu: Tensor,
    mu_v: Tensor,
    objective: Tensor,
    tau: Tensor,
    report: Tensor,
    options: Options,
    structures: list[Any],
    engine: str,
) -> Solution:
    """Keeps the values of variables and factors, from flat ones, and returns the solution."""
    first, space = first_tensor(graph), space_of(mu_v.device)
    values = [
        match(value, first if t.scores is None else t.scores)
        for value, t in zip(layout.by_tensor(mu), graph._tensors, strict=True)
    ]
    factor_values = [
        (part, match(own, part.given if isinstance(part.given, Tensor) else first))
        for own, part in zip(layout.by_part(space, mu_v), graph._score_parts(), strict=True)
    ]
    graph._set_answer(values, factor_values, structures)
    details = Details(
        status=report[3].to(torch.int32),
        iterations=report[2].to(torch.int32),
        oracle_calls=report[4].to(torch.int32),
        primal_residual=report[0].detach(),
        dual_residual=report[1].detach(),
        tau=tau.detach(),
        engine=engine,
        upper_bound=report[5].detach() if len(report) > 5 else None,
        integral=report[6] > 0 if len(report) > 6 else None,
    )
    shape = layout.batch_shape
    return Solution(match(objective.reshape(shape), first), details, shape, options.query)


def first_tensor(graph: FactorGraph) -> Tensor:
    """The first of the scores that is one."""
    given = [t.scores for t in graph._tensors] + [p.given for p in graph._score_parts()]
    return next(s for s in given if isinstance(s, Tensor))


class FlatListing:
    """The probabilities of the structures of a solve, when they are first asked for."""

    def __init__(self, plan: FlatPlan, place: Tensor, *scores: Tensor) -> None:
        self.plan, self.place, self.scores = plan, place, scores

    @cached_property
    def probs(self) -> tuple[Tensor, ...]:
        """Of each structured factor, `(B, ..., K)`, with their history."""
        apply: Any = FlatProbs.apply
        return apply(self.plan, self.place, *self.scores)  # type: ignore[no-any-return]


class FlatAnswer:
    """What a structured factor hands out: the rows of a transform's instances."""

    def __init__(self, listing: FlatListing, number: int, factor: Any, like: Tensor) -> None:
        self.listing, self.number = listing, number
        self.size, self.laid_out = factor._size, factor._laid_out
        self.like = like

    @property
    def _support(self) -> Support:
        return self.listing.plan.task.supports[self.number]

    def _rows(self, array: Any, *rest: int) -> Tensor:
        """Of all instances, as NumPy has them, those of here, in the shape of the batch."""
        plan = self.listing.plan
        form = plan.form
        shape = (*form.groups[self.number], *rest)
        own = torch.as_tensor(array.reshape(plan.task.batch, *shape), device=plan.device)
        rows = own[self.listing.place]
        return match(rows, self.like).reshape((*form.layout.batch_shape, *shape))

    @property
    def probs(self) -> Tensor:
        """`(*batch, K)`, differentiable."""
        found, form = self.listing.probs[self.number], self.listing.plan.form
        return match(found.reshape((*form.layout.batch_shape, *found.shape[1:])), self.like)

    @property
    def structures(self) -> Tensor:
        """`(*batch, K, *shape of the variables)`."""
        dense = self.laid_out(self._support.structures(self.size))
        return self._rows(dense, *dense.shape[1:])

    @property
    def num_structures(self) -> Tensor:
        """`(*batch,)`."""
        return self._rows(self._support.counts).long()
