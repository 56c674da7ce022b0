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

from factormax._core import Model, OracleKind
from factormax._engines import ENGINES
from factormax._fronts.torch.arrays import Kind, device_numbers, kind_of, numbers_of
from factormax._fronts.torch.traced import refuse_second_derivative, solve_traced
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._report import report_failures
from factormax._task import Gradients, Task
from factormax.arrays import is_tracing, to_numpy
from factormax.conflict import conflicts_of
from factormax.queries.loss import Target, evaluate
from factormax.solution import Solution
from factormax.structures import Support

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["list_structures", "loss", "solve", "solve_eager"]

_NOTHING = np.zeros((0, 0)), np.zeros((0, 0))


# ---- Eager ---------------------------------------------------------------------------------------


class EagerSolve(torch.autograd.Function):
    """A solve in eager mode: scores of variables and factors in, values of both out.

    All that the operator leaves to torch (casts, copies between devices, laying out) happens in
    here, in NumPy.
    """

    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, *scores: Tensor) -> Any:
        """The values of variables and factors, and the objective; the solve is then the plan's."""
        plan.task = task = plan.start(scores, stays=True)
        if task.inputs.oracles:
            with plan.grad_mode():
                task.run(plan.options, plan.warm)
        else:
            task.run(plan.options, plan.warm)
        outputs = plan.outputs_of(task)
        outputs.append(plan.outputs[0].tensor(task.objective()))
        ctx.save_for_backward(*outputs)  # to hear if the values are changed in place
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores."""
        _ = ctx.saved_tensors
        plan = ctx.plan
        given = [None if g is None else plan.numbers(g) for g in grads]
        objective, first = given.pop(), plan.num_tensors
        found = plan.pick(plan.task.pull_back(given[:first], given[first:], objective))
        return (None, *_gradients(plan, found, ctx.needs_input_grad[1:], grads))


class EagerProbs(torch.autograd.Function):
    """The probabilities of the structures of a solve: scores in, those of each factor out."""

    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, *scores: Tensor) -> Any:
        """The probabilities, `(*batch, K)` of each structured factor."""
        ctx.set_materialize_grads(False)
        ctx.plan, task = plan, plan.task
        found = [task.found(i)[1] for i in range(len(task.form.places))]
        return tuple([plan.outputs[0].tensor(p) for p in found])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores."""
        plan = ctx.plan
        given = [None if g is None else numbers_of(g, torch.float64) for g in grads]
        found = plan.pick(plan.task.pull_back_probs(given))
        return (None, *_gradients(plan, found, ctx.needs_input_grad[1:], grads))


class EagerLoss(torch.autograd.Function):
    """A loss in eager mode: its gradient is known when its value is."""

    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, target: Target, *scores: Tensor) -> Any:
        """The loss of each instance; the solve is then the plan's."""
        plan.task = task = plan.start(scores)
        with plan.grad_mode():
            values, grad_u, grad_v = evaluate(task.inputs, target, plan.options, task.ask)
        task.forget_oracles()
        ctx.plan, ctx.grads = plan, (grad_u, grad_v)
        return plan.outputs[0].tensor(values.reshape(task.batch_shape))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores."""
        plan, task = ctx.plan, ctx.plan.task
        weight = numbers_of(grads[0], torch.float64).reshape(-1, 1)
        dtype = task.raw.mu.dtype
        flat = [g.astype(dtype, copy=False) * weight.astype(dtype) for g in ctx.grads]
        found = plan.pick(task.to_scores(*flat))
        return (None, None, *_gradients(plan, found, ctx.needs_input_grad[2:], grads))


def _gradients(
    plan: EagerPlan, found: list[Any], wanted: Sequence[bool], grads: Sequence[Any]
) -> list[Any]:
    """The gradients of the scores as their tensors are."""
    out: list[Any] = [
        kind.tensor(g) if want else None
        for g, kind, want in zip(found, plan.kinds, wanted, strict=True)
    ]
    if torch.is_grad_enabled():  # create_graph=True
        incoming = [g for g in grads if g is not None and g.requires_grad]
        apply: Any = LastDerivative.apply
        out = [None if g is None else apply(g, *incoming) for g in out]
    return out


class LastDerivative(torch.autograd.Function):
    """A gradient that depends on others, but can't be differentiated any further."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *incoming: Tensor) -> Tensor:
        """The gradient itself."""
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Raises."""
        return refuse_second_derivative(ctx)


class EagerPlan:
    """What an eager solve is told besides the tensors that may need gradients.

    Autograd keeps it with the values, so it must not lead back to them: `start` forgets the graph.
    """

    task: Task  # the solve, once there is one

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
        if graph._score_parts():
            given += [p.given for p in graph._score_parts()]
        self.inputs: list[Tensor] = []
        self.places: list[int] = []  # of the inputs among all scores
        self.kinds: list[Kind] = []  # of the inputs
        self.dtype = torch.float32  # of the computation
        for i, scores in enumerate(given):
            if isinstance(scores, Tensor):
                kind = kind_of(scores)
                self.inputs.append(scores)
                self.places.append(i)
                self.kinds.append(kind)
                if kind.dtype == torch.float64:
                    self.dtype = torch.float64
        #: The numbers of a tensor, where and as they are computed with.
        self.numbers: Callable[[Tensor], Any] = partial(numbers_of, dtype=self.dtype)
        self.outputs = self.kinds  # of the values of variables and factors
        if len(self.inputs) < len(given):
            own = dict(zip(self.places, self.kinds, strict=True))
            self.outputs = [own.get(i, self.kinds[0]) for i in range(len(given))]
        if isinstance(temperature, Tensor):
            self.inputs.append(temperature)
            self.kinds = [*self.kinds, kind_of(temperature)]
        self.warm = None
        if warm_start is not None:
            form = graph._form()
            batch, dual = form.layout.batch, form.model.num_dual
            self.warm = to_numpy(graph._check_multipliers(warm_start, batch, dual))

    def grad_mode(self) -> AbstractContextManager[Any]:
        """The grad mode of the caller, for oracles in Python: inside of here it is off."""
        return torch.set_grad_enabled(self.grad_enabled)

    def outputs_of(self, task: Task) -> list[Tensor]:
        """The values of variables and factors."""
        given = task.values()
        if len(self.outputs) > len(given):
            given += task.factor_values()
        return [kind.tensor(v) for v, kind in zip(given, self.outputs, strict=True)]

    def pick(self, grads: Gradients) -> list[Any]:
        """Of all gradients, those of `inputs`."""
        found: list[Any] = grads.variables + grads.factors
        if len(self.places) < len(found):
            found = [found[i] for i in self.places]
        return [*found, grads.temperature] if len(self.kinds) > len(found) else found

    def start(self, scores: Sequence[Tensor], stays: bool = False) -> Task:
        """The solve of these scores, which are `inputs` without their history.

        `stays`: on the device of the scores, if there is an engine.
        """
        graph, self.graph, self.inputs = self.graph, None, []
        assert graph is not None
        first = self.kinds[0]
        make: Any = self._on_device(graph) if stays and not first.is_cpu else Task
        temperature, self.temperature = self.temperature, None
        if isinstance(temperature, Tensor):
            *scores, temperature = scores
            if make is Task:
                temperature = numbers_of(temperature, torch.float64)
        dtype: Any = np.float64 if self.dtype == torch.float64 else np.float32
        arrays: list[Any] = [None] * len(self.outputs)
        for i, tensor in zip(self.places, scores, strict=True):
            arrays[i] = self.numbers(tensor)
        own = arrays[self.num_tensors :]
        if len(scores) < len(arrays):
            for i, part in enumerate(graph._score_parts()):
                if own[i] is None:
                    own[i] = np.asarray(part.given, dtype)
        device = "cpu" if first.is_cpu else str(first.device)
        task: Task = make(graph, arrays[: self.num_tensors], own, dtype, temperature, device)
        return task

    def _on_device(self, graph: FactorGraph) -> Any:
        """What makes the task, on the device of the scores if there is an engine."""
        device, model = self.kinds[0].device, graph._form().model
        engine = _engine_of(model, self.options, device, bool(graph._own_oracles()))
        if engine is None:
            return Task
        from factormax._fronts.torch.device import DeviceTask

        self.numbers = partial(device_numbers, device, self.dtype)
        return partial(DeviceTask, engine)


@lru_cache(maxsize=64)
def _engine_of(model: Model, options: Options, device: torch.device, oracles: bool) -> Any:
    """The engine of a device, if it solves such a model there."""
    asked = Inputs(model, *_NOTHING, [], oracles=(None,) * oracles, device=str(device))
    for engine in ENGINES:
        if engine.name == device.type and engine.supports(asked, options)[0]:
            return engine
    return None


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
    plan = EagerPlan(graph, options, warm_start, temperature)
    apply: Any = EagerSolve.apply
    inputs = plan.inputs
    *outputs, objective = apply(plan, *inputs)
    task, raw = plan.task, plan.task.raw
    _set_answer(graph, outputs, plan, inputs)
    solution = Solution(objective, raw, task.batch_shape, options.query, torch.from_numpy)
    if not raw.all_converged:
        solution.conflicts = conflicts_of(graph._factors, task.host_inputs, raw)
        report_failures(raw, options.on_failure, solution, solution.conflicts)
    return solution


def loss(graph: FactorGraph, target: Target, options: Options, temperature: Any = None) -> Tensor:
    """The losses of a graph of torch scores; see `factormax.queries.loss`."""
    plan = EagerPlan(graph, options, None, temperature)
    apply: Any = EagerLoss.apply
    inputs = plan.inputs
    values, task = apply(plan, target, *inputs), plan.task
    detached = [s.detach() for s in inputs]
    _set_answer(graph, plan.outputs_of(task), plan, detached)
    conflicts = conflicts_of(graph._factors, task.inputs, task.raw)
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
    outputs: list[Tensor],
    plan: EagerPlan,
    inputs: Sequence[Tensor],
) -> None:
    """Keeps the values of variables and of factors, and how to get at the structures."""
    parts, structured = graph._score_parts(), graph._structured
    first = len(graph._tensors)
    answers: list[Any] = []
    if structured:
        find = Listing(plan, inputs)
        answers = plan.task.answers(structured, find, plan.outputs[0].wrap)
    graph._set_answer(outputs[:first], list(zip(parts, outputs[first:], strict=True)), answers)


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
