"""Solves of scores on a CUDA device: by its own engine, replayed, and by way of the CPU.

Before a time is printed, the answers and gradients of up to 64 instances are compared with those of
the CPU's engine at a tolerance of 1e-10. The times are of a forward and a backward pass of eager
torch, graph building included, until the device is done; softmax shows what torch itself takes.
Where torch-struct is installed, its marginals of chains and projective trees are timed beside ours.

`python -m benchmarks.gpu --only matching --dtype float32` runs a part of this section.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import factormax as fm
from benchmarks.gpu_cases import CASES, Case, Layer
from benchmarks.timing import interleaved, table
from factormax import _engines

Section = tuple[str, dict[str, Any]]

OUTPUT = Path(__file__).parent / "output"
#: By dtype: the tolerance of the solver, and the largest error and median error of gradients.
PRECISIONS = {
    "float32": (torch.float32, 1e-5, 1e-3, 1e-3),
    "float64": (torch.float64, 1e-8, 1e-6, 1e-5),
}
CHECKED = 64
#: Replays of a CUDA graph that are timed as one: each is short.
REPLAYS = 10
#: A gradient that is off by more than this is that of another face.
OTHER_FACE = 1e-3


@contextmanager
def by_way_of_the_cpu() -> Iterator[None]:
    """As if the CPU's engine were the only one: scores on a device are copied there and back."""
    engines, ask = _engines.ENGINES[:], _engines.engine_there
    names = vars(_engines)  # by hand: a small solve takes as long as mock
    _engines.ENGINES[:] = engines[-1:]
    names["engine_there"] = lambda *asked: None
    try:
        yield
    finally:
        _engines.ENGINES[:] = engines
        names["engine_there"] = ask


class Problem:
    """A batch of a case on a device.

    Args:
        case: the model.
        batch: its size.
        precision: a name in `PRECISIONS`.
        device: where the scores are.
    """

    def __init__(self, case: Case, batch: int, precision: str, device: str) -> None:
        self.case, self.batch, self.device = case, batch, device
        dtype, self.tol, self.most_error, self.most_gradient_error = PRECISIONS[precision]
        rng = np.random.default_rng(0)
        drawn = case.draw(rng, batch)
        self.leaves = [
            torch.from_numpy(x).to(device, dtype).requires_grad_() for x in drawn if x is not None
        ]
        weights = rng.standard_normal(drawn[0].shape)
        self.weights = torch.from_numpy(weights).to(device, dtype)  # of the values, in the loss

    def build(self, leaves: list[Tensor] | None = None) -> tuple[fm.FactorGraph, fm.Variable]:
        scores, *pairs = leaves or self.leaves
        fg = fm.FactorGraph(batch_dims=1)
        return fg, self.case.build(fg, scores, pairs[0] if pairs else None)

    def step(self, on_failure: Any = "warn") -> None:
        """Forward and backward, queued."""
        fg, u = self.build()
        fg.solve(tol=self.tol, on_failure=on_failure)
        torch.autograd.grad(torch.as_tensor(u.value), self.leaves, self.weights)

    def layer_step(self, layer: Layer) -> None:
        """The same of a layer of torch."""
        torch.autograd.grad(layer(self.leaves[0]), self.leaves[0], self.weights)

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(dim=-1)


@dataclass
class Checked:
    """How far the device is from the CPU.

    Attributes:
        error: the largest of the values.
        gradient_error: the median over instances of the largest of an instance.
        other_faces: the share of instances whose gradient is another one.
        engine: what solved.
    """

    error: float
    gradient_error: float
    other_faces: float
    engine: str


def check(problem: Problem) -> Checked:
    """Compares the first instances; the loss is of those alone, so that shared scores can be."""
    count = min(problem.batch, CHECKED)
    weights = problem.weights.clone()
    weights[count:] = 0
    fg, u = problem.build()
    engine = fg.solve(tol=problem.tol, on_failure="warn").engine
    value = torch.as_tensor(u.value)
    gradients = torch.autograd.grad(value, problem.leaves, weights)

    whole = [len(x) == problem.batch and x.ndim > 1 for x in problem.leaves]
    leaves = [
        (x[:count] if own else x).detach().double().cpu().requires_grad_()
        for x, own in zip(problem.leaves, whole, strict=True)
    ]
    fg, u = problem.build(leaves)
    fg.solve(tol=1e-10, on_failure="ignore")
    exact = torch.as_tensor(u.value)
    wanted = torch.autograd.grad(exact, leaves, weights[:count].double().cpu())

    off = torch.zeros(count, dtype=torch.float64)
    for found, right, own in zip(gradients, wanted, whole, strict=True):
        gap = ((found[:count] if own else found).double().cpu() - right).abs()
        off = torch.maximum(off, gap.flatten(1).amax(1) if own else gap.max() / count)
    return Checked(
        float((value[:count].detach().double().cpu() - exact.detach()).abs().max()),
        float(off.median()),
        float((off > OTHER_FACE).double().mean()),
        engine,
    )


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """What a step queues, as a CUDA graph; nothing of it may wait for the device."""
    gc.collect()  # a tape of the leaves that is still there belongs to another stream
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def peak_mib(step: Callable[[], object]) -> float:
    """The most memory of the device that a step takes beyond its inputs, in MiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def contestants(problem: Problem) -> dict[str, Callable[[], object]]:
    """What is timed, by name; each returns when the device is done."""

    def done(step: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            step()
            if problem.device != "cpu":
                torch.cuda.synchronize()

        return run

    def hop() -> None:
        with by_way_of_the_cpu():
            problem.step()

    found: dict[str, Callable[[], object]] = {
        "device": done(problem.step),
        "ignore": done(lambda: problem.step("ignore")),
        "build": problem.build,
        "hop": done(hop),
        "softmax": done(lambda: problem.layer_step(problem.softmax)),
    }
    if problem.case.rival is not None:
        layer = problem.case.rival[1]
        found["rival"] = done(lambda: problem.layer_step(layer))
    return found


def replay(problem: Problem) -> Callable[[], None]:
    """Several replays of a step."""
    graph = captured(lambda: problem.step("ignore"))

    def run() -> None:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()

    return run


def measure(name: str, batch: int, precision: str, device: str, quick: bool) -> dict[str, Any]:
    """The numbers of one row: times in ms, errors, memory. No times if an answer is wrong."""
    case = CASES[name]
    problem = Problem(case, batch, precision, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # instances that did not converge: `engine` tells
        checked = check(problem)
        row: dict[str, Any] = {"model": name, "dtype": precision, "batch": batch, **vars(checked)}
        row["wrong"] = not (
            checked.error <= problem.most_error
            and checked.gradient_error <= problem.most_gradient_error
        )
        if row["wrong"]:
            return row
        runs = {}
        for what, run in contestants(problem).items():
            try:
                run()
            except torch.cuda.OutOfMemoryError:
                continue
            runs[what] = run
        if device != "cpu":
            row["peak_mib"] = peak_mib(problem.step)
            try:
                runs["replay"] = replay(problem)
            except RuntimeError as error:
                row["no_replay"] = str(error).splitlines()[0]
        short = {what: 1 if what == "hop" or batch > 4096 else 5 for what in runs}
        times = interleaved(runs, 3 if quick else 9, in_a_row=short)
    if "replay" in times:
        times["replay"] /= REPLAYS
    row["ms"] = {what: 1e3 * seconds for what, seconds in times.items()}
    if case.rival is not None:
        row["rival"] = case.rival[0]
    return row


def _line(row: dict[str, Any]) -> list[object]:
    start = [row["model"], row["batch"]]
    if row["wrong"]:
        return [*start, *["wrong"] * 10, "", row["error"], row["gradient_error"], ""]
    ms = row["ms"]

    def times(what: str, per: float) -> list[object]:
        return [ms[what], f"{ms[what] / per:.2g}x"] if what in ms else ["", ""]

    device = ms["device"]
    return [
        *start,
        *[device, ms["ignore"], ms["build"], ms.get("replay", "")],
        *times("hop", device),
        ms["softmax"],
        f"{device / ms['softmax']:.2g}x",
        *times("rival", device),
        row.get("peak_mib", ""),
        row["error"],
        row["gradient_error"],
        f"{100 * row['other_faces']:.0f} %",
    ]


HEADER = [
    *["model", "batch", "device", "ignore", "building", "replay"],
    *["hop", "/ device", "softmax", "device /", "rival", "/ device"],
    *["peak MiB", "error", "gradient", "other"],
]


def report(rows: list[dict[str, Any]]) -> str:
    """A table for each dtype, and what they leave unsaid."""
    text = ""
    for precision, (_, tol, *_) in PRECISIONS.items():
        lines = [_line(row) for row in rows if row["dtype"] == precision]
        if lines:
            title = f"{precision} at {tol:g}, forward + backward (ms)"
            text += table(title, HEADER, lines) + "\n"
    rivals = {row["model"]: row["rival"] for row in rows if "rival" in row}
    text += (
        "device: on_failure='warn'; ignore: 'ignore', which waits for nothing. building is a part "
        "of both;\nreplay is 'ignore' as a CUDA graph; hop: the same scores by way of all cores of "
        "the CPU.\ngradient: the median of the instances; other: those off by more than "
        f"{OTHER_FACE:g}.\n"
    )
    text += "".join(f"rival of {model}: {rival}\n" for model, rival in rivals.items())
    for row in rows:
        what = f"{row['model']}, batch {row['batch']}, {row['dtype']}"
        if row["engine"] != "cuda":
            text += f"{what}: {row['engine']}\n"
        if "no_replay" in row:
            text += f"{what}: no replay, {row['no_replay']}\n"
        if row["wrong"]:
            text += f"{what}: WRONG, no times\n"
    return text


def plot(rows: list[dict[str, Any]], path: Path) -> str:
    """Draws the time of matchings over the size of the batch; says where, or why not."""
    try:
        import matplotlib
    except ImportError:
        return "No plot: matplotlib is not installed.\n"
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [p for p in PRECISIONS if any(row["dtype"] == p for row in rows)]
    figure, all_axes = plt.subplots(
        1, len(shown), figsize=(5.5 * len(shown), 4.5), sharey=True, squeeze=False
    )
    axes = all_axes[0]
    names = {"device": "factormax on the device", "hop": "by way of the CPU", "rival": "Sinkhorn"}
    for ax, precision in zip(axes, shown, strict=True):
        timed = [
            row
            for row in rows
            if row["model"] == "matching 20x20" and row["dtype"] == precision and not row["wrong"]
        ]
        for what, label in names.items():
            points = [(row["batch"], row["ms"][what]) for row in timed if what in row["ms"]]
            if points:
                ax.loglog(*zip(*points, strict=True), "o-", label=label)
                ax.legend(frameon=False)
        ax.set(title=f"LP-matching 20x20, {precision}", xlabel="batch size")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("forward + backward (ms)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
    return f"The plot is {path}.\n"


def run(
    quick: bool,
    only: str = "",
    precisions: tuple[str, ...] = tuple(PRECISIONS),
    device: str = "cuda",
    output: Path = OUTPUT,
) -> Section:
    """The cases whose names contain `only`; numbers are saved after each, in gpu.json."""
    if device == "cuda" and not torch.cuda.is_available():
        return "gpu: left out, torch finds no CUDA device.\n", {}
    rows: list[dict[str, Any]] = []
    machine = torch.cuda.get_device_name() if device == "cuda" else device
    numbers = {"device": machine, "rows": rows}
    output.mkdir(parents=True, exist_ok=True)
    for precision in precisions:
        for name, case in CASES.items():
            for batch in case.batches if only in name else ():
                print(f"gpu: {name}, batch {batch}, {precision}", file=sys.stderr, flush=True)
                rows.append(measure(name, batch, precision, device, quick))
                (output / "gpu.json").write_text(json.dumps(numbers, indent=1))
                if device == "cuda":
                    torch.cuda.empty_cache()
    drawn = plot(rows, output / "gpu.png") if only in "matching 20x20" else ""
    return f"{machine}\n\n{report(rows)}{drawn}", numbers


SECTIONS: dict[str, Callable[[bool], Section]] = {"gpu": run}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--only", default="", metavar="TEXT", help="models that contain this")
    parser.add_argument("--dtype", choices=tuple(PRECISIONS), help="default: both")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="for gpu.json and gpu.png")
    args = parser.parse_args()
    precisions = (args.dtype,) if args.dtype else tuple(PRECISIONS)
    print(run(args.quick, args.only, precisions, output=args.output)[0])


if __name__ == "__main__":
    main()
