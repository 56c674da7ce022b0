"""The torch front: solves that differentiate, and compile.

`torch.compile` sees the operator of `factormax._torch_op`; everything around it (concatenating
variables, casts, copies between devices) is ordinary torch, which differentiates it by itself.
In eager mode an `autograd.Function` does all of that in NumPy, because the dispatch of a Python
operator costs more than a small solve.
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

from factormax import engine
from factormax._numpy import Gradients, Solve
from factormax._torch_op import Request, as_numpy, refuse_second_derivative
from factormax.arrays import is_tracing, to_numpy
from factormax.compiled import Wiring, num_dual
from factormax.conflict import conflicts_of
from factormax.engine import Options
from factormax.errors import GraphError
from factormax.factors.scores import Scores
from factormax.factors.structured import CALLBACK
from factormax.queries.loss import Target, evaluate
from factormax.solution import Details, Solution
from factormax.structures import Support

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["solve"]


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
        objective = torch.from_numpy(raw.objective.reshape(task.batch_shape))
        given = [*task.values(), *task.factor_values(), objective]
        kinds = [*plan.outputs, plan.outputs[0]]
        outputs = [
            _match(v if isinstance(v, Tensor) else torch.from_numpy(v), *kind)
            for v, kind in zip(given, kinds, strict=True)
        ]
        ctx.save_for_backward(*outputs)  # to hear if the values are changed in place
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.task = plan, task
        return (*outputs, task)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores."""
        _ = ctx.saved_tensors
        plan, task = ctx.plan, ctx.task
        given = [None if g is None else as_numpy(_to_cpu(g, plan.dtype)) for g in grads[:-1]]
        first = len(task.slots)
        found = plan.pick(task.pull_back(given[:first], given[first:-1], given[-1]))
        return (None, *_gradients(plan, found, ctx.needs_input_grad[1:], grads[:-1]))


class EagerProbs(torch.autograd.Function):
    """The probabilities of the structures of a solve: scores in, those of each factor out."""

    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, task: Solve, *scores: Tensor) -> Any:
        """The probabilities, `(*batch, K)` of each structured factor."""
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.task = plan, task
        found = [task.found(i)[1] for i in range(len(task.oracles))]
        return tuple(_match(torch.from_numpy(p), *plan.outputs[0]) for p in found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores."""
        plan, task = ctx.plan, ctx.task
        given = [None if g is None else as_numpy(_to_cpu(g, torch.float64)) for g in grads]
        found = plan.pick(task.pull_back_probs(given))
        return (None, None, *_gradients(plan, found, ctx.needs_input_grad[2:], grads))


class EagerLoss(torch.autograd.Function):
    """A loss in eager mode: its gradient is known when its value is."""

    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, target: Target, *scores: Tensor) -> Any:
        """The loss of each instance, and the solve."""
        task = plan.start(scores)
        with plan.grad_mode(task):
            values, grad_u, grad_v = evaluate(task, target, plan.options)
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
        _match(torch.from_numpy(g), *kind) if want else None
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
        self.dtype = _compute_dtype(graph)
        tensors = [t.scores for t in graph.tensors]
        parts = [p.given for p in graph.score_parts()]
        self.variables = [i for i, s in enumerate(tensors) if s is not None]
        self.factors = [i for i, s in enumerate(parts) if isinstance(s, Tensor)]
        inputs = [tensors[i] for i in self.variables] + [parts[i] for i in self.factors]
        if isinstance(temperature, Tensor):
            inputs.append(temperature)
        self.inputs: tuple[Tensor, ...] = tuple(inputs)
        # The device and dtype of what comes in, and of what goes out.
        self.kinds = [(s.device, _value_dtype(s)) for s in inputs]
        first = self.kinds[0]
        self.outputs = [
            (s.device, _value_dtype(s)) if isinstance(s, Tensor) else first
            for s in [*tensors, *parts]
        ]
        self.warm = None
        if warm_start is not None:
            batch = math.prod(graph.known_batch_shape())
            dual = num_dual(graph.wiring().spec)
            self.warm = to_numpy(graph.check_multipliers(warm_start, batch, dual))

    def grad_mode(self, task: Solve) -> AbstractContextManager[Any]:
        """The grad mode of the caller, for oracles in Python: inside of here it is off."""
        own = bool(task.numbers.oracles)
        return torch.set_grad_enabled(self.grad_enabled) if own else nullcontext()

    def pick(self, grads: Gradients) -> list[Any]:
        """Of all gradients, those of `inputs`."""
        found: list[Any] = [grads.variables[i] for i in self.variables]
        found += [grads.factors[i] for i in self.factors]
        return [*found, grads.temperature] if len(self.kinds) > len(found) else found

    def start(self, scores: Sequence[Tensor]) -> Solve:
        """The solve of these scores, which are `inputs` without their history."""
        graph, self.graph, self.inputs = self.graph, None, ()
        assert graph is not None
        temperature, self.temperature = self.temperature, None
        if isinstance(temperature, Tensor):
            *scores, temperature = scores
            temperature = as_numpy(_to_cpu(temperature, torch.float64))
        dtype: Any = np.float64 if self.dtype == torch.float64 else np.float32
        arrays = [as_numpy(_to_cpu(s, self.dtype)) for s in scores]
        of_variables: list[Any] = [None] * len(graph.tensors)
        for i, array in zip(self.variables, arrays, strict=False):
            of_variables[i] = array
        of_factors: list[Any] = [
            None if isinstance(p.given, Tensor) else np.asarray(p.given, dtype)
            for p in graph.score_parts()
        ]
        for i, array in zip(self.factors, arrays[len(self.variables) :], strict=True):
            of_factors[i] = array
        return Solve(graph, of_variables, of_factors, dtype, temperature)


# ---- The front -----------------------------------------------------------------------------------


def solve(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any = None
) -> Solution:
    """Solves a graph of torch scores."""
    if is_tracing():
        return _solve_traced(graph, options, warm_start, temperature)
    shape = graph.known_batch_shape()
    plan = EagerPlan(graph, options, warm_start, temperature)
    apply: Any = EagerSolve.apply
    inputs = plan.inputs
    *outputs, objective, task = apply(plan, *inputs)
    raw = task.raw
    _set_answer(graph, task, outputs, plan, inputs)
    conflicts = conflicts_of(graph.factors, task.wiring, task.numbers, raw)
    solution = Solution(objective, raw, shape, options.query, torch.from_numpy, conflicts=conflicts)
    engine.report_failures(raw, options.on_failure, solution, conflicts)
    return solution


def loss(graph: FactorGraph, target: Target, options: Options, temperature: Any = None) -> Tensor:
    """The losses of a graph of torch scores; see `factormax.queries.loss`."""
    if is_tracing():
        raise GraphError(
            "loss can't be compiled. Call it in a function marked with @torch.compiler.disable."
        )
    plan = EagerPlan(graph, options, None, temperature)
    apply: Any = EagerLoss.apply
    inputs = plan.inputs
    values, task = apply(plan, target, *inputs)
    given = [*task.values(), *task.factor_values()]
    outputs = [
        _match(torch.from_numpy(v), *kind) for v, kind in zip(given, plan.outputs, strict=True)
    ]
    _set_answer(graph, task, outputs, plan, tuple(s.detach() for s in inputs))
    conflicts = conflicts_of(graph.factors, task.wiring, task.numbers, task.raw)
    engine.report_failures(task.raw, options.on_failure, conflicts=conflicts)
    return values  # type: ignore[no-any-return]


def _set_answer(
    graph: FactorGraph,
    task: Solve,
    outputs: list[Tensor],
    plan: EagerPlan,
    inputs: tuple[Tensor, ...],
) -> None:
    """Keeps the values of variables and of factors, and how to get at the structures."""
    parts, structured = graph.score_parts(), graph.structured()
    first = len(graph.tensors)
    answers: list[Any] = []
    if structured:
        find = Listing(task, plan, inputs)
        answers = task.answers(structured, find, partial(_wrap, plan.outputs[0]))
    graph.set_answer(outputs[:first], list(zip(parts, outputs[first:], strict=True)), answers)


class Listing:
    """The structures of a solve with their probabilities, when they are first asked for."""

    def __init__(self, task: Solve, plan: EagerPlan, inputs: tuple[Tensor, ...]) -> None:
        self.task, self.plan, self.inputs = task, plan, inputs

    @cached_property
    def probs(self) -> tuple[Tensor, ...]:
        """Of each structured factor, `(*batch, K)`, with their history."""
        apply: Any = EagerProbs.apply
        return apply(self.plan, self.task, *self.inputs)  # type: ignore[no-any-return]

    def __call__(self, factor: int) -> tuple[Support, Tensor]:
        """The support of a factor, and its probabilities."""
        return self.task.supports[factor], self.probs[factor]


def _solve_traced(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any
) -> Solution:
    """The same through the operator, which `torch.compile` can put into a graph."""
    structured = graph.structured()
    if options.linear:
        raise GraphError(
            "solve_map and decode can't be compiled: their answers are piecewise constant. Call "
            "them in a function marked with @torch.compiler.disable."
        )
    for f in structured:
        if f.oracle == CALLBACK:
            raise GraphError(
                f"{f.kind}: a factor with an oracle in Python can't be compiled. Solve the graph "
                f"in a function marked with @torch.compiler.disable."
            )
    batch_shape = graph.known_batch_shape()
    mu, mu_v, objective, tau, _, _, residuals, counts = torch.ops.factormax.solve(
        *_op_args(graph, options, warm_start, temperature)
    )
    first = _first_tensor(graph)
    values = []
    for t in graph.tensors:
        part = mu[:, t.start : t.start + t.size].reshape((*batch_shape, *t.shape))
        values.append(_match_tensor(part, first if t.scores is None else t.scores))
    factor_values: list[tuple[Scores, Any]] = []
    start = 0
    for part in graph.score_parts():
        stop = start + part.count
        own = _sum_to(mu_v[:, start:stop].reshape((*batch_shape, *part.shape)), part)
        model = part.given if isinstance(part.given, Tensor) else first
        factor_values.append((part, _match_tensor(own, model)))
        start = stop
    graph.set_answer(values, factor_values, [(f, None) for f in structured])
    details = Details(
        status=counts[1],
        iterations=counts[0],
        oracle_calls=counts[2],
        primal_residual=residuals[0].detach(),
        dual_residual=residuals[1].detach(),
        tau=tau.detach(),
    )
    return Solution(_match_tensor(objective.reshape(batch_shape), first), details, batch_shape)


def _op_args(
    graph: FactorGraph,
    options: Options | None = None,
    warm_start: Solution | None = None,
    temperature: Any = None,
) -> tuple[Any, ...]:
    """The arguments of the operator for a graph."""
    gathered = _gather(graph, options or Options(), warm_start)
    eta_u, eta_v, mask, wiring, params, warm, request = gathered
    if temperature is not None:
        given = torch.as_tensor(temperature)
        divisor = _to_cpu(given, eta_u.dtype).expand(graph.known_batch_shape()).reshape((-1, 1))
        eta_u, eta_v = cooled(eta_u, divisor), cooled(eta_v, divisor)
    literals, numbers = torch.as_tensor(wiring.literals), torch.as_tensor(params)
    return eta_u, eta_v, mask, literals, numbers, warm, request.pack()


def _gather(
    graph: FactorGraph, options: Options, warm_start: Solution | None
) -> tuple[Tensor, Tensor, Tensor | None, Wiring, Any, Tensor | None, Request]:
    """The numbers of a graph as flat CPU tensors, and what is not a tensor."""
    batch_shape = graph.known_batch_shape()
    batch = 1
    for s in batch_shape:
        batch *= s
    dtype = _compute_dtype(graph)

    columns = []
    for t in graph.tensors:
        if t.scores is None:
            columns.append(torch.zeros((batch, t.size), dtype=dtype))
        else:
            columns.append(_to_cpu(t.scores, dtype).reshape((batch, t.size)))
    eta_u = columns[0] if len(columns) == 1 else torch.cat(columns, 1)

    scores = []
    for p in graph.score_parts():
        own = _to_cpu(torch.as_tensor(p.given), dtype)
        scores.append(own.expand((*batch_shape, *p.shape)).reshape((batch, p.count)))
    if not scores:
        eta_v = torch.zeros((batch, 0), dtype=dtype)
    else:
        eta_v = scores[0] if len(scores) == 1 else torch.cat(scores, 1)

    mask = None
    if any(t.mask is not None for t in graph.tensors):
        masks = []
        for t in graph.tensors:
            if t.mask is None:
                masks.append(torch.ones((batch, t.size), dtype=torch.bool))
            else:
                full = torch.as_tensor(t.mask).cpu().expand((*batch_shape, *t.shape))
                masks.append(full.reshape((batch, t.size)))
        mask = torch.cat(masks, 1)

    wiring = graph.wiring()
    warm = None
    if warm_start is not None:
        tau = graph.check_multipliers(warm_start, batch, num_dual(wiring.spec))
        warm = torch.as_tensor(tau).detach().to("cpu", dtype)
    # While tracing, the batch size may be symbolic: messages then number the instances.
    request = Request(
        wiring.spec,
        options,
        [(t.name, t.shape) for t in graph.tensors],
        graph.score_layout(),
        [p.allow_minus_inf for p in graph.score_parts()],
        () if is_tracing() else batch_shape,
    )
    return eta_u, eta_v, mask, wiring, graph.params(), warm, request


def cooled(scores: Tensor, temperature: Tensor) -> Tensor:
    """Scores divided by a temperature that may need a gradient; −inf stays −inf.

    A temperature that is not positive makes them NaN, which a solve reports.
    """
    finite = scores.isfinite()
    divisor = torch.where(temperature > 0, temperature, torch.nan)
    # What is not finite must not reach the gradient of the temperature: 0 times it is NaN.
    return torch.where(finite, torch.where(finite, scores, 0) / divisor, scores)


def _compute_dtype(graph: FactorGraph) -> torch.dtype:
    """float64 if any scores are, else float32; integers count as the default dtype."""
    for given in [t.scores for t in graph.tensors] + [p.given for p in graph.score_parts()]:
        if isinstance(given, Tensor) and _value_dtype(given) == torch.float64:
            return torch.float64
    return torch.float32


def _to_cpu(scores: Tensor, dtype: torch.dtype) -> Tensor:
    if scores.dtype == dtype and scores.is_cpu:
        return scores
    return scores.to("cpu", dtype)


def _value_dtype(scores: Tensor) -> torch.dtype:
    return scores.dtype if scores.is_floating_point() else torch.get_default_dtype()


def _first_tensor(graph: FactorGraph) -> Tensor:
    given = [t.scores for t in graph.tensors] + [p.given for p in graph.score_parts()]
    return next(s for s in given if isinstance(s, Tensor))


def _match(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The value on the caller's device and in the caller's dtype."""
    if value.dtype == dtype and value.device == device:
        return value
    return value.to(device, dtype)


def _wrap(kind: tuple[torch.device, torch.dtype], array: Any) -> Tensor:
    """From NumPy to a tensor on the device; real numbers in the dtype."""
    tensor = torch.as_tensor(np.asarray(array), device=kind[0])
    return tensor.to(kind[1]) if tensor.is_floating_point() else tensor


def _match_tensor(value: Tensor, model: Tensor) -> Tensor:
    return _match(value, model.device, _value_dtype(model))


def _sum_to(own: Tensor, part: Scores) -> Tensor:
    """Sums what came from one broadcast score: `(*batch, *shape of the scores as given)`."""
    batch_dims = part.factor.graph.batch_dims
    shape = part.own_shape
    extra = own.ndim - batch_dims - len(shape)
    for _ in range(extra):
        own = own.sum(batch_dims)
    for i, s in enumerate(shape):
        if s == 1 and own.shape[batch_dims + i] != 1:
            own = own.sum(batch_dims + i, keepdim=True)
    return own
