"""Times of compiled solves, and how much of them is torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import factormax as fm
from benchmarks.speed import Section, build_matching, require
from benchmarks.timing import in_turns, medians, ratios, table
from factormax._fronts.torch import traced

_LIBRARY: Any = torch.library.Library("factormax_benchmarks", "DEF")  # type: ignore[no-untyped-call]


def _define_empty() -> None:
    """An operator that is registered like a solve of 5x5 variables, and answers nothing."""
    _LIBRARY.define(f"empty{traced._SOLVE}")
    _LIBRARY.define(f"empty_tracked{traced._SOLVE}")
    _LIBRARY.define("empty_vjp(Tensor grad, Tensor eta_u, Tensor eta_v, Tensor sides) -> Tensor")

    def solve(eta_u: Tensor, eta_v: Tensor, *_: Any) -> tuple[Tensor, ...]:
        mu, mu_v = torch.empty_like(eta_u), torch.empty_like(eta_v)
        small = (eta_u.new_empty((1,)), eta_u.new_empty((1, 10)))
        sides = eta_u.new_empty((1, 36), dtype=torch.int8)
        return (mu, mu_v, *small, sides, eta_u.new_empty((5, 1), dtype=torch.float64))

    def vjp(grad: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(grad)

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = torch.ops.factormax_benchmarks.empty(*inputs)
            ctx.save_for_backward(*inputs[:2], output[4])
            ctx.mark_non_differentiable(*output[3:])
            ctx.set_materialize_grads(False)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            found = torch.ops.factormax_benchmarks.empty_vjp(grads[0], *ctx.saved_tensors)
            return (found, *[None] * 8)

    for name, function in (("empty", solve), ("empty_tracked", solve), ("empty_vjp", vjp)):
        _LIBRARY.impl(name, function, "CPU")
        torch.library.register_fake(f"factormax_benchmarks::{name}", function, lib=_LIBRARY)
    apply: Any = super(torch.autograd.Function, Empty).apply
    _LIBRARY.impl("empty_tracked", lambda *args: apply(*args), "Autograd")


_define_empty()


def matching(scores: Tensor) -> Tensor:
    fg, u = build_matching(scores)
    fg.solve()
    return u.value


def tree(scores: Tensor) -> Tensor:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    fg.add(fm.DepTree(u, projective=True))
    fg.solve()
    return u.value


def empty(scores: Tensor) -> Tensor:
    rest: Any = (None, None, [], [], [], [5, 5], "a graph")
    found = torch.ops.factormax_benchmarks.empty_tracked(
        scores.reshape(1, 25), scores.new_zeros((1, 0)), *rest
    )
    return found[0].reshape(5, 5)


def compiled(quick: bool) -> Section:
    """Forward and backward of compiled functions: torch's part, and the same in eager mode."""
    torch.manual_seed(0)
    small, trees = torch.randn(5, 5), torch.randn(16, 12, 12)

    def both(function: Callable[[Tensor], Tensor], scores: Tensor) -> Callable[[], object]:
        scores = scores.requires_grad_()
        grad = torch.randn_like(scores)
        return lambda: function(scores).backward(grad)

    def make(function: Callable[[Tensor], Tensor]) -> Any:
        return torch.compile(function, fullgraph=True)

    for function, scores in ((matching, small), (tree, trees)):
        error = float((make(function)(scores) - function(scores)).abs().max())
        require(error <= 1e-6, f"a compiled {function.__name__} is off by {error}")
    contestants = {
        "softmax, compiled": both(make(lambda x: torch.softmax(x, 1)), small),
        "empty operator, compiled": both(make(empty), small),
        "5x5 matching, compiled": both(make(matching), small),
        "5x5 matching, eager": both(matching, small),
        "16 trees of 12 words, compiled": both(make(tree), trees),
        "16 trees of 12 words, eager": both(tree, trees),
    }
    threads = torch.get_num_threads(), fm.get_num_threads()
    torch.set_num_threads(1)
    fm.set_num_threads(1)
    measured = in_turns(
        contestants, 50 if quick else 300, 5, in_a_row=dict.fromkeys(contestants, 5)
    )
    torch.set_num_threads(threads[0])
    fm.set_num_threads(threads[1])
    us = {name: 1e6 * seconds for name, seconds in medians(measured).items()}
    times_eager = ratios(measured, "5x5 matching, eager")
    text = table(
        "Compiled functions, build + forward + backward, one thread",
        ["", "µs", "times the matching, eager"],
        [[name, us[name], times_eager[name]] for name in us],
    )
    return text, {"us": us, "times_eager": times_eager}


SECTIONS: dict[str, Callable[[bool], Section]] = {"compiled": compiled}
