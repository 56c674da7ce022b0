"""Surrogate gradients of LP-MAP against their definitions; SPIGOT's projection by an exact QP."""

from dataclasses import replace

import numpy as np
import oracle
import pytest
from exact import SCALES, SMALL, linear_program, random_mixture, random_rows, without_some
from oracle import Infeasible, Problem
from problems import ALL
from test_structured import MIXTURES, Mixture

import factormax as fm

EXACT = 1e-6  # of a projection with the default options
SURROGATES = (None, "straight-through", "spigot")


def projected(mixture: Mixture, point) -> np.ndarray:
    """The nearest point of the polytope; absent variables stay 0."""
    problem = mixture.problem()
    terms = [
        replace(t, scores=np.where(np.isneginf(t.scores), -np.inf, 0.0))
        if t.kind == "Structured"
        else t
        for t in problem.terms
        if t.kind != "Pair"  # without a score it bounds nothing
    ]
    gone = np.isneginf(problem.eta)
    return oracle.solve(Problem(np.where(gone, -np.inf, point), tuple(terms))).mu


def assert_spigot(mixture: Mixture, rng, size=1.0):
    answer = mixture.built()
    solution = answer.fg.solve_map(surrogate="spigot")
    mu, grad = answer.u.value, size * rng.normal(size=mixture.n)
    ours = solution.vjp({answer.u: grad})[answer.u]
    np.testing.assert_allclose(ours, mu - projected(mixture, mu - grad), rtol=0, atol=EXACT)


def draw_graph(rng, k) -> Mixture:
    scale = SCALES[k % 5]
    if k % 3 == 0:
        return random_rows(rng, ALL, scale)
    case = SMALL[list(SMALL)[k % len(SMALL)]]
    return random_mixture(rng, [case], n=9, factors=k % 4, scale=scale)


# SPIGOT -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_spigot(size):
    rng = np.random.default_rng(0)
    for k in range(30):
        assert_spigot(draw_graph(rng, k), rng, size)


@pytest.mark.slow
def test_spigot_of_many_graphs():
    rng = np.random.default_rng(1)
    for k in range(1000):
        assert_spigot(draw_graph(rng, k), rng, (0.1, 1.0, 10.0)[k % 3])


@pytest.mark.parametrize("name", MIXTURES)
def test_spigot_of_mixtures(name):
    rng = np.random.default_rng(2)
    for scale in (0.3, 3.0):
        assert_spigot(MIXTURES[name].drawn(rng, scale), rng)


def test_spigot_with_absent_variables():
    """By a mask and by −inf: their gradient is 0."""
    rng = np.random.default_rng(3)
    found = 0
    for k in range(60):
        model = without_some(draw_graph(rng, k), rng)
        if model is None:
            continue
        try:
            linear_program(model.problem())
        except Infeasible:
            continue
        found += 1
        answer = model.built()
        solution = answer.fg.solve_map(surrogate="spigot")
        mu, grad, gone = answer.u.value, rng.normal(size=model.n), np.isneginf(model.eta)
        ours = solution.vjp({answer.u: grad})[answer.u]
        assert not ours[gone].any()
        np.testing.assert_allclose(ours, mu - projected(model, mu - grad), rtol=0, atol=EXACT)
    assert found >= 15


def test_a_mask_is_minus_infinity():
    rng = np.random.default_rng(4)
    eta, mask = rng.normal(size=(5, 4, 4)), rng.random((5, 4, 4)) < 0.8
    mask |= np.eye(4, dtype=bool)
    grad = rng.normal(size=eta.shape)
    for surrogate in SURROGATES:
        found = []
        for scores, given in ((eta, mask), (np.where(mask, eta, -np.inf), None)):
            fg = fm.FactorGraph(batch_dims=1)
            u = fg.variable_from(scores, mask=given)
            fg.add(fm.Matching(u))
            fg.add(fm.Budget(u[:2, :2], 1))
            solution = fg.solve_map(surrogate=surrogate)
            found.append(solution.vjp({u: grad})[u])
        np.testing.assert_array_equal(*found)
        assert not found[0][~mask].any()


def test_spigot_keeps_to_what_is_allowed():
    """Transitions of −inf bound the polytope, and so the projection."""
    rng = np.random.default_rng(5)
    for _ in range(10):
        mixture = MIXTURES["sequence_and_at_most_one"].drawn(rng)
        mixture.own[0]["transitions"][rng.random((3, 3)) < 0.3] = -np.inf
        try:
            linear_program(mixture.problem())
        except Infeasible:
            continue
        assert_spigot(mixture, rng)
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([[1.0, 0.0], [0.0, 0.5]]))
    fg.add(fm.Sequence(u, np.array([[0.0, -np.inf], [0.0, 0.0]])))
    solution = fg.solve_map(surrogate="spigot")
    np.testing.assert_array_equal(u.value, [[1, 0], [1, 0]])
    ours = solution.vjp({u: np.array([[0.0, 0.0], [1.0, -1.0]])})[u]
    # From 00 halfway to 11: nothing leads from 0 to 1.
    np.testing.assert_allclose(ours, [[0.5, -0.5], [0.5, -0.5]], atol=EXACT)


def test_spigot_by_hand():
    """One of three: the simplex; in no factor: the box; pairs do not bound anything."""
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([2.0, 1.0, 0.0]))
    v = fg.variable_from(np.array([1.0, -1.0]))
    fg.add(fm.Xor(u))
    fg.add(fm.Pair(v[0], v[1], 0.5))
    solution = fg.solve_map(surrogate="spigot")
    grad = {u: np.array([0.3, -0.3, 0.0]), v: np.array([0.4, -3.0])}
    out = solution.vjp(grad)
    np.testing.assert_allclose(out[u], [0.3, -0.3, 0.0], atol=EXACT)
    np.testing.assert_allclose(out[v], [0.4, -1.0], atol=EXACT)
    out = solution.vjp({u: np.array([-5.0, 0.0, 0.0])})  # further in the same direction
    np.testing.assert_allclose(out[u], 0, atol=EXACT)


def test_no_gradient_gives_none():
    rng = np.random.default_rng(6)
    for name in MIXTURES:
        answer = MIXTURES[name].drawn(rng).built()
        for surrogate in SURROGATES:
            solution = answer.fg.solve_map(surrogate=surrogate)
            out = solution.vjp({answer.u: np.zeros(answer.mixture.n)})[answer.u]
            np.testing.assert_allclose(out, 0, atol=2e-6)


# Straight-through, and none -----------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_straight_through_hands_the_gradient_on(name):
    rng = np.random.default_rng(7)
    answer = MIXTURES[name].drawn(rng).built()
    solution = answer.fg.solve_map(surrogate="straight-through")
    factors = [f for f in [*answer.structured, *answer.pairs] if f._score_parts]
    grads = {answer.u: rng.normal(size=answer.mixture.n)}
    grads |= {f: rng.normal(size=np.shape(f.value)) for f in factors}
    out = solution.vjp(grads)
    for key, grad in grads.items():
        np.testing.assert_array_equal(out[key], grad)


def test_straight_through_with_absent_variables():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([1.0, 2.0, -np.inf]), mask=np.array([True, False, True]))
    fg.add(fm.AtMostOne(u))
    solution = fg.solve_map(surrogate="straight-through")
    np.testing.assert_array_equal(solution.vjp({u: np.ones(3)})[u], [1, 0, 0])


@pytest.mark.parametrize("name", MIXTURES)
def test_the_true_gradient_is_zero(name):
    rng = np.random.default_rng(8)
    answer = MIXTURES[name].drawn(rng).built()
    solution = answer.fg.solve_map()
    factors = [f for f in [*answer.structured, *answer.pairs] if f._score_parts]
    grads = {answer.u: rng.normal(size=answer.mixture.n)}
    grads |= {f: rng.normal(size=np.shape(f.value)) for f in factors}
    for grad in solution.vjp(grads).values():
        assert not np.any(grad)


# Together with the rest ---------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_beside_the_gradient_of_the_value(surrogate):
    rng = np.random.default_rng(9)
    answer = MIXTURES["structured_and_pairs"].drawn(rng).built()
    solution = answer.fg.solve_map(surrogate=surrogate)
    grad = {answer.u: rng.normal(size=8)}
    alone, both = solution.vjp(grad), solution.vjp(grad, objective=3.0)
    np.testing.assert_allclose(both[answer.u], alone[answer.u] + 3 * answer.u.value, atol=1e-12)
    sequence = answer.structured[0]
    np.testing.assert_allclose(both[sequence], alone[sequence] + 3 * sequence.value, atol=1e-12)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_the_answer_is_the_same(surrogate):
    answer = MIXTURES["tree_and_budgets"].drawn(np.random.default_rng(10)).built()
    plain = answer.fg.solve_map()
    value = answer.u.value
    other = answer.fg.solve_map(surrogate=surrogate)
    np.testing.assert_array_equal(answer.u.value, value)
    assert other.objective == plain.objective


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_slices_and_negation(surrogate):
    rng = np.random.default_rng(11)
    fg = fm.FactorGraph()
    u = fg.variable_from(rng.normal(size=(3, 3)))
    fg.add(fm.Matching(u))
    solution = fg.solve_map(surrogate=surrogate)
    whole = np.zeros((3, 3))
    whole[0], whole[1, 2] = [1.0, -2.0, 0.5], -3.0
    parts = solution.vjp({u[0]: whole[0], ~u[1, 2]: np.array(3.0)})[u]
    np.testing.assert_array_equal(parts, solution.vjp({u: whole})[u])


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_batch_is_a_loop(surrogate):
    rng = np.random.default_rng(12)
    for name in ("grid_of_chains", "custom_and_builtin", "tree_budgets_and_logic"):
        many = [MIXTURES[name].drawn(rng) for _ in range(5)]
        for m in many[1:]:
            m.terms = many[0].terms
        own = [
            {n: np.stack([m.own[f][n] for m in many]) for n in o} for f, o in enumerate(many[0].own)
        ]
        batch = many[0].built(np.stack([m.eta for m in many]), own, batch_dims=1)
        solution = batch.fg.solve_map(surrogate=surrogate)
        grad = rng.normal(size=(5, many[0].n))
        ours = solution.vjp({batch.u: grad})[batch.u]
        for row, m in enumerate(many):
            alone = m.built()
            single = alone.fg.solve_map(surrogate=surrogate)
            np.testing.assert_array_equal(ours[row], single.vjp({alone.u: grad[row]})[alone.u])


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_an_infeasible_instance_has_no_gradient(surrogate):
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.array([[1.0, 0.0, 0.5], [1.0, 0.0, 0.5]]))
    fg.add(fm.Xor(u))
    fg.add(fm.AtLeast(u, np.array([1, 2])))
    solution = fg.solve_map(surrogate=surrogate, on_failure="ignore")
    assert list(solution.status) == [fm.Status.CONVERGED, fm.Status.INFEASIBLE]
    grad = np.array([[0.5, -0.5, 0.0]] * 2)
    out = solution.vjp({u: grad}, objective=1.0)[u]
    assert np.isfinite(out).all() and not out[1].any()
    if surrogate is not None:
        np.testing.assert_allclose(out[0], u.value[0] + grad[0], atol=EXACT)


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("name", MIXTURES)
def test_torch(name, surrogate):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(13)
    mixture = MIXTURES[name].drawn(rng)
    grad = rng.normal(size=mixture.n)
    answer = mixture.built()
    expected = answer.fg.solve_map(surrogate=surrogate).vjp({answer.u: grad})[answer.u]
    eta = torch.tensor(mixture.eta, requires_grad=True)
    tensors = mixture.built(eta)
    tensors.fg.solve_map(surrogate=surrogate)
    value = tensors.u.value
    if value.requires_grad:
        (value * torch.tensor(grad)).sum().backward()
    ours = np.zeros(mixture.n) if eta.grad is None else eta.grad.numpy()
    np.testing.assert_array_equal(ours, expected)


def test_torch_of_factor_scores():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(14)
    eta, transitions = (
        torch.tensor(rng.normal(size=s), requires_grad=True) for s in [(3, 2), (2, 2)]
    )
    for surrogate in SURROGATES:
        eta.grad = transitions.grad = None
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        factor = fg.add(fm.Sequence(u, transitions))
        fg.solve_map(surrogate=surrogate)
        factor.value.sum().backward()
        found = 0 if transitions.grad is None else transitions.grad
        if surrogate == "straight-through":
            torch.testing.assert_close(found, torch.ones(2, 2).double())
        elif surrogate is None:
            assert not np.any(np.asarray(found))


@pytest.mark.parametrize("surrogate", ["straight-through", "spigot"])
def test_float32(surrogate):
    torch = pytest.importorskip("torch")
    eta = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    fg.add(fm.Matching(u))
    fg.solve_map(surrogate=surrogate)
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    (u.value * weight).sum().backward()
    assert eta.grad.dtype == torch.float32
    fg = fm.FactorGraph()
    v = fg.variable_from(eta.detach().numpy().astype(float))
    fg.add(fm.Matching(v))
    wide = fg.solve_map(surrogate=surrogate).vjp({v: weight.numpy().astype(float)})[v]
    np.testing.assert_allclose(eta.grad.numpy(), wide, rtol=0, atol=1e-5)


def test_spigot_learns_latent_structure():
    """Steps along the surrogate gradient lead to the structure that the loss wants."""
    torch = pytest.importorskip("torch")
    wanted = torch.eye(4)[[2, 0, 3, 1]]
    for surrogate in ("straight-through", "spigot"):
        generator = torch.Generator().manual_seed(2)
        eta = torch.randn(4, 4, generator=generator, requires_grad=True)
        for _ in range(60):
            fg = fm.FactorGraph()
            u = fg.variable_from(eta)
            fg.add(fm.Matching(u))
            fg.solve_map(surrogate=surrogate)
            loss = 0.5 * ((u.value - wanted) ** 2).sum()
            (grad,) = torch.autograd.grad(loss, eta)
            with torch.no_grad():
                eta -= 0.3 * grad
        assert loss.item() == 0


def test_an_own_factor_is_projected_onto_too():
    """Its oracle is asked again in the backward pass, after other queries of the graph."""
    rng = np.random.default_rng(15)
    mixture = random_mixture(rng, [SMALL["listed sequence"]], n=8, factors=2)
    answer = mixture.built()
    solution = answer.fg.solve_map(surrogate="spigot")
    mu, grad = answer.u.value, rng.normal(size=8)
    answer.fg.solve()
    ours = solution.vjp({answer.u: grad})[answer.u]
    np.testing.assert_allclose(ours, mu - projected(mixture, mu - grad), rtol=0, atol=EXACT)
