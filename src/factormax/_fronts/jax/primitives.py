"""JAX primitives: a solve, and the application of its Jacobian.

The Jacobian of a solve is symmetric and piecewise constant in the scores: one operation, which
applies it, is the Jacobian–vector product, the vector–Jacobian product and its own derivative.
All arrays are flat, with a row per instance; `vmap` adds instances, or directions of the Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from factormax._fronts.jax import ffi, host
from factormax._fronts.jax.arrays import JaxSpace, cooled
from factormax._fronts.jax.plan import Plan
from factormax.errors import GraphError
from factormax.status import Status

__all__ = ["features", "is_solved", "solve"]

# Parts of JAX that have no types, or whose names depend on its version.
lax: Any = jax.lax
core: Any = jax.core
ad: Any = import_module("jax.interpreters.ad")
batching: Any = import_module("jax.interpreters.batching")
mlir: Any = import_module("jax.interpreters.mlir")

try:  # saves copies, from JAX 0.6.2 on
    from jax.experimental.buffer_callback import buffer_callback as _buffer_callback
except ImportError:
    _buffer_callback = None  # type: ignore[assignment]


def solve(plan: Plan, *arrays: Any) -> list[jax.Array]:
    """Marginals of variables and scores, objective, multipliers, sides, and a report.

    The report has a row for each instance: residuals, iterations, status and oracle calls; for
    linear programs also the upper bound, and whether the answer is integral.
    """
    return _bind(_SOLVE, arrays, plan)


def features(plan: Plan, target: Any, *arrays: Any) -> list[jax.Array]:
    """The features of a target, which have no derivative, and whether it satisfies the factors."""
    return _bind(_FEATURES, [lax.stop_gradient(a) for a in (target, *arrays)], plan)


# ---- How a primitive is made ---------------------------------------------------------------------


def _bind(primitive: Any, arrays: Sequence[Any], plan: Plan) -> list[jax.Array]:
    return primitive.bind(*_vary_alike(arrays), plan=plan)  # type: ignore[no-any-return]


def _vary_alike(arrays: Sequence[Any]) -> Sequence[Any]:
    """Inside `shard_map`, a primitive's arrays must vary over the same axes of the mesh."""
    if not hasattr(jax, "typeof"):  # older versions do not track this
        return arrays
    axes = [_varying(a) for a in arrays]
    every = frozenset().union(*axes)
    if not every:
        return arrays
    return [
        a if own == every else _varied(a, tuple(every - own))
        for a, own in zip(arrays, axes, strict=True)
    ]


#: The abstract value of an array; the function has another name since JAX 0.6.
_type_of: Any = getattr(jax, "typeof", None) or core.get_aval


def _varying(array: Any) -> frozenset[Any]:
    kind = _type_of(array)
    found = kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())
    return frozenset(found)


def _varied(array: Any, axes: tuple[Any, ...]) -> Any:
    if hasattr(lax, "pcast"):
        return lax.pcast(array, axes, to="varying")
    return lax.pvary(array, axes)


Shapes = Callable[..., list[tuple[tuple[int, ...], Any]]]


def _primitive(name: str, run: Callable[..., Any], shapes: Shapes) -> Any:
    """A primitive that runs on the host.

    shapes: finds the shapes of the results, which have as many dimensions as the first array.
    """
    primitive: Any = Primitive(name)
    primitive.multiple_results = True

    def implement(*arrays: Any, plan: Plan) -> list[jax.Array]:
        # Not traced by jit: the numbers are known, and failures can be reported.
        found = run(plan, [np.asarray(a) for a in arrays], quiet=False)
        return [jnp.asarray(a) for a in found]

    def abstract(*avals: Any, plan: Plan) -> list[Any]:
        like = avals[0]
        return [like.update(shape=s, dtype=d, weak_type=False) for s, d in shapes(plan, *avals)]

    primitive.def_impl(implement)
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, partial(_lower, run))
    _allow_in_old_shard_map(primitive)
    return primitive


def _lower(run: Callable[..., Any], ctx: Any, *operands: Any, plan: Plan) -> Any:
    """A direct call from XLA to the core, or else a callback to Python with NumPy arrays."""
    if run is host.apply_jacobian:
        host.require_forward_mode(plan)
    on_cpu = tuple(ctx.module_context.platforms) == ("cpu",)
    by_ffi = ffi.lowering(run.__name__, plan) if on_cpu else None
    if by_ffi is not None:
        return by_ffi(ctx, *operands)
    natively = getattr(plan.native, run.__name__, None)

    def write(places: list[Any], arrays: list[Any]) -> None:
        if natively is None or not natively(arrays, places):
            host.write(run, plan, arrays, places)

    if _buffer_callback is not None and on_cpu:
        struct: Any = jax.ShapeDtypeStruct
        shapes = [struct(a.shape, a.dtype) for a in ctx.avals_out]

        def call(_: Any, places: Any, *arrays: Any) -> None:
            write([np.asarray(p) for p in places], [np.asarray(a) for a in arrays])

        lower = mlir.lower_fun(_buffer_callback(call, shapes), multiple_results=True)
        return lower(ctx, *operands)

    def returned(*arrays: Any) -> tuple[Any, ...]:
        places = [np.empty(a.shape, a.dtype) for a in ctx.avals_out]
        write(places, [np.asarray(a) for a in arrays])
        return tuple(places)

    found, *_ = mlir.emit_python_callback(
        ctx, returned, None, operands, ctx.avals_in, ctx.avals_out, has_side_effect=False
    )
    return found


def _allow_in_old_shard_map(primitive: Any) -> None:
    """Up to JAX 0.6, `shard_map` must be told that a primitive's results vary as its arrays do."""
    if hasattr(jax, "shard_map"):
        return
    import jax.experimental.shard_map as module

    for name in ("register_standard_check", "register_standard_rewrite"):
        getattr(module, name, lambda _: None)(primitive)


def _batched_rows(array: Any, dim: Any, size: int, rows: int, full: bool) -> Any:
    """`(1 | rows, k)` with a mapped dimension, or without, as `(1 | size * rows, k)`."""
    if dim is None:
        if array.shape[0] == 1 and not full:
            return array
        array = jnp.broadcast_to(array, (size, *array.shape))
    else:
        array = jnp.moveaxis(array, dim, 0)
    if array.shape[1] != rows:
        array = jnp.broadcast_to(array, (size, rows, array.shape[2]))
    return array.reshape((size * rows, array.shape[2]))


def _size_of(arrays: Sequence[Any], dims: Sequence[Any]) -> int:
    return int(next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None))


def _is_mapped(dim: Any) -> bool:
    return dim is not None and dim is not getattr(batching, "not_mapped", None)


def _by_instances(
    primitive: Any, full: Callable[[Plan, int], bool], arrays: Any, dims: Any, *, plan: Plan
) -> Any:
    """The batching rule: adds instances. full: whether an array needs a row for each."""
    dims = [d if _is_mapped(d) else None for d in dims]
    size = _size_of(arrays, dims)
    rows = arrays[0].shape[0] if dims[0] is None else np.delete(arrays[0].shape, dims[0])[0]
    given = [
        _batched_rows(a, d, size, int(rows), full(plan, i))
        for i, (a, d) in enumerate(zip(arrays, dims, strict=True))
    ]
    found = _bind(primitive, given, plan)
    return [f.reshape((size, int(rows), f.shape[1])) for f in found], [0] * len(found)


# ---- Solve ---------------------------------------------------------------------------------------


def _solve_shapes(plan: Plan, eta_u: Any, *_: Any) -> list[tuple[tuple[int, ...], Any]]:
    batch, dtype, model = eta_u.shape[0], eta_u.dtype, plan.model
    return [
        ((batch, model.num_variables), dtype),
        ((batch, model.num_scores), dtype),
        ((batch, 1), dtype),
        ((batch, plan.num_dual), dtype),
        ((batch, plan.num_sides), np.dtype(np.int8)),
        ((batch, plan.num_reported), dtype),
    ]


_SOLVE = _primitive("factormax_solve", host.solve, _solve_shapes)
batching.primitive_batchers[_SOLVE] = partial(
    _by_instances, _SOLVE, lambda plan, i: i in (0, plan.held_place)
)


def is_solved(report: Any) -> Any:
    """Which instances have an answer, `(B, 1)`."""
    status = report[:, 3:4]
    return (status != Status.INFEASIBLE.code) & (status != Status.INVALID.code)


def _zero(array: Any) -> Any:
    """The tangent of an array that has no derivative."""
    return ad.Zero(_type_of(array).to_tangent_aval())


def _solve_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, plan: Plan) -> Any:
    found = _bind(_SOLVE, primals, plan)
    mu, mu_v, objective, tau, sides, report = found
    others = tangents[len(tangents) - plan.operands.params :] if plan.operands.params else ()
    if any([type(t) is not ad.Zero for t in others]):
        names = ", ".join([f.name for f in plan.factors if f.is_traced])
        raise GraphError(
            f"{names}: the parameters of a factor take no gradient. Pass "
            f"jax.lax.stop_gradient(...) of them."
        )
    d_u = ad.instantiate_zeros(tangents[0])
    scores, ways = ([given[i] for i in plan.score_places] for given in (primals, tangents))
    ways = [ad.instantiate_zeros(t) for t in ways]

    def full(own: Any, shared: Any = None, heat: Any = None) -> Any:
        return plan.full(JaxSpace, own, shared if heat is None else cooled(shared, heat))

    _, d_v = jax.jvp(full, scores, ways)
    d_v = jnp.broadcast_to(d_v, mu_v.shape)
    solved = is_solved(report)
    # By Danskin, the gradient of the optimal value is the solution.
    d_objective = jnp.sum(jnp.where(solved, mu, 0) * d_u, axis=1, keepdims=True)
    if mu_v.shape[1]:
        d_objective += jnp.sum(jnp.where(solved, mu_v, 0) * d_v, axis=1, keepdims=True)
    rest = [_zero(f) for f in found[3:]]
    options = plan.options
    if options.linear and options.surrogate is None:  # piecewise constant
        return found, [_zero(mu), _zero(mu_v), d_objective, *rest]
    kept = (mu, objective) if options.linear else (sides, tau)
    fixed = [lax.stop_gradient(a) for a in (*plan.without_warm(primals), *kept)]
    one = [lax.expand_dims(d, (0,)) for d in (d_u, d_v)]
    d_mu, d_mu_v = [lax.squeeze(d, (0,)) for d in _bind(_JACOBIAN, (*one, *fixed), plan)]
    return found, [d_mu, d_mu_v, d_objective, *rest]


ad.primitive_jvps[_SOLVE] = _solve_jvp


# ---- The Jacobian --------------------------------------------------------------------------------


def _jacobian_shapes(plan: Plan, d_u: Any, d_v: Any, *_: Any) -> list[tuple[Any, Any]]:
    return [(d_u.shape, d_u.dtype), (d_v.shape, d_v.dtype)]


def _jacobian_batched(primitive: Any, arrays: Any, dims: Any, *, plan: Plan) -> Any:
    """Adds directions if the solution is shared, else instances."""
    dims = [d if _is_mapped(d) else None for d in dims]
    size = _size_of(arrays, dims)
    first = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(arrays[:2], dims[:2], strict=True)
    ]  # (size, directions, instances, columns)
    directions, rows = first[0].shape[1:3]
    if all([d is None for d in dims[2:]]):
        joined = [a.reshape((size * directions, rows, a.shape[3])) for a in first]
        found = _bind(primitive, (*joined, *arrays[2:]), plan)
        return [f.reshape((size, directions, rows, f.shape[2])) for f in found], [0, 0]
    given = [jnp.moveaxis(a, 0, 1).reshape((directions, size * rows, a.shape[3])) for a in first]
    last = len(arrays) - 4  # from here on, the solve's answers, with a row for each instance
    given += [
        _batched_rows(a, d, size, rows, i in (0, plan.held_place) or i >= last)
        for i, (a, d) in enumerate(zip(arrays[2:], dims[2:], strict=True))
    ]
    found = _bind(primitive, given, plan)
    return [f.reshape((directions, size, rows, f.shape[2])) for f in found], [1, 1]


def _jacobian_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, plan: Plan) -> Any:
    """It is linear in the directions, and piecewise constant in everything else."""
    found = _bind(_JACOBIAN, primals, plan)
    if all([type(t) is ad.Zero for t in tangents[:2]]):
        return found, [_zero(f) for f in found]
    directions = [ad.instantiate_zeros(t) for t in tangents[:2]]
    return found, _bind(_JACOBIAN, (*directions, *primals[2:]), plan)


def _jacobian_transposed(cotangents: Any, d_u: Any, d_v: Any, *others: Any, plan: Plan) -> Any:
    """It is symmetric."""
    given = [ad.instantiate_zeros(ct) for ct in cotangents]
    apply = _PULLED if plan.options.surrogate == "spigot" else _JACOBIAN
    found = _bind(apply, (*given, *others), plan)
    linear = [ad.is_undefined_primal(d) for d in (d_u, d_v)]
    own = [f if is_linear else None for f, is_linear in zip(found, linear, strict=True)]
    return [*own, *[None] * len(others)]


_JACOBIAN = _primitive("factormax_jacobian", host.apply_jacobian, _jacobian_shapes)
batching.primitive_batchers[_JACOBIAN] = partial(_jacobian_batched, _JACOBIAN)
ad.primitive_jvps[_JACOBIAN] = _jacobian_jvp
ad.primitive_transposes[_JACOBIAN] = _jacobian_transposed


def _refuse(*_: Any, **__: Any) -> Any:
    raise GraphError(
        'surrogate="spigot" has a gradient that is not linear, and can\'t be differentiated again.'
    )


#: The gradient of surrogate="spigot", which is not linear, used in place of the transpose.
_PULLED = _primitive("factormax_spigot", host.pull_back, _jacobian_shapes)
batching.primitive_batchers[_PULLED] = partial(_jacobian_batched, _PULLED)
ad.primitive_jvps[_PULLED] = _refuse


# ---- The features of a target --------------------------------------------------------------------


def _features_shapes(plan: Plan, target: Any, *_: Any) -> list[tuple[tuple[int, ...], Any]]:
    batch = target.shape[0]
    return [((batch, plan.model.num_scores), target.dtype), ((batch, 1), np.dtype(bool))]


_FEATURES = _primitive("factormax_features", host.features, _features_shapes)
batching.primitive_batchers[_FEATURES] = partial(
    _by_instances, _FEATURES, lambda plan, i: i in (0, 1)
)
