"""Sequences with a budget by flows, which have to be proved to be mixtures that keep the budget.

The structures that the oracle finds and the flows are two ways to the same solution, so each checks
the other; at sizes that structures cannot reach, the best sequence at the scores less mu does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import factormax as fm
from factormax._core import ByRows
from factormax._engines import cpu


@pytest.fixture
def by_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flows are tried at once, however few structures there are."""
    monkeypatch.setattr(cpu, "BY_ROWS", ByRows.always)


def _best(scores: Any, transitions: Any, budget: int) -> float:
    """The score of the best sequence with at most `budget` on."""
    off, on = np.full((2, budget + 2), -np.inf)
    off[0] = 0
    for step, pair in zip(scores, [0.0, *transitions], strict=True):
        joined = np.maximum(off, on + pair)[:-1] + step
        off, on = np.maximum(off, on), np.concatenate([[-np.inf], joined])
    return float(max(off[:-1].max(), on[:-1].max()))


def _solve(eta: Any, transitions: Any, budget: int, mask: Any = None) -> tuple[Any, Any, Any]:
    fg = fm.FactorGraph()
    u = fg.variable_from(eta) if mask is None else fg.variable_from(eta, mask=mask)
    sequence = fg.add(fm.SequenceBudget(u, transitions, budget))
    return u, sequence, fg.solve(on_failure="raise", tol=1e-10)


def _draw(length: int, scale: float, offset: float, signs: str, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    eta = offset + scale * rng.normal(size=length)
    transitions = scale * rng.normal(size=length - 1)
    if signs == "attract":
        transitions = np.abs(transitions)
    elif signs == "repel":
        transitions = -np.abs(transitions)
    return eta, transitions


@pytest.mark.parametrize("signs", ["any", "attract", "repel"])
@pytest.mark.parametrize("scale", [10, 1, 0.1, 0.01, 1e-3, 1e-4, 0])
@pytest.mark.parametrize("budget", [100, 333])
def test_any_scale_is_solved(budget: int, scale: float, signs: str) -> None:
    eta, transitions = _draw(1000, scale, 0, signs, 3)
    u, sequence, solution = _solve(eta, transitions, budget)
    reduced = eta - u.value
    earned = reduced @ u.value + transitions @ sequence.value
    size = np.abs(reduced) @ u.value + np.abs(transitions) @ sequence.value
    rounding = 1e-14 * len(eta)  # mu is a difference of numbers up to 1, and all may be on
    assert abs(_best(reduced, transitions, budget) - earned) <= 1e-11 * size + rounding
    assert u.value.sum() <= budget + 1e-9
    # 190 calls and then some rounds; thousands of structures at 0.1.
    assert int(solution.oracle_calls) < 300


@pytest.mark.parametrize("scale", [0.1, 0.01, 1e-3, 1e-4])
@pytest.mark.parametrize("signs", ["any", "repel"])
def test_thousands_of_variables_share_a_tight_budget(scale: float, signs: str) -> None:
    eta, transitions = _draw(1500, scale, 0.4, signs, 5)
    u, sequence, solution = _solve(eta, transitions, 500)
    reduced = eta - u.value
    earned = reduced @ u.value + transitions @ sequence.value
    assert abs(_best(reduced, transitions, 500) - earned) <= 1e-9 * abs(earned)
    assert abs(u.value.sum() - 500) <= 1e-9
    assert ((u.value > 0) & (u.value < 1)).mean() > 0.9
    assert int(solution.oracle_calls) < 400


def _case(seed: int) -> dict[str, Any]:
    """A small budget with masks, shared transitions and ties, as the seed has it."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 25))
    scale = (1, 0.3, 0.1, 0.01, 1e-3, 10)[seed % 6]
    signs = ("any", "attract", "repel")[seed % 3]
    eta, transitions = _draw(length, scale, (0, 0.4)[seed % 2], signs, seed)
    case = {"eta": eta, "transitions": transitions, "budget": int(rng.integers(0, length + 1))}
    if seed % 4 == 0:
        case["transitions"] = scale * float(rng.normal())
    if seed % 5 == 0:
        case["mask"] = rng.random(length) < 0.8
    return case


def _answer(case: dict[str, Any], add: Any = None) -> dict[str, Any]:
    given = dict(case)
    eta, mask = given.pop("eta"), given.pop("mask", None)
    fg = fm.FactorGraph()
    u = fg.variable_from(eta) if mask is None else fg.variable_from(eta, mask=mask)
    sequence = fg.add(fm.SequenceBudget(u, **given))
    if add is not None:
        add(fg, u)
    solution = fg.solve(on_failure="raise", tol=1e-10)
    rng = np.random.default_rng(0)
    d, d_v = rng.normal(size=eta.shape), rng.normal(size=np.shape(case["transitions"]))
    grads = solution.vjp({u: d, sequence: d_v})
    return {
        "mu": u.value,
        "value": sequence.value,
        "by mu": solution.vjp({u: d})[u],
        "by value": grads[u],
        "transitions": grads[sequence],
    }


@pytest.mark.parametrize("seeds", [range(60 * k, 60 * k + 60) for k in range(5)], ids=str)
def test_flows_agree_with_structures(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, whether the flows are a mixture or not."""
    for seed in seeds:
        case = _case(seed)
        monkeypatch.setattr(cpu, "BY_ROWS", ByRows.always)
        flows = _answer(case)
        monkeypatch.setattr(cpu, "BY_ROWS", ByRows.never)
        structures = _answer(case)
        for name, found in flows.items():
            np.testing.assert_allclose(found, structures[name], atol=1e-7, err_msg=f"{seed} {name}")


def _rows(fg: Any, u: Any) -> None:
    fg.add(fm.AtMostOne(u[:3]))
    fg.add(fm.AtLeast(u[3:], count=1))


def _second_sequence(fg: Any, u: Any) -> None:
    fg.add(fm.SequenceBudget(u[::2], -0.01, budget=2))


@pytest.mark.parametrize("add", [_rows, _second_sequence])
@pytest.mark.parametrize("scale", [1, 0.1, 1e-3])
@pytest.mark.parametrize("budget", [3, 6])
def test_beside_other_factors(
    add: Any, scale: float, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a hub and as a link, with weights that differ."""
    eta, transitions = _draw(12, scale, 0.4, "any", 4)
    case = {"eta": eta, "transitions": transitions, "budget": budget}
    monkeypatch.setattr(cpu, "BY_ROWS", ByRows.always)
    flows = _answer(case, add)
    monkeypatch.setattr(cpu, "BY_ROWS", ByRows.never)
    structures = _answer(case, add)
    for name, found in flows.items():
        np.testing.assert_allclose(found, structures[name], atol=1e-6, err_msg=name)


def test_a_row_beside_a_long_budget() -> None:
    """The flows follow the multipliers of the row from pass to pass."""
    eta, transitions = _draw(600, 0.1, 0.4, "any", 1)
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    sequence = fg.add(fm.SequenceBudget(u, transitions, 160))
    fg.add(fm.Budget(u[:300], 60))
    solution = fg.solve(on_failure="raise", tol=1e-9)
    # One multiplier, found again from the solution, takes the place of the row.
    used = u.value[:300]
    free = (used > 1e-6) & (used < 1 - 1e-6)
    assert free.any() and abs(used.sum() - 60) < 1e-6 and abs(u.value.sum() - 160) < 1e-6
    low, high = 0.0, 1.0
    for _ in range(50):
        taken = (low + high) / 2
        alone, other, _ = _solve(eta - taken * (np.arange(600) < 300), transitions, 160)
        low, high = (taken, high) if alone.value[:300].sum() > 60 else (low, taken)
    np.testing.assert_allclose(u.value, alone.value, atol=1e-6)
    np.testing.assert_allclose(sequence.value, other.value, atol=1e-6)
    assert int(solution.iterations) < 50


@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (0.1, 0), (0.1, 0.4), (0.01, 0.4)])
@pytest.mark.parametrize("budget", [60, 110])
@pytest.mark.usefixtures("by_flows")
def test_gradients_are_finite_differences(scale: float, offset: float, budget: int) -> None:
    """Of the marginals and of pairs that are on, in the scores of both."""
    eta, transitions = _draw(300, scale, offset, "any", 7)
    rng = np.random.default_rng(0)
    d, step = rng.normal(size=(2, 300))
    d_v, step_v = rng.normal(size=(2, 299))

    def loss(h: float) -> float:
        u, sequence, _ = _solve(eta + h * step, transitions + h * step_v, budget)
        return float(d @ u.value + d_v @ sequence.value)

    u, sequence, solution = _solve(eta, transitions, budget)
    grads = solution.vjp({u: d, sequence: d_v})
    h = 1e-7 * scale
    expected = (loss(h) - loss(-h)) / (2 * h)
    actual = grads[u] @ step + grads[sequence] @ step_v
    size = np.abs(grads[u] * step).sum() + np.abs(grads[sequence] * step_v).sum()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * size + 1e-13 / h)


def test_what_keeps_the_budget_only_on_average_is_no_solution() -> None:
    """Three variables that are on together: two thirds each would do without whole structures."""
    eta, transitions = np.full(3, 0.3), np.full(2, 5.0)
    for by_rows in (ByRows.always, ByRows.never):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "BY_ROWS", by_rows)
            u, sequence, _ = _solve(eta, transitions, 2)
        np.testing.assert_allclose(u.value, [0.5, 1, 0.5], atol=1e-9)
        np.testing.assert_allclose(sequence.value, [0.5, 0.5], atol=1e-9)


def test_structures_keep_the_budget() -> None:
    eta, transitions = _draw(400, 0.1, 0, "any", 2)
    u, sequence, solution = _solve(eta, transitions, 20)
    mu, both = u.value, sequence.value
    assert int(solution.oracle_calls) < 250
    probs, structures = sequence.probs, sequence.structures
    assert (probs > 0).all() and abs(probs.sum() - 1) < 1e-12
    assert (structures.sum(axis=1) <= 20).all()
    np.testing.assert_allclose(probs @ structures, mu, atol=1e-7)
    np.testing.assert_allclose(probs @ (structures[:, 1:] * structures[:, :-1]), both, atol=1e-7)


@pytest.mark.usefixtures("by_flows")
def test_admm_and_map_and_loss() -> None:
    eta, transitions = _draw(20, 0.3, 0.3, "any", 2)
    fg = fm.FactorGraph()
    w = fg.variable_from(eta)
    fg.add(fm.SequenceBudget(w, transitions, 6))
    fg.add(fm.AtMostOne(w[:4]))
    fg.solve(tol=1e-9)
    exact = w.value
    fg.solve(method="admm", tol=1e-9, max_iter=20_000)
    np.testing.assert_allclose(w.value, exact, atol=1e-6)
    best = fg.solve_map()
    assert best.objective <= float(best.upper_bound) + 1e-9
    decoded = fg.decode()
    assert set(np.unique(w.value)) <= {0.0, 1.0} and w.value.sum() <= 6
    assert decoded.objective <= best.objective + 1e-9
    assert float(fg.loss({w: w.value})) >= 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_batches_and_precisions(dtype: Any) -> None:
    """Each instance with its own budget and mask, as if it were alone."""
    rng = np.random.default_rng(1)
    eta = (0.3 + 0.1 * rng.normal(size=(4, 200))).astype(dtype)
    transitions = (0.1 * rng.normal(size=199)).astype(dtype)
    mask = np.arange(200) < np.array([[200], [150], [200], [120]])
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta, mask=mask)
    fg.add(fm.SequenceBudget(u, transitions, np.array([30, 60, 200, 10])))
    solution = fg.solve(on_failure="raise")
    assert (np.asarray(solution.oracle_calls) < 250).all()
    for row, budget in enumerate([30, 60, 200, 10]):
        alone, _, _ = _solve(eta[row].astype(float), transitions, budget, mask[row])
        np.testing.assert_allclose(u.value[row], alone.value, atol=1e-6)
        assert (u.value[row][~mask[row]] == 0).all()
