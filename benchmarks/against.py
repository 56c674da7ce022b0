"""`python -m benchmarks.against PYTHON [name ...]`: this factormax and another one, in turns.

PYTHON is an interpreter that imports the other, such as an environment in which an earlier commit
is installed. Each has a process of its own, and builds, solves and differentiates the same graphs;
answers are compared before anything is timed. A ratio below 1 says that this one is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import factormax as fm
from benchmarks import models
from benchmarks.timing import ratios, table

BATCH = 16  # graphs that are solved one after the other, or instances of a batch
REPEATS = 5  # calls per turn
CLOSE = 1e-5  # how far answers may be apart: both are solved to 1e-6

Case = Callable[[], tuple[Callable[[], object], Callable[[], list[float]]]]


def one_by_one(model: models.Model, scale: float = 1.0, query: str = "solve") -> Case:
    """Graphs of one instance each, from NumPy."""

    def prepare() -> tuple[Callable[[], object], Callable[[], list[float]]]:
        graphs = [model(seed, scale) for seed in range(BATCH)]

        def run() -> list[Any]:
            return [getattr(fg, query)() for fg in graphs]

        return run, lambda: [float(solution.objective) for solution in run()]

    return prepare


def batched(build: Callable[[Any], fm.Variable], shape: tuple[int, ...], dtype: str) -> Case:
    """A batch through torch: building, solving and differentiating."""

    def prepare() -> tuple[Callable[[], object], Callable[[], list[float]]]:
        import torch

        torch.set_num_threads(1)
        rng = np.random.default_rng(0)
        scores = torch.tensor(rng.standard_normal(shape).astype(dtype), requires_grad=True)
        toward = torch.tensor(rng.standard_normal(shape).astype(dtype))

        def run() -> Any:
            scores.grad = None
            value = build(scores).value
            value.backward(toward)
            return value

        return run, lambda: [float((run().detach() * toward).sum())]

    return prepare


def solved(*factors: Callable[[fm.Variable], object]) -> Callable[[Any], fm.Variable]:
    """A function from scores to the variables of a graph with these factors, solved."""

    def build(scores: Any) -> fm.Variable:
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        for factor in factors:
            fg.add(factor(u))
        fg.solve()
        return u

    return build


def knapsack_logic(n: int) -> models.Model:
    """Items of n costs, with implications between neighbours."""

    def build(seed: int, scale: float) -> fm.FactorGraph:
        rng = np.random.default_rng(seed)
        fg = fm.FactorGraph()
        u = fg.variable_from(scale * rng.standard_normal(n))
        fg.add(fm.Knapsack(u, rng.uniform(0.5, 5, n), n / 4))
        for i in range(0, n - 1, 2):
            fg.add(fm.Imply([u[i], u[i + 1]]))
        return fg

    return build


ROWS = (lambda u: fm.Xor(u, axis=1), lambda u: fm.AtMostOne(u, axis=0))
CASES: dict[str, Case] = {
    "LP-matching 5x5": one_by_one(models.matching(5)),
    "LP-matching 20x20": one_by_one(models.matching(20)),
    "LP-matching 20x20, scale 5": one_by_one(models.matching(20), 5.0),
    "LP-matching 40x40": one_by_one(models.matching(40)),
    "logic of 30": one_by_one(models.random_logic(30)),
    "logic of 300": one_by_one(models.random_logic(300)),
    "MRF of 60": one_by_one(models.full_mrf(60), 0.3),
    "grid of pairs 50x50": one_by_one(models.pair_grid(50)),
    "knapsack of 100 with logic": one_by_one(knapsack_logic(100)),
    "tree of 25": one_by_one(models.tree_budgets(25, None)),
    "tree of 25 with budgets": one_by_one(models.tree_budgets(25, 2)),
    "tree of 12 with logic": one_by_one(models.tree_logic(12)),
    "Sequence 20x25 with at most one": one_by_one(models.sequence_at_most_one(20, 25)),
    "Matching 20 with a budget": one_by_one(models.matching_budget(20)),
    "grid of chains 6x6": one_by_one(models.chain_grid(6)),
    "LP-MAP of logic of 30": one_by_one(models.random_logic(30), query="solve_map"),
    "LP-MAP of a matching 20x20": one_by_one(models.matching(20), query="solve_map"),
    "LP-MAP of an MRF of 60": one_by_one(models.full_mrf(60), 0.3, query="solve_map"),
    "torch: 64 LP-matchings 20x20": batched(solved(*ROWS), (64, 20, 20), "float64"),
    "torch: 64 LP-matchings 20x20, float32": batched(solved(*ROWS), (64, 20, 20), "float32"),
    "torch: 1 LP-matching 5x5": batched(solved(*ROWS), (1, 5, 5), "float32"),
    "torch: 1024 rows of 128": batched(solved(fm.Xor), (1024, 128), "float32"),
    "torch: 64 Matchings 20x20": batched(solved(fm.Matching), (64, 20, 20), "float32"),
    "torch: 16 trees of 25": batched(solved(fm.DepTree), (16, 25, 25), "float32"),
}


def serve() -> None:
    """Answer requests from standard input, a line each: a name prepares, a number times."""
    fm.set_num_threads(1)
    run: Callable[[], object] = lambda: None  # noqa: E731
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, str):
            run, answer = CASES[request]()
            print(json.dumps(answer()), flush=True)
            continue
        times = []
        for _ in range(request):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)


class Contestant:
    """A process that serves, under an interpreter."""

    def __init__(self, python: str) -> None:
        root = Path(__file__).parents[1]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.against", "--serve"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: str | int) -> list[float]:
        assert self._process.stdin and self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: list[float] = json.loads(self._process.stdout.readline())
        return answer


def compare(name: str, contestants: dict[str, Contestant], turns: int) -> list[object]:
    """A row of the table: the name, the milliseconds of each, and their ratio."""
    answers = [np.array(contestant.ask(name)) for contestant in contestants.values()]
    scale = max(1.0, float(np.abs(answers[1]).max()))
    if not np.abs(answers[0] - answers[1]).max() <= CLOSE * scale:
        raise SystemExit(f"{name}: the answers differ: {answers[0]} and {answers[1]}.")
    times: dict[str, list[list[float]]] = {label: [] for label in contestants}
    for _ in range(turns):
        for label, contestant in contestants.items():
            times[label].append(contestant.ask(REPEATS))
    milliseconds = [1e3 * min(map(statistics.median, own)) for own in times.values()]
    return [name, *milliseconds, ratios(times, "other")["this"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("python", nargs="?", help="the interpreter of the other factormax")
    parser.add_argument("name", nargs="*", help="only the cases whose names contain one of these")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    if args.python is None:
        parser.error("name the interpreter of the other factormax")
    from tqdm import tqdm

    names = [name for name in CASES if not args.name or any(part in name for part in args.name)]
    contestants = {"this": Contestant(sys.executable), "other": Contestant(args.python)}
    rows = [compare(name, contestants, args.turns) for name in tqdm(names)]
    print(table("One thread", ["", "this, ms", "other, ms", "this / other"], rows))


if __name__ == "__main__":
    main()
