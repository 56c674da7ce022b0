"""`torch.compile`: sizes that change, and what breaks the graph."""

import warnings

import pytest
from factors.test_factor import TwoOf

import factormax as fm

torch = pytest.importorskip("torch")


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def assert_same(compiled, function, *inputs):
    """The same values and gradients."""
    values = [run(*inputs) for run in (compiled, function)]
    torch.testing.assert_close(*values)
    weight = randn(*values[0].shape, seed=9).detach()
    needed = [x for x in inputs if x.requires_grad]
    grads = [torch.autograd.grad((v * weight).sum(), needed) for v in values]
    torch.testing.assert_close(*grads)


def matching(eta, pairs):
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    fg.add(fm.Or([u[0, :2].negate(), u[1, 1:]]))
    fg.add(fm.Budget(u[:, 1], 2))
    fg.add(fm.Pair(u[:-1], u[1:], pairs))
    fg.solve(tol=1e-9)
    return u.value


def tagging(eta, transitions):
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta)
    fg.add(fm.Sequence(u, transitions))
    fg.add(fm.AtMostOne(u, axis=0))
    fg.solve(tol=1e-9)
    return u.value


@pytest.mark.parametrize("function", [matching, tagging])
def test_sizes_that_change(function):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(3, 9):
            own = randn() if function is matching else randn(n + 1, n + 1, seed=1)
            assert_same(compiled, function, randn(2, n, n + 1), own)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one static, one for all


def decoded(eta):
    fg = fm.FactorGraph()
    u = fg.variable_from(2 * eta)
    fg.add(fm.Xor(~u, axis=1))
    fg.decode()
    return u.value + 1


def relaxed(eta):
    fg = fm.FactorGraph()
    u = fg.variable_from(2 * eta)
    fg.add(fm.Matching(u))
    return fg.solve_map().objective * 2


def lost(eta):
    fg = fm.FactorGraph()
    u = fg.variable_from(2 * eta)
    fg.add(fm.Matching(u))
    return fg.loss({u: torch.eye(4)}) * 2


def probable(eta):
    fg = fm.FactorGraph()
    factor = fg.add(fm.Matching(fg.variable_from(0.1 * eta)))
    fg.solve(tol=1e-9)
    return factor.probs[:1] * 2


def own(eta):
    fg = fm.FactorGraph()
    u = fg.variable_from(2 * eta)
    fg.add(TwoOf(u[0]))
    fg.solve(tol=1e-9)
    return u.value


BREAKS = {
    decoded: "solve_map and decode can't be compiled",
    relaxed: "solve_map and decode can't be compiled",
    lost: "loss can't be compiled",
    probable: "structures and probs are not available",
    own: "oracle in Python, can't be compiled",
}


@pytest.mark.parametrize("function", BREAKS, ids=lambda f: f.__name__)
def test_what_breaks_the_graph(function):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager")
    for seed in range(2):
        torch.testing.assert_close(
            compiled(randn(4, 4, seed=seed)), function(randn(4, 4, seed=seed))
        )


@pytest.mark.parametrize(
    "function", [f for f in BREAKS if f is not decoded], ids=lambda f: f.__name__
)
def test_a_full_graph_says_why_not(function):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=BREAKS[function]):
        compiled(randn(4, 4))


def test_torch_is_left_alone_without_the_compiler():
    """Marking functions for the compiler would import all of it."""
    import subprocess
    import sys

    code = (
        "import sys, torch, factormax as fm; fg = fm.FactorGraph(); "
        "u = fg.variable_from(torch.zeros(3)); fg.add(fm.Xor(u)); fg.solve(); "
        "fg.loss({u: [1, 0, 0]}); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def knapsacks(eta, weights, budget):
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta)
    fg.add(fm.Knapsack(u[[0, 2, 1]], weights, budget, axis=1))
    fg.add(fm.AtMostOne([u[0, [1, 0]], u[2, :1]]))
    solution = fg.solve(tol=1e-9)
    return u.value + solution.objective[:, None, None] * solution.converged[:, None, None]


def test_parameters_that_change():
    """What an operator remembers of a graph is not its parameters."""
    torch._dynamo.reset()
    compiled = torch.compile(knapsacks, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        weights = randn(3, 4, seed=seed).detach().abs() + 0.1
        assert_same(compiled, knapsacks, randn(2, 3, 4), weights, weights.sum() / 6)


def test_a_parameter_that_is_wrong_is_refused_when_it_comes():
    torch._dynamo.reset()
    compiled = torch.compile(knapsacks, fullgraph=True, backend="aot_eager")
    weights = torch.ones(3, 4, dtype=torch.float64)
    compiled(randn(2, 3, 4), weights, torch.tensor(2.0))
    with pytest.raises(ValueError, match="Knapsack over u"):
        compiled(randn(2, 3, 4), -weights, torch.tensor(2.0))


def test_sides_must_fit():
    """What the operator keeps for its derivative is checked before it is read."""
    from graphs import op_args_of

    fg = fm.FactorGraph()
    fg.add(fm.Xor(fg.variable_from(randn(4).detach())))
    eta_u, eta_v, mask, warm, *graph = op_args_of(fg)
    mu, _, _, _, sides, _ = torch.ops.factormax.solve(eta_u, eta_v, mask, warm, *graph)
    with pytest.raises(ValueError, match="sides has the wrong shape"):
        torch.ops.factormax.solve_vjp(
            mu, None, None, eta_u, eta_v, mask, sides[:, 1:], None, None, None, *graph
        )


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_gradients_of_shared_scores_in_a_batch_of_any_size(batch):
    def total(scores, coupling):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        pair = fg.add(fm.Pair(u[:-1], u[1:], coupling))
        fg.solve()
        return u.value.sum() + pair.value.sum()

    given = randn(batch, 4), randn(3)
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    for ours, eager in zip(
        torch.autograd.grad(compiled(*given), given),
        torch.autograd.grad(total(*given), given),
        strict=True,
    ):
        torch.testing.assert_close(ours, eager)


def test_a_gradient_finds_its_solution(monkeypatch):
    """It solves again only if torch has copied what belongs to the solution, and forgets it."""
    from graphs import op_args_of

    from factormax import _engines
    from factormax._fronts.torch import traced

    solves = []
    solve = _engines.solve
    monkeypatch.setattr(_engines, "solve", lambda *args: solves.append(1) or solve(*args))
    fg = fm.FactorGraph()
    fg.add(fm.DepTree(fg.variable_from(randn(5, 5).detach())))
    eta_u, eta_v, mask, warm, *graph = op_args_of(fg)
    mu, _, _, tau, sides, _ = torch.ops.factormax.solve(eta_u, eta_v, mask, warm, *graph)

    def grad_with(sides):
        numbers = (eta_u, eta_v, mask, sides, tau, None, None)
        return torch.ops.factormax.solve_vjp(mu, None, None, *numbers, *graph)[0]

    solves.clear()
    grad = grad_with(sides)
    assert not solves
    torch.testing.assert_close(grad_with(sides.clone()), grad)
    assert len(solves) == 1
    kept = len(traced._solved)
    del sides
    assert len(traced._solved) == kept - 1


def test_transforms_inside_a_compiled_function():
    """Samples in one batch, with scores that the instances of each share."""
    vmap, grad = torch.func.vmap, torch.func.grad

    def loss(own, scores):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        pair = fg.add(fm.Pair(u[:, 0], u[:, 1], own))
        fg.add(fm.Budget(u[:, :2], 2))
        fg.solve()
        return (u.value**2).sum() + pair.value.sum()

    def function(own, scores):
        value = vmap(loss, in_dims=(None, 1))(own, scores)
        return value, vmap(grad(loss, argnums=(0, 1)), in_dims=(None, 1))(own, scores)

    generator = torch.Generator().manual_seed(0)
    own = torch.randn(4, generator=generator, dtype=torch.float64)
    scores = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(own, scores), function(own, scores))


def test_messages_name_factors():
    """Of the operator too, to which a graph comes as a text."""

    def function(scores):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.AtLeast(u[1:3], 2))
        fg.add(fm.AtMostOne(u))
        fg.solve(on_failure="raise")
        return u.value

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    message = r"first is instance \(0,\)\. These .*: AtLeast over u\[1:3\]; AtMostOne over u\."
    for run in (compiled, torch.func.vmap(lambda s: function(s[None])[0])):
        with pytest.raises(fm.InfeasibleError, match=message):
            run(torch.zeros(2, 4))


def test_forward_mode():
    """Right where the graph may break, and else a clear error."""

    def function(scores, moves):
        def value(scores):
            fg = fm.FactorGraph()
            u = fg.variable_from(scores)
            fg.add(fm.Xor(u, axis=1))
            fg.add(fm.AtMostOne(u, axis=0))
            fg.solve(tol=1e-9)
            return u.value

        return torch.func.jvp(value, (scores,), (moves,))[1]

    given = randn(3, 4).detach(), randn(3, 4, seed=1).detach()
    compiled = torch.compile(function, backend="eager")
    torch.testing.assert_close(compiled(*given), function(*given))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="a solve in forward mode can't be compiled"):
        torch.compile(function, backend="eager", fullgraph=True)(*given)


def test_a_factor_that_a_process_does_not_know():
    """As where a program was exported, and its own factors are not imported."""
    op = torch.ops.factormax.solve
    text = "Unheard +0,1\x1f\x1f\x1dauto\x1e1e-06\x1e10000\x1e100000\x1e1.0\x1ewarn\x1du\x1f1\x1d"
    with pytest.raises(fm.GraphError, match=r"factor Unheard, which .* Import the module that"):
        op(torch.zeros(1, 3), torch.zeros(1, 0), None, None, [], [], [], [0, 3, 1, 3], text)
