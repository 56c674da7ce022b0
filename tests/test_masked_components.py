"""Masks split large graphs further: what they leave is solved part by part, as if it were alone."""

import numpy as np
import pytest

import factormax as fm

SIZE, STRIP = 100, 24  # a grid of so many rows and columns; so many rows lie between masked ones


def grid(scores, mask=None, rows=range(SIZE), exactly=None):
    """Pairs along both axes, and logic between neighbours, of some rows of a grid.

    exactly: how many of the first eight variables of every row are on.
    """
    rng = np.random.default_rng(0)
    across, down = rng.normal(size=(SIZE, SIZE - 1)), rng.normal(size=(SIZE, SIZE))
    rows = np.asarray(rows)
    fg = fm.FactorGraph(batch_dims=scores.ndim - 2)
    u = fg.variable_from(scores, mask=mask, name="u")
    pairs = fg.add(fm.Pair(u[:, 1:], ~u[:, :-1], across[rows]))
    fg.add(fm.Pair(u[1:], u[:-1], down[rows[1:]]))
    fg.add(fm.AtMostOne(u[1:, ::3], u[:-1, ::3]))
    fg.add(fm.OrOut(u[:, 3:-3:7], u[:, 4:-2:7], u[:, 5:-1:7]))
    if exactly is not None:
        fg.add(fm.Exactly(u[:, :8], exactly, axis=1))
    return fg, u, pairs


def drawn(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape)


def strips():
    """Which rows there are, and those of each strip that this leaves."""
    mask = np.ones((SIZE, SIZE), bool)
    mask[STRIP :: STRIP + 1] = False
    starts = range(0, SIZE, STRIP + 1)
    return mask, [range(start, min(start + STRIP, SIZE)) for start in starts]


@pytest.mark.parametrize("batch", [(), (2,)])
def test_strips_are_as_if_alone(batch):
    """Pairs along both axes end at the masked rows, where a negated end is true."""
    scores, grad = drawn(*batch, SIZE, SIZE), drawn(*batch, SIZE, SIZE, seed=2)
    mask, parts = strips()
    fg, u, pairs = grid(scores, mask)
    solution = fg.solve(tol=1e-10)
    found = solution.vjp({u: grad})
    objective = 0.0
    for rows in parts:
        alone, v, own = grid(scores[..., rows, :], rows=rows)
        theirs = alone.solve(tol=1e-10)
        np.testing.assert_allclose(u.value[..., rows, :], v.value, rtol=0, atol=1e-8)
        np.testing.assert_allclose(pairs.value[..., rows, :], own.value, rtol=0, atol=1e-8)
        slopes = theirs.vjp({v: grad[..., rows, :]})
        np.testing.assert_allclose(found[u][..., rows, :], slopes[v], rtol=0, atol=1e-8)
        objective = objective + theirs.objective
    assert np.all(solution.converged)
    assert not u.value[..., ~mask].any() and not found[u][..., ~mask].any()
    np.testing.assert_allclose(solution.objective, objective, rtol=1e-9)


def masks(kind):
    """Masks of three instances: two that split the grid, and one that does not."""
    mask = np.random.default_rng(3).random((3, SIZE, SIZE)) < 0.5
    mask[1] = True
    mask[1, 5, 7] = False
    return mask if kind == "each its own" else mask[0]


@pytest.mark.parametrize("kind", ["each its own", "shared"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_neither_batch_nor_threads_matter(kind, dtype):
    scores, mask = drawn(3, SIZE, SIZE).astype(dtype), masks(kind)
    fg, u, _ = grid(scores, mask)
    threads = fm.get_num_threads()
    try:
        for count in (1, 3):
            fm.set_num_threads(count)
            solution = fg.solve()
            for i in range(3):
                own = mask if mask.ndim == 2 else mask[i]
                # -inf means the same, and makes no difference.
                for args in ((scores[i], own), (np.where(own, scores[i], -np.inf), None)):
                    alone, v, _ = grid(*args)
                    theirs = alone.solve()
                    np.testing.assert_array_equal(u.value[i], v.value)
                    assert solution.objective[i] == theirs.objective
                    assert solution.iterations[i] == theirs.iterations
                    assert solution.status[i] == theirs.status == fm.Status.CONVERGED
    finally:
        fm.set_num_threads(threads)


def test_linear_programs():
    mask = masks("shared")
    fg, *_ = grid(drawn(SIZE, SIZE), mask)
    solution = fg.solve_map()
    assert solution.converged
    assert solution.objective <= solution.upper_bound
    assert solution.upper_bound == pytest.approx(float(solution.objective), rel=1e-5)


def test_warm_starts():
    mask = masks("each its own")
    fg, u, _ = grid(drawn(3, SIZE, SIZE), mask)
    solution = fg.solve()
    value = u.value
    again = fg.solve(warm_start=solution)
    assert (again.iterations < solution.iterations).all()
    np.testing.assert_allclose(u.value, value, rtol=0, atol=1e-6)


def test_the_conflict_is_that_of_one_part():
    mask, _ = strips()
    mask[60, 2:8] = False
    fg, u, _ = grid(drawn(SIZE, SIZE), mask, exactly=3)  # of two that are left, in row 60
    solution = fg.solve(on_failure="ignore")
    assert solution.status == fm.Status.INFEASIBLE
    assert solution.conflict() == ["Exactly over u[60, 0:8]"]
    np.testing.assert_array_equal(np.isnan(u.value), mask)
    assert not solution.vjp({u: np.ones((SIZE, SIZE))})[u].any()
