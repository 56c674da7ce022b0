"""A solve of flat scores as an operation that `torch.func` transforms, and its plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from factormax import _engines
from factormax._columns import Columns
from factormax._fronts.torch.arrays import TorchSpace, as_numpy, one_row
from factormax._fronts.torch.flat import first_tensor
from factormax._fronts.torch.jacobian import Applied, by_instance, merged, require_linear
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._raw import RawSolution
from factormax._report import report_failures
from factormax._task import Task
from factormax.checks import check_scores
from factormax.conflict import conflicts_of
from factormax.errors import GraphError
from factormax.queries.loss import Target, check_features, evaluate, values_there
from factormax.queries.solve import answer
from factormax.structures import lists_structures

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["FlatLossPlan", "FlatPlan", "FlatProbs", "FlatSolve"]


class FlatSolve(torch.autograd.Function):
    """A solve of flat scores, with a rule for every transform.

    Args (of `apply`):
        plan: everything else that the solve needs.
        eta_u: `(N, n)`, the scores of variables.
        eta_v: `(N, P)`, the scores of factors, or those of `Columns.own`, `(N, P − S)`.
        shared: `(N, S)`, the others, or None.
        mask: `(N, n)`, or None.
        warm: `(N, multipliers)`, or None.
        *params: the parameters of factors, `(N, size)`, or numbers.
    """

    @staticmethod
    def forward(plan: FlatPlan, *numbers: Any) -> tuple[Tensor, ...]:
        """Marginals of variables and factors, objective, multipliers, a report, and places."""
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
        """The Jacobian applied to the gradients."""
        (place,) = ctx.saved_tensors
        apply: Any = Applied.apply
        grad_u, grad_v = apply(ctx.plan, "jacobian", place, *grads[:2])
        return None, grad_u, *ctx.plan.apart(grad_v), *[None] * (ctx.count - 3)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The Jacobian applied to the tangents."""
        (place,) = ctx.saved_tensors
        require_linear(ctx.plan.options)
        apply: Any = Applied.apply
        moved_v = ctx.plan.joined(*tangents[2:4])
        found = apply(ctx.plan, "jacobian", place, tangents[1], moved_v)
        return *found, *[None] * (ctx.outputs - 2)

    @staticmethod
    def vmap(info: Any, in_dims: Any, plan: FlatPlan, *numbers: Any) -> Any:
        """Puts the instances of all samples into one batch."""
        apply: Any = FlatSolve.apply
        return by_instance(info, apply(plan, *merged(info, in_dims[1:], numbers)))


class FlatProbs(torch.autograd.Function):
    """The probabilities of the structures of a solve, with the same rules.

    Args (of `apply`): the plan, and `place`, `eta_u`, `eta_v` and `shared` as above.
    """

    @staticmethod
    def forward(plan: FlatPlan, place: Tensor, *scores: Any) -> tuple[Tensor, ...]:
        """The probabilities of each structured factor, `(N, ..., K)`."""
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
        """The transposed Jacobian applied to the gradients."""
        (place,) = ctx.saved_tensors
        apply: Any = Applied.apply
        grad_u, grad_v = apply(ctx.plan, "probs_back", place, *grads)
        return None, None, grad_u, *ctx.plan.apart(grad_v)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The Jacobian applied to the tangents."""
        (place,) = ctx.saved_tensors
        apply: Any = Applied.apply
        return apply(ctx.plan, "probs", place, tangents[2], ctx.plan.joined(*tangents[3:]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, plan: FlatPlan, *tensors: Tensor) -> Any:
        """Puts the instances of all samples into one batch."""
        apply: Any = FlatProbs.apply
        return by_instance(info, apply(plan, *merged(info, in_dims[1:], tensors)))


class FlatPlan:
    """What a transformed solve needs besides its numbers; autograd keeps it with the values."""

    task: Task  # the solve of the instances of all samples, once there is one
    stays = True  # whether to stay on the device of the scores, if it has an engine

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
        self.runs: tuple[int, ...] | None = None  # of the factor scores, if they are in two blocks

    def apart(self, grad_v: Tensor) -> tuple[Tensor, Tensor | None]:
        """From `(N, P)` to the blocks of factor scores that `FlatSolve` takes."""
        if self.runs is None:
            return grad_v, None
        return Columns.split(TorchSpace, grad_v, self.runs)

    def joined(self, own: Tensor, shared: Tensor | None) -> Tensor:
        """The other way round."""
        if self.runs is None or shared is None:
            return own
        found: Tensor = Columns(shared, own, self.runs).full(TorchSpace)
        return found

    def terms(self, scores: list[Tensor], mu: Tensor, mu_v: Tensor) -> list[Tensor]:
        """The terms of `optimum`: the blocks of scores, and their marginals."""
        return [*scores, mu, *[m for m in self.apart(mu_v) if m is not None]]

    def _factor_scores(self, eta_v: Tensor, shared: Any, take: Callable[[Tensor], Any]) -> Any:
        """What `Inputs` takes; take: makes numbers of tensors, copied, as the caller may write."""
        if shared is None:
            return take(one_row(eta_v))
        row = one_row(shared)
        if len(row) != 1:  # each sample of a vmap has its own
            return take(self.joined(eta_v, shared))
        assert self.runs is not None
        return Columns(take(row), take(eta_v), self.runs)

    def run(
        self, eta_u: Tensor, eta_v: Tensor, shared: Any, mask: Any, warm: Any, *more: Any
    ) -> Any:
        """Solves; the tensors now hold actual numbers."""
        graph, self.graph = self.graph, None
        assert graph is not None
        count = len(graph._params())
        params = [p if isinstance(p, float) else as_numpy(one_row(p)) for p in more[:count]]
        start = iter(params)
        for f in graph._factors:
            own = tuple([next(start) for _ in f._params])
            f._check_named(own)
        if self.engine is not None:
            factor_scores = self._factor_scores(eta_v, shared, torch.clone)
            return self._run_there(graph, params, eta_u, factor_scores, mask, warm, *more[count:])

        def taken(tensor: Tensor) -> Any:
            return as_numpy(tensor).copy()

        inputs = Inputs(
            self.form.model,
            taken(eta_u),
            self._factor_scores(eta_v, shared, taken),
            params,
            None if mask is None else as_numpy(one_row(mask)),
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
        self, graph: FactorGraph, params: Any, eta_u: Tensor, eta_v: Any, mask: Any, *rest: Any
    ) -> Any:
        """The same on the device of the scores."""
        from factormax._fronts.torch.device import DeviceTask

        row = None if mask is None else one_row(mask)
        scores = eta_u.clone(), eta_v  # the caller may write into them
        given: Any = (self.form.model, *scores, params, row, (), None, str(self.device))
        inputs = Inputs(*given)
        self.task = task = DeviceTask.of_inputs(self.engine, self.form, inputs)
        found = self.answer_there(task, lambda: check_flat(graph, task.host_inputs), *rest)
        if not task.raw.all_converged:
            conflicts = conflicts_of(graph._factors, task.host_inputs, task.raw, task.batch_shape)
            report_failures(task.raw, self.options.on_failure, conflicts=conflicts)
        return *found, task.multipliers(), task.report(7).T, task.place

    def answer_there(self, task: Any, refuse: Any, warm: Any) -> tuple[Any, ...]:
        """Like `answer`, on a device; refuse: called if a score is NaN or +inf."""
        raw = task.run(self.options, warm, refuse)
        return raw.mu, raw.mu_v, raw.objective

    def answer(self, inputs: Inputs, warm: Any) -> tuple[Any, ...]:
        """Sets the task; returns the differentiable part of the answer, and the objective."""
        raw = self.ask(inputs, self.options, None if warm is None else as_numpy(warm))
        return raw.mu, raw.mu_v, raw.objective.astype(raw.mu.dtype, copy=False)

    def ask(self, inputs: Inputs, options: Options, warm: Any = None) -> RawSolution:
        """Solves, and stores the answer in the task."""
        raw = answer(inputs, options, warm)
        listed, kept = lists_structures(raw.structures), inputs.without_oracles()
        self.task = Task.answered(self.form, kept, options, raw, len(inputs.eta_u), listed)
        return raw


class FlatLossPlan(FlatPlan):
    """The same for a loss; the differentiable part is its gradient.

    Args:
        graph, options: as above.
        kind: the kind of the loss.
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
        """What the loss compares the answer with, on the host."""
        if not np.isin(values, (0, 1)).all():
            raise GraphError("loss: the targets must hold only 0 and 1.")
        return Target(self.kind, values, None, cost, self.factors, (len(values),), self.record)


def check_flat(graph: FactorGraph, inputs: Inputs) -> None:
    """Raises for scores that are NaN or +inf, or -inf where that is not allowed."""
    names = [(t.name, t.shape) for t in graph._tensors]
    check_scores(inputs.eta_u, inputs.mask, names, ())
    allowed = [p.allow_minus_inf for p in graph._score_parts()]
    check_scores(inputs.eta_v, None, graph._score_layout(), (), allowed)
