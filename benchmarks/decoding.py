"""LP-MAP and exact decoding on real instances: value, bound, nodes and time of each.

UAI instances (values are logarithms), the OR-Library assignment problems, as one `Matching` and as
rows and columns, and random pairs: all pairs of 60 variables, and a restricted Boltzmann machine of
500 and 784. The data are read from --data, else from the folder that the environment variable
FACTORMAX_DATA names; without either, only the random pairs are run.
No row is printed unless its answer stands: the value is worked out again from the tables of the
file, no bound is below the best value, and an assignment costs what SciPy says. For random pairs
there is also what simple search finds: one variable at a time, from all off, while that improves.

`python -m benchmarks.decoding --time-limit 60 --only grids` runs this section alone; with
`--json FILE` its numbers are written too, one instance after the other.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import linear_sum_assignment

import factormax as fm
from benchmarks.speed import Section, require
from benchmarks.timing import table
from experiments.data_folder import HOW_TO_NAME_IT, data_folder
from factormax.io import read_uai

TOL = 1e-6  # relative: what the bound of a relaxation may be off by


@dataclass
class Result:
    """One instance: its size, the relaxation, and the best assignment."""

    name: str
    variables: int
    factors: int
    build_s: float
    lp_value: float
    lp_bound: float
    lp_s: float
    lp_status: str
    integral: bool
    value: float
    bound: float
    nodes: int
    decode_s: float
    proved: bool
    flips: float = float("nan")  # what simple search finds


def measure(
    name: str,
    build_s: float,
    fg: fm.FactorGraph,
    offset: float,
    score: Callable[[], float],
    time_limit: float,
) -> Result:
    """Both queries of a graph, checked. score: the value of the assignment that it holds."""
    start = time.perf_counter()
    relaxed = fg.solve_map(on_failure="ignore")
    lp_s = time.perf_counter() - start
    lp_value = offset + float(relaxed.objective)
    lp_bound = offset + float(relaxed.upper_bound)
    integral = bool(relaxed.integral)
    rounded = score() if integral else -np.inf
    start = time.perf_counter()
    decoded = fg.decode(time_limit=time_limit, on_failure="ignore")
    decode_s = time.perf_counter() - start
    value = offset + float(decoded.objective)
    bound = offset + float(decoded.upper_bound)
    proved = bool(decoded.optimal)
    if np.isfinite(value):
        slack = TOL * (1 + abs(value))
        require(abs(score() - value) <= slack, f"{name}: {value} found, {score()} from the tables")
        require(lp_bound >= value - slack, f"{name}: the LP bound {lp_bound} is below {value}")
        require(bound >= value - slack, f"{name}: the bound {bound} is below {value}")
        require(not proved or bound <= value + slack, f"{name}: proved, but the bound is {bound}")
        require(not proved or value >= rounded - slack, f"{name}: LP-MAP has found {rounded}")
    return Result(
        name,
        fg._num_variables,
        sum(factor._count for factor in fg._factors),
        build_s,
        lp_value,
        lp_bound,
        lp_s,
        relaxed.status.name,
        integral,
        value,
        bound,
        int(decoded.nodes),
        decode_s,
        proved,
    )


def uai_instances(data: Path, only: str) -> Iterator[tuple[str, Path]]:
    """The UAI instances, unpacked one after the other, small files first."""
    with (
        tarfile.open(data / "mrf_uai" / "mrf_instances.tar.xz") as archive,
        tempfile.TemporaryDirectory() as folder,
    ):
        members = [m for m in archive.getmembers() if m.isfile() and only in m.name]
        contents = {m.name: archive.extractfile(m).read() for m in members}  # type: ignore[union-attr]
        for name in sorted(contents, key=lambda n: (n.split("/")[0], len(contents[n]))):
            path = Path(folder) / "model.uai"
            path.write_bytes(contents[name])
            yield name, path


def uai_results(data: Path, time_limit: float, only: str) -> Iterator[Result]:
    for name, path in uai_instances(data, only):
        progress(name)
        start = time.perf_counter()
        model = read_uai(path)
        build_s = time.perf_counter() - start
        yield measure(
            name.removesuffix(".uai"),
            build_s,
            model.graph,
            model.offset,
            lambda m=model: m.score(m.assignment()),
            time_limit,
        )


def assignment_results(data: Path, time_limit: float, only: str) -> Iterator[Result]:
    costs = np.load(data / "assignment" / "or_library_assign.npz")
    for name in costs.files:
        cost = costs[name].astype(np.float64)
        i, j = linear_sum_assignment(cost)
        best = -float(cost[i, j].sum())
        for form in ("Matching", "rows and columns"):
            label = f"{name}, {form}"
            if only not in label:
                continue
            progress(label)
            start = time.perf_counter()
            fg = fm.FactorGraph()
            u = fg.variable_from(-cost)
            if form == "Matching":
                fg.add(fm.Matching(u))
            else:
                fg.add(fm.Xor(u, axis=1))
                fg.add(fm.AtMostOne(u, axis=0))
            build_s = time.perf_counter() - start
            result = measure(
                label,
                build_s,
                fg,
                0.0,
                lambda u=u, c=cost: -float((u.value * c).sum()),
                time_limit,
            )
            if result.lp_status == "CONVERGED":
                apart = abs(result.lp_value - best)
                require(apart <= TOL * (1 + abs(best)), f"{label}: {result.lp_value}, not {best}")
            if result.proved:
                require(result.value == best, f"{label}: {result.value}, not {best}")
            yield result


def pair_results(time_limit: float, only: str) -> Iterator[Result]:
    """Random pairs: where the relaxation says little."""
    for seed in range(5):
        name = f"dense pairs of 60, seed {seed}"
        if only in name:
            rng = np.random.default_rng(seed)
            first, second = np.triu_indices(60, 1)
            pairs = rng.normal(size=len(first))
            yield of_pairs(name, rng.normal(size=60), first, second, pairs, time_limit)
    for scale in (0.1, 1.0):
        name = f"Boltzmann machine 500 x 784, scale {scale:g}"
        if only in name:
            rng = np.random.default_rng(0)
            first, second = np.indices((500, 784)).reshape(2, -1)
            pairs = scale * rng.normal(size=len(first))
            scores = rng.normal(size=500 + 784)
            yield of_pairs(name, scores, first, 500 + second, pairs, time_limit)


def of_pairs(
    name: str,
    scores: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    pairs: np.ndarray,
    time_limit: float,
) -> Result:
    progress(name)
    start = time.perf_counter()
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    fg.add(fm.Pair(u[first], u[second], pairs))
    build_s = time.perf_counter() - start

    def score() -> float:
        x = np.asarray(u.value)
        return float(scores @ x + (pairs * x[first] * x[second]).sum())

    result = measure(name, build_s, fg, 0.0, score, time_limit)
    return replace(result, flips=one_flip(scores, first, second, pairs))


def one_flip(scores: np.ndarray, first: np.ndarray, second: np.ndarray, pairs: np.ndarray) -> float:
    """The value where no single flip improves, from all off, by the best flip each time."""
    n = len(scores)
    weight = np.zeros((n, n))
    weight[first, second] = weight[second, first] = pairs
    x, gain, value = np.zeros(n), scores.copy(), 0.0
    while (step := (1 - 2 * x) * gain).max() > 1e-12:
        j = int(np.argmax(step))
        value += step[j]
        gain += (1 - 2 * x[j]) * weight[j]
        x[j] = 1 - x[j]
    return value


def progress(name: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)


def run(
    time_limit: float, only: str = "", file: Path | None = None, data: Path | None = None
) -> Section:
    """All sets, as tables and as numbers; only: a part of the names wanted; data: their folder."""
    texts, record = [], {}
    sets: list[tuple[str, Callable[[float, str], Iterator[Result]]]] = [
        ("Random pairs", pair_results)
    ]
    if data is None:
        texts.append(f"Random pairs only: the other instances are data sets. {HOW_TO_NAME_IT}\n")
    else:
        sets += [
            ("UAI instances (log values)", partial(uai_results, data)),
            ("OR-Library assignment (minus the cost)", partial(assignment_results, data)),
        ]
    for title, results in sets:
        found = []
        for result in results(time_limit, only):
            found.append(result)
            record[result.name] = asdict(result)
            if file is not None:
                file.write_text(json.dumps(record, indent=1))
        header = ["", "variables", "factors", "build s", "LP value", "LP bound", "LP s", "LP"]
        header += ["value", "bound", "nodes", "s", "proved", "flips"]
        rows: list[list[object]] = [row(result) for result in found]
        proved = sum(r.proved for r in found)
        text = f"{title}: {proved} of {len(found)} proved, at most {time_limit:g} s each"
        if found:
            texts.append(table(text, header, rows))
    return "\n".join(texts), record


def row(r: Result) -> list[object]:
    status = "0/1" if r.integral else "" if r.lp_status == "CONVERGED" else r.lp_status
    numbers = [f"{x:.6f}" for x in (r.lp_value, r.lp_bound)]
    best = [f"{x:.6f}" for x in (r.value, r.bound)]
    return [
        *[r.name, r.variables, r.factors, f"{r.build_s:.3f}"],
        *[*numbers, f"{r.lp_s:.2f}", status],
        *[*best, r.nodes, f"{r.decode_s:.2f}", "yes" if r.proved else ""],
        "" if np.isnan(r.flips) else f"{r.flips:.6f}",
    ]


def decoding(quick: bool) -> Section:
    """Three seconds per instance if it must be quick, else twenty."""
    return run(3.0 if quick else 20.0, data=data_folder())


SECTIONS: dict[str, Callable[[bool], Section]] = {"decoding": decoding}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__)
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="S", help="per instance")
    parser.add_argument("--only", default="", metavar="TEXT", help="names that contain this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the numbers")
    parser.add_argument("--data", type=Path, default=data_folder(), help="the data folder")
    args = parser.parse_args()
    print(run(args.time_limit, args.only, args.json, args.data)[0])


if __name__ == "__main__":
    main()
