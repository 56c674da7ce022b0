"""Factor scores that only some factors share with the whole batch, in torch: never repeated."""

import functools
import itertools

import numpy as np
import pytest
from shared_scores import (
    BATCH,
    DTYPES,
    MODELS,
    TOLERANCE,
    all_shared,
    assert_same,
    assert_sums,
    both,
    components,
    labels,
    made,
    one_row,
    sequences,
    tensor_of,
)

import factormax as fm
from factormax._fronts.numpy import start

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("temperature", [None, np.linspace(0.5, 2, BATCH)])
@pytest.mark.parametrize("kind", ["sparsemap", "perceptron", "hinge"])
@pytest.mark.parametrize("model", [labels, components, all_shared])
def test_losses(model, kind, temperature):
    fg, u, *_ = made(model)
    fg.decode(on_failure="ignore")
    target, answers = torch.tensor(u.value), []
    weight = torch.linspace(-1, 2, BATCH, dtype=torch.float64)
    for fg, u, _, given in both(model, np.float64, convert=tensor_of):
        loss = fg.loss({u: target}, kind=kind, temperature=temperature, on_failure="ignore")
        (loss * weight).sum().backward()
        answers.append((loss.detach(), [t.grad for t in given]))
    assert_same(answers[0][0], answers[1][0])
    for found, expected in zip(answers[0][1], answers[1][1], strict=True):
        assert_sums(found, expected, np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [None, 0.5, "each"])
@pytest.mark.parametrize("model", MODELS)
def test_torch(model, temperature, dtype):
    answers = []
    for fg, u, factors, given in both(model, dtype, convert=tensor_of):
        each = np.linspace(0.5, 2, BATCH)
        heat = torch.tensor(each if temperature == "each" else temperature or 1.0)
        heat.requires_grad_(temperature is not None)
        solution = fg.solve(temperature=None if temperature is None else heat, on_failure="ignore")
        weight = np.random.default_rng(0).normal(size=u.value.shape).astype(dtype)
        value = (u.value * torch.from_numpy(weight)).sum() + factors[0].value.sum()
        value.backward(retain_graph=True)
        grads = [t.grad.clone() for t in given]
        for t in given:
            t.grad = None
        of_heat = 0.0 if heat.grad is None else heat.grad.clone()
        solution.objective.sum().backward()
        answers.append((u.value.detach(), grads + [t.grad for t in given], of_heat))
    assert_same(answers[0][0], answers[1][0])
    for found, expected in zip(answers[0][1], answers[1][1], strict=True):
        assert_sums(found, expected, dtype)
    scale = TOLERANCE[dtype] * BATCH
    np.testing.assert_allclose(answers[0][2], answers[1][2], rtol=scale, atol=scale)


@pytest.mark.parametrize("model", [labels, all_shared])
def test_second_derivatives(model):
    answers = []
    for fg, u, _, given in both(model, np.float64, convert=tensor_of):
        fg.solve(on_failure="ignore")
        first = torch.autograd.grad((u.value**2).sum(), given, create_graph=True)
        second = torch.autograd.grad(sum([(g * g).sum() for g in first[:1]]), given)
        answers.append(second)
    for found, expected in zip(*answers, strict=True):
        assert_sums(found, expected, np.float64)


def solver_of(model, batch_dims=1):
    """A function of a temperature (or None) and the scores of a model."""

    def solved(heat, *scores):
        numbers = iter(scores)
        fg = fm.FactorGraph(batch_dims=batch_dims)
        u, *factors = model(fg, lambda *shape: next(numbers))
        solution = fg.solve(temperature=heat, on_failure="ignore", tol=1e-9)
        own = sum([(f.value**2).sum() for f in factors])
        return u.value, (u.value**2).sum() + own + solution.objective.sum()

    return solved


def heat_of(kind):
    """A temperature: None, one of all instances, or one for each."""
    if kind is None:
        return None
    return tensor_of(np.linspace(0.5, 2, BATCH) if kind == "each" else np.array(kind))


@pytest.mark.parametrize("temperature", [None, 0.5, "each"])
@pytest.mark.parametrize("model", [labels, sequences, one_row, all_shared])
def test_compiled(model, temperature):
    _, _, _, given = made(model)
    solved, answers = solver_of(model), []
    torch.compiler.reset()  # the other models have the same code
    for run in (solved, torch.compile(solved, backend="aot_eager", fullgraph=True)):
        tensors, heat = [tensor_of(a) for a in given], heat_of(temperature)
        value, total = run(heat, *tensors)
        total.backward()
        answers.append([value.detach(), *[t.grad for t in tensors]])
        answers[-1] += [] if heat is None else [heat.grad]
    for found, expected in zip(*answers, strict=True):
        atol = 1e-9 * max(1, np.abs(expected.numpy()).max())
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("temperature", [None, 0.5, "each"])
@pytest.mark.parametrize("model", MODELS)
def test_the_operator_takes_shared_scores_once(model, temperature):
    from factormax._fronts.torch.traced import _op_args
    from factormax._layout import Layout
    from factormax._options import Options

    fg, *_ = made(model, convert=tensor_of)
    columns = start(made(model)[0]).inputs.columns
    _, eta_v, *rest = _op_args(fg, Layout.of(fg), Options(), None, heat_of(temperature))
    shared, heat = (*rest[7:], None, None)[:2]
    if shared is None:
        assert len(eta_v) == 1 and eta_v.shape[1] == fg._form().model.num_scores
    else:
        assert shared.shape == columns.shared.shape and eta_v.shape == columns.own.shape
    assert (heat is None) == (temperature != "each")


@pytest.mark.parametrize("temperature", [None, 0.5, "each"])
@pytest.mark.parametrize("model", [labels, sequences, one_row, all_shared])
def test_transforms(model, temperature):
    """Derivatives inside the transforms are those outside of them."""
    _, _, _, given = made(model)
    tensors, heat = [tensor_of(a) for a in given], heat_of(temperature)
    solved, every = solver_of(model), range(len(tensors) + (heat is not None))

    def total(*numbers):
        return solved(*numbers)[1] if heat is not None else solved(None, *numbers)[1]

    numbers = tensors if heat is None else [heat, *tensors]
    expected = torch.autograd.grad(total(*numbers), numbers)
    plain = [t.detach() for t in numbers]
    for found, other in zip(torch.func.grad(total, tuple(every))(*plain), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=1e-9 * float(1 + other.abs().max()))
    torch.manual_seed(0)
    ways = [torch.randn_like(t) for t in plain]
    _, slope = torch.func.jvp(total, tuple(plain), tuple(ways))
    inner = sum([(way * grad).sum() for way, grad in zip(ways, expected, strict=True)])
    torch.testing.assert_close(slope, inner, rtol=1e-9, atol=1e-9)
    # The Jacobian applied twice, through the gradient of a gradient.
    grad = torch.autograd.grad(total(*numbers), tensors[:1], create_graph=True)[0]
    twice = torch.autograd.grad((grad**2).sum(), tensors)
    nested = torch.func.grad(
        lambda *t: (torch.func.grad(total, every[-len(tensors)])(*plain[: -len(t)], *t) ** 2).sum(),
        tuple(range(len(tensors))),
    )(*plain[-len(tensors) :])
    for found, other in zip(nested, twice, strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=1e-9 * float(1 + other.abs().max()))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("heated", [False, True])
def test_samples_of_shared_scores(compiled, heated):
    """A vmap over scores that the instances of a sample share, and over those that all share."""
    torch.manual_seed(0)
    scores, own = torch.randn(3, 4, 5).double(), torch.randn(3, 4, 2).double()
    each, alike, heat = torch.randn(3, 4).double(), torch.randn(4).double(), torch.rand(4).double()

    def total(scores, shared, own, heat):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        pairs = [fg.add(fm.Pair(u[:-1], u[1:], shared))]
        pairs.append(fg.add(fm.Pair(u[:2], u[3:], own)))
        solution = fg.solve(temperature=heat + 0.5 if heated else None)
        return (u.value**2).sum() + (pairs[0].value ** 2).sum() + solution.objective.sum()

    for shared, dim in ((each, 0), (alike, None)):
        run = torch.func.vmap(torch.func.grad(total, (0, 1, 2, 3)), (0, dim, 0, None))
        if compiled:
            run = torch.compile(run, backend="aot_eager", fullgraph=True)
        found = run(scores, shared, own, heat)
        for k in range(3):
            given = [scores[k], shared[k] if dim == 0 else shared, own[k], heat]
            given = [t.clone().requires_grad_() for t in given]
            expected = torch.autograd.grad(total(*given), given, allow_unused=True)
            for a, b in zip(found, expected, strict=True):
                if b is not None:
                    torch.testing.assert_close(a[k], b, rtol=0, atol=1e-9)


def test_the_operator_checks_shared_scores():
    from graphs import op_args_of

    for given in (np.linspace(0.5, 2, 3), None):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(torch.randn(3, 6, dtype=torch.float64))
        fg.add(fm.Pair(u[:3], u[3:], torch.randn(3, dtype=torch.float64)))
        fg.add(fm.Pair(u[:2], u[3:5], torch.randn(3, 2, dtype=torch.float64)))
        args = op_args_of(fg, None if given is None else torch.tensor(given))
        assert len(args) == 11
        tensors = [
            t.requires_grad_() for t in (args[0], args[1], args[9], args[10]) if t is not None
        ]
        assert all([t.is_leaf for t in tensors])
        torch.library.opcheck(torch.ops.factormax.solve_tracked, args)


@pytest.mark.parametrize("heated", [False, True])
def test_an_empty_batch_of_a_transform(heated):

    def total(scores, shared, own):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Pair(u[:2], u[2:], shared))
        fg.add(fm.Pair(u[:1], u[3:], own))
        fg.solve(temperature=torch.ones(0) if heated else None)
        return (u.value**2).sum()

    given = torch.zeros(0, 4), torch.ones(2), torch.zeros(0, 1)
    found = torch.func.grad(total, (0, 1, 2))(*given)
    assert_same(found[1], np.zeros(2, np.float32))
    assert [f.shape for f in found] == [g.shape for g in given]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "kinds", [("own",), ("shared", "own"), ("shared", "heat"), ("own", "heat")]
)
def test_a_program_for_any_batch(kinds, strict):
    """What is exported makes no assumption about the size of the batch."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = torch.nn.Parameter(torch.linspace(-1, 1, 2))

        def forward(self, scores, own, heat):
            fg = fm.FactorGraph(batch_dims=1)
            u = fg.variable_from(scores)
            if "shared" in kinds:
                fg.add(fm.Pair(u[:2], u[2:], self.shared))
            if "own" in kinds:
                fg.add(fm.Pair(u[1:3], u[2:], own))
            fg.solve(temperature=heat if "heat" in kinds else None, tol=1e-9)
            return u.value

    def inputs(batch):
        torch.manual_seed(0)
        return torch.randn(batch, 4), torch.randn(batch, 2), torch.rand(batch) + 0.5

    size = torch.export.Dim("batch", min=2)
    shapes = {name: {0: size} for name in ("scores", "own", "heat")}
    layer = Layer()
    program = torch.export.export(layer, inputs(3), dynamic_shapes=shapes, strict=strict).module()
    torch.testing.assert_close(program(*inputs(6)), layer(*inputs(6)))


def fronts():
    """Functions that call another with arrays of a front."""
    tensors = functools.partial(map, torch.as_tensor)
    vmap = torch.func.vmap
    yield lambda function, *given: function(*given)
    yield lambda function, *given: function(*tensors(given))
    yield lambda function, *given: torch.compile(function, backend="eager")(*tensors(given))
    yield lambda function, *given: vmap(lambda _: function(*tensors(given)))(torch.zeros(1))[0]


def test_scores_that_overflow():
    """What a temperature makes -inf is forbidden, and refused where that is not possible."""
    rng = np.random.default_rng(0)
    scores, initial = (rng.normal(size=s).astype(np.float32) for s in ((4, 5, 3), (4, 3)))
    heat, lowest = np.linspace(0.5, 2, 4, dtype=np.float32), np.finfo(np.float32).min

    def labeled(scores, transitions, initial, heat):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Sequence(u, transitions, initial=initial))
        fg.solve(temperature=heat)
        return u.value

    def paired(scores, pairs, heat):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Pair(u[:2], u[3:], pairs))
        fg.solve(temperature=heat)
        return u.value

    shared, forbidden = (np.eye(3, dtype=np.float32) for _ in range(2))
    shared[0, 1], forbidden[0, 1] = lowest, -np.inf
    wanted = labeled(scores, forbidden, initial, heat)
    for call in fronts():
        for own in (initial, initial[0]):
            assert_same(call(labeled, scores, shared, own, heat).shape, wanted.shape)
        np.testing.assert_allclose(call(labeled, scores, shared, initial, heat), wanted, atol=1e-5)
    pairs = np.array([0.1, lowest], np.float32)
    for given in (pairs, np.repeat(pairs[None], 4, axis=0)):
        for call, cold in itertools.product(fronts(), (heat, np.float32(0.5))):
            with pytest.raises(ValueError, match=r"too small for these scores|got -inf at index"):
                call(paired, scores[:, :, 0], given, cold)
