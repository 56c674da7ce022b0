"""Views of variables: `.T`, `transpose`, `reshape`, `flatten`."""

import numpy as np
import pytest

import factormax as fm

VIEWS = [
    (lambda a: a.T, ".T"),
    (lambda a: a.reshape(4, 6), ".reshape(4, 6)"),
    (lambda a: a.reshape((3, -1)), ".reshape(3, -1)"),
    (lambda a: a.reshape(-1), ".reshape(-1)"),
    (lambda a: a.transpose(1, 2, 0), ".transpose(1, 2, 0)"),
    (lambda a: a.transpose(), ".transpose()"),
    (lambda a: a.flatten(), ".flatten()"),
    (lambda a: a[1].T[2:], "[1].T[2:]"),
    (lambda a: a.reshape(4, 6).T.flatten(), ".reshape(4, 6).T.flatten()"),
]


@pytest.mark.parametrize("view, text", VIEWS)
@pytest.mark.parametrize("negated", [False, True])
def test_views_are_those_of_numpy(view, text, negated):
    rng = np.random.default_rng(0)
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(rng.uniform(size=(5, 2, 3, 4)))
    fg.solve()
    v = view(~u if negated else u)
    assert v.name == ("~u" if negated else "u") + text
    expected = np.stack([view(instance) for instance in u.value])
    np.testing.assert_array_equal(v.value, 1 - expected if negated else expected)
    assert v.shape == expected.shape[1:] and v.negated == negated


@pytest.mark.parametrize("view, text", VIEWS)
def test_gradients_of_views(view, text):
    """The value of a view has the gradient of the same view of the whole value."""
    rng = np.random.default_rng(1)
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(rng.normal(size=(2, 2, 3, 4)))
    fg.add(fm.Xor(u, axis=2))
    solution = fg.solve()
    place = np.arange(24).reshape(2, 3, 4)
    grad = rng.normal(size=(2, *view(place).shape))
    full = np.zeros((2, 24))
    full[:, view(place).reshape(-1)] = grad.reshape(2, -1)
    expected = solution.vjp({u: full.reshape(2, 2, 3, 4)})[u]
    np.testing.assert_array_equal(solution.vjp({view(u): grad})[u], expected)


def test_factors_over_views():
    """Along the rows of the transpose is along the columns; a flat view is one factor."""
    scores = np.random.default_rng(2).normal(size=(3, 4))
    values = []
    for factors in (
        lambda u: [fm.Xor(u, axis=1), fm.AtMostOne(u, axis=0), fm.Budget(~u, 10)],
        lambda u: [fm.Xor(u.T, axis=0), fm.AtMostOne(u.T, axis=1), fm.Budget((~u).flatten(), 10)],
    ):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        for factor in factors(u):
            fg.add(factor)
        fg.solve()
        values.append(u.value)
    np.testing.assert_allclose(values[0], values[1], rtol=0, atol=1e-9)


def test_a_view_twice_in_a_factor():
    u = fm.FactorGraph().variable((2, 2))
    with pytest.raises(fm.GraphError, match=r"Or over u, u\.T: u\[0, 0\] is in it twice"):
        fm.Or([u, u.T])


@pytest.mark.parametrize("shape", [(5, 5), (7, -1), (-1, -1), (2.5,), ("a",)])
def test_shapes_that_do_not_fit(shape):
    u = fm.FactorGraph().variable((2, 3))
    with pytest.raises(fm.ShapeError, match=r"u\.reshape\(.*\): u has shape \(2, 3\).* 6 variab"):
        u.reshape(*shape)


@pytest.mark.parametrize("axes", [(0,), (0, 0), (0, 2), (0, 1, 2)])
def test_axes_that_do_not_fit(axes):
    u = fm.FactorGraph().variable((2, 3))
    with pytest.raises(fm.ShapeError, match=r"u\.transpose\(.*\): name each of the 2 axes once"):
        u.transpose(*axes)


def test_torch_and_compile():
    torch = pytest.importorskip("torch")

    def model(scores):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u.T, axis=0))
        fg.add(fm.AtMostOne(u.reshape(12).reshape(3, 4), axis=0))
        fg.solve(tol=1e-9)
        return u.value, u.T.value, u.flatten().value

    scores = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    grads = []
    for run in (model, compiled):
        whole, transposed, flat = run(scores)
        torch.testing.assert_close(transposed, whole.mT)
        torch.testing.assert_close(flat, whole.reshape(2, 12))
        (transposed[:, 0] ** 2).sum().backward()
        grads.append(scores.grad.clone())
        scores.grad = None
    torch.testing.assert_close(grads[0], grads[1])
