"""Queries of numbers that JAX traces, built from the primitives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from factormax._columns import Columns
from factormax._engines import engine_of
from factormax._fronts.jax import primitives
from factormax._fronts.jax.arrays import JaxSpace, compute_dtype, cooled, value_dtype
from factormax._fronts.jax.loss import TracedTarget
from factormax._fronts.jax.plan import Plan, Query, plan_of
from factormax._layout import Layout
from factormax._options import Options
from factormax.arrays import is_jax
from factormax.queries.decode import FREE
from factormax.queries.loss import Target
from factormax.solution import Solution

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["TracedTarget", "loss_traced", "solve_traced"]


class _Numbers(NamedTuple):
    """The flat arrays of a graph."""

    plan: Plan
    eta_u: jax.Array  # (B, n)
    eta_v: jax.Array  # (1 | B, P), or (B, P − S) beside shared ones
    shared: jax.Array | None  # (1, S)
    heat: jax.Array | None  # (B, 1)
    mask: jax.Array | None  # (B, n)
    params: list[Any]

    def solve(
        self, held: jax.Array | None = None, warm: jax.Array | None = None, **changes: Any
    ) -> list[jax.Array]:
        """What the primitive returns, with these arrays replaced."""
        own = self._replace(**changes)
        operands = own.plan.operands._replace(held=held is not None, warm=warm is not None)
        plan = own.plan
        if operands != plan.operands:
            plan = plan.replace(operands=operands)
        return primitives.solve(plan, *own.arrays(held, warm))

    def arrays(self, held: Any = None, warm: Any = None) -> list[Any]:
        """What a primitive takes."""
        given = self.eta_u, self.eta_v, self.mask, held, warm, self.shared, self.heat
        return [*[a for a in given if a is not None], *self.params]

    def score_product(self, weights: jax.Array) -> jax.Array:
        """The factors' scores times `(B, P)`, summed per instance, `(B, 1)`."""
        if self.shared is None:
            return _dot(self.eta_v, weights)
        of_own, of_shared = Columns.split(JaxSpace, weights, self.plan.runs)
        shared = self.shared if self.heat is None else cooled(self.shared, self.heat)
        return _dot(self.eta_v, of_own) + _dot(shared, of_shared)

    @property
    def here(self) -> jax.Array:
        """`(B, n)`, the variables that are not masked and do not score −inf."""
        finite = self.eta_u != -jnp.inf
        return finite if self.mask is None else finite & self.mask


def _numbers(query: Query, options: Options, temperature: Any) -> _Numbers:
    graph = query.graph
    layout = graph._form().layout
    parts = graph._score_parts()
    dtype = compute_dtype([t.scores for t in graph._tensors] + [p.given for p in parts])
    scores = [None if t.scores is None else jnp.asarray(t.scores, dtype) for t in graph._tensors]
    eta_u = layout.flat_scores(JaxSpace, scores, dtype)
    own = [jnp.asarray(p.given, dtype) for p in parts]
    eta_v, shared = layout.factor_blocks(JaxSpace, own, dtype)
    heat = None
    if temperature is not None:
        given = jnp.asarray(temperature, dtype)
        given = jnp.where(given > 0, given, jnp.nan)  # the solve reports NaN
        eta_u, eta_v, shared, heat = layout.cooled(JaxSpace, eta_u, eta_v, shared, given, cooled)
    mask = None
    if graph._masked:
        masks = [None if t.mask is None else jnp.asarray(t.mask) for t in graph._tensors]
        mask = layout.flat_mask(JaxSpace, masks)
    plan, params = plan_of(query, options, shared is not None, heat is not None)
    return _Numbers(plan, eta_u, eta_v, shared, heat, mask, params)


@dataclass(eq=False)
class _Details:
    """What a solution says about each instance, `(B,)`, computed on access."""

    report: jax.Array  # as the primitive returns it
    tau: jax.Array
    engine: str

    @property
    def status(self) -> jax.Array:
        """The codes."""
        return self.report[:, 3].astype(jnp.int32)

    @property
    def iterations(self) -> jax.Array:
        """Passes over the graph."""
        return self.report[:, 2].astype(jnp.int32)

    @property
    def oracle_calls(self) -> jax.Array:
        """Calls of MAP oracles."""
        return self.report[:, 4].astype(jnp.int32)

    @property
    def primal_residual(self) -> jax.Array:
        """By how much the constraints are violated."""
        return self.report[:, 0]

    @property
    def dual_residual(self) -> jax.Array:
        """The size of the last step, or of the projected gradient."""
        return self.report[:, 1]

    @property
    def upper_bound(self) -> jax.Array:
        """The upper bound; for linear programs only."""
        return self.report[:, 5]

    @property
    def integral(self) -> jax.Array:
        """Whether the answer is integral; for linear programs only."""
        return self.report[:, 6] != 0


# ---- Solve ---------------------------------------------------------------------------------------


def solve_traced(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any
) -> Solution:
    """Answers `solve` or `solve_map`."""
    query = Query(graph)
    numbers = _numbers(query, options, temperature)
    layout = graph._form().layout
    warm = None
    if warm_start is not None:
        dual = numbers.plan.model.num_dual
        tau = graph._check_multipliers(warm_start, layout.batch, dual)
        warm = lax.stop_gradient(jnp.asarray(tau, numbers.eta_u.dtype))
    mu, mu_v, objective, tau, _, report = numbers.solve(warm=warm)
    _set_answer(graph, layout, mu, mu_v)
    details = _Details(report, tau, engine_of(jax.default_backend()))
    shape = layout.batch_shape
    optimum = objective.reshape(shape)
    return Solution(optimum, details, shape, options.query, conflicts=query.conflicts)


def _set_answer(graph: FactorGraph, layout: Layout, mu: jax.Array, mu_v: jax.Array) -> None:
    given = [t.scores for t in graph._tensors] + [p.given for p in graph._score_parts()]
    first = next(s for s in given if is_jax(s))
    values = [
        value.astype(value_dtype(first if t.scores is None else t.scores))
        for value, t in zip(layout.by_tensor(mu), graph._tensors, strict=True)
    ]
    factor_values = [
        own.astype(value_dtype(part.given if is_jax(part.given) else first))
        for own, part in zip(layout.by_part(JaxSpace, mu_v), graph._score_parts(), strict=True)
    ]
    graph._set_answer(values, factor_values, [(f, None) for f in graph._structured])


# ---- Loss ----------------------------------------------------------------------------------------


def loss_traced(
    graph: FactorGraph, target: Target | TracedTarget, options: Options, temperature: Any
) -> jax.Array:
    """The losses of the instances, `(*batch,)`; see `factormax.queries.loss`.

    A target that breaks a factor has a loss of inf, because no error can be raised.
    """
    query = Query(graph)  # kept alive here: the plan has only a weak reference to it
    numbers = _numbers(query, options, temperature)
    layout = graph._form().layout
    eta_u, here = numbers.eta_u, numbers.here
    dtype = eta_u.dtype
    y = jnp.where(here, jnp.asarray(target.values, dtype), 0)
    known = None if target.known is None else jnp.asarray(target.known)
    asked, constant = eta_u, jnp.zeros((layout.batch, 1), dtype)
    if target.cost is not None:  # sum of cost * (mu + y - 2 mu y), where y is known
        cost = jnp.asarray(target.cost, dtype)
        cost = cost if known is None else jnp.where(known, cost, 0)
        asked = eta_u + jnp.where(here, cost * (1 - 2 * y), 0)
        constant = jnp.sum(cost * y, axis=1, keepdims=True)
    mu, mu_v, objective, _, _, report = numbers.solve(eta_u=asked)
    _set_answer(graph, layout, *map(lax.stop_gradient, (mu, mu_v)))
    quadratic = 0.0 if options.linear else 0.5
    if known is None:
        n_y, good = primitives.features(numbers.plan, y, *numbers.arrays())
        score = _dot(eta_u, y) + numbers.score_product(n_y) - quadratic * _dot(y, y)
    else:
        held = jnp.where(known & here, y, FREE).astype(jnp.int8)
        y, n_y, score, _, _, ended = numbers.solve(held=held)
        good = primitives.is_solved(ended)
    solved = primitives.is_solved(report) & good
    # Two large numbers that differ by little: the value by differences, the gradient by both.
    gap = jnp.where(solved, objective, 0) + constant - jnp.where(solved, score, 0)
    gain = _dot(asked, mu - y) + numbers.score_product(mu_v - n_y)
    gain -= quadratic * _dot(mu - y, mu + y)
    gain += _dot(asked - eta_u, y) + constant
    value = lax.stop_gradient(jnp.where(solved, jnp.maximum(gain, 0), jnp.inf))
    zero = jnp.where(solved, gap - lax.stop_gradient(gap), 0)
    return (value + zero).reshape(layout.batch_shape)


def _dot(scores: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum of the products for each instance, `(B, 1)`; where a weight is 0, so is the product,
    even if the score is −inf.
    """
    counts = weights != 0
    products = jnp.where(counts, scores, 0) * weights
    return jnp.sum(products, axis=1, keepdims=True)
