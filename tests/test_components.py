"""A graph that falls apart is solved part by part: every part as if it were alone."""

from collections.abc import Callable

import numpy as np
import pytest

import factormax as fm

Part = tuple[tuple[int, ...], Callable[..., list]]  # the shape of the variables, their factors


def matching(u, rng):
    return [fm.Xor(u, axis=1), fm.AtMostOne(u, axis=0)]


def logic(u, rng):
    return [
        fm.OrOut(u[:4]),
        fm.Imply([u[1], ~u[5], u[2]]),
        fm.Budget(u[2:], 2),
        fm.Pair(u[:-1], u[1:], rng.normal(size=len(range(u.shape[0] - 1)))),
    ]


def pairs(u, rng):
    i, j = np.triu_indices(u.shape[0], 1)
    return [fm.Pair(u[i], u[j], rng.normal(size=len(i)))]


def knapsack(u, rng):
    return [fm.Knapsack(u, rng.uniform(0.5, 2, size=u.shape), 2.5)]


def tree(u, rng):
    return [fm.DepTree(u), fm.Budget(u[1:, 0], 1)]


def chain(u, rng):
    states = u.shape[1]
    return [fm.Sequence(u, rng.normal(size=(states, states))), fm.AtMostOne(u[:, 0])]


def linked(u, rng):
    states = u.shape[1]
    sequences = [fm.Sequence(u, rng.normal(size=(states, states))) for _ in range(2)]
    return [*sequences, fm.Budget(u[:, 1], 2)]


def free(u, rng):
    return []


PARTS: dict[str, Part] = {
    "matching": ((4, 5), matching),
    "logic": ((8,), logic),
    "pairs": ((6,), pairs),
    "knapsack": ((5,), knapsack),
    "tree": ((4, 4), tree),
    "another matching": ((4, 5), matching),
    "chain": ((5, 3), chain),
    "linked": ((4, 3), linked),
    "free": ((7,), free),
    "another tree": ((4, 4), tree),
}


class Draws:
    """Random numbers, and scores of a given scale and type."""

    def __init__(self, seed, scale, dtype):
        self.rng, self.scale, self.dtype = np.random.default_rng(seed), scale, dtype
        self.random, self.uniform = self.rng.random, self.rng.uniform

    def normal(self, size):
        return (self.scale * self.rng.normal(size=size)).astype(self.dtype)


class Alone:
    """One part as a graph of its own."""

    def __init__(self, names, scale=1.0, batch=None, dtype=np.float64, mask=False, seed=0):
        self.fg = fm.FactorGraph(batch_dims=0 if batch is None else 1)
        lead = () if batch is None else (batch,)
        self.variables, added = [], []
        for name in names:
            shape, factors = PARTS[name]
            rng = Draws([seed, *name.encode()], scale, dtype)
            scores = rng.normal(size=lead + shape)
            keep = rng.random(lead + shape) < 0.8 if mask else None
            u = self.fg.variable_from(scores, mask=keep)
            self.variables.append(u)
            added.append(factors(u, rng))
        # The first factors of all parts, then the second ones: parts are scattered.
        for k in range(max(map(len, added), default=0)):
            for factors in added:
                if k < len(factors):
                    self.fg.add(factors[k])
        self.factors = added

    def solve(self, ask="solve", **options):
        self.solution = getattr(self.fg, ask)(**options)
        return self


def both(ask="solve", names=tuple(PARTS), options=None, **how):
    """All parts in one graph, and each in its own."""
    options = options or {}
    whole = Alone(names, **how).solve(ask, **options)
    return whole, [Alone([name], **how).solve(ask, **options) for name in names]


def assert_same(whole, alone):
    for u, part in zip(whole.variables, alone, strict=True):
        np.testing.assert_array_equal(u.value, part.variables[0].value)
    solutions = [part.solution for part in alone]
    ours = whole.solution
    np.testing.assert_array_equal(ours.iterations, np.max([s.iterations for s in solutions], 0))
    np.testing.assert_array_equal(ours.oracle_calls, np.sum([s.oracle_calls for s in solutions], 0))
    for name in ("primal_residual", "dual_residual"):
        worst = np.max([getattr(s, name) for s in solutions], 0)
        np.testing.assert_array_equal(getattr(ours, name), worst)
    np.testing.assert_allclose(ours.objective, np.sum([s.objective for s in solutions], 0))


@pytest.mark.parametrize("method", ["auto", "admm"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_parts_are_as_if_alone(method, dtype, batch, scale):
    options = {"method": method, "max_iter": 5000, "on_failure": "ignore"}
    assert_same(*both(options=options, dtype=dtype, batch=batch, scale=scale))


@pytest.mark.parametrize("seed", range(3))
def test_masks(seed):
    options = {"on_failure": "ignore"}
    names = [n for n in PARTS if n not in ("logic", "tree", "another tree")]  # always feasible
    assert_same(*both(names=names, options=options, batch=4, mask=True, seed=seed))


@pytest.mark.parametrize("method", ["auto", "ad3"])
def test_linear_programs(method):
    whole, alone = both("solve_map", options={"method": method, "max_iter": 5000}, batch=2)
    assert_same(whole, alone)
    bounds = [part.solution.upper_bound for part in alone]
    np.testing.assert_allclose(whole.solution.upper_bound, np.sum(bounds, 0))
    integral = np.all([part.solution.integral for part in alone], 0)
    np.testing.assert_array_equal(whole.solution.integral, integral)
    met = whole.solution.integral
    np.testing.assert_array_equal(whole.solution.upper_bound[met], whole.solution.objective[met])


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_gradients_are_as_if_alone(dtype, mask):
    names = [n for n in PARTS if n not in ("logic", "tree", "another tree") or not mask]
    whole, alone = both(names=names, batch=3, dtype=dtype, mask=mask)
    rng = np.random.default_rng(1)
    grads = [rng.normal(size=u.value.shape).astype(dtype) for u in whole.variables]
    ours = whole.solution.vjp(dict(zip(whole.variables, grads, strict=True)))
    for u, part, grad in zip(whole.variables, alone, grads, strict=True):
        theirs = part.solution.vjp({part.variables[0]: grad})
        np.testing.assert_array_equal(ours[u], theirs[part.variables[0]])


def test_gradients_against_differences():
    names, step = tuple(PARTS), 1e-6
    whole = Alone(names).solve(tol=1e-12, max_iter=10_000)
    rng = np.random.default_rng(2)
    grads = [rng.normal(size=u.value.shape) for u in whole.variables]
    directions = [rng.normal(size=u.value.shape) for u in whole.variables]
    slopes = whole.solution.vjp(dict(zip(whole.variables, grads, strict=True)))
    slope = sum(np.sum(slopes[u] * d) for u, d in zip(whole.variables, directions, strict=True))

    def value(t):
        moved = Alone(names)
        for u, d in zip(moved.variables, directions, strict=True):
            moved.fg._tensors[u.position].scores[...] += t * d
        moved.solve(tol=1e-12, max_iter=10_000)
        return sum(np.sum(g * u.value) for g, u in zip(grads, moved.variables, strict=True))

    assert slope == pytest.approx((value(step) - value(-step)) / (2 * step), abs=1e-6)


def test_the_number_of_threads_does_not_matter():
    answers = []
    threads = fm.get_num_threads()
    try:
        for count in (1, 2, 5):
            fm.set_num_threads(count)
            whole = Alone(tuple(PARTS), batch=5).solve()
            grad = {u: np.ones(u.value.shape) for u in whole.variables}
            found = whole.solution.vjp(grad)
            answers.append(
                [whole.solution.objective, whole.solution.dual_residual, whole.solution.iterations]
                + [u.value for u in whole.variables]
                + [found[u] for u in whole.variables]
            )
    finally:
        fm.set_num_threads(threads)
    for other in answers[1:]:
        for ours, theirs in zip(answers[0], other, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_many_rows_are_a_batch(dtype):
    """Variables that do not lie side by side, and parameters that differ.

    Small rows are solved together, so that the margin within which a value counts as 0 is that of
    the worst of them: rounding, at most.
    """
    atol = 4 * np.finfo(dtype).eps
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(300, 20)).astype(dtype)
    budgets = rng.integers(1, 5, size=300)
    grad = rng.normal(size=(300, 20)).astype(dtype)
    batch = fm.FactorGraph(batch_dims=1)
    u = batch.variable_from(scores)
    batch.add(fm.Budget(u, budgets))
    wanted = batch.solve()
    for axis in (0, 1):
        fg = fm.FactorGraph()
        v = fg.variable_from(scores if axis == 1 else np.ascontiguousarray(scores.T))
        fg.add(fm.Budget(v, budgets, axis=axis))
        solution = fg.solve()
        turned = v.value if axis == 1 else v.value.T
        np.testing.assert_allclose(turned, u.value, rtol=0, atol=atol)
        assert solution.iterations == wanted.iterations.max()
        found = solution.vjp({v: grad if axis == 1 else grad.T})[v]
        exact = wanted.vjp({u: grad})[u]
        np.testing.assert_allclose(found if axis == 1 else found.T, exact, rtol=0, atol=8 * atol)


def test_small_rows_beside_others():
    """What has a closed form goes together, and is the same as elsewhere."""
    rng = np.random.default_rng(10)
    scores = {d: rng.normal(size=(200, d)) for d in (2, 3, 7)}
    own = {}
    for d, eta in scores.items():
        batch = fm.FactorGraph(batch_dims=1)
        own[d] = batch.variable_from(eta)
        batch.add(fm.Xor(own[d]))
        batch.solve()
    fg = fm.FactorGraph()
    rows = {d: fg.variable_from(eta) for d, eta in scores.items()}
    for u in rows.values():
        fg.add(fm.Xor(u, axis=1))
    solution = fg.solve()
    assert solution.iterations == 1
    for d, u in rows.items():
        np.testing.assert_allclose(u.value, own[d].value, rtol=0, atol=1e-15)


def test_large_models_are_compiled_once():
    def built(size):
        fg = fm.FactorGraph()
        fg.add(fm.Xor(fg.variable((size, 3)), axis=1))
        return fg._form().model

    first = built(100_000)
    assert built(100_000) is first
    for size in (100_001, 100_002):
        built(size)
    assert built(100_000) is not first  # two are enough


def test_per_instance_parameters():
    rng = np.random.default_rng(4)
    scores, budgets = rng.normal(size=(6, 5, 8)), rng.integers(1, 4, size=(6, 5))
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    fg.add(fm.Budget(u, budgets, axis=1))
    fg.solve()
    one = fm.FactorGraph(batch_dims=2)
    v = one.variable_from(scores)
    one.add(fm.Budget(v, budgets))
    one.solve()
    np.testing.assert_array_equal(u.value, v.value)


def test_warm_starts():
    whole = Alone(tuple(PARTS), batch=2).solve()
    again = Alone(tuple(PARTS), batch=2).solve(warm_start=whole.solution)
    assert (again.solution.iterations <= whole.solution.iterations).all()
    assert (again.solution.iterations < whole.solution.iterations).any()
    for u, v in zip(whole.variables, again.variables, strict=True):
        np.testing.assert_allclose(u.value, v.value, atol=1e-6)


def test_one_hard_part_keeps_no_other():
    """What does not get done is that part alone."""
    names = ("matching", "logic", "knapsack", "pairs")
    limit = int(Alone(["logic"]).solve().solution.iterations) - 1
    options = {"max_iter": limit, "on_failure": "ignore"}
    whole, alone = both(names=names, options=options)
    assert_same(whole, alone)
    assert not whole.solution.converged
    assert whole.solution.status == fm.Status.MAX_ITER
    done = [part.solution.converged for part in alone]
    assert any(done) and not all(done)


class TestInfeasible:
    def graph(self, guilty, batch=False):
        """Rows that hold, but for those of the given numbers."""
        rng = np.random.default_rng(5)
        scores = rng.normal(size=(3, 4, 5) if batch else (4, 5))
        fg = fm.FactorGraph(batch_dims=int(batch))
        u = fg.variable_from(scores, name="u")
        t = fg.variable_from(rng.normal(size=(3, 4, 2) if batch else (4, 2)), name="t")
        chain = fg.add(fm.Sequence(t, np.zeros((2, 2))))
        fg.add(fm.Xor(u, axis=1))
        budgets = np.full((3, 4), 3) if batch else np.full(4, 3)
        for where in guilty:
            budgets[where] = 0
        fg.add(fm.Budget(u, budgets, axis=1))
        return fg, u, t, chain

    @pytest.mark.parametrize("ask", ["solve", "solve_map"])
    def test_only_the_guilty_are_named(self, ask):
        fg, u, t, _ = self.graph([2])
        solution = getattr(fg, ask)(on_failure="ignore")
        assert solution.status == fm.Status.INFEASIBLE
        assert solution.objective == -np.inf
        assert np.isnan(u.value).all() and np.isnan(t.value).all()
        assert solution.conflict() == ["Xor over u[2, :]", "Budget over u[2, :]"]
        if ask == "solve":
            grads = solution.vjp({u: np.ones(u.value.shape), t: np.ones(t.value.shape)})
            assert not grads[u].any() and not grads[t].any()
        else:
            assert solution.upper_bound == -np.inf and not solution.integral

    def test_of_several_the_first(self):
        fg, *_ = self.graph([3, 1])
        assert fg.solve(on_failure="ignore").conflict() == [
            "Xor over u[1, :]",
            "Budget over u[1, :]",
        ]

    def test_other_instances_do_not_mind(self):
        fg, u, t, chain = self.graph([(1, 2)], batch=True)
        solution = fg.solve(on_failure="ignore")
        feasible, v, s, _ = self.graph([], batch=True)
        feasible.solve()
        assert [s == fm.Status.INFEASIBLE for s in solution.status] == [False, True, False]
        for i in (0, 2):
            np.testing.assert_array_equal(u.value[i], v.value[i])
            np.testing.assert_array_equal(t.value[i], s.value[i])
        assert np.isnan(u.value[1]).all() and np.isnan(t.value[1]).all()
        np.testing.assert_array_equal(chain.num_structures > 0, [True, False, True])

    def test_masked_variables_stay_off(self):
        fg = fm.FactorGraph()
        u = fg.variable_from(np.zeros((2, 3)), mask=[[True, True, False]] * 2)
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.Budget(u[1], 0))
        fg.solve(on_failure="ignore")
        np.testing.assert_array_equal(np.isnan(u.value), [[True, True, False]] * 2)
        assert (u.value[:, 2] == 0).all()


def test_structures_in_the_order_of_the_factors():
    """Trees, by rows or by structures, between chains and matchings of other parts."""
    rng = np.random.default_rng(6)
    kinds = ["tree", "chain", "matching", "tree", "chain", "tree"]
    scales = [0.1, 1.0, 1.0, 5.0, 0.2, 1.0]

    def part(fg, k):
        size = (5, 4) if kinds[k] == "chain" else (5, 5)
        own = np.random.default_rng([6, k])
        u = fg.variable_from(scales[k] * own.normal(size=(2, *size)))
        if kinds[k] == "chain":
            return u, fg.add(fm.Sequence(u, own.normal(size=(4, 4))))
        return u, fg.add(fm.DepTree(u) if kinds[k] == "tree" else fm.Matching(u))

    fg = fm.FactorGraph(batch_dims=1)
    parts = [part(fg, k) for k in range(len(kinds))]
    solution = fg.solve()
    grads = {u: rng.normal(size=u.value.shape) for u, _ in parts}
    found = solution.vjp(grads)
    for k, (u, factor) in enumerate(parts):
        own = fm.FactorGraph(batch_dims=1)
        v, alone = part(own, k)
        theirs = own.solve()
        np.testing.assert_array_equal(u.value, v.value)
        np.testing.assert_array_equal(found[u], theirs.vjp({v: grads[u]})[v])
        np.testing.assert_array_equal(factor.probs, alone.probs)
        np.testing.assert_array_equal(factor.structures, alone.structures)


class First(fm.Factor):
    """Exactly one variable is on; it notes which instances it is asked for."""

    def __init__(self, u, seen):
        super().__init__(u)
        self.seen = seen

    def map(self, eta_u, eta_v):
        self.seen.append(eta_u.size)
        on = np.zeros(eta_u.size)
        on[np.argmax(eta_u)] = 1
        return on, []


def test_oracles_of_ones_own():
    rng = np.random.default_rng(7)
    scores = rng.normal(size=(3, 9))
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    seen = [[], [], []]
    for k, own in enumerate(seen):
        fg.add(First(u[k::3][: 3 - (k == 2)], own))
    solution = fg.solve()
    exact = fm.FactorGraph(batch_dims=1)
    v = exact.variable_from(scores)
    for k in range(3):
        exact.add(fm.Xor(v[k::3][: 3 - (k == 2)]))
    exact.solve()
    np.testing.assert_allclose(u.value, v.value, atol=1e-9)
    assert set(seen[0]) == set(seen[1]) == {3} and set(seen[2]) == {2}
    assert solution.oracle_calls.sum() == sum(map(len, seen))


class Batched(fm.Factor):
    """Exactly one variable is on; all instances are asked for at once."""

    def map_batch(self, eta_u, eta_v):
        return np.eye(eta_u.shape[1])[np.argmax(eta_u, 1)], np.zeros((len(eta_u), 0))


def test_instances_that_meet_have_helpers():
    """Several threads may wait for an answer about one instance."""
    scores = 2 * np.random.default_rng(11).normal(size=(3, 4, 300))
    threads = fm.get_num_threads()
    try:
        fm.set_num_threads(3)
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        for k in range(4):
            fg.add(Batched(u[k]))
        for _ in range(10):
            fg.solve()
    finally:
        fm.set_num_threads(threads)
    exact = fm.FactorGraph(batch_dims=1)
    v = exact.variable_from(scores)
    exact.add(fm.Xor(v, axis=1))
    exact.solve()
    np.testing.assert_allclose(u.value, v.value, atol=1e-9)


def test_an_oracle_that_fails_names_its_factor():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros((2, 3)))

    class Wrong(fm.Factor):
        def map(self, eta_u, eta_v):
            raise KeyError("nothing")

    fg.add(First(u[0], []))
    fg.add(Wrong(u[1]))
    with pytest.raises(KeyError, match="nothing"):
        fg.solve()


def test_hard_parts_of_float32_are_solved_in_double():
    """As alone, and the easy ones are not."""
    rng = np.random.default_rng(8)
    easy = rng.normal(size=(4, 6)).astype(np.float32)
    i, j = np.triu_indices(30, 1)
    hard = (30 * rng.normal(size=30)).astype(np.float32)
    scores = (30 * rng.normal(size=len(i))).astype(np.float32)

    def add_hard(fg):
        u = fg.variable_from(hard)
        fg.add(fm.Pair(u[i], u[j], scores))
        fg.add(fm.Budget(u, 10))
        return u

    def add_easy(fg):
        u = fg.variable_from(easy)
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.AtMostOne(u, axis=0))
        return u

    fg = fm.FactorGraph()
    together = [add_hard(fg), add_easy(fg)]
    fg.solve()
    for u, add in zip(together, (add_hard, add_easy), strict=True):
        own = fm.FactorGraph()
        v = add(own)
        own.solve()
        np.testing.assert_array_equal(u.value, v.value)


def test_queries_of_whole_numbers():
    rng = np.random.default_rng(9)
    scores = 2 * rng.normal(size=(3, 8))
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    for k in range(3):
        for start in range(6):
            fg.add(fm.Budget([u[k, start], u[k, start + 1], u[k, start + 2]], 1))
    best = fg.decode()
    total = 0.0
    for k in range(3):
        own = fm.FactorGraph()
        v = own.variable_from(scores[k])
        for start in range(6):
            own.add(fm.Budget(v[start : start + 3], 1))
        total += float(own.decode().objective)
    assert best.optimal
    assert best.objective == pytest.approx(total)
