"""The torch operator: what `torch.compile` puts into a graph in place of a solve.

It works on flat CPU tensors in float32 or float64, has a fake implementation and autograd, and
takes few arguments, as each costs time at every call: what is not a tensor travels as one text.
"""

from __future__ import annotations

from ast import literal_eval
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from factormax import engine
from factormax.checks import Layout, all_finite, check_scores
from factormax.compiled import Wiring, num_dual, parse_spec
from factormax.engine import Numbers, Options, RawSolution

__all__ = ["Request", "as_numpy", "refuse_second_derivative", "solve_op"]


@dataclass(frozen=True)
class Request:
    """What a solve is told besides tensors."""

    spec: str
    options: Options
    variables: Layout
    factors: Layout
    allow_minus_inf: list[bool]  # of the factors' scores
    batch_shape: tuple[int, ...]

    def pack(self) -> str:
        """As a text."""
        o = self.options
        numbers = [str(n) for n in (o.tol, o.max_iter, o.max_inner_iter, o.step_size)]
        allowed = "".join(["1" if a else "0" for a in self.allow_minus_inf])
        parts = [self.spec, ",".join([o.method, *numbers, o.on_failure]), allowed]
        parts.append(str(self.batch_shape))
        for layout in (self.variables, self.factors):
            parts.append("\x1e".join([f"{name}\x1f{shape}" for name, shape in layout]))
        return "\x1d".join(parts)

    @staticmethod
    @lru_cache(maxsize=256)
    def unpack(text: str) -> Request:
        """The request that was packed."""
        spec, options, allowed, batch_shape, *layouts = text.split("\x1d")
        method, tol, max_iter, max_inner_iter, step_size, on_failure = options.split(",")
        variables, factors = (
            [(name, literal_eval(shape)) for name, shape in (e.split("\x1f") for e in entries)]
            for entries in ([e for e in part.split("\x1e") if e] for part in layouts)
        )
        return Request(
            spec,
            Options(
                method,
                float(tol),
                int(max_iter),
                int(max_inner_iter),
                float(step_size),
                on_failure,
            ),
            variables,
            factors,
            [a == "1" for a in allowed],
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
    wiring = Wiring(eta_u.shape[1], asked.spec, as_numpy(literals))
    numbers = Numbers(
        as_numpy(eta_u), as_numpy(eta_v), as_numpy(params), None if mask is None else as_numpy(mask)
    )
    if not all_finite(numbers.eta_u):
        check_scores(numbers.eta_u, numbers.mask, asked.variables, asked.batch_shape)
    if not all_finite(numbers.eta_v):
        check_scores(numbers.eta_v, None, asked.factors, asked.batch_shape, asked.allow_minus_inf)
    raw = engine.solve(wiring, numbers, asked.options, None if warm is None else as_numpy(warm))
    engine.report_failures(raw, asked.options.on_failure)
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
    literals: Tensor,
    params: Tensor,
    mu: Tensor,
    mu_v: Tensor,
    tau: Tensor,
    var_side: Tensor,
    row_side: Tensor,
    counts: Tensor,
    request: str,
) -> tuple[Tensor, Tensor]:
    """The gradients of `factormax::solve` with respect to both kinds of scores."""
    asked = Request.unpack(request)
    wiring = Wiring(mu.shape[1], asked.spec, as_numpy(literals))
    if any(entry.cls.structured for entry in parse_spec(asked.spec)):
        # The structures are of no fixed number, so the operator can't return them: find them again.
        numbers = Numbers(
            as_numpy(eta_u),
            as_numpy(eta_v),
            as_numpy(params),
            None if mask is None else as_numpy(mask),
        )
        raw = engine.solve(wiring, numbers, asked.options, as_numpy(tau))
    else:
        raw = RawSolution.for_vjp(*map(as_numpy, (mu, mu_v, var_side, row_side, counts[1])))
    grad_u, grad_v = engine.vjp(
        wiring,
        as_numpy(eta_v),
        as_numpy(params),
        raw,
        as_numpy(grad_mu),
        as_numpy(grad_mu_v),
        as_numpy(grad_objective),
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
    eta_u, eta_v, mask, literals, params, _, request = inputs
    mu, mu_v, _, tau, var_side, row_side, _, counts = output
    ctx.save_for_backward(
        eta_u, eta_v, mask, literals, params, mu, mu_v, tau, var_side, row_side, counts
    )
    ctx.request = request


def _backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    grad_u, grad_v = vjp_op(*grads[:3], *ctx.saved_tensors, ctx.request)
    return (grad_u, grad_v, None, None, None, None, None)


def refuse_second_derivative(ctx: Any, *grads: Tensor) -> NoReturn:
    """Raises: the gradient of a solve is as far as it goes."""
    raise RuntimeError(
        "factormax: a solve can't be differentiated twice. Its gradient is piecewise constant in "
        "the scores; call backward() without create_graph=True."
    )


solve_op.register_autograd(_backward, setup_context=_keep_for_backward)
vjp_op.register_autograd(refuse_second_derivative)


def as_numpy(tensor: Tensor) -> Any:
    """The memory of a CPU tensor, without its history."""
    return tensor.detach().numpy()
