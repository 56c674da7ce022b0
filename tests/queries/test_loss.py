"""Losses: their definitions by enumeration, HiGHS and an exact QP; gradients; targets."""

from dataclasses import replace

import numpy as np
import oracle
import pytest
from exact import (
    SCALES,
    SMALL,
    feasible,
    linear_program,
    random_mixture,
    random_rows,
    score_of,
    with_large_features,
    without_some,
)
from oracle import Problem, Structured, Term
from problems import ALL
from test_structured import MIXTURES, Mixture

import factormax as fm

KINDS = ("sparsemap", "perceptron", "hinge")
TIGHT = {"tol": 1e-10, "max_iter": 20_000}
VALUE = 1e-6  # relative, with the default options
EXACT = 1e-8


# Definitions --------------------------------------------------------------------------------------


def held(problem: Problem, y, known) -> Problem:
    """The same with the known variables held at the target."""
    terms = [
        Term("Xor", (j,)) if y[j] else Term("Budget", (j,), params={"budget": 0})
        for j in np.flatnonzero(known & ~np.isneginf(problem.eta))
    ]
    return Problem(problem.eta, (*problem.terms, *terms))


def best_value(problem: Problem, kind: str) -> float:
    if kind == "sparsemap":
        return oracle.solve(problem).objective
    return linear_program(problem)


def exact_loss(problem: Problem, y, kind: str, cost=1.0, known=None) -> float:
    """By definition. A cost is of `hinge`, and counts where the target is known."""
    there = ~np.isneginf(problem.eta)
    y = np.where(there, y, 0)
    if known is None:
        target = score_of(problem, y[None])[0] - 0.5 * y @ y * (kind == "sparsemap")
    else:
        target = best_value(held(problem, y, known), kind)
    if kind != "hinge":
        return best_value(problem, kind) - target
    cost = np.broadcast_to(cost, y.shape) * there
    if known is not None:
        cost = cost * known
    return linear_program(problem.with_eta(problem.eta + cost * (1 - 2 * y))) + cost @ y - target


def a_target(problem: Problem, rng) -> np.ndarray:
    """A random assignment that satisfies all factors; one of zeros where variables are absent."""
    gone = np.isneginf(problem.eta)
    choices = feasible(problem)
    choices = choices[~choices[:, gone].any(axis=1)]
    return choices[rng.integers(len(choices))]


def features_of(term: Structured, y) -> np.ndarray:
    """What a structured factor's scores are multiplied by at y: of its best structure."""
    same = (term.M == np.asarray(y)[list(term.vars), None]).all(axis=0)
    used = np.where(same, term.scores @ term.N, -np.inf)
    return term.N[:, used.argmax()]


def draw_graph(rng, k) -> Mixture:
    names = list(SMALL)
    scale = SCALES[k % 5]
    if k % 3 == 0:
        return random_rows(rng, ALL, scale)
    return random_mixture(rng, [SMALL[names[k % len(names)]]], n=9, factors=k % 4, scale=scale)


# Values -------------------------------------------------------------------------------------------


def check_values(kind, seed, count):
    rng = np.random.default_rng(seed)
    for k in range(count):
        mixture = draw_graph(rng, k)
        problem = mixture.problem()
        y = a_target(problem, rng)
        answer = mixture.built()
        loss = answer.fg.loss({answer.u: y}, kind)
        exact = exact_loss(problem, y, kind)
        size = 1 + abs(exact) + np.abs(problem.eta).max()
        assert np.shape(loss) == () and loss >= 0
        assert abs(loss - exact) <= VALUE * size, k


@pytest.mark.parametrize("kind", KINDS)
def test_values(kind):
    check_values(kind, seed=0, count=60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_values(kind):
    check_values(kind, seed=1, count=1000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [n for n in MIXTURES if n != "three_on_a_variable"])
def test_mixtures(name, kind):
    """All but one, of which no structure exists."""
    rng = np.random.default_rng(2)
    mixture = MIXTURES[name].drawn(rng)
    problem = mixture.problem()
    y = a_structure(mixture, rng)
    answer = mixture.built()
    loss = answer.fg.loss({answer.u: y}, kind, **TIGHT)
    assert abs(loss - exact_loss(problem, y, kind)) <= EXACT * (1 + abs(loss))
    if kind == "sparsemap":
        np.testing.assert_allclose(answer.u.value, oracle.solve(problem).mu, rtol=0, atol=1e-7)


def a_structure(mixture: Mixture, rng) -> np.ndarray:
    """A feasible assignment, too many variables to list them all: the best for random scores."""
    answer = mixture.drawn(rng).built()
    assert answer.fg.decode().optimal
    return answer.u.value.astype(int)


def test_sparsemap_by_hand():
    """Two variables, exactly one on: μ₀ = clip((1 + s₀ − s₁) / 2)."""
    for gap in (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0):
        fg = fm.FactorGraph()
        u = fg.variable_from(np.array([gap, 0.0]))
        fg.add(fm.Xor(u))
        mu = np.clip((1 + gap) / 2, 0, 1)
        expected = gap * mu - 0.5 * (mu**2 + (1 - mu) ** 2) - (gap - 0.5)
        loss = fg.loss({u: np.array([1, 0])}, **TIGHT)
        assert loss == pytest.approx(expected, abs=EXACT)
        assert u.value[0] == pytest.approx(mu, abs=EXACT)


def test_a_variable_in_no_factor():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([2.0, 0.5, -1.0]))
    assert fg.loss({u: np.array([1, 1, 0])}) == pytest.approx(0.125, abs=1e-12)
    assert fg.loss({u: np.array([0, 1, 1])}, "perceptron") == pytest.approx(3.0)
    assert fg.loss({u: np.array([1, 1, 0])}, "hinge") == pytest.approx(0.5)


# The margin ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_the_margin_of_a_lone_factor(name):
    """0 just where s(y) − s(z) ≥ y·(y − z) for all others z: ½|y − z|² if they are of one size."""
    case = SMALL[name]
    rng = np.random.default_rng([3, list(SMALL).index(name)])
    for _ in range(5):
        eta, own = case.draw(rng)
        scores = eta.reshape(-1) @ case.M + case.flat(own) @ case.N
        y = int(scores.argmax())
        needed = case.M[:, y] @ (case.M[:, [y]] - case.M)
        ahead = scores[y] - scores
        others = np.arange(len(scores)) != y
        # The scores are scaled until the margin just holds.
        edge = np.max(needed[others] / ahead[others], initial=0.0)
        target = case.M[:, y].reshape(case.shape)
        for factor, is_zero in [(0.9, False), (0.999, False), (1.000001, True), (3.0, True)]:
            if edge == 0:
                continue
            scale = edge * factor
            fg = fm.FactorGraph()
            u = fg.variable_from(scale * eta)
            fg.add(case.make(u, **{k: scale * v for k, v in own.items()}))
            loss = fg.loss({u: target})
            assert (loss <= 1e-12) == is_zero, (factor, loss)
            assert (np.abs(u.value - target).max() <= 1e-9) == is_zero


def test_the_margin_of_a_wrong_answer():
    """Any other structure as the target loses at least its distance to the margin."""
    rng = np.random.default_rng(4)
    for case in SMALL.values():
        eta, own = case.draw(rng, 3.0)
        scores = eta.reshape(-1) @ case.M + case.flat(own) @ case.N
        for y in range(case.M.shape[1]):
            fg = fm.FactorGraph()
            u = fg.variable_from(eta)
            fg.add(case.make(u, **own))
            loss = fg.loss({u: case.M[:, y].reshape(case.shape)})
            lead = scores - scores[y] - 0.5 * (case.M**2).sum(axis=0) + 0.5 * case.M[:, y].sum()
            assert loss >= lead.max() - EXACT
            assert loss >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_zero_where_the_scores_favour_the_target(kind):
    """Scores of 2y − 1 reach the margin exactly, whatever the factors."""
    rng = np.random.default_rng(5)
    for k in range(20):
        mixture = draw_graph(rng, 5 * k)
        own = [{n: np.zeros_like(v) for n, v in o.items()} for o in mixture.own]
        terms = tuple(replace(t, scores=0.0) if t.kind == "Pair" else t for t in mixture.terms)
        y = a_target(replace(mixture, terms=terms, own=own).problem(), rng)
        for size in (1.0, 5.0):
            model = replace(mixture, eta=size * (2.0 * y - 1), terms=terms, own=own)
            answer = model.built()
            assert answer.fg.loss({answer.u: y}, kind) <= VALUE * (1 + size * len(y))
            if size > 1 or kind == "perceptron":
                np.testing.assert_allclose(answer.u.value, y, rtol=0, atol=1e-6)


def test_hinge_needs_the_cost_as_a_margin():
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.array([[2.1, 0, 0], [1.9, 0, 0], [2.0, 0, 0]]))
    fg.add(fm.Xor(u))
    loss = fg.loss({u: np.array([1, 0, 0])}, "hinge", **TIGHT)
    np.testing.assert_allclose(loss, [0, 0.1, 0], atol=EXACT)


# Costs --------------------------------------------------------------------------------------------


def test_costs():
    """A number, an array, a dict of either; the Hamming cost by default."""
    rng = np.random.default_rng(6)
    for k in range(10):
        mixture = draw_graph(rng, 5 * k + 1)
        problem = mixture.problem()
        y, n = a_target(problem, rng), mixture.n
        costs = rng.uniform(0, 3, n)
        half = np.r_[costs[: n // 2], np.ones(n - n // 2)]
        answer = mixture.built()
        u = answer.u
        for given, meant in [
            (None, 1.0),
            (0.0, 0.0),
            (2.5, 2.5),
            (costs, costs),
            ({u: costs}, costs),
            ({u: 0.5}, 0.5),
            ({u[: n // 2]: costs[: n // 2]}, half),
            ({u[: n // 2]: costs[: n // 2], u[n // 2 :]: 1.0}, half),
        ]:
            loss = answer.fg.loss({u: y}, "hinge", cost=given, **TIGHT)
            exact = exact_loss(problem, y, "hinge", meant)
            assert abs(loss - exact) <= EXACT * (1 + abs(exact))
        no_cost = answer.fg.loss({u: y}, "hinge", cost=0.0, **TIGHT)
        assert no_cost == answer.fg.loss({u: y}, "perceptron", **TIGHT)


def test_a_cost_for_each_instance():
    rng = np.random.default_rng(7)
    eta, costs = rng.normal(size=(4, 3)), rng.uniform(0, 2, (4, 3))
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta)
    fg.add(fm.AtMostOne(u))
    y = np.array([0, 1, 0])
    term = Term("AtMostOne", range(3))
    for given in (costs, costs[:, :1], costs[0]):
        loss = fg.loss({u: y}, "hinge", cost=given, **TIGHT)
        full = np.broadcast_to(given, (4, 3))
        for row in range(4):
            exact = exact_loss(Problem(eta[row], (term,)), y, "hinge", full[row])
            assert abs(loss[row] - exact) <= EXACT


# Masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["mask", "minus infinity"])
def test_absent_variables(kind, way):
    """They cost nothing, and a target must not switch them on."""
    rng = np.random.default_rng(8)
    found = 0
    for k in range(60):
        model = without_some(draw_graph(rng, 5 * k + 1 + k % 2), rng)
        if model is None:
            continue
        problem, gone = model.problem(), np.isneginf(model.eta)
        if not (feasible(problem) <= ~gone).all(axis=1).any():
            continue
        found += 1
        y = a_target(problem, rng)
        if way == "mask":
            fg = fm.FactorGraph()
            u = fg.variable_from(np.where(gone, 7.0, model.eta), mask=~gone)
            add_factors(model, fg, u)
        else:
            answer = model.built()
            fg, u = answer.fg, answer.u
        loss = fg.loss({u: y}, kind, **TIGHT)
        exact = exact_loss(problem, y, kind)
        assert abs(loss - exact) <= EXACT * (1 + abs(exact))
        assert not u.value[gone].any()
        why = "which is masked" if way == "mask" else "whose score is -inf"
        first = np.flatnonzero(gone)[0]
        with pytest.raises(fm.GraphError, match=rf"target is on at \w+\[{first}\], {why}\.$"):
            fg.loss({u: np.where(gone, 1, y)}, kind)
        assert fg.loss({u: np.where(gone, 1, y)}, kind, mask=~gone) <= loss + 1e-6
    assert found >= 15


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("library", ["numpy", "torch", "transform"])
def test_a_target_that_is_on_where_a_variable_is_masked(kind, library):
    mask, y = np.ones((2, 2, 3), bool), np.zeros((2, 2, 3))
    mask[1, 1], y[:, :, 2] = False, 1

    def loss(scores, target):
        fg = fm.FactorGraph(batch_dims=1)
        role = fg.variable_from(scores, mask=mask, name="role")
        fg.add(fm.Xor(role, axis=1))
        return fg.loss({role: target}, kind).sum()

    scores = np.zeros((2, 2, 3))
    if library != "numpy":
        torch = pytest.importorskip("torch")
        scores, y = torch.tensor(scores), torch.tensor(y)
        loss = loss if library == "torch" else torch.func.grad(loss)
    message = r"loss: the target of instance \(1,\) is on at role\[1, 2\], which is masked\.$"
    with pytest.raises(fm.GraphError, match=message):
        loss(scores, y)
    y[1, 1, 2] = 0
    loss(scores, y)


def add_factors(model: Mixture, fg, u):
    from graphs import make_factor

    for (case, index), own in zip(model.structured, model.own, strict=True):
        fg.add(case.make(u[index], **own))
    for term in model.terms:
        fg.add(make_factor(term, u))


@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_batch(kind):
    """Each instance as if it were alone; its gradient too."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(9)
    lengths = np.array([4, 2, 1, 3])
    eta, transitions, final = (rng.normal(size=s) for s in ((4, 4, 3), (3, 3), (3,)))
    y = np.eye(3)[rng.integers(0, 3, (4, 4))]

    def loss_of(eta, transitions, final, y, mask):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta, mask=mask)
        fg.add(fm.Sequence(u, transitions, final=final))
        fg.add(fm.SequenceBudget(u[..., 0], 0.5, 4))
        return fg.loss({u: y}, kind, **TIGHT)

    def leaf(array):
        return torch.tensor(array, requires_grad=True)

    together = [leaf(a) for a in (eta, transitions, final)]
    there = (np.arange(4) < lengths[:, None])[..., None]
    losses = loss_of(*together, y * there, there)
    losses.sum().backward()
    totals = [torch.zeros(3, 3), torch.zeros(3)]
    for row, n in enumerate(lengths):
        alone = [leaf(eta[row : row + 1, :n]), leaf(transitions), leaf(final)]
        loss = loss_of(*alone, y[row : row + 1, :n], None)
        assert loss.item() == pytest.approx(losses[row].item(), abs=EXACT)
        loss.sum().backward()
        torch.testing.assert_close(together[0].grad[row, :n], alone[0].grad[0], rtol=0, atol=1e-7)
        assert not together[0].grad[row, n:].any()
        totals = [t + a.grad for t, a in zip(totals, alone[1:], strict=True)]
    for ours, total in zip(together[1:], totals, strict=True):
        torch.testing.assert_close(ours.grad, total, rtol=0, atol=1e-7)


# Partial targets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_partial_targets(kind):
    """The best completion of what is known; what the target holds elsewhere does not matter."""
    rng = np.random.default_rng(10)
    for k in range(30):
        mixture = draw_graph(rng, 5 * k + k % 3)
        problem = mixture.problem()
        y = a_target(problem, rng)
        known = rng.random(len(y)) < 0.5
        given = np.where(known, y, rng.integers(0, 2, y.shape))
        answer = mixture.built()
        loss = answer.fg.loss({answer.u: given}, kind, mask=known, **TIGHT)
        exact = exact_loss(problem, y, kind, known=known)
        size = 1 + abs(exact) + np.abs(mixture.eta).max()
        assert loss >= 0
        assert abs(loss - exact) <= 1e-7 * size, k


def test_a_target_of_which_all_or_nothing_is_known():
    rng = np.random.default_rng(11)
    mixture = MIXTURES["structured_and_pairs"].drawn(rng)
    y = a_target(mixture.problem(), rng)
    answer = mixture.built()
    u = answer.u
    for kind in KINDS:
        whole = answer.fg.loss({u: y}, kind, **TIGHT)
        for mask in (True, np.ones(8, bool), {u: True}, {u[:3]: True}):
            part = answer.fg.loss({u: y}, kind, mask=mask, **TIGHT)
            assert part == pytest.approx(whole, abs=EXACT)
        assert answer.fg.loss({u: y}, kind, mask=False, **TIGHT) <= EXACT


def test_partial_targets_of_a_batch():
    rng = np.random.default_rng(12)
    eta = rng.normal(size=(2, 3, 4))
    y = np.eye(4, dtype=int)[rng.integers(0, 4, (2, 3))]
    known = rng.random((2, 3, 4)) < 0.5
    fg = fm.FactorGraph(batch_dims=2)
    u = fg.variable_from(eta)
    fg.add(fm.Xor(u))
    fg.add(fm.Pair(u[:-1], u[1:], 0.3))
    terms = (Term("Xor", range(4)), *(Term("Pair", (j, j + 1), scores=0.3) for j in range(3)))
    for kind in KINDS:
        loss = fg.loss({u: y}, kind, mask={u: known}, **TIGHT)
        assert loss.shape == (2, 3)
        for at in np.ndindex(2, 3):
            exact = exact_loss(Problem(eta[at], terms), y[at], kind, known=known[at])
            assert loss[at] == pytest.approx(exact, abs=1e-7)


def test_the_gradient_of_a_partial_target():
    torch = pytest.importorskip("torch")
    y = torch.eye(3)
    known = torch.tensor([[True, True, True], [False, False, False], [False, True, False]])

    def value(eta, transitions):
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        fg.add(fm.Sequence(u, transitions))
        fg.add(fm.AtMostOne(u[:, 0]))
        return fg.loss({u: y}, mask=known, **TIGHT)

    for seed in range(3):
        assert torch.autograd.gradcheck(value, (draw(3, 3, seed=seed), draw(3, 3, seed=seed + 9)))


def test_a_known_part_without_completion():
    fg = fm.FactorGraph(batch_dims=2)
    u = fg.variable_from(np.zeros((2, 2, 3)))
    fg.add(fm.Xor(u))
    y = np.zeros((2, 2, 3))
    y[1, 0, :2] = 1
    with pytest.raises(fm.GraphError, match=r"known entries of the target of instance \(1, 0\)"):
        fg.loss({u: y}, mask=np.array([True, True, False]))
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros(3))
    fg.add(fm.Xor(u))
    with pytest.raises(fm.GraphError, match="No completion of the known entries of the target"):
        fg.loss({u: np.array([1, 1, 0])}, "hinge", mask=np.array([True, True, False]))


# Gradients ----------------------------------------------------------------------------------------


def draw(*shape, seed=0, dtype=None):
    import torch

    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=dtype or torch.float64)
    return values.requires_grad_()


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_difference(kind):
    """μ − y, and N p − n_y."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(13)
    for k in range(20):
        mixture = random_mixture(
            rng, [SMALL[list(SMALL)[k % len(SMALL)]]], n=9, factors=k % 3, scale=SCALES[k % 3]
        )
        problem = mixture.problem()
        y = a_target(problem, rng)
        eta = torch.tensor(mixture.eta, requires_grad=True)
        own = [{n: torch.tensor(v, requires_grad=True) for n, v in o.items()} for o in mixture.own]
        answer = mixture.built(eta, own)
        loss = answer.fg.loss({answer.u: y}, kind, **TIGHT)
        (2 * loss).backward()
        mu = answer.u.value.numpy()
        np.testing.assert_allclose(eta.grad.numpy(), 2 * (mu - y), rtol=0, atol=1e-9)
        for factor, term, given, (case, _) in zip(
            answer.structured, problem.structured, own, mixture.structured, strict=True
        ):
            start, n_y = 0, features_of(term, y)
            for name, shape in case.scores.items():
                size = int(np.prod(shape))
                if start == 0:
                    expected = factor.value.numpy() - n_y[:size].reshape(shape)
                    np.testing.assert_allclose(
                        given[name].grad.numpy(), 2 * expected, rtol=0, atol=1e-9
                    )
                start += size
        if kind == "sparsemap":
            exact = oracle.solve(problem)
            np.testing.assert_allclose(mu, exact.mu, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    """In scores, pair scores, transitions and ends, shared and not."""
    torch = pytest.importorskip("torch")
    y = torch.tensor([[[1, 0, 0], [0, 1, 0], [0, 0, 1]], [[0, 1, 0], [1, 0, 0], [1, 0, 0]]])

    def value(eta, transitions, initial, pair, shared):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta)
        fg.add(fm.Sequence(u, transitions, initial=initial))
        fg.add(fm.Budget(u[:, 0], 2))
        fg.add(fm.Pair(u[0], u[2], pair))
        fg.add(fm.Pair(u[1, 0], u[0, 2], shared))
        return fg.loss({u: y}, kind, **TIGHT)

    for seed in range(2):
        shapes = [(2, 3, 3), (3, 3), (3,), (2, 3), ()]
        inputs = tuple(draw(*s, seed=10 * seed + i) for i, s in enumerate(shapes))
        assert torch.autograd.gradcheck(value, inputs)


TREE = np.array([[1, 0, 0], [1, 0, 0], [0, 1, 0]])
CYCLE = np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0]])
LOGIC = np.array([[0, 1, 0], [1, 0, 0], [0, 1, 1]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("build", "y"),
    [
        (lambda u: [fm.DepTree(u), fm.Budget(u[:, 0], 2)], TREE),
        (lambda u: [fm.Matching(u), fm.Nand([u[0, 0], u[1, 1]])], CYCLE),
        (lambda u: [fm.Xor(u, axis=1), fm.AtMostOne(u, axis=0)], CYCLE),
        (lambda u: [fm.Or(u[0]), fm.AndOut([~u[1, 0], u[1, 1], u[1, 2]]), fm.XorOut(u[2])], LOGIC),
        (lambda u: [fm.Knapsack(u, np.ones((3, 3)), 3.5), fm.Imply(u[:, 0])], CYCLE),
    ],
    ids=["tree", "matching", "rows and columns", "logic", "knapsack"],
)
def test_gradcheck_of_scores(build, y, kind):
    torch = pytest.importorskip("torch")

    def value(eta, y):
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        for factor in build(u):
            fg.add(factor)
        return fg.loss({u: y}, kind, **TIGHT)

    for seed in range(2):
        assert torch.autograd.gradcheck(value, (draw(3, 3, seed=seed + 3), y))


def test_weights_of_the_instances():
    torch = pytest.importorskip("torch")
    eta = draw(4, 3)
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta)
    fg.add(fm.Xor(u))
    loss = fg.loss({u: torch.eye(3)[[0, 1, 2, 0]]}, **TIGHT)
    weight = torch.tensor([1.0, -2.0, 0.0, 3.0])
    (loss * weight).sum().backward()
    expected = (u.value - torch.eye(3)[[0, 1, 2, 0]]) * weight[:, None]
    torch.testing.assert_close(eta.grad, expected, rtol=0, atol=1e-12)


def test_training_with_each_loss():
    """Steps along the gradient lead to the target."""
    torch = pytest.importorskip("torch")
    y = torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, 1]])
    for kind in KINDS:
        eta = (draw(3, 3, seed=5) - 2 * y).detach().requires_grad_()
        optimiser = torch.optim.SGD([eta], lr=0.3)
        first = None
        for _ in range(100):
            fg = fm.FactorGraph()
            u = fg.variable_from(eta)
            fg.add(fm.Matching(u))
            loss = fg.loss({u: y}, kind)
            first = loss.item() if first is None else first
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        assert loss.item() <= 1e-3 < first
        fg.solve_map()
        torch.testing.assert_close(u.value, y.double(), rtol=0, atol=1e-6)


# Batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_a_loop(kind):
    rng = np.random.default_rng(14)
    for name in ("structured_and_pairs", "custom_and_builtin", "sequence_and_at_most_one"):
        many = [MIXTURES[name].drawn(rng) for _ in range(6)]
        for m in many[1:]:
            m.terms = many[0].terms
        own = [
            {n: np.stack([m.own[f][n] for m in many]) for n in o} for f, o in enumerate(many[0].own)
        ]
        targets = np.stack([a_structure(m, rng) for m in many])
        batch = many[0].built(np.stack([m.eta for m in many]), own, batch_dims=1)
        loss = batch.fg.loss({batch.u: targets}, kind)
        for row, m in enumerate(many):
            alone = m.built()
            assert loss[row] == alone.fg.loss({alone.u: targets[row]}, kind)
            np.testing.assert_array_equal(batch.u.value[row], alone.u.value)


def test_a_target_that_all_instances_share():
    rng = np.random.default_rng(15)
    fg = fm.FactorGraph(batch_dims=2)
    u = fg.variable_from(rng.normal(size=(2, 3, 4)))
    fg.add(fm.Xor(u))
    y = np.array([0, 0, 1, 0])
    shared = fg.loss({u: y})
    assert shared.shape == (2, 3)
    np.testing.assert_array_equal(shared, fg.loss({u: np.broadcast_to(y, (2, 3, 4))}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [None, False])
def test_no_instances(kind, mask):
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.zeros((0, 3)))
    fg.add(fm.Xor(u))
    assert fg.loss({u: np.zeros((0, 3))}, kind, mask=mask).shape == (0,)


# Targets ------------------------------------------------------------------------------------------


def two_variables():
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.random.default_rng(16).normal(size=(2, 3)))
    v = fg.variable((2,))
    fg.add(fm.Xor(u))
    fg.add(fm.OrOut([u[0], v[0], v[1]]))
    return fg, u, v


def test_ways_to_give_a_target():
    """Slices, lists, booleans, tensors."""
    fg, u, v = two_variables()
    y, z = np.array([[1, 0, 0], [0, 0, 1]]), np.array([[0, 1], [0, 0]])
    expected = fg.loss({u: y, v: z})
    same = [
        {v: z, u: y},
        {u: y.astype(bool), v: z.astype(np.float32)},
        {u: y.tolist(), v: z.tolist()},
        {u[0]: y[:, 0], u[1:]: y[:, 1:], v[[1, 0]]: z[:, ::-1]},
    ]
    for targets in same:
        np.testing.assert_array_equal(fg.loss(targets), expected)
    torch = pytest.importorskip("torch")
    np.testing.assert_array_equal(fg.loss({u: torch.tensor(y), v: torch.tensor(z)}), expected)


def test_a_target_that_breaks_a_factor():
    """The message names the factor, and the instance."""
    fg, u, v = two_variables()
    y, z = np.array([[1, 0, 0], [0, 0, 1]]), np.array([[0, 1], [0, 0]])
    with pytest.raises(fm.GraphError, match=r"The target of instance \(1,\) breaks Xor over u\."):
        fg.loss({u: np.array([[1, 0, 0], [0, 1, 1]]), v: z})
    with pytest.raises(fm.GraphError, match=r"The target of instance \(0,\) breaks OrOut over .*u"):
        fg.loss({u: y, v: 1 - z}, "hinge")
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros((3, 3)))
    fg.add(fm.Budget(u, 3))
    fg.add(fm.DepTree(u))
    with pytest.raises(
        fm.GraphError, match=r"The target breaks DepTree over u\. .* mask the entri"
    ):
        fg.loss({u: np.ones((3, 3)) - np.eye(3) > 1})
    with pytest.raises(fm.GraphError, match=r"The target breaks Budget over u\."):
        fg.loss({u: np.ones((3, 3))})


@pytest.mark.parametrize("name", SMALL)
def test_every_assignment_that_is_no_structure_is_refused(name):
    case = SMALL[name]
    rng = np.random.default_rng([17, list(SMALL).index(name)])
    eta, own = case.draw(rng, 10.0)
    structures = {tuple(c) for c in case.M.T.astype(int)}
    for _ in range(20):
        y = rng.integers(0, 2, eta.size)
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        fg.add(case.make(u, **own))
        if tuple(y) in structures:
            assert fg.loss({u: y.reshape(case.shape)}) >= 0
            continue
        with pytest.raises(fm.GraphError, match="The target breaks"):
            fg.loss({u: y.reshape(case.shape)})


def test_a_forbidden_transition():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros((2, 2)))
    fg.add(fm.Sequence(u, np.array([[0.0, -np.inf], [0.0, 0.0]])))
    with pytest.raises(fm.GraphError, match="breaks Sequence"):
        fg.loss({u: np.eye(2)})
    assert fg.loss({u: np.eye(2)[::-1]}) >= 0


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (
            [0.5, 0.5, 0.0],
            fm.GraphError,
            r"target of u must hold only 0 and 1, got 0\.5 at index \(0,\)",
        ),
        (
            [np.nan, 1, 0],
            fm.GraphError,
            r"target of u must hold only 0 and 1, got nan at index \(0,\)",
        ),
        ([2, 0, 0], fm.GraphError, r"target of u must hold only 0 and 1, got 2 at index \(0,\)"),
        ([0, True, 0.25], fm.GraphError, r"hold only 0 and 1, got 0\.25 at index \(2,\)\."),
        ([-1, 1, 1], fm.GraphError, r"target of u must hold only 0 and 1, got -1 at index \(0,\)"),
        (None, fm.GraphError, r"target of u must hold only 0 and 1, got None\."),
        ([0, 1], fm.ShapeError, r"the target of u must have shape \(3,\), got \(2,\)"),
        ([[0, 1, 0]] * 2, fm.ShapeError, r"the target of u must have shape \(3,\), got \(2, 3\)"),
        (1, fm.ShapeError, r"the target of u must have shape \(3,\), got \(\)"),
    ],
)
def test_bad_targets(target, error, message):
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros(3))
    fg.add(fm.Xor(u))
    with pytest.raises(error, match=message):
        fg.loss({u: target})


def test_targets_for_the_wrong_variables():
    fg, u, v = two_variables()
    y, z = np.array([[1, 0, 0], [0, 0, 1]]), np.array([[0, 1], [0, 0]])
    with pytest.raises(fm.GraphError, match=r"loss: u1\[0\] has no target"):
        fg.loss({u: y})
    with pytest.raises(fm.GraphError, match=r"loss: u1\[1\] has no target"):
        fg.loss({u: y, v[0]: z[:, 0]})
    with pytest.raises(fm.GraphError, match="not of its negation"):
        fg.loss({~u: 1 - y, v: z})
    other = fm.FactorGraph(batch_dims=1).variable_from(np.zeros((2, 3)))
    with pytest.raises(fm.GraphError, match="not a variable of this graph"):
        fg.loss({u: y, v: z, other: y})
    for bad in ([y, z], {}, None, y):
        with pytest.raises(fm.GraphError, match=r"takes a dict .* loss\(\{u: y\}\)"):
            fg.loss(bad)


def test_a_variable_that_is_masked_everywhere_needs_no_target():
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.zeros((2, 2)))
    v = fg.variable_from(np.zeros((2, 2)), mask=np.array([[True, False], [True, False]]))
    fg.add(fm.Xor([u, v]))
    fg.loss({u: np.array([[1, 0], [0, 0]]), v[0]: np.array([0, 1])})
    with pytest.raises(fm.GraphError, match=r"u1\[0\] has no target"):
        fg.loss({u: np.array([[1, 0], [0, 0]]), v[1]: np.array([0, 1])})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "logistic"}, ValueError, "kind must be one of"),
        ({"cost": 1.0}, ValueError, r'cost is only for kind="hinge"'),
        ({"kind": "perceptron", "cost": 1.0}, ValueError, r'cost is only for kind="hinge"'),
        ({"kind": "hinge", "cost": np.nan}, ValueError, "cost of u must hold finite"),
        ({"kind": "hinge", "cost": [1.0, np.inf, 0]}, ValueError, "cost of u must hold finite"),
        ({"kind": "hinge", "cost": np.ones(4)}, fm.ShapeError, r"cost of u must have shape \(3,\)"),
        ({"kind": "hinge", "cost": {0: 1.0}}, fm.GraphError, "cost has 0, which is not a variable"),
        ({"mask": np.ones(4, bool)}, fm.ShapeError, r"mask of the target of u must have shape"),
        ({"mask": np.array([0.5, 0, 1])}, fm.GraphError, "must be boolean, got dtype float64"),
        ({"mask": {"u": True}}, fm.GraphError, "mask has 'u', which is not a variable"),
        ({"tol": 0}, ValueError, "tol must be a positive number"),
        ({"max_iter": 0}, ValueError, "max_iter must be a whole number"),
        ({"on_failure": "shrug"}, ValueError, "on_failure must be"),
    ],
)
def test_bad_options(options, error, message):
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros(3))
    fg.add(fm.Xor(u))
    with pytest.raises(error, match=message):
        fg.loss({u: [1, 0, 0]}, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_on_failure(kind):
    rng = np.random.default_rng(18)
    fg = fm.FactorGraph()
    u = fg.variable_from(10 * rng.normal(size=(12, 12)))
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    with pytest.warns(fm.NotConvergedWarning, match="Raise `max_iter`"):
        fg.loss({u: np.eye(12)}, kind, max_iter=1)
    with pytest.raises(fm.NotConvergedError):
        fg.loss({u: np.eye(12)}, kind, max_iter=1, on_failure="raise")
    assert np.isfinite(fg.loss({u: np.eye(12)}, kind, max_iter=1, on_failure="ignore"))


# The answer, other arrays, own factors ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sparsemap", "perceptron"])
def test_the_answer_is_that_of_the_query(kind):
    """Values of variables and factors, structures and probabilities."""
    rng = np.random.default_rng(19)
    mixture = MIXTURES["structured_and_pairs"].drawn(rng)
    answer, other = mixture.built(), mixture.built()
    answer.fg.loss({answer.u: a_structure(mixture, rng)}, kind)
    if kind == "sparsemap":
        other.fg.solve()
    else:
        other.fg.solve_map()
    np.testing.assert_array_equal(answer.u.value, other.u.value)
    factors = [[*x.structured, *x.pairs] for x in (answer, other)]
    for a, b in zip(*factors, strict=True):
        np.testing.assert_array_equal(a.value, b.value)
    np.testing.assert_array_equal(answer.structured[0].structures, other.structured[0].structures)
    np.testing.assert_array_equal(answer.structured[0].probs, other.structured[0].probs)


def test_the_answer_of_hinge_is_augmented():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([1.0, 0.0]))
    fg.add(fm.Xor(u))
    fg.loss({u: np.array([1, 0])}, "hinge")
    np.testing.assert_allclose(u.value, [0, 1], atol=1e-6)  # off by one costs two


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_and_torch_agree(kind):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(20)
    mixture = MIXTURES["custom_and_builtin"].drawn(rng)
    y = a_structure(mixture, rng)
    answer = mixture.built()
    expected = answer.fg.loss({answer.u: y}, kind)
    eta = torch.tensor(mixture.eta, requires_grad=True)
    tensors = mixture.built(eta)
    loss = tensors.fg.loss({tensors.u: torch.tensor(y)}, kind)
    assert loss.dtype == torch.float64 and loss.shape == () and loss.item() == expected
    assert isinstance(tensors.u.value, torch.Tensor)
    np.testing.assert_array_equal(tensors.u.value.detach().numpy(), answer.u.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_dtypes(kind, dtype):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, dtype)
    eta = draw(2, 3, 3).detach().to(dtype).requires_grad_()
    transitions = draw(3, 3, seed=1).detach().to(dtype).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (eta, transitions)]
    y, losses = torch.eye(3), []
    for scores, between in ((eta, transitions), wide):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Sequence(u, between))
        fg.add(fm.AtMostOne(u[:, 0]))
        losses.append(fg.loss({u: y}, kind))
        losses[-1].sum().backward()
        assert u.value.dtype == losses[-1].dtype == scores.dtype == scores.grad.dtype
    accuracy = {"atol": 8 * torch.finfo(dtype).eps, "rtol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(losses[0].double(), losses[1], **accuracy)
    torch.testing.assert_close(eta.grad.double(), wide[0].grad, **accuracy)
    torch.testing.assert_close(transitions.grad.double(), wide[1].grad, **accuracy)


def test_autocast():
    torch = pytest.importorskip("torch")
    weight = draw(3, 3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = weight @ weight.T
        assert scores.dtype == torch.bfloat16
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(fm.Matching(u))
        loss = fg.loss({u: torch.eye(3)}, "hinge")
    loss.backward()
    assert loss.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32 and weight.grad.isfinite().all()


def test_numpy_float32():
    rng = np.random.default_rng(21)
    eta = rng.normal(size=(3, 3)).astype(np.float32)
    for kind in KINDS:
        losses = []
        for scores in (eta, eta.astype(float)):
            fg = fm.FactorGraph()
            u = fg.variable_from(scores)
            fg.add(fm.Matching(u))
            losses.append(fg.loss({u: np.eye(3)}, kind))
            assert u.value.dtype == scores.dtype
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_own_factors(kind):
    """Features of any size and sign count; the best ones where an assignment has several."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(22)
    for k in range(15):
        mixture = with_large_features(rng, SCALES[k % 3])
        problem = mixture.problem()
        y = a_target(problem, rng)
        eta = torch.tensor(mixture.eta, requires_grad=True)
        own = torch.tensor(mixture.own[0]["scores"], requires_grad=True)
        answer = mixture.built(eta, [{"scores": own}])
        loss = answer.fg.loss({answer.u: y}, kind, **TIGHT)
        exact = exact_loss(problem, y, kind)
        assert abs(loss.item() - exact) <= EXACT * (1 + abs(exact))
        loss.backward()
        expected = answer.structured[0].value.numpy() - features_of(problem.structured[0], y)
        np.testing.assert_allclose(own.grad.numpy(), expected, rtol=0, atol=1e-9)


def test_no_second_derivative():
    torch = pytest.importorskip("torch")
    eta = draw(3)
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    fg.add(fm.Xor(u))
    (grad,) = torch.autograd.grad(fg.loss({u: torch.eye(3)[0]}), eta, create_graph=True)
    if grad.requires_grad:
        with pytest.raises((RuntimeError, NotImplementedError, fm.FactormaxError)):
            grad.sum().backward()


def test_two_targets_for_one_variable():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([0.3, 0.2, 0.9]))
    fg.add(fm.AtMostOne(u))
    for targets in ({u: [1, 0, 0], u[:]: [0, 0, 1]}, {u[[0, 0, 1, 2]]: [1, 0, 0, 0]}):
        with pytest.raises(fm.GraphError, match=r"u\[0\] has two targets"):
            fg.loss(targets)


@pytest.mark.parametrize("shape", [(), (1,), (2, 1), (1, 3)])
def test_a_target_is_never_spread_within_an_instance(shape):
    """One for all instances is, but only if it is whole: else it is more often a mistake."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.zeros((2, 3)))
    fg.add(fm.AtLeast(u, 1))
    with pytest.raises(fm.ShapeError, match=r"\(2, 3\), or \(3,\) if all instances share it, got"):
        fg.loss({u: np.ones(shape)})
