"""The torch operators: what `torch.compile` puts into a graph in place of a solve.

They work on flat CPU tensors in float32 or float64, and have fake implementations and autograd.
What is not a tensor travels as a text and whole numbers: see `factormax._fronts.torch.written`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from factormax import _engines
from factormax._core import Numbers
from factormax._engines import engine_of
from factormax._fronts.torch.arrays import (
    TorchSpace,
    as_numpy,
    compute_dtype,
    match,
    to_cpu,
)
from factormax._fronts.torch.written import Read, num_dual, read, written
from factormax._inputs import Inputs
from factormax._layout import Layout
from factormax._options import Options
from factormax._raw import RawSolution
from factormax._report import report_backward, report_failures
from factormax.checks import check_scores
from factormax.queries.solve import with_objective
from factormax.solution import Details, Solution

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["refuse_second_derivative", "solve_op", "solve_traced"]


# ---- The operators -------------------------------------------------------------------------------


def _inputs_of(asked: Read, eta_u: Tensor, eta_v: Tensor, mask: Tensor | None) -> Inputs:
    params = [p for f in asked.factors for p in f._params]
    return Inputs(
        asked.model(eta_u.shape[1]),
        np.ascontiguousarray(as_numpy(eta_u)),
        np.ascontiguousarray(as_numpy(eta_v)),
        params,
        None if mask is None else as_numpy(mask),
    )


def _read_tensors(
    text: str,
    sizes: Sequence[int],
    literals: Sequence[Tensor],
    numbers: Sequence[float],
    params: Sequence[Tensor],
) -> Read:
    given = [np.ascontiguousarray(as_numpy(p), dtype=np.float64) for p in params]
    return read(text, sizes, [as_numpy(t) for t in literals], numbers, given)


@torch.library.custom_op("factormax::solve", mutates_args=(), device_types="cpu")
def solve_op(
    eta_u: Tensor,
    eta_v: Tensor,
    mask: Tensor | None,
    warm: Tensor | None,
    literals: Sequence[Tensor],
    params: Sequence[Tensor],
    numbers: Sequence[float],
    sizes: Sequence[int],
    text: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """LP-SparseMAP of a batch: scores `(B, n)`, those of factors `(1 | B, P)`, to marginals."""
    asked = _read_tensors(text, sizes, literals, numbers, params)
    for f in asked.factors:  # could not be looked at while tracing
        f.check_params(f._params, f._size, f.kind)
    inputs = _inputs_of(asked, eta_u, eta_v, mask)
    if inputs.core.scores == Numbers.bad:
        check_scores(inputs.eta_u, inputs.mask, asked.tensors, ())
    if inputs.core.factor_scores != Numbers.finite:
        check_scores(inputs.eta_v, None, asked.scores, (), asked.allow_minus_inf)
    raw = _engines.solve(inputs, asked.options, None if warm is None else as_numpy(warm))
    report_failures(raw, asked.options.on_failure)
    arrays = (
        raw.mu,
        raw.mu_v,
        raw.objective.astype(raw.mu.dtype, copy=False),
        raw.tau,
        raw.var_side,
        raw.row_side,
        np.stack([raw.primal_residual, raw.dual_residual]),
        np.stack([raw.iterations, raw.status, raw.oracle_calls]),
    )
    return tuple(map(torch.from_numpy, arrays))  # type: ignore[return-value]


@solve_op.register_fake
def _solve_fake(
    eta_u: Tensor,
    eta_v: Tensor,
    mask: Tensor | None,
    warm: Tensor | None,
    literals: Sequence[Tensor],
    params: Sequence[Tensor],
    numbers: Sequence[float],
    sizes: Sequence[int],
    text: str,
) -> tuple[Tensor, ...]:
    batch, n = eta_u.shape
    dual = num_dual(read(text, sizes, literals, numbers, params).factors)
    return (
        torch.empty_like(eta_u, memory_format=torch.contiguous_format),
        eta_v.new_empty((batch, eta_v.shape[1])),
        eta_u.new_empty((batch,)),
        eta_u.new_empty((batch, dual)),
        eta_u.new_empty((batch, n), dtype=torch.int8),
        eta_u.new_empty((batch, dual), dtype=torch.int8),
        eta_u.new_empty((2, batch), dtype=torch.float64),
        eta_u.new_empty((3, batch), dtype=torch.int32),
    )


@torch.library.custom_op("factormax::solve_vjp", mutates_args=(), device_types="cpu")
def vjp_op(
    grad_mu: Tensor,
    grad_mu_v: Tensor,
    grad_objective: Tensor,
    eta_u: Tensor,
    eta_v: Tensor,
    mask: Tensor | None,
    mu: Tensor,
    mu_v: Tensor,
    tau: Tensor,
    var_side: Tensor,
    row_side: Tensor,
    counts: Tensor,
    literals: Sequence[Tensor],
    params: Sequence[Tensor],
    numbers: Sequence[float],
    sizes: Sequence[int],
    text: str,
) -> tuple[Tensor, Tensor]:
    """The gradients of `factormax::solve` with respect to both kinds of scores."""
    asked = _read_tensors(text, sizes, literals, numbers, params)
    inputs = _inputs_of(asked, eta_u, eta_v, mask)
    if inputs.model.num_structured:
        # The structures are of no fixed number, so the operator can't return them: find them again.
        raw = _engines.solve(inputs, asked.options, as_numpy(tau))
    else:
        batch, n = mu.shape
        raw = RawSolution.of_size(batch, n, mu_v.shape[1], tau.shape[1], inputs.eta_u.dtype)
        raw.mu[...], raw.mu_v[...] = as_numpy(mu), as_numpy(mu_v)
        raw.var_side[...], raw.row_side[...] = as_numpy(var_side), as_numpy(row_side)
        raw.status[...] = as_numpy(counts[1])
    grad_u, grad_v, residual, worst = _engines.vjp(
        inputs, raw, as_numpy(grad_mu), as_numpy(grad_mu_v)
    )
    report_backward(residual, worst, raw.mu.dtype, asked.options.on_failure)
    grad_u, grad_v = with_objective(raw, grad_u, grad_v, as_numpy(grad_objective))
    if len(eta_v) == 1 < len(grad_v):
        grad_v = grad_v.sum(axis=0, keepdims=True)
    return torch.from_numpy(grad_u), torch.from_numpy(grad_v)


@vjp_op.register_fake
def _vjp_fake(
    grad_mu: Tensor,
    grad_mu_v: Tensor,
    grad_objective: Tensor,
    eta_u: Tensor,
    eta_v: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(eta_u, memory_format=torch.contiguous_format),
        torch.empty_like(eta_v, memory_format=torch.contiguous_format),
    )


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    eta_u, eta_v, mask, _, literals, params, numbers, sizes, text = inputs
    mu, mu_v, _, tau, var_side, row_side, _, counts = output
    ctx.save_for_backward(
        eta_u, eta_v, mask, mu, mu_v, tau, var_side, row_side, counts, *literals, *params
    )
    ctx.rest = (len(literals), numbers, sizes, text)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    lists, numbers, sizes, text = ctx.rest
    kept, arrays = ctx.saved_tensors[:9], list(ctx.saved_tensors[9:])
    literals, params = arrays[:lists], arrays[lists:]
    grad_u, grad_v = vjp_op(*grads[:3], *kept, literals, params, numbers, sizes, text)
    # One for each tensor of a list; torch takes an empty list of numbers for one of tensors.
    nothing: list[Any] = [[None] * len(literals), [None] * len(params)]
    nothing += [None if given else [] for given in (numbers, sizes)]
    return (grad_u, grad_v, None, None, *nothing, None)


def refuse_second_derivative(ctx: Any, *grads: Tensor) -> NoReturn:
    """Raises: the gradient of a solve is as far as it goes."""
    raise RuntimeError(
        "factormax: a solve can't be differentiated twice. Its gradient is piecewise constant in "
        "the scores; call backward() without create_graph=True."
    )


solve_op.register_autograd(_backward, setup_context=_keep_for_backward)
vjp_op.register_autograd(refuse_second_derivative)


# ---- The front -----------------------------------------------------------------------------------


def solve_traced(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any
) -> Solution:
    """Solves a graph through the operator, which `torch.compile` can put into a graph."""
    layout = Layout.of(graph)
    mu, mu_v, objective, tau, _, _, residuals, counts = torch.ops.factormax.solve(
        *_op_args(graph, layout, options, warm_start, temperature)
    )
    first = _first_tensor(graph)
    values = [
        match(value, first if t.scores is None else t.scores)
        for value, t in zip(layout.by_tensor(mu), graph._tensors, strict=True)
    ]
    factor_values = [
        (part, match(own, part.given if isinstance(part.given, Tensor) else first))
        for own, part in zip(layout.by_part(TorchSpace, mu_v), graph._score_parts(), strict=True)
    ]
    graph._set_answer(values, factor_values, [(f, None) for f in graph._structured])
    graph._traced = (options, warm_start, temperature)
    details = Details(
        status=counts[1],
        iterations=counts[0],
        oracle_calls=counts[2],
        primal_residual=residuals[0].detach(),
        dual_residual=residuals[1].detach(),
        tau=tau.detach(),
        engine=engine_of(str(first.device)),
    )
    shape = layout.batch_shape
    return Solution(match(objective.reshape(shape), first), details, shape)


def _op_args(
    graph: FactorGraph,
    layout: Layout,
    options: Options,
    warm_start: Solution | None,
    temperature: Any,
) -> tuple[Any, ...]:
    """The arguments of the operator for a graph."""
    parts = graph._score_parts()
    dtype = compute_dtype([t.scores for t in graph._tensors] + [p.given for p in parts])
    scores = [None if t.scores is None else to_cpu(t.scores, dtype) for t in graph._tensors]
    own = [to_cpu(torch.as_tensor(p.given), dtype) for p in parts]
    mask = None
    if graph._masked:
        masks = [None if t.mask is None else torch.as_tensor(t.mask).cpu() for t in graph._tensors]
        mask = layout.flat_mask(TorchSpace, masks)
    eta_u = layout.flat_scores(TorchSpace, scores, dtype)
    eta_v = layout.flat_factor_scores(TorchSpace, own, dtype)
    if temperature is not None:
        heat = to_cpu(torch.as_tensor(temperature), dtype)
        divisor = heat.expand(layout.batch_shape).reshape((-1, 1))
        eta_u, eta_v = cooled(eta_u, divisor), cooled(eta_v, divisor)
    out = written(graph, options)
    warm = None
    if warm_start is not None:
        dual = num_dual(read(out.text, out.sizes, out.literals, out.numbers, out.params).factors)
        tau = graph._check_multipliers(warm_start, layout.batch, dual)
        warm = torch.as_tensor(tau).detach().to("cpu", dtype)
    return (
        eta_u,
        eta_v,
        mask,
        warm,
        [torch.as_tensor(a) for a in out.literals],
        [torch.as_tensor(a) for a in out.params],
        out.numbers,
        out.sizes,
        out.text,
    )


def cooled(scores: Tensor, temperature: Tensor) -> Tensor:
    """Scores divided by a temperature that may need a gradient; −inf stays −inf.

    A temperature that is not positive makes them NaN, which a solve reports.
    """
    finite = scores.isfinite()
    divisor = torch.where(temperature > 0, temperature, torch.nan)
    # What is not finite must not reach the gradient of the temperature: 0 times it is NaN.
    return torch.where(finite, torch.where(finite, scores, 0) / divisor, scores)


def _first_tensor(graph: FactorGraph) -> Tensor:
    given = [t.scores for t in graph._tensors] + [p.given for p in graph._score_parts()]
    return next(s for s in given if isinstance(s, Tensor))
