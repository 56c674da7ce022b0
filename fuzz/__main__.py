"""Draws graphs, checks them, and makes what fails small: `python -m fuzz --minutes 20 --seed 0`."""

from __future__ import annotations

import argparse
import faulthandler
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fuzz import engines
from fuzz.case import Case, snippet
from fuzz.checks import CHECKS, QUERIES, Failure, Tally, check
from fuzz.generate import SIZES, generate
from fuzz.shrink import shrink

__all__ = ["main"]

#: A case that takes longer has failed: seconds, for each size.
PATIENCE = {"small": 60, "mid": 180, "large": 600}


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if anything failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    unknown = sorted(set((options.only or "").split(",")) - {"", *CHECKS})
    if unknown:
        parser.error(f"--only: there is no check {unknown[0]!r}; there are {', '.join(CHECKS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    engines.use(options.engine)
    run = _Run(options)
    if options.case is not None:
        run.one(options.case)
    else:
        run.many(options.minutes * 60)
    print(run.summary())
    return int(bool(run.found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to go on")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the run; a case is its seed and number"
    )
    parser.add_argument("--size", choices=list(SIZES), default="small", help="size of the graphs")
    parser.add_argument(
        "--dtype", choices=["any", "float32", "float64"], default="any", help="dtype of the scores"
    )
    parser.add_argument("--engine", choices=engines.NAMES, default="cpu", help="which to fuzz")
    parser.add_argument("--case", type=int, help="run this case only")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--no-masks", action="store_true", help="no masks and no scores of -inf")
    parser.add_argument("--no-shrink", action="store_true", help="leave failures as large as found")
    parser.add_argument("--only", help=f"these checks only, for every case: {', '.join(CHECKS)}")
    parser.add_argument("--output", type=Path, default=Path("build/fuzz"), help="for failures")
    return parser


class _TooSlow(Exception):
    pass


@contextmanager
def _patience(seconds: int) -> Iterator[None]:
    """Raises after so long; the library lets signals through."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def late(_number: int, _frame: FrameType | None) -> None:
        raise _TooSlow(f"took more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class _Run:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tally = Tally()
        self.found: dict[str, list[int]] = {}
        self.cases = 0
        self.started = time.monotonic()

    def many(self, seconds: float) -> None:
        """Case after case, until the time is over."""
        shown, end = 0.0, self.started + seconds
        number = self.options.first
        while (now := time.monotonic()) < end:
            if now - shown > (0.5 if sys.stdout.isatty() else 30):
                shown = now
                self._show(end - now)
            self.one(number)
            number += 1
        self._show(0, last=True)

    def one(self, number: int) -> None:
        """Generates a case and checks it."""
        o = self.options
        # A crash of the interpreter leaves this behind.
        (o.output / "current").write_text(f"{self._again(number)}\n")
        case = generate(o.seed, number, o.size, o.dtype, masks=not o.no_masks)
        self.cases += 1
        for term in case.terms:
            self.tally.kinds[term.kind] += 1
        try:
            with _patience(PATIENCE[o.size]):
                failures = check(case, number, o.size, o.only, self.tally)
        except _TooSlow as slow:
            self.tally.failed["time: patience"] += 1
            failures = [Failure("time", "patience", str(slow))]
        told = set()
        for failure in failures:
            if failure.label not in told:
                told.add(failure.label)
                self._tell(number, case, failure)

    def _tell(self, number: int, case: Case, failure: Failure) -> None:
        o = self.options
        earlier = self.found.setdefault(failure.label, [])
        earlier.append(number)
        print(f"\nFAILED {failure.label}: {failure.message}\n  {self._again(number)}")
        if len(earlier) > 3:
            return  # three of a kind are enough to shrink
        message = failure.message
        if not o.no_shrink and failure.check != "time":

            def fails(smaller: Case) -> bool:
                nonlocal message
                with _patience(20):
                    again = check(smaller, number, o.size, failure.check)
                for one in again:
                    if one.label == failure.label:
                        message = one.message
                        return True
                return False

            case = shrink(case, fails, seconds=60)
            fails(case)
        comment = f"{failure.label}: {message}\n{self._again(number)}"
        text = snippet(case, QUERIES.get(failure.check, "fg.solve()"), comment)
        name = "".join(c if c.isalnum() else "-" for c in failure.label)
        path = o.output / f"{name}-{o.size}-{o.seed}-{number}.py"
        path.write_text(text)
        shown = text if len(text) < 4000 else f"{text[:4000]}\n… (all of it is in {path})"
        print(f"{shown}  saved as {path}", flush=True)

    def _again(self, number: int) -> str:
        o = self.options
        flags = f" --dtype {o.dtype}" if o.dtype != "any" else ""
        flags += " --no-masks" if o.no_masks else ""
        flags += f" --engine {o.engine}" if o.engine != "cpu" else ""
        flags += f" --only {o.only}" if o.only else ""
        return f"python -m fuzz --seed {o.seed} --size {o.size}{flags} --case {number}"

    def _show(self, left: float, last: bool = False) -> None:
        rate = self.cases / max(1e-9, time.monotonic() - self.started)
        failed = sum(len(numbers) for numbers in self.found.values())
        line = f"{self.cases} cases, {rate:.1f} per second, {left:.0f} s left, {failed} failures"
        ending = "\n" if last or not sys.stdout.isatty() else ""
        print(f"\r{line:<70}" if sys.stdout.isatty() else line, end=ending, flush=True)

    def summary(self) -> str:
        """Counts of every part of every check, and of every factor."""
        t = self.tally
        lines = ["", f"{'check':<32}{'passed':>9}{'failed':>9}{'unclear':>9}"]
        for label in sorted({*t.passed, *t.failed, *t.skipped}):
            counts = (t.passed[label], t.failed[label], t.skipped[label])
            lines.append(f"{label:<32}" + "".join(f"{c:>9}" for c in counts))
        lines += ["", f"{'factor':<32}{'calls':>9}"]
        lines += [f"{kind:<32}{count:>9}" for kind, count in t.kinds.most_common()]
        lines += ["", f"{self.cases} cases of seed {self.options.seed}."]
        for label, numbers in sorted(self.found.items()):
            lines.append(f"FAILED {label}: cases {numbers[:10]}")
        return "\n".join(lines if self.found else [*lines, "Nothing failed."])


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
