"""Masks cut a large graph of structured factors into parts, which are solved one by one."""

import ctypes

import numpy as np
import pytest

import factormax as fm

GROUPS, PER = 36, 3  # groups of factors that stay together
JOINT = 5  # the variable of a factor that may join its group to the next one


class First(fm.Factor):
    """Exactly one variable is on."""

    def map(self, eta_u, eta_v):
        on = np.zeros(eta_u.size)
        on[np.argmax(eta_u)] = 1
        return on, []


class Batched(fm.Factor):
    """The same, for all instances at once."""

    def map_batch(self, eta_u, eta_v):
        return np.eye(eta_u.shape[1])[np.argmax(eta_u, 1)], np.zeros((len(eta_u), 0))


# For each kind: how many variables it has, the shape of its scores, and the factor.
KINDS = {
    "sequence": (160, (4, 4), lambda u, s: fm.Sequence(u.reshape(40, 4), s)),
    "budget": (160, (159,), lambda u, s: fm.SequenceBudget(u, 0.3 * s, 30)),
    "tree": (169, (), lambda u, s: fm.DepTree(u.reshape(13, 13))),
    "projective": (169, (), lambda u, s: fm.DepTree(u.reshape(13, 13), projective=True)),
    "matching": (160, (), lambda u, s: fm.Matching(u.reshape(10, 16))),
    "table": (160, (80, 80), lambda u, s: fm.Table([u[:80], u[80:]], s)),
    "own": (160, (), lambda u, s: First(u)),
    "batched": (160, (), lambda u, s: Batched(u)),
}


class Numbers:
    """Scores of all groups, with `lead` in front, and which joints are masked: (*lead, GROUPS)."""

    def __init__(self, kind, lead=(), scale=1.0, seed=0):
        rng = np.random.default_rng(seed)
        d, shape, self.factor = KINDS[kind]
        self.scores = scale * rng.normal(size=(*lead, GROUPS, PER, d))
        self.own = scale * rng.normal(size=(GROUPS, PER, *shape))
        self.pair = rng.normal(size=GROUPS)
        self.cut = np.ones((*lead, GROUPS), dtype=bool)

    def masked(self):
        """Half of the joints are masked, the others have scores of -inf."""
        scores, mask = self.scores.copy(), np.ones(self.scores.shape, dtype=bool)
        last = np.zeros(mask.shape, dtype=bool)
        last[..., -1, JOINT] = self.cut
        odd = (np.arange(GROUPS) % 2 == 1)[:, None, None]
        scores[last & odd] = -np.inf
        mask[last & ~odd] = False
        return scores, mask


def add_group(fg, numbers, u, g, before=()):
    """Factors over u (PER, d), joined by rows and a pair. before: the joint of the last group."""
    factors = [fg.add(numbers.factor(u[k], numbers.own[g, k])) for k in range(PER)]
    fg.add(fm.AtMostOne([u[k, 2] for k in range(PER)]))
    fg.add(fm.AtMostOne([*before, u[0, JOINT], u[1, JOINT]]))
    fg.add(fm.Pair(u[0, 3], u[1, 3], numbers.pair[g]))
    return factors


class Whole:
    """All groups in one graph, each joined to the next."""

    def __init__(self, numbers):
        scores, mask = numbers.masked()
        self.fg = fm.FactorGraph(batch_dims=scores.ndim - 3)
        self.u = self.fg.variable_from(scores, mask=mask, name="u")
        assert self.u.size >= 16384  # from here on, parts are looked for
        self.factors = []
        for g in range(GROUPS):
            before = [self.u[g - 1, PER - 1, JOINT]] if g > 0 else []
            self.factors.append(add_group(self.fg, numbers, self.u[g], g, before))


class Apart:
    """Each group in a graph of its own, for one instance."""

    def __init__(self, numbers):
        scores, mask = numbers.masked()
        self.graphs, self.variables, self.factors = [], [], []
        for g in range(GROUPS):
            fg = fm.FactorGraph()
            u = fg.variable_from(scores[g], mask=mask[g])
            self.factors.append(add_group(fg, numbers, u, g))
            self.graphs.append(fg)
            self.variables.append(u)


def with_masks_of_their_own(kind, **how):
    """Three instances: cut everywhere, nowhere, and at every third group."""
    numbers = Numbers(kind, (3,), **how)
    numbers.cut[1] = False
    numbers.cut[2] = np.arange(GROUPS) % 3 == 0
    return numbers


OPTIONS = {"tol": 1e-9, "max_iter": 20_000}


@pytest.mark.parametrize("scale", [0.3, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_as_if_alone(kind, scale):
    numbers = Numbers(kind, scale=scale)
    whole, apart = Whole(numbers), Apart(numbers)
    solution = whole.fg.solve(**OPTIONS)
    theirs = [fg.solve(**OPTIONS) for fg in apart.graphs]
    value = np.stack([v.value for v in apart.variables])
    np.testing.assert_allclose(whole.u.value, value, rtol=0, atol=1e-7)
    np.testing.assert_allclose(solution.objective, np.sum([s.objective for s in theirs]))
    # As many passes as the hardest part takes, or rounding apart.
    assert solution.iterations <= 2 * np.max([s.iterations for s in theirs]) + 5
    grad = np.random.default_rng(1).normal(size=value.shape)
    exact = [s.vjp({v: d})[v] for s, v, d in zip(theirs, apart.variables, grad, strict=True)]
    np.testing.assert_allclose(solution.vjp({whole.u: grad})[whole.u], exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_structures_are_those_of_their_factor(kind):
    whole = Whole(with_masks_of_their_own(kind))
    whole.fg.solve(**OPTIONS)
    for g, factors in enumerate(whole.factors):
        for k, factor in enumerate(factors):
            found = np.reshape(factor.structures, (*factor.probs.shape, -1))
            means = np.einsum("bk,bkd->bd", factor.probs, np.where(np.isnan(found), 0, found))
            np.testing.assert_allclose(means, whole.u.value[:, g, k], rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["auto", "ad3"])
@pytest.mark.parametrize("kind", ["sequence", "tree", "matching", "own"])
def test_linear_programs(kind, method):
    numbers = Numbers(kind)
    whole, apart = Whole(numbers), Apart(numbers)
    options = {"method": method, "max_iter": 20_000, "on_failure": "ignore"}
    ours = whole.fg.solve_map(**options)
    theirs = [fg.solve_map(**options) for fg in apart.graphs]
    done = all(s.converged for s in theirs)
    assert ours.converged == done
    if done:
        objective = np.sum([s.objective for s in theirs])
        np.testing.assert_allclose(ours.objective, objective, rtol=1e-5)
        np.testing.assert_allclose(ours.upper_bound, np.sum([s.upper_bound for s in theirs]), 1e-5)


def instance(numbers, i):
    one = object.__new__(Numbers)
    one.__dict__ = {**numbers.__dict__, "scores": numbers.scores[i], "cut": numbers.cut[i]}
    return one


@pytest.mark.parametrize("kind", KINDS)
def test_answers_depend_on_the_instance_alone(kind):
    numbers = with_masks_of_their_own(kind)
    together = Whole(numbers)
    solution = together.fg.solve()
    grad = np.random.default_rng(2).normal(size=together.u.value.shape)
    slope = solution.vjp({together.u: grad})[together.u]
    for i in range(3):
        alone = Whole(instance(numbers, i))
        own = alone.fg.solve()
        np.testing.assert_array_equal(together.u.value[i], alone.u.value)
        assert solution.objective[i] == own.objective
        assert solution.iterations[i] == own.iterations
        np.testing.assert_array_equal(slope[i], own.vjp({alone.u: grad[i]})[alone.u])
        if kind in ("tree", "matching"):  # listed only if some instance was solved by rows
            continue
        for ours, theirs in zip(together.factors[-1], alone.factors[-1], strict=True):
            count = len(theirs.probs)
            np.testing.assert_array_equal(ours.probs[i][:count], theirs.probs)
            np.testing.assert_array_equal(ours.structures[i][:count], theirs.structures)


@pytest.mark.parametrize("kind", ["sequence", "budget"])
def test_gradients_of_shared_scores_are_added_up(kind):
    numbers = with_masks_of_their_own(kind)
    together = Whole(numbers)
    grad = np.random.default_rng(2).normal(size=together.u.shape)
    slopes = together.fg.solve().vjp({together.u: np.broadcast_to(grad, (3, *grad.shape))})
    expected = [[0.0] * PER for _ in range(GROUPS)]
    for i in range(3):
        alone = Whole(instance(numbers, i))
        own = alone.fg.solve().vjp({alone.u: grad})
        for g, k in np.ndindex(GROUPS, PER):
            expected[g][k] = expected[g][k] + own[alone.factors[g][k]]
    for g, k in np.ndindex(GROUPS, PER):
        found = slopes[together.factors[g][k]]
        np.testing.assert_allclose(found, expected[g][k], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["sequence", "tree", "own"])
def test_the_number_of_threads_does_not_matter(kind):
    answers, threads = [], fm.get_num_threads()
    try:
        for count in (1, 4):
            fm.set_num_threads(count)
            whole = Whole(with_masks_of_their_own(kind, scale=0.5))
            solution = whole.fg.solve()
            grad = np.cos(np.arange(whole.u.value.size)).reshape(whole.u.value.shape)
            slopes = solution.vjp({whole.u: grad})
            answers.append([whole.u.value, solution.objective, *slopes.values()])
            answers[-1] += [f.probs for factors in whole.factors for f in factors]
    finally:
        fm.set_num_threads(threads)
    for ours, theirs in zip(*answers, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_gradients_against_differences():
    numbers, step = Numbers("tree", scale=0.5), 1e-6
    whole = Whole(numbers)
    options = {"tol": 1e-12, "max_iter": 20_000}
    solution = whole.fg.solve(**options)
    rng = np.random.default_rng(3)
    grad, direction = rng.normal(size=(2, *whole.u.value.shape))
    slope = np.sum(solution.vjp({whole.u: grad})[whole.u] * direction)
    scores, values = numbers.scores, []
    for t in (step, -step):
        numbers.scores = scores + t * direction
        moved = Whole(numbers)
        moved.fg.solve(**options)
        values.append(np.sum(grad * moved.u.value))
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5)


@pytest.mark.parametrize("kind", ["sequence", "matching"])
def test_warm_starts(kind):
    numbers = Numbers(kind, scale=0.5)
    whole = Whole(numbers)
    first = whole.fg.solve()
    value = whole.u.value
    again = whole.fg.solve(warm_start=first)
    assert again.iterations <= first.iterations
    np.testing.assert_allclose(whole.u.value, value, rtol=0, atol=1e-6)
    # Of a graph in one piece, too.
    numbers.cut[:] = False
    joined = Whole(numbers).fg.solve()
    whole.fg.solve(warm_start=joined)
    np.testing.assert_allclose(whole.u.value, value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["sequence", "tree"])
def test_only_the_guilty_are_named(kind):
    numbers = with_masks_of_their_own(kind)
    whole = Whole(numbers)
    none = np.full((3, 1), 1000)
    none[0] = 0
    whole.fg.add(fm.Budget(whole.u[7, 1], none[:, 0]))  # not in the first instance
    solution = whole.fg.solve(on_failure="ignore")
    assert [s == fm.Status.INFEASIBLE for s in solution.status] == [True, False, False]
    assert all("u[7" in name or "u[6" in name for name in solution.conflict(0))
    slope = solution.vjp({whole.u: np.ones(whole.u.value.shape)})[whole.u]
    assert not slope[0].any() and slope[1:].any()
    feasible = Whole(numbers)
    feasible.fg.add(fm.Budget(feasible.u[7, 1], 1000))
    feasible.fg.solve()
    np.testing.assert_array_equal(whole.u.value[1:], feasible.u.value[1:])
    counts = np.stack([f.num_structures for f in whole.factors[0]])
    assert (counts[:, 0] == 0).all() and (counts[:, 1:] > 0).all()


ROWS, LENGTH, STATES, BLOCK = 36, 12, 3, 6


def chains(rows):
    """Chains along the rows, and down the columns in blocks that end in a line that is masked.

    Columns are linked to the rows that they cross. The blocks of the whole are joined.
    """
    rng = np.random.default_rng(4)
    scores = rng.normal(size=(ROWS, LENGTH, STATES))
    across = rng.normal(size=(ROWS, STATES, STATES))
    down = rng.normal(size=(ROWS // BLOCK, LENGTH, STATES, STATES))
    mask = np.ones(scores.shape, dtype=bool)
    mask[BLOCK - 1 :: BLOCK] = False
    fg = fm.FactorGraph()
    u = fg.variable_from(scores[rows], mask=mask[rows])
    for r, k in enumerate(range(ROWS)[rows]):
        fg.add(fm.Sequence(u[r], across[k]))
    for b in range(len(range(ROWS)[rows]) // BLOCK):
        block = u[b * BLOCK : (b + 1) * BLOCK]
        first = range(ROWS)[rows][0] // BLOCK
        for c in range(0, LENGTH, 3):
            fg.add(fm.Sequence(block[:, c], down[first + b, c]))
        if b > 0:
            fg.add(fm.AtMostOne([u[b * BLOCK - 1, 0, 0], u[b * BLOCK, 0, 0]]))
    return fg, u


def test_links():
    fg, u = chains(slice(None))
    assert u.size >= 512  # from here on, with links
    solution = fg.solve(**OPTIONS)
    grad = np.random.default_rng(5).normal(size=u.value.shape)
    slope = solution.vjp({u: grad})[u]
    total = 0.0
    for first in range(0, ROWS, BLOCK):
        own, v = chains(slice(first, first + BLOCK))
        theirs = own.solve(**OPTIONS)
        rows = slice(first, first + BLOCK)
        np.testing.assert_allclose(u.value[rows], v.value, rtol=0, atol=1e-7)
        np.testing.assert_allclose(slope[rows], theirs.vjp({v: grad[rows]})[v], rtol=0, atol=1e-6)
        total += float(theirs.objective)
    assert solution.objective == pytest.approx(total)


def test_oracles_are_told_their_instance():
    """By a C function, which gets its number: the one in the batch, not among like masks."""
    seen = set()
    doubles = ctypes.POINTER(ctypes.c_double)

    @ctypes.CFUNCTYPE(
        ctypes.c_int32,
        *(doubles, ctypes.c_int64, doubles, ctypes.c_int64, doubles, doubles),
        *(ctypes.c_void_p, ctypes.c_int64),
    )
    def first(eta_u, d, eta_v, s, m, n, data, instance):
        level = np.ctypeslib.as_array(eta_u, (d,))
        seen.add((int(instance), bool(np.isneginf(level).any())))
        m[int(np.argmax(level))] = 1
        return 0

    class Native(fm.Factor):
        pass

    numbers = with_masks_of_their_own("own")
    numbers.cut[0] = False
    numbers.factor = lambda u, s: Native(u, native_map=first)
    whole = Whole(numbers)
    whole.fg.solve()
    # Every instance has factors without a masked variable, but for the last one only some do.
    assert seen == {(0, False), (1, False), (2, False), (2, True)}


def test_parameters_of_an_instance():
    numbers, budgets = with_masks_of_their_own("budget"), np.array([20, 30, 40])
    numbers.factor = lambda u, s: fm.SequenceBudget(u, 0.3 * s, budgets)
    together = Whole(numbers)
    together.fg.solve()
    for i in range(3):
        one = instance(numbers, i)
        one.factor = lambda u, s, i=i: fm.SequenceBudget(u, 0.3 * s, budgets[i])
        alone = Whole(one)
        alone.fg.solve()
        np.testing.assert_array_equal(together.u.value[i], alone.u.value)
