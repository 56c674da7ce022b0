"""Timing on noisy machines: contestants take turns, medians and their ratios are reported."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable


def interleaved(
    contestants: dict[str, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    before: dict[str, Callable[[], object]] | None = None,
    in_a_row: dict[str, int] | None = None,
) -> dict[str, float]:
    """The median seconds of each contestant, all measured in turns; see `in_turns`."""
    return medians(in_turns(contestants, repeats, warmup, before, in_a_row))


def medians(times: dict[str, list[list[float]]]) -> dict[str, float]:
    """The median seconds of each contestant, from what `in_turns` measured."""
    return {name: statistics.median(itertools.chain(*own)) for name, own in times.items()}


def ratios(times: dict[str, list[list[float]]], base: str) -> dict[str, float]:
    """How many times as long as `base` each contestant takes, from what `in_turns` measured.

    Neighbours in time are compared, turn by turn, and the median of that is taken: other work on
    the machine, which comes and goes, hits both alike.
    """
    medians = {name: [statistics.median(turn) for turn in own] for name, own in times.items()}
    return {
        name: statistics.median([a / b for a, b in zip(own, medians[base], strict=True)])
        for name, own in medians.items()
    }


def in_turns(
    contestants: dict[str, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    before: dict[str, Callable[[], object]] | None = None,
    in_a_row: dict[str, int] | None = None,
) -> dict[str, list[list[float]]]:
    """The seconds of each call of each contestant, a list per turn, all measured in turns.

    Args:
        contestants: by name.
        repeats: turns.
        warmup: calls of each, before the first turn.
        before: what comes before each call of some, untimed.
        in_a_row: calls back to back in each turn, 1 by default. A short call right after a long one
            of another contestant would find its caches cold, and threads of theirs still spinning.
    """
    for run in contestants.values():
        for _ in range(warmup):
            run()
    times: dict[str, list[list[float]]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            times[name].append([])
            for _ in range((in_a_row or {}).get(name, 1)):
                if before and name in before:
                    before[name]()
                start = time.perf_counter()
                run()
                times[name][-1].append(time.perf_counter() - start)
    return times


def table(title: str, header: list[str], rows: list[list[object]]) -> str:
    """A plain table, right-aligned but for the first column."""
    cells = [[f"{c:.3g}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    widths = [max(len(r[i]) for r in [header, *cells]) for i in range(len(header))]
    lines = [title, "-" * len(title)]
    for row in [header, *cells]:
        first, *rest = (
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines) + "\n"
