"""A test that every factor must pass.

`check_factor` checks the answers of the fast core: for a factor made of rows against the slow NumPy
reference, for a structured factor against the conditions of optimality, given the structures that
its oracle was seen to return. Gradients are compared with finite differences. All built-in factors
pass it; so should a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax import _engines, reference
from factormax._inputs import Inputs
from factormax._model import model_of
from factormax._options import Options
from factormax._raw import RawSolution
from factormax._structured_checks import Seen, fail
from factormax.arrays import FloatArray
from factormax.checks import finite_number, shown, whole_number
from factormax.errors import GraphError
from factormax.factors.base import BaseFactor
from factormax.factors.factor import Factor
from factormax.factors.pair import Pair
from factormax.factors.structured import StructuredFactor
from factormax.graph import MOST

__all__ = ["check_factor", "dense_problem"]

_EXACT = Options(tol=1e-11, max_iter=20_000, on_failure="ignore", list_structures=True)
_ADMM = Options("admm", tol=1e-9, max_iter=200_000, step_size=3.0, on_failure="ignore")

Matrix = npt.NDArray[np.float64]


def check_factor(
    factor: BaseFactor,
    *,
    allowed: Callable[[npt.NDArray[np.bool_]], bool] | None = None,
    trials: int = 10,
    scales: tuple[float, ...] = (0.1, 1.0, 30.0),
    masks: bool = True,
    seed: int = 0,
    sample: Callable[[np.random.Generator], Any] | None = None,
) -> None:
    """Raises `AssertionError` unless the factor behaves as a factor must.

    On random scores at several scales, and on random masks:

    - both methods agree; the instances of a batch are solved as if alone; the gradient equals
      central differences of the solution, away from kinks;
    - the answers for a factor made of rows agree with `factormax.reference`;
    - the oracle of a structured factor gives the same answer when called again, at least as good as
      all its answers to other scores; it finds a structure at least once; the solution is made up
      of its structures, and none would improve it; `features_of`, if defined, accepts them.

    Args:
        factor: a factor over variables of a graph of its own.
        allowed: whether a 0/1 assignment satisfies the factor. For a factor made of rows, with at
            most 12 variables, it gets the variables in the factor's order, with negation applied,
            and exactly the assignments that it allows must satisfy the rows. For a structured
            factor, it gets every structure that is found without a mask, in the shape of the
            variables, and must allow it.
        trials: how many random scores to try at each scale.
        scales: the standard deviations of the scores.
        masks: whether to mask variables, too.
        seed: the seed of the random scores.
        sample: for an oracle that can't take all scores: a function that draws valid scores from a
            random generator. It returns them in the shape of the variables of the factor's graph
            (in one array, `(n,)`, if there are several tensors), or a pair of these and the
            factor's own scores. They should stay 1e-3 away from the edge of the domain, because the
            gradient is checked by moving the scores. Then only the number of `scales` matters, and
            "admm", which needs scores of either sign, is left out.

    Example:
        >>> import numpy as np, factormax as fm
        >>> from factormax.testing import check_factor
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable(4)
        >>> check_factor(fm.AtMostOne(u), allowed=lambda on: on.sum() <= 1)

        A user-defined factor:

        >>> class Best(fm.Factor):
        ...     def map(self, eta_u, eta_v):
        ...         return np.arange(len(eta_u)) == np.argmax(eta_u), []
        >>> check_factor(Best(u), allowed=lambda on: on.sum() == 1)
    """
    trials, scales = _checked_arguments(factor, trials, scales)
    factor._check_made()
    factor._record.expect_no_more_of(factor)
    if isinstance(factor, StructuredFactor) and factor._count != 1:
        raise GraphError(
            f"{factor.name}: check_factor takes one structured factor, not {factor._count} made in "
            f"one call."
        )
    rng = np.random.default_rng(seed)
    batches = [_random_numbers(factor, scale, trials, masks, rng, sample) for scale in scales]
    seen = None
    if isinstance(factor, StructuredFactor):
        seen = Seen(factor, allowed)
        seen.check_oracle(batches)
        seen.check_features()
    for numbers in batches:
        raw = _engines.solve(numbers, _EXACT)
        if seen is not None:
            seen.check_solution(numbers, raw)
        else:
            _check_reference(factor, numbers, raw)
        _check_batch(factor, numbers, raw)
        if sample is None:
            _check_admm(factor, numbers, raw)
        _check_gradient(factor, numbers, raw, rng)
    if allowed is not None and seen is None:
        _check_assignments(factor, allowed)


def dense_problem(inputs: Inputs, instance: int) -> reference.DenseProblem:
    """One instance of a batch, as the reference sees it."""
    model, (coef, rhs) = inputs.model, inputs.rows
    compiled = reference.Compiled(
        num_variables=model.num_variables,
        row_ptr=model.row_ptr,
        col=model.col,
        coef=np.asarray(coef, dtype=np.float64),
        rhs=np.asarray(rhs, dtype=np.float64),
        kind=model.row_kind,
        pairs=model.pairs,
        pair_negated=model.pair_negated,
        block_ptr=model.block_ptr,
        block_kind=model.block_kind,
    )
    mask = None if inputs.here is None else inputs.here[instance]
    eta_u = np.asarray(inputs.eta_u[instance], dtype=np.float64)
    eta_v = np.asarray(inputs.eta_v[min(instance, len(inputs.eta_v) - 1)], dtype=np.float64)
    return reference.from_compiled(compiled, instance, eta_u, eta_v, mask)


# ---- Instances -----------------------------------------------------------------------------------


def _checked_arguments(factor: Any, trials: Any, scales: Any) -> tuple[int, tuple[float, ...]]:
    """The number of trials and the scales, if there is something to check."""
    if not isinstance(factor, BaseFactor):
        example = "fm.Xor(fm.FactorGraph().variable(4))"
        got = type(factor).__name__
        if isinstance(factor, type):
            got = f"the class {factor.__name__}"
            if issubclass(factor, BaseFactor):
                example = f"{factor.__name__}(fm.FactorGraph().variable(4))"
        raise GraphError(f"check_factor takes a factor, such as {example}, got {got}.")
    trials = whole_number("trials", trials, 1, MOST)
    if not isinstance(scales, Iterable):
        raise ValueError(f"scales must be a tuple of numbers, such as (1.0,), got {shown(scales)}.")
    scales = tuple(finite_number("each of scales", scale) for scale in scales)
    if not scales:
        raise ValueError("scales must hold at least one number, or nothing is checked, got ().")
    return trials, scales


def _random_numbers(
    factor: BaseFactor,
    scale: float,
    trials: int,
    masks: bool,
    rng: np.random.Generator,
    sample: Callable[[np.random.Generator], Any] | None,
) -> Inputs:
    """Random instances: half without masks, half with masks that the factor accepts."""
    n = factor._record.num_variables
    scores = factor._count if isinstance(factor, Pair) else 0
    mask = rng.random((trials, n)) < (0.85 if isinstance(factor, StructuredFactor) else 0.7)
    mask[: (trials + 1) // 2 if masks else trials] = True
    if isinstance(factor, StructuredFactor):
        scores = factor._num_scores
        for row in mask:
            try:
                factor._check_mask(row[factor._index], factor._oracle_shape)
            except GraphError:
                row[:] = True
    eta_u = scale * rng.standard_normal((trials, n))
    eta_v = scale * rng.standard_normal((trials, scores))
    if sample is not None:
        for i in range(trials):
            eta_u[i], eta_v[i] = _drawn(factor, sample(rng), n, scores)
    return Inputs(
        model_of(n, [factor]),
        eta_u,
        eta_v,
        list(factor._params),
        mask,
        (factor,) if isinstance(factor, Factor) else (),
    )


def _drawn(factor: BaseFactor, drawn: Any, n: int, scores: int) -> tuple[Matrix, Matrix]:
    """The scores that `sample` drew, flat."""
    parts = drawn if isinstance(drawn, tuple) else (drawn, ())
    flat = [np.asarray(a, dtype=np.float64).reshape(-1) for a in parts]
    if len(flat) != 2 or flat[0].size != n or flat[1].size != scores:
        own = f" and {scores} scores of its own, as a pair" if scores else ""
        raise ValueError(
            f"sample must draw {n} scores for {factor.name}{own}, got {[a.size for a in flat]}."
        )
    return flat[0], flat[1]


# ---- Every factor --------------------------------------------------------------------------------


def _check_batch(factor: BaseFactor, numbers: Inputs, raw: RawSolution) -> None:
    for i in range(len(raw.mu)):
        alone = _engines.solve(numbers.instance(i), _EXACT)
        if not np.array_equal(alone.mu[0], raw.mu[i], equal_nan=True):
            fail(factor, "an instance alone is solved differently than in a batch", numbers, i)


def _check_admm(factor: BaseFactor, numbers: Inputs, raw: RawSolution) -> None:
    admm = _engines.solve(numbers, _ADMM)
    for i in range(len(raw.mu)):
        if not np.allclose(admm.mu[i], raw.mu[i], rtol=0, atol=1e-6, equal_nan=True):
            fail(factor, "the two methods disagree", numbers, i)


def _check_gradient(
    factor: BaseFactor, numbers: Inputs, raw: RawSolution, rng: np.random.Generator
) -> None:
    """Compares with central differences where two step sizes agree; elsewhere there is a kink."""
    grad = rng.standard_normal(raw.mu.shape)
    grad_v = rng.standard_normal(raw.mu_v.shape)
    grad_u, grad_s, _, _ = _engines.vjp(numbers, raw, grad, grad_v)
    direction = rng.standard_normal(raw.mu.shape), rng.standard_normal(raw.mu_v.shape)
    slopes = [_slope(factor, numbers, direction, grad, grad_v, h) for h in (1e-4, 1e-5)]
    ours = np.sum(grad_u * direction[0], axis=1) + np.sum(grad_s * direction[1], axis=1)
    for i in range(len(raw.mu)):
        smooth = np.isfinite(slopes[0][i]) and abs(slopes[0][i] - slopes[1][i]) <= 1e-7
        if smooth and not abs(ours[i] - slopes[1][i]) <= 1e-6:
            fail(factor, f"slope {ours[i]}, by differences {slopes[1][i]}", numbers, i)


def _slope(
    factor: BaseFactor,
    numbers: Inputs,
    direction: tuple[FloatArray, FloatArray],
    grad: FloatArray,
    grad_v: FloatArray,
    h: float,
) -> npt.NDArray[np.float64]:
    def loss(t: float) -> Any:
        moved = numbers.replace(
            eta_u=numbers.eta_u + t * direction[0],
            eta_v=numbers.eta_v + t * direction[1],
        )
        raw = _engines.solve(moved, _EXACT)
        return np.sum(raw.mu * grad, axis=1) + np.sum(raw.mu_v * grad_v, axis=1)

    return np.asarray((loss(h) - loss(-h)) / (2 * h))


# ---- Factors made of rows ------------------------------------------------------------------------


def _check_reference(factor: BaseFactor, numbers: Inputs, raw: RawSolution) -> None:
    for i in range(len(raw.mu)):
        problem = dense_problem(numbers, i)
        here = numbers.mask[i] if numbers.mask is not None else np.ones(raw.mu.shape[1], bool)
        exact = np.zeros(raw.mu.shape[1])
        try:
            exact[here], _ = reference.solve(problem)
        except reference.Infeasible:
            if np.isfinite(raw.mu[i]).all():
                fail(factor, "infeasible, but the core found a solution", numbers, i)
            continue
        if not np.allclose(raw.mu[i], exact, rtol=0, atol=1e-8):
            fail(factor, f"solved as {raw.mu[i]!r}, not {exact!r}", numbers, i)


def _check_assignments(
    factor: BaseFactor, allowed: Callable[[npt.NDArray[np.bool_]], bool]
) -> None:
    n = factor._record.num_variables
    if n > 12:
        raise ValueError(f"allowed= takes at most 12 variables; the factor's graph has {n}.")
    model = model_of(n, [factor])
    numbers = Inputs(model, np.zeros((1, n)), np.zeros((1, 0)), list(factor._params))
    problem = dense_problem(numbers, 0)
    for bits in product((False, True), repeat=n):
        y = np.array(bits)
        slack = problem.b - problem.A @ y
        holds = np.all(np.where(np.isinf(problem.lo), np.abs(slack), -slack) <= 1e-9)
        literals = y[factor._index] ^ (factor._negated if factor._negated is not None else False)
        wanted = all(allowed(row) for row in literals)
        if holds != wanted:
            verb = "allow" if holds else "forbid"
            raise AssertionError(f"{factor.kind}: its rows {verb} {y.astype(int)!r}.")
