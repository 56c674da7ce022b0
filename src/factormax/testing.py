"""A test that every factor must pass.

`check_factor` checks the answers of the fast core: for a factor made of rows against the slow NumPy
reference, for a structured factor against the conditions of optimality, given the structures that
its oracle was seen to return. Gradients are compared with finite differences. All built-in factors
pass it; so should a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from factormax import _engines, reference
from factormax._inputs import Inputs
from factormax._model import model_of
from factormax._options import Options
from factormax._raw import RawSolution
from factormax.arrays import FloatArray
from factormax.checks import finite_number, shown, whole_number
from factormax.errors import GraphError
from factormax.factors.base import BaseFactor
from factormax.factors.factor import Factor
from factormax.factors.pair import Pair
from factormax.factors.structured import NO_STRUCTURE, StructuredFactor
from factormax.graph import MOST
from factormax.status import Status

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
        seen = _Seen(factor, allowed)
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


def _fail(factor: BaseFactor, what: str, numbers: Inputs, instance: int) -> NoReturn:
    mask = None if numbers.mask is None else numbers.mask[instance]
    own = f" and {numbers.eta_v[instance]!r}" if numbers.eta_v.shape[1] else ""
    raise AssertionError(
        f"{factor.name}: {what}, for scores {numbers.eta_u[instance]!r}{own} with mask {mask!r}."
    )


# ---- Every factor --------------------------------------------------------------------------------


def _check_batch(factor: BaseFactor, numbers: Inputs, raw: RawSolution) -> None:
    for i in range(len(raw.mu)):
        alone = _engines.solve(numbers.instance(i), _EXACT)
        if not np.array_equal(alone.mu[0], raw.mu[i], equal_nan=True):
            _fail(factor, "an instance alone is solved differently than in a batch", numbers, i)


def _check_admm(factor: BaseFactor, numbers: Inputs, raw: RawSolution) -> None:
    admm = _engines.solve(numbers, _ADMM)
    for i in range(len(raw.mu)):
        if not np.allclose(admm.mu[i], raw.mu[i], rtol=0, atol=1e-6, equal_nan=True):
            _fail(factor, "the two methods disagree", numbers, i)


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
            _fail(factor, f"slope {ours[i]}, by differences {slopes[1][i]}", numbers, i)


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
                _fail(factor, "infeasible, but the core found a solution", numbers, i)
            continue
        if not np.allclose(raw.mu[i], exact, rtol=0, atol=1e-8):
            _fail(factor, f"solved as {raw.mu[i]!r}, not {exact!r}", numbers, i)


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


# ---- Structured factors --------------------------------------------------------------------------

Structure = tuple[Matrix, Matrix]  # assignment (d,) and features (s,)
Ask = Callable[[Matrix, Matrix], "Structure | None"]


class _Seen:
    """A structured factor, and the structures that its oracle was seen to return.

    A structure scores eta_u · m + eta_v · n. The oracle returns the best one, so no other known
    structure scores more. At the solution mu, by the conditions of optimality, the structures that
    make it up all have the same reduced score, (eta_u − mu) · m + eta_v · n, and no other has a
    larger one.
    """

    def __init__(
        self,
        factor: StructuredFactor,
        allowed: Callable[[npt.NDArray[np.bool_]], bool] | None,
    ) -> None:
        self.factor = factor
        self.allowed = allowed
        self.place = factor._index.reshape(-1)
        self.assignments: Matrix = np.zeros((0, self.place.size))
        self.features: Matrix = np.zeros((0, factor._num_scores))
        self.oracles = _oracles_of(factor)

    def check_oracle(self, batches: list[Inputs]) -> None:
        """Checks its answers to random scores."""
        answers: list[tuple[str, Inputs, int, Structure | None]] = []
        for numbers in batches:
            for i in range(len(numbers.eta_u)):
                eta_u, eta_v, whole = self._scores(numbers, i)
                for name, ask in self.oracles.items():
                    answer = self._asked_twice(name, ask, eta_u, eta_v, numbers, i)
                    answers.append((name, numbers, i, answer))
                    if answer is not None and whole:
                        self._add(answer[0][None], answer[1][None], numbers, i)
        if all(answer is None for *_, answer in answers):
            trials = sum(len(numbers.eta_u) for numbers in batches)
            raise AssertionError(
                f"{self.factor.name}: {' and '.join(self.oracles)} never found a structure in "
                f"{trials} trials, so nothing can be checked. It must return one wherever there is "
                f"one; if few scores have any, draw such scores with sample=."
            )
        for name, numbers, i, answer in answers:
            eta_u, eta_v, whole = self._scores(numbers, i)
            unmasked = "" if whole else " (found without a mask)"
            known = self._values(self.assignments, self.features, eta_u, eta_v)
            best = known.max(initial=-np.inf)
            if answer is None:
                if best > -np.inf:
                    example = f"{self.assignments[known.argmax()]!r}{unmasked}"
                    _fail(self.factor, f"{name} found nothing, not even {example}", numbers, i)
                continue
            value = self._values(answer[0][None], answer[1][None], eta_u, eta_v)[0]
            if best > value + _tolerance(eta_u, eta_v):
                k = known.argmax()
                better = f"{self.assignments[k]!r} with features {self.features[k]!r}{unmasked}"
                what = f"{name} returned {answer[0]!r} with features {answer[1]!r}, worth {value}"
                _fail(self.factor, f"{what}; but {better} is worth {best}", numbers, i)

    def check_features(self) -> None:
        """Checks that `features_of` accepts the structures, with the same features if unique."""
        if not isinstance(self.factor, Factor) or not self.factor._tests_assignments:
            return
        for m, n in zip(self.assignments, self.features, strict=True):
            found = self.factor._checked_features(m)
            only = (self.assignments == m).all(axis=1).sum() == 1
            if found is None or (only and not np.allclose(found, n, rtol=0, atol=1e-9)):
                returned = NO_STRUCTURE if found is None else found
                raise AssertionError(
                    f"{self.factor.name}: features_of returned {returned!r} for {m!r}, which map "
                    f"returned with the features {n!r}."
                )

    def check_solution(self, numbers: Inputs, raw: RawSolution) -> None:
        """Checks that the solution is made up of structures, and optimal."""
        lists = _structures_of(raw, self.factor)
        for i, (p, m, n) in enumerate(lists):
            eta_u, eta_v, whole = self._scores(numbers, i)
            if whole:
                self._add(m, n, numbers, i)
            if raw.status[i] == Status.INFEASIBLE.code:
                known = self._values(self.assignments, self.features, eta_u, eta_v)
                if known.max(initial=-np.inf) > -np.inf:
                    _fail(self.factor, "infeasible, but a structure is known", numbers, i)
                continue
            if raw.status[i] != Status.CONVERGED.code:
                status = Status.from_code(int(raw.status[i]))
                _fail(self.factor, f"not solved: {status.value}", numbers, i)
            if np.isneginf(eta_u).all():
                continue  # the factor is absent
            mu = raw.mu[i][self.place]
            if (p < 0).any() or abs(p.sum() - 1) > 1e-9:
                _fail(self.factor, f"{p!r} are not probabilities", numbers, i)
            if not np.allclose(p @ m, mu, rtol=0, atol=1e-9):
                _fail(self.factor, f"solved as {mu!r}, but made up of {p @ m!r}", numbers, i)
            if not np.allclose(p @ n, raw.mu_v[i], rtol=0, atol=1e-9):
                what = f"its value is {raw.mu_v[i]!r}, but the features are {p @ n!r}"
                _fail(self.factor, what, numbers, i)
            self._check_optimal(numbers, i, p, m, n)

    def _check_optimal(self, numbers: Inputs, i: int, p: Matrix, m: Matrix, n: Matrix) -> None:
        eta_u, eta_v, _ = self._scores(numbers, i)
        reduced = eta_u - p @ m
        tolerance = _tolerance(eta_u, eta_v)
        used = self._values(m[p > 0], n[p > 0], reduced, eta_v)
        if used.max() - used.min() > tolerance:
            what = f"structures of the solution differ in reduced score: {used!r}"
            if not isinstance(self.factor, Factor):
                what += " (does a variable always stand in the same slot of its oracle's list?)"
            _fail(self.factor, what, numbers, i)
        others = [(self.assignments, self.features)]
        for ask in self.oracles.values():
            answer = ask(reduced, eta_v)
            if answer is not None:
                others.append((answer[0][None], answer[1][None]))
        for assignments, features in others:
            values = self._values(assignments, features, reduced, eta_v)
            if values.max(initial=-np.inf) > used.min() + tolerance:
                better = assignments[values.argmax()]
                what = f"the solution {p @ m!r} is not optimal: {better!r} would improve it"
                _fail(self.factor, what, numbers, i)

    def _scores(self, numbers: Inputs, i: int) -> tuple[Matrix, Matrix, bool]:
        """Scores of its variables (−inf where masked), its own; whether nothing is masked."""
        here = np.ones(self.place.size, bool)
        if numbers.mask is not None:
            here = numbers.mask[i][self.place]
        eta_u = np.where(here, numbers.eta_u[i][self.place], -np.inf)
        return eta_u, np.asarray(numbers.eta_v[i], np.float64), bool(here.all())

    @staticmethod
    def _values(m: Matrix, n: Matrix, eta_u: Matrix, eta_v: Matrix) -> Matrix:
        """The scores of structures, one per row; −inf if one uses a masked variable."""
        finite = np.where(np.isneginf(eta_u), 0.0, eta_u)
        forbidden = m[:, np.isneginf(eta_u)].any(axis=1)
        return np.asarray(np.where(forbidden, -np.inf, m @ finite + n @ eta_v))

    def _asked_twice(
        self, name: str, ask: Ask, eta_u: Matrix, eta_v: Matrix, numbers: Inputs, i: int
    ) -> Structure | None:
        first, again = ask(eta_u.copy(), eta_v.copy()), ask(eta_u.copy(), eta_v.copy())
        if first is None or again is None:
            same = first is again
        else:
            same = all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        if not same:
            _fail(self.factor, f"{name} answered {first!r}, then {again!r}", numbers, i)
        return first

    def _add(self, m: Matrix, n: Matrix, numbers: Inputs, i: int) -> None:
        for row in m:
            if self.allowed is not None and not self.allowed(
                self.factor._laid_out(row).astype(bool)
            ):
                _fail(self.factor, f"the structure {row!r} is not allowed", numbers, i)
        both = np.concatenate([self.assignments, m]), np.concatenate([self.features, n])
        distinct = np.unique(np.hstack(both), axis=0)
        self.assignments, self.features = np.split(distinct, [self.place.size], axis=1)


def _tolerance(eta_u: Matrix, eta_v: Matrix) -> float:
    finite = eta_u[np.isfinite(eta_u)]
    return float(1e-8 * (1 + np.abs(finite).max(initial=0) + np.abs(eta_v).max(initial=0)))


def _structures_of(raw: RawSolution, factor: StructuredFactor) -> list[tuple[Matrix, ...]]:
    """Per instance `(p, m, n)`: probabilities (K,), assignments (K, d), features (K, s)."""
    found, total = raw.structures, int(raw.structures.count.sum())
    m, n = np.zeros((total, factor._size)), np.zeros((total, factor._num_scores))
    if found.dense.size:
        n[:] = found.dense.reshape(n.shape)
    elif found.features.size:
        row, slot = np.nonzero(found.features.reshape(total, -1) >= 0)
        np.add.at(n, (row, found.features.reshape(total, -1)[row, slot]), 1.0)
    row, slot = np.nonzero(found.on.reshape(total, factor._slots) >= 0)
    m[row, found.on.reshape(total, factor._slots)[row, slot]] = 1.0
    ends = np.cumsum(found.count)[:-1]
    parts = (np.split(a, ends) for a in (found.prob, m, n))
    return list(zip(*parts, strict=True))


def _oracles_of(factor: StructuredFactor) -> dict[str, Ask]:
    """All ways to find the best structure of one instance, by name."""
    oracles: dict[str, Ask] = {}
    if not isinstance(factor, Factor):
        oracles["map"] = lambda eta_u, eta_v: _flat(factor._best(eta_u[None], eta_v[None]))
        return oracles
    own = factor
    if own.native_map is not None:
        oracles["native_map"] = lambda eta_u, eta_v: own._ask(eta_u, eta_v, own._call_native)
    if type(own).map is not Factor.map:
        oracles["map"] = own._ask
    if hasattr(own, "map_batch"):
        oracles["map_batch"] = lambda eta_u, eta_v: own._call_batch(eta_u[None], eta_v[None])[0]
    return oracles


def _flat(answer: Any) -> Structure | None:
    return None if answer is None else (answer[0].reshape(-1), answer[1].reshape(-1))
