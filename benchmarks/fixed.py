"""Times of what a call costs beside the solving: building a graph, compiling it, torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

import factormax as fm
from benchmarks.exact import matching_qp
from benchmarks.speed import Section, build_matching, require
from benchmarks.timing import in_turns, interleaved, medians, ratios, table
from factormax import _form, _model
from factormax._core import Model
from factormax._fronts.numpy import start


def fixed(quick: bool) -> Section:
    """What a call costs beside the solving: one small matching through torch, against a softmax."""
    torch.manual_seed(0)
    scores = torch.randn(5, 5, requires_grad=True)
    grad = torch.randn(5, 5)
    exact = matching_qp(scores.detach().double().numpy())
    fg, u = build_matching(scores)
    fg.solve()
    error = float(np.abs(u.value.detach().numpy() - exact).max())
    require(error <= 1e-5, f"the matching is off by {error}")

    def matching() -> None:
        fg, u = build_matching(scores)
        fg.solve()
        u.value.backward(grad)

    def one_by_one() -> None:
        fg = fm.FactorGraph()
        u = fg.variable((25, 25))
        for j in range(25):
            fg.add(fm.Budget(u[:, j], 5))

    contestants: dict[str, Callable[[], object]] = {
        "softmax, forward + backward": lambda: torch.softmax(scores, 1).backward(grad),
        "matching, build + forward + backward": matching,
        "the same graph again, NumPy": build_matching(scores.detach().numpy())[0].solve,
        "25 budgets, one by one": one_by_one,
    }
    turns = 100 if quick else 500
    threads = torch.get_num_threads(), fm.get_num_threads()
    torch.set_num_threads(1)
    fm.set_num_threads(1)
    measured = in_turns(contestants, turns, in_a_row=dict.fromkeys(contestants, 5))
    torch.set_num_threads(threads[0])
    fm.set_num_threads(threads[1])
    times = medians(measured)
    times_softmax = ratios(measured, "softmax, forward + backward")
    text = table(
        "Fixed cost, 5x5, one thread (µs)",
        ["", "factormax", "times a softmax"],
        [[name, 1e6 * seconds, times_softmax[name]] for name, seconds in times.items()],
    )
    us = {k: 1e6 * v for k, v in times.items()}
    return text, {"us": us, "times_softmax": times_softmax, "error": error}


def building(quick: bool) -> Section:
    """What building and compiling a graph costs, beside solving it."""
    torch.manual_seed(0)
    scores = torch.randn(64, 20, 20, dtype=torch.float64)

    def build() -> Model:
        fg, _ = build_matching(scores)
        return fg._form().model

    def build_and_lower() -> None:  # as a solve does at first
        fg, _ = build_matching(scores.numpy())
        _ = start(fg).inputs.core

    fg, _ = build_matching(scores)
    turns = 3 if quick else 10

    def forget() -> None:
        _form._remembered.clear()
        _model._remembered.clear()

    contestants: dict[str, Callable[[], object]] = {
        "build, compile": build,
        "with the rows": build_and_lower,
        "build again": build,
        "solve": fg.solve,
    }
    first = dict.fromkeys(("build, compile", "with the rows"), forget)
    times = interleaved(contestants, turns, before=first, in_a_row=dict.fromkeys(contestants, 10))
    us = {k: 1e6 * v for k, v in times.items()}
    share, rows, again = (us[k] / us["solve"] for k in us if k != "solve")
    text = table("Building, batch of 64 LP-matchings 20x20 (µs)", list(us), [list(us.values())])
    text += f"share of the solve: {share:.1%} the first time ({rows:.1%} with the rows), "
    text += f"{again:.1%} after\n"
    return text, {"us": us, "share": share, "share_with_rows": rows, "share_again": again}


SECTIONS: dict[str, Callable[[bool], Section]] = {"building": building, "fixed": fixed}
