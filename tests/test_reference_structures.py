"""The enumerated structures by their counts and meaning; SparseMAP over them by its conditions."""

import cvxpy as cp
import numpy as np
import pytest

from factormax.reference.active_set import sparsemap, sparsemap_vjp
from factormax.reference.structures import (
    allowed,
    best,
    budget_sequences,
    column_scores,
    matchings,
    sequences,
    tables,
    trees,
)

FACTORS = {
    "sequence": lambda: sequences(3, 3),
    "sequence, all scores": lambda: sequences(3, 2, True, True, True),
    "budget": lambda: budget_sequences(6, True, 3),
    "budget, shared": lambda: budget_sequences(5, False, 2),
    "table": lambda: tables([3, 4]),
    "table of three": lambda: tables([2, 2, 3]),
    "trees": lambda: trees(4),
    "projective": lambda: trees(4, projective=True, single_root=True),
    "matching": lambda: matchings(3, 4),
    "square matching": lambda: matchings(4, 4),
}


@pytest.fixture(params=FACTORS)
def factor(request):
    return FACTORS[request.param]()


# ------------------------------------------------------------------------------------------
# Structures


def test_columns_are_different_structures(factor):
    M, N = factor
    assert M.dtype == N.dtype == np.float64
    assert M.shape[1] == N.shape[1]
    assert set(np.unique(M)) <= {0.0, 1.0}
    assert (N >= 0).all() and (N == N.round()).all()
    assert len(np.unique(M, axis=1).T) == M.shape[1]


def test_sequence_features_count_the_states():
    length, states = 4, 3
    M, N = sequences(length, states, per_step=True, has_initial=True, has_final=True)
    assert M.shape == (12, 81) and N.shape == (3 * 9 + 3 + 3, 81)
    u = M.reshape(length, states, -1)
    assert (u.sum(axis=1) == 1).all()
    transitions, initial, final = np.split(N, [27, 30])
    both = np.einsum("tik,tjk->tijk", u[:-1], u[1:])
    np.testing.assert_array_equal(transitions.reshape(both.shape), both)
    np.testing.assert_array_equal(initial, u[0])
    np.testing.assert_array_equal(final, u[-1])

    shared = sequences(length, states)
    np.testing.assert_array_equal(shared[0], M)
    np.testing.assert_array_equal(shared[1], both.sum(axis=0).reshape(9, -1))


def test_one_step_uses_no_transitions():
    M, N = sequences(1, 3, has_final=True)
    np.testing.assert_array_equal(M, np.eye(3))
    np.testing.assert_array_equal(N[:9], 0)
    np.testing.assert_array_equal(N[9:], np.eye(3))


def test_budget_sequences():
    M, N = budget_sequences(5, True, 2)
    assert M.shape == (5, 1 + 5 + 10) and M.sum(axis=0).max() == 2
    np.testing.assert_array_equal(N, M[:-1] * M[1:])
    np.testing.assert_array_equal(budget_sequences(5, False, 2)[1], [N.sum(axis=0)])
    assert budget_sequences(4, False, 9)[0].shape == (4, 16)
    assert budget_sequences(1, True, 1)[1].shape == (0, 2)


def test_tables():
    M, N = tables([2, 3, 2])
    np.testing.assert_array_equal(N, np.eye(12))
    a, b, c = np.split(M, [2, 5])
    np.testing.assert_array_equal(np.einsum("ik,jk,lk->ijlk", a, b, c).reshape(12, 12), N)


@pytest.mark.parametrize("n, count, single", [(1, 1, 1), (2, 3, 2), (3, 16, 9), (4, 125, 64)])
def test_trees(n, count, single):
    # Cayley's formula, and n of the roots for each of n ** (n - 2) trees
    M, N = trees(n)
    assert M.shape == (n * n, count) and N.shape == (0, count)
    assert (M.reshape(n, n, -1).sum(axis=1) == 1).all()
    M = trees(n, single_root=True)[0]
    assert M.shape[1] == single
    assert (M.reshape(n, n, -1).trace() == 1).all()


@pytest.mark.parametrize("n, count, single", [(1, 1, 1), (2, 3, 2), (3, 12, 7), (4, 55, 30)])
def test_projective_trees(n, count, single):
    def descends(heads, word, ancestor):
        # The root is the ancestor of all.
        seen = [word]
        while heads[seen[-1]] != seen[-1]:
            seen.append(heads[seen[-1]])
        return ancestor in seen or ancestor == -1

    def projective(heads):
        # Every word between the ends of an arc descends from its head.
        for m, h in enumerate(heads):
            h = -1 if h == m else h
            if not all(descends(heads, k, h) for k in range(min(m, h) + 1, max(m, h))):
                return False
        return True

    M = trees(n)[0]
    heads = M.reshape(n, n, -1).argmax(axis=1).T
    kept = M[:, [projective(one) for one in heads]]
    np.testing.assert_array_equal(trees(n, projective=True)[0], kept)
    assert kept.shape[1] == count
    one_root = kept.reshape(n, n, -1).trace() == 1
    np.testing.assert_array_equal(trees(n, True, True)[0], kept[:, one_root])
    assert one_root.sum() == single


def test_matchings():
    M, N = matchings(3, 4)
    assert M.shape == (12, 24) and N.shape == (0, 24)
    u = M.reshape(3, 4, -1)
    assert (u.sum(axis=1) == 1).all() and (u.sum(axis=0) <= 1).all()
    with pytest.raises(ValueError, match="3 rows need at least as many columns, got 2"):
        matchings(3, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sequences(10, 4),
        lambda: budget_sequences(18, True, 1),
        lambda: tables([100, 100, 100]),
        lambda: trees(7),
        lambda: matchings(9, 9),
    ],
)
def test_too_many(make):
    with pytest.raises(ValueError, match="use smaller sizes"):
        make()


def test_best_and_allowed():
    M, N = tables([2, 2])
    assert best(M, N, np.zeros(4), np.zeros(4)) == 0
    assert best(M, N, np.zeros(4), np.array([0, 1, 2, 2.0])) == 2
    assert best(M, N, np.array([0, -np.inf, 0, 0]), np.array([-np.inf, 1, 2, 2.0])) == 1
    mask = np.array([False, True, False, False])
    np.testing.assert_array_equal(allowed(M, mask), [True, True, False, False])
    scores = column_scores(M, N, np.where(mask, -np.inf, 1.0), np.zeros(4))
    np.testing.assert_array_equal(np.isfinite(scores), allowed(M, mask))


# ------------------------------------------------------------------------------------------
# SparseMAP


def instance(M, N, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    x = scale * rng.standard_normal(len(M))
    eta_v = scale * rng.standard_normal(len(N))
    w = rng.choice([0.5, 1.0, 2.0], len(M)) if seed % 2 else None
    return x, eta_v, w


def reduced_scores(M, N, x, eta_v, w, mu):
    w = np.ones(len(M)) if w is None else w
    return M.T @ (x - w * mu) + N.T @ eta_v


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 5.0, 1e3, 1e9])
def test_conditions_of_optimality(factor, scale):
    M, N = factor
    for seed in range(6):
        x, eta_v, w = instance(M, N, seed, scale)
        p, mu, mu_v = sparsemap(M, N, x, eta_v, w)
        assert (p >= 0).all()
        np.testing.assert_allclose(p.sum(), 1, atol=1e-12)
        np.testing.assert_allclose(mu, M @ p, atol=1e-14)
        np.testing.assert_allclose(mu_v, N @ p, atol=1e-14)
        r = reduced_scores(M, N, x, eta_v, w, mu)
        # every structure that is used has the best reduced score
        np.testing.assert_allclose(r[p > 0], r.max(), atol=2e-12 * max(1, scale))
        # and those that are used are affinely independent
        used = np.vstack([M[:, p > 0], np.ones((p > 0).sum())])
        assert np.linalg.matrix_rank(used) == used.shape[1]


def test_against_a_solver(factor):
    M, N = factor
    for seed in range(2):
        x, eta_v, w = instance(M, N, seed)
        p, mu, _ = sparsemap(M, N, x, eta_v, w)
        q = cp.Variable(M.shape[1])
        root = np.ones(len(M)) if w is None else np.sqrt(w)
        c = M.T @ x + N.T @ eta_v
        value = c @ q - 0.5 * cp.sum_squares((root[:, None] * M) @ q)
        problem = cp.Problem(cp.Maximize(value), [q >= 0, cp.sum(q) == 1])
        problem.solve(solver=cp.CLARABEL)
        np.testing.assert_allclose(mu, M @ q.value, atol=1e-5)
        assert c @ p - 0.5 * np.sum((root * mu) ** 2) >= problem.value - 1e-7


def test_variables_without_a_square():
    # Without squares it is MAP, found by exchanges of dependent columns alone.
    M, N = tables([3, 4])
    for seed in range(5):
        x, eta_v, _ = instance(M, N, seed)
        p, _, _ = sparsemap(M, N, x, eta_v, np.zeros(len(M)))
        assert p[best(M, N, x, eta_v)] == pytest.approx(1)
        w = np.repeat([1.0, 0.0], [3, 4])
        p, mu, _ = sparsemap(M, N, x, eta_v, w)
        r = reduced_scores(M, N, x, eta_v, w, mu)
        np.testing.assert_allclose(r[p > 1e-12], r.max(), atol=1e-11)


def test_ties(factor):
    # Several columns reach 0 at once, and several have the best score.
    M, N = factor
    rng = np.random.default_rng(0)
    for _ in range(40):
        x, eta_v = rng.integers(-2, 3, len(M)) / 2, rng.integers(-2, 3, len(N)) / 2
        w = rng.choice([0.0, 0.25, 1 / 3, 0.5], len(M))
        p, mu, _ = sparsemap(M, N, x, eta_v, w)
        r = reduced_scores(M, N, x, eta_v, w, mu)
        np.testing.assert_allclose(r[p > 0], r.max(), atol=1e-11)


def test_all_matchings_tie():
    M, N = matchings(3, 3)
    _, mu, _ = sparsemap(M, N, np.zeros(9), np.zeros(0))
    np.testing.assert_allclose(mu, 1 / 3, atol=1e-12)


def test_forbidden_scores():
    M, N = sequences(3, 3, has_initial=True)
    x, eta_v, _ = instance(M, N, 0)
    x[4] = eta_v[1] = -np.inf
    kept = np.isfinite(column_scores(M, N, x, eta_v))
    assert 0 < kept.sum() < len(kept)
    p, mu, _ = sparsemap(M, N, x, eta_v)
    assert (p[~kept] == 0).all() and mu[4] == 0
    finite = [np.where(np.isfinite(s), s, 0.0) for s in (x, eta_v)]
    np.testing.assert_allclose(sparsemap(M[:, kept], N[:, kept], *finite)[1], mu, atol=1e-12)
    with pytest.raises(ValueError, match="no structure is allowed"):
        sparsemap(M, N, np.full(9, -np.inf), eta_v)


def is_kink(M, N, x, eta_v, w, p, mu, of_p, margin=1e-4):
    """Whether a small change of the scores could change the support or the face."""
    r = reduced_scores(M, N, x, eta_v, w, mu)
    gap = r.max() - r
    if (p[p > 0] < margin).any() or ((gap > 1e-9) & (gap < margin)).any():
        return True
    # Without scores of the factor's own, columns of the face that are not used are combinations
    # of the used ones, and stay so: p may jump between them, mu does not.
    return bool((gap[p == 0] <= 1e-9).any() and (of_p or len(N) > 0))


def check_gradient(M, N, seed, with_p, step=1e-6):
    """True if random gradients match finite differences; False if the point is a kink."""
    rng = np.random.default_rng(100 + seed)
    x, eta_v, w = instance(M, N, seed)
    p, mu, _ = sparsemap(M, N, x, eta_v, w)
    if is_kink(M, N, x, eta_v, w, p, mu, with_p):
        return False
    grad_mu, grad_mu_v = rng.standard_normal(len(M)), rng.standard_normal(len(N))
    grad_p = rng.standard_normal(M.shape[1]) if with_p else None

    def loss(dx, dv):
        q, at, at_v = sparsemap(M, N, x + dx, eta_v + dv, w)
        return at @ grad_mu + at_v @ grad_mu_v + (q @ grad_p if with_p else 0.0)

    grad_x, grad_eta_v = sparsemap_vjp(M, N, p, x, eta_v, w, grad_mu, grad_mu_v, grad_p)
    for _ in range(4):
        dx, dv = rng.standard_normal(len(M)), rng.standard_normal(len(N))
        slope = (loss(step * dx, step * dv) - loss(-step * dx, -step * dv)) / (2 * step)
        assert slope == pytest.approx(grad_x @ dx + grad_eta_v @ dv, abs=1e-7)
    return True


@pytest.mark.parametrize("with_p", [False, True])
def test_gradients(factor, with_p):
    assert sum(check_gradient(*factor, seed, with_p) for seed in range(16)) >= 3


def test_gradient_at_a_vertex_is_zero():
    M, N = tables([2, 2])
    x, eta_v = np.array([9.0, 0, 9, 0]), np.zeros(4)
    p, _, _ = sparsemap(M, N, x, eta_v)
    for grad in sparsemap_vjp(M, N, p, x, eta_v, None, np.arange(4.0), np.arange(4.0)):
        np.testing.assert_array_equal(grad, 0)


def test_gradient_reaches_the_whole_face():
    # All permutations tie, more than are used: still mu moves in every direction of their hull.
    M, N = matchings(3, 3)
    x = np.zeros(9)
    p, _, _ = sparsemap(M, N, x, np.zeros(0))
    d = np.random.default_rng(0).standard_normal(9)
    grad_x, _ = sparsemap_vjp(M, N, p, x, np.zeros(0), None, d, np.zeros(0))
    u = d.reshape(3, 3)
    doubly_centred = u - u.mean(axis=0) - u.mean(axis=1, keepdims=True) + u.mean()
    np.testing.assert_allclose(grad_x.reshape(3, 3), doubly_centred, atol=1e-12)
