"""Exact decoding: enumeration says what is best."""

from dataclasses import replace

import numpy as np
import pytest
from exact import (
    SCALES,
    SMALL,
    best_of,
    of_rows,
    random_mixture,
    random_rows,
    scaled,
    score_of,
    with_large_features,
    with_ties,
    without_some,
)
from factors.test_factor import TwoOf, TwoOfBatch
from hard import HARD, dense_pairs, grid, prepared
from oracle import Problem, Term
from problems import ALL, fuzzed_problem, random_term, unplanted_problem
from test_structured import MIXTURES, Mixture

import factormax as fm

EXACT = 1e-9  # relative


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
def test_the_scale_of_the_scores_does_not_matter(scale):
    rng = np.random.default_rng(50)
    for _ in range(40):
        mixture = random_rows(rng, ALL, 1.0, n=10, factors=8)
        best, _ = best_of(mixture.problem())
        solution = scaled(mixture, scale).built().fg.decode()
        assert solution.optimal
        assert abs(solution.objective / scale - best) <= EXACT * (1 + abs(best))


def test_costs_of_zero():
    """A knapsack that says nothing, in a graph that the relaxation does not decide."""
    fg = fm.FactorGraph()
    u = fg.variable_from(np.ones(3))
    for i, j in ((0, 1), (1, 2), (0, 2)):
        fg.add(fm.AtMostOne([u[i], u[j]]))
    fg.add(fm.Knapsack(u, costs=np.zeros(3), budget=0))
    assert fg.decode().optimal and u.value.sum() == 1


def test_a_small_cost_beside_a_large_one_counts():
    """Feasible is what fits the budget in its own units."""
    fg = fm.FactorGraph()
    u = fg.variable_from([1.0, 1.0])
    fg.add(fm.Knapsack(u, costs=[1e10, 1.0], budget=0.5))
    assert fg.decode().optimal
    np.testing.assert_array_equal(u.value, [0, 0])


def assert_decodes(mixture: Mixture, **options) -> fm.Solution:
    """The best structure, proved; or that there is none."""
    problem = mixture.problem()
    best, structures = best_of(problem)
    answer = mixture.built()
    solution = answer.fg.decode(on_failure="ignore", **options)
    x = answer.u.value
    gone = np.isneginf(problem.eta)
    assert solution.nodes >= 1
    if best == -np.inf:
        assert solution.status is fm.Status.INFEASIBLE and not solution.optimal
        assert not solution.integral
        assert solution.objective == solution.upper_bound == -np.inf
        assert np.isnan(x[~gone]).all() and not x[gone].any()
        return solution
    assert solution.status is fm.Status.CONVERGED, solution
    assert solution.optimal and solution.integral
    assert (structures == x).all(axis=1).any()
    assert abs(solution.objective - best) <= EXACT * (1 + abs(best))
    assert solution.upper_bound == solution.objective
    check_factors(mixture, answer, best)
    return solution


def check_factors(mixture: Mixture, answer, best: float):
    """Each structured factor holds its one structure, and the factors' scores add up."""
    x = answer.u.value
    total = np.where(x > 0, mixture.eta, 0).sum()
    for f, (case, index), own in zip(
        answer.structured, mixture.structured, mixture.own, strict=True
    ):
        np.testing.assert_array_equal(f.structures.reshape(-1), x[index.reshape(-1)])
        np.testing.assert_array_equal(f.probs, [1.0])
        assert f.num_structures == 1
        if case.scores:
            first = next(iter(case.scores))
            total += np.sum(np.where(f.value != 0, own[first], 0) * f.value)
    scores = [t.scores for t in mixture.terms if t.kind == "Pair"]
    total += sum(s * f.value for s, f in zip(scores, answer.pairs, strict=True))
    if all(len(case.scores) <= 1 for case, _ in mixture.structured):
        assert abs(total - best) <= EXACT * (1 + abs(best))


# Against enumeration ------------------------------------------------------------------------------


def of_all_rows(rng, k):
    return random_rows(rng, ALL, SCALES[k % 5], n=int(rng.integers(2, 11)), factors=6)


def of_one_kind(rng, k):
    return random_rows(rng, (ALL[k % len(ALL)],), SCALES[k % 5], n=8, factors=5)


def of_structures(rng, k):
    names = list(SMALL)
    cases = [SMALL[names[k % len(names)]]]
    if k % 2:
        cases.append(SMALL[str(rng.choice(names))])
    n, factors = int(rng.integers(9, 12)), int(rng.integers(0, 5))
    return random_mixture(rng, cases, n=n, factors=factors, scale=SCALES[k % 5])


def tied(make):
    return lambda rng, k: with_ties(make(rng, k), rng)


def masked(make):
    def draw(rng, k):
        while (found := without_some(make(rng, k), rng)) is None:
            pass
        return found

    return draw


GRAPHS = {
    "rows": of_all_rows,
    "one kind": of_one_kind,
    "structures": of_structures,
    "rows with ties": tied(of_all_rows),
    "structures with ties": tied(of_structures),
    "rows, masked": masked(of_all_rows),
    "rows with ties, masked": masked(tied(of_all_rows)),
    "structures, masked": masked(of_structures),
    "structures with ties, masked": masked(tied(of_structures)),
}


@pytest.fixture(params=["as it is", "search"])
def way(request, monkeypatch):
    """Small graphs of rows and pairs are decoded by elimination, unless it is switched off."""
    if request.param == "search":
        switch_off_elimination(monkeypatch)
    return request.param


def switch_off_elimination(monkeypatch):
    monkeypatch.setattr("factormax.queries.decode.best_by_elimination", lambda *_: None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", GRAPHS)
def test_small_graphs(name):
    rng = np.random.default_rng([0, list(GRAPHS).index(name)])
    for k in range(60):
        assert_decodes(GRAPHS[name](rng, k))


@pytest.mark.slow
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("name", GRAPHS)
def test_thousands_of_small_graphs(name, seed):
    rng = np.random.default_rng([seed, list(GRAPHS).index(name)])
    for k in range(300):
        assert_decodes(GRAPHS[name](rng, k))


@pytest.mark.usefixtures("way")
def test_graphs_that_may_be_infeasible():
    statuses = [assert_decodes(of_rows(unplanted_problem(seed))).status for seed in range(100)]
    assert 20 <= sum(s is fm.Status.INFEASIBLE for s in statuses) <= 80


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_many_graphs_that_may_be_infeasible():
    for seed in range(100, 2000):
        assert_decodes(of_rows(unplanted_problem(seed)))


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_larger_graphs():
    for seed in range(400):
        problem = fuzzed_problem(seed)
        if len(problem.eta) <= 14:
            assert_decodes(of_rows(problem))


@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("name", [n for n, m in MIXTURES.items() if m.n <= 16])
def test_mixtures(name, scale):
    rng = np.random.default_rng(1)
    mixture = MIXTURES[name].drawn(rng, scale)
    assert_decodes(mixture)
    assert_decodes(with_ties(mixture, rng))


@pytest.mark.usefixtures("way")
def test_frustrated_pairs():
    """Where the relaxation is of no help."""
    rng = np.random.default_rng(2)
    for k in range(10):
        n = 9
        pairs = zip(*np.triu_indices(n, 1), strict=True)
        terms = [Term("Pair", p, scores=-abs(rng.normal())) for p in pairs]
        eta = rng.uniform(0.5, 2.5, n) if k % 2 else np.full(n, 2.0)
        assert_decodes(of_rows(Problem(eta, tuple(terms))))


@pytest.mark.usefixtures("way")
def test_knapsacks():
    rng = np.random.default_rng(3)
    for k in range(20):
        costs = rng.uniform(0.2, 2, (2, 10)) if k % 2 else rng.integers(1, 9, (2, 10)).astype(float)
        terms = tuple(
            Term("Knapsack", range(10), params={"costs": c, "budget": float(c.sum() // 2)})
            for c in costs
        )
        eta = costs.sum(axis=0) if k % 3 == 0 else rng.uniform(0, 2, 10)
        assert_decodes(of_rows(Problem(eta, terms)))


def test_a_tight_relaxation_takes_one_node():
    rng = np.random.default_rng(4)
    for name, case in SMALL.items():
        eta, own = case.draw(rng)
        mixture = Mixture(eta.size, [(case, np.arange(eta.size).reshape(case.shape))])
        mixture.eta, mixture.own = eta.reshape(-1), [own]
        assert assert_decodes(mixture).nodes == 1, name
    for _ in range(10):
        cells = np.arange(9).reshape(3, 3)
        terms = [Term("Xor", row) for row in cells] + [Term("AtMostOne", c) for c in cells.T]
        assert assert_decodes(of_rows(Problem(rng.normal(size=9), tuple(terms)))).nodes == 1


def test_ties_are_shaken_apart():
    rng = np.random.default_rng(0)
    cost = rng.integers(1, 4, (40, 40)).astype(float)  # very many best assignments
    fg = fm.FactorGraph()
    u = fg.variable_from(-cost)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    relaxed = fg.solve_map()
    assert not relaxed.integral  # a mixture of them
    solution = fg.decode()
    assert solution.optimal
    assert solution.nodes <= 3
    assert float(solution.objective) == pytest.approx(float(relaxed.upper_bound), abs=1e-3)
    assert set(np.unique(u.value)) <= {0, 1}


@pytest.mark.usefixtures("way")
def test_large_and_sparse():
    """A grid that is too large to enumerate: a chain of columns decodes it."""
    rng = np.random.default_rng(5)
    size = 5
    eta = rng.normal(size=(size, size))
    right, down = rng.normal(size=(size, size - 1)), rng.normal(size=(size - 1, size))
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    fg.add(fm.Pair(u[:, :-1], u[:, 1:], right))
    fg.add(fm.Pair(u[:-1], u[1:], down))
    solution = fg.decode()
    assert solution.optimal
    assert solution.objective == pytest.approx(column_by_column(eta, right, down), rel=EXACT)


# The user's own factors ---------------------------------------------------------------------------


def test_a_factor_with_large_features():
    """Several of them for the same assignment: the best ones count."""
    rng = np.random.default_rng(6)
    for k in range(40):
        assert_decodes(with_large_features(rng, SCALES[k % 5]))


@pytest.mark.parametrize("factor", [TwoOf, TwoOfBatch])
def test_own_factors_in_a_batch(factor):
    rng = np.random.default_rng(7)
    eta = rng.normal(size=(6, 5))
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta)
    own = fg.add(factor(u))
    fg.add(fm.Nand(u[:2]))
    fg.add(fm.Imply([u[2], u[4]]))
    solution = fg.decode()
    assert solution.optimal.all() and own.structures.shape == (6, 1, 5)
    pairs = Term("Exactly", range(5), params={"count": 2})
    for row in range(6):
        problem = Problem(eta[row], (pairs, Term("Nand", (0, 1)), Term("Imply", (2, 4))))
        best, structures = best_of(problem)
        np.testing.assert_array_equal(u.value[row], structures[0])
        np.testing.assert_array_equal(own.structures[row, 0], structures[0])
        assert solution.objective[row] == pytest.approx(best, rel=EXACT)


# Batches and masks --------------------------------------------------------------------------------


def test_a_batch_is_a_loop():
    rng = np.random.default_rng(8)
    for name in ("structured_and_pairs", "tree_budgets_and_logic", "custom_and_builtin"):
        many = [MIXTURES[name].drawn(rng) for _ in range(6)]
        for m in many[1:]:
            m.terms = many[0].terms
        own = [
            {
                k: np.stack([m.own[f][k] for m in many]).reshape(2, 3, *np.shape(v))
                for k, v in o.items()
            }
            for f, o in enumerate(many[0].own)
        ]
        eta = np.stack([m.eta for m in many]).reshape(2, 3, -1)
        batch = many[0].built(eta, own, batch_dims=2)
        solution = batch.fg.decode()
        assert solution.status.shape == solution.nodes.shape == (2, 3)
        for at, m in zip(np.ndindex(2, 3), many, strict=True):
            alone = m.built()
            single = alone.fg.decode()
            np.testing.assert_array_equal(batch.u.value[at], alone.u.value)
            assert solution.objective[at] == single.objective
            for a, b in zip(batch.structured, alone.structured, strict=True):
                np.testing.assert_array_equal(a.structures[at], b.structures)
                if b._score_parts:
                    np.testing.assert_array_equal(a.value[at], b.value)


@pytest.mark.usefixtures("way")
def test_parameters_and_masks_per_instance():
    rng = np.random.default_rng(9)
    eta, mask = rng.normal(size=(12, 6)), rng.random((12, 6)) < 0.7
    budgets, costs = rng.integers(0, 4, 12), rng.uniform(0.5, 2, (12, 6))
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta, mask=mask)
    fg.add(fm.Budget(u, budgets))
    fg.add(fm.Knapsack(u, costs, 2.5))
    fg.add(fm.AndOut([~u[0], u[1], u[2]]))
    fg.add(fm.Nand(u[3:]))
    solution = fg.decode(on_failure="ignore")
    for row in range(12):
        terms = (
            Term("Budget", range(6), params={"budget": budgets[row]}),
            Term("Knapsack", range(6), params={"costs": costs[row], "budget": 2.5}),
            Term("AndOut", (0, 1, 2), (True, False, False)),
            Term("Nand", (3, 4, 5)),
        )
        best, structures = best_of(Problem(eta[row], terms).masked(mask[row]))
        assert solution.objective[row] == pytest.approx(best, rel=EXACT)
        assert solution.optimal[row] == (best > -np.inf)
        if best > -np.inf:
            np.testing.assert_array_equal(u.value[row], structures[0])


def test_a_ragged_batch():
    """Of trees, matchings and sequences: each as if it were alone."""
    rng = np.random.default_rng(10)
    sizes = np.array([4, 2, 1, 3])

    def square(n):
        there = np.arange(4) < n[:, None]
        return there[:, :, None] & there[:, None, :]

    def factors(u, n):
        yield fm.DepTree(u, single_root=True)
        yield fm.Budget(u[:, 0], 2)

    def matching(u, n):
        yield fm.Matching(u)
        if n > 1:  # a masked u[1, 1] is off, and the Nand holds
            yield fm.Nand([u[0, 0], u[1, 1]])

    def budgeted(u, n):
        yield fm.SequenceBudget(u[:, 0], 1.5, 2)
        yield fm.Sequence(u, transitions[:n, :n])

    transitions = rng.normal(size=(4, 4))
    for make in (factors, matching, budgeted):
        eta = rng.normal(size=(4, 4, 4))
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta, mask=square(sizes))
        for f in make(u, 4):
            fg.add(f)
        solution = fg.decode(on_failure="ignore")
        for row, n in enumerate(sizes):
            alone = fm.FactorGraph()
            v = alone.variable_from(eta[row, :n, :n])
            for f in make(v, n):
                alone.add(f)
            single = alone.decode(on_failure="ignore")
            assert solution.status[row] is single.status
            assert solution.objective[row] == pytest.approx(single.objective, rel=EXACT)
            np.testing.assert_array_equal(u.value[row, :n, :n], v.value)
            assert not u.value[row, n:].any() and not u.value[row, :, n:].any()


@pytest.mark.usefixtures("way")
def test_everything_is_masked():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.full((2, 2), -np.inf))
    v = fg.variable_from(np.array([2.0, -1.0]))
    fg.add(fm.Matching(u))
    fg.add(fm.Xor(u[0]))
    solution = fg.decode()
    assert solution.optimal and solution.objective == 2
    assert not u.value.any()
    np.testing.assert_array_equal(v.value, [1, 0])


@pytest.mark.usefixtures("way")
def test_a_graph_without_factors():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([2.0, -1.0, -np.inf]))
    solution = fg.decode()
    np.testing.assert_array_equal(u.value, [1, 0, 0])
    assert solution.objective == 2 and solution.nodes == 1


def test_forbidden_transitions():
    rng = np.random.default_rng(11)
    for _ in range(10):
        transitions = rng.normal(size=(3, 3))
        transitions[rng.random((3, 3)) < 0.4] = -np.inf
        mixture = MIXTURES["sequence_and_at_most_one"].drawn(rng)
        mixture.own[0]["transitions"] = transitions
        assert_decodes(mixture)


# Stopped early ------------------------------------------------------------------------------------

# Value and bound after 20 nodes of branch and bound without local search, seeds 0 to 3.
WITHOUT_LOCAL_SEARCH = {
    "dense_pairs": [
        (17.5017, 132.7344),
        (9.6122, 119.555),
        (16.8794, 127.7331),
        (26.442, 140.7229),
    ],
    "bipartite_pairs": [
        (50.314, 266.9273),
        (23.8317, 269.247),
        (15.231, 261.4571),
        (65.429, 280.7869),
    ],
    "grid": [
        (383.328, 967.1797),
        (384.842, 1005.1802),
        (351.3202, 1015.3334),
        (239.7392, 910.2654),
    ],
    "quadratic_assignment": [
        (9.0999, 21.2162),
        (9.7394, 18.0488),
        (-0.1667, 21.3293),
        (1.2476, 23.3885),
    ],
    "tables": [(39.4388, 39.713), (50.1486, 50.1486), (51.2263, 51.2263), (52.7616, 52.7616)],
    "tagged": [(21.759, 22.4891), (12.3271, 12.3271), (21.4902, 22.0429), (15.5904, 17.4042)],
}


@pytest.mark.parametrize("name", HARD)
def test_no_worse_than_without_local_search(name):
    """Every value, and the bounds together: one of them alone is luck after so few nodes."""
    bounds = []
    for seed, (value, _) in enumerate(WITHOUT_LOCAL_SEARCH[name]):
        solution = HARD[name](seed).decode(max_nodes=20, on_failure="ignore")
        assert solution.objective >= value - 1e-3
        bounds.append(solution.upper_bound)
    assert np.sum(bounds) <= sum(bound for _, bound in WITHOUT_LOCAL_SEARCH[name]) + 1e-3


@pytest.mark.parametrize("name", ["dense_pairs", "bipartite_pairs"])
def test_one_node_beats_flips(name):
    """One variable at a time, from all off, while that improves."""
    for seed in range(3):
        fg = HARD[name](seed)
        pair = fg._factors[0]
        eta = np.concatenate([t.scores.reshape(-1) for t in fg._tensors])
        weight = np.zeros((len(eta), len(eta)))
        weight[tuple(pair._index.T)] = np.asarray(pair._score_parts[0].given).reshape(-1)
        weight += weight.T
        x, flips = np.zeros(len(eta)), 0.0
        while (gain := (1 - 2 * x) * (eta + weight @ x)).max() > 1e-9:
            flips += gain.max()
            x[np.argmax(gain)] = 1 - x[np.argmax(gain)]
        assert fg.decode(max_nodes=1, on_failure="ignore").objective >= flips - 1e-9


class Clock:
    """Every look at it takes a while."""

    def __init__(self, monkeypatch, tick):
        self.now, self.tick = 0.0, tick
        for module in ("_engines.cpu", "queries.decode", "queries.elimination"):
            monkeypatch.setattr(f"factormax.{module}.time", self)

    def monotonic(self):
        self.now += self.tick
        return self.now


@pytest.mark.parametrize("name", HARD)
def test_when_time_is_up_at_once(name, monkeypatch):
    """One pass of one relaxation, and what local search has found."""
    reference = HARD[name](0).decode(max_nodes=20, on_failure="ignore")
    clock = Clock(monkeypatch, 100.0)
    answers = spied(monkeypatch)
    solution = HARD[name](0).decode(time_limit=1, on_failure="ignore")
    assert clock.now < 3000
    assert solution.nodes == 1 and answers in ([], [None])
    assert solution.status is fm.Status.NOT_PROVED or solution.optimal
    assert solution.upper_bound >= reference.objective - 1e-6
    if name != "tagged":  # a structure and budgets: nothing may be found in so little
        assert solution.objective > -np.inf


def test_the_time_limit_ends_the_search(monkeypatch):
    """Later than at once, but not much later: nodes are solved while there is time."""
    nodes = []
    for limit in (5, 50, 500):
        clock = Clock(monkeypatch, 1.0)
        nodes.append(int(dense_pairs(0).decode(time_limit=limit, on_failure="ignore").nodes))
        assert clock.now <= limit + 10
    assert nodes[0] < nodes[1] < nodes[2]


def test_a_relaxation_stops_at_its_deadline():
    from time import monotonic

    from factormax import _engines
    from factormax._options import Options

    inputs = prepared(dense_pairs(0))
    options = Options(linear=True)
    whole = _engines.solve(inputs, options)
    late = _engines.solve(inputs, replace(options, deadline=monotonic() - 1))
    assert late.iterations[0] < whole.iterations[0]
    assert late.upper_bound[0] >= whole.objective[0]
    early = _engines.solve(inputs, replace(options, deadline=monotonic() + 1000))
    assert early.iterations[0] == whole.iterations[0]


def test_elimination_that_takes_too_long_is_not_begun(monkeypatch):
    """And it is given up when the time is up in the middle."""
    from factormax.queries import elimination

    inputs = prepared(grid(0, 12))
    exact = elimination.best_by_elimination(inputs)
    assert exact is not None
    monkeypatch.setattr(elimination, "_tables", lambda *_: pytest.fail("begun"))
    clock = Clock(monkeypatch, 1e-6)
    assert elimination.best_by_elimination(inputs, clock.now + 1e-5) is None
    monkeypatch.undo()
    clock = Clock(monkeypatch, 1.0)
    assert elimination.best_by_elimination(inputs, clock.now + 10) is None
    found = elimination.best_by_elimination(inputs, clock.now + 1000)
    np.testing.assert_array_equal(found, exact)


# Elimination --------------------------------------------------------------------------------------


def spied(monkeypatch) -> list:
    """What elimination answers, call by call."""
    from factormax.queries import decode

    answers, ask = [], decode.best_by_elimination

    def spy(*arguments):
        answers.append(ask(*arguments))
        return answers[-1]

    monkeypatch.setattr("factormax.queries.decode.best_by_elimination", spy)
    return answers


def column_by_column(eta, right, down) -> float:
    """The best score of a grid of pairs, by dynamic programming over its columns."""
    height, width = eta.shape
    states = np.array(list(np.ndindex(*[2] * height)))
    inner = states @ eta + np.einsum("ai,ai,ij->aj", states[:, :-1], states[:, 1:], down)
    best = inner[:, 0]
    for j in range(1, width):
        step = best[:, None] + np.einsum("ai,bi,i->ab", states, states, right[:, j - 1])
        best = step.max(axis=0) + inner[:, j]
    return best.max()


@pytest.mark.parametrize("size", [(1, 30), (2, 20), (4, 12), (6, 9)])
def test_grids(size, monkeypatch):
    rng = np.random.default_rng([20, *size])
    answers = spied(monkeypatch)
    for scale in (1.0, 5.0):
        eta = rng.normal(size=size)
        right = scale * rng.normal(size=(size[0], size[1] - 1))
        down = scale * rng.normal(size=(size[0] - 1, size[1]))
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        fg.add(fm.Pair(u[:, :-1], u[:, 1:], right))
        fg.add(fm.Pair(u[:-1], u[1:], down))
        solution = fg.decode()
        assert solution.optimal
        best = column_by_column(eta, right, down)
        assert solution.objective == pytest.approx(best, rel=EXACT)
        x = u.value
        score = (eta * x).sum() + (right * x[:, :-1] * x[:, 1:]).sum()
        assert score + (down * x[:-1] * x[1:]).sum() == pytest.approx(best, rel=EXACT)
    assert all(a is not None for a in answers)


def test_a_long_chain_of_logic(monkeypatch):
    """Rows of all kinds over windows of 150 variables, with negation, masks and pairs."""
    rng = np.random.default_rng(21)
    answers = spied(monkeypatch)
    for _ in range(5):
        n = 150
        problem = random_rows(rng, ALL, n=n, factors=0).problem()
        planted, terms = rng.integers(0, 2, n), []
        while len(terms) < 120:
            first = int(rng.integers(0, n - 5))
            kind = str(rng.choice(ALL))
            d = 2 if kind == "Pair" else int(rng.integers(2, 6))
            term = random_term(kind, first + rng.permutation(5)[:d], rng, negate=True)
            if term.holds(planted):
                terms.append(term)
        gone = (rng.random(n) < 0.1) & ~np.isin(np.arange(n), [j for t in terms for j in t.vars])
        mixture = of_rows(Problem(np.where(gone, -np.inf, problem.eta), tuple(terms)))
        answer = mixture.built()
        solution = answer.fg.decode()
        x = answer.u.value
        score = score_of(mixture.problem(), x[None])[0]
        assert solution.optimal and score == pytest.approx(solution.objective, rel=EXACT)
        with monkeypatch.context() as patch:
            switch_off_elimination(patch)
            other = mixture.built().fg.decode(max_nodes=2000, on_failure="ignore")
        assert other.objective <= solution.objective + EXACT * (1 + abs(score))
        assert other.upper_bound >= solution.objective - EXACT * (1 + abs(score))
    assert any(a is not None for a in answers)


def test_elimination_finds_nothing(monkeypatch):
    """An odd cycle of "exactly one of two": the relaxation has an answer, nothing else has."""
    answers = spied(monkeypatch)
    fg = fm.FactorGraph(batch_dims=1)
    n = 41
    u = fg.variable_from(np.random.default_rng(22).normal(size=(2, n)))
    for j in range(n - 1):
        fg.add(fm.Xor([u[j], u[j + 1]]))
    fg.add(fm.Budget([~u[n - 1], ~u[0]], np.array([2, 1])))
    fg.add(fm.Budget([u[n - 1], u[0]], np.array([2, 1])))
    solution = fg.decode(on_failure="ignore")
    assert list(solution.status) == [fm.Status.CONVERGED, fm.Status.INFEASIBLE]
    assert np.isin(u.value[0], (0, 1)).all() and np.isnan(u.value[1]).all()
    assert solution.upper_bound[1] == -np.inf
    assert np.isnan(answers[-1]).all()


def test_a_wide_graph_is_left_to_the_search(monkeypatch):
    answers = spied(monkeypatch)
    rng = np.random.default_rng(23)
    n = 40
    fg = fm.FactorGraph()
    u = fg.variable_from(np.ones(n))
    i, j = np.triu_indices(n, 1)
    scores = -1 - rng.random(len(i))
    fg.add(fm.Pair(u[i], u[j], scores))
    solution = fg.decode(max_nodes=5, on_failure="ignore")
    assert answers == [None]
    assert solution.status is fm.Status.NOT_PROVED and solution.nodes <= 5
    x = u.value
    assert x.sum() + (scores * x[i] * x[j]).sum() == pytest.approx(solution.objective, rel=EXACT)
    assert solution.upper_bound >= solution.objective


def test_long_rows_are_left_to_the_search():
    rng = np.random.default_rng(24)
    terms = (Term("Exactly", range(14), params={"count": 5}), Term("Nand", range(0, 14, 2)))
    pairs = tuple(Term("Pair", (j, j + 1), scores=-1.0) for j in range(13))
    assert_decodes(of_rows(Problem(rng.normal(size=14), (*terms, *pairs))))


# Limits -------------------------------------------------------------------------------------------


def hard(rng, n=14):
    """Dense repulsion: the relaxation says one half everywhere."""
    pairs = list(zip(*np.triu_indices(n, 1), strict=True))
    terms = tuple(Term("Pair", p, scores=-1.0 - 0.2 * rng.random()) for p in pairs)
    return of_rows(Problem(1 + rng.random(n), terms))


@pytest.mark.parametrize("limit", [{"max_nodes": 1}, {"max_nodes": 7}, {"time_limit": 1e-6}])
def test_limits(limit, monkeypatch):
    """The best found so far, and a bound that holds."""
    switch_off_elimination(monkeypatch)
    rng = np.random.default_rng(12)
    for _ in range(3):
        mixture = hard(rng)
        best, _ = best_of(mixture.problem())
        answer = mixture.built()
        solution = answer.fg.decode(**limit, on_failure="ignore")
        assert solution.status is fm.Status.NOT_PROVED and not solution.optimal
        assert solution.nodes <= limit.get("max_nodes", 100)
        assert solution.upper_bound >= best - EXACT * (1 + abs(best))
        x = answer.u.value
        score = score_of(mixture.problem(), x[None])[0]
        assert np.isin(x, (0, 1)).all() and score == pytest.approx(solution.objective, rel=EXACT)
        assert score <= best + EXACT * (1 + abs(best))
        assert solution.integral


def test_more_nodes_bring_the_bound_down(monkeypatch):
    switch_off_elimination(monkeypatch)
    mixture = hard(np.random.default_rng(13))
    best, _ = best_of(mixture.problem())
    bounds, values = [], []
    for nodes in (1, 10, 100, 10_000):
        solution = mixture.built().fg.decode(max_nodes=nodes, on_failure="ignore")
        bounds.append(float(solution.upper_bound))
        values.append(float(solution.objective))
    assert (np.diff(bounds) <= 0).all() and (np.diff(values) >= 0).all()
    assert solution.optimal and values[-1] == pytest.approx(best, rel=EXACT)


def test_nothing_found_before_the_limit(monkeypatch):
    """NaN, and a bound all the same."""
    switch_off_elimination(monkeypatch)
    rng = np.random.default_rng(14)
    costs = np.array([3.0, 5.0, 7.0, 11.0, 13.0, 17.0])
    fg = fm.FactorGraph()
    u = fg.variable_from(rng.normal(size=6))
    fg.add(fm.Knapsack(u, costs, 28.5))  # between 27.5 and 28.5: 28 = 11 + 17 = 3 + 5 + 7 + 13
    fg.add(fm.Knapsack(~u, costs, float(costs.sum() - 27.5)))
    solution = fg.decode(max_nodes=1, on_failure="ignore")
    found = fg.decode()
    assert found.optimal and costs @ u.value == 28
    if not np.isfinite(solution.objective):
        assert solution.status is fm.Status.NOT_PROVED and not solution.integral
    assert solution.upper_bound >= found.objective - EXACT


@pytest.mark.usefixtures("way")
def test_infeasible_but_for_the_relaxation():
    """One half everywhere satisfies the rows, and nothing else does."""
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros(3))
    for i, j in ((0, 1), (1, 2), (2, 0)):
        fg.add(fm.Xor([u[i], u[j]]))
    assert fg.solve_map().converged
    solution = fg.decode(on_failure="ignore")
    assert solution.status is fm.Status.INFEASIBLE and not solution.optimal
    assert np.isnan(u.value).all() and solution.upper_bound == -np.inf
    with pytest.warns(fm.NotConvergedWarning, match="No assignment"):
        fg.decode()
    with pytest.raises(fm.InfeasibleError):
        fg.decode(on_failure="raise")


def test_on_failure(monkeypatch):
    switch_off_elimination(monkeypatch)
    fg = hard(np.random.default_rng(15)).built().fg
    with pytest.warns(fm.NotConvergedWarning, match="before any structure was proved"):
        fg.decode(max_nodes=2)
    with pytest.raises(fm.NotConvergedError) as caught:
        fg.decode(max_nodes=2, on_failure="raise")
    assert caught.value.solution.status is fm.Status.NOT_PROVED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_nodes": 0}, "max_nodes must be a whole number"),
        ({"max_nodes": 1.5}, "max_nodes must be a whole number"),
        ({"max_nodes": True}, "max_nodes must be a whole number"),
        ({"time_limit": 0}, "time_limit must be a positive number"),
        ({"time_limit": np.nan}, "time_limit must be a positive number"),
        ({"tol": -1}, "tol must be a positive number"),
        ({"on_failure": "shrug"}, "on_failure must be"),
    ],
)
def test_bad_options(options, message):
    fg = hard(np.random.default_rng(16)).built().fg
    with pytest.raises(ValueError, match=message):
        fg.decode(**options)


# Other kinds of arrays ----------------------------------------------------------------------------


def test_float32():
    rng = np.random.default_rng(17)
    for name, mixture in MIXTURES.items():
        if mixture.n > 14:
            continue
        drawn = mixture.drawn(rng)
        own = [{k: np.asarray(v, np.float32) for k, v in o.items()} for o in drawn.own]
        answer = drawn.built(drawn.eta.astype(np.float32), own)
        solution = answer.fg.decode(on_failure="ignore")
        best, structures = best_of(drawn.problem())
        if best == -np.inf:  # no structure at all, though the relaxation has an answer
            assert solution.status is fm.Status.INFEASIBLE
            continue
        assert solution.optimal and answer.u.value.dtype == np.float32, name
        assert (structures == answer.u.value).all(axis=1).any(), name
        assert solution.objective == pytest.approx(best, rel=1e-5, abs=1e-5)


def test_torch():
    torch = pytest.importorskip("torch")
    mixture = MIXTURES["structured_and_pairs"].drawn(np.random.default_rng(18))
    expected = mixture.built()
    found = expected.fg.decode()
    eta = torch.tensor(mixture.eta, requires_grad=True)
    own = [{"transitions": torch.tensor(mixture.own[0]["transitions"], requires_grad=True)}]
    answer = mixture.built(eta, own)
    solution = answer.fg.decode()
    assert isinstance(answer.u.value, torch.Tensor) and solution.optimal.dtype == torch.bool
    np.testing.assert_array_equal(answer.u.value.detach().numpy(), expected.u.value)
    assert solution.objective.item() == found.objective
    assert solution.nodes.item() == found.nodes
    # The value is differentiable; the structure is piecewise constant.
    solution.objective.backward(retain_graph=True)
    np.testing.assert_array_equal(eta.grad.numpy(), expected.u.value)
    np.testing.assert_array_equal(own[0]["transitions"].grad.numpy(), expected.structured[0].value)
    eta.grad = None
    answer.u.value.sum().backward()
    assert eta.grad is None or not eta.grad.any()


def test_the_gradient_of_the_value_is_the_structure():
    mixture = MIXTURES["grid_of_chains"].drawn(np.random.default_rng(19))
    answer = mixture.built()
    solution = answer.fg.decode()
    out = solution.vjp({answer.u: np.ones(mixture.n)}, objective=2.0)
    np.testing.assert_array_equal(out[answer.u], 2 * answer.u.value)
    np.testing.assert_array_equal(out[answer.structured[0]], 2 * answer.structured[0].value)
