"""The torch front: a custom operator with autograd, so that solves compile and differentiate.

The operator works on flat CPU tensors in float32 or float64. Everything around it (concatenating
variables, casts, copies between devices) is ordinary torch, which differentiates it by itself. In
eager mode an `autograd.Function` calls the engine directly, because the dispatch of a Python operator
costs more than a small solve; `torch.compile` sees the operator.
"""

from __future__ import annotations

from ast import literal_eval
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from factormax import engine
from factormax.arrays import is_tracing
from factormax.checks import Layout, check_scores
from factormax.compiled import Wiring, num_dual
from factormax.engine import Numbers, Options, RawSolution
from factormax.factors.base import Factor
from factormax.factors.pair import Pair
from factormax.solution import Solution

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["solve"]


# ---- The operator --------------------------------------------------------------------------------
#
# Few arguments, as each costs time at every call: what is not a tensor travels as one text.


@dataclass(frozen=True)
class Request:
    """What a solve is told besides tensors."""

    spec: str
    options: Options
    variables: Layout
    factors: Layout
    batch_shape: tuple[int, ...]

    def pack(self) -> str:
        """As a text."""
        o = self.options
        options = [o.method, str(o.tol), str(o.max_iter), str(o.step_size), o.on_failure]
        parts = [self.spec, ",".join(options), str(self.batch_shape)]
        for layout in (self.variables, self.factors):
            parts.append("\x1e".join([f"{name}\x1f{shape}" for name, shape in layout]))
        return "\x1d".join(parts)

    @staticmethod
    @lru_cache(maxsize=256)
    def unpack(text: str) -> Request:
        """The request that was packed."""
        spec, options, batch_shape, *layouts = text.split("\x1d")
        method, tol, max_iter, step_size, on_failure = options.split(",")
        variables, factors = (
            [(name, literal_eval(shape)) for name, shape in (e.split("\x1f") for e in entries)]
            for entries in ([e for e in part.split("\x1e") if e] for part in layouts)
        )
        return Request(
            spec,
            Options(method, float(tol), int(max_iter), float(step_size), on_failure),
            variables,
            factors,
            literal_eval(batch_shape),
        )


@torch.library.custom_op("factormax::solve", mutates_args=(), device_types="cpu")
def solve_op(
    eta_u: Tensor,
    eta_v: Tensor,
    mask: Tensor | None,
    literals: Tensor,
    params: Tensor,
    warm: Tensor | None,
    request: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """LP-SparseMAP of a batch: `(B, n)` scores and `(B, P)` factor scores to marginals of both."""
    asked = Request.unpack(request)
    wiring = Wiring(eta_u.shape[1], asked.spec, _numpy(literals))
    raw = _solve_checked(eta_u, eta_v, mask, wiring, _numpy(params), warm, asked)
    arrays = (
        raw.mu,
        raw.mu_v,
        raw.objective.astype(raw.mu.dtype, copy=False),
        raw.tau,
        raw.var_side,
        raw.row_side,
        np.stack([raw.primal_residual, raw.dual_residual]),
        np.stack([raw.iterations, raw.status]),
    )
    return tuple(map(torch.from_numpy, arrays))  # type: ignore[return-value]


@solve_op.register_fake
def _solve_fake(
    eta_u: Tensor,
    eta_v: Tensor,
    mask: Tensor | None,
    literals: Tensor,
    params: Tensor,
    warm: Tensor | None,
    request: str,
) -> tuple[Tensor, ...]:
    batch, n = eta_u.shape
    dual = num_dual(Request.unpack(request).spec)
    return (
        torch.empty_like(eta_u, memory_format=torch.contiguous_format),
        torch.empty_like(eta_v, memory_format=torch.contiguous_format),
        eta_u.new_empty((batch,)),
        eta_u.new_empty((batch, dual)),
        eta_u.new_empty((batch, n), dtype=torch.int8),
        eta_u.new_empty((batch, dual), dtype=torch.int8),
        eta_u.new_empty((2, batch), dtype=torch.float64),
        eta_u.new_empty((2, batch), dtype=torch.int32),
    )


@torch.library.custom_op("factormax::solve_vjp", mutates_args=(), device_types="cpu")
def vjp_op(
    grad_mu: Tensor,
    grad_mu_v: Tensor,
    grad_objective: Tensor,
    eta_v: Tensor,
    literals: Tensor,
    params: Tensor,
    mu: Tensor,
    mu_v: Tensor,
    var_side: Tensor,
    row_side: Tensor,
    counts: Tensor,
    request: str,
) -> tuple[Tensor, Tensor]:
    """The gradients of `factormax::solve` with respect to both kinds of scores."""
    asked = Request.unpack(request)
    grad_u, grad_v = engine.vjp(
        Wiring(mu.shape[1], asked.spec, _numpy(literals)),
        _numpy(eta_v),
        _numpy(params),
        RawSolution.for_vjp(*map(_numpy, (mu, mu_v, var_side, row_side, counts[1]))),
        _numpy(grad_mu),
        _numpy(grad_mu_v),
        _numpy(grad_objective),
        asked.options.on_failure,
    )
    return torch.from_numpy(grad_u), torch.from_numpy(grad_v)


@vjp_op.register_fake
def _vjp_fake(grad_mu: Tensor, grad_mu_v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(grad_mu, memory_format=torch.contiguous_format),
        torch.empty_like(grad_mu_v, memory_format=torch.contiguous_format),
    )


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, eta_v, _, literals, params, _, request = inputs
    mu, mu_v, _, _, var_side, row_side, _, counts = output
    ctx.save_for_backward(eta_v, literals, params, mu, mu_v, var_side, row_side, counts)
    ctx.request = request


def _backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    grad_u, grad_v = vjp_op(*grads[:3], *ctx.saved_tensors, ctx.request)
    return (grad_u, grad_v, None, None, None, None, None)


def _no_double_backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    raise RuntimeError(
        "factormax: a solve can't be differentiated twice. Its gradient is piecewise constant in "
        "the scores; call backward() without create_graph=True."
    )


solve_op.register_autograd(_backward, setup_context=_keep_for_backward)
vjp_op.register_autograd(_no_double_backward)


def _numpy(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


def _solve_checked(
    eta_u: Tensor,
    eta_v: Tensor,
    mask: Tensor | None,
    wiring: Wiring,
    params: Any,
    warm: Tensor | None,
    asked: Request,
) -> RawSolution:
    numbers = Numbers(_numpy(eta_u), _numpy(eta_v), params, None if mask is None else _numpy(mask))
    check_scores(numbers.eta_u, numbers.mask, asked.variables, asked.batch_shape)
    check_scores(numbers.eta_v, None, asked.factors, asked.batch_shape, allow_minus_inf=False)
    raw = engine.solve(wiring, numbers, asked.options, None if warm is None else _numpy(warm))
    engine.report_failures(raw, asked.options.on_failure)
    return raw


# ---- Eager ---------------------------------------------------------------------------------------


class EagerSolve(torch.autograd.Function):
    """The operator without its dispatch: `solve_op`, for eager mode."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        eta_u: Tensor,
        eta_v: Tensor,
        mask: Tensor | None,
        wiring: Wiring,
        params: Any,
        warm: Tensor | None,
        request: Request,
    ) -> tuple[Tensor, Tensor, Tensor, RawSolution]:
        """Marginals of both kinds of scores, the objective, and all the rest."""
        raw = _solve_checked(eta_u, eta_v, mask, wiring, params, warm, request)
        mu, mu_v = torch.from_numpy(raw.mu), torch.from_numpy(raw.mu_v)
        objective = torch.from_numpy(raw.objective.astype(raw.mu.dtype, copy=False))
        ctx.save_for_backward(eta_v, mu, mu_v)
        ctx.set_materialize_grads(False)
        ctx.solved = raw, wiring, params, request.options.on_failure
        return mu, mu_v, objective, raw

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # type: ignore[override]
        """The gradients of both kinds of scores."""
        eta_v, *_ = ctx.saved_tensors  # torch refuses if the values were changed in place
        raw, wiring, params, on_failure = ctx.solved
        if torch.is_grad_enabled():
            _no_double_backward(ctx)
        given = [None if g is None else _numpy(g) for g in grads[:3]]
        grad_u, grad_v = engine.vjp(wiring, _numpy(eta_v), params, raw, *given, on_failure)
        grad_eta_u, grad_eta_v = torch.from_numpy(grad_u), torch.from_numpy(grad_v)
        return grad_eta_u, grad_eta_v, None, None, None, None, None


# ---- The front -----------------------------------------------------------------------------------


def solve(graph: FactorGraph, options: Options, warm_start: Solution | None) -> Solution:
    """Solves a graph of torch scores."""
    batch_shape = graph.known_batch_shape()
    if is_tracing():
        mu, mu_v, objective, tau, _, _, residuals, counts = torch.ops.factormax.solve(
            *_op_args(graph, options, warm_start)
        )
        residual_pair = (residuals[0].detach(), residuals[1].detach())
        passes, codes = counts[0], counts[1]
        tau, wrap = tau.detach(), torch.as_tensor
    else:
        mu, mu_v, objective, raw = EagerSolve.apply(*_gather(graph, options, warm_start))
        residual_pair = (raw.primal_residual, raw.dual_residual)
        passes, codes = raw.iterations, raw.status
        tau, wrap = torch.from_numpy(raw.tau), torch.from_numpy

    single = len(graph.tensors) == 1
    values = []
    for t in graph.tensors:
        part = mu if single else mu[:, t.start : t.start + t.size]
        values.append(_like(part.reshape((*batch_shape, *t.shape)), t.scores, graph))
    factor_values: list[tuple[Factor, Any]] = []
    start = 0
    for f in graph.pairs():
        stop = start + f.index.shape[0]
        own = mu_v[:, start:stop].reshape((*batch_shape, *f.group_shape))
        factor_values.append((f, _like(_sum_to(own, len(batch_shape), f), f.scores, graph)))
        start = stop
    graph.set_answer(values, factor_values)
    return Solution(
        objective=_like(objective.reshape(batch_shape), None, graph),
        codes=codes.reshape(batch_shape),
        passes=passes.reshape(batch_shape),
        residuals=tuple(r.reshape(batch_shape) for r in residual_pair),  # type: ignore[arg-type]
        multipliers=tau,
        wrap=wrap,
    )


def _op_args(
    graph: FactorGraph, options: Options | None = None, warm_start: Solution | None = None
) -> tuple[Any, ...]:
    """The arguments of the operator for a graph."""
    gathered = _gather(graph, options or Options(), warm_start)
    eta_u, eta_v, mask, wiring, params, warm, request = gathered
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
    pairs = graph.pairs()

    columns = []
    for t in graph.tensors:
        if t.scores is None:
            columns.append(torch.zeros((batch, t.size), dtype=dtype))
        else:
            columns.append(t.scores.to("cpu", dtype).reshape((batch, t.size)))
    eta_u = columns[0] if len(columns) == 1 else torch.cat(columns, 1)

    scores = []
    for f in pairs:
        own = torch.as_tensor(f.scores).to("cpu", dtype)
        scores.append(own.expand((*batch_shape, *f.group_shape)).reshape((batch, f.index.shape[0])))
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
        graph.pair_layout(),
        () if is_tracing() else batch_shape,
    )
    return eta_u, eta_v, mask, wiring, graph.params(), warm, request


def _compute_dtype(graph: FactorGraph) -> torch.dtype:
    """float64 if any scores are, else float32; integers count as the default dtype."""
    for given in [t.scores for t in graph.tensors] + [f.scores for f in graph.pairs()]:
        if isinstance(given, Tensor) and _value_dtype(given) == torch.float64:
            return torch.float64
    return torch.float32


def _value_dtype(scores: Tensor) -> torch.dtype:
    return scores.dtype if scores.is_floating_point() else torch.get_default_dtype()


def _first_tensor(graph: FactorGraph) -> Tensor:
    given = [t.scores for t in graph.tensors] + [f.scores for f in graph.pairs()]
    return next(s for s in given if isinstance(s, Tensor))


def _like(value: Tensor, scores: Any, graph: FactorGraph) -> Tensor:
    """The value in the caller's dtype and on the caller's device."""
    model = scores if isinstance(scores, Tensor) else _first_tensor(graph)
    dtype = _value_dtype(model)
    if value.dtype == dtype and value.device == model.device:
        return value
    return value.to(model.device, dtype)


def _sum_to(own: Tensor, batch_dims: int, factor: Pair) -> Tensor:
    """Sums what came from one broadcast score: `(*batch, *shape of the scores as given)`."""
    shape = factor.own_shape
    extra = own.ndim - batch_dims - len(shape)
    for _ in range(extra):
        own = own.sum(batch_dims)
    for i, s in enumerate(shape):
        if s == 1 and own.shape[batch_dims + i] != 1:
            own = own.sum(batch_dims + i, keepdim=True)
    return own
