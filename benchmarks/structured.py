"""Structured factors: trees, sequences and matchings, alone and with others, and their oracles.

Every answer is certified before it is timed: with z the scores less what the multipliers take,
½‖μ − μ*‖² is at most (best structure for z − μ) − (z − μ)·μ, and the best structure comes from an
independent, slow algorithm. The times of the reference implementation (lp-sparsemap, best tuned
step size, its bug with trees and sequences mended) were measured once, on two cores, and are
quoted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

import factormax as fm
from benchmarks.exact import best_sequence, best_tree, best_within_budget
from benchmarks.models import sequence_at_most_one, tree_budgets
from benchmarks.speed import Section, require
from benchmarks.timing import interleaved, table
from factormax._core import best_structures

Best = Callable[[np.ndarray], float]
Solved = tuple[fm.FactorGraph, fm.Variable, fm.Solution]

#: ms per instance, forward and backward, quoted; None: not measured.
REFERENCE = {
    "tree 10 + budget 5": (0.77, 0.20),
    "tree 25 + budget 5": (11.3, 0.93),
    "tree 50 + budget 5": (108.0, 3.7),
    "sequence 20x25 + at most one": (42.0, 3.7),
    "tree 100 alone": (339.0, None),
}


def certify(fg: fm.FactorGraph, solution: fm.Solution, rows: np.ndarray, best: Best) -> float:
    """A bound on ‖μ − μ*‖; rows: `(R, n)`, the inequality rows of the graph."""
    tensor = fg._tensors[0]
    mu = fg._variables[0].value.ravel()
    z = tensor.scores.ravel() - rows.T @ solution.multipliers.ravel()[: len(rows)]
    slack = z - mu
    gap = best(slack.reshape(tensor.shape)) - slack @ mu
    return float(np.sqrt(2 * max(gap, 0.0)))


def budget_rows(n: int) -> np.ndarray:
    """Row h: the arcs from head h."""
    rows = np.zeros((n, n, n))
    for h in range(n):
        rows[h, :, h] = 1
        rows[h, h, h] = 0
    return rows.reshape(n, -1)


def structured(quick: bool) -> Section:
    """One instance of each model at scale 1, to 1e-6; the lone tree to full precision."""
    rows: list[list[object]] = []
    record: dict[str, Any] = {}

    def measure(
        name: str, build: Callable[[int], fm.FactorGraph], a: np.ndarray, best: Callable[..., float]
    ) -> None:
        forward, backward, passes, calls, error = [], [], [], [], 0.0
        for seed in range(3 if quick else 7):
            fg = build(seed)
            u = fg._variables[0]
            # The bound is the root of a gap, to which a row that lacks 1e-10 adds as much. So it is
            # for the exact solution, and what is timed is compared with that.
            exact = fg.solve(tol=1e-12, on_failure="raise")
            bound = certify(fg, exact, a, lambda s, fg=fg: best(fg, s))
            value = u.value.copy()
            solution = fg.solve(on_failure="raise")
            error = max(error, bound + float(np.linalg.norm(u.value - value)))
            require(error <= 1e-5, f"{name} may be off by {error}")
            grad = np.random.default_rng(seed).standard_normal(u.shape)
            times = interleaved(
                {"forward": fg.solve, "backward": lambda s=solution: s.vjp({u: grad})},  # noqa: B023
                5 if quick else 15,
            )
            forward.append(1e3 * times["forward"])
            backward.append(1e3 * times["backward"])
            passes.append(int(solution.iterations))
            calls.append(int(solution.oracle_calls))
        f, b = float(np.median(forward)), float(np.median(backward))
        quoted = REFERENCE.get(name, (None, None))
        ratios = [q / t if q else "" for q, t in zip(quoted, (f, b), strict=True)]
        rows.append([name, f, b, *ratios, np.median(passes), np.median(calls), error])
        record[name] = {"forward_ms": f, "backward_ms": b, "ratios": ratios}

    def tree_best(fg: fm.FactorGraph, scores: np.ndarray) -> float:
        return best_tree(scores)

    for n in (10, 25, 50):
        model = tree_budgets(n, 5)
        measure(f"tree {n} + budget 5", lambda s, m=model: m(s, 1.0), budget_rows(n), tree_best)
    model = tree_budgets(25, 2)
    measure("tree 25 + budget 2", lambda s: model(s, 1.0), budget_rows(25), tree_best)
    lone = tree_budgets(100, None)
    measure("tree 100 alone", lambda s: lone(s, 1.0), np.zeros((0, 10_000)), tree_best)

    def sequence_best(fg: fm.FactorGraph, scores: np.ndarray) -> float:
        (factor,) = fg._structured
        # Its own scores count in full: they have no quadratic.
        own = factor._score_parts[0].given
        earned = float((own * factor.value).sum())
        return best_sequence(scores, own) - earned

    for length, states in ((10, 20), (20, 25), (20, 50)):
        chain = sequence_at_most_one(length, states, free=0)
        a = np.tile(np.eye(states), (1, length))
        name = f"sequence {length}x{states} + at most one"
        measure(name, lambda s, m=chain: m(s, 1.0), a, sequence_best)
    header = ["", "forward", "backward", "ratio", "ratio", "passes", "oracle calls", "error below"]
    title = "Structured factors, one instance at scale 1 (ms), ratios to the reference (quoted)"
    text = table(title, header, rows)
    batch_text, record["batch"] = batches(quick)
    return text + "\n" + batch_text, record


def batches(quick: bool) -> Section:
    """A batch of 64 on one thread and on two."""
    rows: list[list[object]] = []
    record: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    for name, n in (("tree 25", 25), ("Matching 20", 20), ("Matching 40", 40)):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(rng.standard_normal((64, n, n)))
        fg.add(fm.DepTree(u) if name.startswith("tree") else fm.Matching(u))
        solution = fg.solve(on_failure="raise")
        grad = rng.standard_normal((64, n, n))
        whole = u.value
        linear = fm.FactorGraph(batch_dims=1)
        v = linear.variable_from(fg._tensors[0].scores)
        runs: dict[str, Callable[[], object]] = {
            "forward": fg.solve,
            "backward": lambda s=solution: s.vjp({u: grad}),  # noqa: B023
        }
        if not name.startswith("tree"):
            linear.add(fm.Xor(v, axis=1))
            linear.add(fm.AtMostOne(v, axis=0))
            linear.solve()
            apart = float(np.abs(v.value - whole).max())
            require(apart <= 1e-5, f"{name} and its rows and columns differ by {apart}")
            runs["as rows and columns"] = linear.solve
        seconds = {}
        for threads in (1, 2):
            fm.set_num_threads(threads)
            seconds[threads] = interleaved(runs, 5 if quick else 15)
        fm.set_num_threads(None)
        us = {k: 1e6 * t / 64 for k, t in seconds[1].items()}
        gain = [seconds[1][k] / seconds[2][k] for k in ("forward", "backward")]
        rows.append([name, us["forward"], us["backward"], *gain, us.get("as rows and columns", "")])
        record[name] = {"us": us, "threads": gain}
    header = ["", "forward", "backward", "two threads", "two threads", "as rows and columns"]
    return table("Batches of 64, µs per instance on one thread", header, rows), record


def oracles(quick: bool) -> Section:
    """The oracles themselves: assignment beside SciPy's, and trees."""
    rows: list[list[object]] = []
    record: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    repeats = 5 if quick else 15
    for m, n in ((20, 20), (40, 40), (100, 100), (200, 200), (100, 200)):
        count = max(4, 40_000 // (m * n))
        scores = rng.standard_normal((count, m, n))
        matching = fm.Matching(fm.FactorGraph().variable((m, n)))
        for s in scores[:2]:
            i, j = linear_sum_assignment(s, maximize=True)
            require(abs((matching.map(s)[0] * s).sum() - s[i, j].sum()) < 1e-9, "assignment")
        times = interleaved(
            {
                "ours": lambda f=matching, s=scores: many(f, s),
                "scipy": lambda s=scores: [linear_sum_assignment(x, maximize=True) for x in s],
            },
            repeats,
        )
        us = {k: 1e6 * t / count for k, t in times.items()}
        rows.append([f"assignment {m}x{n}", us["ours"], us["scipy"], us["scipy"] / us["ours"]])
        record[f"assignment {m}x{n}"] = us
    for n, kinds in ((25, (False, True)), (100, (False, True))):
        for projective in kinds:
            scores = rng.standard_normal((32, n, n))
            factor = fm.DepTree(fm.FactorGraph().variable((n, n)), projective=projective)
            if not projective:
                best = (factor.map(scores[0])[0] * scores[0]).sum()
                require(abs(best - best_tree(scores[0])) < 1e-9, "tree")
            times = interleaved({"ours": lambda f=factor, s=scores: many(f, s)}, repeats)
            name = f"{'projective tree' if projective else 'tree'} of {n} words"
            rows.append([name, 1e6 * times["ours"] / len(scores), "", ""])
            record[name] = 1e6 * times["ours"] / len(scores)
    header = ["", "factormax", "SciPy", "ratio"]
    return table("Oracles, µs per call, random scores, one thread", header, rows), record


def sequences(quick: bool) -> Section:
    """One sequence at scores of all sizes, forward and backward; each beside itself at scale 1."""
    rows: list[list[object]] = []
    record: dict[str, Any] = {}
    scales = (10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-6, 0.0)

    def measure(name: str, make: Callable[[float, np.random.Generator], Solved]) -> None:
        forward, backward = {}, {}
        for scale in scales:
            rng = np.random.default_rng(1)
            fg, u, solution = make(scale, rng)
            grad = rng.standard_normal(u.shape)
            forward[str(scale)] = fg.solve
            backward[str(scale)] = lambda s=solution, u=u, g=grad: s.vjp({u: g})
        times = interleaved(forward, 3 if quick else 9)
        back = interleaved(backward, 3 if quick else 9)
        for scale in scales:
            ms, back_ms = 1e3 * times[str(scale)], 1e3 * back[str(scale)]
            ratio = times[str(scale)] / times["1.0"]
            rows.append([name, f"{scale:g}", ms, ratio, back_ms])
            record[f"{name} at {scale:g}"] = {"forward": ms, "ratio": ratio, "back": back_ms}

    for length, states in ((20, 25), (50, 25), (100, 10)):
        for banded in (False, True):
            name = f"{length}x{states}{', banded' if banded else ''}"
            measure(name, partial(_sequence, length, states, banded))
    for offset in (0.0, 0.4):
        length = 300 if quick else 3000
        name = f"{length}, budget {length // 3}, scores around {offset:g}"
        measure(name, partial(_budgeted, length, offset))
    header = ["", "scale", "forward", "to scale 1", "backward"]
    return table("Sequences at any scale, ms, one instance", header, rows), record


def _sequence(
    length: int, states: int, banded: bool, scale: float, rng: np.random.Generator
) -> Solved:
    scores = scale * rng.standard_normal((length, states))
    transitions = scale * rng.standard_normal((length - 1, states, states))
    if banded:
        state = np.arange(states)
        transitions[:] = -0.5 * scale * np.abs(state - state[:, None])
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    sequence = fg.add(fm.Sequence(u, transitions))
    solution = fg.solve(on_failure="raise")
    certify_flow(scores, transitions, u.value, sequence.value)
    return fg, u, solution


def _budgeted(length: int, offset: float, scale: float, rng: np.random.Generator) -> Solved:
    scores = offset + scale * rng.standard_normal(length)
    transitions = scale * rng.standard_normal(length - 1)
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    sequence = fg.add(fm.SequenceBudget(u, transitions, budget=length // 3))
    solution = fg.solve(on_failure="raise")
    mu, both = u.value, sequence.value
    reduced = scores - mu
    earned = reduced @ mu + transitions @ both
    gap = best_within_budget(reduced, transitions, length // 3) - earned
    size = np.abs(scores * mu).sum() + np.abs(transitions * both).sum()
    # At scale 10 an active set finds the answer, and stops where its own rounding may be the gap.
    require(abs(gap) <= 1e-10 * size + 1e-14 * length, "budget: optimal")
    least = np.maximum(mu[:-1] + mu[1:] - 1, 0)
    require(bool((both >= least - 1e-11).all()), "budget: pairs")
    require(bool((both <= np.minimum(mu[:-1], mu[1:]) + 1e-11).all()), "budget: pairs")
    return fg, u, solution


def certify_flow(
    scores: np.ndarray, transitions: np.ndarray, mu: np.ndarray, flow: np.ndarray
) -> None:
    """Flows with the marginals mu, and no path that is better at the scores less mu.

    A gap is a difference of the scores of whole paths, and rounds as those do.
    """
    scores = scores - scores.mean(axis=1, keepdims=True)
    reduced = scores - mu + 1 / scores.shape[1]
    best = reduced[-1]
    for t in range(len(transitions) - 1, -1, -1):
        best = reduced[t] + (transitions[t] + best).max(axis=1)
    gap = best.max() - (reduced * mu).sum() - (transitions * flow).sum()
    size = np.abs(scores * mu).sum() + np.abs(transitions * flow).sum()
    require(flow.min() >= 0 and abs(gap) <= 1e-12 * size + 1e-15, "sequence: optimal")
    lack = max(np.abs(flow.sum(2) - mu[:-1]).max(), np.abs(flow.sum(1) - mu[1:]).max())
    require(lack <= 1e-11, "sequence: marginals")


def many(factor: fm.DepTree | fm.Matching, scores: np.ndarray) -> object:
    """The best structure for each of many scores, in one call of the core."""
    count = len(scores)
    return best_structures(
        factor._oracle,
        np.array(factor._oracle_shape, dtype=np.int32),
        scores.reshape(count, -1),
        np.zeros((count, 0)),
        np.zeros(count),
    )


SECTIONS: dict[str, Callable[[bool], Section]] = {
    "structured": structured,
    "sequences": sequences,
    "oracles": oracles,
}
