"""The memory of a solve and its derivative: the peak of each model, in a process of its own.

What is there before, the scores among it, is not counted. *answers* are the marginals, multipliers
and gradients that are handed out, *thread* is what each thread works in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import factormax as fm
from benchmarks.models import pair_grid, tree_budgets
from benchmarks.passes import MARKS
from benchmarks.timing import table
from factormax._engines.cpu import working_memory
from factormax._fronts.numpy import start

Section = tuple[str, dict[str, Any]]
MB = 1e6


def _batch(
    shape: tuple[int, ...], dtype: Any, add: Callable[[fm.FactorGraph, fm.Variable], object]
) -> Callable[[], fm.FactorGraph]:
    def build() -> fm.FactorGraph:
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(np.random.default_rng(0).standard_normal(shape).astype(dtype))
        add(fg, u)
        return fg

    return build


def _rows(fg: fm.FactorGraph, u: fm.Variable) -> None:
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))


def _sequence(fg: fm.FactorGraph, u: fm.Variable) -> None:
    states = u.shape[1]
    fg.add(fm.Sequence(u, np.random.default_rng(1).standard_normal((states, states))))


def _one_graph() -> fm.FactorGraph:
    fg = fm.FactorGraph()
    u = fg.variable_from(np.random.default_rng(0).standard_normal((8192, 128), np.float32))
    fg.add(fm.Xor(u, axis=1))
    return fg


def _labels(fg: fm.FactorGraph, u: fm.Variable) -> None:
    """Scores of all pairs that the batch shares, beside some that it does not."""
    rng = np.random.default_rng(1)
    i, j = np.triu_indices(u.shape[0], 1)
    fg.add(fm.Pair(u[i], u[j], 0.1 * rng.standard_normal(len(i))))
    fg.add(fm.Pair(u[:10], u[10:20], rng.standard_normal((1024, 10))))


#: The models of the table of passes, and larger ones.
CASES: dict[str, Callable[[], fm.FactorGraph]] = {
    name: partial(build, 0, 1.0) for name, (build, _) in MARKS.items()
} | {
    "LP-matching 20x20, batch 64": _batch((64, 20, 20), float, _rows),
    "LP-matching 80x80, batch 64": _batch((64, 80, 80), float, _rows),
    "full MRF 159, batch 1024": _batch((1024, 159), float, _labels),
    "grid of pairs, 300x300": partial(pair_grid(300), 0, 1.0),
    "Xor, 8192x128, batch": _batch((8192, 128), np.float32, lambda fg, u: fg.add(fm.Xor(u))),
    "Xor, 8192x128, one graph": _one_graph,
    "tree 50 + budget 5": partial(tree_budgets(50, 5), 0, 1.0),
    "trees of 25, batch 64": _batch((64, 25, 25), float, lambda fg, u: fg.add(fm.DepTree(u))),
    "sequences 50x25, batch 64": _batch((64, 50, 25), float, _sequence),
    "Matching 40x40, batch 64": _batch((64, 40, 40), float, lambda fg, u: fg.add(fm.Matching(u))),
}


def _bytes(field: str) -> float:
    """What Linux says of this process: VmRSS, what it has, or VmHWM, the most it has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * float(line.split()[1])
    raise ValueError(field)


def measure(name: str) -> dict[str, float]:
    """Solves and differentiates, in this process, and says what that took."""
    # What any first solve brings along is not the model's.
    small = fm.FactorGraph()
    v = small.variable_from(np.zeros(2))
    small.add(fm.Xor(v))
    small.add(fm.AtMostOne(v))
    small.solve().vjp({v: np.ones(2)})
    fg = CASES[name]()
    u = fg._variables[0]
    task = start(fg)
    grad = np.random.default_rng(2).standard_normal(task.inputs.eta_u.shape)
    grad = grad.astype(task.inputs.eta_u.dtype).reshape(fg._tensors[0].scores.shape)
    thread = working_memory(task.inputs)
    del task
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _bytes("VmRSS")
    solution = fg.solve()
    forward = _bytes("VmHWM") - before
    found = solution.vjp({u: grad})
    both = _bytes("VmHWM") - before
    answers = u.value.nbytes + solution.multipliers.nbytes + sum(g.nbytes for g in found.values())
    return {"forward": forward, "both": both, "answers": answers, "thread": thread}


def memory(quick: bool) -> Section:
    """Each model in a process of its own: what one has freed another would find."""
    if sys.platform != "linux":
        return "memory: left out, only Linux tells the peak of a part of a process.\n", {}
    rows: list[list[object]] = []
    record: dict[str, Any] = {}
    for name in list(CASES)[:: 4 if quick else 1]:
        command = [sys.executable, "-m", "benchmarks.memory", name]
        # Large arrays that were freed go back at once, and hide nothing.
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        record[name] = found = json.loads(done.stdout)
        rows.append([name, *(found[k] / MB for k in ("forward", "both", "answers", "thread"))])
    header = ["", "forward", "and backward", "answers", "thread"]
    return table("Peak memory beside the scores (MB)", header, rows), record


SECTIONS: dict[str, Callable[[bool], Section]] = {"memory": memory}

if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
