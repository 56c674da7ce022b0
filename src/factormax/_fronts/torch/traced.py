"""The torch operators: what `torch.compile` puts into a graph in place of a solve.

They work on flat tensors in float32 or float64, on the CPU or on a device; if the device has no
engine for the graph, the numbers are copied to the CPU and back. `factormax::solve` and
`factormax::solve_vjp` do the work, and know nothing of autograd; `factormax::solve_tracked`, which
is what Dynamo sees, combines them into a differentiable solve, and leaves no trace in the graphs
that are run. Whatever is not a tensor is passed as text and whole numbers: see
`factormax._fronts.torch.written`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from factormax import _engines
from factormax._columns import Columns
from factormax._fronts.torch.arrays import TorchSpace, as_numpy, one_row
from factormax._fronts.torch.flat import first_tensor, flat_numbers, set_answer
from factormax._fronts.torch.written import (
    Read,
    is_structured,
    num_dual,
    read,
    read_again,
    written,
)
from factormax._inputs import Inputs
from factormax._layout import Layout
from factormax._options import Options
from factormax._raw import RawSolution
from factormax._report import report_backward, report_failures
from factormax._space import NumpySpace
from factormax.arrays import may_be_traced
from factormax.checks import check_scores
from factormax.conflict import conflicts_of
from factormax.solution import Solution

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["solve_traced"]


# ---- The operators -------------------------------------------------------------------------------

_NUMBERS = "Tensor eta_u, Tensor eta_v, Tensor? mask"
# What has a default value came later: programs that were exported before do not pass it.
_GRAPH = (
    "Tensor[] literals, Tensor[] params, float[] numbers, SymInt[] sizes, str text, "
    "Tensor? shared=None, Tensor? heat=None"
)
_torch_library: Any = torch.library
_LIBRARY = _torch_library.Library("factormax", "DEF")
_SOLVE = (
    f"({_NUMBERS}, Tensor? warm, {_GRAPH}) -> (Tensor mu, Tensor mu_v, Tensor objective, "
    f"Tensor tau, Tensor sides, Tensor report)"
)
_TAGS: Any = [torch.Tag.pt2_compliant_tag]
if hasattr(torch.Tag, "cudagraph_unsafe"):  # it may wait for the device, or run on the CPU
    _TAGS.append(torch.Tag.cudagraph_unsafe)
# `torch.library.custom_op` would do the same, but takes several times as long per call.
_LIBRARY.define(f"solve{_SOLVE}", tags=_TAGS)
_LIBRARY.define(f"solve_tracked{_SOLVE}", tags=_TAGS)
_LIBRARY.define(
    f"solve_vjp(Tensor? grad_mu, Tensor? grad_mu_v, Tensor? grad_objective, {_NUMBERS}, "
    f"Tensor sides, Tensor? tau, Tensor? mu, Tensor? mu_v, {_GRAPH}) -> (Tensor grad_u, "
    f"Tensor grad_v, Tensor grad_shared, Tensor grad_heat)",
    tags=_TAGS,
)


def _inputs_of(
    check: bool,
    eta_u: Tensor,
    eta_v: Tensor,
    mask: Tensor | None,
    literals: Sequence[Tensor] | None,
    params: Sequence[Tensor] | None,
    numbers: Sequence[float] | None,
    sizes: Sequence[int] | None,
    text: str,
    shared: Tensor | None = None,
    heat: Tensor | None = None,
) -> tuple[Read, Inputs, Any]:
    """The query, its numbers, and the engine of their device (None if they are on the host).

    An empty list may arrive as None: AOTInductor does not distinguish them. Under a `vmap`, shared
    scores may have a row per instance.
    """
    asked = read_again(text, sizes or (), [as_numpy(t) for t in literals] if literals else ())
    arrays = [np.ascontiguousarray(as_numpy(p), dtype=np.float64) for p in params or ()]
    own = asked.params(numbers or (), arrays, check)
    device = str(eta_u.device)
    engine = _engines.engine_there(asked.model, asked.options, device)
    take, space = (as_numpy, NumpySpace) if engine is None else (Tensor.detach, TorchSpace)
    factor_scores: Any = take(eta_v)
    if shared is not None:
        row = one_row(shared)
        several = len(row) != 1
        divisor = None if heat is None else take(heat if several else heat.double())
        columns = Columns(take(row), factor_scores, asked.runs, divisor)
        factor_scores = columns.full(space) if several else columns
    here = None if mask is None else take(mask)
    where = "cpu" if engine is None else device
    given: Any = (asked.model, take(eta_u), factor_scores, own, here, (), None, where)
    return asked, Inputs(*given), engine


def _shared_of(graph: Sequence[Any]) -> tuple[Tensor | None, Tensor | None]:
    """The shared scores and the temperature among the arguments that describe a graph."""
    shared, heat, *_ = *graph[5:], None, None
    return shared, heat


def _solve(
    eta_u: Tensor, eta_v: Tensor, mask: Tensor | None, warm: Tensor | None, *graph: Any
) -> tuple[Tensor, ...]:
    """LP-SparseMAP of a batch: from the numbers of `FlatNumbers` to marginals."""
    asked, inputs, engine = _inputs_of(True, eta_u, eta_v, mask, *graph)
    if engine is not None:
        from factormax._fronts.torch.device import solve_flat

        return solve_flat(engine, inputs, asked.options, warm, partial(_check, asked))
    if inputs.core.needs_a_look:
        _check(asked, inputs)
    raw = _engines.solve(inputs, asked.options, None if warm is None else as_numpy(warm))
    if not raw.all_converged:
        conflicts = conflicts_of(asked.factors, inputs, raw)
        report_failures(raw, asked.options.on_failure, conflicts=conflicts)
    objective = raw.objective.astype(inputs.eta_u.dtype, copy=False)
    sides = raw.sides()
    found = _tensors(eta_u, raw.mu, raw.mu_v, objective, raw.tau, sides, raw.report())
    _keep(found[4], sides, raw)
    return found


def _check(asked: Read, inputs: Inputs) -> None:
    """Raises for scores that are NaN or +inf, or -inf where that is not allowed."""
    check_scores(inputs.eta_u, inputs.mask, asked.tensors, ())
    check_scores(inputs.eta_v, None, asked.scores, (), asked.allow_minus_inf)


def _tensors(like: Tensor, *arrays: Any) -> tuple[Tensor, ...]:
    """NumPy arrays as tensors on the device of `like`."""
    found = tuple(map(torch.from_numpy, arrays))
    return found if like.is_cpu else tuple([t.to(like.device) for t in found])


def _solve_fake(
    eta_u: Tensor, eta_v: Tensor, mask: Tensor | None, warm: Tensor | None, *graph: Any
) -> tuple[Tensor, ...]:
    literals, _, _, sizes, text, *_ = graph
    shared, _ = _shared_of(graph)
    batch, n = eta_u.shape
    scores = eta_v.shape[1] + (0 if shared is None else shared.shape[1])
    dual = num_dual(read(text, sizes, literals).factors)
    return (
        torch.empty_like(eta_u, memory_format=torch.contiguous_format),
        eta_v.new_empty((batch, scores)),
        eta_u.new_empty((batch,)),
        eta_u.new_empty((batch, dual)),
        eta_u.new_empty((batch, n + dual + 1), dtype=torch.int8),
        eta_u.new_empty((5, batch), dtype=torch.float64),
    )


def _vjp(
    grad_mu: Tensor | None,
    grad_mu_v: Tensor | None,
    grad_objective: Tensor | None,
    eta_u: Tensor,
    eta_v: Tensor,
    mask: Tensor | None,
    sides: Tensor,
    tau: Tensor | None,
    mu: Tensor | None,
    mu_v: Tensor | None,
    *graph: Any,
) -> tuple[Tensor, ...]:
    """The gradients of `factormax::solve` with respect to the scores and the temperature.

    tau is given if there are structured factors, mu and mu_v if the objective has a gradient.
    """
    asked, inputs, engine = _inputs_of(False, eta_u, eta_v, mask, *graph)
    shared, heat = _shared_of(graph)
    scores = [t for t in (eta_v, shared) if t is not None]

    def apart(rows: Tensor) -> list[Tensor]:
        return [rows] if shared is None else [*Columns.split(TorchSpace, rows, asked.runs)]

    if engine is not None:
        from factormax._fronts.torch.device import vjp_flat

        grad_u, grad_v = vjp_flat(engine, inputs, asked.options, sides, tau, grad_mu, grad_mu_v)
        grads = apart(grad_v)
    else:
        raw = _solution_of(inputs, asked.options, sides, tau)
        of_mu, of_mu_v = [None if g is None else as_numpy(g) for g in (grad_mu, grad_mu_v)]
        summed = heat is None and scores[-1].shape[0] == 1 != eta_u.shape[0]
        given = inputs, raw, of_mu, of_mu_v
        found_u, found_v, residual, worst = _engines.vjp(*given, summed=summed)
        blocks = [found_v.own, found_v.shared][-len(scores) :] if summed else [found_v]
        grad_u, *grads = _tensors(eta_u, found_u, *blocks)
        grads = grads if summed else apart(*grads)
        report_backward(residual, worst, found_u.dtype, asked.options.on_failure)
    if grad_objective is not None and mu is not None and mu_v is not None:
        # By Danskin, the objective's gradient is the solution itself; NaN where there is none.
        weight = grad_objective[:, None]
        grad_u = grad_u + torch.where(mu.isnan(), 0, mu * weight)
        more = apart(torch.where(mu_v.isnan(), 0, mu_v * weight))
        grads = [g + _with_rows_of(g, m) for g, m in zip(grads, more, strict=True)]
    grad_heat = eta_u.new_empty(0)
    if shared is not None and heat is not None:
        # d(eta / T) = d eta / T - (eta / T) dT / T
        grads[1] = grads[1] / heat
        finite = torch.where(shared.isfinite(), shared, 0)
        grad_heat = -(grads[1] * finite).sum(1, keepdim=True) / heat
    grads = [_with_rows_of(s, g).contiguous() for s, g in zip(scores, grads, strict=True)]
    if shared is None:
        grads.append(eta_u.new_empty(0))
    return grad_u, *grads, grad_heat


def _with_rows_of(other: Tensor, rows: Tensor) -> Tensor:
    """Rows, summed if the other has only one."""
    return rows if rows.shape == other.shape else rows.sum(0)[None]


#: The solutions whose sides torch still has, by the address of these.
_solved: dict[int, tuple[weakref.ref[Any], RawSolution]] = {}


def _keep(tensor: Tensor, sides: Any, raw: RawSolution) -> None:
    """Keeps a solution for its derivative, for as long as torch keeps its sides."""
    place = tensor.data_ptr()

    def forget(own: weakref.ref[Any]) -> None:
        if _solved.get(place, (None,))[0] is own:
            del _solved[place]

    _solved[place] = weakref.ref(sides, forget), raw


def _solution_of(inputs: Inputs, options: Options, sides: Tensor, tau: Tensor | None) -> Any:
    """The solution that these sides belong to; tau: its multipliers, if it has structures."""
    own, raw = _solved.get(sides.data_ptr(), (None, None))
    array = None if own is None else own()
    if array is not None and array.shape == sides.shape and sides.is_contiguous():
        return raw
    # torch has copied them, or this is another process. The number of structures varies, so the
    # operator can't return them: find them again.
    if tau is not None:
        return _engines.solve(inputs, options, as_numpy(tau))
    raw = RawSolution(inputs.core)
    raw.take_sides(np.ascontiguousarray(as_numpy(sides)))
    return raw


def _vjp_fake(
    grad_mu: Tensor | None,
    grad_mu_v: Tensor | None,
    grad_objective: Tensor | None,
    eta_u: Tensor,
    eta_v: Tensor,
    mask: Tensor | None,
    sides: Tensor,
    tau: Tensor | None,
    mu: Tensor | None,
    mu_v: Tensor | None,
    *graph: Any,
) -> tuple[Tensor, ...]:
    return tuple(
        [
            eta_u.new_empty(0)
            if t is None
            else torch.empty_like(t, memory_format=torch.contiguous_format)
            for t in (eta_u, eta_v, *_shared_of(graph))
        ]
    )


class TracedSolve(torch.autograd.Function):
    """The operators as one function that can be differentiated once."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        """What `factormax::solve` returns."""
        output = torch.ops.factormax.solve(*inputs)
        eta_u, eta_v, mask, _, literals, params, *rest = inputs
        numbers, sizes, text, *more = rest
        mu, mu_v, _, tau, sides, report = output
        # Keep mu and mu_v for a gradient of the objective, tau for structures.
        own = (eta_u, eta_v, mask, sides, tau if is_structured(text) else None, mu, mu_v)
        ctx.save_for_backward(*own, *literals, *params, *more)
        ctx.mark_non_differentiable(tau, sides, report)
        ctx.set_materialize_grads(False)
        ctx.rest = (len(literals), len(params), numbers, sizes, text)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores, and of the temperature of shared ones."""
        lists, arrays, *rest = ctx.rest
        *numbers, mu, mu_v = ctx.saved_tensors[:7]
        kept = ctx.saved_tensors[7:]
        literals, params = kept[:lists], kept[lists : lists + arrays]
        more = kept[lists + arrays :]
        if grads[2] is None:
            mu = mu_v = None
        grad_u, grad_v, *others = torch.ops.factormax.solve_vjp(
            *grads[:3], *numbers, mu, mu_v, literals, params, *rest, *more
        )
        found = [None if t is None else g for t, g in zip(more, others, strict=False)]
        return grad_u, grad_v, *[None] * 7, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Raises an error that breaks the graph: outside of it, a solve has a forward mode."""
        raise NotImplementedError(
            "factormax: a solve in forward mode can't be compiled. Without fullgraph=True the "
            "graph breaks there, and the solve runs outside of it."
        )


class _Hidden:
    """A function that torch's compiler does not trace, wherever it is called from."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.hidden: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if not may_be_traced():
            return self.function(*args)
        if self.hidden is None:  # only now, because marking a function imports the whole compiler
            disable: Any = torch.compiler.disable
            self.hidden = disable(self.function)
        assert self.hidden is not None
        return self.hidden(*args)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("solve", _Hidden(_solve), _key)
    _LIBRARY.impl("solve_tracked", _Hidden(_solve), _key)
    _LIBRARY.impl("solve_vjp", _Hidden(_vjp), _key)
for _name, _fake in (
    ("solve", _solve_fake),
    ("solve_tracked", _solve_fake),
    ("solve_vjp", _vjp_fake),
):
    torch.library.register_fake(f"factormax::{_name}", _fake, lib=_LIBRARY)
_apply: Any = super(torch.autograd.Function, TracedSolve).apply


def _tracked(*args: Any) -> Any:
    """Called once per level inside a transform of `torch.func`."""
    if not torch._C._are_functorch_transforms_active():
        return _apply(*args)
    from torch._functorch import autograd_function

    one_level: Any = autograd_function
    with one_level.enable_single_level_autograd_function():
        return _apply(*args)


_LIBRARY.impl("solve_tracked", _tracked, "Autograd")


def _merged(size: int, rows: int, tensor: Any, dim: int | None) -> Any:
    """From `(1 | rows, ...)` with another axis of samples somewhere, or nowhere, to all rows."""
    if tensor is None:
        return None
    full = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return full.expand(size, rows, *full.shape[2:]).reshape(size * rows, *full.shape[2:])


def _rows_of(tensor: Tensor, dim: int | None) -> int:
    return tensor.shape[1 if dim == 0 else 0]


def _vmap_solve(operator: Any, info: Any, in_dims: Any, *args: Any) -> Any:
    """Puts the instances of all samples into one batch."""
    size, rows = info.batch_size, _rows_of(args[0], in_dims[0])
    *several, report = operator(*_merged_args(size, rows, 4, args, in_dims))
    split = [t.reshape(size, rows, *t.shape[1:]) for t in several]
    return (*split, report.reshape(5, size, rows)), (*[0] * len(split), 1)


def _vmap_vjp(info: Any, in_dims: Any, *args: Any) -> Any:
    """The same for the derivative; gradients of scores that a sample's instances share add up."""
    size, rows = info.batch_size, _rows_of(args[3], in_dims[3])
    found = torch.ops.factormax.solve_vjp(*_merged_args(size, rows, 10, args, in_dims))
    given = [*args[3:5], *_shared_of(args[10:])]
    dims = [*in_dims[3:5], *_shared_of(in_dims[10:])]
    grads: list[Any] = []
    for tensor, dim, grad in zip(given, dims, found, strict=True):
        if tensor is None:
            grads.append(grad.expand(size, *grad.shape))
            continue
        own = grad.reshape(size, rows, grad.shape[1])
        grads.append(own.sum(1, keepdim=True) if _rows_of(tensor, dim) == 1 != rows else own)
    return tuple(grads), (0,) * len(grads)


def _merged_args(size: int, rows: int, count: int, args: Any, in_dims: Any) -> list[Any]:
    """The arguments of an operator for all samples at once: `count` numbers, then the graph."""
    merged = partial(_merged, size, rows)
    literals, params, *rest = args[count : count + 5]
    return [
        *map(merged, args[:count], in_dims[:count]),
        literals,
        list(map(merged, params, in_dims[count + 1])),
        *rest,
        *map(merged, args[count + 5 :], in_dims[count + 5 :]),
    ]


for _name in ("solve", "solve_tracked"):
    _operator = getattr(torch.ops.factormax, _name)
    _rule = partial(_vmap_solve, _operator)
    _torch_library.register_vmap(f"factormax::{_name}", _rule, lib=_LIBRARY)
_torch_library.register_vmap("factormax::solve_vjp", _vmap_vjp, lib=_LIBRARY)


# ---- The front -----------------------------------------------------------------------------------


def solve_traced(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any
) -> Solution:
    """Solves a graph through the operator, which `torch.compile` can put into a graph."""
    layout = Layout.of(graph)
    mu, mu_v, objective, tau, _, report = torch.ops.factormax.solve_tracked(
        *_op_args(graph, layout, options, warm_start, temperature)
    )
    structures: list[Any] = [(f, None) for f in graph._structured]
    graph._traced = (options, warm_start, temperature)
    numbers = (mu, mu_v, objective, tau, report)
    return set_answer(graph, layout, *numbers, options, structures, _engine_of(mu.device))


def _engine_of(device: torch.device) -> str:
    """What `solution.engine` says: whether a device has an engine is unknown while tracing."""
    if device.type == "cpu":
        return "cpu"
    return f"{device.type}, or cpu (a compiled solve does not tell which)"


def _op_args(
    graph: FactorGraph,
    layout: Layout,
    options: Options,
    warm_start: Solution | None,
    temperature: Any,
) -> tuple[Any, ...]:
    """The arguments of the operator for a graph."""
    place = first_tensor(graph).device
    if place.type not in ("cpu", "cuda"):  # the operators support no other device
        place = torch.device("cpu")
    eta_u, eta_v, shared, heat, mask = flat_numbers(graph, layout, temperature, place)
    out = written(graph, options, None if shared is None else layout.is_shared)
    warm = None
    if warm_start is not None:
        dual = num_dual(read(out.text, out.sizes, out.literals).factors)
        tau = graph._check_multipliers(warm_start, layout.batch, dual)
        warm = torch.as_tensor(tau).detach().to(place, eta_u.dtype)
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
        *(() if shared is None else (shared, heat)),
    )
