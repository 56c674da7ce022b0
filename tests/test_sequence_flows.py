"""Sequences by flows: many structures, whose mixtures are found without listing them.

The paths that the oracle finds and the flows are two ways to the same solution, so each checks the
other; at sizes that paths cannot reach, the certificate of optimality does.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import factormax as fm
from factormax._core import ByRows
from factormax._engines import cpu


@pytest.fixture
def by_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence is solved by flows, however few structures it has."""
    monkeypatch.setattr(cpu, "BY_ROWS", ByRows.always)


def _scores(length: int, states: int, scale: float, seed: int, banded: bool) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    eta = scale * rng.normal(size=(length, states))
    if banded:
        state = np.arange(states)
        return eta, -0.5 * scale * np.abs(state - state[:, None]).astype(float)
    return eta, scale * rng.normal(size=(length - 1, states, states))


def _solve(eta: Any, transitions: Any, **given: Any) -> tuple[Any, Any, Any]:
    fg = fm.FactorGraph()
    mask = given.pop("mask", None)
    u = fg.variable_from(eta) if mask is None else fg.variable_from(eta, mask=mask)
    sequence = fg.add(fm.Sequence(u, transitions, **given))
    return u, sequence, fg.solve(on_failure="raise")


def _require_optimal(eta: Any, transitions: Any, mu: Any, flow: Any) -> None:
    """Flows through the trellis whose marginals are mu, and no path better than what they earn."""
    length, states = eta.shape
    per_step = np.broadcast_to(transitions, (length - 1, states, states))
    eta = eta - eta.mean(axis=1, keepdims=True)  # what a step's states have in common is earned
    reduced = eta - (mu - 1 / states)
    best = reduced[-1]
    for t in range(length - 2, -1, -1):
        best = reduced[t] + (per_step[t] + best).max(axis=1)
    size = max(np.abs(eta).max(), np.abs(per_step).max())
    rounding = 1e-13 * length * size + 1e-15
    assert flow.min() >= 0 and mu.min() >= 0
    np.testing.assert_allclose(mu.sum(axis=1), 1, atol=1e-12)
    if flow.ndim == 3:
        np.testing.assert_allclose(flow.sum(axis=2), mu[:-1], atol=1e-12)
        np.testing.assert_allclose(flow.sum(axis=1), mu[1:], atol=1e-12)
    else:
        np.testing.assert_allclose(flow.sum(axis=1), mu[:-1].sum(axis=0), atol=1e-11)
        np.testing.assert_allclose(flow.sum(axis=0), mu[1:].sum(axis=0), atol=1e-11)
    earned = (reduced * mu).sum() + (transitions * flow).sum()
    assert abs(best.max() - earned) <= rounding


@pytest.mark.parametrize("banded", [False, True])
@pytest.mark.parametrize("scale", [10, 1, 0.1, 0.01, 1e-3, 1e-4, 1e-6, 0])
@pytest.mark.parametrize(("length", "states"), [(20, 25), (50, 25), (100, 10)])
def test_any_scale_is_solved(length: int, states: int, scale: float, banded: bool) -> None:
    eta, transitions = _scores(length, states, scale, 3, banded)
    u, sequence, solution = _solve(eta, transitions)
    _require_optimal(eta, transitions, u.value, sequence.value)
    # A few calls per step, then a round or two for each of a dozen points; 22,501 paths at 1e-3.
    assert int(solution.oracle_calls) < 400


def _random_case(seed: int, tied: bool) -> dict[str, Any]:
    """A small sequence with masks, forbidden transitions and ends, as the seed has it."""
    rng = np.random.default_rng(seed)
    length, states = int(rng.integers(1, 7)), int(rng.integers(1, 6))
    scale = (1, 0.3, 0.1, 0.01, 1e-3, 1e-5)[seed % 6]
    most = (2, 3, 4)[seed % 3]

    def draw(*shape: int) -> Any:
        return scale * (rng.integers(0, most, shape) if tied else rng.normal(size=shape))

    shared = length == 1 or seed % 4 == 0
    case: dict[str, Any] = {"eta": draw(length, states)}
    case["transitions"] = draw(states, states) if shared else draw(length - 1, states, states)
    if seed % 5 == 0:
        case["initial"] = draw(states)
        if seed % 2 and states > 1:
            case["initial"][0] = -np.inf
    if seed % 7 == 0:
        case["final"] = draw(states)
    if seed % 3 == 1:
        forbidden = rng.random(case["transitions"].shape) < 0.15
        case["transitions"] = np.where(forbidden, -np.inf, case["transitions"])
    if seed % 6 == 2 and length > 1:
        mask = rng.random((length, states)) < 0.85
        mask[np.arange(length), rng.integers(states, size=length)] = True
        mask[length - int(rng.integers(0, length)) :] = False
        case["mask"] = mask
    return case


def _answer(case: dict[str, Any], add: Any = None) -> dict[str, Any]:
    given = dict(case)
    eta, mask = given.pop("eta"), given.pop("mask", None)
    fg = fm.FactorGraph()
    u = fg.variable_from(eta) if mask is None else fg.variable_from(eta, mask=mask)
    sequence = fg.add(fm.Sequence(u, **given))
    if add is not None:
        add(fg, u)
    solution = fg.solve(on_failure="ignore", tol=1e-10)
    answer = {"status": str(solution.status), "mu": u.value, "value": sequence.value}
    if np.isfinite(solution.objective):
        rng = np.random.default_rng(0)
        d, d_v = rng.normal(size=eta.shape), rng.normal(size=case["transitions"].shape)
        answer["by mu"] = solution.vjp({u: d})[u]
        grads = solution.vjp({u: d, sequence: d_v})
        answer["by value"] = grads[u]
        answer["transitions"] = grads[sequence]
        for end in ("initial", "final"):
            if end in case:
                answer[end] = grads[sequence, end]
    return answer


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seeds", [range(40 * k, 40 * k + 40) for k in range(5)], ids=str)
def test_flows_agree_with_paths(seeds: range, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, status and gradients; at ties those that are unique."""
    for seed in seeds:
        case = _random_case(seed, tied)
        monkeypatch.setattr(cpu, "BY_ROWS", ByRows.always)
        flows = _answer(case)
        monkeypatch.setattr(cpu, "BY_ROWS", ByRows.never)
        paths = _answer(case)
        assert flows["status"] == paths["status"], seed
        for name in ("mu", "by mu") if tied else set(flows) - {"status"}:
            if name in flows:
                np.testing.assert_allclose(flows[name], paths[name], atol=1e-11, err_msg=str(seed))


@pytest.mark.usefixtures("by_flows")
@pytest.mark.parametrize("seed", range(60))
def test_ties_against_enumeration(seed: int) -> None:
    """Integer scores, where flows are degenerate: no mixture of all paths earns more."""
    rng = np.random.default_rng(seed)
    length, states = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    eta = rng.integers(0, 3, (length, states)).astype(float)
    transitions = rng.integers(0, 3, (states, states)).astype(float)
    u, sequence, _ = _solve(eta, transitions)
    paths = np.array(list(itertools.product(range(states), repeat=length)))
    reduced = eta - u.value
    scores = reduced[np.arange(length), paths].sum(axis=1)
    scores += transitions[paths[:, :-1], paths[:, 1:]].sum(axis=1)
    earned = (reduced * u.value).sum() + (transitions * sequence.value).sum()
    np.testing.assert_allclose(scores.max(), earned, atol=1e-12)
    assert u.value.min() >= 0 and sequence.value.min() >= 0
    np.testing.assert_allclose(u.value.sum(axis=1), 1, atol=1e-13)


@pytest.mark.parametrize("scale", [1, 0.1, 0.01, 1e-3])
def test_gradients_are_finite_differences(scale: float) -> None:
    """Of the marginals and of the expected transitions, in the scores of all kinds."""
    length, states = 12, 8
    rng = np.random.default_rng(5)
    x = scale * rng.normal(size=(length, states))
    own = [scale * rng.normal(size=s) for s in ((length - 1, states, states), states, states)]
    d, d_v = rng.normal(size=x.shape), rng.normal(size=own[0].shape)

    def loss(x: Any, transitions: Any, initial: Any, final: Any) -> float:
        u, sequence, _ = _solve(x, transitions, initial=initial, final=final)
        return float((d * u.value).sum() + (d_v * sequence.value).sum())

    u, sequence, solution = _solve(x, own[0], initial=own[1], final=own[2])
    grads = solution.vjp({u: d, sequence: d_v})
    names = [u, sequence, (sequence, "initial"), (sequence, "final")]
    for place, name in enumerate(names):
        step = np.random.default_rng(place).normal(size=np.shape(grads[name]))
        h = 1e-6 * scale
        ends = []
        for sign in (1, -1):
            moved = [x, *own]
            moved[place] = moved[place] + sign * h * step
            ends.append(loss(*moved))
        expected = (ends[0] - ends[1]) / (2 * h)
        actual = (grads[name] * step).sum()
        rounding = 1e-14 / h  # the values', in their difference
        size = np.abs(grads[name] * step).sum()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-7 * size + rounding)


@pytest.mark.parametrize("scale", [0.1, 1e-3, 0])
def test_structures_are_paths_of_the_flows(scale: float) -> None:
    eta, transitions = _scores(12, 9, scale, 1, banded=False)
    u, sequence, solution = _solve(eta, transitions)
    probs, structures = sequence.probs, sequence.structures
    assert (probs > 0).all() and abs(probs.sum() - 1) < 1e-12
    assert ((structures == 0) | (structures == 1)).all()
    np.testing.assert_allclose(structures.sum(axis=-1), 1)
    np.testing.assert_allclose(np.einsum("k,kls->ls", probs, structures), u.value, atol=1e-13)
    moves = np.einsum("k,kti,ktj->tij", probs, structures[:, :-1], structures[:, 1:])
    np.testing.assert_allclose(moves, sequence.value, atol=1e-13)
    flat = structures.reshape(len(probs), -1)
    assert np.linalg.matrix_rank(flat[1:] - flat[0]) == len(probs) - 1
    # A gradient of probs that is linear in the structures is one of the marginals.
    d = np.random.default_rng(2).normal(size=eta.shape)
    by_probs = solution.vjp({}, probs={sequence: np.einsum("kls,ls->k", structures, d)})
    if scale > 0:
        np.testing.assert_allclose(by_probs[u], solution.vjp({u: d})[u], atol=1e-9)


def _columns(fg: Any, u: Any) -> None:
    fg.add(fm.Budget(u, budget=2, axis=0))


def _second_chain(fg: Any, u: Any) -> None:
    rng = np.random.default_rng(7)
    fg.add(fm.Sequence(u, 0.01 * rng.normal(size=(u.shape[1], u.shape[1]))))


@pytest.mark.parametrize("add", [_columns, _second_chain])
@pytest.mark.parametrize("scale", [1, 0.1, 1e-3])
def test_beside_other_factors(add: Any, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    eta, transitions = _scores(6, 5, scale, 4, banded=False)
    case = {"eta": eta, "transitions": transitions}
    monkeypatch.setattr(cpu, "BY_ROWS", ByRows.always)
    flows = _answer(case, add)
    monkeypatch.setattr(cpu, "BY_ROWS", ByRows.never)
    paths = _answer(case, add)
    assert "CONVERGED" in flows["status"].upper()
    for name in set(flows) - {"status"}:
        np.testing.assert_allclose(flows[name], paths[name], atol=1e-7, err_msg=name)


def _alignment(eta: Any, bonus: float, mask: Any = None) -> tuple[Any, Any]:
    """Each step in one state, each state in one step at most, and neighbours near each other."""
    state = np.arange(eta.shape[-1])
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta) if mask is None else fg.variable_from(eta, mask=mask)
    fg.add(fm.Sequence(u, bonus * (np.abs(state - state[:, None]) == 1)))
    fg.add(fm.AtMostOne(u, axis=0))
    return u, fg.solve(tol=1e-12, on_failure="raise")


def _mixed_rows(fg: Any, u: Any) -> None:
    fg.add(fm.AtMostOne(u[:, :2], axis=0))
    fg.add(fm.AtLeast(u[:, 2], count=1))
    fg.add(fm.Exactly(u[2:, 3:], count=1))
    fg.add(fm.Knapsack(u[:, -1], costs=np.linspace(0.5, 2, u.shape[0]), budget=1.5))


@pytest.mark.parametrize("add", [_columns, _mixed_rows])
@pytest.mark.parametrize("scale", [100, 10, 1, 0.1, 1e-3])
@pytest.mark.parametrize("ratio", [0.03, 1, 10])
def test_rows_and_flows_at_once_agree_with_paths(
    add: Any, scale: float, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        case = {
            "eta": scale * rng.normal(size=(6, 5)),
            "transitions": ratio * scale * rng.normal(size=(5, 5)),
        }
        flows = _answer(case, add)
        monkeypatch.setattr(cpu, "BY_ROWS", ByRows.never)
        paths = _answer(case, add)
        monkeypatch.undo()
        assert "CONVERGED" in flows["status"].upper()
        np.testing.assert_allclose(flows["mu"], paths["mu"], atol=1e-7)


def test_alignments_are_found_at_once() -> None:
    """Without passes of the dual, with few rounds, whatever steps and states are masked."""
    rng = np.random.default_rng(3)
    eta = 3 * rng.normal(size=(24, 10, 14))
    mask = np.ones(eta.shape, bool)
    for i in range(len(eta)):
        steps = int(rng.integers(2, 11))
        mask[i, steps:] = False
        mask[i, :, int(rng.integers(steps, 15)) :] = False
    _, solution = _alignment(eta, 0.1, mask)
    assert np.mean(solution.iterations) < 2
    assert np.mean(solution.oracle_calls) < 20


def test_gradients_where_multipliers_are_not_unique() -> None:
    """Equal words, whose rows all hold, leave multipliers a choice, at whose ends more moves."""
    rng = np.random.default_rng(0)
    eta = 2 * rng.normal(size=(400, 8, 12))
    eta[:, :, -1] = eta[:, :, 0]
    eta[:, -1] = eta[:, 0]
    d, step = rng.normal(size=(2, *eta.shape))
    u, solution = _alignment(eta, 0.1)
    actual = (solution.vjp({u: d})[u] * step).sum(axis=(1, 2))
    h = 1e-5
    lower, middle, upper = (
        (d * _alignment(eta + k * h * step, 0.1)[0].value).sum(axis=(1, 2)) for k in (-1, 0, 1)
    )
    smooth = np.abs(upper + lower - 2 * middle) < 1e-5 * h
    assert smooth.mean() > 0.98
    np.testing.assert_allclose(actual[smooth], ((upper - lower) / (2 * h))[smooth], atol=1e-5)


@pytest.mark.usefixtures("by_flows")
def test_admm_and_map_and_loss() -> None:
    eta, transitions = _scores(8, 6, 0.05, 2, banded=False)
    fg = fm.FactorGraph()
    w = fg.variable_from(eta)
    fg.add(fm.Sequence(w, transitions))
    fg.add(fm.AtMostOne(w[:, 0]))
    fg.solve(tol=1e-9)
    exact = w.value
    fg.solve(method="admm", tol=1e-9, max_iter=20_000)
    np.testing.assert_allclose(w.value, exact, atol=1e-6)
    best = fg.solve_map()
    assert best.objective <= float(best.upper_bound) + 1e-9
    decoded = fg.decode()
    assert set(np.unique(w.value)) <= {0.0, 1.0}
    assert decoded.objective <= best.objective + 1e-9
    assert float(fg.loss({w: w.value})) >= 0


def test_a_limit_on_oracle_calls_asks_for_the_oracle() -> None:
    eta, transitions = _scores(20, 10, 1e-3, 0, banded=False)
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    fg.add(fm.Sequence(u, transitions))
    solution = fg.solve(max_inner_iter=150, on_failure="ignore")
    assert "MAX_ITER" in str(solution.status).upper()
    assert int(solution.oracle_calls) <= 151


def test_float32_and_batches() -> None:
    """Instances with few structures and with many, absent steps, in one batch."""
    rng = np.random.default_rng(0)
    eta = rng.normal(size=(4, 15, 8)) * np.array([10, 1e-2, 1e-4, 0.1])[:, None, None]
    transitions = 0.01 * rng.normal(size=(8, 8))
    mask = np.ones(eta.shape, dtype=bool)
    mask[1, 9:] = False
    mask[2, 4, 3] = False
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta.astype(np.float32), mask=mask)
    sequence = fg.add(fm.Sequence(u, transitions.astype(np.float32)))
    solution = fg.solve(on_failure="raise")
    grads = solution.vjp({u: np.ones_like(u.value)})
    assert u.value.dtype == np.float32 and sequence.num_structures.shape == (4,)
    np.testing.assert_allclose(grads[u], 0, atol=1e-5)  # the sums of steps do not change
    for i in range(4):
        steps = int(mask[i].any(axis=1).sum())
        alone, _, _ = _solve(eta[i].astype(np.float32)[:steps], transitions.astype(np.float32),
                             mask=mask[i, :steps])  # fmt: skip
        np.testing.assert_allclose(u.value[i, :steps], alone.value, atol=1e-6)
        np.testing.assert_array_equal(u.value[i, steps:], 0)


def _padded(eta: Any, mask: Any, own: dict[str, Any], rows: bool) -> dict[str, Any]:
    """The solution of a batch, and its gradients: by the marginals, and by all values."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(eta, mask=mask)
    sequence = fg.add(fm.Sequence(u, **own))
    if rows:
        fg.add(fm.AtMostOne(u, axis=0))
    solution = fg.solve(tol=1e-12, on_failure="raise")
    # Numbers that do not depend on how many states there are.
    d = np.sin(7 * eta)
    d_v = np.broadcast_to(np.cos(9 * own["transitions"]), sequence.value.shape)
    grads = solution.vjp({u: d, sequence: d_v})
    answer = {"mu": u.value, "value": sequence.value, "by mu": solution.vjp({u: d})[u]}
    answer |= {"by value": grads[u], "transitions": grads[sequence]}
    return answer | {end: grads[sequence, end] for end in ("initial", "final") if end in own}


@pytest.mark.usefixtures("by_flows")
@pytest.mark.parametrize(("rows", "per_step"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("scale", [3, 0.3, 0.01])
def test_states_that_are_masked_throughout_are_none(
    rows: bool, per_step: bool, scale: float
) -> None:
    """Batches are padded with them: the same as alone, and as the sequence without them."""
    rng = np.random.default_rng(11)
    batch, length, states = 5, 7, 11
    eta = scale * rng.normal(size=(batch, length, states))
    shape = (length - 1, states, states) if per_step else (states, states)
    own = {"transitions": 0.05 * scale * rng.normal(size=(batch, *shape))}
    if not rows:
        own |= {end: scale * rng.normal(size=(batch, states)) for end in ("initial", "final")}
    here = [np.arange(states), np.arange(7), np.delete(np.arange(states), [0, 4, 5]),
            np.array([1, 2, 3, 6, 7, 8, 10]), np.arange(3, 10)]  # fmt: skip
    steps = [7, 5, 7, 1, 4]
    mask = np.zeros(eta.shape, bool)
    for i in range(batch):
        mask[i, : steps[i], here[i]] = True
    mask[2, 1, 3] = False  # a state that other steps have
    together = _padded(eta, mask, own, rows)
    assert not together["mu"][~mask].any() and not together["by value"][~mask].any()
    for i in range(batch):
        one = slice(i, i + 1)
        alone = _padded(eta[one], mask[one], {k: v[one] for k, v in own.items()}, rows)
        left = {k: v[one][..., here[i]] for k, v in own.items()}
        left["transitions"] = left["transitions"][..., here[i], :]
        without = _padded(eta[one][..., here[i]], mask[one][..., here[i]], left, rows)
        for name, value in together.items():
            np.testing.assert_array_equal(value[i], alone[name][0], err_msg=name)
            kept = value[i][..., here[i]]
            if name in ("value", "transitions"):
                kept = kept[..., here[i], :]
            np.testing.assert_allclose(kept, without[name][0], atol=1e-9, err_msg=name)
            assert abs(kept).sum() == pytest.approx(abs(value[i]).sum(), abs=1e-12)


def test_soft_prohibitions_do_not_blur_the_rest() -> None:
    """Scores of -1e9 are no part of the scale that tolerances are measured in."""
    eta, transitions = _scores(30, 8, 1e-3, 6, banded=False)
    forbidden = np.random.default_rng(1).random(transitions.shape) < 0.3
    soft, _, _ = _solve(eta, np.where(forbidden, -1e9, transitions))
    hard, _, _ = _solve(eta, np.where(forbidden, -np.inf, transitions))
    np.testing.assert_allclose(soft.value, hard.value, atol=1e-12)
