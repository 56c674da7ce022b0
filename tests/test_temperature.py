"""`solve(temperature=...)`: all scores divided, with gradients."""

import numpy as np
import pytest

import factormax as fm

TIGHT = {"tol": 1e-11}


def build(eta, pair_scores, transitions, mask=None):
    """Rows, pairs and a sequence, with scores of their own: shared, or per instance."""
    fg = fm.FactorGraph(batch_dims=eta.ndim - 2)
    u = fg.variable_from(eta, mask=mask)
    fg.add(fm.Budget(u, 5))
    pair = fg.add(fm.Pair(u[:-1], u[1:], pair_scores))
    sequence = fg.add(fm.Sequence(u, transitions))
    return fg, u, pair, sequence


def draw(rng, batch=(2, 3)):
    return rng.normal(size=(*batch, 4, 3)), rng.normal(size=(3,)), rng.normal(size=(*batch, 3, 3))


TEMPERATURES = [0.5, np.float32(2.0), 3, [0.5, 1.0, 2.0], [[0.7], [1.5]], np.full((2, 3), 0.3)]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("method", ["auto", "admm"])
def test_it_divides_all_scores(temperature, method):
    eta, pair_scores, transitions = draw(np.random.default_rng(0))
    options = {"method": method, "tol": 1e-9, "max_iter": 100_000}
    fg, u, pair, sequence = build(eta, pair_scores, transitions)
    solution = fg.solve(temperature=temperature, **options)
    t = np.broadcast_to(temperature, (2, 3))
    each = t[..., None, None]
    other, v, own_pair, own_sequence = build(
        eta / each, pair_scores / each * np.ones((2, 3, 3, 1)), transitions / each
    )
    expected = other.solve(**options)
    np.testing.assert_allclose(u.value, v.value, rtol=0, atol=1e-9)
    np.testing.assert_allclose(solution.objective, expected.objective, rtol=0, atol=1e-9)
    np.testing.assert_allclose(sequence.value, own_sequence.value, rtol=0, atol=1e-9)
    np.testing.assert_allclose(pair.value, own_pair.value.sum(axis=-2), rtol=0, atol=1e-9)


@pytest.mark.parametrize("temperature", TEMPERATURES[:5])
def test_gradients_for_numpy(temperature):
    """Of everything that comes out, for everything that goes in, by finite differences."""
    rng = np.random.default_rng(1)
    given = [*draw(rng), np.asarray(temperature, dtype=float)]
    mask = np.ones((2, 3, 4, 3), dtype=bool)
    mask[0, :, 3, 1] = False
    weights = None

    def run(eta, pair_scores, transitions, t):
        nonlocal weights
        fg, u, pair, sequence = build(eta, pair_scores, transitions, mask)
        solution = fg.solve(temperature=t, **TIGHT)
        values = (u.value, pair.value, sequence.value, solution.objective)
        if weights is None:
            weights = [rng.normal(size=v.shape) for v in values]
        total = sum((w * v).sum() for w, v in zip(weights, values, strict=True))
        return total, (u, pair, sequence), solution

    _, keys, solution = run(*given)
    out = solution.vjp(dict(zip(keys, weights, strict=False)), objective=weights[3])
    found = [out[key] for key in (*keys, "temperature")]
    for position, (x, grad) in enumerate(zip(given, found, strict=True)):
        assert grad.shape == x.shape
        for place in list(np.ndindex(x.shape))[:: max(1, x.size // 8)]:
            ends = []
            for step in (1e-6, -1e-6):
                moved = [np.array(g) for g in given]
                moved[position][place] += step
                ends.append(run(*moved)[0])
            assert abs((ends[0] - ends[1]) / 2e-6 - grad[place]) < 1e-5 * (1 + abs(grad[place]))


def test_gradients_of_probabilities():
    rng = np.random.default_rng(2)
    eta, _, transitions = draw(rng)

    def run(t):
        fg = fm.FactorGraph(batch_dims=2)
        sequence = fg.add(fm.Sequence(fg.variable_from(eta), transitions))
        return fg.solve(temperature=t, **TIGHT), sequence

    solution, sequence = run(0.8)
    weight = rng.normal(size=sequence.probs.shape)
    found = solution.vjp(probs={sequence: weight})["temperature"]
    ends = [(run(t)[1].probs * weight).sum() for t in (0.8 + 1e-6, 0.8 - 1e-6)]
    assert abs((ends[0] - ends[1]) / 2e-6 - found) < 1e-5


@pytest.mark.parametrize("shape", [(), (3,), (2, 1), (2, 3)])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_for_torch(shape, compiled):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    given = [torch.tensor(x, requires_grad=True) for x in draw(rng)]
    given.append(torch.tensor(rng.uniform(0.5, 2, size=shape), requires_grad=True))
    with torch.no_grad():
        given[0][0, 0, 1, 1] = -torch.inf  # takes the variable out

    def model(eta, pair_scores, transitions, temperature):
        fg, u, pair, sequence = build(eta, pair_scores, transitions)
        solution = fg.solve(temperature=temperature, **TIGHT)
        return u.value, pair.value, sequence.value, solution.objective

    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    if not compiled:
        finite = given[0].detach().clone()
        finite[0, 0, 1, 1] = -1e3
        inputs = (finite.requires_grad_(), *given[1:])
        torch.autograd.gradcheck(model, inputs, atol=1e-5)
    outputs = run(*given)
    torch.manual_seed(0)
    loss = sum((torch.randn_like(o) * o).sum() for o in outputs)
    grads = torch.autograd.grad(loss, given)
    assert grads[0][0, 0, 1, 1] == 0 and all(g.isfinite().all() for g in grads)
    numpy = [x.detach().numpy() for x in given]
    fg, u, pair, sequence = build(*numpy[:3])
    solution = fg.solve(temperature=numpy[3], **TIGHT)
    torch.manual_seed(0)
    weights = [torch.randn_like(o).numpy() for o in outputs]
    out = solution.vjp(
        {u: weights[0], pair: weights[1], sequence: weights[2]}, objective=weights[3]
    )
    for grad, key in zip(grads, (u, pair, sequence, "temperature"), strict=True):
        np.testing.assert_allclose(grad.numpy(), out[key], rtol=0, atol=1e-7)


def test_torch_dtypes_and_structures():
    torch = pytest.importorskip("torch")
    scores = torch.randn(3, 4, 4, requires_grad=True)
    temperature = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    tree = fg.add(fm.DepTree(u))
    fg.solve(temperature=temperature)
    assert u.value.dtype == torch.float32
    (tree.probs[:, 0] ** 2).sum().backward()
    assert temperature.grad.dtype == torch.float64 and temperature.grad.isfinite().all()
    fg.solve(temperature=2)  # a number, and scores that get their gradient
    u.value[0, 0, 0].backward()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("numbers", [0.5, [0.5, 1.0, 2.0]])
def test_half_precision(numbers, compiled):
    """NumPy has no bfloat16, which a temperature may have where torch casts automatically."""
    torch = pytest.importorskip("torch")

    def solved(scores, temperature):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u))
        fg.solve(temperature=temperature)
        return u.value

    run = torch.compile(solved, backend="aot_eager", fullgraph=True) if compiled else solved
    scores = torch.linspace(-1, 1, 12).reshape(3, 4)
    for dtype in (torch.bfloat16, torch.float16):
        half = torch.tensor(numbers, dtype=dtype, requires_grad=True)
        single = half.detach().float().requires_grad_()
        values = [run(scores, temperature) for temperature in (half, single)]
        for value in values:
            (value**2).sum().backward()
        torch.testing.assert_close(*values)
        assert half.grad.dtype == dtype
        torch.testing.assert_close(half.grad.float(), single.grad, rtol=1e-2, atol=1e-2)


def test_masks_hide_what_is_not_finite():
    scores = np.array([[0.5, np.nan, np.inf], [-np.inf, 0.3, 0.4]])
    mask = np.array([[True, False, False], [True, True, True]])
    fg = fm.FactorGraph()
    u = fg.variable_from(scores, mask=mask)
    fg.add(fm.Xor(u, axis=1))
    solution = fg.solve(temperature=0.5)
    np.testing.assert_allclose(u.value, [[1, 0, 0], [0, 0.4, 0.6]], atol=1e-9)
    out = solution.vjp({u: np.eye(2, 3)[::-1]})
    assert np.isfinite(out["temperature"]) and np.isfinite(out[u]).all()


@pytest.mark.parametrize("lowest", ["finite", -np.inf])
@pytest.mark.parametrize("front", ["eager", "compiled", "transformed", "jax"])
def test_scores_that_switch_off(front, lowest):
    """The lowest finite score, as many masks have it, may become -inf: it has no gradient then."""
    heat = np.linspace(0.5, 2, 3).astype(np.float32)
    scores = np.array([[1, 0.5, 0.2], [0.1, 0.4, 0.9], [0.7, 0.6, 0.5]], np.float32)
    scores[:, 1] = np.finfo(np.float32).min if lowest == "finite" else lowest
    alone = np.delete(scores, 1, axis=1)

    def total(scores, heat):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u))
        fg.solve(temperature=heat, tol=1e-9)
        return (u.value**2).sum()

    if front == "jax":
        jax = pytest.importorskip("jax")
        slope = jax.jit(jax.grad(total, (0, 1)))
    else:
        torch = pytest.importorskip("torch")
        run = torch.compile(total, backend="eager") if front == "compiled" else total

        def slope(scores, heat):
            given = [torch.tensor(a, requires_grad=front != "transformed") for a in (scores, heat)]
            if front == "transformed":
                return torch.func.grad(run, (0, 1))(*given)
            return torch.autograd.grad(run(*given), given)

    (of_scores, of_heat), (of_alone, expected) = (
        map(np.asarray, slope(given, heat)) for given in (scores, alone)
    )
    np.testing.assert_allclose(of_heat, expected, atol=1e-5)
    np.testing.assert_allclose(np.delete(of_scores, 1, axis=1), of_alone, atol=1e-5)
    assert not of_scores[:, 1].any()


def test_towards_zero_it_is_map():
    rng = np.random.default_rng(4)
    fg = fm.FactorGraph()
    u = fg.variable_from(rng.normal(size=(5, 5)))
    fg.add(fm.Matching(u))
    fg.solve_map()
    best = u.value
    fg.solve(temperature=1e-3)
    np.testing.assert_allclose(u.value, best, atol=1e-9)


def test_loss():
    """The loss of the divided scores."""
    rng = np.random.default_rng(5)
    eta, target = rng.normal(size=(3, 4)), np.eye(4)[:3]
    t = np.array([0.5, 1.0, 2.0])
    for kind in ("sparsemap", "perceptron", "hinge"):
        losses = []
        for scores, options in ((eta, {"temperature": t}), (eta / t[:, None], {})):
            fg = fm.FactorGraph(batch_dims=1)
            u = fg.variable_from(scores)
            fg.add(fm.Xor(u))
            losses.append(fg.loss({u: target}, kind, **options))
        np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-12)
    torch = pytest.importorskip("torch")
    given = [torch.tensor(x, requires_grad=True) for x in (eta, t)]

    def loss(scores, temperature):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u))
        return fg.loss({u: torch.tensor(target)}, temperature=temperature)

    torch.autograd.gradcheck(loss, given)


@pytest.mark.parametrize(
    "temperature, error, message",
    [
        (0, fm.GraphError, "temperature must be positive and finite, got 0"),
        (-1.0, fm.GraphError, "temperature must be positive and finite, got -1"),
        (np.nan, fm.GraphError, "temperature must be positive and finite, got nan"),
        (np.inf, fm.GraphError, "temperature must be positive and finite, got inf"),
        ([1.0, -2.0, 1.0], fm.GraphError, "temperature must be positive and finite, got -2"),
        ("hot", fm.GraphError, "temperature must be a number, got dtype"),
        ([1.0, 2.0], fm.ShapeError, r"broadcastable to the batch, \(3,\), got shape \(2,\)"),
        ([[1.0, 1.0, 2.0]], fm.ShapeError, r"broadcastable to the batch, \(3,\), got shape \(1, 3"),
        (1e-320, ValueError, "too small for these scores"),
    ],
)
@pytest.mark.parametrize("query", ["solve", "loss"])
def test_bad_temperatures(temperature, error, message, query):
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.ones((3, 2)))
    fg.add(fm.Xor(u))
    with pytest.raises(error, match=message):
        if query == "solve":
            fg.solve(temperature=temperature)
        else:
            fg.loss({u: np.eye(2)[[0, 1, 0]]}, temperature=temperature)


def test_bad_temperatures_of_tensors():
    torch = pytest.importorskip("torch")

    def solve(scores, temperature):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u))
        fg.solve(temperature=temperature)
        return u.value

    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(fm.GraphError, match="temperature must be positive"):
            solve(torch.ones(3), torch.tensor(bad))
        compiled = torch.compile(solve, fullgraph=True, backend="aot_eager")
        with pytest.raises(ValueError, match="NaN"):  # numbers are not there to be looked at
            compiled(torch.ones(3), torch.tensor(bad))
    with pytest.raises(fm.GraphError, match="requires a gradient, but the scores are NumPy"):
        solve(np.ones(3), torch.tensor(1.0, requires_grad=True))
    np.testing.assert_allclose(solve(np.ones(3), torch.tensor(2.0)), 1 / 3)
