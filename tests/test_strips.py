"""Long graphs with many rows are solved strip by strip. A warm start skips that: it is the twin."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import factormax as fm


def grid(u, rng, scale):
    right, down = rng.normal(size=(2, *u.shape))
    return [
        fm.Pair(u[:, :-1], u[:, 1:], scale * right[:, 1:]),
        fm.Pair(u[:-1], ~u[1:], scale * down[1:]),
    ]


def windows(u, rng, scale):
    members = np.arange(0, u.shape[0] - 5, 2)[:, None] + np.arange(6)
    costs = rng.uniform(0.3, 1, size=members.shape)
    return [fm.Knapsack(u[members], costs, 1.5, axis=1), fm.AtLeast(u[members], 1, axis=1)]


def frames(u, rng, scale):
    return [
        fm.Xor(u, axis=1),
        fm.Pair(u[:-1], u[1:], scale * np.abs(rng.normal(size=(u.shape[0] - 1, u.shape[1])))),
    ]


GRAPHS: dict[str, tuple[tuple[int, ...], Callable[..., list]]] = {
    "grid": ((160, 160), grid),
    "windows": ((30_000,), windows),
    "frames": ((2_000, 10), frames),
}
every_graph = pytest.mark.parametrize("name", list(GRAPHS))


def build(name, scale, *, seed=0, dtype=np.float64, mask=None):
    shape, factors = GRAPHS[name]
    rng = np.random.default_rng(seed)
    fg = fm.FactorGraph()
    u = fg.variable_from((scale * rng.normal(size=shape)).astype(dtype), mask=mask)
    for factor in factors(u, rng, scale):
        fg.add(factor)
    return fg, u


def whole(fg, u):
    """The solution found without strips."""
    begun = fg.solve(max_iter=1, on_failure="ignore")
    assert not begun.converged
    begun.raw.tau[:] = 0
    solution = fg.solve(warm_start=begun, on_failure="raise")
    return solution, u.value.copy()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    yield fm.set_num_threads
    fm.set_num_threads(None)


@every_graph
@pytest.mark.parametrize("scale", [0.3, 1.0, 30.0])
def test_they_are_solved_as_a_whole_would_be(name, scale):
    fg, u = build(name, scale)
    found = fg.solve(on_failure="raise")
    value = u.value.copy()
    solution, expected = whole(fg, u)
    np.testing.assert_allclose(value, expected, atol=1e-6)
    np.testing.assert_allclose(found.objective, solution.objective, rtol=1e-10)
    grad = {u: np.random.default_rng(1).normal(size=u.shape)}
    np.testing.assert_allclose(found.vjp(grad)[u], solution.vjp(grad)[u], atol=1e-7)


@every_graph
def test_float32_too(name):
    fg, u = build(name, 1.0, dtype=np.float32)
    fg.solve(on_failure="raise")
    value = u.value
    _, expected = whole(*build(name, 1.0))
    np.testing.assert_allclose(value, expected, atol=5e-4)


@every_graph
def test_masks_cut_holes(name):
    mask = np.random.default_rng(2).random(GRAPHS[name][0]) > 0.05
    fg, u = build(name, 1.0, mask=mask)
    fg.solve(on_failure="raise")
    value = u.value.copy()
    np.testing.assert_allclose(value, whole(fg, u)[1], atol=1e-6)
    assert (value[~mask] == 0).all()


@every_graph
def test_the_answer_does_not_depend_on_threads(name, threads):
    fg, u = build(name, 1.0)
    threads(1)
    fg.solve()
    value = u.value.copy()
    threads(4)
    again = fg.solve()
    np.testing.assert_array_equal(u.value, value)
    assert again.converged


def test_an_instance_of_a_batch_is_solved_as_if_it_were_alone():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(3, 2_000, 10))
    together = fm.FactorGraph(batch_dims=1)
    u = together.variable_from(scores)
    for factor in frames(u, np.random.default_rng(4), 1.0):
        together.add(factor)
    together.solve()
    for one, value in zip(scores, u.value, strict=True):
        alone = fm.FactorGraph()
        v = alone.variable_from(one)
        for factor in frames(v, np.random.default_rng(4), 1.0):
            alone.add(factor)
        alone.solve()
        np.testing.assert_array_equal(v.value, value)


def test_a_contradiction_within_a_strip_is_proved():
    fg, u = build("frames", 1.0)
    fg.add(fm.AtLeast(u[1_000], 2))
    solution = fg.solve(on_failure="ignore")
    assert solution.status == fm.Status.INFEASIBLE
    assert len(solution.conflict()) == 2


@pytest.mark.parametrize("max_iter", [1, 2, 7, 40])
def test_iterations_stay_within_their_limit(max_iter):
    fg, u = build("grid", 1.0)
    solution = fg.solve(max_iter=max_iter, on_failure="ignore")
    assert solution.iterations <= max_iter
    assert np.isfinite(u.value).all()


def test_a_part_that_runs_out_of_passes_leaves_a_start():
    fg, _ = build("windows", 100.0)
    passes = [int(fg.solve(tol=1e-3, max_iter=m).iterations) for m in (600, 1_200)]
    assert passes[0] == passes[1] < 600


def test_passes_do_not_depend_on_threads_even_if_a_part_is_infeasible(threads):
    fg, u = build("frames", 1.0)
    fg.add(fm.AtLeast(u[10], 2))
    passes = []
    for count in (1, 2, 8, 8):
        threads(count)
        passes.append(int(fg.solve(on_failure="ignore").iterations))
    assert len(set(passes)) == 1
