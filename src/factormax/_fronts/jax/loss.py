"""The target of a loss, laid out flat; parts of it that JAX traces stay traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from factormax.arrays import is_tracer
from factormax.errors import ShapeError
from factormax.queries import loss as queries
from factormax.queries.loss import Target, by_variable, check_shape, check_target
from factormax.variable import Variable

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["TracedTarget", "flat_target"]


@dataclass(frozen=True)
class TracedTarget:
    """What a loss compares the answer with, flat, `(B, n)`: like `Target`, without factors."""

    kind: str
    values: jax.Array
    known: jax.Array | None
    cost: jax.Array | None


def flat_target(
    graph: FactorGraph, targets: Mapping[Variable, Any], kind: str, cost: Any, mask: Any
) -> Target | TracedTarget:
    """The arguments of `FactorGraph.loss`, checked and laid out."""
    leaves = [t.mask for t in graph._tensors]
    for part in (targets, cost, mask):
        leaves += part.values() if isinstance(part, Mapping) else [part]
    if not any([is_tracer(leaf) for leaf in leaves]):
        return queries.flat_target(graph, targets, kind, cost, mask)
    given = check_target(graph, targets, kind, cost)
    shape = graph._known_batch_shape()
    batch = int(np.prod(shape, dtype=np.int64))

    def laid_out(parts: Any, start: Any, what: str) -> jax.Array:
        flat = jnp.asarray(np.broadcast_to(start, (batch, graph._num_variables)))
        for u, part in parts:
            own = _fit(u, what, part, shape).astype(flat.dtype)
            flat = flat.at[:, u.index.reshape(-1)].set(own)
        return flat

    for u, target in targets.items():
        check_shape(u, jnp.shape(target), shape)
    values = laid_out(targets.items(), np.zeros(()), "the target")
    known = costs = None
    if mask is not None:
        known = laid_out(by_variable(graph, "mask", mask, targets), given, "the mask of the target")
    if kind == "hinge":
        given_costs = by_variable(graph, "cost", 1.0 if cost is None else cost, targets)
        costs = laid_out(given_costs, np.ones(()), "the cost")
    return TracedTarget(kind, values, known, costs)


def _fit(u: Variable, what: str, array: Any, batch: tuple[int, ...]) -> Any:
    """The array broadcast to one entry per instance and variable, `(B, size)`."""
    found = jnp.asarray(array)
    try:
        return jnp.broadcast_to(found, (*batch, *u.shape)).reshape((-1, u.size))
    except ValueError:
        raise ShapeError(
            f"loss: {what} of {u.name} must have shape {(*batch, *u.shape)}, got {found.shape}."
        ) from None
