"""Every factor through every front and every transform: one contract.

A case is a function of one flat vector of scores, those of the variables and the factor's own, to
the flat vector of all marginals. Its Jacobian is symmetric and piecewise constant; NumPy's `vjp`,
which has its own tests, says what it is. A front brings the transforms of its library under common
names.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from every_factor import EXAMPLES

import factormax as fm

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad, gradcheck, gradgradcheck  # noqa: E402

TIGHT = 1e-12


def test_every_factor_is_there():
    from factormax import factors

    assert set(EXAMPLES) == set(factors.__all__)


def beside(u):
    """A constraint that shares all variables with the factor."""
    costs = np.arange(1, u.size + 1).reshape(u.shape) / u.size
    return fm.Knapsack(u, costs, costs.sum() / 2)


def solved(case, x, split, batch_dims=0, **options):
    """The case at scores that `split` cuts from x, with another factor beside it."""
    fg = fm.FactorGraph(batch_dims=batch_dims)
    scores, *own = split(x, case.shapes)
    u = fg.variable_from(scores)
    factor = fg.add(case.make(u, *own))
    fg.add(beside(u))
    solution = fg.solve(tol=TIGHT, **options)
    return u, factor, solution


def cut(x, shapes):
    """Arrays of these shapes from the last axis of x, in any library."""
    found, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        found.append(x[..., start : start + size].reshape((*x.shape[:-1], *shape)))
        start += size
    return found


def numpy_jacobian(case, x):
    """By NumPy's `vjp`, a row at a time, for the marginals that `value` holds."""
    u, factor, solution = solved(case, x, cut)
    parts = [u, factor] if case.own else [u]
    rows = []
    for part in parts:
        for k in range(part.value.size):
            grad = np.zeros(part.value.size)
            grad[k] = 1
            found = solution.vjp({part: grad.reshape(part.value.shape)})
            rows.append(np.concatenate([g.reshape(-1) for g in found.values()]))
    return np.array(rows)


class TorchFront:
    """The transforms of torch."""

    jacrev, jacfwd = staticmethod(torch.func.jacrev), staticmethod(torch.func.jacfwd)
    hessian, grad = staticmethod(torch.func.hessian), staticmethod(torch.func.grad)

    @staticmethod
    def array(x):
        return torch.tensor(np.asarray(x))

    @staticmethod
    def numpy(x):
        return x.detach().numpy()

    @staticmethod
    def joined(arrays):
        return torch.cat([a.reshape(-1) for a in arrays])

    @staticmethod
    def stacked(arrays):
        return torch.stack(list(arrays))

    @staticmethod
    def vmap(function, in_axes=0, out_axes=0):
        return torch.func.vmap(function, in_dims=in_axes, out_dims=out_axes)

    @staticmethod
    def jvp(function, x, move):
        return torch.func.jvp(function, (x,), (move,))[1]

    @staticmethod
    def check(function, *args, fast=False):
        """Both modes, and the second derivatives, against finite differences."""
        given = [a.clone().requires_grad_() for a in args]
        assert gradcheck(function, given, check_forward_ad=True, fast_mode=fast)
        assert gradgradcheck(function, given, check_fwd_over_rev=True, fast_mode=fast)


FRONTS = {"torch": TorchFront}


@pytest.fixture(params=FRONTS)
def front(request):
    return FRONTS[request.param]


@pytest.fixture(params=EXAMPLES)
def case(request):
    return EXAMPLES[request.param]


@pytest.fixture
def marginals(front, case):
    """The function of a flat vector."""

    def function(x):
        u, factor, _ = solved(case, x, cut)
        return front.joined([p.value for p in ([u, factor] if case.own else [u])])

    return function


def close(found, expected, atol=1e-9):
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


# ---- The contract --------------------------------------------------------------------------------


def test_jacobians(front, case, marginals):
    x, expected = case.point(), numpy_jacobian(case, case.point())
    close(front.numpy(front.jacrev(marginals)(front.array(x))), expected)
    close(front.numpy(front.jacfwd(marginals)(front.array(x))), expected)
    move = np.random.default_rng(5).normal(size=case.size)
    close(front.numpy(front.jvp(marginals, front.array(x), front.array(move))), expected @ move)
    width = math.prod(case.shape)
    close(expected[:width, :width], expected[:width, :width].T)


def test_hessian(front, case, marginals):
    """That of the squared length is twice the Jacobian, transposed, times itself."""
    x, jacobian = case.point(), numpy_jacobian(case, case.point())
    found = front.hessian(lambda x: (marginals(x) ** 2).sum())(front.array(x))
    close(front.numpy(found), 2 * jacobian.T @ jacobian)


def test_derivatives(front, case, marginals):
    front.check(marginals, front.array(case.point()))


def test_vmap(front, case, marginals):
    """Over any axis the same as a loop, also nested, and with gradients."""
    x = front.array(case.point(3))
    loop = front.numpy(front.stacked([marginals(row) for row in x]))
    close(front.numpy(front.vmap(marginals)(x)), loop)
    close(front.numpy(front.vmap(marginals, 1, 1)(x.T)), loop.T)
    nested = front.vmap(front.vmap(marginals))(x[None])
    close(front.numpy(nested)[0], loop)

    def loss(x):
        return (marginals(x) ** 2).sum()

    each = [front.numpy(front.grad(loss)(row)) for row in x]
    close(front.numpy(front.vmap(front.grad(loss))(x)), np.stack(each))
    each = [front.numpy(front.jacrev(marginals)(row)) for row in x]
    close(front.numpy(front.vmap(front.jacfwd(marginals))(x)), np.stack(each))
    close(front.numpy(front.vmap(front.jacrev(marginals))(x)), np.stack(each))


def test_vmap_beside_a_batch(front, case):
    """The samples, the batch, and scores that all of them share."""
    x = case.point(3, 2)
    shared = np.arange(case.size) >= math.prod(case.shape)  # a factor's own
    x = front.array(np.where(shared, x[:1, :1], x))

    def function(scores, *own):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(case.make(u, *own))
        fg.add(beside(u))
        solution = fg.solve(tol=TIGHT)
        return u.value, solution.objective

    scores, *own = cut(x, case.shapes)
    own = [a[0, 0] for a in own]
    axes = (0, *[None] * len(own))
    found = front.vmap(function, axes)(scores, *own)
    for i in range(3):
        value, objective = function(scores[i], *own)
        close(front.numpy(found[0][i]), front.numpy(value))
        close(front.numpy(found[1][i]), front.numpy(objective))


def test_temperature(front, case):
    def function(x, temperature):
        u, factor, solution = solved(case, x, cut, temperature=temperature)
        own = [factor.value] if case.own else []
        return front.joined([u.value, *own, solution.objective])

    x, heat = front.array(case.point()), front.array(0.8)
    front.check(function, x, heat, fast=True)
    heats = front.array([0.8, 1.3])
    found = front.vmap(function, (None, 0))(x, heats)
    close(front.numpy(found[1]), front.numpy(function(x, heats[1])))


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=name) for name, c in EXAMPLES.items() if c.structured]
)
def test_probs(front, case):
    def function(x):
        return solved(case, x, cut)[1].probs

    x = front.array(case.point())
    front.check(function, x, fast=True)
    close(front.numpy(front.jacfwd(function)(x)), front.numpy(front.jacrev(function)(x)))
    several = front.array(case.point(2))
    found = front.numpy(front.vmap(function)(several))
    for row, expected in zip(found, (front.numpy(function(x)) for x in several), strict=True):
        close(row[: len(expected)], expected)
        close(row[len(expected) :], 0)


def test_samples_are_solved_in_one_batch(front, case, marginals, monkeypatch):
    from factormax import _engines

    sizes, solve = [], _engines.solve

    def counted(inputs, *rest):
        sizes.append(inputs.batch)
        return solve(inputs, *rest)

    monkeypatch.setattr(_engines, "solve", counted)
    front.vmap(marginals)(front.array(case.point(4)))
    assert sizes == [4]


# ---- NumPy ---------------------------------------------------------------------------------------


def test_numpy_jvp(case):
    """The transpose of `vjp`, which for what `value` holds is the same Jacobian."""
    x, rng = case.point(), np.random.default_rng(5)
    u, factor, solution = solved(case, x, cut, temperature=0.8)
    move = cut(rng.normal(size=case.size), case.shapes)
    parts = [u, *[factor] * bool(case.own), *[(factor, "initial")] * (len(case.own) > 1)]
    moves = dict(zip(parts, move, strict=True)) | {"temperature": np.array(0.3)}
    found = solution.jvp(moves)
    assert set(found) == {*parts, "objective"}
    grads = {p: rng.normal(size=p.value.shape) for p in parts[:2]}
    back = solution.vjp(grads, objective=0.7)
    forward = sum((found[p] * g).sum() for p, g in grads.items()) + 0.7 * found["objective"]
    assert forward == pytest.approx(sum((back[k] * m).sum() for k, m in moves.items()), abs=1e-9)


def test_numpy_jvp_takes_slices_and_refuses_the_rest():
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.array([[1.0, 0.5, -1.0]]))
    xor = fg.add(fm.Xor(u))
    solution = fg.solve()
    close(solution.jvp({u[0]: np.array([1.0])})[u], [[0.5, -0.5, 0.0]])
    with pytest.raises(fm.ShapeError, match=r"got a direction of \(3,\)"):
        solution.jvp({u: np.ones(3)})
    for key in (xor, "temperature", fm.FactorGraph().variable(3)):
        with pytest.raises(fm.GraphError, match="has no scores"):
            solution.jvp({key: np.ones(3)})
    with pytest.raises(fm.GraphError, match="takes a dict"):
        solution.jvp(np.ones(3))
    v = fg.variable_from(np.zeros((1, 2)))
    with pytest.raises(fm.GraphError, match="has no scores"):
        solution.jvp({v: np.ones((1, 2))})


# ---- What is torch's own -------------------------------------------------------------------------


def xor(scores, mask=None, budget=2, **options):
    fg = fm.FactorGraph()
    u = fg.variable_from(scores, mask=mask)
    fg.add(fm.Budget(u, budget, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    return u, fg.solve(tol=TIGHT, **options)


def test_masks_and_parameters_may_be_of_a_sample():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 3, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 3, 4, generator=generator) > 0.3
    budgets = torch.tensor([1, 2, 0, 1])

    def function(*args):
        u, solution = xor(*args)
        return u.value, solution.converged, solution.iterations

    found = torch.func.vmap(function)(scores, mask, budgets)
    for i in range(4):
        expected = function(scores[i], mask[i], budgets[i])
        torch.testing.assert_close(found[0][i], expected[0])
        assert found[1][i]
        assert found[2][i] == expected[2]


def test_bad_numbers_are_named_inside_a_vmap():
    scores = torch.zeros(2, 3, 4)
    with pytest.raises(fm.GraphError, match="budget must be at least 0, got -1"):
        torch.func.vmap(lambda s, b: xor(s, None, b)[0].value)(scores, torch.tensor([1, -1]))
    scores[1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match=r"u: .*NaN at index \(1, 2, 3\)"):
        torch.func.vmap(lambda s: xor(s)[0].value)(scores)
    with pytest.warns(fm.NotConvergedWarning):
        torch.func.vmap(lambda s: xor(s, max_iter=1)[0].value)(torch.randn(2, 9, 9))


def test_forward_mode_by_itself():
    scores, move = torch.randn(2, 3, 4, dtype=torch.float64)
    with forward_ad.dual_level():
        u, solution = xor(forward_ad.make_dual(scores, move))
        tangent = forward_ad.unpack_dual(u.value).tangent
        slope = forward_ad.unpack_dual(solution.objective).tangent
    expected = torch.func.jvp(lambda s: xor(s)[0].value, (scores,), (move,))
    torch.testing.assert_close(tangent, expected[1])
    torch.testing.assert_close(slope, (expected[0] * move).sum())


@pytest.mark.parametrize("outer", [torch.func.jacfwd, torch.func.jacrev])
@pytest.mark.parametrize("inner", [torch.func.jacfwd, torch.func.jacrev])
@pytest.mark.parametrize("loss", [False, True])
def test_second_derivatives_of_optima_in_any_order(outer, inner, loss):
    def value(scores):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u))
        if loss:
            return fg.loss({u: torch.tensor([1.0, 0.0, 0.0])})
        return fg.solve(temperature=scores[0] + 1).objective

    def by_hand(scores):  # all three are on
        cooled = scores if loss else scores / (scores[0] + 1)
        mu = cooled + (1 - cooled.sum()) / 3
        best = cooled @ mu - mu @ mu / 2
        return best - cooled[0] + 0.5 if loss else best

    scores = torch.tensor([0.3, 0.1, -0.2], dtype=torch.float64)
    want = torch.func.hessian(by_hand)(scores)
    torch.testing.assert_close(outer(inner(value))(scores), want, rtol=0, atol=1e-12)


def test_a_gradient_penalty():
    """A function of the gradient, differentiated in the middle of others."""
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def penalty(weight):
        scores = 2 * weight
        loss = (xor(scores)[0].value ** 2 * weight).sum()
        (grad,) = torch.autograd.grad(loss, scores, create_graph=True)
        return (grad**2).sum()

    assert gradcheck(penalty, weight)


@pytest.mark.parametrize("kind", ["sparsemap", "hinge", "perceptron"])
def test_losses(case, kind):
    """Of each sample, with a target of its own; the curvature of the first kind is J."""

    def built(x):
        fg = fm.FactorGraph()
        scores, *own = cut(x, case.shapes)
        u = fg.variable_from(scores)
        fg.add(case.make(u, *own))
        fg.add(beside(u))
        return fg, u

    def loss(x, target):
        fg, u = built(x)
        return fg.loss({u: target}, kind, tol=TIGHT)

    targets = []
    for x in -case.point(2):
        fg, u = built(x)
        fg.decode()
        targets.append(u.value)
    x, targets = torch.tensor(case.point(2)), torch.tensor(np.array(targets))
    found, values = torch.func.vmap(torch.func.grad_and_value(loss))(x, targets)
    for i in range(2):
        own = x[i].clone().requires_grad_()
        value = loss(own, targets[i])
        value.backward()
        torch.testing.assert_close(values[i], value.detach(), rtol=0, atol=1e-9)
        torch.testing.assert_close(found[i], own.grad, rtol=0, atol=1e-9)
    if kind == "sparsemap" and not case.own:
        curvature = torch.func.hessian(loss)(x[0], targets[0])
        close(curvature.numpy(), numpy_jacobian(case, case.point(2)[0]))


def test_a_loss_says_what_it_does_not_take():
    def loss(scores, target, **options):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u))
        return fg.loss({u: target}, **options)

    grad, scores = torch.func.grad, torch.zeros(3)
    with pytest.raises(fm.GraphError, match="mask= is not supported inside"):
        grad(lambda s: loss(s, torch.eye(3)[0], mask=torch.ones(3, dtype=torch.bool)))(scores)
    with pytest.raises(fm.GraphError, match="must hold only 0 and 1"):
        grad(lambda s: loss(s, torch.full((3,), 0.5)))(scores)
    with pytest.raises(fm.GraphError, match="breaks Xor"):
        grad(lambda s: loss(s, torch.ones(3)))(scores)
    with pytest.raises(fm.ShapeError, match="the target of u must have shape"):
        grad(lambda s: loss(s, torch.ones(2)))(scores)


def test_surrogates():
    """Straight-through is linear in what comes in; SPIGOT is not, and says so."""

    def function(scores, surrogate):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u, axis=1))
        fg.solve_map(surrogate=surrogate)
        return u.value

    x = torch.randn(3, 4, dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda x: function(x, "straight-through"))(x)
    torch.testing.assert_close(jacobian.reshape(12, 12), torch.eye(12, dtype=torch.float64))
    assert not torch.func.jacfwd(lambda x: function(x, None))(x).any()
    with pytest.raises(RuntimeError, match="spigot"):
        torch.func.jacfwd(lambda x: function(x, "spigot"))(x)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    value = function(x.requires_grad_(), "spigot")
    (grad,) = torch.autograd.grad((weight * value).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="spigot"):
        grad.sum().backward()


def test_structures_inside_a_vmap():
    scores = torch.randn(3, 2, 3, dtype=torch.float64)

    def function(scores):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        matching = fg.add(fm.Matching(u))
        fg.solve(tol=TIGHT)
        return u.value, matching.structures, matching.probs, matching.num_structures

    value, structures, probs, count = torch.func.vmap(function)(scores)
    torch.testing.assert_close((structures * probs[..., None, None]).sum(1), value)
    torch.testing.assert_close(count, torch.stack([function(s)[3] for s in scores]))


def test_parameters_and_indices_may_be_closed_over():
    """A transform wraps whatever is computed inside of it, a tensor from outside included."""
    budget, places = torch.tensor(2), torch.tensor([0, 1])

    def loss(scores):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(fm.Budget(u, budget))
        fg.add(fm.AtMostOne(u[places, 0]))
        fg.add(fm.Or(u[places]))
        fg.solve()
        return (u.value**2).sum()

    scores = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaf = scores.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(scores), leaf.grad)
    torch.testing.assert_close(torch.func.jacfwd(loss)(scores), leaf.grad)
    torch.func.hessian(loss)(scores)


def test_the_status_inside_a_transform_is_a_code():
    def solved(scores):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(fm.AtLeast(u, 2))
        fg.add(fm.AtMostOne(u))
        solution = fg.solve(on_failure="ignore")
        assert "traced" in repr(solution)
        with pytest.raises(fm.GraphError, match="outside of it"):
            solution.conflict()
        return solution.status

    codes = torch.func.vmap(solved)(torch.zeros(2, 3))
    assert [fm.Status.from_code(int(c)) for c in codes] == [fm.Status.INFEASIBLE] * 2


def test_the_gradient_of_a_loss_is_not_differentiated_in_silence():
    scores = torch.zeros(3, requires_grad=True)
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u))
    loss = fg.loss({u: torch.tensor([1.0, 0.0, 0.0])})
    (grad,) = torch.autograd.grad(loss, scores, create_graph=True)
    with pytest.raises(RuntimeError, match=r"torch\.func\.hessian"):
        (loss + grad.pow(2).sum()).backward()


def test_messages_name_factors():
    def function(scores, budget):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(fm.Budget(u[1:], budget))
        fg.solve()
        return u.value

    with pytest.raises(
        fm.GraphError, match=r"Budget over u\[1:\], instance \(1,\): budget must be"
    ):
        torch.func.vmap(function)(torch.zeros(2, 4), torch.tensor([1.0, -1.0]))
