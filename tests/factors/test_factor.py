"""Factors of one's own: whatever has a MAP oracle."""

import copy
import ctypes
import gc
import pickle
import threading
import weakref
from functools import cache

import numpy as np
import pytest
from structured_contract import ALONE, Case, Padded, StructuredContract, gradients, solved

import factormax as fm
from factormax.reference.structures import (
    budget_sequences,
    column_scores,
    matchings,
    sequences,
    tables,
    trees,
)


class Listed(fm.Factor):
    """The structures are the columns of M, with the features of N: looked through one by one."""

    def __init__(self, u, scores=None, *, M, N, **options):
        super().__init__(u, scores, **options)
        self.M, self.N = M, N

    def map(self, eta_u, eta_v):
        assert eta_u.shape == self.variable_shape
        found = column_scores(self.M, self.N, eta_u.reshape(-1), eta_v.reshape(-1))
        best = int(np.argmax(found))
        if found[best] == -np.inf:
            return fm.NO_STRUCTURE
        return self.M[:, best].reshape(eta_u.shape), self.N[:, best].reshape(eta_v.shape)


class TwoOf(fm.Factor):
    """Exactly two are on; all, where fewer are left."""

    def map(self, eta_u, eta_v):
        m = np.zeros(eta_u.shape)
        order = np.argsort(-eta_u, axis=None, kind="stable")[:2]
        m.flat[[j for j in order if eta_u.flat[j] > -np.inf]] = 1
        return m, []


class TwoOfBatch(fm.Factor):
    """The same, for many instances at once."""

    sizes: list

    def map_batch(self, eta_u, eta_v):
        self.__dict__.setdefault("sizes", []).append(len(eta_u))
        m = np.zeros(eta_u.shape)
        order = np.argsort(-eta_u, axis=-1, kind="stable")[:, :2]
        np.put_along_axis(m, order, 1, axis=-1)
        return np.where(eta_u == -np.inf, 0, m), np.zeros((len(eta_u), 0))


@cache
def listed(kind, *size) -> Case:
    """A built-in factor's structures, found by looking."""
    make, shape, scores = {
        "pairs": (tables, (4,), {"scores": (2, 2)}),
        "trees": (trees, (*size[:1], *size[:1]), {}),
        "matchings": (matchings, size, {}),
        "sequences": (sequences, size[:2], {"scores": size[1:2] * 2}),
        "budget": (budget_sequences, size[:1], {"scores": ()}),
    }[kind]
    M, N = make((2, 2)) if kind == "pairs" else make(*size)
    return Case(shape, lambda u, **own: Listed(u, **own, M=M, N=N), M, N, scores, f"{kind}{size}")


@cache
def two_of(d) -> Case:
    pairs = np.array(np.triu_indices(d, 1)).T if d > 1 else np.zeros((1, 1), int)
    M = np.zeros((d, len(pairs)))
    for k, on in enumerate(pairs):
        M[on, k] = 1
    return Case((d,), TwoOf, M, np.zeros((0, len(pairs))), name=f"TwoOf({d})")


class TestFactor(StructuredContract):
    kind = "(Listed|TwoOf)"

    def cases(self):
        return [
            two_of(1),
            two_of(2),
            two_of(5),
            listed("trees", 3),
            listed("matchings", 2, 3),
            listed("sequences", 3, 2),
            listed("budget", 4, False, 2),
            listed("pairs"),
        ]

    def whole(self, case, mask):
        flat = mask.reshape(len(mask), -1)
        return flat.sum(axis=1) >= min(2, flat.shape[1])  # TwoOf makes do with fewer

    def padded(self):
        yield Padded(two_of(5), two_of(3), slice(0, 3))
        yield Padded(two_of(6), two_of(4), [0, 2, 3, 5])

    def test_nothing_is_there(self):
        """What is left is for the oracle to say; it is not asked where all variables are masked."""
        eta = np.random.default_rng(0).normal(size=(2, 5))
        mask = np.array([[False] * 5, [True] * 5])
        built, solution = solved(two_of(5), eta, {}, mask, batch_dims=1)
        assert solution.converged.all() and not built.u.value[0].any()
        np.testing.assert_array_equal(built.u.value[1], solved(two_of(5), eta[1], {})[0].u.value)

    def test_no_structure(self):
        """None from `map`: no assignment is allowed."""
        case = listed("matchings", 2, 3)
        mask = np.ones((3, 2, 3), dtype=bool)
        mask[1, :, 1:] = False
        built, solution = solved(case, np.zeros((3, 2, 3)), {}, mask, 1, on_failure="ignore")
        states = [fm.Status.CONVERGED, fm.Status.INFEASIBLE, fm.Status.CONVERGED]
        assert list(solution.status) == states
        assert np.isnan(built.u.value[1, :, 0]).all() and np.isfinite(built.u.value[::2]).all()
        out = solution.vjp({built.u: np.ones((3, 2, 3))})[built.u]
        assert np.isfinite(out).all() and not out[1].any()

    @pytest.mark.parametrize(
        ("case", "builtin"),
        [
            (listed("trees", 4), lambda u: fm.DepTree(u)),
            (listed("matchings", 3, 4), lambda u: fm.Matching(u)),
            (listed("sequences", 4, 2), lambda u, scores: fm.Sequence(u, scores)),
            (listed("budget", 6, False, 3), lambda u, scores: fm.SequenceBudget(u, scores, 3)),
            (listed("pairs"), lambda u, scores: fm.Table([u[:2], u[2:]], scores)),
        ],
        ids=["DepTree", "Matching", "Sequence", "SequenceBudget", "Table"],
    )
    def test_it_is_the_builtin_of_the_same_structures(self, case, builtin):
        rng = np.random.default_rng(1)
        for scale in (0.1, 1.0, 10.0):
            eta, own = case.draw(rng, scale)
            ours, solution = solved(case, eta, own)
            theirs, other = solved(Case(case.shape, builtin, case.M, case.N, case.scores), eta, own)
            np.testing.assert_allclose(ours.u.value, theirs.u.value, rtol=0, atol=ALONE)
            grads = case.draw(rng)
            grad, own_grads = gradients(case, ours, solution, grads)
            expected, own_expected = gradients(case, theirs, other, grads)
            np.testing.assert_allclose(grad, expected, rtol=0, atol=1e-8)
            for name in own_grads:
                np.testing.assert_allclose(ours.factor.value, theirs.factor.value, atol=ALONE)
                np.testing.assert_allclose(own_grads[name], own_expected[name], atol=1e-8)


# What the oracle sees and returns -----------------------------------------------------------------


def graph(make, scores, mask=None):
    """One factor over a batch of scores."""
    fg = fm.FactorGraph(batch_dims=np.ndim(scores) - 1)
    u = fg.variable_from(np.asarray(scores, float), mask=mask)
    return fg, u, fg.add(make(u))


class Seen(TwoOf):
    """Remembers what it was asked."""

    def map(self, eta_u, eta_v):
        self.__dict__.setdefault("asked", []).append((eta_u.copy(), eta_v.copy()))
        return super().map(eta_u, eta_v)


def test_shapes_and_masks_of_what_the_oracle_sees():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.arange(6.0).reshape(2, 3), mask=np.arange(6).reshape(2, 3) != 5)
    factor = fg.add(Seen(u))
    fg.solve()
    eta_u, eta_v = factor.asked[0]
    assert eta_u.shape == (2, 3) and eta_u.dtype == np.float64 and eta_v.size == 0
    assert all(
        asked[1, 2] == -np.inf and np.isfinite(asked.flat[:5]).all() for asked, _ in factor.asked
    )
    assert factor.structures.shape == (1, 2, 3)


def test_a_list_of_variables_is_flat():
    fg = fm.FactorGraph()
    u, v = fg.variable_from(np.arange(4.0).reshape(2, 2)), fg.variable_from(np.array([9.0, 8.0]))
    factor = fg.add(Seen([u, v[:1]]))
    fg.solve()
    assert factor.asked[0][0].shape == (5,)
    np.testing.assert_array_equal(factor.structures, [[0, 0, 0, 1, 1]])
    assert v.value[1] == 1


class Both(fm.Factor):
    """Two variables, one score for both, with any real feature; the score has a shape."""

    def map(self, eta_u, eta_v):
        assert eta_v.shape == (1, 2)
        best = max(
            ((a, b) for a in (0, 1) for b in (0, 1)),
            key=lambda y: eta_u @ y + eta_v[0] @ [y[0] * y[1], 0.5 * y[0]],
        )
        return list(best), [[best[0] * best[1], 0.5 * best[0]]]


def test_scores_have_their_shape_and_features_may_be_real():
    scores = np.array([[0.3, -0.2]])
    fg, u, factor = graph(lambda u: Both(u, scores), np.array([0.2, 0.3]))
    solution = fg.solve()
    pair_fg = fm.FactorGraph()
    v = pair_fg.variable_from(np.array([0.2 - 0.1, 0.3]))
    pair = pair_fg.add(fm.Pair(v[0], v[1], 0.3))
    other = pair_fg.solve()
    np.testing.assert_allclose(u.value, v.value, rtol=0, atol=ALONE)
    assert factor.value.shape == (1, 2)
    np.testing.assert_allclose(factor.value, [[pair.value, 0.5 * u.value[0]]], atol=ALONE)
    grad = np.array([1.0, -2.0])
    out, expected = solution.vjp({u: grad}), other.vjp({v: grad})
    np.testing.assert_allclose(out[u], expected[v], atol=1e-8)
    np.testing.assert_allclose(out[factor], [[expected[pair], 0.5 * expected[v][0]]], atol=1e-8)


@pytest.mark.parametrize("per_instance", [False, True])
def test_scores_of_a_batch(per_instance):
    rng = np.random.default_rng(2)
    eta, scores = rng.normal(size=(3, 2)), rng.normal(size=(3, 1, 2))
    given = scores if per_instance else scores[0]
    fg, u, factor = graph(lambda u: Both(u, given), eta)
    fg.solve()
    assert factor.value.shape == (3, 1, 2)
    for row in range(3):
        one, v, alone = graph(
            lambda u, row=row: Both(u, scores[row if per_instance else 0]), eta[row]
        )
        one.solve()
        np.testing.assert_array_equal(u.value[row], v.value)
        np.testing.assert_array_equal(factor.value[row], alone.value)


class Says(fm.Factor):
    """Returns what it is told to."""

    def __init__(self, u, answer, scores=None):
        super().__init__(u, scores)
        self.answer = answer

    def map(self, eta_u, eta_v):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((np.ones(2), []), r"assignment of 2 variables, expected 3, in the shape \(3,\)"),
        ((np.array([0.5, 0, 0]), []), "returned 0.5 in the assignment, which must be 0 or 1"),
        ((np.array([np.nan, 0, 0]), []), "returned nan in the assignment"),
        ((np.array([2, 0, 0]), []), "returned 2 in the assignment"),
        ((np.zeros(3), [1.0]), r"returned 1 features, expected 0, .* return \[\]"),
        ((np.zeros(3), None), r"None for the features, expected 0, .* return \[\]"),
        (np.zeros(3), r"map must return \(m, n\).*got ndarray"),
        (7, r"map must return \(m, n\).*got int"),
        ((np.array([0, 0, 1]), []), "switched on a variable that is masked"),
    ],
)
def test_wrong_answers_are_reported_by_name(answer, message):
    mask = np.array([True, True, False])
    fg, _, _ = graph(lambda u: Says(u, answer), np.zeros(3), mask)
    with pytest.raises(fm.GraphError, match=f"Says over u: .*{message}") as error:
        fg.solve()
    assert isinstance(error.value, fm.ShapeError) == ("expected" in message)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([1.0], "1 features, expected 2, one for each score"),
        (None, "None for the features, expected 2, one for each score"),
        ([1.0, np.inf], "a feature that is not finite"),
    ],
)
def test_wrong_features_are_reported_by_name(features, message):
    fg, _, _ = graph(lambda u: Says(u, (np.zeros(3), features), np.zeros(2)), np.zeros(3))
    with pytest.raises(fm.GraphError, match=f"Says over u: .*{message}"):
        fg.solve()


@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=["one", "batch"])
def test_a_batch_without_features_is_reported_by_name(shape):
    class Batch(fm.Factor):
        def map_batch(self, eta_u, eta_v):
            return np.zeros(eta_u.shape), None

    fg, _, _ = graph(lambda u: Batch(u, np.zeros(1)), np.zeros(shape))
    with pytest.raises(fm.ShapeError, match="Batch over u: map_batch must return one structure"):
        fg.solve()


def test_words_are_no_structure():
    fg, _, _ = graph(lambda u: Says(u, (["a", "b", "c"], [])), np.zeros(3))
    with pytest.raises(ValueError):
        fg.solve()


def test_lists_tuples_and_booleans_are_fine():
    for answer in (([True, False, True], ()), [(1, 0, 1), []], (np.array([1, 0, 1]), [])):
        fg, u, _ = graph(lambda u, answer=answer: Says(u, answer), np.zeros(3))
        fg.solve()
        np.testing.assert_array_equal(u.value, [1, 0, 1])


def test_a_class_is_not_kept():
    def solve_once():
        class Local(TwoOf):
            pass

        fg, _, _ = graph(Local, np.array([0.3, 0.1, 0.2]))
        fg.solve()
        return weakref.ref(Local)

    found = [solve_once() for _ in range(3)]
    gc.collect()
    assert [ref() for ref in found] == [None] * 3


def test_no_oracle():
    u = fm.FactorGraph().variable(3)
    with pytest.raises(fm.GraphError, match=r"Factor over u: it has no oracle. Define map"):
        fm.Factor(u)


# Errors that the oracle raises --------------------------------------------------------------------


class Mistake(Exception):
    """Of the user's own."""


class Raises(TwoOf):
    """Fails where the first score is 13."""

    error: BaseException

    def map(self, eta_u, eta_v):
        if eta_u[0] == 13:
            raise self.error
        return super().map(eta_u, eta_v)


def raising(error, scores):
    fg, u, factor = graph(Raises, scores)
    factor.error = error
    return fg, u


@pytest.mark.parametrize(
    "error", [Mistake("mine"), KeyError("key"), KeyboardInterrupt(), SystemExit(3)]
)
@pytest.mark.parametrize("batch", [None, 1, 8, 50])
@pytest.mark.parametrize("threads", [1, 2])
def test_errors_reach_the_caller_unchanged(error, batch, threads):
    before = fm.get_num_threads()
    fm.set_num_threads(threads)
    try:
        scores = np.random.default_rng(3).normal(size=(5,) if batch is None else (batch, 5))
        bad = scores.copy()
        bad[..., 0] = 13
        with pytest.raises(type(error)) as caught:
            raising(error, bad)[0].solve()
        assert caught.value is error
        if batch is not None and batch > 1:  # in one instance alone
            bad[1:, 0] = 0
            with pytest.raises(type(error)) as caught:
                raising(error, bad)[0].solve()
            assert caught.value is error
        fg, u = raising(error, scores)  # as if nothing had happened
        fg.solve()
        np.testing.assert_allclose(u.value.sum(-1), 2, atol=1e-12)
    finally:
        fm.set_num_threads(before)


def test_errors_have_the_line_of_the_oracle():
    with pytest.raises(Mistake) as caught:
        raising(Mistake("here"), np.full(3, 13.0))[0].solve()
    names = [entry.name for entry in caught.traceback]
    assert names[-1] == "map"


def test_an_oracle_may_solve_a_graph():
    """A solve inside a solve, on another thread too."""

    class ByMatching(fm.Factor):
        def map(self, eta_u, eta_v):
            fg = fm.FactorGraph()
            u = fg.variable_from(np.where(np.isfinite(eta_u), 1e6 * eta_u, -np.inf))
            factor = fg.add(fm.Matching(u))
            fg.solve()
            return factor.structures[0], []

    rng = np.random.default_rng(4)
    scores = rng.normal(size=(6, 3, 4))
    fg = fm.FactorGraph(batch_dims=1)
    u, v = fg.variable_from(scores), fg.variable_from(scores)
    fg.add(ByMatching(u))
    fg.add(fm.Matching(v))
    fg.solve()
    np.testing.assert_allclose(u.value, v.value, rtol=0, atol=1e-8)


def test_two_threads_of_the_caller():
    """Each solves a graph of its own with oracles in Python."""
    rng = np.random.default_rng(5)
    scores = rng.normal(size=(8, 20, 6))
    results = [None] * 8

    def work(i):
        fg, u, _ = graph(TwoOf, scores[i])
        for _ in range(5):
            fg.solve()
        results[i] = u.value

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(8):
        fg, u, _ = graph(TwoOf, scores[i])
        fg.solve()
        np.testing.assert_array_equal(results[i], u.value)


# Many instances at once ---------------------------------------------------------------------------


def test_map_batch_sees_several_instances():
    rng = np.random.default_rng(6)
    scores, grad = rng.normal(size=(2, 12, 6))
    fg, u, factor = graph(TwoOfBatch, scores)
    solution = fg.solve()
    assert max(factor.sizes) > 1 and factor.sizes[0] == 12
    single, v, _ = graph(TwoOf, scores)
    other = single.solve()
    np.testing.assert_array_equal(u.value, v.value)
    np.testing.assert_array_equal(solution.vjp({u: grad})[u], other.vjp({v: grad})[v])


def test_map_batch_of_one_instance():
    scores = np.random.default_rng(7).normal(size=6)
    fg, u, factor = graph(TwoOfBatch, scores)
    fg.solve()
    assert set(factor.sizes) == {1}
    single, v, _ = graph(TwoOf, scores)
    single.solve()
    np.testing.assert_array_equal(u.value, v.value)


def test_map_batch_with_other_factors_masks_and_parameters():
    """Per-instance parameters of the others reach the right instance; more than 256 instances."""
    rng = np.random.default_rng(8)
    for batch in (5, 300):
        scores = rng.normal(size=(batch, 6))
        mask = rng.random((batch, 6)) < 0.9
        mask[:, :3] = True
        budgets = rng.integers(1, 3, batch)
        answers = []
        for kind in (TwoOfBatch, TwoOf):
            fg, u, _ = graph(kind, scores, mask)
            fg.add(fm.Budget(u[:3], budgets))
            fg.add(fm.Imply(u[1:3]))
            solution = fg.solve()
            assert solution.converged.all()
            answers.append((u.value, solution.vjp({u: scores})[u]))
        np.testing.assert_allclose(answers[0], answers[1], rtol=0, atol=1e-12)


class PairBatch(fm.Factor):
    """Exactly one of two, with a score of its own for the first."""

    def map_batch(self, eta_u, eta_v):
        first = eta_u[:, 0] + eta_v[:, 0] >= eta_u[:, 1]
        return np.stack([first, ~first], 1), first[:, None]


def test_map_batch_with_scores_of_its_own():
    rng = np.random.default_rng(9)
    eta, scores = rng.normal(size=(4, 2)), rng.normal(size=(4, 1))
    fg, u, factor = graph(lambda u: PairBatch(u, scores), eta)
    solution = fg.solve()
    xor, v, _ = graph(fm.Xor, np.stack([eta[:, 0] + scores[:, 0], eta[:, 1]], 1))
    other = xor.solve()
    np.testing.assert_allclose(u.value, v.value, rtol=0, atol=ALONE)
    np.testing.assert_allclose(factor.value, v.value[:, :1], rtol=0, atol=ALONE)
    grad = rng.normal(size=(4, 2))
    out, expected = solution.vjp({u: grad}), other.vjp({v: grad})[v]
    np.testing.assert_allclose(out[u], expected, atol=1e-10)
    np.testing.assert_allclose(out[factor], expected[:, :1], atol=1e-10)


class BatchRaises(TwoOfBatch):
    def map_batch(self, eta_u, eta_v):
        if (eta_u[:, 0] == 13).any():
            raise Mistake("in a batch")
        return super().map_batch(eta_u, eta_v)


def test_errors_of_map_batch():
    scores = np.random.default_rng(10).normal(size=(6, 5))
    scores[3, 0] = 13
    with pytest.raises(Mistake, match="in a batch"):
        graph(BatchRaises, scores)[0].solve()
    fg, u, _ = graph(BatchRaises, np.zeros((6, 5)))
    fg.solve()
    np.testing.assert_allclose(u.value, 0.4, atol=1e-12)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((np.zeros((2, 3)), []), "one structure for each of 4 instances"),
        ((np.full((4, 3), 0.5), []), "must be 0 or 1"),
        (np.zeros((4, 3)), r"map_batch must return \(m, n\)"),
        ((0, 0), "one structure for each of 4 instances"),
    ],
)
def test_wrong_answers_of_map_batch(answer, message):
    class Wrong(fm.Factor):
        def map_batch(self, eta_u, eta_v):
            return answer

    fg, _, _ = graph(Wrong, np.zeros((4, 3)))
    with pytest.raises(fm.GraphError, match=f"Wrong over u: .*{message}"):
        fg.solve()


def test_map_batch_finds_no_structure():
    class Nothing(fm.Factor):
        def map_batch(self, eta_u, eta_v):
            return fm.NO_STRUCTURE

    class Sometimes(fm.Factor):
        def map_batch(self, eta_u, eta_v):
            return [fm.NO_STRUCTURE if e[0] < -5 else np.ones(3) for e in eta_u], []

    fg, u, _ = graph(Nothing, np.zeros((4, 3)))
    assert all(s is fm.Status.INFEASIBLE for s in fg.solve(on_failure="ignore").status)
    assert np.isnan(u.value).all()
    fg, u, _ = graph(Sometimes, [[0.0, 1, 2], [-9, 0, 0], [1, 2, 3]])
    solution = fg.solve(on_failure="ignore")
    assert solution.converged.tolist() == [True, False, True]
    assert solution.conflict(1) == ["Sometimes over u"]
    assert Nothing(u).map(np.zeros(3)) is fm.NO_STRUCTURE
    assert Sometimes(u).map(np.array([-9.0, 0, 0])) is fm.NO_STRUCTURE


def test_none_is_a_forgotten_return():
    class Map(fm.Factor):
        def map(self, eta_u, eta_v):
            m = np.zeros(3)  # noqa: F841

    class Batch(fm.Factor):
        def map_batch(self, eta_u, eta_v):
            pass

    class Some(fm.Factor):
        def map_batch(self, eta_u, eta_v):
            return [np.zeros(3), None], []

    class Only(fm.Factor):
        def map(self, eta_u, eta_v):
            return None, []

    cases = [(Map, "map returned None: is its `return` missing"), (Only, "map returned None for a")]
    cases += [(Batch, "map_batch returned None: is its"), (Some, "map_batch returned None for a")]
    for kind, message in cases:
        fg, _, _ = graph(kind, np.zeros((2, 3)))
        with pytest.raises(fm.GraphError, match=f"{kind.__name__} over u: {message}.*NO_STRUCTURE"):
            fg.solve()


def test_no_structure_is_one_object():
    assert repr(fm.NO_STRUCTURE) == "factormax.NO_STRUCTURE"
    assert pickle.loads(pickle.dumps(fm.NO_STRUCTURE)) is fm.NO_STRUCTURE
    assert copy.deepcopy(fm.NO_STRUCTURE) is fm.NO_STRUCTURE


class CheapPath(fm.Factor):
    """A path through a complete graph from the first to the last node: u is (nodes, nodes).

    The score of an edge is minus its cost, which Dijkstra's algorithm needs not to be negative.
    """

    def map(self, eta_u, eta_v):
        cost = np.where(eta_u == -np.inf, np.inf, -eta_u)
        if (cost < -1e-3).any():
            raise ValueError("a negative cost")
        cost, nodes = np.maximum(cost, 0), len(cost)
        distance, before = np.full(nodes, np.inf), np.zeros(nodes, dtype=int)
        distance[0], left = 0, set(range(nodes))
        while left:
            near = min(left, key=distance.__getitem__)
            left.remove(near)
            for other in left:
                if distance[near] + cost[near, other] < distance[other]:
                    distance[other], before[other] = distance[near] + cost[near, other], near
        if distance[-1] == np.inf:
            return fm.NO_STRUCTURE
        path, node = np.zeros(eta_u.shape), nodes - 1
        while node:
            path[before[node], node] = 1
            node = before[node]
        return path, []


class CheckedPath(CheapPath):
    def features_of(self, m):
        node, steps = 0, 0
        while node != len(m) - 1 and m[node].sum() == 1 and steps <= len(m):
            node, steps = int(np.argmax(m[node])), steps + 1
        return [] if node == len(m) - 1 and steps == m.sum() else fm.NO_STRUCTURE


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("kind", ["sparsemap", "perceptron", "hinge"])
def test_losses_of_an_oracle_with_a_domain(library, kind):
    scores = -1 - np.random.default_rng(0).random((2, 4, 4))
    if library == "torch":
        scores = pytest.importorskip("torch").tensor(scores, requires_grad=True)
    target = np.zeros((2, 4, 4))
    target[:, 0, 3] = 1

    def loss(kind_of_factor, target):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(kind_of_factor(u))
        return fg.loss({u: target}, kind, cost=0.5 if kind == "hinge" else None)

    with pytest.raises(ValueError, match="a negative cost"):
        loss(CheapPath, target)
    assert (loss(CheckedPath, target) >= 0).all()
    target[1, 1, 2] = 1
    with pytest.raises(fm.GraphError, match=r"instance \(1,\) breaks CheckedPath over u"):
        loss(CheckedPath, target)


def test_decoding_an_oracle_with_a_domain():
    scores = -1 - np.random.default_rng(0).random((4, 4))
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    path = fg.add(CheckedPath(u))
    fg.add(fm.Budget(u[0, 3:], 0))
    assert fg.decode().optimal
    assert path.features_of(u.value) == [] and u.value[0, 3] == 0


@pytest.mark.parametrize("answer", [None, True, False])
def test_features_of_that_returns_no_features(answer):
    class Odd(TwoOf):
        def features_of(self, m):
            return answer

    fg, u, _ = graph(Odd, np.zeros(3))
    with pytest.raises(fm.GraphError, match=f"Odd over u: features_of returned {answer}"):
        fg.loss({u: [1, 1, 0]})


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("base", [TwoOf, TwoOfBatch])
@pytest.mark.parametrize("query", ["solve", "solve_map", "decode", "loss"])
def test_the_grad_mode_is_that_of_the_call(enabled, library, base, query):
    torch = pytest.importorskip("torch")
    seen = set()

    class Looks(base):
        def map(self, eta_u, eta_v):
            seen.add(torch.is_grad_enabled())
            return super().map(eta_u, eta_v)

        if base is TwoOfBatch:

            def map_batch(self, eta_u, eta_v):
                seen.add(torch.is_grad_enabled())
                return super().map_batch(eta_u, eta_v)

    scores = np.random.default_rng(0).normal(size=(16, 5))
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(torch.tensor(scores, requires_grad=True) if library == "torch" else scores)
    fg.add(Looks(u))
    fg.add(fm.Budget(u[:3], 2))
    before = fm.get_num_threads()
    fm.set_num_threads(4)
    try:
        with torch.set_grad_enabled(enabled):
            target = [1, 1, 0, 0, 0]
            _ = fg.loss({u: target}) if query == "loss" else getattr(fg, query)()
    finally:
        fm.set_num_threads(before)
    assert seen == {enabled}


# C functions --------------------------------------------------------------------------------------

SIGNATURE = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_double),
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_double),
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_double),
    ctypes.POINTER(ctypes.c_double),
    ctypes.c_void_p,
    ctypes.c_int64,
)


def native(answer):
    """A C function that asks `answer(eta_u, eta_v, m, n, data, instance)`."""

    @SIGNATURE
    def call(eta_u, d, eta_v, s, m, n, data, instance):
        arrays = [
            np.ctypeslib.as_array(p, (k,)) if k else np.zeros(0)
            for p, k in ((eta_u, d), (eta_v, s), (m, d), (n, s))
        ]
        return answer(*arrays, data, instance)

    return call


@native
def native_pair(eta_u, eta_v, m, n, data, instance):
    """Exactly one, with a score of its own for the first."""
    assert not m.any() and not n.any()
    scores = eta_u.copy()
    scores[: len(eta_v)] += eta_v
    best = int(np.argmax(scores))
    m[best] = 1
    if best < len(eta_v):
        n[best] = 1
    return 0


@pytest.mark.parametrize(
    "function",
    [native_pair, ctypes.cast(native_pair, ctypes.c_void_p).value],
    ids=["pointer", "address"],
)
@pytest.mark.parametrize("batch", [(), (6,), (2, 3)])
def test_native_map(function, batch):
    rng = np.random.default_rng(11)
    eta, scores = rng.normal(size=(*batch, 4)), rng.normal(size=(*batch, 2))
    fg = fm.FactorGraph(batch_dims=len(batch))
    u = fg.variable_from(eta)
    factor = fg.add(fm.Factor(u, scores, native_map=function))
    total = eta.copy()
    total[..., :2] += scores
    v = fg.variable_from(total)
    fg.add(fm.Xor(v, axis=-1))
    solution = fg.solve()
    np.testing.assert_allclose(u.value, v.value, rtol=0, atol=ALONE)
    np.testing.assert_allclose(factor.value, v.value[..., :2], rtol=0, atol=ALONE)
    grad = rng.normal(size=eta.shape)
    out = solution.vjp({u: grad, v: grad})
    np.testing.assert_allclose(out[u], out[v], atol=1e-10)
    np.testing.assert_allclose(out[factor], out[v][..., :2], atol=1e-10)


def test_native_data_and_the_number_of_the_instance():
    table = np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]])
    data = ctypes.c_void_p(table.ctypes.data)

    @native
    def fixed(eta_u, eta_v, m, n, data, instance):
        row = ctypes.cast(data, ctypes.POINTER(ctypes.c_double))
        m[:] = [row[3 * instance + j] for j in range(3)]
        return 0

    fg, u, _ = graph(
        lambda u: fm.Factor(u, native_map=fixed, native_data=data.value), np.zeros((3, 3))
    )
    fg.solve()
    np.testing.assert_array_equal(u.value, table)


def test_the_number_of_the_instance_where_float32_leaves_it_to_double():
    rng = np.random.default_rng(0)
    forbidden = np.arange(8) % 4

    @native
    def best(eta_u, eta_v, m, n, data, instance):
        eta_u = np.where(np.arange(4) == forbidden[instance], -np.inf, eta_u)
        m[np.argmax(eta_u)] = 1
        return 0

    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from((10 * rng.normal(size=(8, 300))).astype(np.float32))
    pairs = rng.integers(300, size=(1000, 2))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    scores = (10 * rng.normal(size=(8, len(pairs)))).astype(np.float32)
    fg.add(fm.Pair(u[pairs[:, 0]], u[pairs[:, 1]], scores))
    fg.add(fm.Factor(u[:4], native_map=best))
    fg.add(fm.Budget(u, 100))
    solution = fg.solve(on_failure="raise")
    assert (solution.primal_residual < 1e-9).sum() >= 4  # more than float32 has
    np.testing.assert_allclose(u.value[:, :4].sum(1), 1, atol=1e-6)
    assert not u.value[np.arange(8), forbidden].any()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda m, n: -1, "native_map reported a failure"),
        (lambda m, n: m.__setitem__(0, 0.5), "not all 0 and 1"),
        (lambda m, n: m.__setitem__(2, 1.0), "switched on a variable that is masked"),
        (lambda m, n: n.__setitem__(0, np.nan), "a feature that is not finite"),
    ],
)
@pytest.mark.parametrize("batch", [1, 5])
def test_wrong_answers_of_native_map(what, message, batch):
    function = native(lambda eta_u, eta_v, m, n, data, instance: what(m, n) or 0)
    fg, _, _ = graph(
        lambda u: fm.Factor(u, np.zeros(1), native_map=function),
        np.zeros((batch, 3)),
        np.array([True, True, False]),
    )
    with pytest.raises(fm.GraphError, match=f"Factor over u: .*{message}"):
        fg.solve()


def test_native_map_finds_no_structure():
    function = native(lambda *arguments: 1)
    fg, u, _ = graph(lambda u: fm.Factor(u, native_map=function), np.zeros(3))
    assert fg.solve(on_failure="ignore").status is fm.Status.INFEASIBLE
    assert np.isnan(u.value).all()


@pytest.mark.parametrize("bad", ["name", 3.5, 0, True, object()])
def test_native_map_that_is_no_function(bad):
    u = fm.FactorGraph().variable(3)
    with pytest.raises(fm.GraphError, match=r"Factor over u: native_map must be a numba.cfunc"):
        fm.Factor(u, native_map=bad)


def test_numba():
    numba = pytest.importorskip("numba")
    types = numba.types
    pointer = types.CPointer(types.float64)
    signature = types.int32(
        pointer, types.int64, pointer, types.int64, pointer, pointer, types.voidptr, types.int64
    )

    @numba.cfunc(signature)
    def best(eta_u, d, eta_v, s, m, n, data, instance):
        at = 0
        for j in range(d):
            if eta_u[j] > eta_u[at]:
                at = j
        m[at] = 1.0
        return 0

    scores = np.random.default_rng(12).normal(size=(20, 6))
    fg, u, _ = graph(lambda u: fm.Factor(u, native_map=best), scores)
    xor, v, _ = graph(lambda u: fm.Xor(u), scores)
    fg.solve()
    xor.solve()
    np.testing.assert_allclose(u.value, v.value, rtol=0, atol=ALONE)
