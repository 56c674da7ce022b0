"""Tables and figures of the runs, beside the paper's numbers.

Prints the tables, draws the figures, and puts both into docs/experiments.md, between the comments
`<!-- report: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.log import Run, read_runs

__all__ = ["fill_page", "main", "sections"]

#: Test metrics in percent, from Tables 1 to 3 of the paper.
PAPER: dict[tuple[str, str, str], dict[str, float]] = {
    ("multilabel", "bibtex", "unstructured"): {"f1": 42.28},
    ("multilabel", "bibtex", "hinge"): {"f1": 37.70},
    ("multilabel", "bibtex", "lp-sparsemap"): {"f1": 43.43},
    ("listops", "listops", "left-to-right"): {"accuracy": 28.07, "f1": 17.43},
    ("listops", "listops", "tree"): {"accuracy": 68.74, "f1": 69.12},
    ("listops", "listops", "tree+budget"): {"accuracy": 82.75, "f1": 82.95},
    ("nli", "snli", "softmax"): {"accuracy": 84.62},
    ("nli", "snli", "matching"): {"accuracy": 84.16},
    ("nli", "snli", "lp-matching"): {"accuracy": 85.04},
    ("nli", "snli", "lp-sequential"): {"accuracy": 83.67},
    ("nli", "mnli", "softmax"): {"accuracy": 69.42},
    ("nli", "mnli", "matching"): {"accuracy": 70.36},
    ("nli", "mnli", "lp-matching"): {"accuracy": 70.64},
    ("nli", "mnli", "lp-sequential"): {"accuracy": 71.17},
}

#: Which of the exhibited pairs of sentences is drawn, chosen by eye.
SHOWN = {"snli": 2}

#: The order of rows, and of colours.
MODELS = {
    "multilabel": ["unstructured", "hinge", "lp-sparsemap"],
    "listops": ["left-to-right", "gold", "tree", "tree+budget"],
    "nli": ["softmax", "matching", "lp-matching", "lp-sequential"],
}

#: What the tables call a metric, or what was observed of a model; others are not shown.
NAMES = {"f1": "F1", "accuracy": "accuracy"}
OBSERVED = {"transition": "transition score", "threshold": "threshold"}


def main(argv: Sequence[str] | None = None) -> None:
    """The command: prints the tables, and brings figures and page up to date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--results", type=Path, default=Path("experiments/results"), help="the folder of the runs")
    add("--page", type=Path, default=Path("docs/experiments.md"), help="filled in if it is there")
    add("--figures", type=Path, default=Path("docs/figures"), help="where to draw")
    args = parser.parse_args(argv)

    runs = read_runs(args.results)
    if not runs:
        raise SystemExit(
            f"No finished run below {args.results}. Make some with, for example, "
            f"python -m experiments.listops --output {args.results}"
        )
    texts = sections(runs)
    for name, text in texts.items():
        print(f"{name}\n\n{text}\n")
    for path in draw(runs, args.figures):
        print(f"Drawn: {path}")
    if args.page.exists():
        args.page.write_text(fill_page(args.page.read_text(encoding="utf-8"), texts), "utf-8")
        print(f"Filled in: {args.page}")


# ---- tables --------------------------------------------------------------------------------------


def sections(runs: Iterable[Run]) -> dict[str, str]:
    """The tables by name: for each data set its results, and for each experiment its times."""
    runs = list(runs)
    result: dict[str, str] = {}
    for experiment in sorted({run.experiment for run in runs}, key=_place(MODELS)):
        mine = [run for run in runs if run.experiment == experiment]
        for dataset in sorted({run.dataset for run in mine}):
            result[dataset] = _results_table([run for run in mine if run.dataset == dataset])
        result[f"{experiment}-times"] = _times_table(mine)
    return result


def fill_page(page: str, texts: dict[str, str]) -> str:
    """The page with the tables in their places."""

    def put(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- report: {name} -->\n{texts.get(name, 'Not run yet.')}\n<!-- end -->"

    return re.sub(r"<!-- report: (?P<name>\S+) -->.*?<!-- end -->", put, page, flags=re.DOTALL)


def _results_table(runs: list[Run]) -> str:
    """A row for each model: means over seeds with their spread, and the paper's number."""
    found = _keys(run.result["test"] for run in runs if run.result)
    metrics = [name for name in NAMES if name in found]
    validated = any(run.result and run.result["valid"] for run in runs)
    seen = _keys(run.result["observed"] for run in runs if run.result)
    observed = [name for name in OBSERVED if name in seen]
    known = [m for m in metrics if any(m in _paper(run) for run in runs)]
    header = ["model", "rate", "seeds", "best epoch"]
    header += [f"validation {NAMES[m]}" for m in metrics] if validated else []
    header += [f"**test {NAMES[m]}**" for m in metrics]
    header += [f"paper, test {NAMES[m]}" for m in known]
    header += [OBSERVED[name] for name in observed]
    rows = []
    for model, group in _by_model(runs):
        results = [run.result for run in group if run.result]
        paper = _paper(group[0])
        rates = sorted({f"{run.settings['learning_rate']:g}" for run in group})
        row = [model, ", ".join(rates), str(len(group)), _span([r["epoch"] for r in results])]
        if validated:
            row += [_mean_and_spread([r["valid"].get(m) for r in results]) for m in metrics]
        row += [_mean_and_spread([r["test"].get(m) for r in results]) for m in metrics]
        row += [f"{paper[m]:.2f}" if m in paper else "–" for m in known]
        row += [_mean_and_spread([r["observed"].get(name) for r in results]) for name in observed]
        rows.append(row)
    return _markdown(header, rows)


def _times_table(runs: list[Run]) -> str:
    """Medians over all epochs of all seeds."""
    header = ["data", "model", "parameters", "steps an epoch", "s an epoch", "ms a step"]
    header += ["in the structured layer", "machine"]
    rows = []
    for dataset in sorted({run.dataset for run in runs}):
        for model, group in _by_model([run for run in runs if run.dataset == dataset]):
            epochs = [epoch for run in group for epoch in run.epochs]
            seconds = statistics.median(epoch["seconds"] for epoch in epochs)
            steps = statistics.median(epoch["steps"] for epoch in epochs)
            share = statistics.median(e["layer_seconds"] / e["seconds"] for e in epochs)
            rows.append(
                [
                    dataset,
                    model,
                    f"{group[0].parameters:,}",
                    f"{steps:.0f}",
                    f"{seconds:.1f}",
                    f"{1000 * seconds / max(steps, 1):.1f}",
                    f"{share:.0%}",
                    "; ".join(sorted({_machine(run) for run in group})),
                ]
            )
    return _markdown(header, rows)


def _paper(run: Run) -> dict[str, float]:
    """The paper's numbers. What follows a dash tells runs on the same data apart."""
    return PAPER.get((run.experiment, run.dataset.split("-")[0], run.model), {})


def _machine(run: Run) -> str:
    threads = run.machine["threads"]
    plural = "" if threads == 1 else "s"
    return f"{threads} thread{plural} of {run.machine['cores']} cores, {run.machine['processor']}"


def _by_model(runs: list[Run]) -> list[tuple[str, list[Run]]]:
    order = _place(MODELS[runs[0].experiment])
    models = sorted({run.model for run in runs}, key=order)
    return [(model, [run for run in runs if run.model == model]) for model in models]


def _place(known: Iterable[str]) -> Callable[[str], tuple[int, str]]:
    places = {name: i for i, name in enumerate(known)}
    return lambda name: (places.get(name, len(places)), name)


def _keys(records: Iterable[dict[str, float]]) -> list[str]:
    """The keys of all records, in the order in which they first appear."""
    return list(dict.fromkeys(key for record in records for key in record))


def _mean_and_spread(values: Iterable[float | None]) -> str:
    """Mean ± standard deviation over the seeds."""
    there = [value for value in values if value is not None]
    if not there:
        return "–"
    mean = f"{statistics.fmean(there):.2f}"
    return f"{mean} ± {statistics.stdev(there):.2f}" if len(there) > 1 else mean


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    lines = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in [header, rule, *rows]
    ]
    return "\n".join(lines)


# ---- figures -------------------------------------------------------------------------------------


def draw(runs: list[Run], folder: Path) -> list[Path]:
    """The curves of every data set, and what else an experiment shows. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for dataset in sorted({run.dataset for run in runs}):
        mine = [run for run in runs if run.dataset == dataset and run.epochs[0]["valid"]]
        if mine:
            paths.append(_draw_curves(mine, folder / f"{dataset}-curves.png"))
    paths += _draw_attention(runs, folder)
    return paths


def _draw_curves(runs: list[Run], path: Path) -> Path:
    """Validation over epochs: a thin line for each seed, a thick one for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    experiment, dataset = runs[0].experiment, runs[0].dataset
    metric = next(name for name in NAMES if name in runs[0].epochs[0]["valid"])
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for colour, (model, group) in enumerate(_by_model(runs)):
        curves = [[epoch["valid"][metric] for epoch in run.epochs] for run in group]
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=f"C{colour}", alpha=0.3, linewidth=1)
        # The mean is drawn as far as all seeds go.
        mean = [statistics.fmean(values) for values in zip(*curves, strict=False)]
        axes.plot(range(1, len(mean) + 1), mean, color=f"C{colour}", linewidth=2, label=model)
        paper = _paper(group[0]).get(metric)
        if paper is not None and experiment != "nli":
            axes.axhline(paper, color=f"C{colour}", linestyle=":", linewidth=1)
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"validation {NAMES[metric]} (%)")
    axes.grid(alpha=0.3)
    dotted = "; dotted: the paper, on test" if experiment != "nli" else ""
    axes.set_title(f"{dataset}: mean over seeds{dotted}", fontsize=10)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _draw_attention(runs: list[Run], folder: Path) -> list[Path]:
    """Softmax beside LP-sequential, of the first seed, for each data set that has both."""
    from experiments.nli.figures import draw_attention

    def exhibits(dataset: str, model: str) -> dict[str, Any] | None:
        for run in runs:
            if run.experiment == "nli" and (run.dataset, run.model) == (dataset, model):
                return run.result["exhibits"] if run.result else None
        return None

    paths = []
    for dataset in sorted({run.dataset for run in runs if run.experiment == "nli"}):
        softmax, sequential = exhibits(dataset, "softmax"), exhibits(dataset, "lp-sequential")
        if softmax and sequential:
            path = folder / f"{dataset}-attention.png"
            draw_attention(softmax, sequential, path, pair=SHOWN.get(dataset, 0))
            paths.append(path)
    return paths


if __name__ == "__main__":
    main()
