"""Factor scores that only some factors share with the whole batch, in traced JAX functions."""

import numpy as np
import pytest
from shared_scores import BATCH, DTYPES, MODELS, all_shared, assert_sums, labels, made, sequences

import factormax as fm

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from factormax._fronts.jax import plan, primitives  # noqa: E402

HEAT = {None: None, "one": np.array(0.5), "each": np.linspace(0.5, 2, BATCH)}


@pytest.fixture(autouse=True)
def in_double_precision():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def total_of(model, batch_dims=1, **options):
    """A number, from a temperature (or None) and the scores of a model."""

    def total(heat, *scores):
        numbers = iter(scores)
        fg = fm.FactorGraph(batch_dims=batch_dims)
        u, *factors = model(fg, lambda *shape: next(numbers))
        solution = fg.solve(temperature=heat, tol=1e-12, on_failure="ignore", **options)
        own = sum([jnp.sum(f.value**2) for f in factors])
        return jnp.sum(u.value**3) + own + jnp.sum(solution.objective)

    return total


def assert_close(found, expected, rtol=1e-9):
    scale = max(1, np.abs(np.nan_to_num(expected, posinf=0, neginf=0)).max(initial=0))
    np.testing.assert_allclose(found, expected, rtol=0, atol=rtol * scale)


def along(grads, ways):
    return sum([np.sum(way * np.asarray(grad)) for grad, way in zip(grads, ways, strict=True)])


@pytest.mark.parametrize("kind", HEAT)
@pytest.mark.parametrize("model", MODELS)
def test_gradients(model, kind):
    """They are the sums of those of repeated scores."""
    total, heat, answers = total_of(model), HEAT[kind], []
    every = (0,) * (heat is not None)
    for repeated in (False, True):
        given = made(model, repeated=repeated)[3]
        places = (*every, *range(1, len(given) + 1))
        answers.append(jax.jit(jax.value_and_grad(total, places))(heat, *given))
    (value, grads), (expected, sums) = answers
    assert_close(value, expected, 1e-12)
    if heat is not None:
        assert_close(grads[0], sums[0])
    for found, other in zip(grads[len(every) :], sums[len(every) :], strict=True):
        if found.shape == other.shape:
            assert_close(found, other)
        else:
            assert_sums(found, other, np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [None, "each"])
@pytest.mark.parametrize("model", [labels, all_shared])
def test_the_core_alone_answers_like_python(model, kind, dtype, monkeypatch):
    given, heat, total, found = made(model, dtype)[3], HEAT[kind], total_of(model), []
    heat = None if heat is None else heat.astype(dtype)
    monkeypatch.setattr(primitives.ffi, "lowering", lambda *_: None)  # it remembers what is native
    for natively in (True, False):
        if not natively:
            monkeypatch.setattr(plan.Plan, "native", None)
        function = jax.value_and_grad(total, tuple(range(1, len(given) + 1)))
        found.append(jax.tree.leaves(jax.jit(lambda *a, f=function: f(*a))(heat, *given)))
    for own, exact in zip(*found, strict=True):
        assert own.dtype == dtype
        np.testing.assert_array_equal(own, exact)


@pytest.mark.parametrize("kind", [None, "each"])
@pytest.mark.parametrize("model", [labels, sequences, all_shared])
def test_other_derivatives(model, kind):
    """Forward mode, and gradients of gradients, by finite differences of these."""
    given, heat, total = made(model)[3], HEAT[kind], total_of(model)
    first = 0 if heat is not None else 1
    numbers = [heat, *given][first:]

    def of(*numbers):
        return total(*([None] * first), *numbers)

    rng = np.random.default_rng(0)
    ways = [rng.normal(size=np.shape(t)) for t in numbers]
    places = tuple(range(len(numbers)))
    grad = jax.jit(jax.grad(of, places))
    _, slope = jax.jit(lambda n, w: jax.jvp(of, tuple(n), tuple(w)))(numbers, ways)
    assert_close(slope, along(grad(*numbers), ways))
    _, curve = jax.jit(
        lambda n, w: jax.jvp(lambda *t: jax.jvp(of, t, tuple(w))[1], tuple(n), tuple(w))
    )(numbers, ways)
    step, slopes = 1e-7, []
    for size in (step, -step):
        moved = [t + size * way for t, way in zip(numbers, ways, strict=True)]
        slopes.append(along(grad(*moved), ways))
    assert_close(curve, (slopes[0] - slopes[1]) / (2 * step), 1e-5)


@pytest.mark.parametrize("heated", [False, True])
def test_samples(heated):
    """A vmap over scores that the instances of a sample share, and over those that all share."""
    rng = np.random.default_rng(0)
    scores, own = rng.normal(size=(3, 4, 5)), rng.normal(size=(3, 4, 2))
    each, alike, heat = rng.normal(size=(3, 4)), rng.normal(size=4), rng.uniform(0.5, 2, 4)

    def total(scores, shared, own, heat):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        pair = fg.add(fm.Pair(u[:-1], u[1:], shared))
        fg.add(fm.Pair(u[:2], u[3:], own))
        solution = fg.solve(temperature=heat if heated else None, tol=1e-9)
        return jnp.sum(u.value**2) + jnp.sum(pair.value**2) + jnp.sum(solution.objective)

    for shared, axis in ((each, 0), (alike, None)):
        grad = jax.grad(total, (0, 1, 2, 3))
        found = jax.jit(jax.vmap(grad, (0, axis, 0, None)))(scores, shared, own, heat)
        for k in range(3):
            exact = grad(scores[k], shared[k] if axis == 0 else shared, own[k], heat)
            for one, two in zip(found, exact, strict=True):
                assert_close(one[k], two)


@pytest.mark.parametrize("kind", [None, "each"])
@pytest.mark.parametrize("loss", ["sparsemap", "perceptron", "hinge"])
@pytest.mark.parametrize("model", [sequences, all_shared])
def test_losses(model, loss, kind):
    fg, u, *_ = made(model)
    fg.decode(on_failure="ignore")
    target, answers = u.value, []

    def total(heat, *scores):
        numbers = iter(scores)
        fg = fm.FactorGraph(batch_dims=1)
        u, *_ = model(fg, lambda *shape: next(numbers))
        options = {"tol": 1e-12, "on_failure": "ignore"}
        values = fg.loss({u: target}, kind=loss, temperature=heat, **options)
        return jnp.sum(values * jnp.linspace(-1, 2, BATCH)), values

    for repeated in (False, True):
        given = made(model, repeated=repeated)[3]
        grad = jax.grad(total, tuple(range(1, len(given) + 1)), has_aux=True)
        answers.append(jax.jit(grad)(HEAT[kind], *given))
    (grads, values), (sums, expected) = answers
    assert_close(values, expected, 1e-12)
    for found, other in zip(grads, sums, strict=True):
        if found.shape == other.shape:
            assert_close(found, other)
        else:
            assert_sums(found, other, np.float64)


@pytest.mark.parametrize("kind", HEAT)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_shared_is_an_operand_of_its_own(model, kind, monkeypatch):
    seen = []
    bind = primitives._bind
    monkeypatch.setattr(
        primitives,
        "_bind",
        lambda primitive, arrays, plan: (
            seen.append((plan, arrays)) or bind(primitive, arrays, plan)
        ),
    )
    given = made(model)[3]
    jax.make_jaxpr(total_of(model))(HEAT[kind], *given)
    own, arrays = seen[0]
    scores = [arrays[i] for i in own.score_places]
    assert len(scores) == 1 + own.operands.shared + own.operands.heat
    if own.operands.shared:
        assert scores[0].shape[0] == BATCH and scores[1].shape[0] == 1
        assert scores[0].shape[1] + scores[1].shape[1] == own.model.num_scores
    else:
        assert model is all_shared and scores[0].shape == (1, own.model.num_scores)
    assert own.operands.heat == (kind == "each")


def test_scores_that_overflow():
    """What a temperature makes -inf is forbidden; the score of a pair can't be."""
    lowest = np.finfo(np.float32).min
    heat = np.linspace(0.5, 2, 4, dtype=np.float32)
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 3)), np.float32)

    def labeled(transitions, heat):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Sequence(u, transitions))
        return fg.solve(temperature=heat).status, u.value

    def paired(pairs, heat):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Pair(u[:2], u[3:], pairs))
        return fg.solve(temperature=heat).status, u.value

    allowed, forbidden = np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32)
    allowed[0, 1], forbidden[0, 1] = lowest, -np.inf
    answers = [jax.jit(labeled)(given, heat) for given in (allowed, forbidden)]
    for found, expected in zip(*answers, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    status, _ = jax.jit(paired)(np.full((2, 3), lowest), heat)
    assert (status == np.where(heat < 1, fm.Status.INVALID.code, 0)).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan])
def test_a_temperature_that_is_not_one(bad):
    """Its instance has no answer; the others do."""
    given, heat = made(labels)[3], HEAT["each"].copy()
    heat[3] = bad

    def values(heat, *scores):
        numbers = iter(scores)
        fg = fm.FactorGraph(batch_dims=1)
        u, *_ = labels(fg, lambda *shape: next(numbers))
        solution = fg.solve(temperature=heat, tol=1e-9)
        return u.value, solution.status

    found, status = jax.jit(values)(heat, *given)
    exact, _ = jax.jit(values)(HEAT["each"], *given)
    rest = np.arange(BATCH) != 3
    np.testing.assert_array_equal(np.asarray(found)[rest], np.asarray(exact)[rest])
    assert np.isnan(found[3]).all() and status[3] == fm.Status.INVALID.code
