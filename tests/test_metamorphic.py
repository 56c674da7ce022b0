"""Properties that need no oracle: what must hold for every graph, and graphs that must agree."""

from dataclasses import replace

import numpy as np
import oracle
import pytest
from graphs import build, exact_or_none, solved
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Problem, Term
from problems import ALL, LOGIC, random_problem, random_term

import factormax as fm

TIGHT = {"tol": 1e-10}
seeds = st.integers(0, 2**32 - 1)
scales = st.sampled_from([0.1, 1.0, 10.0, 1e3])
few = settings(max_examples=40, deadline=None, derandomize=True)


def draw(seed, scale=1.0, n=None, **options) -> tuple[np.random.Generator, Problem]:
    rng = np.random.default_rng(seed)
    n = n or int(rng.integers(2, 10))
    return rng, random_problem(rng, n, int(rng.integers(1, 8)), scale=scale, **options)


def value_of(problem, **options):
    return solved(problem, **TIGHT, **options)[0].u.value


def value_and_vjp(problem, grad):
    built, solution = solved(problem, **TIGHT)
    return built.u.value, solution.vjp({built.u: grad})[built.u]


# Properties ----------------------------------------------------------------------------------

NO_SCORES = tuple(kind for kind in ALL if kind != "Pair")


@few
@given(seeds, scales)
def test_feasible(seed, scale):
    """Every row holds; the residuals say so too."""
    _, problem = draw(seed, scale)
    built, solution = solved(problem)
    qp = oracle._lower(problem.eta, [t for t in problem.terms if t.kind != "Pair"])
    mu = built.u.value
    assert (qp.G @ mu <= qp.h + 1e-5).all()
    np.testing.assert_allclose(qp.A @ mu, qp.b, atol=1e-5)
    assert ((mu >= 0) & (mu <= 1)).all()
    assert solution.primal_residual <= 1e-6 and solution.dual_residual <= 1e-6


@few
@given(seeds, scales)
def test_permuting_the_variables_permutes_the_answer(seed, scale):
    rng, problem = draw(seed, scale)
    order = rng.permutation(len(problem.eta))
    place = np.argsort(order)
    terms = tuple(replace(t, vars=tuple(place[list(t.vars)])) for t in problem.terms)
    moved = Problem(problem.eta[order], terms)
    np.testing.assert_allclose(value_of(moved), value_of(problem)[order], atol=1e-8)


@few
@given(seeds)
def test_the_order_of_the_factors_does_not_matter(seed):
    rng, problem = draw(seed)
    shuffled = tuple(problem.terms[k] for k in rng.permutation(len(problem.terms)))
    np.testing.assert_allclose(
        value_of(replace(problem, terms=shuffled)), value_of(problem), atol=1e-8
    )


@few
@given(seeds, scales, st.sampled_from([1e-3, 1.0, 10.0]))
def test_non_expansive(seed, scale, distance):
    """A proximal map: the answers are no farther apart than the scores."""
    rng, problem = draw(seed, scale)
    moved = problem.with_eta(problem.eta + distance * rng.normal(size=len(problem.eta)))
    difference = value_of(moved) - value_of(problem)
    step = moved.eta - problem.eta
    assert difference @ difference <= difference @ step + 1e-8 * np.abs(step).sum()  # firmly


@few
@given(seeds, scales)
def test_jacobian_is_a_projector(seed, scale):
    """Without factor scores: symmetric, idempotent."""
    _, problem = draw(seed, scale, kinds=NO_SCORES)
    built, solution = solved(problem, **TIGHT)
    J = np.array([solution.vjp({built.u: e})[built.u] for e in np.eye(len(problem.eta))])
    np.testing.assert_allclose(J, J.T, atol=1e-6)
    np.testing.assert_allclose(J @ J, J, atol=1e-6)


@few
@given(seeds)
def test_jacobian_is_symmetric_with_pair_scores(seed):
    """∂(mu, mu_pair)/∂(eta, scores) is the Hessian of a convex function."""
    _, problem = draw(seed, kinds=("Pair", "Xor", "Budget"))
    built, solution = solved(problem, **TIGHT)
    if built.pair is None:
        return
    n, p = len(problem.eta), len(problem.pair_scores)
    J = []
    for e in np.eye(n + p):
        out = solution.vjp({built.u: e[:n], built.pair: e[n:]})
        J.append(np.concatenate([out[built.u], out[built.pair]]))
    np.testing.assert_allclose(J, np.transpose(J), atol=1e-6)
    assert np.linalg.eigvalsh(np.array(J)).min() >= -1e-6


@few
@given(seeds, scales)
def test_idempotent(seed, scale):
    """Without factor scores the answer is a projection: of itself, itself."""
    _, problem = draw(seed, scale, kinds=NO_SCORES)
    mu = value_of(problem)
    np.testing.assert_allclose(value_of(problem.with_eta(mu)), mu, atol=1e-7)


@few
@given(seeds, scales)
def test_objective_is_that_of_the_value(seed, scale):
    _, problem = draw(seed, scale)
    built, solution = solved(problem, **TIGHT)
    mu = built.u.value
    value = problem.eta @ mu - mu @ mu / 2
    if built.pair is not None:
        value += problem.pair_scores @ built.pair.value
    assert solution.objective == pytest.approx(value, abs=1e-9 * max(1, scale), rel=1e-9)


# Graphs that must agree ----------------------------------------------------------------------


@few
@given(seeds, scales, st.integers(2, 4))
def test_the_same_constraint_again_changes_nothing(seed, scale, times):
    _, problem = draw(seed, scale, kinds=NO_SCORES)
    again = replace(problem, terms=problem.terms + problem.terms[:2] * (times - 1))
    np.testing.assert_allclose(value_of(again), value_of(problem), atol=1e-8)


@pytest.mark.parametrize("method", ["auto", "admm"])
@pytest.mark.parametrize("kind", NO_SCORES)
def test_a_factor_twice_is_the_factor(kind, method):
    """The degree correction, value and gradient."""
    rng = np.random.default_rng(0)
    options = {"method": method, "tol": 1e-9, "max_iter": 100_000}
    for d in (1, 2, 5):
        term = random_term(kind, range(d), rng, negate=True)
        problem = Problem(rng.normal(size=d), (term,))
        grad = rng.normal(size=d)
        once, twice = (
            solved(replace(problem, terms=(term,) * times), **options) for times in (1, 2)
        )
        np.testing.assert_allclose(twice[0].u.value, once[0].u.value, atol=1e-7)
        gradients = [solution.vjp({built.u: grad})[built.u] for built, solution in (once, twice)]
        np.testing.assert_allclose(*gradients, atol=1e-6)


def test_a_pair_twice_is_a_pair_of_twice_the_score():
    rng = np.random.default_rng(0)
    for _ in range(20):
        pair = Term("Pair", (0, 1), scores=rng.normal())
        eta = rng.normal(size=2)
        twice = value_of(Problem(eta, (pair, pair)))
        once = value_of(Problem(eta, (replace(pair, scores=2 * pair.scores),)))
        np.testing.assert_allclose(twice, once, atol=1e-8)


@few
@given(seeds, scales)
def test_negation_of_every_literal_mirrors_the_answer(seed, scale):
    """mu ↦ 1 − mu maps scores eta to 1 − eta."""
    _, problem = draw(seed, scale, kinds=NO_SCORES)
    flipped = tuple(replace(t, neg=tuple(not x for x in t.neg)) for t in problem.terms)
    mirrored = Problem(1 - problem.eta, flipped)
    np.testing.assert_allclose(1 - value_of(mirrored), value_of(problem), atol=1e-7)


@few
@given(seeds)
def test_a_union_of_disjoint_graphs_is_the_concatenation(seed):
    rng, first = draw(seed)
    second = random_problem(rng, 5, 4)
    n = len(first.eta)
    moved = tuple(replace(t, vars=tuple(j + n for j in t.vars)) for t in second.terms)
    union = Problem(np.concatenate([first.eta, second.eta]), first.terms + moved)
    grad = rng.normal(size=n + 5)
    value, out = value_and_vjp(union, grad)
    parts = value_and_vjp(first, grad[:n]), value_and_vjp(second, grad[n:])
    np.testing.assert_allclose(value, np.concatenate([p[0] for p in parts]), atol=1e-8)
    np.testing.assert_allclose(out, np.concatenate([p[1] for p in parts]), atol=1e-6)


@few
@given(seeds)
def test_a_constraint_that_the_answer_meets_changes_nothing(seed):
    rng, problem = draw(seed)
    mu = value_of(problem)
    costs = rng.random(len(mu))
    loose = Term("Knapsack", range(len(mu)), params={"costs": costs, "budget": costs @ mu + 0.1})
    same = replace(problem, terms=(*problem.terms, loose))
    np.testing.assert_allclose(value_of(same), mu, atol=1e-8)


DE_MORGAN = {
    "Or": "Nand",
    "OrOut": "AndOut",
    "AndOut": "OrOut",
    "Nand": "Or",
}


@pytest.mark.parametrize("kind", DE_MORGAN)
def test_de_morgan(kind):
    """Inside a larger graph, where degrees differ."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        problem = random_problem(rng, 7, 4)
        term = Term(kind, rng.choice(7, 4, replace=False), rng.random(4) < 0.5)
        opposite = replace(term, kind=DE_MORGAN[kind], neg=tuple(not x for x in term.neg))
        a, b = (replace(problem, terms=(*problem.terms, t)) for t in (term, opposite))
        if exact_or_none(a) is not None:
            np.testing.assert_allclose(value_of(a), value_of(b), atol=1e-8)


@pytest.mark.parametrize(
    "one, many",
    [
        (Term("Exactly", range(4), params={"count": 2}), ("Budget", "AtLeast")),
        (Term("Xor", range(4)), ("AtMostOne", "Or")),
    ],
)
def test_an_equality_is_two_inequalities(one, many):
    rng = np.random.default_rng(0)
    names = {"Budget": "budget", "AtLeast": "count"}
    parts = tuple(
        Term(kind, range(4), params={names[kind]: 2} if kind in names else {}) for kind in many
    )
    for eta in rng.normal(size=(10, 4)):
        grad = rng.normal(size=4)
        (a, grad_a), (b, grad_b) = (
            value_and_vjp(Problem(eta, terms), grad) for terms in ((one,), parts)
        )
        np.testing.assert_allclose(a, b, atol=1e-8)
        np.testing.assert_allclose(grad_a, grad_b, atol=1e-6)


def test_a_pair_is_a_table_of_and_out():
    """s·[both on] through an explicit variable: an AndOut with no score of its own, and a Pair.

    With scores so large that the answer is 0/1, the extra variable's quadratic does not matter.
    """
    rng = np.random.default_rng(0)
    for _ in range(20):
        eta, s = 1e4 * rng.normal(size=2), 1e4 * rng.normal()
        pair = value_of(Problem(eta, (Term("Pair", (0, 1), scores=s),)))
        explicit = value_of(Problem(np.append(eta, s), (Term("AndOut", (0, 1, 2)),)))
        np.testing.assert_allclose(pair, explicit[:2], atol=1e-7)


def test_rows_and_columns_are_a_doubly_substochastic_matrix():
    rng = np.random.default_rng(0)
    fg = fm.FactorGraph()
    u = fg.variable_from(rng.normal(size=(5, 8)))
    fg.add(fm.Xor(u, axis=1))
    for j in range(8):
        fg.add(fm.AtMostOne(u[:, j]))
    fg.solve(tol=1e-10)
    np.testing.assert_allclose(u.value.sum(1), 1, atol=1e-9)
    assert (u.value.sum(0) <= 1 + 1e-9).all()


@few
@given(seeds)
def test_a_shift_inside_an_xor_changes_nothing(seed):
    rng = np.random.default_rng(seed)
    eta = rng.normal(size=(3, 4))
    cells = np.arange(12).reshape(3, 4)
    terms = [Term("Xor", row) for row in cells] + [Term("AtMostOne", col) for col in cells.T]
    shifted = eta + rng.normal(size=(3, 1))
    np.testing.assert_allclose(
        value_of(Problem(shifted.ravel(), tuple(terms))),
        value_of(Problem(eta.ravel(), tuple(terms))),
        atol=1e-8,
    )


@few
@given(seeds)
def test_a_vectorised_pair_is_a_loop_of_pairs(seed):
    rng = np.random.default_rng(seed)
    eta, i, j = rng.normal(size=6), np.array([0, 0, 1, 3]), np.array([1, 2, 2, 4])
    scores = rng.normal(size=4)
    values = []
    for at_once in (True, False):
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        if at_once:
            pair = fg.add(fm.Pair(u[i], u[j], scores))
            fg.solve(**TIGHT)
            marginals = pair.value
        else:
            pairs = [fg.add(fm.Pair(u[a], u[b], s)) for a, b, s in zip(i, j, scores, strict=True)]
            fg.solve(**TIGHT)
            marginals = [pair.value for pair in pairs]
        values.append(np.concatenate([u.value, marginals]))
    np.testing.assert_allclose(*values, atol=1e-8)


@few
@given(seeds)
def test_gradient_of_a_batch_is_that_of_each(seed):
    rng, problem = draw(seed, kinds=LOGIC)
    eta, grad = rng.normal(size=(2, 4, len(problem.eta)))
    batch = build(problem, eta, batch_dims=1)
    out = batch.fg.solve(**TIGHT).vjp({batch.u: grad})[batch.u]
    for row in range(4):
        _, alone = value_and_vjp(problem.with_eta(eta[row]), grad[row])
        np.testing.assert_allclose(out[row], alone, atol=1e-6)
