"""The contract every factor keeps, as a function to put a factor through.

`check_factor` compares the fast core with the slow NumPy reference on random scores, and gradients
with finite differences. All built-in factors pass it; so should a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax import engine, reference
from factormax.arrays import FloatArray
from factormax.compiled import Wiring, compile_wiring
from factormax.engine import Numbers, Options, RawSolution
from factormax.factors.base import BaseFactor

__all__ = ["check_factor", "dense_problem"]

_EXACT = Options(tol=1e-11, max_iter=20_000, on_failure="ignore")
_ADMM = Options("admm", tol=1e-9, max_iter=200_000, step_size=3.0, on_failure="ignore")


def check_factor(
    factor: BaseFactor,
    *,
    allowed: Callable[[npt.NDArray[np.bool_]], bool] | None = None,
    trials: int = 10,
    scales: tuple[float, ...] = (0.1, 1.0, 30.0),
    seed: int = 0,
) -> None:
    """Raises `AssertionError` unless the factor behaves as a factor must.

    On random scores at several scales, and on random masks: the solution equals that of
    `factormax.reference`; both methods agree; the instances of a batch are solved as if alone;
    the gradient equals central differences of the solution, away from kinks.

    Args:
        factor: a factor made of rows, over variables of a graph of its own.
        allowed: which 0/1 assignments of its variables (in the factor's order, negation undone)
            satisfy it; if given, exactly those satisfy its rows. For at most 12 variables.
        trials: how many random scores to try at each scale.
        scales: the standard deviations of the scores.
        seed: of the random scores.

    Example:
        >>> import factormax as fm
        >>> from factormax.testing import check_factor
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable(4)
        >>> check_factor(fm.AtMostOne(u), allowed=lambda on: on.sum() <= 1)
    """
    rng = np.random.default_rng(seed)
    for scale in scales:
        numbers = _random_numbers(factor, scale, trials, rng)
        raw = engine.solve(_wiring(factor), numbers, _EXACT)
        _check_batch(factor, numbers, raw)
        _check_reference(factor, numbers, raw)
        _check_admm(factor, numbers, raw)
        _check_gradient(factor, numbers, raw, rng)
    if allowed is not None:
        _check_assignments(factor, allowed)


def dense_problem(wiring: Wiring, numbers: Numbers, instance: int) -> reference.DenseProblem:
    """One instance of a batch, as the reference sees it."""
    graph = compile_wiring(wiring)
    lowered = graph.lower(numbers.params, numbers.mask, len(numbers.eta_u), np.float64)
    compiled = reference.Compiled(
        num_variables=graph.num_variables,
        row_ptr=graph.row_ptr,
        col=lowered.col,
        coef=np.asarray(lowered.coef, dtype=np.float64),
        rhs=np.asarray(lowered.rhs, dtype=np.float64),
        kind=lowered.kind,
        pairs=graph.pairs,
        pair_negated=graph.pair_negated.astype(bool),
        block_ptr=graph.block_ptr,
        block_kind=graph.block_kind,
    )
    mask = None if numbers.mask is None else numbers.mask[instance]
    eta_u, eta_v = (
        np.asarray(a[instance], dtype=np.float64) for a in (numbers.eta_u, numbers.eta_v)
    )
    return reference.from_compiled(compiled, instance, eta_u, eta_v, mask)


def _wiring(factor: BaseFactor) -> Wiring:
    return Wiring(factor.graph.num_variables, factor.spec, factor.literals)


def _random_numbers(
    factor: BaseFactor, scale: float, trials: int, rng: np.random.Generator
) -> Numbers:
    """Half of the instances whole, half with masks that leave each factor something."""
    n = factor.graph.num_variables
    pairs = len(factor.index) if factor.soft else 0
    mask = rng.random((trials, n)) < 0.7
    mask[: (trials + 1) // 2] = True
    params = [p.reshape(-1) for p in factor.params]
    return Numbers(
        scale * rng.standard_normal((trials, n)),
        scale * rng.standard_normal((trials, pairs)),
        np.concatenate([np.zeros(0), *params]),
        mask,
    )


def _fail(factor: BaseFactor, what: str, numbers: Numbers, instance: int) -> None:
    mask = None if numbers.mask is None else numbers.mask[instance]
    raise AssertionError(
        f"{factor.kind}: {what}, for scores {numbers.eta_u[instance]!r} with mask {mask!r}."
    )


def _instances(raw: RawSolution) -> Iterator[int]:
    return iter(range(len(raw.mu)))


def _check_batch(factor: BaseFactor, numbers: Numbers, raw: RawSolution) -> None:
    for i in _instances(raw):
        mask = None if numbers.mask is None else numbers.mask[i : i + 1]
        one = Numbers(numbers.eta_u[i : i + 1], numbers.eta_v[i : i + 1], numbers.params, mask)
        alone = engine.solve(_wiring(factor), one, _EXACT)
        if not np.array_equal(alone.mu[0], raw.mu[i], equal_nan=True):
            _fail(factor, "an instance alone differs from the same in a batch", numbers, i)


def _check_reference(factor: BaseFactor, numbers: Numbers, raw: RawSolution) -> None:
    for i in _instances(raw):
        problem = dense_problem(_wiring(factor), numbers, i)
        here = numbers.mask[i] if numbers.mask is not None else np.ones(raw.mu.shape[1], bool)
        exact = np.zeros(raw.mu.shape[1])
        try:
            exact[here], _ = reference.solve(problem)
        except reference.Infeasible:
            if np.isfinite(raw.mu[i]).all():
                _fail(factor, "infeasible, but the core found a solution", numbers, i)
            continue
        if not np.allclose(raw.mu[i], exact, rtol=0, atol=1e-8):
            _fail(factor, f"solved as {raw.mu[i]!r}, not {exact!r}", numbers, i)


def _check_admm(factor: BaseFactor, numbers: Numbers, raw: RawSolution) -> None:
    admm = engine.solve(_wiring(factor), numbers, _ADMM)
    for i in _instances(raw):
        if not np.allclose(admm.mu[i], raw.mu[i], rtol=0, atol=1e-6, equal_nan=True):
            _fail(factor, "the two methods disagree", numbers, i)


def _check_gradient(
    factor: BaseFactor, numbers: Numbers, raw: RawSolution, rng: np.random.Generator
) -> None:
    """Against central differences, where two step sizes agree: elsewhere there is a kink."""
    grad = rng.standard_normal(raw.mu.shape)
    grad_v = rng.standard_normal(raw.mu_v.shape)
    grad_u, grad_s = engine.vjp(
        _wiring(factor), numbers.eta_v, numbers.params, raw, grad, grad_v, None, "ignore"
    )
    direction = rng.standard_normal(raw.mu.shape), rng.standard_normal(raw.mu_v.shape)
    slopes = [_slope(factor, numbers, direction, grad, grad_v, h) for h in (1e-4, 1e-5)]
    ours = np.sum(grad_u * direction[0], axis=1) + np.sum(grad_s * direction[1], axis=1)
    for i in _instances(raw):
        smooth = np.isfinite(slopes[0][i]) and abs(slopes[0][i] - slopes[1][i]) <= 1e-7
        if smooth and not abs(ours[i] - slopes[1][i]) <= 1e-6:
            _fail(factor, f"slope {ours[i]}, by differences {slopes[1][i]}", numbers, i)


def _slope(
    factor: BaseFactor,
    numbers: Numbers,
    direction: tuple[FloatArray, FloatArray],
    grad: FloatArray,
    grad_v: FloatArray,
    h: float,
) -> npt.NDArray[np.float64]:
    def loss(t: float) -> Any:
        moved = Numbers(
            numbers.eta_u + t * direction[0],
            numbers.eta_v + t * direction[1],
            numbers.params,
            numbers.mask,
        )
        raw = engine.solve(_wiring(factor), moved, _EXACT)
        return np.sum(raw.mu * grad, axis=1) + np.sum(raw.mu_v * grad_v, axis=1)

    return np.asarray((loss(h) - loss(-h)) / (2 * h))


def _check_assignments(
    factor: BaseFactor, allowed: Callable[[npt.NDArray[np.bool_]], bool]
) -> None:
    n = factor.graph.num_variables
    if n > 12:
        raise ValueError(f"allowed= takes at most 12 variables, the factor's graph has {n}.")
    params = np.concatenate([np.zeros(0), *(p.reshape(-1) for p in factor.params)])
    numbers = Numbers(np.zeros((1, n)), np.zeros((1, 0)), params, None)
    problem = dense_problem(_wiring(factor), numbers, 0)
    for bits in product((False, True), repeat=n):
        y = np.array(bits)
        slack = problem.b - problem.A @ y
        holds = np.all(np.where(np.isinf(problem.lo), np.abs(slack), -slack) <= 1e-9)
        literals = y[factor.index] ^ (factor.negated if factor.negated is not None else False)
        wanted = all(allowed(row) for row in literals)
        if holds != wanted:
            verb = "allow" if holds else "forbid"
            raise AssertionError(f"{factor.kind}: its rows {verb} {y.astype(int)!r}.")
