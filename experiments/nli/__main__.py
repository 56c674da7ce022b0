"""Trains NLI models with decomposable attention: softmax, matching, LP-matching, LP-sequential.

The defaults are the paper's settings, as far as it gives them. It trains on all of SNLI and
MultiNLI with GloVe vectors of 300 dimensions; put the public files in the data folder, as
snli_1.0/ and multinli_1.0/, and name the vectors with --vectors, to do the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from experiments import command
from experiments.data_folder import require
from experiments.nli.data import DATASETS, Corpus
from experiments.nli.model import ATTENTIONS
from experiments.nli.task import NLITask

__all__ = ["main"]

VECTORS = Path("vectors", "glove6B_100d_subset.npz")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = command.parser(
        __doc__, tuple(ATTENTIONS), epochs=40, batch_size=128, learning_rate=0.001, patience=5
    )
    add = parser.add_argument
    add("--dataset", choices=DATASETS, default="snli", help="toy is made up, and needs no files")
    add("--vectors", metavar="FILE", help="glove.*.txt or .npz; if not given, in the data folder")
    add("--longest", type=command.positive(int), default=60, help="words of a sentence to keep")
    add("--dropout", type=command.fraction(0.99), default=0.33, help="in comparing and aggregating")
    add(
        "--temperature",
        type=command.positive(float),
        default=1.0,
        help="what attention scores are divided by",
    )
    add("--tol", type=command.positive(float), default=1e-6, help="tolerance of the solver")
    args = parser.parse_args(argv)
    command.main(
        args,
        _make_task,
        experiment="nli",
        variant=lambda args, model: f"{args.dataset}-{model}",
        dataset=args.dataset,
    )


def _make_task(args: argparse.Namespace, model: str) -> NLITask:
    folder = Path() if args.dataset == "toy" else require(args.data)  # made up, not read
    vectors = Path(args.vectors) if args.vectors else folder / VECTORS
    corpus = _corpus(folder, args.dataset, vectors, args.longest, args.limit)
    return NLITask(
        corpus,
        model,
        batch_size=args.batch_size,
        dropout=args.dropout,
        temperature=args.temperature,
        tol=args.tol,
    )


@cache
def _corpus(data: Path, dataset: str, vectors: Path, longest: int, limit: int | None) -> Corpus:
    """Read once for all runs."""
    return Corpus.load(data, dataset, vectors, longest=longest, limit=limit)


if __name__ == "__main__":
    main()
