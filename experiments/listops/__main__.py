"""ListOps valency tagging through a latent tree: accuracy and F1 on the published test set.

The tree is fixed (left-to-right), gold, latent (tree), or latent with at most five dependents a
token (tree+budget). Without the data, --generate makes expressions from the same grammar.

Latent trees are solved exactly, or with --solver paper as far as the paper goes: 10 oracle calls
for tree, and for tree+budget 10 steps of ADMM with 10 calls each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from experiments import command
from experiments.data_folder import require
from experiments.listops.data import MAX_LENGTH, load, make_splits
from experiments.listops.model import MODELS
from experiments.listops.task import ListOps

__all__ = ["main"]

#: Options of `FactorGraph.solve` without and with budgets. The paper's are in its Appendix.
SOLVERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "exact": ({}, {}),
    "paper": (
        {"max_inner_iter": 10},
        {"method": "admm", "step_size": 0.5, "max_iter": 10, "max_inner_iter": 10},
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = command.parser(
        __doc__, MODELS, epochs=30, batch_size=64, learning_rate=1e-4, decay=0.9
    )
    add = parser.add_argument
    count, number = command.positive(int), command.positive(float)
    add("--generate", type=count, metavar="COUNT", help="make up this many expressions")
    add("--max-length", type=count, default=MAX_LENGTH, help="leave out what has more tokens")
    add("--hidden", type=count, default=50, help="the size of all layers, an even number")
    add("--budget", type=count, default=5, help="dependents a token may have, with tree+budget")
    add("--temperature", type=number, default=1.0, help="what the arc scores are divided by")
    add("--solver", choices=tuple(SOLVERS), default="exact", help="how far the trees are solved")
    args = parser.parse_args(argv)
    if args.max_length < 10:
        parser.error("--max-length must be at least 10: there are few shorter expressions.")
    if args.hidden % 2:
        parser.error("--hidden must be even: half of it for each direction of the LSTM.")
    if args.generate is None:
        splits = load(require(args.data), args.max_length)
    else:
        held_out = max(args.generate // 10, 1)
        splits = make_splits((args.generate, held_out, held_out), args.max_length)

    def make_task(args: argparse.Namespace, model: str) -> ListOps:
        return ListOps(
            splits,
            model,
            batch_size=args.batch_size,
            limit=args.limit,
            hidden=args.hidden,
            budget=args.budget,
            temperature=args.temperature,
            **SOLVERS[args.solver][model == "tree+budget"],
            on_failure="ignore",
        )

    command.main(args, make_task, experiment="listops", variant=_variant, dataset=_dataset(args))


def _variant(args: argparse.Namespace, model: str) -> str:
    return f"{_dataset(args)}-{model}"


def _dataset(args: argparse.Namespace) -> str:
    """Runs on made-up data, or with another solver, have a table of their own."""
    name = "listops" if args.generate is None else "listops-generated"
    return name if args.solver == "exact" else f"{name}-{args.solver}"


if __name__ == "__main__":
    main()
