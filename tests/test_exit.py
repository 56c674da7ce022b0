"""The interpreter may end while a thread solves: the process exits as if nothing had been going on.

Up to Python 3.13 a thread that asks a finalising interpreter for the GIL is ended on the spot, and
C++ answers that with an abort (exit code 134).
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

START = """
import threading, time
import numpy as np
import factormax as fm

class Half(fm.Factor):
    def map(self, eta_u, eta_v):
        on = np.zeros(len(eta_u))
        on[np.argsort(-eta_u)[: len(eta_u) // 2]] = 1
        return on, []

class HalfTogether(fm.Factor):
    def map_batch(self, eta_u, eta_v):
        on = np.zeros(eta_u.shape)
        for row, scores in zip(on, eta_u):
            row[np.argsort(-scores)[: len(scores) // 2]] = 1
        return on, [[]] * len(on)

def rows(fg, u):
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))

def tree(fg, u):
    fg.add(fm.DepTree(u))
    fg.add(fm.Budget(u[:, 0], 2))

def own(fg, u):
    fg.add(Half(u[0]))
    fg.add(fm.AtMostOne(u, axis=0))

def own_together(fg, u):
    fg.add(HalfTogether(u[0]))
    fg.add(fm.AtMostOne(u, axis=0))

def graph(add, batch=64, array=lambda a: a):
    fg = fm.FactorGraph(batch_dims=1)
    add(fg, fg.variable_from(array(np.random.default_rng(0).normal(size=(batch, 12, 12)))))
    return fg

started = threading.Event()

def in_background(work):
    def run():
        started.set()
        while True:
            work()
    threading.Thread(target=run, daemon=True).start()
    started.wait()
    time.sleep(0.3)
"""

CASES = {
    "rows": "in_background(lambda: graph(rows).solve())",
    "one large batch": "fg = graph(rows, 20_000)\nin_background(fg.solve)",
    "gradients": """
        def work():
            fg = graph(rows)
            fg.solve().vjp({fg._variables[0]: np.ones((64, 12, 12))})
        in_background(work)
    """,
    "trees": "in_background(lambda: graph(tree).solve(on_failure='ignore'))",
    "decoding": "in_background(lambda: graph(tree, 4).decode(on_failure='ignore'))",
    "an oracle in Python": "in_background(lambda: graph(own).solve())",
    "map_batch": "in_background(lambda: graph(own_together).solve())",
    "torch": """
        import torch
        fg = graph(rows, 20_000, torch.from_numpy)  # the solve outlasts the process
        in_background(fg.solve)
    """,
}


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("case", CASES)
def test_the_interpreter_ends_while_a_daemon_thread_solves(case: str) -> None:
    if case == "torch":
        pytest.importorskip("torch")
    for _ in range(3):
        done = run(START + textwrap.dedent(CASES[case]))
        assert (done.returncode, done.stderr) == (0, "")


def test_the_ending_thread_itself_still_solves() -> None:
    """What is registered first is called last, after the core has heard of the end."""
    first = "import atexit\natexit.register(lambda: say())\n"
    last = """
        def say():
            print(bool(graph(own).solve().converged.all()), flush=True)
        atexit.register(say)
    """
    done = run(first + START + textwrap.dedent(last))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]
