"""The torch front: solves that differentiate, and compile.

`torch.compile` sees the operator of `factormax._fronts.torch.op`; everything around it
(concatenating variables, casts, copies between devices) is ordinary torch, which differentiates it
by itself. In eager mode an `autograd.Function` does all of that in NumPy, because the dispatch of a
Python operator costs more than a small solve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from factormax._core import OracleKind
from factormax._fronts.torch.arrays import as_numpy, compute_dtype, match, to_cpu, value_dtype, wrap
from factormax._fronts.torch.traced import refuse_second_derivative, solve_traced
from factormax._options import Options
from factormax._report import report_failures
from factormax._task import Gradients, Task
from factormax.arrays import is_tracing, may_be_traced, to_numpy
from factormax.conflict import conflicts_of
from factormax.queries.loss import Target, evaluate
from factormax.solution import Solution
from factormax.structures import Support

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["list_structures", "loss", "solve", "solve_eager"]


# ---- Eager ---------------------------------------------------------------------------------------


class EagerSolve(torch.autograd.Function):
    """A solve in eager mode: scores of variables and factors in, values of both out.

    All that `solve_op` leaves to torch (casts, copies between devices, laying out) happens in here,
    in NumPy.
    """

    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, *scores: Tensor) -> Any:
        """The values of variables and factors, the objective, and the solve."""
        task = plan.start(scores)
        with plan.grad_mode(task):
            raw = task.run(plan.options, plan.warm)
        objective = raw.objective.reshape(task.batch_shape).astype(raw.mu.dtype)
        given = [*task.values(), *task.factor_values(), objective]
        kinds = [*plan.outputs, plan.outputs[0]]
        outputs = [match(torch.from_numpy(v), *kind) for v, kind in zip(given, kinds, strict=True)]
        ctx.save_for_backward(*outputs)  # to hear if the values are changed in place
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.task = plan, task
        return (*outputs, task)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores."""
        _ = ctx.saved_tensors
        plan, task = ctx.plan, ctx.task
        given = [None if g is None else as_numpy(to_cpu(g, plan.dtype)) for g in grads[:-1]]
        first = len(task.layout.tensors)
        found = plan.pick(task.pull_back(given[:first], given[first:-1], given[-1]))
        return (None, *_gradients(plan, found, ctx.needs_input_grad[1:], grads[:-1]))


class EagerProbs(torch.autograd.Function):
    """The probabilities of the structures of a solve: scores in, those of each factor out."""

    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, task: Task, *scores: Tensor) -> Any:
        """The probabilities, `(*batch, K)` of each structured factor."""
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.task = plan, task
        found = [task.found(i)[1] for i in range(len(task.places))]
        return tuple(match(torch.from_numpy(p), *plan.outputs[0]) for p in found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores."""
        plan, task = ctx.plan, ctx.task
        given = [None if g is None else as_numpy(to_cpu(g, torch.float64)) for g in grads]
        found = plan.pick(task.pull_back_probs(given))
        return (None, None, *_gradients(plan, found, ctx.needs_input_grad[2:], grads))


class EagerLoss(torch.autograd.Function):
    """A loss in eager mode: its gradient is known when its value is."""

    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, target: Target, *scores: Tensor) -> Any:
        """The loss of each instance, and the solve."""
        task = plan.start(scores)
        with plan.grad_mode(task):
            values, grad_u, grad_v = evaluate(task.inputs, target, plan.options, task.ask)
        task.forget_oracles()
        ctx.plan, ctx.task, ctx.grads = plan, task, (grad_u, grad_v)
        device, dtype = plan.outputs[0]
        return torch.from_numpy(values.reshape(task.batch_shape)).to(device, dtype), task

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores."""
        plan, task = ctx.plan, ctx.task
        weight = as_numpy(grads[0].to("cpu", torch.float64)).reshape(-1, 1)
        dtype = task.raw.mu.dtype
        flat = [g.astype(dtype, copy=False) * weight.astype(dtype) for g in ctx.grads]
        found = plan.pick(task.to_scores(*flat))
        return (None, None, *_gradients(plan, found, ctx.needs_input_grad[2:], grads[:1]))


def _gradients(
    plan: EagerPlan, found: list[Any], wanted: Sequence[bool], grads: Sequence[Any]
) -> list[Any]:
    """The gradients of the scores as their tensors are."""
    out: list[Any] = [
        match(torch.from_numpy(g), *kind) if want else None
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
        self.dtype = compute_dtype(graph)
        tensors = [t.scores for t in graph._tensors]
        parts = [p.given for p in graph._score_parts()]
        self.variables = [i for i, s in enumerate(tensors) if s is not None]
        self.factors = [i for i, s in enumerate(parts) if isinstance(s, Tensor)]
        inputs = [tensors[i] for i in self.variables] + [parts[i] for i in self.factors]
        if isinstance(temperature, Tensor):
            inputs.append(temperature)
        self.inputs: tuple[Tensor, ...] = tuple(inputs)
        # The device and dtype of what comes in, and of what goes out.
        self.kinds = [(s.device, value_dtype(s)) for s in inputs]
        first = self.kinds[0]
        self.outputs = [
            (s.device, value_dtype(s)) if isinstance(s, Tensor) else first
            for s in [*tensors, *parts]
        ]
        self.warm = None
        if warm_start is not None:
            batch, dual = math.prod(graph._known_batch_shape()), graph._model().num_dual
            self.warm = to_numpy(graph._check_multipliers(warm_start, batch, dual))

    def grad_mode(self, task: Task) -> AbstractContextManager[Any]:
        """The grad mode of the caller, for oracles in Python: inside of here it is off."""
        own = bool(task.inputs.oracles)
        return torch.set_grad_enabled(self.grad_enabled) if own else nullcontext()

    def pick(self, grads: Gradients) -> list[Any]:
        """Of all gradients, those of `inputs`."""
        found: list[Any] = [grads.variables[i] for i in self.variables]
        found += [grads.factors[i] for i in self.factors]
        return [*found, grads.temperature] if len(self.kinds) > len(found) else found

    def start(self, scores: Sequence[Tensor]) -> Task:
        """The solve of these scores, which are `inputs` without their history."""
        graph, self.graph, self.inputs = self.graph, None, ()
        assert graph is not None
        temperature, self.temperature = self.temperature, None
        if isinstance(temperature, Tensor):
            *scores, temperature = scores
            temperature = as_numpy(to_cpu(temperature, torch.float64))
        dtype: Any = np.float64 if self.dtype == torch.float64 else np.float32
        arrays = [as_numpy(to_cpu(s, self.dtype)) for s in scores]
        of_variables: list[Any] = [None] * len(graph._tensors)
        for i, array in zip(self.variables, arrays, strict=False):
            of_variables[i] = array
        of_factors: list[Any] = [
            None if isinstance(p.given, Tensor) else np.asarray(p.given, dtype)
            for p in graph._score_parts()
        ]
        for i, array in zip(self.factors, arrays[len(self.variables) :], strict=True):
            of_factors[i] = array
        return Task(graph, of_variables, of_factors, dtype, temperature, str(self.kinds[0][0]))


# ---- The front -----------------------------------------------------------------------------------


def solve(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any = None
) -> Solution:
    """Answers a query of a graph of torch scores."""
    if not may_be_traced():
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
    shape = graph._known_batch_shape()
    plan = EagerPlan(graph, options, warm_start, temperature)
    apply: Any = EagerSolve.apply
    inputs = plan.inputs
    *outputs, objective, task = apply(plan, *inputs)
    raw = task.raw
    _set_answer(graph, task, outputs, plan, inputs)
    conflicts = conflicts_of(graph._factors, task.inputs, raw)
    solution = Solution(objective, raw, shape, options.query, torch.from_numpy, conflicts=conflicts)
    report_failures(raw, options.on_failure, solution, conflicts)
    return solution


def loss(graph: FactorGraph, target: Target, options: Options, temperature: Any = None) -> Tensor:
    """The losses of a graph of torch scores; see `factormax.queries.loss`."""
    plan = EagerPlan(graph, options, None, temperature)
    apply: Any = EagerLoss.apply
    inputs = plan.inputs
    values, task = apply(plan, target, *inputs)
    given = [*task.values(), *task.factor_values()]
    outputs = [
        match(torch.from_numpy(v), *kind) for v, kind in zip(given, plan.outputs, strict=True)
    ]
    _set_answer(graph, task, outputs, plan, tuple(s.detach() for s in inputs))
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
    task: Task,
    outputs: list[Tensor],
    plan: EagerPlan,
    inputs: tuple[Tensor, ...],
) -> None:
    """Keeps the values of variables and of factors, and how to get at the structures."""
    parts, structured = graph._score_parts(), graph._structured
    first = len(graph._tensors)
    answers: list[Any] = []
    if structured:
        find = Listing(task, plan, inputs)
        answers = task.answers(structured, find, partial(wrap, plan.outputs[0]))
    graph._set_answer(outputs[:first], list(zip(parts, outputs[first:], strict=True)), answers)


class Listing:
    """The structures of a solve with their probabilities, when they are first asked for."""

    def __init__(self, task: Task, plan: EagerPlan, inputs: tuple[Tensor, ...]) -> None:
        self.task, self.plan, self.inputs = task, plan, inputs

    @cached_property
    def probs(self) -> tuple[Tensor, ...]:
        """Of each structured factor, `(*batch, K)`, with their history."""
        apply: Any = EagerProbs.apply
        return apply(self.plan, self.task, *self.inputs)  # type: ignore[no-any-return]

    def __call__(self, factor: int) -> tuple[Support, Tensor]:
        """The support of a factor, and its probabilities."""
        return self.task.supports[factor], self.probs[factor]
