"""The torch front: solves that differentiate, and compile.

`torch.compile` sees the operator of `factormax._fronts.torch.traced`; everything around it
(concatenating variables, casts, copies between devices) is ordinary torch, which differentiates it
by itself. In eager mode an `autograd.Function` does all of that in NumPy, because the dispatch of a
Python operator costs more than a small solve.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from factormax import _engines
from factormax._core import OracleKind
from factormax._fronts.torch.arrays import (
    Kind,
    compute_dtype,
    device_numbers,
    kind_of,
    numbers_of,
    plain_numbers_of,
    space_of,
)
from factormax._fronts.torch.jacobian import Applied
from factormax._fronts.torch.optimum import Optimum
from factormax._fronts.torch.traced import solve_traced
from factormax._fronts.torch.transformed import (
    as_tensor,
    first_tensor,
    is_transformed,
    solve_transformed,
)
from factormax._fronts.torch.transformed import flat_target as flat_on_device
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._report import report_failures
from factormax._task import Gradients, Task
from factormax.arrays import is_tracing, may_be_traced, to_numpy
from factormax.conflict import conflicts_of
from factormax.queries.loss import Target, check_features, check_target, evaluate
from factormax.queries.loss import flat_target as target_on_host
from factormax.solution import Solution
from factormax.structures import Support

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["find_optimum", "flat_target", "list_structures", "loss", "solve", "solve_eager"]

#: The engine does not depend on the tolerance and the like.
_PLAIN = Options()


# ---- Eager ---------------------------------------------------------------------------------------


class EagerSolve(torch.autograd.Function):
    """A solve in eager mode: scores of variables and factors in, values of both out.

    All that the operator leaves to torch (casts, copies between devices, laying out) happens in
    here, in NumPy.
    """

    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, *scores: Tensor) -> Any:
        """The values of variables and factors; the solve is then the plan's."""
        plan.task = task = plan.start(scores, stays=True)
        if task.inputs.oracles:
            with plan.grad_mode():
                task.run(plan.options, plan.warm)
        else:
            task.run(plan.options, plan.warm)
        outputs = plan.outputs_of(task)
        if plan.kept:
            # A surrogate looks at the values, which are the task's own.
            ctx.save_for_backward(*(scores if plan.options.surrogate is None else outputs))
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores."""
        plan = ctx.plan
        if plan.kept:
            _ = ctx.saved_tensors  # raises if they were changed in place
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return None, *differentiable_gradients(ctx, plan, "jacobian", grads)
        numbers, first = plan.numbers, plan.num_tensors
        given = [g if g is None else numbers(g) for g in grads]
        found = plan.task.pull_back(given[:first], given[first:])
        return None, *_gradients(plan, found, ctx.needs_input_grad[1:])


#: `EagerSolve.apply`, without what it does only for the transforms of `torch.func`.
_apply_solve: Any = super(torch.autograd.Function, EagerSolve).apply


class EagerProbs(torch.autograd.Function):
    """The probabilities of the structures of a solve: scores in, those of each factor out."""

    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, *scores: Tensor) -> Any:
        """The probabilities, `(*batch, K)` of each structured factor."""
        ctx.set_materialize_grads(False)
        ctx.plan, task = plan, plan.task
        if plan.kept:
            ctx.save_for_backward(*scores)
        found = [task.found(i)[1] for i in range(len(task.form.places))]
        return tuple([plan.pattern.outputs[0].tensor(p) for p in found])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores."""
        plan = ctx.plan
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return None, *differentiable_gradients(ctx, plan, "probs_back", grads)
        given = [None if g is None else numbers_of(g, torch.float64) for g in grads]
        found = plan.task.pull_back_probs(given)
        return None, *_gradients(plan, found, ctx.needs_input_grad[1:])


class EagerLoss(torch.autograd.Function):
    """A loss in eager mode: its gradient is known when its value is."""

    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, target: Any, *scores: Tensor) -> Any:
        """The loss of each instance; the solve is then the plan's."""
        there = not isinstance(target, Target)
        task: Any = plan.start(scores, stays=there)
        plan.task = task
        found: tuple[Any, ...]
        if there:
            from factormax._fronts.torch.device_loss import evaluate_there

            found = evaluate_there(task, target, plan.options)
        else:
            with plan.grad_mode():
                found = evaluate(task.inputs, target, plan.options, task.ask)
            task.forget_oracles()
        values, *grads = found
        ctx.plan, ctx.grads, ctx.scores = plan, grads, scores
        return plan.pattern.outputs[0].tensor(values.reshape(task.batch_shape))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores."""
        plan, task = ctx.plan, ctx.plan.task
        if task.host is task:
            weight = numbers_of(grads[0], torch.float64).reshape(-1, 1)
            dtype = task.raw.mu.dtype
            flat = [g.astype(dtype, copy=False) * weight.astype(dtype) for g in ctx.grads]
        else:
            flat = [g * grads[0].reshape(-1, 1).to(g.dtype) for g in ctx.grads]
        found = _gradients(plan, task.to_scores(*flat), ctx.needs_input_grad[2:])
        if torch.is_grad_enabled():  # create_graph=True
            apply: Any = LastDerivative.apply
            found = [None if g is None else apply(g, *grads, *ctx.scores) for g in found]
        return None, None, *found


def _gradients(plan: EagerPlan, grads: Gradients, wanted: Sequence[bool]) -> list[Any]:
    """The gradients of the scores as their tensors are."""
    found: list[Any] = grads.variables + grads.factors
    places = plan.pattern.places
    if len(places) < len(found):
        found = [found[i] for i in places]
    if grads.temperature is not None:
        found.append(grads.temperature)
    make = plan.gradients
    return [make[i](found[i]) if want else None for i, want in enumerate(wanted)]


def differentiable_gradients(
    ctx: Any, plan: EagerPlan, which: str, grads: Sequence[Any]
) -> list[Any]:
    """The same as functions of the incoming gradients, of the scores and of the temperature.

    which: the Jacobian to apply.
    """
    task, pattern = plan.task, plan.pattern
    layout, dtype = task.layout, pattern.dtype
    device = torch.device("cpu") if task.host is task else pattern.kinds[0].device
    space = space_of(device)
    given = [None if g is None else g.to(device, dtype) for g in grads]
    if which == "jacobian":
        own = given[plan.num_tensors :]
        columns = sum([part.count for part in layout.parts])
        vectors = [
            layout.flat_scores(space, given[: plan.num_tensors], dtype),
            layout.flat_factor_grads(space, own, dtype)
            if own
            else torch.zeros((layout.batch, columns), dtype=dtype),
        ]
    else:
        vectors = [
            torch.zeros(task.batch, *group, s.width, dtype=dtype)
            if g is None
            else g.reshape(task.batch, *g.shape[len(task.batch_shape) :])
            for g, s, group in zip(given, task.supports, task.form.groups, strict=True)
        ]
    there: Any = task  # or on the host
    place = torch.arange(layout.batch, device=device) if task.host is task else there.place
    apply: Any = Applied.apply
    grad_u, grad_v = apply(plan, which, place, *[v.to(device) for v in vectors])
    of_temperature = None
    if plan.kept and plan.options.surrogate is None:
        *scores, temperature = ctx.saved_tensors
        of_temperature, divisor = _of_temperature(plan, scores, temperature, grad_u, grad_v)
        grad_u, grad_v = grad_u / divisor, grad_v / divisor
    elif task.temperature is not None:
        divisor = as_tensor(task.temperature).to(device, dtype)
        grad_u, grad_v = grad_u / divisor, grad_v / divisor
    found = layout.by_tensor(grad_u)
    found += layout.by_given(space, grad_v) if layout.parts else []
    out = [
        found[i].to(k.device, k.dtype) for i, k in zip(pattern.places, pattern.kinds, strict=True)
    ]
    if of_temperature is not None:
        out.append(of_temperature)
    wanted = ctx.needs_input_grad[1:]
    return [g if want else None for g, want in zip(out, wanted, strict=True)]


def _of_temperature(
    plan: EagerPlan, scores: Sequence[Tensor], temperature: Tensor, grad_u: Tensor, grad_v: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of a temperature, from those of scores that it has divided; and the divisor."""
    layout, pattern = plan.task.layout, plan.pattern
    given: list[Any] = [None] * len(pattern.outputs)
    for i, array in plan.constants:
        given[i] = torch.as_tensor(array).to(grad_u.device, grad_u.dtype)
    for i, tensor in zip(pattern.places, scores, strict=True):
        given[i] = tensor.to(grad_u.device, grad_u.dtype)
    space = space_of(grad_u.device)
    eta_u = layout.flat_scores(space, given[: plan.num_tensors], grad_u.dtype)
    eta_v = layout.flat_factor_scores(space, given[plan.num_tensors :], grad_u.dtype)
    shape = layout.batch_shape
    divisor = temperature.to(grad_u.device, grad_u.dtype).expand(shape).reshape(-1, 1)
    # d(eta / T) = d eta / T - eta dT / T^2; what is not finite has no gradient.
    inner = sum(
        [
            (grad * torch.where(eta.isfinite(), eta, 0)).sum(1)
            for grad, eta in ((grad_u, eta_u), (grad_v, eta_v))
        ]
    )
    found = (-inner / divisor[:, 0] ** 2).reshape(shape).sum_to_size(temperature.shape)
    return found.to(temperature.device, temperature.dtype), divisor


class LastDerivative(torch.autograd.Function):
    """A gradient that depends on others, but can't be differentiated any further."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *origins: Tensor) -> Tensor:
        """The gradient itself, which depends on `origins`."""
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Raises."""
        raise RuntimeError(
            "factormax: autograd can't differentiate the gradient of a loss again. Call backward() "
            "without create_graph=True, or use torch.func.hessian or torch.func.grad."
        )


class Pattern:
    """Which of the scores of a graph are tensors, and of which kinds."""

    def __init__(self, *given: Kind | None) -> None:
        kinds = [kind for kind in given if kind is not None]
        wide = any([kind.dtype == torch.float64 for kind in kinds])
        self.places = [i for i, kind in enumerate(given) if kind is not None]
        self.kinds = kinds  # of the tensors
        self.outputs = [kind or kinds[0] for kind in given]  # of the values
        self.dtype = torch.float64 if wide else torch.float32  # of the computation
        self.numpy_dtype: Any = np.float64 if wide else np.float32
        self.is_cpu = kinds[0].is_cpu
        self.device = "cpu" if self.is_cpu else str(kinds[0].device)
        plain = all([k.is_cpu and k.same and k.dtype == self.dtype for k in kinds])
        #: The numbers of a tensor as they are computed with, on the CPU.
        self.numbers: Callable[[Tensor], Any] = (
            plain_numbers_of if plain else partial(numbers_of, dtype=self.dtype)
        )
        #: From what was computed to the values, and to the gradients of the tensors.
        self.values: list[Callable[[Any], Tensor]] = [
            kind.plain_tensor if plain else kind.tensor for kind in self.outputs
        ]
        self.gradients: list[Callable[[Any], Tensor]] = [
            kind.plain_tensor if plain else kind.tensor for kind in kinds
        ]


_pattern_of = lru_cache(maxsize=256)(Pattern)


class EagerPlan:
    """What an eager solve is told besides the tensors that may need gradients.

    Autograd keeps it with the values, so it must not lead back to them: `start` forgets the graph.
    """

    task: Task  # the solve, once there is one
    warm: Any = None
    constants: Sequence[tuple[int, Any]] = ()  # scores that are no tensors, and their places

    def __init__(
        self,
        graph: FactorGraph,
        options: Options,
        warm_start: Solution | None,
        temperature: Any = None,
    ) -> None:
        self.graph: FactorGraph | None = graph
        self.temperature = temperature
        self.options = options
        self.grad_enabled = torch.is_grad_enabled()
        given = [t.scores for t in graph._tensors]
        self.num_tensors = len(given)
        if graph._parts is None or graph._parts:
            given += [p.given for p in graph._score_parts()]
        kinds = [kind_of(s) if isinstance(s, Tensor) else None for s in given]
        self.pattern = pattern = _pattern_of(*kinds)
        self.gradients = pattern.gradients  # of the inputs
        #: The numbers of a tensor, where and as they are computed with.
        self.numbers = pattern.numbers
        self.inputs = given
        if len(pattern.places) < len(given):
            self.inputs = [given[i] for i in pattern.places]
        #: Whether the backward pass needs tensors, to be differentiated or to hear of changes.
        self.kept = options.surrogate is not None
        if isinstance(temperature, Tensor):
            self.kept = True
            self.inputs.append(temperature)
            self.gradients = [*self.gradients, kind_of(temperature).tensor]
        if warm_start is not None:
            form = graph._form()
            batch, dual = form.layout.batch, form.model.num_dual
            self.warm = to_numpy(graph._check_multipliers(warm_start, batch, dual))

    def grad_mode(self) -> AbstractContextManager[Any]:
        """The grad mode of the caller, for oracles in Python: inside of here it is off."""
        return torch.set_grad_enabled(self.grad_enabled)

    def outputs_of(self, task: Task) -> list[Tensor]:
        """The values of variables and factors."""
        given, make = task.values(), self.pattern.values
        if len(make) > len(given):
            given += task.factor_values()
        return [make[i](value) for i, value in enumerate(given)]

    def start(self, scores: Sequence[Tensor], stays: bool = False) -> Task:
        """The solve of these scores, which are `inputs` without their history.

        `stays`: on the device of the scores, if there is an engine.
        """
        graph, self.graph, self.inputs = self.graph, None, []
        assert graph is not None
        pattern, temperature = self.pattern, self.temperature
        make: Any = Task
        if stays and not pattern.is_cpu:
            make = self._on_device(graph)
        if isinstance(temperature, Tensor):
            *scores, temperature = scores
            self.temperature = None
            if make is Task:
                temperature = numbers_of(temperature, torch.float64)
        arrays: list[Any] = [self.numbers(tensor) for tensor in scores]
        if len(arrays) < len(pattern.outputs):
            arrays = self._with_constants(graph, arrays)
        first = self.num_tensors
        own = arrays[first:]
        task: Task = make(
            graph, arrays[:first], own, pattern.numpy_dtype, temperature, pattern.device
        )
        return task

    def _with_constants(self, graph: FactorGraph, arrays: list[Any]) -> list[Any]:
        """The numbers of all scores, those that are no tensors among them."""
        dtype = self.pattern.numpy_dtype
        given: list[Any] = [None] * self.num_tensors
        given += [
            None if isinstance(p.given, Tensor) else np.asarray(p.given, dtype)
            for p in graph._score_parts()
        ]
        self.constants = [(i, array) for i, array in enumerate(given) if array is not None]
        for i, array in zip(self.pattern.places, arrays, strict=True):
            given[i] = array
        return given

    def _on_device(self, graph: FactorGraph) -> Any:
        """What makes the task, on the device of the scores if there is an engine."""
        model, oracles = graph._form().model, bool(graph._own_oracles())
        engine = _engines.engine_there(model, self.options, self.pattern.device, oracles)
        if engine is None:
            return Task
        from factormax._fronts.torch.device import DeviceTask

        self.numbers = partial(device_numbers, self.pattern.kinds[0].device, self.pattern.dtype)
        return partial(DeviceTask, engine)


# ---- The front -----------------------------------------------------------------------------------


def solve(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any = None
) -> Solution:
    """Answers a query of a graph of torch scores."""
    if "torch._dynamo" not in sys.modules:  # or it may look into any function that is called
        return solve_eager(graph, options, warm_start, temperature)
    from factormax._fronts.torch import untraced

    run: Any = solve_traced
    if options.linear:
        run = untraced.solve_map
    elif any([f._oracle == OracleKind.callback for f in graph._structured]):
        run = untraced.solve_own
    elif not is_tracing():
        run = untraced.solve
    return run(graph, options, warm_start, temperature)  # type: ignore[no-any-return]


def solve_eager(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any = None
) -> Solution:
    """The same in eager mode."""
    if is_transformed():
        return solve_transformed(graph, options, warm_start, temperature)
    plan = EagerPlan(graph, options, warm_start, temperature)
    inputs = plan.inputs
    outputs = _apply_solve(plan, *inputs)
    task = plan.task
    raw = task.raw
    _set_answer(graph, outputs, plan, inputs)
    find: Any = find_optimum
    if may_be_traced():  # whoever asks for it later may be
        from factormax._fronts.torch import untraced

        find = untraced.find_optimum
    optimum = partial(find, plan, inputs, outputs)
    solution = Solution(optimum, raw, task.batch_shape, options.query, torch.from_numpy)
    if not raw.all_converged:
        solution.conflicts = conflicts_of(graph._factors, task.host_inputs, raw)
        report_failures(raw, options.on_failure, solution, solution.conflicts)
    return solution


def find_optimum(plan: EagerPlan, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
    """The objective, when it is first asked for."""
    scores, temperature = list(inputs), plan.temperature
    places = plan.pattern.places
    if len(scores) > len(places):
        temperature = scores.pop()
    elif temperature is not None:
        temperature = torch.as_tensor(temperature)
    scores += [torch.as_tensor(array) for _, array in plan.constants]
    values = [outputs[i] for i in [*places, *[i for i, _ in plan.constants]]]
    if any([v._version for v in values]):
        raise RuntimeError(
            "factormax: a value of this solve was modified by an inplace operation before its "
            "objective was asked for. Ask for it first, or change a copy: u.value.clone()."
        )
    apply: Any = Optimum.apply
    with plan.grad_mode():
        found = plan.pattern.outputs[0].tensor(plan.task.objective())
        return apply(found, temperature, *scores, *values)  # type: ignore[no-any-return]


def flat_target(graph: FactorGraph, targets: Any, kind: str, cost: Any, mask: Any) -> Any:
    """The arguments of a loss, laid out on the device of the scores if it is worked out there."""
    first = first_tensor(graph)
    model = graph._form().model
    if (
        kind != "sparsemap"
        or mask is not None
        or model.num_structured
        or kind_of(first).is_cpu
        or _engines.engine_there(model, _PLAIN, str(first.device)) is None
    ):
        return target_on_host(graph, targets, kind, cost, mask)
    from factormax._fronts.torch.device_loss import DeviceTarget

    check_target(graph, targets, kind, cost)
    dtype = compute_dtype(t.scores for t in graph._tensors)
    values = flat_on_device(graph, "the target", targets, first.device, dtype)

    def refuse(inputs: Inputs) -> None:
        """Raises if it is no target."""
        there = target_on_host(graph, targets, kind, cost, mask)
        check_features(inputs, there, np.where(inputs.present, there.values, 0))

    return DeviceTarget(values, refuse)


def loss(graph: FactorGraph, target: Any, options: Options, temperature: Any = None) -> Tensor:
    """The losses of a graph of torch scores; see `factormax.queries.loss`."""
    plan = EagerPlan(graph, options, None, temperature)
    apply: Any = EagerLoss.apply
    inputs = plan.inputs
    values, task = apply(plan, target, *inputs), plan.task
    detached = [s.detach() for s in inputs]
    _set_answer(graph, plan.outputs_of(task), plan, detached)
    if not task.raw.all_converged:
        conflicts = conflicts_of(graph._factors, task.host_inputs, task.raw)
        report_failures(task.raw, options.on_failure, conflicts=conflicts)
    return values  # type: ignore[no-any-return]


def list_structures(graph: FactorGraph) -> None:
    """Solves once more what a compiled function solved, for the structures and their gradients."""
    asked = graph._traced
    assert asked is not None
    values, factor_values = graph._values, graph._factor_values
    solve_eager(graph, *asked)
    graph._set_answer(values or [], factor_values, graph._structures)


def _set_answer(
    graph: FactorGraph,
    outputs: Sequence[Tensor],
    plan: EagerPlan,
    inputs: Sequence[Tensor],
) -> None:
    """Keeps the values of variables and of factors, and how to get at the structures."""
    structured, first = graph._structured, plan.num_tensors
    answers: list[Any] = []
    if structured:
        find = Listing(plan, inputs)
        answers = plan.task.answers(structured, find, plan.pattern.outputs[0].wrap)
    owned: list[Any] = []
    if len(outputs) > first:
        owned = list(zip(graph._score_parts(), outputs[first:], strict=True))
    graph._set_answer(list(outputs[:first]), owned, answers)


class Listing:
    """The structures of a solve with their probabilities, when they are first asked for."""

    def __init__(self, plan: EagerPlan, inputs: Sequence[Tensor]) -> None:
        self.plan, self.inputs = plan, inputs

    @cached_property
    def probs(self) -> tuple[Tensor, ...]:
        """Of each structured factor, `(*batch, K)`, with their history."""
        apply: Any = EagerProbs.apply
        return apply(self.plan, *self.inputs)  # type: ignore[no-any-return]

    def __call__(self, factor: int) -> tuple[Support, Tensor]:
        """The support of a factor, and its probabilities."""
        return self.plan.task.supports[factor], self.probs[factor]
