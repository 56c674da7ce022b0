"""The torch front: autograd, compile, dtypes, data loaders."""

import numpy as np
import oracle
import pytest
from graphs import build, op_args_of
from oracle import Problem
from problems import random_problem

import factormax as fm

torch = pytest.importorskip("torch")

TIGHT = {"tol": 1e-12}


def matching(scores, **options):
    """Rows exactly one, columns at most one; the marginals."""
    fg = fm.FactorGraph(batch_dims=scores.ndim - 2)
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    fg.solve(**options)
    return u.value


def smooth_problem(seed, margin=1e-2, pairs=None, **options) -> Problem:
    """A random problem whose solution is far from a kink."""
    rng = np.random.default_rng(seed)
    while True:
        problem = random_problem(rng, **options)
        enough = pairs is None or len(problem.pair_scores) >= pairs
        if enough and oracle.kink_distance(problem) > margin:
            return problem


def randn(*shape, dtype=torch.float64, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_(grad)


# Values ----------------------------------------------------------------------------------------


def test_the_paper_listing():
    """Listing 1, with only the import changed (and its x spelled eta)."""
    from factormax import AtMostOne, TorchFactorGraph, Xor

    m, n = 3, 5
    eta = torch.randn(m, n, requires_grad=True)
    fg = TorchFactorGraph()
    u = fg.variable_from(eta)
    for i in range(m):
        fg.add(Xor(u[i, :]))
    for j in range(n):
        fg.add(AtMostOne(u[:, j]))  # some columns may be 0
    fg.solve()
    u.value[0, -1].backward()
    assert eta.grad.shape == (m, n)
    assert TorchFactorGraph is fm.FactorGraph


@pytest.mark.parametrize("seed", range(5))
def test_the_same_bits_as_numpy(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 8, 8)
    eta, grad = rng.normal(size=(2, 3, 8))
    here = build(problem, eta, batch_dims=1)
    expected = here.fg.solve().vjp({here.u: grad})
    scores = torch.tensor(eta, requires_grad=True)
    there = build(problem, scores, batch_dims=1)
    there.fg.solve()
    there.u.value.backward(torch.tensor(grad))
    np.testing.assert_array_equal(there.u.value.detach().numpy(), here.u.value)
    np.testing.assert_array_equal(scores.grad.numpy(), expected[here.u])


def test_solution_holds_tensors():
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(randn(4, 3))
    fg.add(fm.Xor(u))
    solution = fg.solve()
    for name in ("converged", "iterations", "primal_residual", "dual_residual", "objective"):
        value = getattr(solution, name)
        assert isinstance(value, torch.Tensor) and value.shape == (4,), name
    assert solution.converged.dtype == torch.bool
    assert all(status is fm.Status.CONVERGED for status in solution.status)


def test_parameters_and_masks_may_be_tensors():
    scores = randn(3, 4)
    fg = fm.FactorGraph(batch_dims=1)
    mask = torch.tensor([[True] * 4, [True] * 3 + [False], [False] * 4])
    u = fg.variable_from(scores, mask=mask)
    fg.add(fm.Budget(u, torch.tensor([1, 0, 2])))
    fg.add(fm.Knapsack(u, torch.rand(3, 4, dtype=torch.float64), torch.tensor([1.0, 2.0, 3.0])))
    fg.solve()
    u.value.sum().backward()
    assert u.value[1].abs().sum() == 0
    assert not scores.grad[~mask].any()


# Gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_gradcheck(seed):
    problem = smooth_problem(seed, n=6, factors=5, pairs=1)

    def solve(eta, pair_scores):
        built = build(problem, eta, pair_scores=pair_scores)
        solution = built.fg.solve(**TIGHT)
        return built.u.value, built.pair.value, solution.objective

    inputs = torch.tensor(problem.eta), torch.tensor(problem.pair_scores)
    assert torch.autograd.gradcheck(solve, [x.requires_grad_() for x in inputs])


def test_gradcheck_of_a_batch():
    problem = smooth_problem(0, n=5, factors=4, pairs=2)
    rng = np.random.default_rng(0)
    eta, coupling = [], []
    while len(eta) < 3:
        point = rng.normal(size=5), rng.normal(size=len(problem.pair_scores))
        if oracle.kink_distance(problem.with_eta(point[0]).with_pair_scores(point[1])) > 1e-2:
            eta.append(point[0])
            coupling.append(point[1])

    def solve(eta, pair_scores):
        built = build(problem, eta, batch_dims=1, pair_scores=pair_scores)
        built.fg.solve(**TIGHT)
        return built.u.value, built.pair.value

    inputs = torch.tensor(np.array(eta)), torch.tensor(np.array(coupling))
    assert torch.autograd.gradcheck(solve, [x.requires_grad_() for x in inputs])


def test_gradient_of_the_objective_is_the_value():
    problem = smooth_problem(1, n=6, factors=5, pairs=1)
    eta = torch.tensor(problem.eta, requires_grad=True)
    coupling = torch.tensor(problem.pair_scores, requires_grad=True)
    built = build(problem, eta, pair_scores=coupling)
    solution = built.fg.solve(**TIGHT)
    solution.objective.backward()
    torch.testing.assert_close(eta.grad, built.u.value.detach())
    torch.testing.assert_close(coupling.grad, built.pair.value.detach())


@pytest.mark.parametrize("wanted", ["u", "v", "pair", "u v", "u pair", "none"])
def test_requires_grad_on_any_subset(wanted):
    scores = {"u": randn(3, seed=1), "v": randn(3, seed=2), "pair": randn(3, seed=3)}

    def solve(names):
        leaves = {k: x.detach().clone().requires_grad_(k in names) for k, x in scores.items()}
        fg = fm.FactorGraph()
        u, v = fg.variable_from(leaves["u"]), fg.variable_from(leaves["v"])
        pair = fg.add(fm.Pair(u, v, leaves["pair"]))
        fg.add(fm.AtMostOne([u, v]))
        fg.solve(**TIGHT)
        loss = (u.value * torch.arange(3)).sum() + v.value[0] + pair.value.sum()
        if names:
            loss.backward()
        return loss, {k: x.grad for k, x in leaves.items()}

    names = [] if wanted == "none" else wanted.split()
    loss, grads = solve(names)
    _, everything = solve(list(scores))
    assert loss.requires_grad == bool(names)
    for name, grad in grads.items():
        if name in names:
            torch.testing.assert_close(grad, everything[name])
        else:
            assert grad is None


def test_slices_and_factor_values_carry_gradients():
    scores = randn(3, 4)
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u, axis=1))
    fg.solve()
    (u[1:, 0].value ** 2).sum().backward()
    by_slice = scores.grad.clone()
    scores.grad = None
    (matching_rows(scores)[1:, 0] ** 2).sum().backward()
    torch.testing.assert_close(by_slice, scores.grad)


def matching_rows(scores):
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u, axis=1))
    fg.solve()
    return u.value


def test_a_second_backward():
    scores = randn(4, 4)
    loss = (matching(scores) ** 2).sum()
    (first,) = torch.autograd.grad(loss, scores, retain_graph=True)
    (second,) = torch.autograd.grad(loss, scores, retain_graph=True)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    loss.backward()
    with pytest.raises(RuntimeError):
        loss.backward()


def test_no_grad():
    scores = randn(3, 3)
    with torch.no_grad():
        assert not matching(scores).requires_grad
    with torch.inference_mode():
        assert not matching(scores).requires_grad
    assert not matching(scores.detach()).requires_grad


def test_scores_changed_in_place_after_the_solve():
    """Either torch refuses, or the gradient is that of the solve."""
    scores = randn(4, 4)
    inside = scores * 1
    value = matching(inside)
    inside.detach().fill_(7.0)
    value[0, 0].backward()
    expected = scores.grad.clone()
    scores.grad = None
    matching(scores)[0, 0].backward()
    torch.testing.assert_close(expected, scores.grad)


def test_gradient_through_a_failure():
    """An infeasible instance is NaN with gradient 0, and leaves the others alone."""
    scores = randn(2, 3)
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores, mask=torch.tensor([[True] * 3, [True, False, False]]))
    fg.add(fm.AtLeast(u, 2))
    fg.add(fm.AtMostOne(u[1:]))
    solution = fg.solve(on_failure="ignore")
    assert list(solution.status) == [fm.Status.CONVERGED, fm.Status.INFEASIBLE]
    (u.value * torch.arange(3)).sum().backward()
    assert torch.isnan(u.value[1, 0]) and not scores.grad[1].any()
    assert torch.isfinite(scores.grad).all()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[:, ::2],
        lambda x: x[0].expand(4, 6),
        lambda x: x.flip(0),
        lambda x: x[None].expand(3, 4, 6),
        lambda x: torch.stack([x, x])[:, 1:, :],
    ],
)
def test_views(view):
    """Non-contiguous, strided and expanded tensors, forward and backward."""
    base = randn(4, 6)
    results = []
    for contiguous in (False, True):
        base.grad = None
        scores = view(base)
        scores = scores.contiguous() if contiguous else scores
        fg = fm.FactorGraph(batch_dims=scores.ndim - 2)
        u = fg.variable_from(scores)
        fg.add(fm.AtMostOne(u, axis=1))
        fg.add(fm.AtMostOne(u, axis=0))
        fg.solve(**TIGHT)
        u.value.pow(2).sum().backward()
        results.append((u.value.detach(), base.grad))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_a_gradient_that_is_expanded():
    scores = randn(3, 3)
    matching(scores).sum(0).sum().backward()  # the gradient that arrives is a view of one number
    assert scores.grad.abs().max() < 1e-9  # Xor rows: the sum is constant


# Dtypes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    wide = randn(5, 5, grad=False)
    scores = wide.to(dtype).requires_grad_()
    value = matching(scores)
    assert value.dtype == dtype
    expected = matching(scores.detach().double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(value.detach().double(), expected, rtol=0, atol=max(2 * eps, 1e-5))
    value[0, 1].backward()
    assert scores.grad.dtype == dtype and scores.grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(6, 5), torch.randn(5, 6)
    with torch.autocast("cpu", dtype=dtype):
        scores = layer(x)
        low, full = matching(scores), matching(scores.float())
    assert scores.dtype == low.dtype == dtype and full.dtype == torch.float32
    torch.testing.assert_close(low.float(), full, rtol=0, atol=2 * torch.finfo(dtype).eps)
    low[0, 1].backward()
    assert layer.weight.grad.dtype == torch.float32
    assert torch.isfinite(layer.weight.grad).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_are_computed_in_the_default_dtype(dtype):
    value = matching(torch.tensor([[1, 0], [1, 1]], dtype=dtype))
    assert value.dtype == torch.get_default_dtype()


def test_nan_names_the_variable_and_the_index():
    scores = torch.zeros(2, 3)
    scores[1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"\bu\b.*1, ?2"):
        matching(scores)


def test_complex_is_refused():
    with pytest.raises((TypeError, ValueError)):
        matching(torch.zeros(2, 2, dtype=torch.complex64))


# The operator ------------------------------------------------------------------------------------


@pytest.fixture(params=["scores", "pairs", "batch", "float32"])
def op_args(request):
    """Arguments of `torch.ops.factormax.solve_tracked`."""
    dtype = torch.float32 if request.param == "float32" else torch.float64
    fg = fm.FactorGraph(batch_dims=int(request.param == "batch"))
    shape = (2, 3, 4) if request.param == "batch" else (3, 4)
    u = fg.variable_from(randn(*shape, dtype=dtype))
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    if request.param == "pairs":
        fg.add(fm.Pair(u[0], u[1], randn(4, seed=1)))
    return op_args_of(fg)


def test_opcheck(op_args):
    torch.library.opcheck(torch.ops.factormax.solve_tracked, op_args)


class Layer(torch.nn.Module):
    """A model that builds a graph and solves it in its forward."""

    def __init__(self):
        super().__init__()
        self.score = torch.nn.Linear(6, 5, dtype=torch.float64)
        self.coupling = torch.nn.Parameter(torch.full((4,), 0.3, dtype=torch.float64))

    def forward(self, x):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(self.score(x))
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.AtMostOne(u, axis=0))
        fg.add(fm.Or([u[0, :2], u[1, 0].negate()]))
        pair = fg.add(fm.Pair(u[0, 1:], u[1, 1:], self.coupling))
        solution = fg.solve()
        return (u.value**2).sum((1, 2)) + pair.value.sum(1) + 0.1 * solution.objective


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compile(backend):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Layer(), torch.randn(3, 4, 6, dtype=torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    results = []
    for run in (model, compiled, compiled):
        model.zero_grad()
        out = run(x)
        out.sum().backward()
        results.append((out.detach(), [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_compile_of_another_batch_size():
    torch._dynamo.reset()
    model = Layer()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in (2, 3, 7):
        x = torch.randn(size, 4, 6, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs another device")
def test_another_device():
    scores = randn(4, 4, grad=False)
    there = scores.cuda().requires_grad_()
    value = matching(there)
    assert value.device == there.device
    torch.testing.assert_close(value.detach().cpu(), matching(scores))
    value[0, 1].backward()
    assert there.grad.device == there.device


# Training and data loaders ------------------------------------------------------------------------


def test_a_few_steps_of_training_reach_the_target():
    """Learn scores whose matching is a given permutation."""
    torch.manual_seed(0)
    scores = torch.zeros(4, 4, requires_grad=True)
    target = torch.eye(4)[[2, 0, 3, 1]]
    optimizer = torch.optim.SGD([scores], lr=1.0)
    for _ in range(50):
        optimizer.zero_grad()
        loss = ((matching(scores) - target) ** 2).sum()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(matching(scores.detach()), target, atol=1e-3, rtol=0)


class Matchings(torch.utils.data.Dataset):
    """Each item is solved where it is loaded."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return matching(randn(8, 6, 6, seed=index, grad=False))


def test_data_loader_workers_can_solve():
    """Forked workers, after this process has used the thread pool."""
    items = Matchings()
    expected = torch.stack([items[k] for k in range(12)])
    loader = torch.utils.data.DataLoader(
        items, batch_size=3, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    torch.testing.assert_close(torch.cat(list(loader)), expected, rtol=0, atol=0)


def test_parameters_take_no_gradient():
    fg = fm.FactorGraph()
    u = fg.variable_from(torch.zeros(3))
    with pytest.raises(fm.GraphError, match="costs takes no gradient"):
        fg.add(fm.Knapsack(u, torch.ones(3, requires_grad=True), 1.0))


def test_create_graph_changes_nothing():
    scores = randn(4, 4)
    (grad,) = torch.autograd.grad((matching(scores) ** 2).sum(), scores, create_graph=True)
    (plain,) = torch.autograd.grad((matching(scores) ** 2).sum(), scores)
    torch.testing.assert_close(grad.detach(), plain)


def test_values_changed_in_place_are_noticed():
    scores = randn(4, 4)
    fg = fm.FactorGraph()
    u, v = fg.variable_from(scores), fg.variable_from(randn(2))
    fg.add(fm.Xor(u, axis=1))
    solution = fg.solve()
    objective = solution.objective
    v.value.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        objective.backward()
    solution = fg.solve()
    v.value.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _ = solution.objective


def test_values_changed_in_place_leave_the_gradient_alone():
    scores = randn(4, 4)
    value = matching(scores)
    value.detach().zero_()
    (grad,) = torch.autograd.grad(value[0, 0], scores)
    (expected,) = torch.autograd.grad(matching(scores)[0, 0], scores)
    torch.testing.assert_close(grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("temperature", [0.5, torch.tensor(0.5, dtype=torch.float64)])
def test_the_objective_remembers_how_it_was_solved(temperature):
    """It is made when it is first asked for, and has the history of the solve by then."""
    scores = randn(4, 4)
    if isinstance(temperature, torch.Tensor):
        temperature.requires_grad_()

    def solved(scores):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u, axis=1))
        pair = fg.add(fm.Pair(u[0, 0], u[1, 1], np.array(0.3)))  # takes no gradient
        return fg.solve(temperature=temperature), u, pair

    solution, u, pair = solved(scores)
    with torch.no_grad():
        objective = solution.objective
    wanted = [scores] if isinstance(temperature, float) else [scores, temperature]
    grads = torch.autograd.grad(objective, wanted)
    torch.testing.assert_close(grads[0], u.value / temperature)
    if len(wanted) == 2:
        inner = (scores * u.value).sum() + 0.3 * pair.value
        torch.testing.assert_close(grads[1], -inner / temperature**2)
    with torch.no_grad():
        solution, *_ = solved(scores)
    assert not solution.objective.requires_grad


def test_the_error_carries_the_solution():
    fg = fm.FactorGraph()
    u = fg.variable_from(torch.zeros(3))
    fg.add(fm.AtLeast(u, 2))
    fg.add(fm.AtMostOne(u))
    with pytest.raises(fm.InfeasibleError) as caught:
        fg.solve(on_failure="raise")
    assert caught.value.solution.status is fm.Status.INFEASIBLE
    assert u.value.isnan().all()


# What a call costs --------------------------------------------------------------------------------


def test_a_small_solve_takes_few_calls():
    """A count, because times are noisy: of the functions of the library that one solve calls."""
    import sys

    scores, grad = randn(5, 5, dtype=torch.float32), torch.ones(5, 5)
    calls = []

    def profile(frame, event, _):
        if event == "call" and "factormax" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    for _ in range(2):
        calls.clear()
        sys.setprofile(profile)
        try:
            fg = fm.FactorGraph()
            u = fg.variable_from(scores)
            fg.add(fm.Xor(u, axis=1))
            fg.add(fm.AtMostOne(u, axis=0))
            fg.solve()
            u.value.backward(grad)
        finally:
            sys.setprofile(None)
    assert len(calls) <= 85, calls
