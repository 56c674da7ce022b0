"""Passes over the graph to 1e-6 at default options, on models of several kinds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.models import (
    chain_grid,
    full_mrf,
    matching,
    matching_budget,
    random_logic,
    sequence_at_most_one,
    tree_budgets,
    tree_logic,
)
from benchmarks.timing import table

SCALES = (0.3, 1.0, 5.0)
#: The mark at those scales: passes of an early NumPy version without the exact finish.
MARKS = {
    "matching 20": (matching(20), (23, 36, 55)),
    "matching 40": (matching(40), (26, 36, 68)),
    "random logic 60": (random_logic(60), (47, 88, 147)),
    "random logic 300": (random_logic(300), (123, 137, 269)),
    "full MRF 40": (full_mrf(40), (15, 19, 25)),
    "full MRF 159": (full_mrf(159), (22, 38, 55)),
    "matching 10": (matching(10), None),
    "matching 80": (matching(80), None),
    "tree 15 + budgets": (tree_budgets(15, 2), (1, 6, 6)),
    "tree 30 + budgets": (tree_budgets(30, 2), (3, 9, 12)),
    "tree + budgets + logic": (tree_logic(15), (13, 11, 14)),
    "sequence 20x15 + at most one": (sequence_at_most_one(20, 15), (15, 26, 46)),
    "6x6 grid of chains": (chain_grid(6), (24, 24, 25)),
    "tree 50 + budgets": (tree_budgets(50, 2), None),
    "sequence 20x25 + at most one": (sequence_at_most_one(20, 25, free=0), None),
    "Matching 20x30 + budget": (matching_budget(20), None),
}
#: Oracle calls of the same version.
CALLS = {
    "tree 15 + budgets": (90, 68, 16),
    "tree 30 + budgets": (258, 175, 119),
    "sequence 20x15 + at most one": (722, 345, 229),
}


def run(quick: bool) -> tuple[str, dict[str, object]]:
    seeds = range(3 if quick else 9)
    rows: list[list[object]] = []
    record: dict[str, object] = {}
    for name, (build, mark) in MARKS.items():
        medians, calls, worst, failed = [], [], 0.0, 0
        for scale in SCALES:
            counts, asked = [], []
            for seed in seeds:
                fg = build(seed, scale)
                u = fg._variables[0]
                solution = fg.solve(on_failure="ignore")
                value = u.value
                fg.solve(tol=1e-11, max_iter=20_000, warm_start=solution)
                worst = max(worst, float(np.abs(value - u.value).max()))
                failed += not solution.converged
                counts.append(int(solution.iterations))
                asked.append(int(solution.oracle_calls))
            medians.append(statistics.median(counts))
            calls.append(statistics.median(asked))
        mark_calls = CALLS.get(name)
        rows.append(
            [
                name,
                _joined(medians),
                _joined(mark) if mark else "-",
                _joined(calls) if any(calls) else "",
                _joined(mark_calls) if mark_calls else "",
                worst,
                failed,
            ]
        )
        record[name] = {
            "passes": medians,
            "mark": mark,
            "oracle_calls": calls,
            "error": worst,
            "failed": failed,
        }
    title = f"Passes to 1e-6 at scales {SCALES}, median of {len(seeds)} instances"
    header = ["model", "passes", "mark", "oracle calls", "mark", "largest error", "failed"]
    return table(title, header, rows), record


def _joined(numbers: Sequence[float]) -> str:
    return "/".join(f"{n:g}" for n in numbers)
