"""LP-MAP: passes to 1e-6 of the default method, beside AD3 with the best of five step sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

import factormax as fm
from benchmarks.models import (
    full_mrf,
    matching,
    random_logic,
    sequence_at_most_one,
    tree_budgets,
)
from benchmarks.speed import Section, require
from benchmarks.timing import interleaved, table

#: Passes of an early NumPy version: its proximal point method, and its AD3, best step size.
MARKS = {
    "matching 20": (matching(20), 67, 85),
    "matching 40": (matching(40), 92, 154),
    "tree 15 + budgets": (tree_budgets(15, 2), 14, 38),
    "tree 30 + budgets": (tree_budgets(30, 2), 27, 688),
    "sequence 20x15 + at most one": (sequence_at_most_one(20, 15), 71, 387),
    "full MRF 159": (full_mrf(159), 49, 473),
    "frustrated 40": (full_mrf(40), 30, 67),  # random signs: its relaxations are fractional
    "random logic 60": (random_logic(60), 342, 1729),
    "random logic 300": (random_logic(300), 717, 1726),
}
STEP_SIZES = (0.1, 0.3, 1.0, 3.0, 10.0)
MOST = 2000


def lp_map(quick: bool) -> Section:
    """Both methods must agree in value and bound before anything is printed."""
    rows: list[list[object]] = []
    record: dict[str, Any] = {}
    for name, (build, mark, mark_ad3) in MARKS.items():
        passes, seconds, failed = [], [], 0
        rivals: dict[float, list[float]] = {s: [] for s in STEP_SIZES}
        for seed in range(3 if quick else 9):
            fg = build(seed, 1.0)
            solution = fg.solve_map(on_failure="ignore", max_iter=MOST)
            value, bound = float(solution.objective), float(solution.upper_bound)
            slack = 2e-6 * (1 + abs(value))
            require(abs(bound - value) <= slack, f"{name}: the bound is {bound}, the value {value}")
            failed += not solution.converged
            passes.append(int(solution.iterations))
            run = lambda fg=fg: fg.solve_map(max_iter=MOST)  # noqa: E731
            seconds.append(interleaved({"": run}, 3)[""])
            for step_size in STEP_SIZES if seed < 3 else ():
                rivals[step_size].append(_ad3(fg, step_size, value, slack))
        best = min(statistics.median(r) for r in rivals.values())
        median = statistics.median(passes)
        other = f">{MOST}" if best > MOST else f"{best:g}"
        rows.append([name, median, mark, other, mark_ad3, 1e3 * float(np.median(seconds)), failed])
        record[name] = {"passes": median, "ad3": best, "failed": failed}
    header = ["model", "passes", "mark", "AD3, best of 5", "mark", "ms", "failed"]
    return table("LP-MAP to 1e-6 at scale 1, medians", header, rows), record


def _ad3(fg: fm.FactorGraph, step_size: float, value: float, slack: float) -> float:
    """Its passes, or more than the most if it does not reach the value."""
    solution = fg.solve_map(method="ad3", step_size=step_size, max_iter=MOST, on_failure="ignore")
    reached = bool(solution.converged) and abs(float(solution.objective) - value) <= 100 * slack
    return float(solution.iterations) if reached else MOST + 1.0


SECTIONS: dict[str, Callable[[bool], Section]] = {"lp_map": lp_map}
