"""The command `factormax`: solves models in the UAI format.

Exit codes: 0 solved (converged, or proved optimal), 1 not converged or not proved within the limits
(the best found is printed), 2 bad input, 3 infeasible, 130 interrupted, 141 the reader of the
output has gone (as in `| head`).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import factormax
from factormax.errors import InfeasibleError
from factormax.io import UAIError, UAIModel, read_uai
from factormax.solution import Solution
from factormax.status import Status

__all__ = ["main"]

SOLVED, UNPROVED, BAD_INPUT, INFEASIBLE, INTERRUPTED, NOT_READ = 0, 1, 2, 3, 130, 141

QUERIES = {
    "exact": "exact decoding (branch and bound)",
    "map": "LP-MAP",
    "sparse": "LP-SparseMAP",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments (by default those of the process).

    Returns:
        The exit code.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        code = _solve(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `| head`; discard further output, also at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_READ
    except InfeasibleError as error:
        print(f"factormax: {error}", file=sys.stderr)
        return INFEASIBLE
    except (UAIError, OSError) as error:
        print(f"factormax: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("factormax: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="factormax", description="Structured inference in factor graphs."
    )
    parser.add_argument("--version", action="version", version=f"factormax {factormax.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    solve = commands.add_parser(
        "solve",
        help="find the best assignment of a model in the UAI format",
        description="Prints the best assignment of a model in the UAI format (.uai or .uai.gz), "
        "its value (the logarithm of the product of its potentials), an upper bound on all values, "
        "and the status.",
        epilog="Exit codes: 0 solved (converged, or proved optimal); 1 not converged or not proved "
        "within the limits; 2 bad input; 3 no assignment is possible; 130 interrupted.",
    )
    solve.add_argument("file", help="the model, MARKOV or BAYES")
    solve.add_argument("--evidence", metavar="FILE", help="observed states (.evid)")
    query = solve.add_mutually_exclusive_group()
    query.add_argument(
        "--exact",
        dest="query",
        action="store_const",
        const="exact",
        help="the best assignment, by branch and bound (the default)",
    )
    query.add_argument(
        "--map",
        dest="query",
        action="store_const",
        const="map",
        help="the linear relaxation; the assignment is rounded from it",
    )
    query.add_argument(
        "--sparse",
        dest="query",
        action="store_const",
        const="sparse",
        help="LP-SparseMAP: sparse marginals; the assignment is rounded from them",
    )
    solve.set_defaults(query="exact")
    solve.add_argument(
        "--time-limit", type=_positive, metavar="S", help="--exact: stop after this many seconds"
    )
    solve.add_argument(
        "--max-nodes", type=_count, metavar="N", help="--exact: stop after this many nodes"
    )
    solve.add_argument(
        "--max-iter", type=_count, metavar="N", help="--map, --sparse: stop after this many passes"
    )
    solve.add_argument(
        "--output",
        metavar="FILE",
        help="write the assignment in the UAI format (MPE); with --sparse, the marginals (MAR)",
    )
    solve.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show the elapsed time (default: on a terminal)",
    )
    return parser


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return number


def _count(text: str) -> int:
    whole = text.isascii() and text.isdecimal() and int(text[:99]) >= 1
    if not whole or len(text) > 9:
        most = " (and at most 999999999)" if whole else ""
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, got {text}{most}")
    return int(text)


def _solve(args: argparse.Namespace) -> int:
    exact = args.query == "exact"
    for option, fits in (("time_limit", exact), ("max_nodes", exact), ("max_iter", not exact)):
        if getattr(args, option) is not None and not fits:
            word = "--" + option.replace("_", "-")
            print(f"factormax: {word} can't be used with --{args.query}", file=sys.stderr)
            return BAD_INPUT
    show = sys.stderr.isatty() if args.progress is None else args.progress
    start = time.perf_counter()
    with _progress(f"reading {args.file}", show):
        model = read_uai(args.file, args.evidence)
    read = time.perf_counter()
    _print_sizes(model)
    _line("query", QUERIES[args.query])
    sys.stdout.flush()
    with _progress(f"{QUERIES[args.query]} of {args.file}", show):
        solution = _query(model, args)
    solved = time.perf_counter()
    found = not np.isnan(model.variable.value).any()
    code = _print_answer(model, solution, args.query, found)
    _line("time", f"{read - start:.3f} s reading, {solved - read:.3f} s solving")
    if found:
        _line("assignment", " ".join(map(str, model.assignment())))
        if args.output:
            Path(args.output).write_text(_uai_answer(model, args.query))
    return code


def _query(model: UAIModel, args: argparse.Namespace) -> Solution:
    options = {
        name: getattr(args, name)
        for name in ("time_limit", "max_nodes", "max_iter")
        if getattr(args, name) is not None
    }
    if args.query == "exact":
        return model.graph.decode(on_failure="ignore", **options)
    if args.query == "map":
        return model.graph.solve_map(on_failure="ignore", **options)
    return model.graph.solve(on_failure="ignore", **options)


def _print_sizes(model: UAIModel) -> None:
    most = max(model.cardinalities, default=0)
    arity = max(map(len, model.scopes), default=0)
    _line("file", model.path)
    _line(
        "model",
        f"{model.num_variables} variables of at most {most} states, {len(model.tables)} tables of "
        f"at most {arity} variables, {len(model.evidence)} observed",
    )
    kinds: dict[str, int] = {}
    for factor in model.graph._factors:
        kinds[factor.kind] = kinds.get(factor.kind, 0) + factor._count
    factors = "".join(f", {count} {kind}" for kind, count in kinds.items())
    _line("graph", f"{model.variable.size} binary variables{factors}")


def _print_answer(model: UAIModel, solution: Solution, query: str, found: bool) -> int:
    status = solution.status
    proved = bool(solution.optimal) if query == "exact" else bool(solution.converged)
    if query == "exact" and proved:
        _line("status", "Optimal (proved).")
    elif query == "map" and proved:
        whole = "0/1, so optimal" if solution.integral else "fractional; the assignment is rounded"
        _line("status", f"{status.value[:-1]} ({whole}).")
    else:
        _line("status", status.value)
    if status is Status.INFEASIBLE:
        return INFEASIBLE
    value = model.score(model.assignment()) if found else -math.inf
    missing = "none: the rounded assignment is impossible" if found else "none found"
    _line("value", missing if value == -math.inf else _logs(value))
    if query != "exact":
        _line("relaxation", _logs(model.offset + float(solution.objective)))
    if query != "sparse":
        _line("bound", _logs(model.offset + float(solution.upper_bound)))
    if query == "exact":
        _line("nodes", str(int(solution.nodes)))
    else:
        _line("passes", str(int(solution.iterations)))
    return SOLVED if proved else UNPROVED


def _logs(value: float) -> str:
    return f"{value:.9g} (log), {value / math.log(10):.9g} (log10)"


def _line(word: str, text: str) -> None:
    print(f"{word:<12}{text}")


def _uai_answer(model: UAIModel, query: str) -> str:
    """The answer in the output format of the UAI competitions."""
    if query != "sparse":
        return "\n".join(
            ["MPE", " ".join(map(str, [model.num_variables, *model.assignment()])), ""]
        )
    numbers = [str(model.num_variables)]
    for marginal in model.marginals():
        numbers += [str(len(marginal)), *[f"{p:.9g}" for p in marginal]]
    return "\n".join(["MAR", " ".join(numbers), ""])


@contextmanager
def _progress(what: str, show: bool, every: float = 0.5) -> Iterator[None]:
    """Shows the elapsed time on stderr, from `every` seconds on."""
    if not show:
        yield
        return
    done = threading.Event()
    start = time.perf_counter()
    terminal = sys.stderr.isatty()

    def tick() -> None:
        shown = False
        while not done.wait(every if terminal else 20 * every if shown else every):
            text = f"{what}: {time.perf_counter() - start:.1f} s"
            print(f"\r{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr)
            sys.stderr.flush()
            shown = True
        if shown and terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # clear the line

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
