"""N tables in one call: what a loop over single tables gives."""

import numpy as np
import pytest

import factormax as fm

FIRST, SECOND = np.array([0, 1, 2, 0, 4]), np.array([1, 2, 3, 3, 5])  # edges over six rows


def graphs(eta, scores, mask=None):
    """The tables in one call, and one at a time: `(fg, u, list of tables)` of each."""
    for together in (True, False):
        fg = fm.FactorGraph(batch_dims=eta.ndim - 2)
        u = fg.variable_from(eta, mask=mask)
        if together:
            yield fg, u, [fg.add(fm.Table([u[FIRST], u[SECOND]], scores))]
            continue
        full = np.broadcast_to(scores, (*scores.shape[:-3], 5, *scores.shape[-2:]))
        edges = zip(FIRST, SECOND, strict=True)
        tables = [
            fg.add(fm.Table([u[i], u[j]], full[..., n, :, :])) for n, (i, j) in enumerate(edges)
        ]
        yield fg, u, tables


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
@pytest.mark.parametrize("per_instance", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_values_structures_and_gradients(batch, per_instance, masked):
    rng = np.random.default_rng(0)
    eta, grad = rng.normal(size=(2, *batch, 6, 3))
    scores = rng.normal(size=(*(batch if per_instance else ()), 5, 3, 3))
    mask = None
    if masked:
        mask = rng.random(eta.shape) < 0.8
        mask[..., 0] = True
        mask[..., 5, :] = False  # a group that is absent
    (fg, u, [table]), (loop, v, tables) = graphs(eta, scores, mask)
    solution, other = fg.solve(tol=1e-10), loop.solve(tol=1e-10)
    np.testing.assert_array_equal(u.value, v.value)
    np.testing.assert_array_equal(solution.objective, other.objective)
    assert table.value.shape == (*batch, 5, 3, 3)
    assert table.probs.shape[:-1] == table.num_structures.shape == (*batch, 5)
    assert table.structures.shape == (*table.probs.shape, 6)
    grad_value, grad_probs = rng.normal(size=table.value.shape), rng.normal(size=table.probs.shape)
    single_probs = {}
    for n, one in enumerate(tables):
        np.testing.assert_array_equal(table.value[..., n, :, :], one.value)
        np.testing.assert_array_equal(table.num_structures[..., n], one.num_structures)
        width = one.probs.shape[-1]
        np.testing.assert_array_equal(table.probs[..., n, :width], one.probs)
        np.testing.assert_array_equal(table.structures[..., n, :width, :], one.structures)
        assert not table.probs[..., n, width:].any()
        single_probs[one] = grad_probs[..., n, :width]
    out = solution.vjp({u: grad, table: grad_value}, probs={table: grad_probs})
    singles = {one: grad_value[..., n, :, :] for n, one in enumerate(tables)}
    expected = other.vjp({v: grad, **singles}, probs=single_probs)
    np.testing.assert_allclose(out[u], expected[v], rtol=0, atol=1e-12)
    for n, one in enumerate(tables):
        np.testing.assert_allclose(out[table][..., n, :, :], expected[one], rtol=0, atol=1e-12)


def test_scores_that_all_tables_share():
    rng = np.random.default_rng(1)
    eta, shared = rng.normal(size=(2, 6, 3)), rng.normal(size=(3, 3))
    (fg, u, [table]), (loop, v, tables) = graphs(eta, shared[None])
    solution, other = fg.solve(tol=1e-10), loop.solve(tol=1e-10)
    np.testing.assert_array_equal(u.value, v.value)
    np.testing.assert_allclose(table.value[:, 0], sum(t.value for t in tables), atol=1e-12)
    grad = rng.normal(size=eta.shape)
    expected = other.vjp({v: grad})
    out = solution.vjp({u: grad})[table]
    np.testing.assert_allclose(out[0], sum(expected[t] for t in tables), rtol=0, atol=1e-12)
    for shape in ((3, 3), (2, 1, 3, 3), (2, 5, 3, 3)):
        again = fm.FactorGraph(batch_dims=1)
        w = again.variable_from(eta)
        again.add(fm.Table([w[FIRST], w[SECOND]], np.broadcast_to(shared, shape)))
        again.solve(tol=1e-10)
        np.testing.assert_array_equal(w.value, u.value)


@pytest.mark.parametrize("query", ["solve_map", "decode"])
def test_other_queries(query):
    rng = np.random.default_rng(2)
    (fg, u, [table]), (loop, v, tables) = graphs(
        rng.normal(size=(2, 6, 3)), rng.normal(size=(5, 3, 3))
    )
    first, second = getattr(fg, query)(), getattr(loop, query)()
    np.testing.assert_array_equal(u.value, v.value)
    np.testing.assert_array_equal(first.upper_bound, second.upper_bound)
    np.testing.assert_array_equal(table.value, np.stack([t.value for t in tables], axis=1))
    if query == "decode":
        assert table.structures.shape == (2, 5, 1, 6) and (table.probs == 1).all()
        best = u.value
        losses = [g.loss({w: best}, "sparsemap") for g, w in ((fg, u), (loop, v))]
        np.testing.assert_allclose(losses[0], losses[1], atol=1e-9)
        wrong = best.copy()
        wrong[0, 4] = 1 - wrong[0, 4]
        with pytest.raises(fm.GraphError, match="Table over"):
            fg.loss({u: wrong})


def test_groups_of_different_sizes_and_other_factors():
    """Three groups a table, some of them in other factors too; -inf forbids."""
    rng = np.random.default_rng(3)
    a, b, c = rng.normal(size=(4, 2)), rng.normal(size=(4, 3)), rng.normal(size=(4, 2))
    scores = rng.normal(size=(4, 2, 3, 2))
    scores[1, 0] = -np.inf
    values = []
    for together in (True, False):
        fg = fm.FactorGraph()
        u, v, w = (fg.variable_from(x) for x in (a, b, c))
        if together:
            fg.add(fm.Table([u, v, w], scores))
        else:
            for n in range(4):
                fg.add(fm.Table([u[n], v[n], w[n]], scores[n]))
        fg.add(fm.Budget(v[:, 0], 1))
        fg.add(fm.Matching(u[:2]))  # hence linked with the tables
        fg.solve(tol=1e-9)
        values.append(np.concatenate([x.value.reshape(-1) for x in (u, v, w)]))
    np.testing.assert_allclose(values[0], values[1], rtol=0, atol=1e-7)


def test_best_joint_states():
    rng = np.random.default_rng(4)
    u = fm.FactorGraph().variable((6, 3))
    scores = rng.normal(size=(5, 3, 3))
    table = fm.Table([u[FIRST], u[SECOND]], scores)
    eta = rng.normal(size=(5, 6))
    m, n = table.map(eta, scores)
    for k in range(5):
        one, own = fm.Table([u[FIRST[k]], u[SECOND[k]]], scores[k]).map(eta[k], scores[k])
        np.testing.assert_array_equal(m[k], one)
        np.testing.assert_array_equal(n[k], own)


def test_torch_and_compile():
    torch = pytest.importorskip("torch")

    def model(eta, scores):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta)
        table = fg.add(fm.Table([u[FIRST], u[SECOND]], scores))
        fg.solve(tol=1e-10)
        return u.value, table.value

    torch.manual_seed(0)
    eta = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    scores = torch.randn(5, 3, 3, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for run in (model, compiled):
        value, joint = run(eta, scores)
        grads = torch.autograd.grad((value**2).sum() + (joint**3).sum(), (eta, scores))
        found.append((value, joint, *grads))
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(eager, traced, rtol=0, atol=1e-7)
    torch.autograd.gradcheck(model, (eta, scores))

    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta)
    table = fg.add(fm.Table([u[FIRST], u[SECOND]], scores))
    fg.solve()
    assert table.probs.shape[:2] == (2, 5) and table.structures.shape == (*table.probs.shape, 6)
    (table.probs[..., 0] ** 2).sum().backward()
    assert eta.grad.shape == eta.shape


@pytest.mark.parametrize(
    "groups, scores, message",
    [
        (
            lambda u: [u[:2], u[:3]],
            (2, 3, 3),
            r"Table over u\[:2\], u\[:3\]: the groups.*\(N, K1\)",
        ),
        (lambda u: [u[:2], u[0]], (2, 3, 3), r"the groups of a table have shapes"),
        (lambda u: [u[:2], u[2:4]], (3, 3, 3), r"scores must have shape \(2, 3, 3\)"),
        (lambda u: [u[:2], u[2:4]], (2, 3), r"scores must have shape \(2, 3, 3\)"),
        (lambda u: [u[:2], u[2:4]], (2, 1, 3), r"scores must have shape \(2, 3, 3\)"),
    ],
)
def test_shapes_that_do_not_fit(groups, scores, message):
    u = fm.FactorGraph().variable((6, 3))
    with pytest.raises(fm.ShapeError, match=message):
        fm.Table(groups(u), np.zeros(scores))


def test_a_group_twice_in_a_table():
    u = fm.FactorGraph().variable((6, 3))
    with pytest.raises(fm.GraphError, match=r"u\[2, 0\] is in it twice"):
        fm.Table([u[[0, 2]], u[[1, 2]]], np.zeros((2, 3, 3)))


def test_no_tables():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.full((6, 3), 0.3))
    table = fg.add(fm.Table([u[:0], u[:0]], np.zeros((0, 3, 3))))
    assert fg.solve().converged
    assert table.value.shape == (0, 3, 3) and table.probs.shape[0] == 0
    np.testing.assert_array_equal(u.value, 0.3)


def test_twenty_thousand_at_once():
    """A grid of 100 × 110 with 3 labels, in one call."""
    cells = np.arange(100 * 110).reshape(100, 110)
    first = np.concatenate([cells[:, :-1].ravel(), cells[:-1].ravel()])
    second = np.concatenate([cells[:, 1:].ravel(), cells[1:].ravel()])
    fg = fm.FactorGraph()
    u = fg.variable_from(np.random.default_rng(5).normal(size=(cells.size, 3)))
    table = fg.add(fm.Table([u[first], u[second]], 0.5 * np.eye(3)))
    fg.solve(max_iter=1, on_failure="ignore")
    assert table.structures.shape[0] == len(first) == 21_790
