"""The builder: variables, indexing, batches, masks, and what it refuses."""

import copy
import gc
import itertools
import pickle
import weakref

import numpy as np
import oracle
import pytest
from oracle import Problem, Term

import factormax as fm
from factormax._fronts.numpy import start
from factormax.arrays import to_numpy


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def graph(scores, **options):
    fg = fm.FactorGraph(**options)
    return fg, fg.variable_from(np.asarray(scores))


# Variables ---------------------------------------------------------------------------------


def test_no_factor_means_clip(rng):
    scores = 2 * rng.normal(size=(3, 4))
    fg, u = graph(scores)
    solution = fg.solve()
    np.testing.assert_array_equal(u.value, np.clip(scores, 0, 1))
    grad = rng.normal(size=(3, 4))
    expected = np.where((scores > 0) & (scores < 1), grad, 0)
    np.testing.assert_array_equal(solution.vjp({u: grad})[u], expected)
    assert solution.objective == pytest.approx((scores * u.value - u.value**2 / 2).sum())


@pytest.mark.parametrize("shape", [(), (3,), 3, (2, 3), (2, 0), (0,)])
def test_variable_has_zero_scores(shape):
    fg = fm.FactorGraph()
    u = fg.variable(shape)
    fg.solve()
    np.testing.assert_array_equal(u.value, np.zeros(shape))


def test_variable_has_the_batch_of_the_others(rng):
    fg, u = graph(rng.normal(size=(5, 3)), batch_dims=1)
    v = fg.variable(2)
    fg.add(fm.Or([u, v]))
    fg.solve()
    assert v.value.shape == (5, 2)
    np.testing.assert_allclose(v.value[:, 0], v.value[:, 1])


def test_several_tensors_in_one_factor(rng):
    eta = rng.normal(size=7)
    fg, u = graph(eta[:4].reshape(2, 2))
    v = fg.variable_from(eta[4:])
    fg.add(fm.Xor([u[:, 0], v, ~u[1, 1]]))
    solution = fg.solve()
    term = Term("Xor", (0, 2, 4, 5, 6, 3), (0, 0, 0, 0, 0, 1))
    exact = oracle.solve(Problem(eta, (term,)))
    np.testing.assert_allclose(np.concatenate([u.value.ravel(), v.value]), exact.mu, atol=1e-9)
    grads = {u: rng.normal(size=(2, 2)), v: rng.normal(size=3)}
    out = solution.vjp(grads)
    expected, _ = exact.vjp(np.concatenate([g.ravel() for g in grads.values()]))
    np.testing.assert_allclose(out[u].ravel(), expected[:4], atol=1e-9)
    np.testing.assert_allclose(out[v], expected[4:], atol=1e-9)
    only_v = solution.vjp({v: grads[v]})
    assert set(only_v) >= {u, v}


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        (1, 2),
        (slice(None), 1),
        (slice(None, None, -2), slice(1, 3)),
        Ellipsis,
        (Ellipsis, 0),
        None,
        [2, 0],
        np.array([[0], [2]]),
        ([0, 1, 2], [3, 0, 1]),
        (slice(None), [3, 1]),
    ],
    ids=str,
)
def test_indexing_is_that_of_numpy(rng, index):
    scores = rng.normal(size=(3, 4))
    fg, u = graph(scores)
    fg.add(fm.Xor(u[index]))
    fg.solve()
    picked = scores[index]
    assert u[index].shape == picked.shape
    np.testing.assert_array_equal(u[index].value, u.value[index])
    assert u[index].value.sum() == pytest.approx(1)
    rest = np.ones((3, 4), bool)
    rest[index] = False
    np.testing.assert_array_equal(u.value[rest], np.clip(scores, 0, 1)[rest])


def test_indexing_does_not_see_the_batch(rng):
    scores = rng.normal(size=(2, 5, 3, 4))
    fg, u = graph(scores, batch_dims=2)
    assert u.shape == (3, 4)
    fg.add(fm.Xor(u[0]))
    fg.add(fm.AtMostOne(u[1:, 2]))
    fg.solve()
    assert u[0].value.shape == (2, 5, 4)
    np.testing.assert_allclose(u[0].value.sum(-1), 1, atol=1e-6)
    assert (u.value[..., 1:, 2].sum(-1) <= 1 + 1e-6).all()
    np.testing.assert_array_equal(u[1:, 2].value, u.value[..., 1:, 2])
    np.testing.assert_array_equal(u[[0, 2], 1].value, u.value[..., [0, 2], 1])


def test_slices_of_slices(rng):
    scores = rng.normal(size=(3, 4))
    fg, u = graph(scores)
    fg.add(fm.Xor(u[1:][0][::2]))
    fg.solve()
    assert u.value[1, ::2].sum() == pytest.approx(1)


def test_negation(rng):
    scores = rng.normal(size=4)
    results = []
    for negate in (lambda u: ~u, lambda u: u.negate(), lambda u: ~(~(~u)), lambda u: ~u[::1]):
        fg, u = graph(scores)
        fg.add(fm.Xor([negate(u)[0], negate(u)[1:3], u[3]]))
        fg.solve()
        results.append(u.value)
        np.testing.assert_array_equal(u[1:3].value, u.value[1:3])
    assert (1 - results[0][:3]).sum() + results[0][3] == pytest.approx(1)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("index", [3, -4, (0, 4), (0, 0, 0), "a", 1.5, [0, 3]], ids=str)
def test_index_out_of_range(index):
    _, u = graph(np.zeros((3, 4)))
    with pytest.raises((IndexError, TypeError)):
        u[index]


def test_value_before_the_solve():
    fg, u = graph(np.zeros(3))
    pair = fg.add(fm.Pair(u[0], u[1], 1.0))
    for asked in (u, u[0], pair):
        with pytest.raises(fm.GraphError, match="solve"):
            _ = asked.value


def test_value_of_a_variable_made_after_the_solve():
    fg, _ = graph(np.zeros(3))
    fg.solve()
    v = fg.variable(2)
    with pytest.raises(fm.GraphError, match="solve"):
        _ = v.value


def test_add_returns_the_factor_and_a_graph_grows():
    fg, u = graph([0.6, 0.9, 0.2])
    fg.solve()
    np.testing.assert_array_equal(u.value, [0.6, 0.9, 0.2])
    xor = fm.Xor(u[:2])
    assert fg.add(xor) is xor
    fg.solve()
    np.testing.assert_allclose(u.value, [0.35, 0.65, 0.2])


def test_an_earlier_solution_keeps_its_own_gradient():
    fg, u = graph([0.6, 0.9, 0.2])
    first = fg.solve()
    fg.add(fm.Xor(u[:2]))
    fg.solve()
    np.testing.assert_array_equal(first.vjp({u: np.ones(3)})[u], 1)


def test_a_mutated_array_does_not_change_the_answer():
    scores = np.array([0.6, 0.9, 0.2])
    fg, u = graph(scores)
    fg.add(fm.Xor(u))
    solution = fg.solve()
    before = u.value.copy()
    scores[:] = np.nan
    np.testing.assert_array_equal(u.value, before)
    np.testing.assert_allclose(solution.vjp({u: np.array([1.0, 0, 0])})[u], [0.5, -0.5, 0])


def test_names():
    fg, u = graph([np.nan])
    v = fg.variable_from(np.zeros(2))
    w = fg.variable_from(np.zeros(2), name="heads")
    with pytest.raises(fm.GraphError, match=r"Budget over u1\b"):
        fg.add(fm.Budget(v, -1))
    with pytest.raises(fm.GraphError, match=r"Budget over heads\[:1\]"):
        fg.add(fm.Budget(w[:1], -1))
    with pytest.raises(ValueError, match=r"\bu\b"):
        fg.solve()
    assert u.shape == (1,)


# Numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_dtype_is_kept(dtype):
    fg, u = graph(np.array([0.2, 0.9], dtype))
    fg.add(fm.Xor(u))
    solution = fg.solve()
    assert u.value.dtype == dtype
    assert solution.vjp({u: np.ones(2, dtype)})[u].dtype == dtype
    np.testing.assert_allclose(u.value, [0.15, 0.85], rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [int, np.int8, np.uint16, bool])
def test_integers_are_computed_in_float64(dtype):
    fg, u = graph(np.array([1, 1, 0], dtype))
    fg.add(fm.Xor(u))
    fg.solve()
    assert u.value.dtype == np.float64
    np.testing.assert_allclose(u.value, [0.5, 0.5, 0])


def test_lists_and_scalars_are_arrays():
    fg = fm.FactorGraph()
    u, v = fg.variable_from([0.2, 0.9]), fg.variable_from(0.4)
    fg.add(fm.Xor([u, v]))
    fg.solve()
    assert u.value.shape == (2,) and v.value.shape == ()


@pytest.mark.parametrize("layout", [np.asfortranarray, lambda a: np.repeat(a, 2, 0)[::2]])
def test_memory_layout_does_not_matter(rng, layout):
    scores = rng.normal(size=(4, 3))
    fg, u = graph(layout(scores))
    fg.add(fm.Xor(u, axis=1))
    solution = fg.solve()
    gg, v = graph(scores)
    gg.add(fm.Xor(v, axis=1))
    expected = gg.solve()
    np.testing.assert_array_equal(u.value, v.value)
    grad = rng.normal(size=(4, 3))
    np.testing.assert_array_equal(solution.vjp({u: layout(grad)})[u], expected.vjp({v: grad})[v])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
@pytest.mark.parametrize("batch_dims", [0, 1])
def test_zero_size(shape, batch_dims):
    scores = np.zeros((*[2] * batch_dims, *shape))
    fg, u = graph(scores, batch_dims=batch_dims)
    solution = fg.solve()
    assert u.value.shape == scores.shape
    assert np.all(solution.converged) and np.all(solution.objective == 0)
    assert solution.vjp({u: scores})[u].shape == scores.shape


def test_an_empty_batch():
    fg, u = graph(np.zeros((0, 3)), batch_dims=1)
    fg.add(fm.Xor(u))
    fg.add(fm.AtMostOne(u[:2]))
    solution = fg.solve()
    assert u.value.shape == (0, 3)
    assert solution.objective.shape == solution.status.shape == (0,)
    assert solution.vjp({u: np.zeros((0, 3))})[u].shape == (0, 3)


def test_a_graph_without_variables():
    with pytest.raises(fm.GraphError, match="no variables"):
        fm.FactorGraph().solve()


# Batches and masks ---------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (1,), (4,), (2, 3)])
def test_batches(rng, batch):
    scores = rng.normal(size=(*batch, 3, 4))
    fg, u = graph(scores, batch_dims=len(batch))
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    solution = fg.solve()
    for attribute in ("converged", "iterations", "primal_residual", "dual_residual", "objective"):
        assert np.shape(getattr(solution, attribute)) == batch
    statuses = np.array(solution.status, object)
    assert statuses.shape == batch and all(s is fm.Status.CONVERGED for s in statuses.ravel())
    cells = np.arange(12).reshape(3, 4)
    terms = [Term("Xor", row) for row in cells] + [Term("AtMostOne", col) for col in cells.T]
    for index in np.ndindex(*batch):
        exact = oracle.solve(Problem(scores[index].ravel(), tuple(terms)))
        np.testing.assert_allclose(u.value[index].ravel(), exact.mu, atol=1e-5)
        assert solution.objective[index] == pytest.approx(exact.objective, abs=1e-5)


@pytest.mark.parametrize("mask_shape", [(4, 3), (3,), (1, 3), (4, 1), (1,), ()])
def test_masks_broadcast(rng, mask_shape):
    scores = rng.normal(size=(4, 3))
    mask = np.asarray(rng.random(mask_shape) < 0.6)
    values = []
    for given in (mask, np.broadcast_to(mask, (4, 3)).copy()):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores, mask=given)
        fg.add(fm.Xor(u))
        fg.solve()
        values.append(u.value)
    np.testing.assert_array_equal(*values)
    assert not values[0][~np.broadcast_to(mask, (4, 3))].any()


def test_a_mask_hides_nan_and_infinity():
    """Padding holds anything."""
    fg = fm.FactorGraph()
    u = fg.variable_from(
        np.array([0.3, np.nan, np.inf, 0.1]), mask=np.array([True, False, False, True])
    )
    fg.add(fm.Xor(u))
    solution = fg.solve()
    np.testing.assert_allclose(u.value, [0.6, 0, 0, 0.4])
    np.testing.assert_allclose(solution.vjp({u: np.array([1.0, 9, 9, 0])})[u], [0.5, 0, 0, -0.5])
    assert np.isfinite(solution.objective)


def test_a_factor_that_no_instance_has():
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.full((2, 3), 0.3), mask=np.array([True, True, False]))
    fg.add(fm.Exactly(u[2], 1))
    fg.add(fm.Xor(u[2]))
    fg.solve()
    np.testing.assert_allclose(u.value, [[0.3, 0.3, 0]] * 2)


def test_a_factor_absent_in_some_instances(rng):
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]], bool)
    scores = rng.normal(size=(4, 4))
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores, mask=mask)
    fg.add(fm.Xor(u[:2]))
    fg.add(fm.Xor(u[2:]))
    fg.add(fm.AtMostOne(u[1:3]))
    solution = fg.solve()
    assert solution.converged.all()
    terms = (Term("Xor", (0, 1)), Term("Xor", (2, 3)), Term("AtMostOne", (1, 2)))
    for row in range(4):
        exact = oracle.solve(Problem(scores[row], terms).masked(mask[row]))
        np.testing.assert_allclose(u.value[row], exact.mu, atol=1e-5)


@pytest.mark.parametrize(
    ("factor", "free"),
    [
        (lambda a, b, c: fm.Imply([a, b, c]), True),  # a false premise
        (lambda a, b, c: fm.Imply([b, c, a]), "not both"),
        (lambda a, b, c: fm.Nand([a, b, c]), True),
        (lambda a, b, c: fm.Or([~a, b, c]), True),
        (lambda a, b, c: fm.Or([a, b, c]), "one at least"),
        (lambda a, b, c: fm.OrOut([b, c, a]), "neither"),
        (lambda a, b, c: fm.OrOut([b, c, ~a]), "one at least"),
        (lambda a, b, c: fm.OrOut([b, ~a, c]), "second"),
        (lambda a, b, c: fm.OrOut([b, a, c]), "equal"),
        (lambda a, b, c: fm.AndOut([b, ~a, c]), "equal"),
        (lambda a, b, c: fm.AndOut([b, c, ~a]), "both"),
        (lambda a, b, c: fm.XorOut([b, c, a]), "neither"),
        (lambda a, b, c: fm.XorOut([b, c, ~a]), "exactly one"),
        (lambda a, b, c: fm.Xor([~a, b, c]), "neither"),
        (lambda a, b, c: fm.AtLeast([~a, b, c], 2), "one at least"),
        (lambda a, b, c: fm.Knapsack([~a, b, c], [2, 1, 1], 3), "not both"),
    ],
)
@pytest.mark.parametrize("method", ["auto", "admm"])
def test_a_masked_literal_is_false_and_its_negation_true(factor, free, method):
    meaning = {
        True: lambda b, c: True,
        "not both": lambda b, c: not (b and c),
        "one at least": lambda b, c: b or c,
        "neither": lambda b, c: not b and not c,
        "second": lambda b, c: c,
        "both": lambda b, c: b and c,
        "equal": lambda b, c: b == c,
        "exactly one": lambda b, c: b != c,
    }[free]
    allowed = [y for y in itertools.product((0, 1), repeat=2) if meaning(*y)]
    options = {"method": method}
    if method == "admm":
        options |= {"tol": 1e-10, "max_iter": 20_000}
    for scores in itertools.product((-9.0, -4.0, 5.0, 11.0), (-7.0, -2.0, 3.0, 13.0)):
        for off in ({"mask": np.array([False, True, True])}, {}):
            eta = np.array([0.7 if off else -np.inf, *scores])
            fg = fm.FactorGraph()
            u = fg.variable_from(eta, **off)
            fg.add(factor(u[0], u[1], u[2]))
            assert fg.solve(**options).converged
            best = max(allowed, key=lambda y: np.dot(scores, y))
            np.testing.assert_allclose(u.value, [0, *best], atol=1e-7)
            assert fg.decode().optimal
            np.testing.assert_array_equal(u.value, [0, *best])


@pytest.mark.parametrize("score", [0.6, -0.6])
@pytest.mark.parametrize("negated", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("off", [0, 1])
def test_a_pair_with_one_end_masked(score, negated, off):
    """Nothing if the masked literal is false, a score of the other literal if it is true."""
    mask = np.arange(2) != off
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([0.3, 0.3]), mask=mask)
    ends = [~u[j] if negated[j] else u[j] for j in range(2)]
    pair = fg.add(fm.Pair(*ends, score))
    solution = fg.solve()
    other = 1 - off
    sign = -1 if negated[other] else 1
    eta = 0.3 + (sign * score if negated[off] else 0)
    value = np.clip(eta, 0, 1)
    assert u.value[other] == pytest.approx(value, abs=1e-15)
    assert u.value[off] == 0
    literal = 1 - value if negated[other] else value
    assert pair.value == pytest.approx(literal if negated[off] else 0, abs=1e-15)
    free = 0 < value < 1
    grads = solution.vjp({u: np.array([2.0, 3.0]), pair: 5.0})
    slope = np.array([2.0, 3.0])[other] + (5 * sign if negated[off] else 0)
    assert grads[u][other] == pytest.approx(slope * free)
    assert grads[u][off] == 0
    assert grads[pair] == pytest.approx(sign * slope * free if negated[off] else 0)


def test_a_ragged_clustering_is_its_parts():
    """Transitivity over padded pairs: Imply with a masked literal must not force the others."""
    rng = np.random.default_rng(0)
    n = 4
    scores = rng.normal(size=(3, n, n))
    sizes = [4, 3, 2]

    def transitive(scores, mask=None, batch_dims=0):
        fg = fm.FactorGraph(batch_dims=batch_dims)
        u = fg.variable_from(scores, mask=mask)
        n = u.shape[0]
        for i, j, k in itertools.permutations(range(n), 3):
            fg.add(fm.Imply([u[i, j], u[j, k], u[i, k]]))
        fg.solve()
        return u.value

    mask = np.zeros((3, n, n), bool)
    for b, size in enumerate(sizes):
        mask[b, :size, :size] = True
    together = transitive(scores, mask, batch_dims=1)
    for b, size in enumerate(sizes):
        alone = transitive(scores[b, :size, :size])
        np.testing.assert_allclose(together[b, :size, :size], alone, atol=1e-9)


def test_an_instance_alone_is_the_same_bit_for_bit_beside_shared_parameters():
    rng = np.random.default_rng(3)
    scores = 3 * rng.normal(size=(3, 6, 7))
    budgets, costs = rng.integers(1, 4, (3, 7)), rng.uniform(0.5, 2, (3, 6))

    def solved(part):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores[part])
        for i in range(6):
            fg.add(fm.Budget(u[i], 2))
            fg.add(fm.Budget(u[:, i], budgets[part, i]))
            fg.add(fm.Knapsack(u[:, i], costs[part] if i % 2 else costs[0], 3.0))
        fg.add(fm.Xor(u[:, 6]))
        fg.solve()
        return u.value

    together = solved(slice(None))
    for b in range(3):
        np.testing.assert_array_equal(together[b], solved(slice(b, b + 1))[0])


def test_masks_that_make_a_count_infeasible():
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.zeros((2, 3)), mask=np.array([[True] * 3, [True, False, False]]))
    fg.add(fm.AtLeast(u, 2))
    solution = fg.solve(on_failure="ignore")
    assert list(solution.status) == [fm.Status.CONVERGED, fm.Status.INFEASIBLE]
    assert list(solution.converged) == [True, False]
    assert np.isfinite(u.value[0]).all()
    assert np.isneginf(solution.objective[1])


def test_a_ragged_batch_of_matchings(rng):
    """Padding plus a mask equals each instance by itself, gradients too."""
    sizes = [(2, 3), (4, 4), (1, 1), (3, 4)]
    scores, grad = rng.normal(size=(2, 4, 4, 4))
    mask = np.zeros((4, 4, 4), bool)
    for b, (m, n) in enumerate(sizes):
        mask[b, :m, :n] = True

    def matching(scores, **options):
        fg = fm.FactorGraph(batch_dims=scores.ndim - 2)
        u = fg.variable_from(scores, **options)
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.AtMostOne(u, axis=0))
        return u, fg.solve(tol=1e-10)

    u, solution = matching(scores, mask=mask)
    out = solution.vjp({u: grad})[u]
    for b, (m, n) in enumerate(sizes):
        v, alone = matching(scores[b, :m, :n])
        np.testing.assert_allclose(u.value[b, :m, :n], v.value, atol=1e-9)
        np.testing.assert_allclose(out[b, :m, :n], alone.vjp({v: grad[b, :m, :n]})[v], atol=1e-8)


def test_twelve_thousand_pairs_at_once(rng):
    i, j = np.triu_indices(159, 1)
    fg, u = graph(rng.normal(size=159))
    pair = fg.add(fm.Pair(u[i], u[j], 0.3 * rng.normal(size=12561)))
    solution = fg.solve()
    assert solution.converged
    assert pair.value.shape == (12561,)
    assert (pair.value <= np.minimum(u.value[i], u.value[j]) + 1e-9).all()
    assert (pair.value >= np.maximum(u.value[i] + u.value[j] - 1, 0) - 1e-9).all()


@pytest.mark.parametrize("query", ["solve", "solve_map", "decode"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_solutions_are_copied_and_pickled(query, library, batch):
    scores = np.random.default_rng(0).normal(size=(*batch, 4, 4))
    if library == "torch":
        scores = pytest.importorskip("torch").tensor(scores, requires_grad=True)
    fg = fm.FactorGraph(batch_dims=len(batch))
    u = fg.variable_from(scores)
    fg.add(fm.Matching(u))
    fg.add(fm.Budget(u[0], 1))
    solution = getattr(fg, query)()
    copies = [copy.copy(solution), copy.deepcopy(solution), pickle.loads(pickle.dumps(solution))]
    names = ["objective", "status", "converged", "iterations", "primal_residual", "multipliers"]
    names += ["upper_bound", "integral"] * (query != "solve")
    names += ["nodes", "optimal"] * (query == "decode")
    for again in copies:
        assert again.query == query and repr(again) == repr(solution)
        for name in names:
            before, after = getattr(solution, name), getattr(again, name)
            assert type(before) is type(after)
            if library == "torch" and name == "objective":
                before, after = before.detach(), after.detach()
            np.testing.assert_array_equal(np.asarray(before), np.asarray(after))
        if query != "decode":
            assert np.asarray(getattr(fg, query)(warm_start=again).converged).all()
    if library == "numpy":
        grads = {u: np.ones(scores.shape)}
        np.testing.assert_array_equal(copies[0].vjp(grads)[u], solution.vjp(grads)[u])
        for again in copies[1:]:
            with pytest.raises(fm.GraphError, match="was pickled"):
                again.vjp(grads)


def test_an_error_is_pickled_with_its_solution():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([0.3, 0.1]))
    fg.add(fm.Xor(u))
    fg.add(fm.Nand(u[:1]))
    fg.add(fm.Nand(u[1:]))
    with pytest.raises(fm.InfeasibleError) as caught:
        fg.solve(on_failure="raise")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.solution.status is fm.Status.INFEASIBLE


def test_graphs_are_copied_and_pickled():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([[1.0, 0.9], [0.8, 0.1]]))
    fg.add(fm.Matching(u))
    fg.add(fm.Budget(u, 2))
    fg.solve()
    for again in (copy.deepcopy(fg), pickle.loads(pickle.dumps(fg))):
        again.solve()
        np.testing.assert_array_equal(again._variables[0].value, u.value)


def test_an_empty_batch_has_empty_answers() -> None:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.zeros((0, 4)), mask=np.zeros((0, 4), bool))
    fg.add(fm.Budget(u, np.zeros(0)))
    fg.add(fm.OrOut(u))
    solution = fg.solve(on_failure="raise")
    assert u.value.shape == (0, 4)
    assert solution.converged.shape == (0,)
    assert solution.vjp({u: np.zeros((0, 4))})[u].shape == (0, 4)


def test_a_mask_that_masks_nothing_is_none() -> None:
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((3, 4, 5))
    answers = []
    for mask in (None, np.ones((3, 4, 5), bool)):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores, mask=mask)
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.AtMostOne(u, axis=0))
        assert start(fg).inputs.here is None  # nothing is laid out for each instance
        solution = fg.solve()
        answers.append((u.value, solution.vjp({u: scores})[u]))
    np.testing.assert_array_equal(answers[0], answers[1])


QUERIES = [
    lambda fg, u: fg.solve(),
    lambda fg, u: fg.solve_map(),
    lambda fg, u: fg.decode(),
    lambda fg, u: fg.loss({u: [1, 0, 0]}),
]


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_factor_that_is_never_added(query, library):
    fg = fm.FactorGraph()
    scores = np.array([0.5, 0.1, 0.2])
    if library == "torch":
        scores = pytest.importorskip("torch").tensor(scores)
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u))
    fm.Budget(u[1:], 1)  # gone at once
    kept = fm.Pair(u[:1], u[1:2], -1.0)
    with pytest.warns(
        fm.GraphWarning, match=r"^Budget over u\[1:\]; Pair over u\[:1\], u\[1:2\] were created but"
    ) as w:
        query(fg, u)
    assert w[0].filename == __file__
    query(fg, u)  # once is enough
    fg.add(kept)
    query(fg, u)


def test_factors_that_are_added_late_or_failed_are_not_missed():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros((3, 3)))
    made = [fm.Xor(u[0]), fm.Matching(u), fm.Pair(u[0], u[1], 1.0), fm.Budget(u, 3)]
    for factor in made:
        fg.add(factor)
    bad = [
        lambda: fm.Budget(u, -1),
        lambda: fm.AtLeast(u, 10),
        lambda: fm.Knapsack(u, -1, 1),
        lambda: fm.Xor(u, axis=5),
        lambda: fm.Xor([u, u]),
        lambda: fm.Sequence(u, np.zeros(7)),
        lambda: fm.Pair(u[0], u[1], np.zeros(7)),
        lambda: fm.DepTree(u[:2]),
        lambda: fm.Table([u[0], u[1]], np.zeros((2, 2))),
        lambda: fm.SequenceBudget(u[0], 0.1, -1),
        lambda: fm.Factor(u),
    ]
    for make in bad:
        with pytest.raises((fm.GraphError, fm.InfeasibleError)):
            make()
    fm.testing.check_factor(fm.Or(u[0]))
    fg.solve()


# Graphs built alike -------------------------------------------------------------------------------


def test_graphs_built_alike_share_what_they_are_made_of():
    def built(shape, couplings, batch_dims=1):
        fg = fm.FactorGraph(batch_dims=batch_dims)
        u = fg.variable_from(np.ones(shape))
        fg.add(fm.Xor(u, axis=-1))
        fg.add(fm.Pair(u[0], u[1], couplings))
        return fg

    first = built((2, 3, 4), np.zeros(4))
    assert built((2, 3, 4), np.ones(4))._form() is first._form()
    others = [
        built((3, 3, 4), np.zeros(4)),
        built((3, 4), np.zeros(4), batch_dims=0),
        built((2, 3, 4), np.zeros((2, 4))),
        built((2, 3, 4), np.zeros(())),
        built((2, 3, 4), np.zeros(1)),
    ]
    assert len({id(fg._form()) for fg in [first, *others]}) == 6
    assert others[0]._form().model is first._form().model


def test_a_graph_that_grows_is_looked_at_again():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([2.0, 1.5]))
    before = fg._form()
    fg.solve()
    np.testing.assert_allclose(u.value, [1, 1])
    fg.add(fm.Xor(u))
    assert fg._form() is not before
    fg.solve()
    np.testing.assert_allclose(u.value, [0.75, 0.25])


# Memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_graph_is_freed_without_the_garbage_collector(library, rng):
    scores = rng.normal(size=(3, 3))
    if library == "torch":
        scores = pytest.importorskip("torch").tensor(scores, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.Budget(u[:, 0], 1))
        fg.solve()
        dead = weakref.ref(fg)
        del fg
        assert dead() is None
        if library == "torch":
            u.value.sum().backward()
        assert tuple(u[0].value.shape) == (3,)  # the variables still have their values
        dead = weakref.ref(u)
        del u
        assert dead() is None
    finally:
        gc.enable()


class FirstOrLast(fm.Factor):
    """The first variable is on, or the last."""

    def map(self, eta_u, eta_v):
        m = np.zeros(len(eta_u))
        m[0 if eta_u[0] >= eta_u[-1] else -1] = 1
        return m, eta_v[:0]


#: Factors over u, `(3, 3)`, with scores of their own or with a MAP oracle.
SCORED_OR_STRUCTURED = {
    "Pair": lambda u: fm.Pair(u[0], u[1], np.ones(3)),
    "Sequence": lambda u: fm.Sequence(u, np.ones((3, 3)), initial=np.ones(3)),
    "SequenceBudget": lambda u: fm.SequenceBudget(u[:, 0], 0.5, 2),
    "DepTree": fm.DepTree,
    "Matching": fm.Matching,
    "Table": lambda u: fm.Table(u[0], np.ones(3)),
    "Factor": lambda u: FirstOrLast(u[0]),
}


@pytest.mark.parametrize("query", ["solve", "solve_map", "loss"])
@pytest.mark.parametrize("kind", SCORED_OR_STRUCTURED)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_graph_with_scores_or_structures_is_freed_too(library, kind, query, rng):
    scores = rng.normal(size=(3, 3))
    if library == "torch":
        scores = pytest.importorskip("torch").tensor(scores, requires_grad=True)
    gc.disable()
    try:
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        factor = fg.add(SCORED_OR_STRUCTURED[kind](u))
        if query == "loss":
            target = fg.decode() and to_numpy(u.value)
            fg.loss({u: target})
        else:
            getattr(fg, query)()
        dead = [weakref.ref(fg), weakref.ref(fg._record)]
        del fg
        assert dead[0]() is None
        if kind != "Pair":
            assert factor.probs.sum() > 0.99  # the factor still has its answer
        dead += [weakref.ref(u), weakref.ref(factor)]
        del u, factor
        assert [ref() for ref in dead] == [None] * 4
    finally:
        gc.enable()


def test_a_factor_that_was_not_solved_for_has_no_structures(rng):
    fg, u = graph(rng.normal(size=(3, 3)))
    first = fg.add(fm.Matching(u))
    with pytest.raises(fm.GraphError, match="no structures yet"):
        _ = first.structures
    fg.solve()
    second = fm.DepTree(u)
    for factor in (second, fg.add(second)):
        with pytest.raises(fm.GraphError, match=r"DepTree over u has no structures yet"):
            _ = factor.probs
    assert first.num_structures >= 1


def test_warm_starts_from_other_queries(rng):
    """They begin elsewhere, and come to the same answer; exact decoding has no multipliers."""
    fg, u = graph(3 * rng.normal(size=(5, 6)))
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    solved, relaxed, decoded = fg.solve(tol=1e-10), fg.solve_map(), fg.decode()
    for query, other in (("solve", relaxed), ("solve_map", solved)):
        ask = getattr(fg, query)
        ask(tol=1e-10)
        expected = u.value
        ask(tol=1e-10, warm_start=other, on_failure="raise")
        np.testing.assert_allclose(u.value, expected, rtol=0, atol=1e-9)
        with pytest.raises(fm.GraphError, match=r"of fg.decode\(\) has no multipliers"):
            ask(warm_start=decoded)


def test_values_may_be_written_to_while_the_objective_is_differentiated():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([0.6, 0.2, 0.1]))
    fg.add(fm.AtMostOne(u))
    pair = fg.add(fm.Pair(u[:2], u[1:], [0.5, 0.25]))
    solution = fg.solve()
    right = u.value.copy()
    right_pair = pair.value.copy()
    u.value[...] = pair.value[...] = 7.0
    assert (u.value == 7).all() and (pair.value == 7).all()
    copied = copy.copy(solution)
    del solution
    found = copied.vjp({}, objective=1.0)
    np.testing.assert_array_equal(found[u], right)
    np.testing.assert_array_equal(found[pair], right_pair)


def test_values_are_not_copied_if_nobody_else_needs_them():
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.zeros((4, 3)))
    pair = fg.add(fm.Pair(u[:2], u[1:], [0.5, 0.25]))
    for_each = [(u, "values"), (pair, "factor_values")]
    fg.solve()
    for owner, name in for_each:
        memory = getattr(fg._record, name)._found[0]
        assert owner.value is owner.value
        assert np.shares_memory(owner.value, memory)
        owner.value[...] = 1.0  # may be written to
    kept = fg.solve()
    for owner, name in for_each:
        memory = getattr(fg._record, name)._found[0]
        assert not np.shares_memory(owner.value, memory)
    assert kept.converged.all()
