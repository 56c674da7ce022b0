"""The solver against the exact oracle, on random graphs and on larger models."""

import warnings

import numpy as np
import oracle
import pytest
from graphs import AWAY_FROM_KINKS, assert_gradient, assert_solves, build, exact_or_none, solved
from oracle import Infeasible, Problem, Term
from problems import (
    ALL,
    full_mrf,
    fuzzed_problem,
    matching,
    random_logic,
    random_problem,
    tangled_problem,
    unplanted_problem,
)

import factormax as fm

SCALES = [0.1, 1.0, 10.0, 100.0, 1e4]


def random_problems(seed, scale, count, **options):
    rng = np.random.default_rng([seed, int(scale * 10)])
    for _ in range(count):
        n, factors = int(rng.integers(3, 14)), int(rng.integers(2, 12))
        yield random_problem(rng, n, factors, scale=scale, **options)


# Against the oracle --------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("seed", range(4))
def test_random_graphs(seed, scale):
    compared = [assert_solves(problem) for problem in random_problems(seed, scale, 15)]
    assert np.mean(compared) > 0.5


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("seed", range(4))
def test_random_graphs_to_the_last_digit(seed, scale):
    for problem in random_problems(100 + seed, scale, 15):
        assert_solves(problem, atol=1e-8, tol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("seed", range(20))
def test_many_random_graphs(seed, scale):
    for problem in random_problems(1000 + seed, scale, 50):
        assert_solves(problem)
        assert_solves(problem, atol=1e-8, tol=1e-10)


# Found by fuzzing 12,000 of them: degenerate vertices, where an early version stalled.
HARD = [783, 1886, 1895, 2633, 2950, 3160, 4403, 4516, 6160, 7229, 7517, 7619, 8540, 10407, 10521]


@pytest.mark.parametrize("seed", HARD)
def test_graphs_that_were_hard(seed):
    assert_solves(fuzzed_problem(seed))
    assert_solves(fuzzed_problem(seed), atol=1e-8, tol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_fuzzed_graphs(block):
    for seed in range(20_000 + 100 * block, 20_000 + 100 * (block + 1)):
        assert_solves(fuzzed_problem(seed), **({"tol": 1e-10, "atol": 1e-8} if seed % 2 else {}))


@pytest.mark.parametrize("kind", ALL)
def test_many_overlapping_factors_of_one_kind(kind):
    rng = np.random.default_rng(3)
    for scale in SCALES:
        for _ in range(4):
            assert_solves(random_problem(rng, 8, 8, kinds=[kind], scale=scale))


@pytest.mark.parametrize("seed", range(10))
def test_random_graphs_with_ties(seed):
    rng = np.random.default_rng(seed)
    for problem in random_problems(200 + seed, 1.0, 10):
        tied = problem.with_eta(rng.integers(-2, 4, len(problem.eta)) / 2)
        tied = tied.with_pair_scores(rng.integers(-2, 3, len(tied.pair_scores)) / 2)
        exact = oracle.solve(tied)
        built, solution = solved(tied)
        assert solution.converged
        np.testing.assert_allclose(built.u.value, exact.mu, atol=1e-5)
        if exact.kink_distance > AWAY_FROM_KINKS:
            assert_gradient(built, solution, exact, rng)


@pytest.mark.parametrize("seed", range(5))
def test_random_graphs_with_masks(seed):
    """Gone variables leave smaller factors, and sometimes no solution."""
    rng = np.random.default_rng(seed)
    for problem in random_problems(300 + seed, 1.0, 10):
        mask = rng.random(len(problem.eta)) < 0.7
        exact = exact_or_none(problem.masked(mask))
        built = build(problem, mask=mask)
        solution = built.fg.solve(on_failure="ignore")
        if exact is None:
            assert solution.status is fm.Status.INFEASIBLE
            assert np.isneginf(solution.objective)
            continue
        assert solution.status is fm.Status.CONVERGED
        np.testing.assert_allclose(built.u.value, exact.mu, atol=1e-5)
        assert solution.objective == pytest.approx(exact.objective, abs=1e-4)
        if exact.kink_distance > AWAY_FROM_KINKS:
            assert_gradient(built, solution, exact, rng)


@pytest.mark.parametrize("seed", range(4))
def test_admm_agrees(seed):
    for problem in random_problems(400 + seed, 1.0, 5):
        assert_solves(problem, atol=1e-5, method="admm", tol=1e-8, max_iter=200_000)


def test_degree_of_a_hundred():
    rng = np.random.default_rng(0)
    terms = [Term("AtMostOne", (0, k)) for k in range(1, 101)]
    assert_solves(Problem(rng.normal(size=101), tuple(terms)))


def test_extreme_finite_scores_stay_finite():
    for size in (1e-300, 1e15, 1e100, 1e300):
        fg = fm.FactorGraph()
        u = fg.variable_from(size * np.array([[1.0, -1, 0.5], [0.3, 1, 1]]))
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.AtMostOne(u, axis=0))
        solution = fg.solve(on_failure="ignore")
        assert np.isfinite(u.value).all()
        assert np.isfinite(solution.vjp({u: np.ones((2, 3))})[u]).all()


# Convergence on larger models ---------------------------------------------------------------------

MODELS = [
    pytest.param(matching, 10, id="matching10"),
    pytest.param(matching, 20, id="matching20"),
    pytest.param(matching, 40, id="matching40"),
    pytest.param(matching, 80, id="matching80", marks=pytest.mark.slow),
    pytest.param(random_logic, 60, id="logic60"),
    pytest.param(random_logic, 300, id="logic300"),
    pytest.param(full_mrf, 40, id="mrf40"),
    pytest.param(full_mrf, 159, id="mrf159", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("scale", [0.3, 1, 5])
@pytest.mark.parametrize("model, size", MODELS)
def test_defaults_converge(model, size, scale):
    for seed in range(3):
        problem = model(np.random.default_rng(seed), size, scale)
        built, solution = solved(problem)
        assert solution.converged
        assert solution.primal_residual <= 1e-6 and solution.dual_residual <= 1e-6
        exact = oracle.solve(problem, polish=False)
        np.testing.assert_allclose(built.u.value, exact.mu, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [0.3, 1, 5])
@pytest.mark.parametrize("model, size", [(matching, 8), (random_logic, 40), (full_mrf, 12)])
def test_gradients_on_the_models(model, size, scale):
    compared = 0
    for seed in range(4):
        compared += assert_solves(model(np.random.default_rng(seed), size, scale))
    assert compared


@pytest.mark.parametrize("scale", [0.3, 1, 5])
def test_a_gradient_too_large_for_a_dense_system(scale):
    """The vjp is a projection: symmetric, idempotent, and orthogonal to the tight rows."""
    rng = np.random.default_rng(0)
    built, solution = solved(matching(rng, 60, scale), tol=1e-10)
    a, b = rng.normal(size=(2, 3600))
    ja, jb = (solution.vjp({built.u: x})[built.u] for x in (a, b))
    assert b @ ja == pytest.approx(a @ jb, abs=1e-6)
    np.testing.assert_allclose(solution.vjp({built.u: ja})[built.u], ja, atol=1e-6)
    np.testing.assert_allclose(ja.reshape(60, 60).sum(1), 0, atol=1e-6)


# Failure -------------------------------------------------------------------------------------


def infeasible_graphs():
    a, b, c = range(3)
    count = {"count": 2}
    mixed = Term("Xor", (a, b, c), (True, False, True))
    return [
        [Term("AtMostOne", (a, b, c)), Term("AtLeast", (a, b, c), params=count)],
        [Term("Xor", (a, b)), Term("Xor", (b, c)), Term("Xor", (a, c)), Term("Or", (a,))],
        [Term("Or", (a,)), Term("Nand", (a,))],
        [Term("Imply", (a, b)), Term("Imply", (b, c)), Term("Or", (a,)), Term("Nand", (c,))],
        [Term("Exactly", (a, b, c), params=count), mixed, Term("Or", (b,))],
        [Term("AndOut", (a, b, c)), Term("Or", (c,)), Term("Nand", (a, b))],
        [Term("OrOut", (a, b, c)), Term("Nand", (c,)), Term("Or", (a, b))],
        [Term("XorOut", (a, b, c)), Term("Or", (a,)), Term("Or", (b,))],
        [Term("Knapsack", (a, b), params={"costs": [1, 1], "budget": 0.5}), Term("Or", (a, b))],
    ]  # fmt: skip


@pytest.mark.parametrize("terms", infeasible_graphs(), ids=lambda t: "-".join(x.kind for x in t))
@pytest.mark.parametrize("scale", [0.1, 1, 100])
def test_infeasible_graphs_are_proved_so(terms, scale):
    problem = Problem(scale * np.array([0.5, -1.2, 0.3]), tuple(terms))
    assert exact_or_none(problem) is None
    built, solution = solved(problem, on_failure="ignore")
    assert solution.status is fm.Status.INFEASIBLE
    assert not solution.converged
    assert np.isnan(built.u.value).all()
    assert np.isneginf(solution.objective)
    assert not solution.vjp({built.u: np.ones(3)})[built.u].any()


def assert_status(problem):
    """Converged where there is a solution, infeasible where there is none."""
    exact = exact_or_none(problem)
    built = build(problem)
    solution = built.fg.solve(on_failure="ignore")
    if exact is None:
        assert solution.status is fm.Status.INFEASIBLE
    else:
        assert solution.status is fm.Status.CONVERGED
        np.testing.assert_allclose(built.u.value, exact.mu, atol=1e-5)


# Found by fuzzing 6,000 of them: infeasible, yet an early version said converged (or stalled).
HARD_STATUS = [1577, 1809, 2069, 2411, 2446, 2663, 3581, 4481, 4757, 5038, 5150, 5168, 5380, 5471]


@pytest.mark.parametrize("seed", HARD_STATUS)
def test_statuses_that_were_wrong(seed):
    assert_status(unplanted_problem(seed))


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 20))]
)
def test_the_status_is_right(block):
    for seed in range(10_000 + 300 * block, 10_000 + 300 * (block + 1)):
        assert_status(unplanted_problem(seed))


@pytest.mark.parametrize("seed", range(5))
def test_no_false_alarm(seed):
    """Feasible by a hair: the planted assignment is the only solution."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, 8)
    terms = [Term("Imply", (j, j + 1), (not y[j], not y[j + 1])) for j in range(7)]
    problem = Problem(-100.0 * (2 * y - 1) * rng.random(8), (*terms, Term("Or", (0,), (not y[0],))))
    built, solution = solved(problem)
    assert solution.converged
    np.testing.assert_allclose(built.u.value, y, atol=1e-5)


class TestOnFailure:
    @pytest.fixture(params=["infeasible", "max_iter"])
    def failing(self, request):
        """A graph, and options, that fail for the second instance only or for all."""
        rng = np.random.default_rng(0)
        fg = fm.FactorGraph(batch_dims=1)
        mask = np.ones((2, 6, 6), bool)
        mask[1, :, 1:] = request.param == "max_iter"
        u = fg.variable_from(5 * rng.normal(size=(2, 6, 6)), mask=mask)
        fg.add(fm.Xor(u, axis=0))
        fg.add(fm.Xor(u, axis=1))
        return fg, u, {"max_iter": 1} if request.param == "max_iter" else {}

    def test_raise(self, failing):
        fg, _, options = failing
        with pytest.raises((fm.NotConvergedError, fm.InfeasibleError)):
            fg.solve(on_failure="raise", **options)

    def test_warn_is_the_default(self, failing):
        fg, u, options = failing
        with pytest.warns(fm.NotConvergedWarning):
            solution = fg.solve(**options)
        assert not solution.converged[1]
        assert u.value.shape == (2, 6, 6)

    def test_ignore(self, failing):
        fg, _, options = failing
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            solution = fg.solve(on_failure="ignore", **options)
        failed = fm.Status.MAX_ITER if options else fm.Status.INFEASIBLE
        assert solution.status[1] is failed
        assert solution.converged[0] != bool(options)

    def test_the_status_is_the_advice(self, failing):
        fg, _, options = failing
        with pytest.warns(fm.NotConvergedWarning) as caught:
            solution = fg.solve(**options)
        assert any(solution.status[1].value.split(".")[0] in str(w.message) for w in caught)
        if options:
            assert "max_iter" in fm.Status.MAX_ITER.value


@pytest.mark.parametrize("seed, scale", [(42, 100.0), (50, 100.0), (102, 10.0)])
def test_large_graphs_that_are_nearly_linear_programs(seed, scale):
    """Descent alone takes thousands of passes."""
    built, solution = solved(tangled_problem(seed, scale))
    assert solution.converged
    value = built.u.value
    assert built.fg.solve(tol=1e-10, max_iter=20_000, warm_start=solution).converged
    np.testing.assert_allclose(value, built.u.value, rtol=0, atol=1e-5)


def test_many_pairs_in_single_precision():
    """A variable in many pairs keeps its digits, and takes about the passes of double."""
    for seed in range(3):
        problem = full_mrf(np.random.default_rng(seed), 159, 5.0)
        scores, own = problem.eta, np.array(problem.pair_scores)
        passes = []
        for dtype in (np.float32, np.float64):
            fg = build(problem, scores.astype(dtype), pair_scores=own.astype(dtype)).fg
            solution = fg.solve()
            assert solution.converged
            passes.append(int(solution.iterations))
        assert passes[0] <= 2 * passes[1]


def test_costs_of_very_different_size():
    """Converged means that every variable is right, whatever its cost beside the largest."""
    compared = 0
    for seed in range(80):
        problem = uneven_problem(seed)
        try:
            exact = oracle.solve(problem)
        except (Infeasible, AssertionError):  # or too uneven for the oracle
            continue
        built, solution = solved(problem)
        assert solution.converged, seed
        np.testing.assert_allclose(built.u.value, exact.mu, rtol=0, atol=1e-6)
        if exact.kink_distance > AWAY_FROM_KINKS:
            assert_gradient(built, solution, exact, np.random.default_rng(seed))
            compared += 1
    assert compared >= 30


def uneven_problem(seed: int) -> Problem:
    """Overlapping knapsacks with costs from 1e-4 to 1e4 and all kinds of budgets."""
    rng = np.random.default_rng([9, seed])
    n, terms = int(rng.integers(2, 12)), []
    for _ in range(int(rng.integers(1, 4))):
        d = int(rng.integers(2, n + 1))
        costs = 10 ** rng.uniform(-4, 4, d)
        some = costs @ rng.integers(0, 2, d)
        budgets = [0.0, rng.uniform() * costs.sum(), some, 2 * rng.uniform() * costs.min()]
        params = {"costs": costs, "budget": float(rng.choice(budgets))}
        terms.append(Term("Knapsack", rng.choice(n, d, replace=False), rng.random(d) < 0.3, params))
    terms.append(Term("AtMostOne", rng.choice(n, 2, replace=False)))
    return Problem(rng.choice([0.3, 1, 5, 50]) * rng.normal(size=n), tuple(terms))


def test_no_more_passes_than_asked_for():
    for seed in range(60):
        fg = build(fuzzed_problem(seed)).fg
        for most in (1, 2, 3, 5, 8, 13, 21, 34, 55, 122, 123):
            for solve in (fg.solve, fg.solve_map):
                assert solve(max_iter=most, on_failure="ignore").iterations <= most


def test_too_few_iterations_still_give_something():
    built, solution = solved(
        matching(np.random.default_rng(0), 20, 5), max_iter=2, on_failure="ignore"
    )
    assert solution.status is fm.Status.MAX_ITER
    assert solution.iterations <= 2
    assert np.isfinite(built.u.value).all()
    assert ((built.u.value >= 0) & (built.u.value <= 1)).all()
    assert np.isfinite(solution.vjp({built.u: np.ones(400)})[built.u]).all()


# Parity --------------------------------------------------------------------------------------


def overlapping(eta, **options):
    """A batch of graphs with every factor."""
    rng = np.random.default_rng(0)
    problem = random_problem(rng, eta.shape[-1], 14)
    return build(problem, eta, batch_dims=eta.ndim - 1, **options)


def test_an_instance_does_not_see_its_batch():
    rng = np.random.default_rng(1)
    eta, grad = rng.normal(size=(2, 9, 12)) * np.logspace(-1, 2, 9)[:, None]
    batch = overlapping(eta)
    solution = batch.fg.solve()
    out = solution.vjp({batch.u: grad})
    for row in range(9):
        alone = overlapping(eta[row])
        single = alone.fg.solve()
        np.testing.assert_array_equal(batch.u.value[row], alone.u.value)
        np.testing.assert_array_equal(out[batch.u][row], single.vjp({alone.u: grad[row]})[alone.u])
        assert solution.iterations[row] == single.iterations
        assert solution.objective[row] == single.objective


def test_threads_do_not_change_a_bit():
    rng = np.random.default_rng(2)
    eta, grad = rng.normal(size=(2, 37, 12))
    before, results = fm.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            fm.set_num_threads(threads)
            assert fm.get_num_threads() == threads
            built = overlapping(eta)
            solution = built.fg.solve()
            out = solution.vjp({built.u: grad})
            results.append((built.u.value, built.pair.value, out[built.u], out[built.pair]))
    finally:
        fm.set_num_threads(before)
    for result in results[1:]:
        for value, expected in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(value, expected)


def test_the_same_call_twice_is_the_same_bits():
    eta = np.random.default_rng(3).normal(size=(5, 12))
    a, b = overlapping(eta), overlapping(eta)
    a.fg.solve(), b.fg.solve(), a.fg.solve()
    np.testing.assert_array_equal(a.u.value, b.u.value)


@pytest.mark.parametrize("scale", [0.3, 1, 5])
def test_float32_is_float64_to_its_own_precision(scale):
    rng = np.random.default_rng(4)
    eta, grad = (scale * rng.normal(size=(2, 20, 12))).astype(np.float32)
    grad /= scale
    narrow, wide = overlapping(eta), overlapping(eta.astype(float))
    low, high = narrow.fg.solve(), wide.fg.solve()
    assert low.converged.all()
    assert narrow.u.value.dtype == np.float32
    np.testing.assert_allclose(narrow.u.value, wide.u.value, atol=2e-5)
    # Gradients agree wherever the active sets do: nearly everywhere.
    difference = (
        low.vjp({narrow.u: grad})[narrow.u] - high.vjp({wide.u: grad.astype(float)})[wide.u]
    )
    assert np.mean(np.abs(difference).max(-1) < 1e-3) >= 0.9


@pytest.mark.parametrize("model, size", [(matching, 20), (random_logic, 60), (full_mrf, 40)])
def test_float32_converges_on_the_models(model, size):
    for scale in (0.3, 1, 5):
        problem = model(np.random.default_rng(0), size, scale)
        built = build(problem, problem.eta.astype(np.float32))
        assert built.fg.solve().converged
        exact = oracle.solve(problem, polish=False)
        np.testing.assert_allclose(built.u.value, exact.mu, atol=1e-4)


def crowded(dtype, scale, instances=slice(None)):
    """300 variables in 1,000 pairs and one long row: sums that float32 can't resolve."""
    rng = np.random.default_rng(1)
    scores = scale * rng.normal(size=(8, 300))
    pairs = rng.integers(300, size=(1000, 2))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    own = scale * rng.normal(size=(8, len(pairs)))
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores.astype(np.float32)[instances].astype(dtype))
    own = own.astype(np.float32)[instances].astype(dtype)
    fg.add(fm.Pair(u[pairs[:, 0]], u[pairs[:, 1]], own))
    fg.add(fm.Budget(u, 100))
    return fg, u


@pytest.mark.parametrize("scale", [1, 10])
def test_what_float32_cannot_resolve_is_solved_in_double(scale):
    (fg, u), (exact_fg, exact_u) = crowded(np.float32, scale), crowded(np.float64, scale)
    solution, exact = fg.solve(on_failure="raise"), exact_fg.solve(tol=1e-10, on_failure="raise")
    assert u.value.dtype == np.float32
    np.testing.assert_allclose(u.value, exact_u.value, atol=2e-6 * (1 + scale))
    # Some are exact: those that were.
    assert (np.abs(u.value - exact_u.value).max(1) < 1e-7).any()
    grad = np.random.default_rng(0).normal(size=u.value.shape)
    ours = solution.vjp({u: grad.astype(np.float32)})[u]
    np.testing.assert_allclose(ours, exact.vjp({exact_u: grad})[exact_u], atol=2e-4)


def test_which_instances_are_solved_in_double_does_not_depend_on_the_batch():
    fg, u = crowded(np.float32, 10)
    solution = fg.solve()
    grad = np.ones(u.value.shape, np.float32)
    together = solution.vjp({u: grad})[u]
    for i in range(len(grad)):
        one, v = crowded(np.float32, 10, [i])
        alone = one.solve()
        np.testing.assert_array_equal(v.value[0], u.value[i])
        np.testing.assert_array_equal(alone.vjp({v: grad[:1]})[v][0], together[i])
        assert alone.iterations[0] == solution.iterations[i]


def test_memory_does_not_grow():
    resource = pytest.importorskip("resource")
    eta = np.random.default_rng(5).normal(size=(64, 12))

    def peak_after(solves):
        for _ in range(solves):
            built = overlapping(eta)
            built.fg.solve().vjp({built.u: eta})
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    assert peak_after(300) - peak_after(100) < 4096  # KiB; one leaked solve is some 50


# Warm starts ---------------------------------------------------------------------------------


class TestWarmStart:
    @pytest.mark.parametrize("model, size", [(matching, 20), (random_logic, 60), (full_mrf, 30)])
    def test_is_faster_and_right(self, model, size):
        rng = np.random.default_rng(0)
        cold_steps = warm_steps = 0
        for _ in range(5):
            problem = model(rng, size, 1.0)
            first = solved(problem)[1]
            nearby = problem.with_eta(problem.eta * (1 + 1e-3 * rng.normal(size=len(problem.eta))))
            cold, cold_solution = solved(nearby)
            warm, warm_solution = solved(nearby, warm_start=first)
            np.testing.assert_allclose(warm.u.value, cold.u.value, atol=1e-5)
            cold_steps += cold_solution.iterations
            warm_steps += warm_solution.iterations
        assert warm_steps < cold_steps

    def test_from_itself(self):
        problem = matching(np.random.default_rng(0), 10, 1.0)
        cold, first = solved(problem)
        warm, again = solved(problem, warm_start=first)
        np.testing.assert_allclose(warm.u.value, cold.u.value, atol=1e-6)
        assert again.iterations <= 2
        grad = np.arange(100.0)
        expected = first.vjp({cold.u: grad})[cold.u]
        np.testing.assert_allclose(again.vjp({warm.u: grad})[warm.u], expected, atol=1e-6)

    def test_from_far_away(self):
        rng = np.random.default_rng(1)
        problem = random_problem(rng, 12, 10)
        first = solved(problem.with_eta(1e4 * rng.normal(size=12)))[1]
        assert_solves(problem, warm_start=first)

    def test_from_a_failure(self):
        """An infeasible or unfinished solution is a start like any other."""
        problem = Problem(np.array([0.5, -1.2, 0.3]), tuple(infeasible_graphs()[0]))
        failed = solved(problem, on_failure="ignore")[1]
        built = build(problem)
        assert built.fg.solve(warm_start=failed, on_failure="ignore").status is fm.Status.INFEASIBLE
        problem = matching(np.random.default_rng(0), 10, 5.0)
        unfinished = solved(problem, max_iter=2, on_failure="ignore")[1]
        built, _ = solved(problem, warm_start=unfinished)
        np.testing.assert_allclose(built.u.value, solved(problem)[0].u.value, atol=1e-5)

    def test_of_a_batch(self):
        rng = np.random.default_rng(2)
        eta = rng.normal(size=(6, 12))
        first = overlapping(eta).fg.solve()
        warm, cold = overlapping(eta + 1e-3), overlapping(eta + 1e-3)
        warm.fg.solve(warm_start=first)
        cold.fg.solve()
        np.testing.assert_allclose(warm.u.value, cold.u.value, atol=1e-5)

    def test_from_another_graph_is_an_error(self):
        rng = np.random.default_rng(3)
        small = solved(matching(rng, 3, 1.0))[1]
        with pytest.raises((fm.GraphError, fm.ShapeError), match=r"warm.start"):
            solved(matching(rng, 4, 1.0), warm_start=small)


def test_clipping_keeps_the_rows():
    """Descent met the tolerance here, and what its error made unsure was clipped: 14 times that."""
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([2.8e-09, -5.3e-09, -4.7e-09, 1e-09]))
    fg.add(fm.Knapsack([u[3], u[1], u[2]], np.array([0.5, 0.5, 0.5]), 1.0))
    fg.add(fm.OrOut([u[1], u[3]]))
    fg.add(fm.XorOut([u[1], u[0], ~u[2], ~u[3]]))
    scores = [-1.98963238e-09, -2.9977983e-09, 1.02131397e-10, 2.21844511e-08, -1.58484299e-08]
    fg.add(fm.Pair(u[[0, 3, 1, 2, 2]], u[[1, 1, 0, 3, 0]], np.array(scores)))
    fg.add(fm.Pair(u[1], u[0], 1.74354285e-10))
    fg.add(fm.Knapsack([u[1]], np.array([0.8]), 0.6))
    fg.add(fm.AndOut([u[1], u[3]]))
    fg.solve(tol=1e-10, on_failure="raise")
    assert abs(u.value[1] - u.value[3]) <= 1e-10


# Scores of very different sizes -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("fill", [-1e4, -1e6, -1e9, "min"])
def test_filling_with_a_huge_negative_score_is_a_mask(fill, dtype):
    """`masked_fill(pad, -1e9)` is what people write; it must not blur the other variables."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(16, 6, 8)).astype(dtype)
    pad = rng.random(scores.shape) < 0.25
    pad[..., 0] = False
    huge = np.finfo(dtype).min if fill == "min" else fill
    values = []
    for x in (np.where(pad, dtype(huge), scores), np.where(pad, dtype(-np.inf), scores)):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(x)
        fg.add(fm.AtMostOne(u, axis=0))
        fg.add(fm.Or(u, axis=1))
        assert fg.solve(on_failure="raise").converged.all()
        values.append(u.value)
    np.testing.assert_allclose(values[0], values[1], atol=2e-5 if dtype == np.float32 else 1e-5)


@pytest.mark.parametrize("huge", [1e6, -1e6, 1e9, -1e9])
def test_unrelated_variables_do_not_blur_each_other(huge):
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([0.3, 0.5], dtype=np.float32))
    v = fg.variable_from(np.array([huge, 0.5, 0.05], dtype=np.float32))
    fg.add(fm.Xor(u))
    fg.solve(on_failure="raise")
    np.testing.assert_allclose(u.value, [0.4, 0.6], atol=1e-6)
    np.testing.assert_allclose(v.value, [huge > 0, 0.5, 0.05], atol=1e-6)


@pytest.mark.parametrize(
    ("size", "score"), [(100, 10.0), (10_000, 10.0), (10_000, 0.0), (100_000, 0.0), (100_000, 1.0)]
)
def test_a_long_row_in_float32(size, score):
    fg = fm.FactorGraph()
    u = fg.variable_from(np.full(size, score, dtype=np.float32))
    fg.add(fm.Xor(u))
    assert fg.solve(on_failure="raise").converged
    # Besides what float32 resolves, a sum of floats adds its own rounding.
    eps = np.finfo(np.float32).eps
    resolution = 4 * eps * (1 + score) + 8 * eps * np.sqrt(size)
    assert abs(u.value.astype(float).sum() - 1) <= resolution


def test_scores_too_large_for_float32():
    rng = np.random.default_rng(0)
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from((1e6 * rng.normal(size=(200, 20))).astype(np.float32))
    fg.add(fm.Exactly(u, 10))
    assert fg.solve(on_failure="raise").converged.all()
    np.testing.assert_allclose(u.value.astype(float).sum(1), 10, atol=1e-6)


def test_masks_leave_few_rows_of_many():
    """A graph too large for the fallback, whose instances are small and hard."""
    rng = np.random.default_rng(1)
    n = 700
    fg = fm.FactorGraph(batch_dims=1)
    mask = np.zeros((4, n), dtype=bool)
    mask[:, :40] = True
    u = fg.variable_from(1e4 * rng.normal(size=(4, n)), mask=mask)
    members = np.stack([rng.choice(40, 4, replace=False) for _ in range(40)])
    rest = np.arange(40, n).reshape(-1, 4)
    fg.add(fm.Knapsack(u[np.concatenate([members, rest])], rng.random((205, 4)), 1.0, axis=1))
    fg.add(fm.Pair(u[:-1], u[1:], 1e4 * rng.normal(size=n - 1)))
    assert fg.solve(max_iter=5000, on_failure="ignore").converged.all()


@pytest.mark.parametrize(
    ("seed", "size", "rows", "scale"),
    [
        *((seed, 60, 30, 1e6) for seed in (23, 44, 48, 51)),
        *((seed, 100, 60, 4e4) for seed in (42, 71, 116)),
        (155, 300, 130, 3e4),
    ],
)
def test_large_scores_where_hardly_any_point_is_left(seed, size, rows, scale):
    """Equations through one point: variables held at their bounds hardly give way to a row."""
    rng = np.random.default_rng(seed)
    fg = fm.FactorGraph()
    u = fg.variable_from(scale * rng.normal(size=size) / 3)
    point = (rng.random(size) < 0.3).astype(float)
    equations = []
    for _ in range(rows):
        members, coefs = rng.choice(size, 9, replace=False), rng.uniform(-1, 1, 9)
        value = float(coefs @ point[members])
        if rng.random() < 0.5:
            fg.add(fm.Linear(u[members], coefs=coefs, lower=value, upper=value))
            equations.append((members, coefs, value))
        else:
            fg.add(fm.Budget(u[members], max(1, int(point[members].sum()))))
    first, second = rng.integers(size, size=(2, 3 * size))
    apart = first != second
    first, second = first[apart], second[apart]
    fg.add(fm.Pair(u[first], u[second], scale * rng.normal(size=len(first)) / 3))
    solution = fg.solve(on_failure="raise")
    assert solution.iterations < 1500
    for members, coefs, value in equations:
        assert coefs @ u.value[members] == pytest.approx(value, abs=2e-6)


def test_a_pair_without_a_score_changes_nothing():
    for seed in (4403, 7229):
        problem = fuzzed_problem(seed)
        built, _ = solved(problem)
        value = built.u.value
        built.fg.add(fm.Pair(built.u[0], built.u[1], 0.0))
        assert built.fg.solve().converged
        np.testing.assert_allclose(built.u.value, value, atol=1e-5)


def test_a_long_chain_of_pairs():
    rng = np.random.default_rng(0)
    fg = fm.FactorGraph()
    u = fg.variable_from(rng.normal(size=3000))
    fg.add(fm.Pair(u[:-1], u[1:], 5.0))
    solution = fg.solve(on_failure="raise")
    assert np.ptp(u.value) <= 1 and solution.converged


@pytest.mark.parametrize(
    ("scores", "place", "expected"),
    [
        (
            [[0.0, 0, 0], [0, 0, 0], [-1, -1, 1]],
            (0, 0),
            [[0.25, -0.25, 0], [-0.25, 0.25, 0], [0, 0, 0]],
        ),
        ([[0.0, 0, 1, 2], [0, 0, 2, 0], [2, 2, 2, 2]], (1, 0), np.zeros((3, 4))),
    ],
)
def test_gradient_where_the_multipliers_are_not_unique(scores, place, expected):
    """Tight columns that the others imply, and zeros that rounding makes look free."""
    scores = np.array(scores)
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    solution = fg.solve()
    grad = np.zeros_like(scores)
    grad[place] = 1
    np.testing.assert_allclose(solution.vjp({u: grad})[u], expected, atol=1e-12)


def test_gradient_with_repeated_columns():
    """Rows and columns and the one factor of the same constraint agree also at ties."""
    rng = np.random.default_rng(5)
    for k in range(60):
        scores = rng.normal(size=(3, 4)) if k % 2 else rng.integers(-2, 3, (3, 4)).astype(float)
        scores[:, 1] = scores[:, 0]
        grad = rng.normal(size=scores.shape)
        results, kinks = [], []
        for make in (
            lambda u: [fm.Xor(u, axis=1), fm.AtMostOne(u, axis=0)],
            lambda u: [fm.Matching(u)],
        ):
            fg = fm.FactorGraph()
            u = fg.variable_from(scores)
            for factor in make(u):
                fg.add(factor)
            results.append(fg.solve().vjp({u: grad})[u])
            value = u.value
            for h in (1e-4, -1e-4):  # the value is linear where there is no kink
                moved = fm.FactorGraph()
                v = moved.variable_from(scores + h * grad)
                for factor in make(v):
                    moved.add(factor)
                moved.solve(tol=1e-10)
                kinks.append((v.value - value) / h)
        if np.abs(kinks[0] - kinks[1]).max() < 1e-6:
            assert abs(np.vdot(results[0], grad) - np.vdot(kinks[0], grad)) < 1e-5
            np.testing.assert_allclose(results[0], results[1], atol=1e-8)


@pytest.mark.parametrize("score", [0.3, 500.0, 1e5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_is_free_by_rounding_alone(score, dtype):
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([score, 0, 0], dtype))
    fg.add(fm.Exactly([u[2], u[1], ~u[0]], 0))  # one point; the multiplier is 0 but for rounding
    solution = fg.solve(tol=1e-12)
    assert u.value.tolist() == [1, 0, 0]
    assert not solution.vjp({u: np.array([0.3, 1, -0.7], dtype)})[u].any()
