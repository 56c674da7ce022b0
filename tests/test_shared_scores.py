"""Factor scores that only some factors share with the whole batch: they are never repeated."""

import os
import subprocess
import sys

import numpy as np
import pytest
from shared_scores import (
    BATCH,
    DTYPES,
    MODELS,
    all_shared,
    assert_same,
    assert_sums,
    both,
    components,
    labels,
    made,
    one_row,
    tensor_of,
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


def test_no_scores_at_all():
    """Pairs of nothing: their broadcast scores still get a gradient, 0."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.ones((3, 2)))
    empty = fg.add(fm.Pair(u[:0], u[:0], np.ones((3, 1))))
    shared = fg.add(fm.Pair(u[:1], u[1:], np.ones(1)))
    found = fg.solve().vjp({u: np.ones((3, 2))})
    assert_same(found[empty], np.zeros((3, 1)))
    assert found[shared].shape == (1,)


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
