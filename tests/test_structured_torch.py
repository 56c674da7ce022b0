"""Structured factors in torch: autograd, compile, dtypes."""

import numpy as np
import pytest
from factors.test_factor import TwoOf
from graphs import op_args_of

import factormax as fm

torch = pytest.importorskip("torch")

TIGHT = {"tol": 1e-12}


def randn(*shape, dtype=torch.float64, seed=0, grad=True, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(shape, generator=generator, dtype=dtype)
    return values.requires_grad_(grad)


# One graph of each: (scores) -> everything that is differentiable, after the shapes of the scores.


def dep_tree(eta, **options):
    fg = fm.FactorGraph(batch_dims=eta.ndim - 2)
    u = fg.variable_from(eta)
    fg.add(fm.DepTree(u))
    fg.add(fm.Budget(u, 2, axis=0))
    fg.solve(**options)
    return (u.value,)


def projective_tree(eta, **options):
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    fg.add(fm.DepTree(u, projective=True, single_root=True))
    solution = fg.solve(**options)
    return u.value, solution.objective


def matching(eta, **options):
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    fg.add(fm.Matching(u))
    fg.add(fm.Budget(u[:, 0], 1))
    solution = fg.solve(**options)
    return u.value, solution.objective


def sequence(eta, transitions, initial, final, **options):
    fg = fm.FactorGraph(batch_dims=eta.ndim - 2)
    u = fg.variable_from(eta)
    factor = fg.add(fm.Sequence(u, transitions, initial=initial, final=final))
    fg.add(fm.AtMostOne(u[..., 1]))
    solution = fg.solve(**options)
    return u.value, factor.value, solution.objective


def sequence_budget(eta, transitions, **options):
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    factor = fg.add(fm.SequenceBudget(u, transitions, budget=3))
    fg.solve(**options)
    return u.value, factor.value


def table(eta, scores, **options):
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    factor = fg.add(fm.Table([u[:3], u[3:]], scores))
    fg.add(fm.Imply([u[0], u[3]]))
    fg.solve(**options)
    return u.value, factor.value


class Chosen(fm.Factor):
    """Exactly one, with a score of its own for each."""

    def map(self, eta_u, eta_v):
        m = np.zeros(eta_u.shape)
        m[np.argmax(eta_u + eta_v)] = 1
        return m, m


def custom(eta, scores, **options):
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    factor = fg.add(Chosen(u, scores))
    fg.add(fm.Imply(u[:2]))
    fg.solve(**options)
    return u.value, factor.value


def chains(eta, rows, columns, **options):
    """Linked factors."""
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    factors = [fg.add(fm.Sequence(u[i], rows)) for i in range(2)]
    factors += [fg.add(fm.Sequence(u[:, i], columns)) for i in range(2)]
    fg.solve(**options)
    return (u.value, *(f.value for f in factors))


GRAPHS = {
    "dep_tree": (dep_tree, [(4, 4)]),
    "projective_tree": (projective_tree, [(4, 4)]),
    "matching": (matching, [(3, 4)]),
    "sequence": (sequence, [(4, 3), (3, 3), (3,), (3,)]),
    "sequence per step": (sequence, [(4, 3), (3, 3, 3), (3,), (3,)]),
    "sequence_budget": (sequence_budget, [(6,), (5,)]),
    "sequence_budget scalar": (sequence_budget, [(6,), ()]),
    "table": (table, [(5,), (3, 2)]),
    "custom": (custom, [(4,), (4,)]),
    "chains": (chains, [(2, 2, 2), (2, 2), (2, 2)]),
}


def smooth_point(function, shapes, seed=0, scale=1.0):
    """Scores where the solution is differentiable: far from a kink, in every direction tried."""
    rng = np.random.default_rng(seed)
    for _ in range(50):
        point = [scale * rng.normal(size=s) for s in shapes]
        smooth = True
        for _ in range(6):
            direction = [rng.normal(size=s) for s in shapes]

            def loss(t, direction=direction, point=point):
                moved = [torch.tensor(p + t * d) for p, d in zip(point, direction, strict=True)]
                return np.concatenate([v.reshape(-1).numpy() for v in function(*moved, **TIGHT)])

            slopes = [(loss(h) - loss(-h)) / (2 * h) for h in (1e-2, 1e-3)]
            # The objective is not linear, but nearly.
            smooth &= bool(np.abs(slopes[0] - slopes[1]).max() <= 1e-4)
        if smooth:
            return [torch.tensor(p, requires_grad=True) for p in point]
    raise AssertionError("no smooth point")


@pytest.mark.parametrize("name", GRAPHS)
def test_gradcheck(name):
    function, shapes = GRAPHS[name]
    for seed in range(2):
        point = smooth_point(function, shapes, seed)
        assert torch.autograd.gradcheck(lambda *s: function(*s, **TIGHT), point)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_same_bits_as_numpy(name):
    function, shapes = GRAPHS[name]
    for seed in range(2):
        scores = [randn(*s, seed=seed + 10 * i) for i, s in enumerate(shapes)]
        ours = function(*scores)
        theirs = function(*(s.detach().numpy() for s in scores))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a.detach().numpy(), b)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(name, dtype):
    function, shapes = GRAPHS[name]
    scores = [
        randn(*s, seed=i, grad=False).to(dtype).requires_grad_() for i, s in enumerate(shapes)
    ]
    values = function(*scores)
    exact = function(*(s.detach().double() for s in scores))
    eps = torch.finfo(dtype).eps
    for value, expected in zip(values, exact, strict=True):
        assert value.dtype == dtype
        largest = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(
            value.detach().double(), expected, rtol=0, atol=max(2 * eps * largest, 1e-5)
        )
    sum((v * v).sum() for v in values).backward()
    assert all(s.grad.dtype == dtype and torch.isfinite(s.grad).all() for s in scores)


@pytest.mark.parametrize("wanted", ["eta", "transitions", "initial", "final", "all"])
def test_requires_grad_on_any_subset(wanted):
    names = ["eta", "transitions", "initial", "final"]
    shapes = [(4, 3), (3, 3), (3,), (3,)]

    def run(which):
        leaves = {
            n: randn(*s, seed=i).detach().requires_grad_(n in which)
            for i, (n, s) in enumerate(zip(names, shapes, strict=True))
        }
        value, transitions, _ = sequence(*leaves.values(), **TIGHT)
        (value * torch.arange(3)).sum().add(transitions[0, 1]).backward()
        return {n: x.grad for n, x in leaves.items()}

    some, every = run(names if wanted == "all" else [wanted]), run(names)
    for name in names:
        if wanted in ("all", name):
            torch.testing.assert_close(some[name], every[name], rtol=0, atol=0)
        else:
            assert some[name] is None


def test_scores_that_are_numpy_beside_a_tensor():
    """Transitions may be an array, or the only tensor, beside a variable of zeros."""
    eta, transitions = randn(4, 3), randn(3, 3, seed=1)
    expected = sequence(eta, transitions.detach(), torch.zeros(3), torch.zeros(3))[0]
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    fg.add(fm.Sequence(u, transitions.detach().numpy()))
    fg.add(fm.AtMostOne(u[:, 1]))
    fg.solve()
    torch.testing.assert_close(u.value, expected, rtol=0, atol=1e-9)
    fg = fm.FactorGraph()
    v = fg.variable((4, 3))
    fg.add(fm.Sequence(v, transitions))
    fg.solve()
    assert isinstance(v.value, torch.Tensor) and v.value.requires_grad
    v.value[0, 0].backward()
    assert transitions.grad.shape == (3, 3)


def test_a_second_backward():
    eta, transitions = randn(4, 3), randn(3, 3, seed=1)
    value, expected, _ = sequence(eta, transitions, torch.zeros(3), torch.zeros(3))
    loss = (value**2).sum() + expected[0, 0]
    first = torch.autograd.grad(loss, [eta, transitions], retain_graph=True)
    second = torch.autograd.grad(loss, [eta, transitions], retain_graph=True)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_an_infeasible_instance_has_no_gradient():
    eta = randn(2, 3, 3)
    mask = torch.ones(2, 3, 3, dtype=torch.bool)
    mask[1] = ~torch.eye(3, dtype=torch.bool)
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta, mask=mask)
    tree = fg.add(fm.DepTree(u))
    solution = fg.solve(on_failure="ignore")
    assert list(solution.status) == [fm.Status.CONVERGED, fm.Status.INFEASIBLE]
    (u.value[0] * torch.arange(3)).sum().backward()
    assert torch.isfinite(eta.grad).all() and not eta.grad[1].any()
    assert tree.num_structures[1] == 0


# Structures ---------------------------------------------------------------------------------------


def test_structures_are_tensors():
    eta = randn(2, 3, 4, dtype=torch.float32)
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta)
    factor = fg.add(fm.Matching(u))
    fg.solve()
    k = int(factor.num_structures.max())
    assert factor.structures.shape == (2, k, 3, 4) and factor.structures.dtype == torch.float32
    assert factor.probs.shape == (2, k) and factor.probs.dtype == torch.float32
    assert not factor.num_structures.is_floating_point() and not factor.structures.requires_grad
    mean = torch.einsum("bk,bkij->bij", factor.probs, factor.structures)
    torch.testing.assert_close(mean, u.value, rtol=0, atol=1e-6)


def expected_loss(eta, weight):
    """The expectation of a loss that is no linear function of the structure."""
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    factor = fg.add(fm.DepTree(u))
    fg.solve(**TIGHT)
    losses = torch.tanh((factor.structures * weight).sum((-1, -2))) ** 2
    return (factor.probs * losses).sum(), {
        tuple(y.reshape(-1).int().tolist()) for y in factor.structures
    }


def test_an_expected_loss_over_the_structures():
    """Its gradient, by differences, where the support stands still."""
    compared = 0
    for seed in range(30):
        eta, weight = randn(4, 4, seed=seed), randn(4, 4, seed=seed + 100, grad=False)
        loss, support = expected_loss(eta, weight)
        loss.backward()
        direction = randn(4, 4, seed=seed + 200, grad=False)
        slopes = []
        for h in (1e-4, 1e-5):
            ends = [expected_loss(eta.detach() + t * direction, weight) for t in (h, -h)]
            slopes.append(float(ends[0][0] - ends[1][0]) / (2 * h))
            if any(s != support for _, s in ends):
                break
        else:
            if abs(slopes[0] - slopes[1]) <= 1e-7:
                compared += 1
                assert abs(float((eta.grad * direction).sum()) - slopes[1]) <= 1e-6
    assert compared >= 5


def test_gradients_through_value_and_probs_add_up():
    eta, weight = randn(4, 4), randn(4, 4, seed=1, grad=False)

    def run(of_value, of_probs):
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        factor = fg.add(fm.DepTree(u))
        fg.solve(**TIGHT)
        loss = of_value * (u.value * weight).sum()
        loss = loss + of_probs * (factor.probs * torch.arange(len(factor.probs))).sum()
        return torch.autograd.grad(loss, eta)[0]

    torch.testing.assert_close(run(1, 1), run(1, 0) + run(0, 1), rtol=0, atol=1e-12)


def test_probs_that_are_not_used_cost_nothing():
    eta = randn(4, 4)
    (value,) = dep_tree(eta, **TIGHT)
    (expected,) = torch.autograd.grad(value[0, 1], eta)
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    factor = fg.add(fm.DepTree(u))
    fg.add(fm.Budget(u, 2, axis=0))
    fg.solve(**TIGHT)
    _ = factor.probs
    torch.testing.assert_close(torch.autograd.grad(u.value[0, 1], eta)[0], expected)


# The operator and compile -------------------------------------------------------------------------


def op_graph(kind):
    dtype = torch.float32 if kind == "float32" else torch.float64
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(randn(2, 4, 4, dtype=dtype))
    if kind == "tree":
        fg.add(fm.DepTree(u))
        fg.add(fm.Budget(u, 2, axis=0))
    elif kind == "linked":
        fg.add(fm.Matching(u))
        fg.add(fm.Sequence(u, randn(4, 4, seed=1)))
    else:
        fg.add(fm.Sequence(u, randn(4, 4, seed=1, dtype=dtype), final=randn(4, dtype=dtype)))
    return fg


@pytest.mark.parametrize("kind", ["tree", "sequence", "linked", "float32"])
def test_opcheck(kind):
    torch.library.opcheck(torch.ops.factormax.solve_tracked, op_args_of(op_graph(kind)))


class TreeLayer(torch.nn.Module):
    """Words to trees with budgets."""

    def __init__(self):
        super().__init__()
        self.score = torch.nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, x):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(self.score(x))
        fg.add(fm.DepTree(u))
        fg.add(fm.Budget(u, 2, axis=0))
        solution = fg.solve()
        return (u.value**2).sum((1, 2)) + 0.1 * solution.objective


class TaggingLayer(torch.nn.Module):
    """Words to tags, with transitions that are learned, and a selection of words."""

    def __init__(self):
        super().__init__()
        self.score = torch.nn.Linear(6, 3, dtype=torch.float64)
        self.transitions = torch.nn.Parameter(randn(3, 3, seed=1).detach())
        self.final = torch.nn.Parameter(randn(3, seed=2).detach())

    def forward(self, x):
        scores = self.score(x)
        fg = fm.FactorGraph(batch_dims=1)
        u, v = fg.variable_from(scores), fg.variable_from(scores[:, :, 0])
        factor = fg.add(fm.Sequence(u, self.transitions, final=self.final))
        fg.add(fm.SequenceBudget(v, 0.5, 2))
        fg.add(fm.Imply([u[0, 0], v[0]]))
        fg.solve()
        return (u.value**2).sum((1, 2)) + v.value[:, 0] + (factor.value**2).sum((1, 2))


@pytest.mark.parametrize("layer", [TreeLayer, TaggingLayer])
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compile(layer, backend):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = layer(), torch.randn(3, 5, 6, dtype=torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    results = []
    for run in (model, compiled, compiled):
        model.zero_grad()
        out = run(x)
        out.sum().backward()
        results.append((out.detach(), [p.grad.clone() for p in model.parameters()]))
    assert all(g.any() for g in results[0][1])
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_compile_of_another_batch_size():
    torch._dynamo.reset()
    model = TaggingLayer()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in (2, 3, 7):
        x = torch.randn(size, 5, 6, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x))


def test_compile_with_linked_factors_and_a_mask():
    torch._dynamo.reset()

    def solve(eta, mask):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta, mask=mask)
        fg.add(fm.DepTree(u))
        fg.add(fm.Matching(u))
        fg.solve()
        return u.value

    eta = randn(3, 4, 4)
    words = torch.arange(4) < torch.tensor([[4], [3], [2]])
    mask = words[:, :, None] & words[:, None, :]
    compiled = torch.compile(solve, fullgraph=True, backend="aot_eager")
    results = []
    for run in (solve, compiled):
        value = run(eta, mask)
        (grad,) = torch.autograd.grad((value**2).sum(), eta)
        results.append((value.detach(), grad))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["structures", "probs", "num_structures"])
def test_structures_inside_compile(name):
    torch._dynamo.reset()

    def solve(eta):
        fg = fm.FactorGraph()
        factor = fg.add(fm.DepTree(fg.variable_from(eta)))
        fg.solve()
        return getattr(factor, name)

    compiled = torch.compile(solve, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="structures and probs are not available in a comp"):
        compiled(randn(3, 3))
    broken = torch.compile(solve, backend="eager")
    torch.testing.assert_close(broken(randn(3, 3)), solve(randn(3, 3)))


def test_a_factor_of_ones_own_inside_compile():
    torch._dynamo.reset()

    def solve(eta):
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        fg.add(TwoOf(u))
        fg.solve()
        return u.value

    with pytest.raises(Exception, match=r"oracle in Python, can't be compiled"):
        torch.compile(solve, fullgraph=True, backend="eager")(randn(4))
    apart = torch.compiler.disable(solve)
    around = torch.compile(lambda eta: 3 * apart(2 * eta), backend="eager")
    torch.testing.assert_close(around(randn(4)), 3 * solve(2 * randn(4)))


# A factor of one's own ----------------------------------------------------------------------------


def test_errors_of_an_oracle_come_through_autograd():
    class Broken(fm.Factor):
        def map(self, eta_u, eta_v):
            raise LookupError("mine")

    fg = fm.FactorGraph(batch_dims=1)
    fg.add(Broken(fg.variable_from(randn(4, 3))))
    with pytest.raises(LookupError, match="mine"):
        fg.solve()


def test_training_reaches_a_tree():
    torch.manual_seed(0)
    scores = torch.zeros(5, 5, requires_grad=True)
    target = torch.eye(5)[[0, 0, 1, 1, 3]]
    optimizer = torch.optim.SGD([scores], lr=1.0)
    for _ in range(60):
        optimizer.zero_grad()
        (value,) = dep_tree(scores)
        ((value - target) ** 2).sum().backward()
        optimizer.step()
    torch.testing.assert_close(dep_tree(scores.detach())[0], target, atol=1e-3, rtol=0)
