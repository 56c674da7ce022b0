"""JAX: every factor through every transformation."""

import os
import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from every_factor import EXAMPLES

import factormax as fm

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

jax.config.update("jax_disable_most_optimizations", True)  # which would take longer than the tests

import factormax.jax  # noqa: E402
from factormax._fronts.jax import ffi, plan, primitives  # noqa: E402


@pytest.fixture(autouse=True)
def in_double_precision():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


class TwoOf(fm.Factor):
    """The vectors with exactly two ones."""

    def map(self, eta_u, eta_v):
        m = np.zeros(len(eta_u))
        m[np.argsort(-eta_u)[:2]] = 1
        return m, []


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


SIZE = 28  # scores: 12 of variables, up to 16 of a factor
FIRST, SECOND = np.array([(i, j) for i in range(12) for j in range(i)])[::4][:16].T.reshape(2, 4, 4)
WEIGHTS = np.abs(random(3, 4, seed=5)) + 0.1


def from_example(example):
    """Of the first variables of u, and the first of its own scores."""

    def make(u, s):
        variables = u.flatten()[: int(np.prod(example.shape))].reshape(example.shape)
        return example.with_scores(variables, *[s for _ in example.own[:1]])

    return make, next(iter(example.own), None)


#: Of each factor: how it is made of u, `(3, 4)`, and its own scores; and their shape.
FACTORS = {kind: from_example(example) for kind, example in EXAMPLES.items()}
FACTORS |= {
    "Xor": (lambda u, s: fm.Xor(u, axis=1), None),
    "AtMostOne": (lambda u, s: fm.AtMostOne(u, axis=0), None),
    "Or": (lambda u, s: fm.Or(~u, axis=1), None),
    "Nand": (lambda u, s: fm.Nand(u, axis=1), None),
    "Imply": (lambda u, s: fm.Imply(u[:, 0], ~u[:, 1], u[:, 2]), None),
    "XorOut": (lambda u, s: fm.XorOut(u, axis=1), None),
    "OrOut": (lambda u, s: fm.OrOut(u, axis=1), None),
    "AndOut": (lambda u, s: fm.AndOut(u, axis=1), None),
    "Budget": (lambda u, s: fm.Budget(u, 2), None),
    "AtLeast": (lambda u, s: fm.AtLeast(u, np.array([1, 3, 2]), axis=1), None),
    "Exactly": (lambda u, s: fm.Exactly(u[[0, 2, 1]], 2, axis=1), None),
    "Knapsack": (lambda u, s: fm.Knapsack(u, WEIGHTS, 0.7, axis=0), None),
    "Linear": (lambda u, s: fm.Linear(u, WEIGHTS - 0.5, lower=-0.1, upper=0.1, axis=1), None),
    "Pair": (lambda u, s: fm.Pair(u.flatten()[FIRST], u.flatten()[SECOND], s), (4, 4)),
    "Table": (lambda u, s: fm.Table([u[0], u[1]], s), (4, 4)),
    "Sequence": (lambda u, s: fm.Sequence(u, s), (4, 4)),
    "SequenceBudget": (lambda u, s: fm.SequenceBudget(u[:, 0], s, 2), ()),
    "DepTree": (lambda u, s: fm.DepTree(u[:, :3]), None),
    "projective DepTree": (lambda u, s: fm.DepTree(u[:, 1:], projective=True), None),
    "Matching": (lambda u, s: fm.Matching(u), None),
    "Factor": (lambda u, s: TwoOf(u[1]), None),
}


def test_every_factor_is_there():
    assert set(fm.factors.__all__) <= set(FACTORS)


def values_of(name, x):
    """The marginals of the variables and of the factor's own scores, from the scores of both.

    All factors have as many numbers, some of no use, so that JAX compiles what it needs only once.
    """
    make, shape = FACTORS[name]
    xp = np if isinstance(x, np.ndarray) else jnp
    fg = fm.FactorGraph()
    u = fg.variable_from(x[:12].reshape(3, 4))
    scores = None if shape is None else x[12 : 12 + int(np.prod(shape))].reshape(shape)
    factor = fg.add(make(u, scores))
    fg.solve(tol=1e-10)
    own = xp.zeros(0) if shape is None else factor.value.reshape(-1)
    return xp.concatenate([u.value.reshape(-1), own, xp.zeros(SIZE - 12 - own.size)])


def differences(function, x, eps=1e-6):
    """The Jacobian by central differences."""
    columns = []
    for k in range(x.size):
        step = np.zeros(x.size)
        step[k] = eps
        step = step.reshape(x.shape)
        columns.append((function(x + step) - function(x - step)) / (2 * eps))
    return np.stack(columns, axis=-1)


@pytest.mark.parametrize("name", FACTORS)
def test_every_factor_through_every_transformation(name):
    x = 0.4 * random(SIZE, seed=sum(map(ord, name)))
    values = partial(values_of, name)
    exact = values(x)
    given = jnp.asarray(x)
    assert isinstance(values(given), jax.Array)
    np.testing.assert_array_equal(values(given), exact)
    np.testing.assert_array_equal(jax.jit(values)(given), exact)

    jacobian = differences(values, x)
    assert np.abs(jacobian).max() > 0.1
    forward, reverse = jax.jit(lambda x: (jax.jacfwd(values)(x), jax.jacrev(values)(x)))(given)
    np.testing.assert_allclose(forward, jacobian, atol=1e-6)
    np.testing.assert_allclose(forward, reverse, atol=1e-9)

    direction = random(SIZE, seed=1)
    value, tangent = jax.jvp(values, (given,), (direction,))
    np.testing.assert_array_equal(value, exact)
    np.testing.assert_allclose(tangent, jacobian @ direction, atol=1e-5)

    def norm(x):
        return jnp.sum(values(x) ** 2)

    np.testing.assert_allclose(jax.grad(norm)(given), 2 * reverse.T @ exact, atol=1e-9)
    twice = jax.jit(lambda x: (jax.hessian(norm)(x), jax.jacrev(jax.grad(norm))(x)))
    for hessian in twice(given):  # forward over reverse, and reverse over reverse
        np.testing.assert_allclose(hessian, 2 * forward @ forward, atol=1e-8)

    batch = given + 0.1 * random(SIZE, 3, seed=2).T[:, None]  # (3, 1, SIZE)
    one_by_one = np.stack([values(row) for row in np.asarray(batch[:, 0])])
    for axis in range(3):
        moved = jnp.moveaxis(batch[:, 0], 0, axis) if axis < 2 else batch
        mapped = jax.vmap(values if axis < 2 else jax.vmap(values), in_axes=axis % 2)(moved)
        np.testing.assert_allclose(mapped.reshape(3, -1), one_by_one, atol=1e-12)
    rows = jax.vmap(jax.grad(norm))(batch[:, 0])
    np.testing.assert_allclose(rows, [jax.grad(norm)(x) for x in batch[:, 0]], atol=1e-9)


# ---- Masks, parameters, temperatures -------------------------------------------------------------


def ragged(eta, mask, costs, budget, temperature):
    """A graph with a batch dimension, of which everything may be traced."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta, mask=mask)
    v = fg.variable((2,))
    fg.add(fm.Knapsack(u, costs, budget))
    fg.add(fm.Budget(u, np.array([3, 2]), axis=None))
    fg.add(fm.Imply(u[0, 0], v[0]))
    fg.add(fm.Sequence(u[1:], 0.1 * np.eye(4)))
    solution = fg.solve(tol=1e-10, temperature=temperature)
    return u.value, v.value, solution


def ragged_numbers():
    mask = np.ones((2, 3, 4), bool)
    mask[0, 0, 1] = mask[1, 2] = False
    return 0.5 * random(2, 3, 4), mask, WEIGHTS, np.array([1.5, 2.0]), np.array([0.5, 2.0])


def test_all_numbers_may_be_traced():
    numbers = ragged_numbers()
    *exact, solution = ragged(*numbers)
    grads = random(2, 3, 4, seed=3)
    (u,) = [v for v in solution.vjp({}) if getattr(v, "shape", None) == (3, 4)]
    expected = solution.vjp({u: grads}, objective=np.array([1.0, -1.0]))

    def loss(eta, temperature, mask, costs, budget):
        u, v, solution = ragged(eta, mask, costs, budget, temperature)
        return jnp.sum(u * grads) + solution.objective[0] - solution.objective[1], (u, v)

    eta, mask, costs, budget, temperature = map(jnp.asarray, numbers)
    for run in (lambda f: f, jax.jit):
        run_grad = run(jax.grad(loss, argnums=(0, 1), has_aux=True))
        (of_eta, of_temperature), found = run_grad(eta, temperature, mask, costs, budget)
        for value, wanted in zip(found, exact, strict=True):
            np.testing.assert_allclose(value, wanted, atol=1e-12)
        np.testing.assert_allclose(of_eta, expected[u], atol=1e-9)
        np.testing.assert_allclose(of_temperature, expected["temperature"], atol=1e-9)
    # Every number may be mapped over, or none: those shared, and those of an instance.
    for mapped in [(0, 0, 0, 0, 0), (1, None, None, None, None), (None, None, 0, 0, 0)]:
        given = [
            a if axis is None else jnp.stack([a, a[::-1] if i else 0.5 * a], axis)
            for i, (a, axis) in enumerate(zip((eta, *numbers[1:]), mapped, strict=True))
        ]
        many = jax.jit(jax.vmap(lambda *a: ragged(*a)[0], in_axes=mapped))(*given)
        for k in range(2):
            one = [
                a if axis is None else np.take(np.asarray(a), k, axis)
                for a, axis in zip(given, mapped, strict=True)
            ]
            np.testing.assert_allclose(many[k], ragged(*map(np.asarray, one))[0], atol=1e-10)


def test_parameters_take_no_gradient():
    def value(budget):
        fg = fm.FactorGraph()
        u = fg.variable_from(jnp.ones(3))
        fg.add(fm.Knapsack(u, jnp.ones(3), budget))
        fg.solve()
        return u.value.sum()

    with pytest.raises(fm.GraphError, match=r"Knapsack over u: .*stop_gradient"):
        jax.grad(value)(1.0)
    assert jax.grad(lambda b: value(jax.lax.stop_gradient(b)))(1.0) == 0


# ---- Losses and linear programs ------------------------------------------------------------------


def tagged(eta, transitions, target, kind, mask=None, cost=None):
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta)
    fg.add(fm.Sequence(u, transitions))
    fg.add(fm.AtMostOne(u[:, 0]))
    return fg.loss({u: target}, kind, mask=mask, cost=cost, tol=1e-9)


@pytest.mark.parametrize("kind", ["sparsemap", "perceptron", "hinge"])
@pytest.mark.parametrize("partly", [False, True])
def test_losses(kind, partly):
    torch = pytest.importorskip("torch")
    eta, transitions = random(2, 3, 4), random(4, 4, seed=1)
    target = np.eye(4)[[[0, 2, 1], [3, 3, 3]]]
    known = (random(2, 3, 1, seed=2) > -0.5) | np.zeros((2, 3, 4), bool) if partly else None
    cost = 0.5 + np.abs(random(2, 3, 4)) if kind == "hinge" else None
    tensors = [torch.tensor(a, requires_grad=True) for a in (eta, transitions)]
    exact = tagged(*tensors, target, kind, known, cost)
    wanted = torch.autograd.grad(exact @ torch.tensor([1.0, -2.0], dtype=torch.float64), tensors)

    def weighted(eta, transitions, target, known, cost):
        found = tagged(eta, transitions, target, kind, known, cost)
        return found @ jnp.array([1.0, -2.0]), found

    given = [None if a is None else jnp.asarray(a) for a in (eta, transitions, target, known, cost)]
    np.testing.assert_allclose(tagged(*given[:3], kind, *given[3:]), exact.detach(), atol=1e-7)
    for run in (lambda f: f, jax.jit):
        grads, found = run(jax.grad(weighted, argnums=(0, 1), has_aux=True))(*given)
        np.testing.assert_allclose(found, exact.detach(), atol=1e-7)
        for grad, own in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(grad, own, atol=1e-6)


def test_the_hessian_of_a_loss_is_the_jacobian():
    eta, transitions = random(1, 3, 4), random(4, 4, seed=1)
    target = np.eye(4)[[[1, 2, 1]]]
    known = np.array([[[True], [False], [False]]]) & np.ones((1, 3, 4), bool)
    for mask in (None, known):
        function = partial(tagged, transitions=transitions, target=target, kind="sparsemap")
        hessian = jax.jit(jax.hessian(lambda e, f=function, m=mask: f(e, mask=m)[0]))(eta)
        gradient = jax.jit(jax.grad(lambda e, f=function, m=mask: f(e, mask=m)[0]))
        exact = differences(lambda x, g=gradient: np.asarray(g(jnp.asarray(x))), eta)
        np.testing.assert_allclose(hessian.reshape(12, 12), exact.reshape(12, 12), atol=1e-6)


def test_a_target_that_breaks_a_factor():
    eta, transitions = jnp.asarray(random(2, 3, 4)), jnp.asarray(random(4, 4))
    target = np.eye(4)[[[0, 2, 0], [3, 3, 3]]]  # the first state twice
    both = jax.value_and_grad(lambda e, t: tagged(e, transitions, t, "sparsemap")[0])
    with pytest.raises(fm.GraphError, match="The target of instance 0 breaks AtMostOne over u"):
        both(eta, target)
    value, grad = jax.jit(both)(eta, target)
    assert value == np.inf and not grad.any()


@pytest.mark.parametrize("surrogate", [None, "straight-through", "spigot"])
def test_linear_programs(surrogate):
    torch = pytest.importorskip("torch")
    weight, scores = random(3, 4, seed=1), random(3, 4)

    def relaxed(eta):
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        fg.add(fm.Matching(u))
        solution = fg.solve_map(surrogate=surrogate)
        return u.value, solution

    def loss(eta):
        value, solution = relaxed(eta)
        return jnp.sum(value * weight) + solution.objective, (
            value,
            solution.upper_bound,
            solution.integral,
        )

    eta = torch.tensor(scores, requires_grad=True)
    value, solution = relaxed(eta)
    ((value * torch.tensor(weight)).sum() + solution.objective).backward()
    for run in (lambda f: f, jax.jit):
        grad, (found, bound, integral) = run(jax.grad(loss, has_aux=True))(scores)
        np.testing.assert_allclose(found, value.detach(), atol=1e-12)
        np.testing.assert_allclose(grad, eta.grad, atol=1e-9)
        assert integral and abs(bound - relaxed(scores)[1].objective) < 1e-6
    if surrogate == "spigot":
        with pytest.raises(fm.GraphError, match="forward mode"):
            jax.jvp(lambda e: relaxed(e)[0], (scores,), (weight,))
        with pytest.raises(fm.GraphError, match="forward mode"):
            jax.jit(jax.jacfwd(lambda e: relaxed(e)[0]))(scores)
    else:
        _, tangent = jax.jvp(lambda e: relaxed(e)[0], (scores,), (weight,))
        np.testing.assert_array_equal(tangent, 0 * weight if surrogate is None else weight)


# ---- How a query ended ---------------------------------------------------------------------------


def counted(eta, count):
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta)
    fg.add(fm.Xor(u[:2]))
    fg.add(fm.Exactly(u, count))
    solution = fg.solve(on_failure="raise")
    return u.value, solution.status


@pytest.mark.parametrize("structured", [False, True])
def test_nothing_is_raised_while_tracing(structured):
    def run(eta, count, weight):
        value, status = counted(eta, count)
        if structured:
            fg = fm.FactorGraph(batch_dims=1)
            u = fg.variable_from(eta)
            fg.add(fm.SequenceBudget(u, 0.5, count))
            solution = fg.solve(on_failure="raise")
            value, status = u.value, solution.status
        return jnp.sum(value * weight), (value, status)

    eta = random(5, 3)
    eta[1, 2] = np.nan
    count = np.array([1.0, 1, 0, -1, 2])
    weight = np.array([1.0, 0, 0, 0, 1])[:, None] * random(5, 3, seed=1)
    grad, (value, status) = jax.jit(jax.grad(run, has_aux=True))(eta, count, weight)
    names = [fm.Status.from_code(int(code)).name for code in status]
    third = "CONVERGED" if structured else "INFEASIBLE"
    assert names == ["CONVERGED", "INVALID", third, "INVALID", "CONVERGED"]
    np.testing.assert_array_equal(np.isnan(value).any(axis=1)[[0, 1, 3, 4]], [0, 1, 1, 0])
    good = np.array([0, 4])
    alone, (own, _) = jax.grad(run, has_aux=True)(eta[good], count[good], weight[good])
    np.testing.assert_allclose(value[good], own, atol=1e-9)
    np.testing.assert_allclose(grad[good], alone, atol=1e-9)
    assert not grad[1:4].any()


def test_failures_outside_of_jit():
    eta = jnp.asarray(random(2, 3))
    for run in (lambda e, c: counted(e, c)[0], jax.vmap(lambda e, c: counted(e[None], c)[0])):
        with pytest.raises(fm.InfeasibleError, match="No assignment satisfies"):
            run(eta, jnp.array([1, 0]))
    with pytest.raises(ValueError, match=r"u: scores must be .* got NaN at index \(1, 2\)"):
        counted(eta.at[1, 2].set(jnp.nan), 1)
    with pytest.raises(ValueError, match=r"u: scores must be .* got NaN at index \(1, 2\)"):
        jax.grad(lambda e: counted(e, 1)[0].sum())(eta.at[1, 2].set(jnp.nan))
    with pytest.raises(fm.GraphError, match=r"Exactly.*count must be at least 0"):
        jax.vmap(lambda c: counted(eta, c)[0])(jnp.array([1, -1]))


@pytest.mark.parametrize("structured", [False, True])
def test_conflicts_are_named_outside_of_jit(structured):
    solutions = []

    def run(eta, on_failure="warn"):
        fg = fm.FactorGraph(batch_dims=eta.ndim - 2)
        u = fg.variable_from(eta)
        fg.add(fm.Matching(u) if structured else fm.Xor(u, axis=1))
        fg.add(fm.Budget(u[:1], 0))
        solutions.append(fg.solve(on_failure=on_failure))
        return u.value.sum()

    def said(function, *args):
        with pytest.warns(fm.NotConvergedWarning) as warned:
            function(*args)
        return str(warned[0].message)

    eta = jnp.asarray(random(3, 3))
    plain = said(run, eta)
    conflict = solutions[-1].conflict()
    first = "Matching over u" if structured else "Xor over u[0, :]"
    assert conflict == [first, "Budget over u[:1]"]
    names = f"These exclude each other: {'; '.join(conflict)}."
    assert names in plain
    assert said(jax.grad(run), eta) == said(jax.jvp, run, (eta,), (eta,)) == plain
    for solution in solutions:  # the numbers are there
        assert solution.status is fm.Status.INFEASIBLE and solution.conflict() == conflict
    jax.grad(partial(run, on_failure="ignore"))(eta)
    assert solutions[-1].conflict() == conflict
    with pytest.raises(fm.InfeasibleError, match=re.escape(names)):
        jax.grad(partial(run, on_failure="raise"))(eta)

    batch = jnp.stack([eta] * 4).reshape(2, 2, 3, 3)
    assert f"The first is instance (0, 0). {names}" in said(jax.grad(run), batch)
    assert f"The first is instance (0,). {names}" in said(jax.vmap(jax.grad(run)), batch)
    for transform, given in ((jax.vmap, batch[0]), (jax.jit, eta)):  # they are not
        with pytest.raises(fm.GraphError, match=r"conflict: .* inside a transform"):
            transform(lambda e: (run(e, "ignore"), solutions[-1].conflict()))(given)


def test_conflicts_of_a_loss_are_named_outside_of_jit():
    def loss(eta):
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        fg.add(fm.Xor(u))
        fg.add(fm.Budget(u, 0))
        return fg.loss({u: jnp.zeros(3)}, mask=jnp.array([True, False, False]))

    with pytest.warns(fm.NotConvergedWarning, match="each other: Xor over u; Budget over u"):
        jax.grad(loss)(jnp.ones(3))


def test_queries_outside_of_a_trace():
    scores = jnp.asarray(random(3, 3), jnp.float32)

    def build(eta):
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        return fg, u, fg.add(fm.Matching(u))

    fg, u, factor = build(scores)
    solution = fg.solve()
    assert u.value.dtype == jnp.float32 and solution.engine == "cpu"
    assert solution.status is fm.Status.CONVERGED
    handed_out = (factor.probs, factor.structures, factor.num_structures, solution.objective)
    assert all(isinstance(array, jax.Array) for array in handed_out)
    assert factor.probs.dtype == jnp.float32
    mean = jnp.einsum("k,kij->ij", factor.probs, factor.structures)
    np.testing.assert_allclose(mean, u.value, atol=1e-6)
    again = fg.solve(warm_start=solution)
    assert again.iterations <= solution.iterations
    assert fg.decode().optimal and isinstance(u.value, jax.Array)
    assert set(np.unique(u.value)) <= {0, 1}

    def traced(what):
        def run(eta):
            fg, _, factor = build(eta)
            return fg.decode() if what == "decode" else (fg.solve(), getattr(factor, what))[1]

        return run

    with pytest.raises(fm.GraphError, match="decode can't be traced"):
        jax.jit(traced("decode"))(scores)
    for what in ("structures", "probs"):
        with pytest.raises(fm.GraphError, match="not available while JAX traces"):
            jax.jit(traced(what))(scores)


def test_warm_starts_and_empty_batches():
    def solve(eta, start=None):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta)
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.AtMostOne(u, axis=0))
        solution = fg.solve(warm_start=start, tol=1e-10)
        return u.value, solution

    eta = jnp.asarray(random(2, 4, 5))
    value, earlier = solve(eta)

    def again(eta):  # from a solution that is there, and from one that is traced
        first, traced = solve(eta, earlier)
        second, last = solve(eta, traced)
        return first, second, last.iterations, last.objective

    first, second, iterations, _ = jax.jit(again)(eta)
    np.testing.assert_allclose(first, value, atol=1e-9)
    np.testing.assert_allclose(second, value, atol=1e-9)
    assert (iterations <= earlier.iterations).all()
    grad = jax.jit(jax.grad(lambda e: again(e)[3].sum()))(eta)
    np.testing.assert_allclose(grad, value, atol=1e-9)
    for run in (lambda f: f, jax.jit):
        value, pull_back = jax.vjp(run(lambda e: solve(e)[0]), eta[:0])
        assert pull_back(value)[0].shape == value.shape == (0, 4, 5)


def test_precisions():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32):
        eta = jnp.asarray([1, 0, -2], dtype)
        wanted = dtype if dtype != jnp.int32 else jnp.float64
        values = [f(eta) for f in (partial(sparsemax, axis=0), jax.jit(sparsemax))]
        assert [v.dtype for v in values] == [wanted] * 2
        np.testing.assert_array_equal(values[0], values[1])
    jax.config.update("jax_enable_x64", False)
    assert jax.jit(sparsemax)(np.zeros(3)).dtype == jnp.float32


def sparsemax(eta, axis=None):
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    fg.add(fm.Xor(u, axis=axis))
    fg.solve()
    return u.value


def test_what_is_refused():
    fg = fm.FactorGraph()
    u = fg.variable_from(jnp.zeros((2, 3)))
    with pytest.raises(fm.GraphError, match="v: one graph holds JAX arrays or NumPy arrays"):
        fg.variable_from(np.zeros(3), name="v")
    with pytest.raises(fm.GraphError, match="real numbers"):
        fg.variable_from(jnp.zeros(3, complex), name="v")
    with pytest.raises(fm.GraphError, match="u: an index can't be traced"):
        jax.jit(lambda i: u[i].shape)(1)
    with pytest.raises(fm.GraphError, match="temperature is traced by JAX, but the scores"):
        own = fm.FactorGraph()
        own.variable_from(np.zeros(3))
        jax.jit(lambda t: own.solve(temperature=t).objective)(1.0)
    for mask in (True, False):

        def run(traced, mask=mask):
            own = fm.FactorGraph()
            u = own.variable_from(np.zeros(3), mask=traced > 0 if mask else None)
            own.add(fm.Budget(u, 1 if mask else traced))
            return own.solve().objective

        with pytest.raises(fm.GraphError, match="is traced by JAX, but the scores are NumPy"):
            jax.jit(run)(1)
    assert u[jnp.array([1, 0])].index.tolist() == [[3, 4, 5], [0, 1, 2]]


# ---- Transformations that take a function apart --------------------------------------------------


def pieces(eta, transitions):
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    fg.add(fm.Sequence(u, transitions))
    fg.add(fm.AtMostOne(u[:, 0]))
    fg.solve(tol=1e-10)
    return u.value


def test_scan_and_checkpoint():
    etas, transitions = jnp.asarray(random(3, 3, 4)), jnp.asarray(random(4, 4, seed=1))

    def looped(etas, transitions):
        carry = jnp.zeros((3, 4))
        for eta in etas:
            carry = pieces(eta + carry, transitions)
        return jnp.sum(carry**2)

    def scanned(etas, transitions):
        def step(carry, eta):
            return jax.checkpoint(pieces)(eta + carry, transitions), None

        return jnp.sum(jax.lax.scan(step, jnp.zeros((3, 4)), etas)[0] ** 2)

    exact = jax.grad(looped, argnums=(0, 1))(etas, transitions)
    for own, wanted in zip(
        jax.jit(jax.grad(scanned, argnums=(0, 1)))(etas, transitions), exact, strict=True
    ):
        np.testing.assert_allclose(own, wanted, atol=1e-9)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, factormax as fm
from jax.sharding import Mesh, PartitionSpec as P
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map

def values(eta, pairs):
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta, mask=np.array([True, True, False]))
    fg.add(fm.Budget(u, 2))
    fg.add(fm.Pair(u[0], u[1], pairs))
    fg.solve()
    return u.value

mesh = Mesh(np.array(jax.devices()), ("rows",))
apart = shard_map(values, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))
eta, pairs = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 3)), jnp.float32), 0.5
assert len(jax.devices()) == 2
np.testing.assert_allclose(apart(eta, pairs), values(eta, pairs), atol=1e-6)
grads = [jax.jit(jax.grad(lambda e, p, f=f: (f(e, p) ** 2).sum(), argnums=(0, 1)))(eta, pairs)
         for f in (apart, values)]
for own, exact in zip(*grads):
    np.testing.assert_allclose(own, exact, atol=1e-5)
"""


def test_shard_map():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SHARDED], check=True, env={**os.environ, **flags})


def test_jax_is_imported_when_it_is_used():
    code = "import sys, factormax as fm; fm.FactorGraph(); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


EXPORTED = """
import sys, numpy as np
import factormax.jax
from jax import export
given = np.load(sys.argv[1])
for name in ("rows", "tree"):
    function = export.deserialize(bytearray(given[name]))
    np.testing.assert_allclose(function.call(given["eta"]), given[name + "_value"], atol=1e-6)
    pulled = function.vjp().call(given["eta"], given["grad"])[0]
    np.testing.assert_allclose(pulled, given[name + "_grad"], atol=1e-5)
assert "torch" not in sys.modules
"""


def test_export(tmp_path):
    if factormax.jax.ffi_unavailable():
        with pytest.raises(fm.FactormaxError, match="can't be exported"):
            factormax.jax.export_checks()
        pytest.skip(factormax.jax.ffi_unavailable())
    pytest.importorskip("flatbuffers", reason="jax.export needs it to save a function")
    from jax import export

    eta, grad = random(2, 4, 4).astype(np.float32), random(2, 4, 4, seed=1).astype(np.float32)
    saved = {"eta": eta, "grad": grad}

    def rows(eta):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta, mask=np.arange(4) < 3)
        fg.add(fm.Knapsack(u, np.arange(16).reshape(4, 4) / 16, 1.5))
        fg.add(fm.Xor(u[[0, 2, 3]], axis=1))
        fg.add(fm.Pair(u[0], u[1], 0.5))  # shared, but divided by a temperature per instance
        fg.add(fm.Pair(u[1], u[2], eta[:, 3]))
        fg.solve(temperature=np.array([0.5, 2]))
        return u.value

    def tree(eta):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta)
        fg.add(fm.DepTree(u))
        fg.add(fm.Budget(u[:, 1], np.array([[1], [2]])[:, 0]))
        fg.solve()
        return u.value

    for function in (rows, tree):
        checks = factormax.jax.export_checks()
        made = export.export(jax.jit(function), disabled_checks=checks)(eta)
        value, pull_back = jax.vjp(function, jnp.asarray(eta))
        name = function.__name__
        saved[name] = np.frombuffer(made.serialize(vjp_order=1), np.uint8)
        saved[name + "_value"], saved[name + "_grad"] = value, pull_back(jnp.asarray(grad))[0]
    np.savez(tmp_path / "saved.npz", **saved)
    subprocess.run([sys.executable, "-c", EXPORTED, str(tmp_path / "saved.npz")], check=True)


@pytest.mark.parametrize("buffers", [False, True])
def test_calls_by_way_of_python(monkeypatch, buffers):
    """Where the core was built without the headers of a jaxlib."""
    monkeypatch.setattr(primitives.ffi, "lowering", lambda *_: None)
    if not buffers:
        monkeypatch.setattr(primitives, "_buffer_callback", None)
    for name in ("Pair", "Sequence"):
        x = 0.4 * random(SIZE)
        both = jax.jit(jax.value_and_grad(lambda x, n=name: jnp.sum(values_of(n, x) ** 2)))
        value, grad = both(x)
        exact = jax.value_and_grad(lambda x, n=name: jnp.sum(values_of(n, x) ** 2))(jnp.asarray(x))
        np.testing.assert_allclose(value, exact[0], atol=1e-12)
        np.testing.assert_allclose(grad, exact[1], atol=1e-9)


def test_a_function_stays_the_same_while_another_is_compiled():
    """Its derivative would not find its solution, and would solve again."""
    if ffi.unavailable():
        pytest.skip(ffi.unavailable())
    x, found = jnp.asarray(random(SIZE)), []
    for _ in range(2):
        jax.jit(lambda x: values_of("Sequence", x))(x).block_until_ready()
        found.append(set(map(id, ffi._plans._found.values())))
    assert found[0] == found[1]


def test_the_core_alone_answers_like_python(monkeypatch):
    """Where it can't, it writes nothing, and Python does."""

    def squares(eta, mask):
        fg = fm.FactorGraph()
        u = fg.variable_from(eta, mask=mask)
        fg.add(fm.Xor(u))
        fg.add(fm.Pair(u[0], u[1], 0.1))
        fg.solve()
        return jnp.sum(u.value**2)

    eta = random(3, 4)
    mask = np.ones((3, 4), bool)
    mask[:2, 2] = mask[2, 1] = False
    special = eta.copy()
    special[0, 0], special[1, 1] = -np.inf, np.nan
    monkeypatch.setattr(primitives.ffi, "lowering", lambda *_: None)
    found = []
    for natively in (True, False):
        if not natively:
            monkeypatch.setattr(plan.Plan, "native", None)
        function = jax.jit(jax.vmap(jax.value_and_grad(lambda e, m: squares(e, m))))
        found.append([function(e, m) for e in (eta, special) for m in (mask, mask | True)])
    for own, exact in zip(jax.tree.leaves(found[0]), jax.tree.leaves(found[1]), strict=True):
        np.testing.assert_array_equal(own, exact)
    assert np.isnan(found[0][2][0]).tolist() == [False, True, False]


def test_the_core_alone_turns_down_arrays_that_do_not_fit():
    model, settings = fm._core.Model(4, []), fm._core.Settings()
    native = fm._core.NativePlan(model, settings, [], False)

    def arrays(dtype=np.float64, batch=2):
        shapes = [(batch, 4), (batch, 0), (batch, 1), (batch, 0), (batch, 5), (batch, 5)]
        kinds = [dtype, dtype, dtype, dtype, np.int8, dtype]
        places = [np.zeros(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
        return [np.full((2, 4), 0.5), np.zeros((1, 0))], places

    given, places = arrays()
    assert native.solve(given, places)
    np.testing.assert_array_equal(places[0], np.full((2, 4), 0.5))
    assert not native.solve([given[0][:, ::-1], given[1]], places)
    assert not native.solve(given[:1], places)
    assert not native.solve(given, places[:5])
    assert not native.solve(*arrays(dtype=np.float32))
    assert not native.solve(*arrays(batch=3))
    assert not native.apply_jacobian(given, places)
    places[0].setflags(write=False)
    assert not native.solve(given, places)
    with pytest.raises(ValueError, match="one for each parameter"):
        fm._core.NativePlan(model, settings, [1.0], False)


def test_a_graph_that_the_core_forgot_comes_again():
    if factormax.jax.ffi_unavailable():
        pytest.skip(factormax.jax.ffi_unavailable())
    function, calls = jax.jit(sparsemax), []
    eta = jnp.asarray(random(4))
    exact = function(eta)
    another = fm._core.NativePlan(fm._core.Model(1, []), fm._core.Settings(), [], False)
    for k in range(256):  # as many as it keeps
        fm._core.ffi_keep(f"another {k}", another)
    fm._core.ffi_set_python(lambda name, *rest: (calls.append(name), ffi._call(name, *rest)))
    try:
        for _ in range(3):
            np.testing.assert_array_equal(function(eta), exact)
    finally:
        fm._core.ffi_set_python(ffi._call)
    assert calls == ["solve"]


def test_headers_that_are_too_new_are_refused(monkeypatch):
    for built, running, works in [
        ("0.10.2", "0.10.2", True),
        ("0.10.2", "0.11.0", True),
        ("0.10.2", "0.9.2", False),
        ("0.7.2", "0.4.38", True),
        ("", "0.10.2", False),
    ]:
        monkeypatch.setattr(ffi._core, "ffi_version", lambda v=built: v)
        monkeypatch.setattr(
            ffi, "import_module", lambda _, v=running: SimpleNamespace(__version__=v)
        )
        assert (ffi.unavailable() == "") == works


def test_torch_is_compiled_beside_jax():
    torch = pytest.importorskip("torch")

    def values(eta, costs):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta, mask=torch.tensor([True, True, False]))
        fg.add(fm.Knapsack(u, costs, 1.0))
        fg.add(fm.Pair(u[0], u[1], 0.5))
        fg.solve(temperature=2.0)
        return u.value

    eta, costs = torch.tensor(random(2, 3)), torch.ones(3)
    compiled = torch.compile(values, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(eta, costs), values(eta, costs))
