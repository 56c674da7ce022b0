"""The command line that the experiments share: a run for every model and every seed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import factormax as fm
from experiments.log import RunFile, machine
from experiments.task import Task
from experiments.training import Schedule, train

__all__ = ["main", "parser"]

#: Flags that do not change what is computed, so a run may be taken up with others.
_NOT_SETTINGS = {"models", "seeds", "data", "output", "threads", "fresh", "quiet"}
#: A run may be taken up with more of these.
_MAY_GROW = {"epochs", "patience"}


def parser(
    description: str | None,
    models: Sequence[str],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    decay: float = 1.0,
    patience: int | None = None,
    weight_decay: float = 0.0,
) -> argparse.ArgumentParser:
    """A parser with the flags that all experiments have, and their defaults for this one."""
    spec = sys.modules["__main__"].__spec__
    name = "" if spec is None else spec.name.removesuffix(".__main__")
    result = argparse.ArgumentParser(
        prog=f"python -m {name}" if name.startswith("experiments") else None,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    data = os.environ.get("FACTORMAX_DATA", os.path.join("..", "shared", "data"))
    add = result.add_argument
    add("models", nargs="*", metavar="MODEL", help=f"of {', '.join(models)}; all if none is given")
    add("--seeds", type=int, nargs="+", default=[0], metavar="SEED", help="a run for each")
    add("--data", type=Path, default=Path(data), help="the data folder")
    add("--output", type=Path, default=Path("experiments/results"), help="for the result files")
    add("--epochs", type=_positive(int), default=epochs, help="at most so many")
    add("--batch-size", type=_positive(int), default=batch_size, help="examples in a batch")
    add("--learning-rate", type=_positive(float), default=learning_rate, help="of Adam")
    add("--decay", type=_positive(float), default=decay, help="of the rate, if no better epoch")
    add("--patience", type=_positive(int), default=patience, help="epochs without a better one")
    add("--weight-decay", type=float, default=weight_decay, help="of Adam")
    add("--clip", type=_positive(float), default=None, help="bound on the gradient's norm")
    add("--limit", type=_positive(int), default=None, help="use so many training examples")
    add("--threads", type=_positive(int), default=None, help="for torch and the layer")
    add("--fresh", action="store_true", help="run again what is finished or begun")
    add("--quiet", action="store_true", help="show no progress")
    result.set_defaults(known_models=tuple(models))
    return result


def main(
    args: argparse.Namespace,
    make_task: Callable[[argparse.Namespace, str], Task],
    *,
    experiment: str,
    variant: Callable[[argparse.Namespace, str], str],
    dataset: str = "",
) -> None:
    """Trains every model with every seed. What is finished is left, what was begun is taken up.

    Args:
        args: what the parser gave.
        make_task: the model and its data; called after the seed is set.
        experiment: the folder of the results.
        variant: the name of a model with its settings: the name of the file.
        dataset: named in the results.
    """
    known = args.known_models
    for model in args.models:
        if model not in known:
            raise SystemExit(f"There is no model {model!r}: choose from {', '.join(known)}.")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
        fm.set_num_threads(args.threads)
    for model in args.models or known:
        for seed in args.seeds:
            _run(args, make_task, experiment, variant(args, model), dataset, model, seed)


def _run(
    args: argparse.Namespace,
    make_task: Callable[[argparse.Namespace, str], Task],
    experiment: str,
    variant: str,
    dataset: str,
    model: str,
    seed: int,
) -> None:
    name = f"{variant}-seed{seed}"
    file = RunFile(args.output / experiment / f"{name}.jsonl")
    checkpoint = args.output / "checkpoints" / experiment / f"{name}.pt"
    settings = {
        key: value
        for key, value in sorted(vars(args).items())
        if key not in _NOT_SETTINGS and key != "known_models"
    }
    if args.fresh:
        checkpoint.unlink(missing_ok=True)
    elif (before := file.read()) is not None:
        _check_same(name, before.settings, settings)
        if before.result is not None and before.settings == settings:
            _say(args, f"{name}: finished before, {_summary(before.result)}. (--fresh: again.)")
            return
    torch.manual_seed(seed)
    task = make_task(args, model)
    header = {
        "experiment": experiment,
        "dataset": dataset,
        "model": model,
        "variant": variant,
        "seed": seed,
        "parameters": sum(p.numel() for p in task.model.parameters() if p.requires_grad),
        "settings": settings,
        "machine": machine(),
    }
    schedule = Schedule(
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        decay=args.decay,
        patience=args.patience,
        clip=args.clip,
        weight_decay=args.weight_decay,
    )
    result = train(
        task,
        schedule,
        seed=seed,
        header=header,
        file=file,
        checkpoint=checkpoint,
        quiet=args.quiet,
    )
    _say(args, f"{name}: {_summary(result)}. Written to {file.path}.")


def _check_same(name: str, before: dict[str, object], now: dict[str, object]) -> None:
    different = [
        f"--{key.replace('_', '-')} {before.get(key)} (now {now.get(key)})"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in _MAY_GROW
    ]
    if different:
        raise SystemExit(
            f"{name} was run before with {', '.join(different)}. Give another --output, or --fresh "
            f"to replace it."
        )


def _summary(result: dict[str, dict[str, float]]) -> str:
    metrics = ", ".join(f"{key} {value:.2f}" for key, value in result["test"].items())
    return f"test {metrics or 'not made'} (epoch {result['epoch']})"


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.quiet:
        print(text, flush=True)


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        return value

    convert.__name__ = getattr(kind, "__name__", "number")
    return convert
