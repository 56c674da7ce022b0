"""Factor scores that only some factors share with the whole batch: they are never repeated."""

import functools
import itertools
import os
import subprocess
import sys

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
)

import factormax as fm
from factormax._columns import Columns
from factormax._fronts.numpy import start
from factormax._space import NumpySpace


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_the_answers_and_gradients_are_the_same(model, dtype):
    answers = []
    for fg, u, factors, _ in both(model, dtype):
        solution = fg.solve(tol=1e-9, on_failure="ignore")
        rng = np.random.default_rng(0)
        grads = {u: rng.normal(size=u.value.shape)}
        grads |= {f: rng.normal(size=f.value.shape) for f in factors}
        alone, together = solution.vjp({u: grads[u]}), solution.vjp(grads)
        values = [u.value, *[f.value for f in factors], solution.multipliers, solution.objective]
        answers.append((values, [*alone.values(), *together.values()]))
    for found, expected in zip(*[values for values, _ in answers], strict=True):
        assert_same(found, expected)
    for found, expected in zip(*[grads for _, grads in answers], strict=True):
        assert_sums(found, expected, dtype)


@pytest.mark.parametrize("model", MODELS)
def test_nothing_shared_is_repeated(model):
    fg, _, _, given = made(model)
    inputs = start(fg).inputs
    own = [a for a in given[1:] if len(a) == BATCH]
    assert inputs.columns.own.shape[0] == BATCH and inputs.columns.shared.shape[0] == 1
    assert inputs.columns.own.shape[1] < inputs.model.num_scores
    assert bool(own) == bool(inputs.columns.own.shape[1])
    # Nor do temperatures change that.
    assert start(fg, np.array(0.5)).inputs.runs == inputs.runs
    cooled = start(fg, np.linspace(0.5, 2, BATCH)).inputs.columns
    assert cooled.runs == inputs.runs and cooled.shared.shape == inputs.columns.shared.shape


MEASURED = """
from pathlib import Path
import numpy as np
import factormax as fm

def megabytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

rng, (i, j) = np.random.default_rng(0), np.triu_indices(60, 1)
scores, shared, own = rng.normal(size=(2048, 60)), rng.normal(size=len(i)), np.ones((2048, 2))
fg = fm.FactorGraph(batch_dims=1)
u = fg.variable_from(scores)
fg.add(fm.Pair(u[i], u[j], shared))
fg.add(fm.Pair(u[:2], u[2:4], own))
before = megabytes("VmRSS")
solution = fg.solve(tol=1e-2, temperature=%s, on_failure="ignore")
if %s:
    solution.vjp({u: scores})
print((megabytes("VmHWM") - before) / (2048 * len(i) * 8 / 2**20))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak")
@pytest.mark.parametrize(
    "temperature, gradient, most",
    [
        ("None", True, 3),  # 4.3 if scores and gradients are repeated
        ("np.linspace(1, 2, 2048)", False, 3),  # 5.1 if scores are repeated
        ("np.linspace(1, 2, 2048)", True, 4),  # each instance has its gradient of the temperature
    ],
)
def test_the_peak_of_memory(temperature, gradient, most):
    """In units of one number per instance and pair: there are the marginals and multipliers."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEASURED % (temperature, gradient)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert float(done.stdout) < most


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_the_threads_do_not_matter(model, dtype):
    answers = []
    for threads in (1, 2, 5):
        fm.set_num_threads(threads)
        fg, u, factors, _ = made(model, dtype)
        solution = fg.solve(on_failure="ignore")
        grads = solution.vjp({u: np.random.default_rng(0).normal(size=u.value.shape)})
        answers.append([u.value, *[f.value for f in factors], *grads.values()])
    fm.set_num_threads(None)
    for other in answers[1:]:
        for found, expected in zip(other, answers[0], strict=True):
            assert_same(found, expected)


TEMPERATURES = [None, np.linspace(0.5, 2, BATCH)]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("model", [labels, one_row, all_shared])
def test_masked_variables(model, temperature):
    shape = made(model)[3][0].shape
    mask = np.random.default_rng(1).random(shape) < 0.8
    answers = []
    for fg, u, factors, _ in both(model, np.float64, mask=mask):
        solution = fg.solve(tol=1e-9, temperature=temperature, on_failure="ignore")
        grads = solution.vjp({u: np.random.default_rng(0).normal(size=shape)})
        heat = grads.pop("temperature", 0.0)
        answers.append(([u.value, *[f.value for f in factors]], list(grads.values()), heat))
    for found, expected in zip(answers[0][0], answers[1][0], strict=True):
        assert_same(found, expected)
    for found, expected in zip(answers[0][1], answers[1][1], strict=True):
        assert_sums(found, expected, np.float64)
    np.testing.assert_allclose(answers[0][2], answers[1][2], atol=1e-12)


def test_masks_that_split_a_large_graph():
    """Every instance is cut into parts of its own."""
    size, rng = 96, np.random.default_rng(0)
    scores, across = rng.normal(size=(2, size, size)), rng.normal(size=(size, size - 1))
    down, mask = rng.normal(size=(2, size - 1, size)), np.ones((2, size, size), bool)
    mask[0, 24::25] = mask[1, :, 20::21] = False
    answers = []
    for shared in (across, np.stack([across, across])):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores, mask=mask)
        fg.add(fm.Pair(u[:, 1:], u[:, :-1], shared))
        own = fg.add(fm.Pair(u[1:], u[:-1], down))
        fg.add(fm.AtMostOne(u[1:, ::3], u[:-1, ::3]))
        grads = fg.solve(on_failure="ignore").vjp({u: scores})
        answers.append([u.value, own.value, grads[u], grads[own]])
    for found, expected in zip(*answers, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("model", MODELS)
def test_linear_programs(model):
    answers = []
    for fg, u, factors, _ in both(model, np.float64):
        solution = fg.solve_map(on_failure="ignore")
        found = [u.value, *[f.value for f in factors], solution.objective, solution.upper_bound]
        grads = solution.vjp({}, objective=1.0)
        answers.append((found, list(grads.values())))
    for found, expected in zip(answers[0][0], answers[1][0], strict=True):
        assert_same(found, expected)
    for found, expected in zip(answers[0][1], answers[1][1], strict=True):
        assert_sums(found, expected, np.float64)


def test_decoding():
    answers = []
    for fg, u, factors, _ in both(components, np.float64):
        solution = fg.decode()
        answers.append([u.value, *[f.value for f in factors], solution.objective])
    for found, expected in zip(*answers, strict=True):
        assert_same(found, expected)


class Listed(fm.Factor):
    """At most one variable is on; its score counts."""

    def map(self, eta_u, eta_v=()):
        scores = np.asarray(eta_u) + np.asarray(eta_v)
        on = (np.arange(len(scores)) == np.argmax(scores)) & (scores > 0)
        return on.astype(float), on.astype(float)


class Together(Listed):
    """The same, asked about several instances at once."""

    def map_batch(self, eta_u, eta_v):
        both = [self.map(*given) for given in zip(eta_u, eta_v, strict=True)]
        return tuple(np.stack(part) for part in zip(*both, strict=True))


@pytest.mark.parametrize("factor", [Listed, Together])
def test_factors_of_ones_own(factor):
    rng = np.random.default_rng(0)
    scores, shared, own = rng.normal(size=(4, 6)), rng.normal(size=3), rng.normal(size=(4, 3))
    answers = []
    for given in (shared, np.repeat(shared[None], 4, axis=0)):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(factor(u[:3], given))
        fg.add(factor(u[3:], own))
        fg.solve()
        answers.append(u.value)
    assert_same(*answers)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", ["sparsemap", "perceptron", "hinge"])
@pytest.mark.parametrize("model", [labels, components, all_shared])
def test_losses(model, kind, temperature):
    torch = pytest.importorskip("torch")
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


def tensor_of(array):
    return sys.modules["torch"].tensor(array, requires_grad=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [None, 0.5, "each"])
@pytest.mark.parametrize("model", MODELS)
def test_torch(model, temperature, dtype):
    torch = pytest.importorskip("torch")
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
    torch = pytest.importorskip("torch")
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
    torch = pytest.importorskip("torch")
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
    pytest.importorskip("torch")
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
    torch = pytest.importorskip("torch")
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
    torch = pytest.importorskip("torch")
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
    torch = pytest.importorskip("torch")
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


@pytest.mark.parametrize("convert", ["numpy", "torch"])
def test_an_empty_batch(convert):
    if convert == "torch":
        pytest.importorskip("torch")
    to = np.asarray if convert == "numpy" else tensor_of
    scores, shared, own = to(np.zeros((0, 4))), to(np.ones(2)), to(np.zeros((0, 3)))
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    first, second = fg.add(fm.Pair(u[:2], u[2:], shared)), fg.add(fm.Pair(u[1:], u[:-1], own))
    solution = fg.solve()
    assert u.value.shape == (0, 4) and first.value.shape == (0, 2)
    if convert == "numpy":
        found = solution.vjp({u: np.zeros((0, 4))})
        grads = [found[first], found[second]]
    else:
        u.value.sum().backward()
        grads = [shared.grad, own.grad]
    assert_same(grads[0], np.zeros(2))
    assert grads[1].shape == (0, 3)


@pytest.mark.parametrize("heated", [False, True])
def test_an_empty_batch_of_a_transform(heated):
    torch = pytest.importorskip("torch")

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


def test_no_scores_at_all():
    """Pairs of nothing: their broadcast scores still get a gradient, 0."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.ones((3, 2)))
    empty = fg.add(fm.Pair(u[:0], u[:0], np.ones((3, 1))))
    shared = fg.add(fm.Pair(u[:1], u[1:], np.ones(1)))
    found = fg.solve().vjp({u: np.ones((3, 2))})
    assert_same(found[empty], np.zeros((3, 1)))
    assert found[shared].shape == (1,)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "kinds", [("own",), ("shared", "own"), ("shared", "heat"), ("own", "heat")]
)
def test_a_program_for_any_batch(kinds, strict):
    """What is exported makes no assumption about the size of the batch."""
    torch = pytest.importorskip("torch")

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
    yield lambda function, *given: function(*given)
    if torch := sys.modules.get("torch"):
        tensors = functools.partial(map, torch.as_tensor)
        yield lambda function, *given: function(*tensors(given))
        yield lambda function, *given: torch.compile(function, backend="eager")(*tensors(given))
        vmap = torch.func.vmap
        yield lambda function, *given: vmap(lambda _: function(*tensors(given)))(torch.zeros(1))[0]


def test_scores_that_overflow():
    """What a temperature makes -inf is forbidden, and refused where that is not possible."""
    pytest.importorskip("torch")
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


def test_forbidden_transitions_and_bad_scores():
    transitions = np.zeros((2, 2))
    transitions[0, 1] = -np.inf
    for bad, where in ((np.nan, "transitions"), (np.inf, "initial"), (-np.inf, None)):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(np.zeros((3, 4, 2)), name="u")
        initial = np.zeros((3, 2))
        given = transitions.copy()
        if where == "transitions":
            given[1, 0] = bad
        elif where == "initial":
            initial[2, 1] = bad
        fg.add(fm.Sequence(u, given, initial=initial))
        if where is None:
            fg.solve()
            continue
        index = r"\(1, 0\)" if where == "transitions" else r"\(2, 1\)"
        with pytest.raises(ValueError, match=f"{where}.* at index {index}"):
            fg.solve()


RUNS = [(3,), (0, 3), (2, 3, 1), (0, 1, 2, 4), (1, 2)]


@pytest.mark.parametrize("heated", [False, True])
@pytest.mark.parametrize("runs", RUNS)
def test_columns(runs, heated):
    rng = np.random.default_rng(0)
    shared, own = rng.normal(size=(1, sum(runs[::2]))), rng.normal(size=(4, sum(runs[1::2])))
    heat = rng.uniform(0.5, 2, size=(4, 1)) if heated else None
    columns = Columns(shared, own, runs, heat)
    warm = shared / heat if heated else shared
    pieces, at, total = [], [0, 0], 0
    for k, count in enumerate(runs):
        array = columns.own if k % 2 else warm
        piece = array[:, at[k % 2] : at[k % 2] + count]
        at[k % 2] += count
        assert_same(columns.part(total, total + count, k % 2 == 0), piece)
        pieces.append(np.broadcast_to(piece, (4, count)))
        total += count
    full = np.concatenate(pieces, axis=1)
    assert_same(np.broadcast_to(columns.full(), full.shape), full)
    rows, places = (index.reshape(-1) for index in np.indices(full.shape))
    assert_same(columns.at(rows, places), full.reshape(-1))
    for i in range(4):
        for first in range(total + 1):
            for last in range(first, total + 1):
                assert_same(columns.row(i, first, last), full[i, first:last])
    assert_same(np.broadcast_to(columns.instances([2, 0]).full(), full[:2].shape), full[[2, 0]])
    other = rng.normal(size=full.shape)
    np.testing.assert_allclose(columns.dot(other), (other * full).sum(axis=1), atol=1e-12)
    assert_same(full, Columns(*Columns.split(NumpySpace, full, runs)[::-1], runs).full())
    columns.shared[:, :1] = -np.inf
    finite = np.where(np.isfinite(columns.full()), columns.full(), 0)
    np.testing.assert_allclose(columns.dot(other), (other * finite).sum(axis=1), atol=1e-12)


@pytest.mark.parametrize("runs", RUNS)
def test_sums_of_columns(runs):
    rng = np.random.default_rng(0)
    full, weight = rng.normal(size=(4, sum(runs))), rng.normal(size=4)
    summed = np.broadcast_to(Columns.summed(full, weight, runs).full(), full.shape)
    expected = np.where(_is_shared(runs), weight @ full, weight[:, None] * full)
    np.testing.assert_allclose(summed, expected, atol=1e-12)


def _is_shared(runs):
    return np.concatenate([np.full(count, k % 2 == 0) for k, count in enumerate(runs)])
