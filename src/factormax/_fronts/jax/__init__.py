"""The JAX front: a graph is built while JAX traces, with known wiring and traced numbers.

If no numbers are traced, a query is answered at once, as with NumPy. Otherwise it becomes the
primitives of `factormax._fronts.jax.primitives`; everything around them is ordinary JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from factormax._fronts.jax.arrays import compute_dtype, like
from factormax._fronts.jax.loss import flat_target
from factormax._fronts.jax.traced import TracedTarget, loss_traced, solve_traced
from factormax._options import Options
from factormax._report import report_failures
from factormax._task import Task
from factormax.arrays import is_tracer, to_numpy
from factormax.conflict import conflicts_of
from factormax.errors import GraphError
from factormax.queries.loss import Target, evaluate
from factormax.solution import Solution
from factormax.structures import Support

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["flat_target", "list_structures", "loss", "solve"]


def solve(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any = None
) -> Solution:
    """Answers a query of a graph of JAX arrays."""
    tau = warm_start.raw.tau if isinstance(warm_start, Solution) else None
    if not _is_traced(graph, temperature, tau):
        return _solve_now(graph, options, warm_start, temperature)
    if options.search is not None:
        raise GraphError(
            "decode can't be traced by JAX (jit, grad, vmap): it searches for as long as it takes. "
            "Call it outside these transformations."
        )
    return solve_traced(graph, options, warm_start, temperature)


def loss(graph: FactorGraph, target: Any, options: Options, temperature: Any = None) -> Any:
    """The losses of a graph of JAX arrays; see `factormax.queries.loss`."""
    if isinstance(target, TracedTarget) or _is_traced(graph, temperature):
        return loss_traced(graph, target, options, temperature)
    return _loss_now(graph, target, options, temperature)


def _is_traced(graph: FactorGraph, *others: Any) -> bool:
    """Whether any number of a graph is traced."""
    return (
        any([is_tracer(t.scores) or is_tracer(t.mask) for t in graph._tensors])
        or any([is_tracer(p.given) for p in graph._score_parts()])
        or any([is_tracer(p) for f in graph._factors for p in f._params])
        or any([is_tracer(other) for other in others])
    )


def list_structures(graph: FactorGraph) -> None:
    """Raises: structures are listed with the answer, unless it was traced."""
    raise GraphError(
        "structures and probs are not available while JAX traces, because their number is unknown. "
        "Solve the graph outside jit, grad and vmap."
    )


# ---- Numbers that are not traced -----------------------------------------------------------------


def _start(graph: FactorGraph, temperature: Any) -> Task:
    """The arrays of a graph in NumPy, ready to be solved."""
    parts = graph._score_parts()
    dtype = compute_dtype([t.scores for t in graph._tensors] + [p.given for p in parts])
    scores = [None if t.scores is None else np.asarray(t.scores, dtype) for t in graph._tensors]
    own = [np.asarray(p.given, dtype) for p in parts]
    heat = None if temperature is None else to_numpy(temperature)
    return Task(graph, scores, own, dtype, heat, _device(graph))


def _device(graph: FactorGraph) -> str:
    """Where the scores are."""
    given = [t.scores for t in graph._tensors] + [p.given for p in graph._score_parts()]
    devices = [d for s in given if hasattr(s, "devices") for d in s.devices()]
    kind = devices[0].platform if devices else "cpu"
    return "cpu" if kind == "cpu" else f"JAX on {kind}"


def _solve_now(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any
) -> Solution:
    task = _start(graph, temperature)
    warm = None
    if warm_start is not None:
        dual = task.inputs.model.num_dual
        warm = to_numpy(graph._check_multipliers(warm_start, task.batch, dual))
    raw = task.run(options, warm)
    _set_answer(graph, task)
    solution = Solution(
        jnp.asarray(task.objective()),
        raw,
        task.batch_shape,
        options.query,
        jnp.asarray,
        conflicts=conflicts_of(graph._factors, task.inputs, raw, task.batch_shape),
    )
    report_failures(raw, options.on_failure, solution, solution.conflicts)
    return solution


def _loss_now(graph: FactorGraph, target: Target, options: Options, temperature: Any) -> Any:
    task = _start(graph, temperature)
    values, _, _ = evaluate(task.inputs, target, options, task.ask)
    _set_answer(graph, task)
    conflicts = conflicts_of(graph._factors, task.inputs, task.raw, task.batch_shape)
    report_failures(task.raw, options.on_failure, conflicts=conflicts)
    return jnp.asarray(values.astype(task.raw.mu.dtype).reshape(task.batch_shape))


def _set_answer(graph: FactorGraph, task: Task) -> None:
    first = next(
        s
        for s in [t.scores for t in graph._tensors] + [p.given for p in graph._score_parts()]
        if hasattr(s, "devices")
    )
    values = [
        like(v, first if t.scores is None else t.scores)
        for v, t in zip(task.values(), graph._tensors, strict=True)
    ]
    factor_values = [
        like(v, p.given if hasattr(p.given, "devices") else first)
        for v, p in zip(task.factor_values(), graph._score_parts(), strict=True)
    ]

    def found(factor: int) -> tuple[Support, jax.Array]:
        support, probs = task.found(factor)
        return support, jnp.asarray(probs)

    graph._set_answer(values, factor_values, task.answers(graph._structured, found, jnp.asarray))
