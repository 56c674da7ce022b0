"""LP-MAP: HiGHS on the same polytope says what the value is, enumeration what is best."""

from typing import NamedTuple

import numpy as np
import pytest
from exact import (
    SCALES,
    SMALL,
    Infeasible,
    assignments,
    best_of,
    linear_program,
    of_rows,
    random_mixture,
    random_rows,
    scaled,
    score_of,
    with_large_features,
    with_ties,
    without_some,
)
from oracle import Problem, Term
from problems import ALL, fuzzed_problem, unplanted_problem
from real_data import real_data
from scipy.optimize import linear_sum_assignment, linprog
from test_structured import MIXTURES, Mixture

import factormax as fm

VALUE = 1e-6  # relative, of the value
ROUNDING = 1e-9  # relative, of a bound or of a 0/1 answer
ENUMERABLE = 14  # variables
AD3 = {"method": "ad3", "tol": 1e-8, "max_iter": 200_000}


def assert_maximises(mixture: Mixture, **options) -> fm.Solution:
    """All that can be said of the answer; returns it. The problem must be feasible."""
    problem = mixture.problem()
    answer = mixture.built()
    solution = answer.fg.solve_map(**options)
    assert solution.status is fm.Status.CONVERGED, solution
    exact = linear_program(problem)
    size = 1 + abs(exact)
    assert abs(solution.objective - exact) <= VALUE * size
    assert solution.upper_bound >= exact - ROUNDING * size
    mu = answer.u.value
    gone = np.isneginf(problem.eta)
    assert ((mu >= 0) & (mu <= 1)).all() and not mu[gone].any()
    assert solution.primal_residual <= options.get("tol", 1e-6)
    if solution.integral:
        assert np.isin(mu, (0, 1)).all()
        score = score_of(problem, mu[None])[0]
        assert abs(score - solution.objective) <= ROUNDING * size
    if mixture.n <= ENUMERABLE:
        best, _ = best_of(problem)
        assert solution.upper_bound >= best - ROUNDING * size
        if solution.integral:
            assert abs(score - best) <= ROUNDING * size
    return solution


# The value ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", ALL)
def test_rows(kind, scale):
    """One kind of factor over and over, negated at random; and with ties."""
    rng = np.random.default_rng([0, ALL.index(kind)])
    for _ in range(4):
        mixture = random_rows(rng, (kind,), scale)
        assert_maximises(mixture)
        assert_maximises(with_ties(mixture, rng))


@pytest.mark.parametrize("scale", SCALES)
def test_all_kinds_together(scale):
    rng = np.random.default_rng(1)
    integral = 0
    for _ in range(20):
        integral += bool(assert_maximises(random_rows(rng, ALL, scale, n=10, factors=8)).integral)
    assert integral >= 5


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", SMALL)
def test_structured(name, scale):
    """A structured factor, and others over the same variables."""
    rng = np.random.default_rng([2, list(SMALL).index(name)])
    for _ in range(2):
        mixture = random_mixture(rng, [SMALL[name]], n=9, factors=3, scale=scale)
        assert_maximises(mixture)
        assert_maximises(with_ties(mixture, rng))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures(name, scale):
    rng = np.random.default_rng(3)
    mixture = MIXTURES[name].drawn(rng, scale)
    assert_maximises(mixture)
    assert_maximises(with_ties(mixture, rng))


def test_two_structured_factors():
    rng = np.random.default_rng(4)
    names = list(SMALL)
    for k in range(30):
        cases = [SMALL[str(name)] for name in rng.choice(names, 2)]
        mixture = random_mixture(rng, cases, n=10, factors=2, scale=SCALES[k % 5])
        assert_maximises(mixture)


def test_a_factor_with_large_features():
    """Several of them for the same assignment: the best ones count."""
    rng = np.random.default_rng(34)
    for k in range(40):
        assert_maximises(with_large_features(rng, SCALES[k % 5]))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 3000, 300))
def test_fuzzed(start):
    for seed in range(start, start + 300):
        assert_maximises(of_rows(fuzzed_problem(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_fuzzed_structured(name):
    rng = np.random.default_rng([5, list(SMALL).index(name)])
    names = list(SMALL)
    for k in range(100):
        cases = [SMALL[name], SMALL[str(rng.choice(names))]]
        mixture = random_mixture(rng, cases, n=12, factors=4, scale=SCALES[k % 5])
        # One in some thousands needs more than the default number of passes.
        assert_maximises(mixture, max_iter=10_000)
        assert_maximises(with_ties(mixture, rng), max_iter=10_000)


def test_pairs_of_negated_variables():
    rng = np.random.default_rng(6)
    for scale in SCALES:
        eta, scores = scale * rng.normal(size=4), scale * rng.normal(size=3)
        ends = [(0, 1), (1, 2), (2, 0)]
        flips = [(True, False), (True, True), (False, True)]
        terms = [Term("Pair", e, f, scores=s) for e, f, s in zip(ends, flips, scores, strict=True)]
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        for (i, j), (a, b), s in zip(ends, flips, scores, strict=True):
            fg.add(fm.Pair(~u[i] if a else u[i], ~u[j] if b else u[j], s))
        solution = fg.solve_map()
        exact = linear_program(Problem(eta, tuple(terms)))
        assert abs(solution.objective - exact) <= VALUE * (1 + abs(exact))


def test_the_value_is_that_of_the_answer():
    rng = np.random.default_rng(7)
    for scale in SCALES:
        mixture = MIXTURES["structured_and_pairs"].drawn(rng, scale)
        answer = mixture.built()
        solution = answer.fg.solve_map()
        value = mixture.eta @ answer.u.value
        value += np.sum(mixture.own[0]["transitions"] * answer.structured[0].value)
        scores = [t.scores for t in mixture.terms]
        value += sum(s * f.value for s, f in zip(scores, answer.pairs, strict=True))
        assert abs(value - solution.objective) <= ROUNDING * (1 + abs(value))


@pytest.mark.parametrize("method", ["auto", "ad3"])
def test_converged_means_that_the_gap_is_closed(method):
    """To `tol`, relative to the value and the size of the scores."""
    rng = np.random.default_rng(8)
    for scale in (1e-8, 0.1, 1.0, 10.0, 100.0):
        for mixture in MIXTURES.values():
            drawn = mixture.drawn(rng, scale)
            for each, size in ((drawn, scale), (with_ties(drawn, rng), 1.0)):
                solution = each.built().fg.solve_map(method=method, max_iter=200_000)
                gap = solution.upper_bound - solution.objective
                assert gap <= 1.001e-6 * (size + abs(solution.objective))


@pytest.mark.parametrize("method", ["auto", "ad3"])
def test_the_scale_of_the_scores_does_not_matter(method):
    """By a power of two even the passes are the same."""
    rng = np.random.default_rng(81)
    for _ in range(10):
        mixture = random_rows(rng, ALL, 1.0, n=10, factors=8)
        found = []
        for scale in (2.0**-30, 1.0, 2.0**30):
            answer = scaled(mixture, scale).built()
            solution = answer.fg.solve_map(method=method, max_iter=200_000)
            assert solution.converged
            outcome = (solution.objective / scale, solution.upper_bound / scale)
            found.append((answer.u.value, *outcome, solution.iterations))
        for other in found[::2]:
            for a, b in zip(found[1], other, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("method", ["auto", "ad3"])
@pytest.mark.parametrize("score", [1.0, -1.0])
@pytest.mark.parametrize("negated", [(1, 1), (0, 1), (1, 0), (0, 0)])
def test_the_bound_of_a_negated_pair(negated, score, method):
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros(2))
    fg.add(fm.Xor(u))
    literals = [~u[k] if negated[k] else u[k] for k in range(2)]
    fg.add(fm.Pair(*literals, score))
    solution = fg.solve_map(method=method, max_iter=200_000)
    # One of the two is on: the pair is the other's literal at best, and half of each if both agree.
    best = (0.5 if negated[0] == negated[1] else 1.0) if score > 0 else 0.0
    assert solution.converged
    assert solution.objective == pytest.approx(best, abs=1e-5)
    assert best - 1e-12 <= solution.upper_bound <= best + 1e-5


@pytest.mark.parametrize("scale", SCALES)
def test_negated_pairs(scale):
    rng = np.random.default_rng(82)
    for _ in range(20):
        fg, best, exact = negated_pairs(rng, scale)
        solution = fg.solve_map()
        assert solution.converged
        assert abs(solution.objective - exact) <= VALUE * (scale + abs(exact))
        assert solution.upper_bound >= exact - ROUNDING * (scale + abs(exact))
        decoded = fg.decode()
        assert decoded.optimal
        assert abs(decoded.objective - best) <= ROUNDING * (scale + abs(best))


class NegatedPairs(NamedTuple):
    fg: fm.FactorGraph
    best: float  # of all assignments
    exact: float  # of the relaxation


def negated_pairs(rng, scale: float, n=7) -> NegatedPairs:
    """A ring and chords of pairs with negated literals, beside a count."""
    eta = scale * rng.normal(size=n)
    ends = np.array([(j, (j + 1) % n) for j in range(n)] + [(0, 3), (1, 4), (2, 6)])
    negated = rng.integers(0, 2, ends.shape)
    scores = scale * rng.normal(size=len(ends))
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    fg.add(fm.Exactly(u, 3))
    for (i, j), (not_i, not_j), score in zip(ends, negated, scores, strict=True):
        fg.add(fm.Pair(~u[i] if not_i else u[i], ~u[j] if not_j else u[j], score))
    x = assignments(n)
    x = x[x.sum(axis=1) == 3]
    both = (x[:, ends] ^ negated).all(axis=2)
    best = (x @ eta + both @ scores).max()
    # mu and one value b of each pair: max(0, l1 + l2 - 1) <= b <= min(l1, l2).
    rows, sides = [], []
    for p, ((i, j), (not_i, not_j)) in enumerate(zip(ends, negated, strict=True)):
        for k, sign, const in ((i, 1 - 2 * not_i, not_i), (j, 1 - 2 * not_j, not_j)):
            row = np.zeros(n + len(ends))
            row[k], row[n + p] = -sign, 1
            rows.append(row)
            sides.append(const)
        row = np.zeros(n + len(ends))
        row[i], row[j], row[n + p] = 1 - 2 * not_i, 1 - 2 * not_j, -1
        rows.append(row)
        sides.append(1 - not_i - not_j)
    count = np.concatenate([np.ones(n), np.zeros(len(ends))])[None]
    cost = -np.concatenate([eta, scores])
    exact = -linprog(cost, rows, sides, count, [3], bounds=(0, 1)).fun
    return NegatedPairs(fg, best, exact)


def test_variables_in_no_factor():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([2.0, -1.0, 0.5, -np.inf]))
    solution = fg.solve_map()
    np.testing.assert_array_equal(u.value, [1, 0, 1, 0])
    assert solution.objective == solution.upper_bound == 2.5 and solution.integral


def test_the_relaxation_of_a_frustrated_cycle_is_not_tight():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.ones(3))
    fg.add(fm.Pair(u, u[[1, 2, 0]], -2.0))
    solution = fg.solve_map()
    np.testing.assert_allclose(u.value, 0.5, atol=1e-6)
    assert not solution.integral
    assert abs(solution.objective - 1.5) <= 1e-6  # the best structure scores 1
    fg = fm.FactorGraph()
    u = fg.variable_from(np.ones(3))
    fg.add(fm.Knapsack(u, np.array([2.0, 2.0, 2.0]), 3.0))
    solution = fg.solve_map()
    assert not solution.integral and abs(solution.objective - 1.5) <= 1e-6


# Masks and infeasible graphs ----------------------------------------------------------------------


def assert_maximises_if_feasible(mixture: Mixture, **options) -> bool:
    try:
        linear_program(mixture.problem())
    except Infeasible:
        answer = mixture.built()
        solution = answer.fg.solve_map(on_failure="ignore", **options)
        assert solution.status is fm.Status.INFEASIBLE
        assert solution.objective == -np.inf and solution.upper_bound == -np.inf
        assert not solution.integral
        assert np.isnan(answer.u.value[~np.isneginf(mixture.eta)]).all()
        return False
    assert_maximises(mixture, **options)
    return True


def test_minus_infinity():
    rng = np.random.default_rng(9)
    found = [0, 0]
    for k in range(60):
        mixture = without_some(random_rows(rng, ALL, SCALES[k % 5]), rng)
        if mixture is not None:
            found[assert_maximises_if_feasible(mixture)] += 1
    assert min(found) >= 5


@pytest.mark.parametrize("name", SMALL)
def test_minus_infinity_in_structured_factors(name):
    rng = np.random.default_rng([10, list(SMALL).index(name)])
    for k in range(6):
        mixture = random_mixture(rng, [SMALL[name]], n=9, factors=3, scale=SCALES[k % 5])
        mixture = without_some(mixture, rng)
        if mixture is not None:
            assert_maximises_if_feasible(mixture)


def test_a_mask_is_minus_infinity():
    rng = np.random.default_rng(11)
    terms = random_rows(rng, ALL, n=8, factors=5).terms
    eta, mask = rng.normal(size=(20, 8)), rng.random((20, 8)) < 0.8
    found = []
    for scores, given in [(eta, mask), (np.where(mask, eta, -np.inf), None)]:
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores, mask=given)
        for term in terms:
            literals = [~u[j] if n else u[j] for j, n in zip(term.vars, term.neg, strict=True)]
            if term.kind == "Pair":
                fg.add(fm.Pair(*literals, term.scores))
            else:
                fg.add(getattr(fm, term.kind)(literals, **term.params))
        solution = fg.solve_map(on_failure="ignore")
        found.append((u.value, solution.objective, solution.upper_bound))
    for ours, other in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, other)
    for row in range(20):
        problem = Problem(eta[row], terms).masked(mask[row])
        try:
            exact = linear_program(problem)
        except Infeasible:
            exact = -np.inf
        assert found[0][1][row] == pytest.approx(exact, rel=VALUE, abs=VALUE)


def test_a_ragged_batch():
    """A padded instance is the smaller one: its value and its structures."""
    rng = np.random.default_rng(12)
    eta, transitions = rng.normal(size=(4, 5, 3)), rng.normal(size=(3, 3))
    final, lengths = rng.normal(size=3), np.array([5, 3, 1, 4])
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta, mask=(np.arange(5) < lengths[:, None])[..., None])
    factor = fg.add(fm.Sequence(u, transitions, final=final))
    fg.add(fm.AtMostOne(u[..., 0]))
    solution = fg.solve_map()
    for row, n in enumerate(lengths):
        alone = fm.FactorGraph()
        v = alone.variable_from(eta[row, :n])
        own = alone.add(fm.Sequence(v, transitions, final=final))
        alone.add(fm.AtMostOne(v[:, 0]))
        single = alone.solve_map()
        assert solution.objective[row] == pytest.approx(single.objective, rel=VALUE)
        np.testing.assert_allclose(u.value[row, :n], v.value, atol=1e-9)
        np.testing.assert_allclose(factor.value[row], own.value, atol=1e-9)
        assert not u.value[row, n:].any()


def test_graphs_that_may_be_infeasible():
    found = [0, 0]
    for seed in range(100):
        found[assert_maximises_if_feasible(of_rows(unplanted_problem(seed)))] += 1
    assert min(found) >= 20


@pytest.mark.slow
def test_many_graphs_that_may_be_infeasible():
    for seed in range(100, 3000):
        assert_maximises_if_feasible(of_rows(unplanted_problem(seed)))


def test_infeasible_beside_a_structured_factor():
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.zeros((2, 3, 3)))
    budget = np.array([3, 1])
    tree = fg.add(fm.DepTree(u, single_root=True))
    fg.add(fm.AtLeast(u[0, 0], 1))
    fg.add(fm.Budget([u[1, 0], u[1, 2], u[2, 0], u[2, 1]], budget))
    for method in ("auto", "ad3"):
        solution = fg.solve_map(method=method, on_failure="ignore", max_iter=100_000)
        assert list(solution.status) == [fm.Status.CONVERGED, fm.Status.INFEASIBLE]
        assert np.isfinite(u.value[0]).all() and np.isnan(u.value[1]).all()
        assert tree.num_structures[1] == 0
        out = solution.vjp({u: np.ones((2, 3, 3))}, objective=1.0)[u]
        assert np.isfinite(out).all() and not out[1].any()


def test_no_structure_at_all():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([[0.0, -np.inf], [1.0, -np.inf]]))
    fg.add(fm.Matching(u))
    solution = fg.solve_map(on_failure="ignore")
    assert solution.status is fm.Status.INFEASIBLE and not solution.integral
    assert np.isnan(u.value[:, 0]).all() and solution.upper_bound == -np.inf


# AD3 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_ad3_of_rows(kind):
    rng = np.random.default_rng([13, ALL.index(kind)])
    for scale in (0.1, 1.0, 10.0):
        assert_maximises(random_rows(rng, (kind,), scale), **AD3)


@pytest.mark.parametrize("name", MIXTURES)
def test_ad3_of_mixtures(name):
    rng = np.random.default_rng(14)
    for scale in (0.3, 3.0):
        mixture = MIXTURES[name].drawn(rng, scale)
        assert_maximises(mixture, **AD3)
        assert_maximises(with_ties(mixture, rng), **AD3)


def test_ad3_of_graphs_that_may_be_infeasible():
    for seed in range(0, 60, 3):
        assert_maximises_if_feasible(of_rows(unplanted_problem(seed)), **AD3)


@pytest.mark.parametrize("step_size", [0.2, 1.0, 5.0])
def test_ad3_with_other_step_sizes(step_size):
    mixture = MIXTURES["tree_budgets_and_logic"].drawn(np.random.default_rng(15))
    assert_maximises(mixture, **AD3, step_size=step_size)


# Few passes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_a_structured_factor_alone_takes_one_pass(name):
    case = SMALL[name]
    rng = np.random.default_rng(16)
    for scale in SCALES:
        eta, own = case.draw(rng, scale)
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        factor = fg.add(case.make(u, **own))
        solution = fg.solve_map()
        scores = eta.reshape(-1) @ case.M + case.flat(own) @ case.N
        assert solution.iterations == 1 and solution.oracle_calls == 1 and solution.integral
        np.testing.assert_array_equal(u.value.reshape(-1), case.M[:, scores.argmax()])
        assert solution.objective == pytest.approx(scores.max(), rel=1e-12)
        assert solution.upper_bound == pytest.approx(scores.max(), rel=1e-12)
        np.testing.assert_array_equal(factor.structures.reshape(1, -1), u.value.reshape(1, -1))
        np.testing.assert_array_equal(factor.probs, [1.0])
        if case.scores:
            first = int(np.prod(next(iter(case.scores.values()))))
            np.testing.assert_array_equal(np.ravel(factor.value), case.N[:first, scores.argmax()])


def test_structured_factors_that_share_nothing_take_one_pass():
    rng = np.random.default_rng(17)
    fg = fm.FactorGraph(batch_dims=1)
    u, v = fg.variable_from(rng.normal(size=(5, 4, 4))), fg.variable_from(rng.normal(size=(5, 6)))
    w = fg.variable_from(rng.normal(size=(5, 2)))
    fg.add(fm.DepTree(u))
    fg.add(fm.SequenceBudget(v, 0.5, 3))
    solution = fg.solve_map()
    assert (solution.iterations == 1).all() and solution.integral.all()
    np.testing.assert_array_equal(w.value, w._record.tensors[2].scores > 0)


@pytest.mark.parametrize("kind", [k for k in ALL if k not in ("Knapsack", "Pair")])
def test_one_factor_of_rows_takes_few_passes(kind):
    rng = np.random.default_rng(18)
    params = {"Budget": {"budget": 3}, "AtLeast": {"count": 3}, "Exactly": {"count": 3}}
    for scale in SCALES:
        term = Term(kind, range(10), params=params.get(kind, {}))
        mixture = of_rows(Problem(scale * rng.normal(size=10), (term,)))
        solution = assert_maximises(mixture)
        assert solution.integral and solution.iterations <= 15


def test_trees_of_factors_are_solved_exactly():
    """Pairs on a tree, and logic on a chain: the relaxation is tight."""
    rng = np.random.default_rng(19)
    for scale in SCALES:
        parents = [int(rng.integers(0, i)) for i in range(1, 12)]
        pairs = [
            Term("Pair", (i + 1, p), scores=scale * rng.normal()) for i, p in enumerate(parents)
        ]
        logic = [
            Term(str(rng.choice(["Xor", "Or", "AtMostOne", "OrOut", "Nand"])), range(i, i + 4))
            for i in (0, 3, 6)
        ]
        for terms, n in ((pairs, 12), (logic, 10)):
            solution = assert_maximises(of_rows(Problem(scale * rng.normal(size=n), tuple(terms))))
            assert solution.integral and solution.iterations <= 60


# Batches, warm starts, float32 --------------------------------------------------------------------


def batch_of(name, rng, count=7):
    """The same factors with many scores: the instances, and the graph of them all."""
    many = [MIXTURES[name].drawn(rng) for _ in range(count)]
    for m in many[1:]:
        m.terms = many[0].terms
    eta = np.stack([m.eta for m in many])
    own = [{k: np.stack([m.own[f][k] for m in many]) for k in o} for f, o in enumerate(many[0].own)]
    return many, many[0].built(eta, own, batch_dims=1)


@pytest.mark.parametrize("method", ["auto", "ad3"])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_batch_is_a_loop(name, method):
    """To the last bit, whatever the number of threads."""
    many, batch = batch_of(name, np.random.default_rng(20))
    before, found = fm.get_num_threads(), []
    for threads in (1, 2):
        fm.set_num_threads(threads)
        try:
            solution = batch.fg.solve_map(method=method, on_failure="ignore")
        finally:
            fm.set_num_threads(before)
        found.append(batch.u.value)
        np.testing.assert_array_equal(found[0], found[-1])
    for row, m in enumerate(many):
        alone = m.built()
        single = alone.fg.solve_map(method=method, on_failure="ignore")
        np.testing.assert_array_equal(batch.u.value[row], alone.u.value)
        for word in ("objective", "upper_bound", "integral", "iterations"):
            assert getattr(solution, word)[row] == getattr(single, word)
        for together, factor in zip(batch.structured, alone.structured, strict=True):
            k = factor.num_structures
            assert together.num_structures[row] == k
            np.testing.assert_array_equal(together.probs[row, :k], factor.probs)


def test_parameters_per_instance():
    rng = np.random.default_rng(21)
    eta, budgets = rng.normal(size=(6, 5)), np.array([0, 1, 2, 3, 4, 5])
    costs, room = rng.uniform(0.5, 2, (6, 5)), rng.uniform(1, 4, 6)
    counts = np.minimum(budgets, 2)
    pair_scores = rng.normal(size=(6, 4))
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta)
    fg.add(fm.Budget(u, budgets))
    fg.add(fm.Knapsack(u, costs, room))
    fg.add(fm.AtLeast(~u[:3], counts))
    fg.add(fm.Pair(u[:-1], u[1:], pair_scores))
    solution = fg.solve_map()
    for row in range(6):
        terms = (
            Term("Budget", range(5), params={"budget": budgets[row]}),
            Term("Knapsack", range(5), params={"costs": costs[row], "budget": room[row]}),
            Term("AtLeast", range(3), (True,) * 3, {"count": counts[row]}),
            *(Term("Pair", (j, j + 1), scores=pair_scores[row, j]) for j in range(4)),
        )
        problem = Problem(eta[row], terms)
        exact = linear_program(problem)
        assert abs(solution.objective[row] - exact) <= VALUE * (1 + abs(exact))
        assert solution.upper_bound[row] >= best_of(problem)[0] - ROUNDING


@pytest.mark.parametrize("name", MIXTURES)
def test_warm_started(name):
    """From the answer to nearby scores, and to the same: right, and in fewer passes."""
    rng = np.random.default_rng(22)
    cold, warm = 0, 0
    for _ in range(5):
        mixture = MIXTURES[name].drawn(rng)
        near = mixture.moved(MIXTURES[name].drawn(rng), 1e-3)
        cold += int(assert_maximises(mixture).iterations)
        for start in (near, mixture):
            before = start.built().fg.solve_map()
            solution = assert_maximises(mixture, warm_start=before)
        warm += int(solution.iterations)
    assert warm <= cold


def test_a_warm_start_of_other_factors_is_refused():
    rng = np.random.default_rng(23)
    other = MIXTURES["tree_and_budgets"].drawn(rng).built().fg.solve_map()
    with pytest.raises(fm.ShapeError, match="warm_start"):
        MIXTURES["matching_and_budget"].drawn(rng).built().fg.solve_map(warm_start=other)
    with pytest.raises(fm.GraphError, match="takes a Solution"):
        MIXTURES["matching_and_budget"].drawn(rng).built().fg.solve_map(warm_start=3)


@pytest.mark.parametrize("name", MIXTURES)
def test_float32(name):
    """As exact as the scores are."""
    rng = np.random.default_rng(24)
    for scale in (0.1, 1.0, 10.0):
        mixture = MIXTURES[name].drawn(rng, scale)
        own = [{k: np.asarray(v, np.float32) for k, v in o.items()} for o in mixture.own]
        answer = mixture.built(mixture.eta.astype(np.float32), own)
        solution = answer.fg.solve_map()
        assert solution.converged and answer.u.value.dtype == np.float32
        exact = linear_program(mixture.problem())
        assert abs(solution.objective - exact) <= 3e-6 * (1 + abs(exact))
        assert solution.upper_bound >= exact - 1e-6 * (1 + abs(exact))


# Gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_the_gradient_of_the_value_is_the_answer(name):
    mixture = MIXTURES[name].drawn(np.random.default_rng(26))
    answer = mixture.built()
    solution = answer.fg.solve_map()
    out = solution.vjp(objective=1.0)
    np.testing.assert_array_equal(out[answer.u], answer.u.value)
    for factor in [*answer.structured, *answer.pairs]:
        if factor._score_parts:
            np.testing.assert_array_equal(out[factor], factor.value)
    np.testing.assert_array_equal(solution.vjp(objective=-2.0)[answer.u], -2 * answer.u.value)


def test_the_gradient_of_the_value_of_each_instance():
    _, batch = batch_of("structured_and_pairs", np.random.default_rng(27))
    solution = batch.fg.solve_map()
    weight = np.arange(7.0)
    out = solution.vjp(objective=weight)
    np.testing.assert_array_equal(out[batch.u], batch.u.value * weight[:, None])
    np.testing.assert_array_equal(
        out[batch.structured[0]], batch.structured[0].value * weight[:, None, None, None]
    )
    shared = (np.asarray(batch.pairs[0].value) * weight).sum()
    assert out[batch.pairs[0]] == pytest.approx(shared, abs=1e-12)


def test_gradcheck():
    """Of the value, in all kinds of scores, away from ties."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)

    def value(eta, transitions, scores):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta)
        fg.add(fm.Sequence(u, transitions))
        fg.add(fm.AtMostOne(u[:, 1]))
        fg.add(fm.Pair(u[0], u[2], scores))
        return fg.solve_map(tol=1e-10, max_iter=10_000).objective

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    for _ in range(3):
        assert torch.autograd.gradcheck(value, (draw(2, 3, 3), draw(3, 3), draw(3)))


def test_the_value_in_torch():
    torch = pytest.importorskip("torch")
    mixture = MIXTURES["grid_of_chains"].drawn(np.random.default_rng(28))
    numpy = mixture.built()
    expected = numpy.fg.solve_map()
    eta = torch.tensor(mixture.eta, requires_grad=True)
    answer = mixture.built(eta)
    solution = answer.fg.solve_map()
    assert solution.objective.item() == expected.objective
    assert solution.upper_bound.item() == expected.upper_bound
    assert solution.integral.dtype == torch.bool and solution.integral == bool(expected.integral)
    solution.objective.backward()
    np.testing.assert_array_equal(eta.grad.numpy(), numpy.u.value)
    np.testing.assert_array_equal(answer.u.value.detach().numpy(), numpy.u.value)


# Structures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_structures(name):
    """They make up the answer; if it is integral, each factor holds one."""
    rng = np.random.default_rng(29)
    for k in range(4):
        mixture = MIXTURES[name].drawn(rng, SCALES[k])
        answer = mixture.built()
        solution = answer.fg.solve_map()
        for factor, (case, index) in zip(answer.structured, mixture.structured, strict=True):
            probs = factor.probs
            assert abs(probs.sum() - 1) <= 1e-12 and (probs > 0).all()
            case.columns(factor.structures)  # each is a structure of the factor
            mean = np.tensordot(probs, factor.structures, 1).reshape(-1)
            np.testing.assert_allclose(mean, answer.u.value[index.reshape(-1)], rtol=0, atol=1e-6)
            if solution.integral:
                assert factor.num_structures == 1


# Limits and errors --------------------------------------------------------------------------------


def hard_graph():
    rng = np.random.default_rng(30)
    fg = fm.FactorGraph()
    u = fg.variable_from(rng.normal(size=(12, 12)))
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    return fg, u


@pytest.mark.parametrize("method", ["auto", "ad3"])
def test_out_of_passes(method):
    """The bound holds whenever it ends."""
    fg, u = hard_graph()
    exact = fg.solve_map().objective
    for passes in (1, 2, 5):
        solution = fg.solve_map(method=method, max_iter=passes, on_failure="ignore")
        assert solution.status is fm.Status.MAX_ITER and not solution.converged
        assert solution.upper_bound >= exact - ROUNDING and np.isfinite(u.value).all()
    with pytest.warns(fm.NotConvergedWarning, match="Raise `max_iter`"):
        fg.solve_map(method=method, max_iter=1)
    with pytest.raises(fm.NotConvergedError) as caught:
        fg.solve_map(method=method, max_iter=1, on_failure="raise")
    assert caught.value.solution.status is fm.Status.MAX_ITER


@pytest.mark.parametrize("name", ["tree_budgets_and_logic", "three_on_a_variable"])
def test_the_bound_holds_at_all_times(name):
    rng = np.random.default_rng(31)
    for _ in range(3):
        mixture = MIXTURES[name].drawn(rng)
        exact = linear_program(mixture.problem())
        fg = mixture.built().fg
        for passes in (1, 3, 8):
            solution = fg.solve_map(max_iter=passes, on_failure="ignore")
            assert solution.upper_bound >= exact - ROUNDING * (1 + abs(exact))


def test_near_a_structure_is_not_a_structure():
    """The relaxation lies within 1e-3 of a structure, whose value is another one's."""
    fg = fm.FactorGraph()
    u = fg.variable_from([1000.0, 1000.5])
    fg.add(fm.Knapsack(u, costs=[1, 1.0008], budget=1.0009))
    solution = fg.solve_map()
    assert solution.converged and not solution.integral
    np.testing.assert_allclose(u.value, [1, 0.0009 / 1.0008], rtol=0, atol=1e-8)
    assert fg.decode().optimal
    np.testing.assert_array_equal(u.value, [0, 1])


def test_integral_is_the_best_or_not_said():
    """Whatever the limit: what is called integral is a structure, and no better one is known."""
    rng = np.random.default_rng(32)
    for k in range(40):
        mixture = random_rows(rng, ALL, SCALES[k % 5])
        best, _ = best_of(mixture.problem())
        for passes in (1, 2, 4):
            answer = mixture.built()
            solution = answer.fg.solve_map(max_iter=passes, on_failure="ignore")
            if solution.integral:
                score = score_of(mixture.problem(), answer.u.value[None])[0]
                assert abs(score - best) <= ROUNDING * (1 + abs(best))


def test_on_failure_of_an_infeasible_graph():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros(3))
    fg.add(fm.Xor(u))
    fg.add(fm.AtLeast(u, 2))
    with pytest.warns(fm.NotConvergedWarning, match="No assignment satisfies"):
        fg.solve_map()
    with pytest.raises(fm.InfeasibleError):
        fg.solve_map(on_failure="raise")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "admm"}, r"method must be one of \['ad3', 'auto'\]"),
        ({"surrogate": "reinforce"}, "surrogate must be one of"),
        ({"tol": 0}, "tol must be a positive number"),
        ({"tol": np.nan}, "tol must be a positive number"),
        ({"step_size": -1}, "step_size must be a positive number"),
        ({"max_iter": 0}, "max_iter must be a whole number"),
        ({"max_inner_iter": 1.5}, "max_inner_iter must be a whole number"),
        ({"on_failure": "shrug"}, "on_failure must be"),
    ],
)
def test_bad_options(options, message):
    fg, _ = hard_graph()
    with pytest.raises(ValueError, match=message):
        fg.solve_map(**options)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_scores(bad):
    fg = fm.FactorGraph()
    fg.variable_from(np.array([0.0, bad]))
    with pytest.raises(ValueError, match="index"):
        fg.solve_map()


def test_what_only_other_queries_have():
    fg, _ = hard_graph()
    with pytest.raises(
        fm.GraphError,
        match=r"`upper_bound` is only available after fg.solve_map\(\) and fg.decode\(\)",
    ):
        _ = fg.solve().upper_bound
    with pytest.raises(fm.GraphError, match=r"`nodes` is only available after fg.decode\(\)"):
        _ = fg.solve_map().nodes


def test_no_instances():
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.zeros((0, 3)))
    fg.add(fm.Xor(u))
    solution = fg.solve_map()
    assert u.value.shape == (0, 3) and solution.upper_bound.shape == (0,)


# Assignment problems ------------------------------------------------------------------------------

ASSIGNMENT, needs_data = real_data("assignment/or_library_assign.npz")


def by_matching(costs):
    fg = fm.FactorGraph()
    u = fg.variable_from(-costs)
    fg.add(fm.Matching(u))
    return fg, u


def by_rows_and_columns(costs):
    fg = fm.FactorGraph()
    u = fg.variable_from(-costs)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    return fg, u


@needs_data
@pytest.mark.parametrize("build", [by_matching, by_rows_and_columns])
@pytest.mark.parametrize(("name", "size"), [("assign600", 100), ("assign600", 600)])
def test_or_library(name, size, build):
    costs = np.load(ASSIGNMENT)[name][:size, :size].astype(float)
    best = costs[linear_sum_assignment(costs)].sum()
    fg, u = build(costs)
    solution = fg.solve_map()
    assert solution.converged
    assert abs(-solution.objective - best) <= VALUE * best
    assert solution.upper_bound >= -best - ROUNDING * best
    np.testing.assert_allclose(u.value.sum(axis=1), 1, atol=1e-5)


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("build", [by_matching, by_rows_and_columns])
def test_or_library_of_700(build):
    costs = np.load(ASSIGNMENT)["assign700"].astype(float)
    best = costs[linear_sum_assignment(costs)].sum()
    solution = build(costs)[0].solve_map()
    assert solution.converged and abs(-solution.objective - best) <= VALUE * best


@pytest.mark.parametrize("build", [by_matching, by_rows_and_columns])
def test_random_assignment(build):
    rng = np.random.default_rng(33)
    for n in (5, 20, 40):
        for costs in (rng.normal(size=(n, n + 2)), rng.integers(0, 10, (n, n)).astype(float)):
            best = costs[linear_sum_assignment(costs)].sum()
            solution = build(costs)[0].solve_map()
            assert abs(-solution.objective - best) <= VALUE * (1 + abs(best))


def test_steps_that_lead_nowhere_are_solved_more_closely():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([-0.5, -1.0, 1.0, -0.5, -1.0, 2.5, 0.5, 0.5, 0.5]))
    coefs = np.array([-0.09105226, -0.61202995, 0.17950265, -0.94264437, 0.89557727])
    fg.add(fm.Linear(u[[5, 4, 1, 0, 8]], coefs, lower=-0.09914143, upper=0.01105565))
    fg.add(fm.Exactly([u[7], u[5], ~u[8], u[4]], count=1))
    fg.add(fm.Exactly([u[7], ~u[2], ~u[8], u[4], u[1]], count=2))
    fg.add(fm.Or([u[8], u[5], ~u[3], ~u[7], u[4]]))
    fg.add(fm.OrOut([u[1], u[0]]))
    fg.add(fm.Or([u[3], u[7], ~u[2]]))
    fg.add(fm.Nand([u[3]]))
    fg.add(fm.Pair(u[[6, 2]], u[[1, 8]], np.array([0.0, -2.0])))
    solution = fg.solve_map()
    assert solution.converged and solution.iterations < 500
    assert abs(solution.upper_bound - solution.objective) <= VALUE * (1 + solution.objective)


class _Either(fm.Factor):
    """One variable, on or off."""

    def map(self, eta_u, eta_v=()):
        return [float(eta_u[0] > 0)], []


def test_no_direction_is_so_long_that_the_scores_are_lost():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([0.0, 500.0]))
    fg.add(fm.Imply([u[1], u[0]]))
    fg.add(fm.AndOut([u[1], ~u[0]]))
    fg.add(_Either(u[[1]]))
    costs = np.array([1.2828817814504394, 2.3890927417354155])
    fg.add(fm.Knapsack([u[1], ~u[0]], costs, budget=0.184653942975693))
    fg.add(fm.Pair(u[[1]], u[[0]], np.array([0.0])))
    solution = fg.solve_map()
    best = 0.184653942975693 / costs.sum()  # for ~u[0] is u[1]
    assert solution.converged
    np.testing.assert_allclose(u.value, [1 - best, best], atol=1e-6)


def test_a_bound_that_large_multipliers_round_is_not_below_the_value():
    fg = fm.FactorGraph()
    scores = [0.0670526252, 0.1172082209, 0.291658187, 0.1620812109, -0.2876053139, 0.887475259]
    u = fg.variable_from(np.array([*scores, -0.8161755694]))
    coefs = np.array([0.07339596105465951, 0.8646697607231615, -0.6941095923402216])
    exact = 0.938065721777821  # met by one assignment only
    fg.add(fm.Linear([~u[6], u[4], ~u[1]], coefs, exact, exact))
    costs = np.array([0.3450817928046388, 0.6777502159610083, 0.9248670370761809])
    fg.add(fm.Knapsack([u[0], ~u[5], u[6]], costs, 0.23981758873130876))
    fg.add(fm.Imply([u[2], u[4]]))
    table = np.array([-1.0922245074063357, -0.763538749013034, -0.6044068227172917])
    fg.add(fm.Table([u[[6, 5, 2]]], table))
    fg.add(fm.Linear([u[4], u[1]], [-0.9286345484461722, 0.718828803893143], -0.682, -0.0258))
    solution = fg.solve_map(on_failure="raise")
    assert solution.upper_bound >= solution.objective
