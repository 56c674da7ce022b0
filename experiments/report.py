"""Tables and figures of the runs, beside the paper's numbers.

Prints the tables and draws the figures. With --page, puts the tables into a page of Markdown,
between the comments `<!-- report: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
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
    add("--results", type=Path, default=Path("experiments/output"), help="the folder of the runs")
    add("--page", type=Path, default=None, help="a page to fill the tables into")
    add("--figures", type=Path, default=None, help="where to draw; else beside the results")
    args = parser.parse_args(argv)
    if args.page is not None and not args.page.exists():
        raise SystemExit(f"There is no page {args.page} to fill in.")

    runs = read_runs(args.results)
    if not runs:
        raise SystemExit(
            f"No finished run below {args.results}. Make some with, for example, "
            f"python -m experiments.listops --output {args.results}"
        )
    texts = sections(runs)
    for name, text in texts.items():
        print(f"{name}\n\n{text}\n")
    for path in draw(runs, args.figures or args.results / "figures"):
        print(f"Drawn: {path}")
    if args.page is not None:
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
    for model, group in _rows(runs):
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
    header = ["data", "model", "parameters", "steps per epoch", "s per epoch", "ms per step"]
    header += ["in the structured layer", "machine"]
    rows = []
    for dataset in sorted({run.dataset for run in runs}):
        for model, group in _rows([run for run in runs if run.dataset == dataset]):
            epochs = [epoch for run in group for epoch in run.epochs]
            if not epochs:
                continue
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
    """The paper's numbers, unless the data are made up or only a part. What follows a dash tells
    runs on the same data apart.
    """
    data, _, rest = run.dataset.partition("-")
    if rest == "generated" or run.settings.get("limit") is not None:
        return {}
    return PAPER.get((run.experiment, data, run.model), {})


def _machine(run: Run) -> str:
    threads = run.machine["threads"]
    plural = "" if threads == 1 else "s"
    return f"{threads} thread{plural} of {run.machine['cores']} cores, {run.machine['processor']}"


def _rows(runs: list[Run]) -> list[tuple[str, list[Run]]]:
    """Runs that differ in nothing but their seed, and the name of their model.

    Where one model has several such rows, the name tells in which settings they differ.

    Raises:
        SystemExit: if a row has a seed twice.
    """
    rows: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        rows.setdefault((run.model, json.dumps(_settings(run), sort_keys=True)), []).append(run)
    result = []
    for (model, _), group in rows.items():
        seeds = [run.seed for run in group]
        if len(set(seeds)) < len(seeds):
            raise SystemExit(
                f"{model} on {group[0].dataset} has a seed twice among its files: keep runs that "
                f"do not belong together in folders of their own."
            )
        others = [_settings(other[0]) for key, other in rows.items() if key[0] == model]
        own = _settings(group[0])
        differing = [k for k in own if any(own[k] != other.get(k) for other in others)]
        told = ", ".join(f"{k.replace('_', ' ')} {own[k]}" for k in differing)
        result.append((f"{model} ({told})" if told else model, group))
    order = _place(MODELS[runs[0].experiment])
    return sorted(result, key=lambda row: (order(row[1][0].model), row[0]))


def _settings(run: Run) -> dict[str, Any]:
    """Without those that a seed may choose for itself."""
    return {k: v for k, v in run.settings.items() if k not in ("epochs", "patience", "threshold")}


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
        mine = [r for r in runs if r.dataset == dataset and r.epochs and r.epochs[0]["valid"]]
        if mine:
            paths.append(_draw_curves(mine, folder / f"{dataset}-curves.png"))
    paths += _draw_attention(runs, folder)
    return paths


def _draw_curves(runs: list[Run], path: Path) -> Path:
    """Validation over epochs: a thin line for each seed, a thick one for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    experiment, dataset = runs[0].experiment, runs[0].dataset
    metric = next(name for name in NAMES if name in runs[0].epochs[0]["valid"])
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    dotted = ""
    longest = 1
    for place, (model, group) in enumerate(_rows(runs)):
        known = MODELS[experiment]
        colour = known.index(model) if model in known else len(known) + place
        curves = [[epoch["valid"][metric] for epoch in run.epochs] for run in group]
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=f"C{colour}", alpha=0.3, linewidth=1)
        longest = max(longest, *map(len, curves))
        # The mean is drawn as far as all seeds go.
        mean = [statistics.fmean(values) for values in zip(*curves, strict=False)]
        axes.plot(
            range(1, len(mean) + 1),
            mean,
            color=f"C{colour}",
            linewidth=2,
            label=model,
            marker="o",
            markersize=3,
        )
        paper = _paper(group[0]).get(metric)
        if paper is not None and experiment != "nli":
            axes.axhline(paper, color=f"C{colour}", linestyle=":", linewidth=1)
            dotted = "; dotted: the paper, on test"
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"validation {NAMES[metric]} (%)")
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0.5, longest + 0.5)
    axes.set_title(f"{dataset}: mean while all seeds run{dotted}", fontsize=10)
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
