"""The logic factors over several variables side by side: one factor for each position."""

import numpy as np
import pytest
from problems import LOGIC

import factormax as fm


@pytest.mark.parametrize("kind", LOGIC)
@pytest.mark.parametrize("batch_dims", [0, 1])
def test_one_factor_for_each_position(kind, batch_dims):
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(*[3] * batch_dims, 3, 2, 4))
    make = getattr(fm, kind)
    answers = []
    for together in (True, False):
        fg = fm.FactorGraph(batch_dims=batch_dims)
        u = fg.variable_from(scores)
        a, b, c = u[0], ~u[1], u[2]
        if together:
            factor = fg.add(make(a, b, c))
            assert factor.name == f"{kind} over u[0], ~u[1], u[2]"
        else:
            for place in np.ndindex(2, 4):
                fg.add(make([a[place], b[place], c[place]]))
        solution = fg.solve(tol=1e-10)
        grad = rng.normal(size=scores.shape) if not answers else answers[0][2]
        answers.append((u.value, solution.vjp({u: grad})[u], grad))
    np.testing.assert_allclose(answers[0][0], answers[1][0], rtol=0, atol=1e-9)
    np.testing.assert_allclose(answers[0][1], answers[1][1], rtol=0, atol=1e-9)


def test_shapes_are_broadcast():
    scores = np.random.default_rng(1).normal(size=16)
    values = []
    for together in (True, False):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        rows, columns, one = u[:3].reshape(3, 1), u[3:7], u[7]
        if together:
            factor = fg.add(fm.Imply(rows, columns, one))
            assert factor._group_shape == (3, 4) and factor._index.shape == (12, 3)
        else:
            for i, j in np.ndindex(3, 4):
                fg.add(fm.Imply([rows[i, 0], columns[j], one]))
        fg.solve(tol=1e-10)
        values.append(u.value)
    np.testing.assert_allclose(values[0], values[1], rtol=0, atol=1e-9)


def test_a_list_is_one_factor():
    u = fm.FactorGraph().variable((2, 3))
    assert fm.Imply([u[0], u[1]])._index.shape == (1, 6)
    assert fm.Imply(u[0], u[1])._index.shape == (3, 2)


@pytest.mark.parametrize("kind", LOGIC)
def test_the_axis_may_come_second(kind):
    u = fm.FactorGraph().variable((2, 3))
    make = getattr(fm, kind)
    np.testing.assert_array_equal(make(u, 0)._index, make(u, axis=0)._index)
    np.testing.assert_array_equal(make(u, (0, 1))._index, make(u, axis=(0, 1))._index)
    np.testing.assert_array_equal(make(u, None)._index, make(u)._index)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda u, v: fm.Imply(u, v[:2]), fm.ShapeError, r"Imply over u, v\[:2\]: side by side"),
        (lambda u, v: fm.Or(u, v, axis=0), fm.GraphError, r"Or over u, v: axis=0 is for one"),
        (lambda u, v: fm.Xor([u], v), fm.GraphError, "Xor takes variables side by side.*list"),
        (lambda u, v: fm.Nand(u, [v]), fm.GraphError, "Nand takes variables side by side.*list"),
        (lambda u, v: fm.OrOut(u, v, 1), fm.GraphError, "OrOut takes variables side.*int"),
        (lambda u, v: fm.Or(u, 1.5), fm.GraphError, "Or takes a variable or a list.*float"),
        (lambda u, v: fm.Or(u, u), fm.GraphError, r"Or over u, u: u\[0\] is in it twice"),
        (lambda u, v: fm.Or(u, ~u), fm.GraphError, r"Or over u, ~u: u\[0\] is in it twice"),
        (
            lambda u, v: fm.Or(u, fm.FactorGraph().variable(3)),
            fm.GraphError,
            "Or over u, u: the variables belong to different graphs",
        ),
    ],
)
def test_what_does_not_fit(make, error, message):
    fg = fm.FactorGraph()
    u, v = fg.variable(3, name="u"), fg.variable(3, name="v")
    with pytest.raises(error, match=message):
        make(u, v)


def test_masked_positions():
    """Each position has its own mask; one where all are masked says nothing."""
    scores = np.array([[0.9, 0.9, 0.9], [0.2, 0.2, 0.2]])
    mask = np.array([[True, False, True], [True, False, True]])
    fg = fm.FactorGraph()
    u = fg.variable_from(scores, mask=mask)
    fg.add(fm.Imply(u[0], u[1]))
    fg.solve()
    np.testing.assert_allclose(u.value, [[0.55, 0, 0.55], [0.55, 0, 0.55]], atol=1e-9)


@pytest.mark.parametrize("kind", LOGIC)
def test_torch_and_compile(kind):
    torch = pytest.importorskip("torch")

    def model(scores):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(getattr(fm, kind)(u[0], u[1].negate(), u[2, :1]))
        fg.solve(tol=1e-10)
        return u.value

    scores = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    grads = []
    for run in (model, compiled):
        (run(scores) * torch.arange(24.0).reshape(2, 3, 4)).sum().backward()
        grads.append(scores.grad.clone())
        scores.grad = None
    torch.testing.assert_close(grads[0], grads[1])
