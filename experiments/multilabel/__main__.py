"""Multilabel classification: three losses, by example F1 on the test set.

bibtex by default; other data sets of Mulan are read from --data as well (--dataset tmc2007-500), or
downloaded from OpenML with scikit-learn (--source openml). "synthetic" needs no data.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from experiments import command
from experiments.log import RunFile
from experiments.multilabel.data import load
from experiments.multilabel.model import BEST_INIT, INITS, MODELS
from experiments.multilabel.task import Multilabel

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = command.parser(
        __doc__, MODELS, epochs=20, batch_size=32, learning_rate=0.001, patience=5
    )
    add = parser.add_argument
    add("--dataset", default="bibtex", help="its name in the data folder; or synthetic")
    add("--source", choices=("auto", "npz", "arff", "openml"), default="auto", help="what to read")
    add("--hidden", type=command.positive(int), default=300, help="the size of both hidden layers")
    add("--init", choices=("auto", *INITS), default="auto", help="auto: what is best for the model")
    add(
        "--validation",
        type=command.fraction(0.99),
        default=0.1,
        help="held out to choose epoch and threshold",
    )
    add(
        "--threshold",
        type=command.fraction(0.99),
        default=None,
        help="a fixed one; ½ if nothing is held out",
    )
    add("--refit", action="store_true", help="then train on all of it, as many epochs, and test")
    add("--tol", type=command.positive(float), default=1e-6, help="tolerance of the solver")
    add("--max-iter", type=command.positive(int), default=1000, help="passes of the solver")
    args = parser.parse_args(argv)
    if args.refit and args.validation == 0:
        parser.error("--refit chooses the epochs on what --validation holds out, which is 0.")
    refit, args.refit = args.refit, False  # the first part of a refit is a run like any other
    _train(args)
    if refit:
        for model in args.models or MODELS:
            for seed in args.seeds:
                _train(_settings_for_refit(args, model, seed))


def _train(args: argparse.Namespace) -> None:
    data = load(args.data, args.dataset, args.source)

    def make_task(args: argparse.Namespace, model: str) -> Multilabel:
        return Multilabel(
            data,
            model,
            batch_size=args.batch_size,
            validation=args.validation,
            threshold=args.threshold,
            limit=args.limit,
            hidden=args.hidden,
            init=BEST_INIT[model] if args.init == "auto" else args.init,
            tol=args.tol,
            max_iter=args.max_iter,
        )

    command.main(args, make_task, experiment="multilabel", variant=_variant, dataset=_dataset(args))


def _settings_for_refit(args: argparse.Namespace, model: str, seed: int) -> argparse.Namespace:
    """The settings of a run on all training examples, as long as the best of a finished run."""
    path = args.output / "multilabel" / f"{_variant(args, model)}-seed{seed}.jsonl"
    run = RunFile(path).read()
    if run is None or run.result is None:
        raise SystemExit(f"{path} has no result to choose the epochs by.")
    chosen = {"epochs": run.result["epoch"], "threshold": run.result["observed"]["threshold"]}
    own = {"models": [model], "seeds": [seed], "validation": 0.0}
    return argparse.Namespace(**{**vars(args), **own, **chosen, "patience": None})


def _variant(args: argparse.Namespace, model: str) -> str:
    return f"{_dataset(args)}-{model}"


def _dataset(args: argparse.Namespace) -> str:
    """Runs on the whole training set have a table of their own."""
    return args.dataset if args.validation > 0 else f"{args.dataset}-refit"


if __name__ == "__main__":
    main()
