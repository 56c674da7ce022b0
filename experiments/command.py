"""The command line that the experiments share: a run for every model and every seed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import factormax as fm
from experiments.data_folder import data_folder
from experiments.log import RunFile, machine
from experiments.task import Task
from experiments.training import Schedule, train

__all__ = ["MAY_GROW", "fraction", "main", "parser", "positive"]

#: Flags that do not change what is computed, so a run may be taken up with others.
_NOT_SETTINGS = {
    *("models", "known_models", "seeds", "data", "output", "threads", "device"),
    *("fresh", "quiet"),
}
#: A run may be taken up with more of these, from its checkpoint.
MAY_GROW = {"epochs", "patience"}


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
    add = result.add_argument
    add("models", nargs="*", metavar="MODEL", help=f"any of {', '.join(models)}; all if not given")
    add("--seeds", type=_seed, nargs="+", default=[0], metavar="SEED", help="a run for each")
    add("--data", type=Path, default=data_folder(), help="the data folder, else $FACTORMAX_DATA")
    add("--output", type=Path, default=Path("experiments/output"), help="for the result files")
    add("--epochs", type=positive(int), default=epochs, help="the largest number of epochs")
    add("--batch-size", type=positive(int), default=batch_size, help="examples in a batch")
    add("--learning-rate", type=positive(float), default=learning_rate, help="the rate of Adam")
    add("--decay", type=fraction(1.0), default=decay, help="factor on the rate, if no better epoch")
    add(
        "--patience",
        type=positive(int),
        default=patience,
        help="stop after this many epochs without a better one",
    )
    add("--weight-decay", type=fraction(1.0), default=weight_decay, help="the penalty of Adam")
    add("--clip", type=positive(float), default=None, help="bound on the gradient's norm")
    add("--limit", type=positive(int), default=None, help="use only this many training examples")
    add("--threads", type=positive(int), default=None, help="for torch and the layer")
    add("--device", type=_device, default="cpu", help="where to train: cpu or cuda")
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
    runs = [
        _Planned(args, experiment, variant(args, model), dataset, model, seed)
        for model in args.models or known
        for seed in args.seeds
    ]
    for run in runs:  # before any of them takes its time
        run.check()
    try:
        for run in runs:
            run.carry_out(make_task)
    except KeyboardInterrupt:
        raise SystemExit("\nStopped. The same command goes on after the last full epoch.") from None


class _Planned:
    """One run of the command."""

    def __init__(
        self,
        args: argparse.Namespace,
        experiment: str,
        variant: str,
        dataset: str,
        model: str,
        seed: int,
    ) -> None:
        self.args = args
        self.name = f"{variant}-seed{seed}"
        self.file = RunFile(args.output / experiment / f"{self.name}.jsonl")
        self.checkpoint = args.output / "checkpoints" / experiment / f"{self.name}.pt"
        self.settings = {
            key: value for key, value in sorted(vars(args).items()) if key not in _NOT_SETTINGS
        }
        self.header: dict[str, Any] = {
            "experiment": experiment,
            "dataset": dataset,
            "model": model,
            "variant": variant,
            "seed": seed,
        }

    def check(self) -> None:
        """Stops if the file holds a run with other settings, which would be lost."""
        before = None if self.args.fresh else self.file.read()
        if before is None:
            return
        goes_on = self.checkpoint.exists() or before.result is None
        different = [
            f"--{key.replace('_', '-')} {before.settings.get(key)} (now {self.settings.get(key)})"
            for key in sorted(before.settings.keys() | self.settings.keys())
            if before.settings.get(key) != self.settings.get(key)
            and not (goes_on and key in MAY_GROW and self._grows(key, before.settings))
        ]
        if different:
            raise SystemExit(
                f"{self.name} was run before with {', '.join(different)}. Give another --output, "
                f"or --fresh to replace it."
            )

    def _grows(self, key: str, before: dict[str, Any]) -> bool:
        old, new = before.get(key), self.settings.get(key)
        return new is None or (old is not None and new >= old)

    def carry_out(self, make_task: Callable[[argparse.Namespace, str], Task]) -> None:
        """Trains, unless that was done."""
        args = self.args
        if args.fresh:
            self.checkpoint.unlink(missing_ok=True)
        elif (before := self.file.read()) is not None:
            if before.result is not None and before.settings == self.settings:
                self._say(f"finished before, {_summary(before.result)}. (--fresh: again.)")
                return
        torch.manual_seed(self.header["seed"])
        task = make_task(args, self.header["model"])
        task.to(args.device)
        header = {
            **self.header,
            "parameters": sum(p.numel() for p in task.model.parameters() if p.requires_grad),
            "settings": self.settings,
            "machine": machine(args.device),
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
            seed=self.header["seed"],
            header=header,
            file=self.file,
            checkpoint=self.checkpoint,
            may_differ=MAY_GROW,
            quiet=args.quiet,
        )
        self._say(f"{_summary(result)}. Written to {self.file.path}.")

    def _say(self, text: str) -> None:
        if not self.args.quiet:
            print(f"{self.name}: {text}", flush=True)


def _summary(result: dict[str, dict[str, float]]) -> str:
    metrics = ", ".join(f"{key} {value:.2f}" for key, value in result["test"].items())
    return f"test {metrics or 'not made'} (epoch {result['epoch']})"


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def _device(text: str) -> str:
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu or cuda, got {text}")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no CUDA device; cpu, the default, needs none")
    return text


def fraction(most: float) -> Callable[[str], float]:
    """A type for flags: numbers from 0 to so much."""

    def convert(text: str) -> float:
        value = float(text)
        if not 0 <= value <= most:
            raise argparse.ArgumentTypeError(f"must be between 0 and {most:g}, got {text}")
        return value

    return convert


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """A type for flags: numbers above 0."""

    def convert(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        return value

    convert.__name__ = getattr(kind, "__name__", "number")
    return convert
