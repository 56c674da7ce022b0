"""Passes over the graph to 1e-6 at default options, on the models of the design notes."""

from __future__ import annotations

import statistics

import numpy as np

from benchmarks.models import full_mrf, matching, random_logic
from benchmarks.timing import table

SCALES = (0.3, 1.0, 5.0)
#: Passes of the prototype's compact dual without the exact finish, at those scales: the mark.
MARKS = {
    "matching 20": (matching(20), (23, 36, 55)),
    "matching 40": (matching(40), (26, 36, 68)),
    "random logic 60": (random_logic(60), (47, 88, 147)),
    "random logic 300": (random_logic(300), (123, 137, 269)),
    "full MRF 40": (full_mrf(40), (15, 19, 25)),
    "full MRF 159": (full_mrf(159), (22, 38, 55)),
    "matching 10": (matching(10), None),
    "matching 80": (matching(80), None),
}


def run(quick: bool) -> tuple[str, dict[str, object]]:
    seeds = range(3 if quick else 9)
    rows: list[list[object]] = []
    record: dict[str, object] = {}
    for name, (build, mark) in MARKS.items():
        medians, worst, failed = [], 0.0, 0
        for scale in SCALES:
            counts = []
            for seed in seeds:
                fg = build(seed, scale)
                u = fg.tensors[0].variable
                solution = fg.solve(on_failure="ignore")
                value = u.value
                fg.solve(tol=1e-11, max_iter=20_000, warm_start=solution)
                worst = max(worst, float(np.abs(value - u.value).max()))
                failed += not solution.converged
                counts.append(int(solution.iterations))
            medians.append(statistics.median(counts))
        text = "/".join(f"{m:g}" for m in medians)
        rows.append([name, text, "/".join(map(str, mark)) if mark else "-", worst, failed])
        record[name] = {"passes": medians, "mark": mark, "error": worst, "failed": failed}
    title = f"Passes to 1e-6 at scales {SCALES}, median of {len(seeds)} instances"
    return table(title, ["model", "passes", "mark", "largest error", "failed"], rows), record
