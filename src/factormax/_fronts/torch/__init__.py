"""The torch front: solves that can be differentiated and compiled.

`torch.compile` sees the operator of `factormax._fronts.torch.traced`; everything around it
(concatenating variables, casts, copies between devices) is ordinary torch, which torch
differentiates itself. In eager mode all of that happens in NumPy, because dispatching a Python
operator takes longer than a small solve: see `factormax._fronts.torch.eager`.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from factormax import _engines
from factormax._core import OracleKind
from factormax._fronts.torch.arrays import Kind, compute_dtype
from factormax._fronts.torch.eager import EagerLoss, Listing, apply_solve
from factormax._fronts.torch.flat import first_tensor
from factormax._fronts.torch.flat import flat_target as flat_on_device
from factormax._fronts.torch.optimum import Optimum
from factormax._fronts.torch.plan import EagerPlan, given_scores
from factormax._fronts.torch.traced import solve_traced
from factormax._fronts.torch.transformed import is_transformed, solve_transformed
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._report import report_failures
from factormax.arrays import is_tracing, may_be_traced, to_numpy
from factormax.conflict import conflicts_of
from factormax.queries.loss import Target, check_features, check_target, evaluate, values_there
from factormax.queries.loss import flat_target as target_on_host
from factormax.solution import Solution

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["find_optimum", "flat_target", "list_structures", "loss", "solve", "solve_eager"]

#: The engine does not depend on the tolerance and the like.
_PLAIN = Options()


def solve(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any = None
) -> Solution:
    """Answers a query of a graph of torch scores."""
    if "torch._dynamo" not in sys.modules:  # else it may trace any function that is called
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
    given = given_scores(graph)
    plan = EagerPlan(graph, given, options, temperature, stays=True)
    task = plan.task
    warm = None
    if warm_start is not None:
        sizes = task.batch, task.form.model.num_dual
        warm = to_numpy(graph._check_multipliers(warm_start, *sizes))
    inputs = plan.inputs_of(given, temperature)
    raw = task.begin(options, warm)
    try:
        outputs = apply_solve(plan, *inputs)  # while the device is at work
    finally:
        changed = task.settle()
    if changed:
        outputs = apply_solve(plan, *inputs)
    _set_answer(graph, outputs, plan, inputs)
    find: Any = find_optimum
    if may_be_traced():  # the code that reads it later may be
        from factormax._fronts.torch import untraced

        find = untraced.find_optimum
    grad_enabled = torch.is_grad_enabled()
    optimum = partial(find, plan, inputs, outputs, grad_enabled)
    solution = Solution(optimum, raw, task.batch_shape, options.query, torch.from_numpy)
    if not raw.all_converged:
        solution.conflicts = conflicts_of(graph._factors, task.host_inputs, raw, task.batch_shape)
        report_failures(raw, options.on_failure, solution, solution.conflicts)
    return solution


def find_optimum(
    plan: EagerPlan, inputs: list[Tensor], outputs: tuple[Tensor, ...], grad_enabled: bool
) -> Tensor:
    """The objective, computed on first access, in the grad mode of the solve."""
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
            "objective was read. Read the objective first, or change a copy: u.value.clone()."
        )
    apply: Any = Optimum.apply
    with torch.set_grad_enabled(grad_enabled):
        found = plan.pattern.outputs[0].tensor(plan.task.objective())
        return apply(found, temperature, *scores, *values)  # type: ignore[no-any-return]


def flat_target(graph: FactorGraph, targets: Any, kind: str, cost: Any, mask: Any) -> Any:
    """The arguments of a loss, laid out on the device of the scores if it is computed there."""
    first = first_tensor(graph)
    model = graph._form().model
    if (
        kind != "sparsemap"
        or mask is not None
        or model.num_structured
        or Kind.of(first.device, first.dtype).is_cpu
        or _engines.engine_there(model, _PLAIN, str(first.device)) is None
    ):
        return target_on_host(graph, targets, kind, cost, mask)
    from factormax._fronts.torch.device_loss import DeviceTarget

    check_target(graph, targets, kind, cost)
    dtype = compute_dtype(t.scores for t in graph._tensors)
    values = flat_on_device(graph, "the target", targets, first.device, dtype)

    def refuse(inputs: Inputs) -> None:
        """Raises if it is not a valid target."""
        there = target_on_host(graph, targets, kind, cost, mask)
        check_features(inputs, there, values_there(inputs, there))

    return DeviceTarget(values, refuse)


def loss(graph: FactorGraph, target: Any, options: Options, temperature: Any = None) -> Tensor:
    """The losses of a graph of torch scores; see `factormax.queries.loss`."""
    given = given_scores(graph)
    there = not isinstance(target, Target)
    plan = EagerPlan(graph, given, options, temperature, stays=there)
    task: Any = plan.task
    inputs = plan.inputs_of(given, temperature)
    found: tuple[Any, ...]
    if there:
        from factormax._fronts.torch.device_loss import evaluate_there

        found = evaluate_there(task, target, options)
    else:
        found = evaluate(task.inputs, target, options, task.ask)
        task.forget_oracles()
    apply: Any = EagerLoss.apply
    values = apply(plan, found, *inputs)
    _set_answer(graph, plan.cast(plan.outputs()), plan, [s.detach() for s in inputs])
    if not task.raw.all_converged:
        conflicts = conflicts_of(graph._factors, task.host_inputs, task.raw, task.batch_shape)
        report_failures(task.raw, options.on_failure, conflicts=conflicts)
    return values  # type: ignore[no-any-return]


def list_structures(graph: FactorGraph) -> None:
    """Solves again what a compiled function solved, for the structures and their gradients."""
    asked = graph._traced
    assert asked is not None
    record = graph._record
    values, factor_values = record.values, record.factor_values
    solve_eager(graph, *asked)
    record.values, record.factor_values = values, factor_values


def _set_answer(graph: FactorGraph, outputs: Any, plan: EagerPlan, inputs: list[Tensor]) -> None:
    """Stores the values of variables and factors, and how to find the structures."""
    structured, first = graph._structured, plan.num_tensors
    answers: Any = ()
    if structured:
        find = Listing(plan, inputs)
        answers = plan.task.answers(structured, find, plan.pattern.outputs[0].wrap)
    graph._set_answer(outputs[:first], outputs[first:], answers)
