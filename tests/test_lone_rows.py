"""Graphs of single rows over variables of their own, which are solved one by one."""

import numpy as np
import pytest

import factormax as fm

EQUAL, AT_MOST, AT_LEAST = "equal", "at most", "at least"
FACTORS = {
    "Xor": (lambda u, **k: fm.Xor(u, **k), EQUAL, 1),
    "AtMostOne": (lambda u, **k: fm.AtMostOne(u, **k), AT_MOST, 1),
    "Exactly": (lambda u, **k: fm.Exactly(u, 3, **k), EQUAL, 3),
    "Budget": (lambda u, **k: fm.Budget(u, 3, **k), AT_MOST, 3),
    "AtLeast": (lambda u, **k: fm.AtLeast(u, 2, **k), AT_LEAST, 2),
    "Or": (lambda u, **k: fm.Or(u, **k), AT_LEAST, 1),
}


def exact(scores: np.ndarray, kind: str, count: int) -> tuple[np.ndarray, float]:
    """The projection and its multiplier, by bisection until nothing is left to halve."""

    def at(t: float) -> np.ndarray:
        return np.clip(scores - t, 0, 1)

    excess = at(0.0).sum() - count
    if len(scores) == 0 or (kind == AT_MOST and excess <= 0) or (kind == AT_LEAST and excess >= 0):
        return at(0.0), 0.0
    low, high = scores.min() - 2, scores.max() + 1
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if at(middle).sum() > count else (low, middle)
    return at(high), high


def built(name: str, scores: np.ndarray, way: str) -> tuple[fm.FactorGraph, fm.Variable]:
    """Rows of scores as a batch, as one graph, or as the columns of one."""
    fg = fm.FactorGraph(batch_dims=1 if way == "batch" else 0)
    u = fg.variable_from(np.ascontiguousarray(scores.T) if way == "columns" else scores)
    axis = {"batch": None, "graph": 1, "columns": 0}[way]
    fg.add(FACTORS[name][0](u, axis=axis))
    return fg, u


@pytest.mark.parametrize("way", ["batch", "graph", "columns"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-8, 0.1, 1.0, 30.0, 1e5])
@pytest.mark.parametrize("name", FACTORS)
def test_answers(name, scale, dtype, way):
    rng = np.random.default_rng(0)
    eps = np.finfo(dtype).eps
    for n in (3, 4, 7, 8, 9, 33, 300):
        scores = (scale * rng.standard_normal((5, n))).astype(dtype)
        fg, u = built(name, scores, way)
        solution = fg.solve(on_failure="raise")
        value = u.value.T if way == "columns" else u.value
        assert value.dtype == dtype
        objective = []
        for own, mu in zip(scores.astype(np.float64), value.astype(np.float64), strict=True):
            right, _ = exact(own, *FACTORS[name][1:])
            # Scores of float32 are exact: what is lost is no more than the marginals' own digits.
            np.testing.assert_allclose(mu, right, rtol=2 * eps, atol=eps + 2e-14 * scale)
            objective.append((right * (own - right / 2)).sum())
        total = objective if way == "batch" else sum(objective)
        np.testing.assert_allclose(solution.objective, total, rtol=1e-6, atol=1e-6 * scale)
        assert np.max(solution.primal_residual) <= 1e-6


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("offset", [-1e4, 1e4, 3e8])
@pytest.mark.parametrize("name", ["Xor", "Exactly"])
def test_scores_far_from_zero(name, offset, dtype):
    # Equations don't mind what all scores have in common.
    scores = (offset + np.random.default_rng(5).standard_normal((30, 200))).astype(dtype)
    fg, u = built(name, scores, "batch")
    fg.solve(on_failure="raise")
    for own, mu in zip(scores.astype(np.float64), u.value, strict=True):
        right, _ = exact(own - offset, *FACTORS[name][1:])
        np.testing.assert_allclose(mu, right, rtol=1e-6, atol=1e-15 * abs(offset) + 1e-9)


@pytest.mark.parametrize("way", ["batch", "graph", "columns"])
@pytest.mark.parametrize("name", FACTORS)
def test_gradients_are_those_of_finite_differences(name, way):
    rng = np.random.default_rng(1)
    for scale in (0.05, 1.0, 5.0):
        scores, move, grad = rng.standard_normal((3, 6, 17))
        scores *= scale
        fg, u = built(name, scores, way)
        given = grad.T if way == "columns" else grad
        found = fg.solve().vjp({u: given})[u]
        found = found.T if way == "columns" else found
        h = 1e-6
        ends = []
        for sign in (1, -1):
            there, v = built(name, scores + sign * h * move, way)
            there.solve()
            ends.append(v.value.T if way == "columns" else v.value)
        slope = (ends[0] - ends[1]) / (2 * h)
        np.testing.assert_allclose((found * move).sum(1), (grad * slope).sum(1), atol=1e-8)


@pytest.mark.parametrize("name", FACTORS)
def test_multipliers_give_the_marginals(name):
    rng = np.random.default_rng(2)
    scores = rng.standard_normal((40, 9))
    fg, u = built(name, scores, "graph")
    solution = fg.solve()
    sign = -1 if FACTORS[name][1] == AT_LEAST else 1
    tau = sign * solution.multipliers.reshape(40, 1)
    np.testing.assert_allclose(u.value, np.clip(scores - tau, 0, 1), atol=1e-12)
    assert FACTORS[name][1] == EQUAL or (solution.multipliers >= 0).all()


@pytest.mark.parametrize("minus_infinity", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FACTORS)
def test_masks(name, dtype, minus_infinity):
    rng = np.random.default_rng(3)
    scores = rng.standard_normal((50, 12)).astype(dtype)
    here = rng.random((50, 12)) < 0.6
    here[:, :3] = True  # enough for what is asked
    here[7] = False  # then the factor is absent
    fg = fm.FactorGraph(batch_dims=1)
    given = np.where(here, scores, -np.inf) if minus_infinity else scores
    u = fg.variable_from(given.astype(dtype), mask=None if minus_infinity else here)
    fg.add(FACTORS[name][0](u))
    solution = fg.solve(on_failure="raise")
    grad = solution.vjp({u: np.ones_like(scores)})[u]
    for own, there, mu, g in zip(scores, here, u.value, grad, strict=True):
        right, _ = exact(own[there].astype(np.float64), *FACTORS[name][1:])
        np.testing.assert_allclose(mu[there], right, atol=4 * np.finfo(dtype).eps)
        assert (mu[~there] == 0).all() and (g[~there] == 0).all()


def test_a_batch_is_its_instances_bit_for_bit():
    rng = np.random.default_rng(4)
    scores = rng.standard_normal((700, 40)).astype(np.float32)
    for name in FACTORS:
        fg, u = built(name, scores, "batch")
        whole = fg.solve()
        one, v = built(name, scores, "graph")
        one.solve()
        np.testing.assert_array_equal(u.value, v.value)
        for i in range(0, 700, 97):
            alone, w = built(name, scores[i : i + 1], "batch")
            solution = alone.solve()
            np.testing.assert_array_equal(u.value[i], w.value[0])
            assert whole.objective[i] == solution.objective[0]
            assert whole.multipliers[i] == solution.multipliers[0]


def test_variables_without_a_factor():
    scores = np.array([2.0, 0.4, -1.0, 0.3, 5.0, 0.25])
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u[[1, 4]]))
    solution = fg.solve()
    np.testing.assert_array_equal(u.value, [1, 0, 0, 0.3, 1, 0.25])
    np.testing.assert_array_equal(solution.vjp({u: np.arange(6.0)})[u], [0, 0, 0, 3, 0, 5])


def test_no_row_at_all():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([-0.5, 0.5, 1.5]))
    solution = fg.solve()
    np.testing.assert_array_equal(u.value, [0, 0.5, 1])
    assert float(solution.objective) == 0.125 + 1.0


def test_one_row_that_cannot_hold_among_others():
    scores = np.zeros((3000, 4))
    here = np.ones((3000, 4), bool)
    here[2000, 1:] = False
    fg = fm.FactorGraph()
    u = fg.variable_from(scores, mask=here)
    fg.add(fm.Exactly(u, 2, axis=1))
    solution = fg.solve(on_failure="ignore")
    assert solution.status == fm.Status.INFEASIBLE
    assert np.isnan(u.value[here]).all() and (u.value[~here] == 0).all()
    assert "2000" in str(solution.conflict())
    assert (solution.vjp({u: np.ones((3000, 4))})[u] == 0).all()


def test_a_solution_at_a_kink_takes_no_side():
    # Any multiplier from 0 to 2 will do; what is clipped stays clipped.
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([3.0, 0.0, 0.0]))
    fg.add(fm.Xor(u))
    solution = fg.solve()
    np.testing.assert_array_equal(u.value, [1, 0, 0])
    np.testing.assert_array_equal(solution.vjp({u: np.array([1.0, 2.0, 3.0])})[u], [0, 0, 0])
