"""Trees and matchings by rows, docs/math.md (59)-(61): the same answers as by their structures."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import factormax as fm
from factormax import _engines
from factormax._core import ByRows
from factormax._engines import cpu
from factormax._fronts import numpy as front
from factormax._options import Options
from factormax.reference.structures import trees
from factormax.reference.tree_cuts import violated_set

EXACT = 1e-9  # two ways to the same solution, both to full precision


def tree_graph(eta, *, valency=None, single_root=False, mask=None, logic=False):
    """Of a batch of scores (B, n, n)."""
    n = eta.shape[-1]
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta, mask=mask)
    factor = fg.add(fm.DepTree(u, single_root=single_root))
    if valency is not None and n > 1:
        head, other = np.arange(n), np.arange(n - 1)[:, None]
        fg.add(fm.Budget(u[other + (other >= head), head], valency, axis=0))
    if logic:
        fg.add(fm.Imply([u[0, 1], u[1, 2]]))
        fg.add(fm.Pair(u[2, 3], u[3, 4], 0.7))
    return fg, u, factor


def both(fg, **options):
    """The raw solutions by rows, wherever possible, and by structures, and the task."""
    task = front.start(fg)
    options = Options(on_failure="raise", **options)
    rows = _engines.solve(task.inputs, options)
    listed = _engines.solve(task.inputs, replace(options, list_structures=True))
    return rows, listed, task


def check_gradients(rows, listed, task, rng, tolerance=1e-8):
    grad = rng.normal(size=rows.mu.shape).astype(rows.mu.dtype)
    grad_v = rng.normal(size=rows.mu_v.shape).astype(rows.mu.dtype)
    found = _engines.vjp(task.inputs, rows, grad, grad_v)
    wanted = _engines.vjp(task.inputs, listed, grad, grad_v)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(cpu, "BY_ROWS", ByRows.always)


@pytest.mark.parametrize("valency", [None, 2, 5])
@pytest.mark.parametrize("single_root", [False, True])
@pytest.mark.parametrize("scale", [0.01, 0.3, 1.0])
def test_trees(scale, single_root, valency):
    rng = np.random.default_rng([1, int(100 * scale)])
    for n in (12, 20):
        fg, _, _ = tree_graph(
            scale * rng.normal(size=(3, n, n)), valency=valency, single_root=single_root
        )
        rows, listed, task = both(fg, tol=1e-11)
        np.testing.assert_allclose(rows.mu, listed.mu, rtol=0, atol=EXACT)
        np.testing.assert_allclose(rows.objective, listed.objective, rtol=0, atol=EXACT)
        check_gradients(rows, listed, task, rng)


@pytest.mark.parametrize("n", [12, 40])
def test_dense_trees_go_by_rows(n):
    rng = np.random.default_rng(n)
    fg, _, _ = tree_graph(0.05 * rng.normal(size=(2, n, n)))
    rows, _, _ = both(fg)
    assert (rows.structures.num_cuts >= 0).all()
    assert (rows.oracle_calls == 0).all()


def test_peaked_trees_go_by_structures():
    rng = np.random.default_rng(0)
    fg, _, _ = tree_graph(10 * rng.normal(size=(2, 30, 30)))
    rows, _, _ = both(fg)
    assert (rows.structures.num_cuts < 0).all()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("single_root", [False, True])
def test_lone_trees(single_root, dtype):
    """Of all sizes and densities, with words and arcs left out, and with ties."""
    rng = np.random.default_rng(2)
    exact = EXACT if dtype == np.float64 else 1e-6
    for n, scale in itertools.product((1, 2, 3, 7, 20), (0.0, 0.1, 1.0, 4.0)):
        eta = scale * rng.normal(size=(6, n, n)).astype(dtype)
        eta[3:] = np.round(eta[3:])
        mask = np.ones(eta.shape, dtype=bool)
        if n > 2:
            mask[1] &= (rng.random((n, n)) > 0.3) | np.eye(n, dtype=bool)
            mask[2, 1] = mask[2, :, 1] = False  # a word
            mask[4, 1] = False  # which the others do not know of
        fg, _, _ = tree_graph(eta, mask=mask, single_root=single_root)
        rows, listed, task = both(fg)
        assert (rows.structures.num_cuts >= 0).all()
        np.testing.assert_allclose(rows.mu, listed.mu, rtol=0, atol=exact)
        np.testing.assert_allclose(rows.objective, listed.objective, rtol=0, atol=n * exact)
        # Where nothing ties, the face is one, and so is the derivative on it.
        grad = rng.normal(size=rows.mu.shape).astype(dtype)
        found = _engines.vjp(task.inputs, rows, grad, rows.mu_v)[0]
        wanted = _engines.vjp(task.inputs, listed, grad, listed.mu_v)[0]
        if scale > 0:
            np.testing.assert_allclose(found[:3], wanted[:3], rtol=0, atol=10 * exact)
        alone, _, _ = tree_graph(eta[2:3], mask=mask[2:3], single_root=single_root)
        np.testing.assert_array_equal(both(alone)[0].mu[0], rows.mu[2])


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("absent", [False, True])
def test_lone_trees_without_a_tree(absent):
    """Two words that only have one another, or one that only has a word that is absent."""
    mask = np.ones((1, 5, 5), dtype=bool)
    mask[0, :2] = False
    mask[0, [0, 1], [1, 0]] = True
    if absent:
        mask[0, 0] = mask[0, :, 0] = False
        mask[0, 1, 0] = True
    fg, u, _ = tree_graph(np.zeros((1, 5, 5)), mask=mask)
    solution = fg.solve(on_failure="ignore")
    assert solution.status[0] == fm.Status.INFEASIBLE
    assert np.isnan(u.value[mask]).all()


@pytest.mark.usefixtures("always")
def test_lone_trees_with_large_scores():
    """Too large for the multipliers of sets alone: the other rows, or structures, take over."""
    rng = np.random.default_rng(4)
    fg, _, _ = tree_graph(1e7 * rng.normal(size=(2, 6, 6)))
    rows, listed, _ = both(fg)
    np.testing.assert_allclose(rows.mu, listed.mu, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_trees_with_logic_and_pairs(scale):
    rng = np.random.default_rng(3)
    for n in (6, 12):
        fg, _, _ = tree_graph(scale * rng.normal(size=(4, n, n)), valency=2, logic=True)
        rows, listed, task = both(fg, tol=1e-9)
        assert (rows.structures.num_cuts >= 0).any()
        np.testing.assert_allclose(rows.mu, listed.mu, rtol=0, atol=1e-7)
        np.testing.assert_allclose(rows.mu_v, listed.mu_v, rtol=0, atol=1e-7)
        check_gradients(rows, listed, task, rng, 1e-6)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("seed", range(20))
def test_all_trees_of_four_words(seed):
    """Where every set of words may bind, and many are needed."""
    rng = np.random.default_rng(seed)
    M, _ = trees(4)
    for scale, single_root in itertools.product((0.3, 2.0, 20.0), (False, True)):
        eta = scale * rng.normal(size=(8, 4, 4))
        fg, u, _ = tree_graph(eta, single_root=single_root)
        rows, listed, task = both(fg)
        np.testing.assert_allclose(rows.mu, listed.mu, rtol=0, atol=EXACT)
        check_gradients(rows, listed, task, rng)
        for mu in rows.mu.reshape(-1, 4, 4):
            assert violated_set(mu) is None
            assert u.shape == (4, 4) and M.shape[0] == 16


@pytest.mark.parametrize("scale", [0.01, 0.5, 2.0])
@pytest.mark.parametrize("shape", [(12, 12), (10, 25), (1, 30)])
def test_matchings(shape, scale):
    rng = np.random.default_rng(7)
    for budget in (None, 4):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scale * rng.normal(size=(3, *shape)))
        fg.add(fm.Matching(u))
        if budget is not None:
            fg.add(fm.Budget(u[:, :3], budget))
        rows, listed, task = both(fg)
        np.testing.assert_allclose(rows.mu, listed.mu, rtol=0, atol=EXACT)
        check_gradients(rows, listed, task, rng)


def test_masks():
    """Absent words, forbidden arcs, and absent words that are not masked as heads."""
    rng = np.random.default_rng(5)
    n, lengths = 20, np.array([20, 13, 16, 1])
    there = np.arange(n) < lengths[:, None]
    words = there[:, :, None] & there[:, None, :]
    modifiers = np.broadcast_to(there[:, :, None], words.shape)
    some = words & ((rng.random(words.shape) > 0.3) | np.eye(n, dtype=bool))
    eta = 0.1 * rng.normal(size=words.shape)
    for mask in (words, modifiers, some):
        fg, _, _ = tree_graph(eta, mask=mask, valency=4)
        rows, listed, task = both(fg)
        np.testing.assert_allclose(rows.mu, listed.mu, rtol=0, atol=EXACT)
        assert (rows.mu.reshape(words.shape)[~words] == 0).all()
        check_gradients(rows, listed, task, rng)
        for i, size in enumerate(lengths):
            alone, _, _ = tree_graph(
                eta[i : i + 1, :size, :size], mask=mask[i : i + 1, :size, :size], valency=4
            )
            mu = both(alone)[0].mu.reshape(size, size)
            here = rows.mu[i].reshape(n, n)[:size, :size]
            np.testing.assert_allclose(here, mu, rtol=0, atol=1e-13)


def test_two_trees_and_a_matching():
    rng = np.random.default_rng(8)
    fg = fm.FactorGraph(batch_dims=1)
    a = fg.variable_from(0.1 * rng.normal(size=(3, 12, 12)))
    b = fg.variable_from(0.1 * rng.normal(size=(3, 15, 15)))
    c = fg.variable_from(0.1 * rng.normal(size=(3, 8, 9)))
    fg.add(fm.DepTree(a))
    fg.add(fm.DepTree(b, single_root=True))
    fg.add(fm.Matching(c))
    fg.add(fm.AtMostOne([a[0, :4], b[0, :4], c[0, :2]]))
    rows, listed, task = both(fg)
    assert (rows.structures.num_cuts >= 0).all()
    np.testing.assert_allclose(rows.mu, listed.mu, rtol=0, atol=EXACT)
    check_gradients(rows, listed, task, rng)


def test_infeasible_graphs_are_told():
    eta = np.zeros((1, 15, 15))
    fg, u, _ = tree_graph(eta, valency=0, single_root=True)  # one word at the root, no other arc
    solution = fg.solve(on_failure="ignore")
    assert solution.status[0] == fm.Status.INFEASIBLE
    assert np.isnan(u.value).all()


def test_float32():
    rng = np.random.default_rng(9)
    eta = (0.2 * rng.normal(size=(4, 30, 30))).astype(np.float32)
    fg, _, _ = tree_graph(eta, valency=4)
    rows, listed, task = both(fg)
    assert (rows.structures.num_cuts >= 0).all()
    np.testing.assert_allclose(rows.mu, listed.mu, rtol=0, atol=1e-5)
    check_gradients(rows, listed, task, rng, 1e-3)


def test_structures_when_asked_for():
    """They average to the values, and their probabilities differentiate."""
    rng = np.random.default_rng(10)
    eta = 0.05 * rng.normal(size=(2, 12, 12))
    fg, u, factor = tree_graph(eta)
    solution = fg.solve()
    assert (solution.oracle_calls == 0).all()
    scores = eta.copy()
    eta[:] = 0  # what became of the caller's array since does not matter
    mean = np.einsum("bk,bkmh->bmh", factor.probs, factor.structures)
    np.testing.assert_allclose(mean, u.value, rtol=0, atol=EXACT)
    grad = rng.normal(size=factor.probs.shape)
    found = solution.vjp(probs={factor: grad})[u]
    again, v, same = tree_graph(scores)
    wanted = again.solve(max_inner_iter=99_999).vjp(probs={same: grad})[v]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-8)


@pytest.mark.usefixtures("always")
def test_structures_in_torch():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    eta = torch.randn(2, 8, 8, dtype=torch.float64).requires_grad_()
    fg, u, factor = tree_graph(eta)
    solution = fg.solve()
    assert (solution.oracle_calls == 0).all()
    weight = torch.randn(8, 8, dtype=torch.float64)
    value = (u.value * weight).sum()
    of_value = torch.autograd.grad(value, eta, retain_graph=True)[0]
    mean = (factor.probs[..., None, None] * factor.structures).sum(dim=1)
    of_mean = torch.autograd.grad((mean * weight).sum(), eta)[0]
    torch.testing.assert_close(of_mean, of_value, rtol=0, atol=1e-8)
    assert not factor.structures.requires_grad


def test_a_limit_of_oracle_calls_asks_for_the_oracle():
    fg, _, factor = tree_graph(np.zeros((1, 20, 20)))
    solution = fg.solve(max_inner_iter=5, on_failure="ignore")
    assert solution.oracle_calls[0] == 6
    assert factor.num_structures[0] <= 6


def test_warm_start():
    rng = np.random.default_rng(11)
    eta = 0.3 * rng.normal(size=(2, 20, 20))
    fg, u, _ = tree_graph(eta, valency=2)
    first = fg.solve()
    value = u.value
    again, v, _ = tree_graph(eta, valency=2)
    again.solve(warm_start=first)
    np.testing.assert_allclose(v.value, value, rtol=0, atol=EXACT)


def test_violated_sets():
    rng = np.random.default_rng(12)
    M, _ = trees(4)
    for _ in range(50):
        mu = (M @ rng.dirichlet(np.full(M.shape[1], 0.3))).reshape(4, 4)
        assert violated_set(mu) is None
        cycle = np.zeros((4, 4))
        cycle[[0, 1, 2, 3], [1, 0, 2, 2]] = 1
        found = violated_set(0.5 * mu + 0.5 * cycle)
        inflow = lambda s, x=0.5 * mu + 0.5 * cycle: (  # noqa: E731
            x[np.ix_(s, ~s)].sum() + np.diag(x)[s].sum()
        )
        if found is not None:
            assert inflow(found) < 1
        else:
            sets = (np.array(s) for s in itertools.product([False, True], repeat=4) if any(s))
            assert all(inflow(s) >= 1 - 1e-8 for s in sets)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tied_rows_do_not_go_round_in_circles(dtype):
    """Sparsemax drops entries until none falls out; rounding may bring one back."""
    rng = np.random.default_rng(13)
    for n in range(3, 12):
        eta = rng.integers(0, 3, size=(200, n, n)) / rng.integers(2, 40, size=(200, 1, 1))
        eta = eta + 3 * rng.normal(size=(200, 1, 1))
        ties = eta[:, :, :1] + np.where(rng.random(eta.shape) < 0.5, 0, 1 / n)
        eta[::2] = ties[::2]
        fg = fm.FactorGraph(batch_dims=1)
        fg.add(fm.Matching(fg.variable_from(eta.astype(dtype))))
        assert (fg.solve().status == fm.Status.CONVERGED).all()


@pytest.mark.parametrize("by_rows", [ByRows.never, ByRows.always])
def test_factors_over_arcs_from_absent_words_stay(monkeypatch, by_rows):
    """Arcs to a word that is absent are off, but were not masked: factors over them stay."""
    monkeypatch.setattr(cpu, "BY_ROWS", by_rows)
    mask = np.ones((3, 3), bool)
    mask[2] = False  # word 2 is absent; u[0, 2] and u[1, 2] are not masked
    scores = 0.1 * np.arange(9.0).reshape(3, 3)

    def solved(*factors):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores, mask=mask)
        fg.add(fm.DepTree(u))
        for factor in factors:
            fg.add(factor(u))
        return u, fg.solve(on_failure="ignore")

    u, solution = solved()
    assert solution.converged and not u.value[:, 2].any()
    assert solved(lambda u: fm.Or(u[:2, 2]))[1].status is fm.Status.INFEASIBLE
    fg = fm.FactorGraph()
    u = fg.variable_from(scores, mask=mask)
    fg.add(fm.DepTree(u))
    pair = fg.add(fm.Pair(~u[0, 2], ~u[1, 2], 2.0))
    fg.solve()
    assert pair.value == 1


@pytest.mark.parametrize("seed", [18, 441, 541, 1045, 1667, 2706])
def test_rows_help_where_hardly_any_point_is_left(seed):
    """Equations through one matching: their multipliers are so long that descent creeps along."""
    rng = np.random.default_rng(seed)
    shape = (5, 8)
    fg = fm.FactorGraph()
    u = fg.variable_from(np.round(2 * rng.normal(size=shape)) / 2)
    matching = np.zeros(shape)
    matching[np.arange(5), rng.permutation(8)[:5]] = 1
    factor = fg.add(fm.Matching(u))
    equations = []
    for _ in range(6):
        members, coefs = rng.choice(40, 8, replace=False), rng.uniform(-1, 1, 8)
        value = float(coefs @ matching.ravel()[members])
        fg.add(fm.Linear(u.flatten()[members], coefs=coefs, lower=value, upper=value))
        equations.append((members, coefs, value))
    for _ in range(3):
        members = rng.choice(40, 5, replace=False)
        count = int(matching.ravel()[members].sum())
        fg.add(fm.Exactly(u.flatten()[members], count))
        equations.append((members, np.ones(5), count))
    solution = fg.solve(on_failure="raise")
    assert solution.iterations < 1500
    for members, coefs, value in equations:
        assert coefs @ u.value.ravel()[members] == pytest.approx(value, abs=2e-6)
    np.testing.assert_allclose(u.value.sum(1), 1, atol=2e-6)
    assert (u.value.sum(0) <= 1 + 2e-6).all()
    # They are listed by a second solve, which begins at the multipliers of the first.
    mean = np.tensordot(factor.probs, factor.structures, 1)
    np.testing.assert_allclose(mean.reshape(shape), u.value, atol=2e-5)
