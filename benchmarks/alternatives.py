"""What a user would take instead: torch-struct, entmax, Sinkhorn, cvxpylayers, SciPy's assignment.

They answer other questions, most of them: torch-struct has the marginals of a softmax over
structures, Sinkhorn the entropic matching. So each answer is held against what defines it before a
time is printed. A solution of ours is optimal if no structure is better than it is at the scores
less the solution, and that best structure comes from somebody else's algorithm. Times are of a
forward and a backward pass through torch, graph building included, of float32.
"""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import factormax as fm
import factormax.nn
from benchmarks.exact import best_tree, matching_qp
from benchmarks.gpu_cases import sinkhorn
from benchmarks.speed import Section, bisected, cvxpy_matching, factormax_matching, require
from benchmarks.structured import certify_flow
from benchmarks.timing import in_turns, ratios, table

OUTPUT = Path(__file__).parent / "output"
#: Answers that are compared with one another, or with a certificate, instance by instance.
CHECKED = 4
#: Seconds that a contestant has in a turn, about.
TURN = 0.03


@dataclass
class Contest:
    """Two ways to do about the same.

    Attributes:
        name: what.
        rival: by whom.
        theirs: a call of the rival's.
        ours: a call of ours.
        check: raises if an answer is wrong.
    """

    name: str
    rival: str
    theirs: Callable[[], object]
    ours: Callable[[], object]
    check: Callable[[], None]


def step(value: Tensor, leaves: list[Tensor], weights: Tensor) -> Tensor:
    """A backward pass; the value is handed on."""
    torch.autograd.grad(value, leaves, weights)
    return value.detach()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def optimal(scores: np.ndarray, mu: np.ndarray, best: float, what: str) -> None:
    """½‖μ − μ*‖² is at most the gap to the best structure for η − μ, whose score is `best`."""
    gap = best - float(((scores - mu) * mu).sum())
    error = np.sqrt(2 * max(gap, 0.0))
    require(error <= 1e-2, f"{what} may be off by {error}")


# ---- Chains and trees ----------------------------------------------------------------------------


def chain(length: int, states: int, batch: int) -> Contest:
    """A linear chain with transitions of its own for each pair of steps."""
    import torch_struct

    torch.manual_seed(0)
    scores, transitions = normal(batch, length, states), normal(batch, length - 1, states, states)
    weights = torch.randn(batch, length, states)
    leaves = [scores, transitions]

    def theirs() -> Tensor:
        pairs = transitions + scores[:, 1:, None, :]
        first = scores[:, 0, :, None]
        pairs = torch.cat([pairs[:, :1] + first[:, None], pairs[:, 1:]], dim=1)
        # Its potentials are [to, from].
        found = torch_struct.LinearChainCRF(pairs.transpose(2, 3)).marginals
        value = torch.cat([found[:, :1].sum(dim=2), found.sum(dim=3)], dim=1)
        return step(value, leaves, weights)

    def ours() -> Tensor:
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Sequence(u, transitions))
        fg.solve()
        return step(u.value, leaves, weights)

    def check() -> None:
        sums = theirs().sum(dim=2)
        require(float((sums - 1).abs().max()) <= 1e-4, "torch-struct's chains: one state per step")
        found = ours().numpy()
        for i in range(CHECKED):
            fg = fm.FactorGraph()
            s, t = (x[i].detach().double().numpy() for x in leaves)
            u = fg.variable_from(s)
            sequence = fg.add(fm.Sequence(u, t))
            fg.solve(tol=1e-12)
            certify_flow(s, t, u.value, sequence.value)
            error = float(np.abs(found[i] - u.value).max())
            require(error <= 1e-4, f"chains are off by {error}")

    return Contest(f"chain {length}x{states}, batch {batch}", "torch-struct", theirs, ours, check)


def tree(words: int, batch: int, projective: bool) -> Contest:
    """Dependency trees with any number of roots."""
    import torch_struct

    torch.manual_seed(0)
    scores, weights = normal(batch, words, words), torch.randn(batch, words, words)

    def crf(arcs: Tensor) -> Any:  # its arcs are [head, word]
        if projective:
            return torch_struct.DependencyCRF(arcs.transpose(1, 2))
        return torch_struct.NonProjectiveDependencyCRF(arcs.transpose(1, 2), multiroot=True)

    def theirs() -> Tensor:
        return step(crf(scores).marginals.transpose(1, 2), [scores], weights)

    def ours() -> Tensor:
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.DepTree(u, projective=projective))
        fg.solve()
        return step(u.value, [scores], weights)

    def check() -> None:
        sums = theirs().sum(dim=2)
        require(float((sums - 1).abs().max()) <= 1e-2, "torch-struct's trees: one head per word")
        eta, mu = scores.detach()[:CHECKED].double(), ours()[:CHECKED].double()
        slack = eta - mu
        if projective:
            structure = crf(slack.requires_grad_()).argmax.transpose(1, 2)
            best = (structure * slack).sum(dim=(1, 2)).tolist()
        else:
            best = [best_tree(s) for s in slack.numpy()]
        for i in range(len(best)):
            optimal(eta[i].numpy(), mu[i].numpy(), best[i], "the tree")

    kind = "projective" if projective else "non-projective"
    name = f"{kind} tree of {words}, batch {batch}"
    rival = "torch-struct" if projective else "torch-struct, matrix-tree"
    return Contest(name, rival, theirs, ours, check)


# ---- Rows ----------------------------------------------------------------------------------------


def rows(shape: tuple[int, int], how: str) -> Contest:
    """Sparsemax by entmax, beside an `Xor` for each row or a choice of 8."""
    import entmax

    torch.manual_seed(0)
    scores, weights = normal(*shape), torch.randn(shape)
    choose = factormax.nn.KSubset(8)

    def theirs() -> Tensor:
        return step(entmax.sparsemax(scores, -1), [scores], weights)

    def ours() -> Tensor:
        if how == "KSubset(8)":
            return step(choose(scores), [scores], weights)
        fg = fm.FactorGraph(batch_dims=0 if how == "one graph" else 1)
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u, axis=1 if how == "one graph" else None))
        fg.solve()
        return step(u.value, [scores], weights)

    def check() -> None:
        eta, grad = scores.detach().double(), weights.double()
        error = float((theirs() - bisected(eta, grad, 1, equal=True)[0]).abs().max())
        require(error <= 1e-5, f"entmax's sparsemax is off by {error}")
        exact, _ = bisected(eta, grad, 8 if how == "KSubset(8)" else 1, equal=True)
        error = float((ours() - exact).abs().max())
        require(error <= 1e-5, f"{how} is off by {error}")

    size = f"{shape[0]}x{shape[1]}"
    what = f"KSubset(8), {size}" if how == "KSubset(8)" else f"sparsemax {size}, {how}"
    return Contest(what, "entmax.sparsemax", theirs, ours, check)


# ---- Matchings -----------------------------------------------------------------------------------


def matching(n: int, batch: int, rival: str) -> Contest:
    """Rows of one, columns of at most one; of a square both are doubly stochastic."""
    torch.manual_seed(0)
    scores, weights = normal(batch, n, n), torch.randn(batch, n, n)
    wide = scores.detach().double().requires_grad_(), weights.double()
    layer = cvxpy_matching(n, expanded=True) if rival == "cvxpylayers" else None

    def theirs() -> Tensor:
        if layer is not None:
            return layer(*wide).detach()
        return step(sinkhorn(scores, 50), [scores], weights)

    def ours() -> Tensor:
        return factormax_matching(scores, weights).detach()

    def check() -> None:
        found, value = theirs()[:CHECKED].numpy(), ours()[:CHECKED].numpy()
        exact = np.stack([matching_qp(s) for s in wide[0].detach().numpy()[:CHECKED]])
        error = float(np.abs(value - exact).max())
        require(error <= 1e-4, f"matchings are off by {error}")
        if layer is not None:
            error = float(np.abs(found - exact).max())
            require(error <= 1e-4, f"the matchings of cvxpylayers are off by {error}")
        else:
            off = max(np.abs(found.sum(axis) - 1).max() for axis in (1, 2))
            require(off <= 1e-2, f"Sinkhorn's rows and columns are off by {off}")

    return Contest(f"matching {n}x{n}, batch {batch}", rival, theirs, ours, check)


def assignment(n: int, batch: int) -> Contest:
    """The best matchings, and nothing to differentiate."""
    from scipy.optimize import linear_sum_assignment

    scores = np.random.default_rng(0).standard_normal((batch, n, n))

    def theirs() -> object:
        return [linear_sum_assignment(s, maximize=True) for s in scores]

    def ours() -> fm.Solution:
        fg = fm.FactorGraph(batch_dims=1)
        fg.add(fm.Matching(fg.variable_from(scores)))
        return fg.solve_map()

    def check() -> None:
        best = [s[linear_sum_assignment(s, maximize=True)].sum() for s in scores]
        error = float(np.abs(ours().objective - best).max())
        require(error <= 1e-9, f"the best matchings are off by {error}")

    name = f"best matching {n}x{n}, batch {batch}, forward"
    return Contest(name, "SciPy's assignment", theirs, ours, check)


# ---- The section ---------------------------------------------------------------------------------


def contests() -> Iterator[tuple[str, Callable[[], Contest]]]:
    """The package that each needs, and how to make it."""
    for length, states, batch in ((20, 25, 64), (20, 25, 16), (50, 10, 64)):
        yield "torch_struct", lambda a=(length, states, batch): chain(*a)
    for projective in (True, False):
        for words, batch in ((25, 16), (50, 32)):
            yield "torch_struct", lambda a=(words, batch, projective): tree(*a)
    for shape in ((8192, 128), (1024, 1000)):
        for how in ("batch", "one graph"):
            yield "entmax", lambda a=(shape, how): rows(*a)
    yield "entmax", lambda: rows((8192, 128), "KSubset(8)")
    yield "torch", lambda: matching(20, 64, "Sinkhorn, 50 steps")
    yield "cvxpylayers", lambda: matching(20, 64, "cvxpylayers")
    for n, batch in ((20, 256), (100, 32)):
        yield "scipy", lambda a=(n, batch): assignment(*a)


def calls_in_a_row(run: Callable[[], object]) -> int:
    """Calls that take `TURN` together.

    The threads of torch spin for some milliseconds after their last task, and keep a core from
    whoever comes next: that must not count for much.
    """
    run()
    start = time.perf_counter()
    run()
    return max(2, round(TURN / (time.perf_counter() - start)))


def alternatives(quick: bool) -> Section:
    """All of them, where they can be imported."""
    found: list[list[object]] = []
    record: dict[str, Any] = {}
    missing: list[str] = []
    for package, make in contests():
        if find_spec(package) is None:
            missing.append(package)
            continue
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*arg_constraints")  # of torch-struct
            contest = make()
            contest.check()
            runs = {"theirs": contest.theirs, "ours": contest.ours}
            calls = {name: calls_in_a_row(run) for name, run in runs.items()}
            times = in_turns(runs, 3 if quick else 9, in_a_row=calls)
        theirs, ours = (1e3 * statistics.median(itertools.chain(*own)) for own in times.values())
        ratio = ratios(times, "ours")["theirs"]
        found.append([contest.name, contest.rival, theirs, ours, ratio])
        record[f"{contest.name}: {contest.rival}"] = {"theirs_ms": theirs, "ours_ms": ours}
    header = ["", "alternative", "theirs", "factormax", "ratio"]
    text = table("Alternatives, forward + backward through torch (ms)", header, found)
    for package in dict.fromkeys(missing):
        text += f"{package} is not installed: its rows are left out.\n"
    return text + plot(found, OUTPUT / "alternatives.png"), record


def plot(found: list[list[Any]], path: Path) -> str:
    """Draws the ratios; says where, or why not."""
    try:
        import matplotlib
    except ImportError:
        return "No plot: matplotlib is not installed.\n"
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(8, 0.35 * len(found) + 1.2))
    names = [f"{name}\n{rival}" for name, rival, *_ in found]
    times = [row[4] for row in found]
    bars = ax.barh(names, times, color=["C0" if t >= 1 else "C3" for t in times])
    ax.bar_label(bars, [f" {t:.3g}" for t in times], fontsize=8)
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set(xscale="log", xlabel="times as long as factormax, forward + backward")
    ax.margins(x=0.1)
    ax.tick_params(axis="y", labelsize=7)
    ax.invert_yaxis()
    ax.grid(axis="x", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
    return f"The plot is {path}.\n"


SECTIONS: dict[str, Callable[[bool], Section]] = {"alternatives": alternatives}
