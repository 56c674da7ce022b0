"""Times: matching against cvxpylayers, rows against entmax, the full MRF, threads.

Every section checks the answers first. The times of the reference implementation (lp-sparsemap,
best tuned step size) were measured once, on two cores, and are quoted: it is not installed here.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import factormax as fm
from benchmarks.exact import matching_qp, mrf_qp
from benchmarks.timing import interleaved, table
from factormax import _form, _model
from factormax._engines.cpu import working_memory
from factormax._fronts.numpy import start

Section = tuple[str, dict[str, Any]]

#: ms, quoted: forward + backward of a batch of 64; the MRF forward, backward, build.
REFERENCE_MATCHING_64 = 364.0
REFERENCE_MRF = (417.0, 268.0, 80.0)
#: µs, quoted: a C++ loop written for dense 20x20 matching and nothing else, on one core.
LOOP_MATCHING_20 = 38.0


def require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(f"Wrong answer, no times: {what}")


def in_turn(run: Callable[..., object], cases: list[Any]) -> Callable[[], object]:
    """A call with the next of the cases at each call: other scores each time, as in training."""
    turn = itertools.cycle(cases)
    return lambda: run(*next(turn))


def on_threads(threads: int, call: Callable[[], object]) -> object:
    fm.set_num_threads(threads)
    return call()


def build_matching(scores: Any) -> tuple[fm.FactorGraph, fm.Variable]:
    fg = fm.FactorGraph(batch_dims=scores.ndim - 2)
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    return fg, u


def factormax_matching(scores: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    fg, u = build_matching(scores)
    fg.solve()
    scores.grad = None
    u.value.backward(grad)
    return u.value


def cvxpy_matching(n: int, expanded: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The same by cvxpylayers: the projection as one writes it, or as suits its solver best.

    Expanded, the square has no parameter in it: fewer unknowns, and a smaller error, which tight
    tolerances bring down to about ours.
    """
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    mu, eta = cp.Variable((n, n)), cp.Parameter((n, n))
    constraints = [mu >= 0, cp.sum(mu, axis=1) == 1, cp.sum(mu, axis=0) <= 1]
    options: dict[str, Any] = {"solve_method": "Clarabel"}
    if expanded:
        objective = 0.5 * cp.sum_squares(mu) - cp.sum(cp.multiply(eta, mu))
        options |= dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-10)
    else:
        objective = 0.5 * cp.sum_squares(mu - eta)
    problem = cp.Problem(cp.Minimize(objective), constraints)
    layer = CvxpyLayer(problem, [eta], [mu], solver_args=options)

    def run(scores: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        (value,) = layer(scores)
        scores.grad = None
        value.backward(grad)
        return value

    return run


def matching(quick: bool) -> Section:
    """Forward and backward of LP-matching 20x20, batch of 64 and single."""
    n, batch = 20, 64
    torch.manual_seed(0)
    grad = torch.randn(batch, n, n, dtype=torch.float64)
    batches = [torch.randn_like(grad).requires_grad_() for _ in range(4)]
    scores = batches[0]
    singles = [s.detach().clone().requires_grad_() for s in scores]
    value = factormax_matching(scores, grad).detach().numpy()
    ours_grad = scores.grad.clone()
    exact = np.stack([matching_qp(s) for s in scores.detach().numpy()])
    errors = {"factormax": float(np.abs(value - exact).max())}
    require(errors["factormax"] <= 1e-5, f"matching is off by {errors['factormax']}")
    layers = {
        "cvxpylayers": cvxpy_matching(n, expanded=False),
        "cvxpylayers, expanded": cvxpy_matching(n, expanded=True),
    }
    for name, layer in layers.items():
        errors[name] = float(np.abs(layer(scores, grad).detach().numpy() - exact).max())
        # The gradient of a solution that is a little off is that of another active set.
        gap = (scores.grad - ours_grad).abs().flatten(1).max(1).values
        require(float(gap.median()) <= 1e-2, f"gradients differ from {name} by {gap}")

    few = 2 if quick else 5
    runs = {"factormax": factormax_matching, **layers}
    ms: dict[str, dict[str, float]] = {}
    for what, calls in (
        ("batch of 64", {"factormax": 30}),
        ("single, graph building included", {"factormax": 64, **dict.fromkeys(layers, 8)}),
    ):
        pairs = [(b, grad) for b in batches]
        if what != "batch of 64":
            pairs = list(zip(singles, grad, strict=True))
        contestants: dict[str, Callable[[], object]] = {}
        for name, run in runs.items():
            contestants[name] = in_turn(run, pairs)
        times = interleaved(contestants, few, in_a_row=calls)
        ms[what] = {name: 1e3 * t for name, t in times.items()}
    rows: list[list[object]] = []
    for what, times in ms.items():
        ours, projection, expanded = times.values()
        rows.append([what, ours, projection, projection / ours, expanded, expanded / ours])
    ours, projection, expanded = errors.values()
    rows.append(["largest error", ours, projection, "", expanded, ""])
    ratio = REFERENCE_MATCHING_64 / ms["batch of 64"]["factormax"]
    text = table(
        "LP-matching 20x20, torch, float64, forward + backward (ms)",
        ["", "factormax", "cvxpylayers", "ratio", "expanded", "ratio"],
        rows,
    )
    text += f"batch against the reference's tuned {REFERENCE_MATCHING_64:g} ms: {ratio:.0f}x\n"
    return text, {"ms": ms, "reference_ratio": ratio, "errors": errors}


def core(quick: bool) -> Section:
    """The solver itself, without torch and graph building, on one thread and on two."""
    rows: list[list[object]] = []
    record: dict[str, Any] = {}
    for n in (5, 10, 20, 40, 80):
        batch = max(64, 4096 // n // n * 4)
        rng = np.random.default_rng(0)
        grad = rng.standard_normal((batch, n, n))
        forward: list[Callable[[], object]] = []
        backward: list[Callable[[], object]] = []
        solutions = []
        for _ in range(4):
            fg, u = build_matching(rng.standard_normal((batch, n, n)))
            forward.append(fg.solve)
            solutions.append(fg.solve(on_failure="raise"))
            backward.append(partial(solutions[-1].vjp, {u: grad}))
        contestants = {
            "forward": in_turn(on_threads, [(1, solve) for solve in forward]),
            "forward 2": in_turn(on_threads, [(2, solve) for solve in forward]),
            "backward": in_turn(on_threads, [(1, vjp) for vjp in backward]),
            "backward 2": in_turn(on_threads, [(2, vjp) for vjp in backward]),
        }
        times = interleaved(contestants, 3 if quick else 10, in_a_row=dict.fromkeys(contestants, 4))
        fm.set_num_threads(None)
        f, f2, b, b2 = (1e6 * times[k] / batch for k in times)
        passes = float(np.mean([solution.iterations for solution in solutions]))
        rows.append([f"{n}x{n}", f, b, f / f2, b / b2, passes])
        record[f"{n}"] = {"forward_us": f, "backward_us": b, "threads": (f + b) / (f2 + b2)}
    text = table(
        "The solver itself, LP-matching, µs per instance on one thread",
        ["", "forward", "backward", "forward, 2 threads: ratio", "backward", "passes"],
        rows,
    )
    ratio = record["20"]["forward_us"] / LOOP_MATCHING_20
    return text + f"20x20 against a special loop's {LOOP_MATCHING_20:g} µs: {ratio:.2f}x\n", record


def xor(quick: bool) -> Section:
    """One Xor over 1000 variables, batch of 64, against entmax.sparsemax."""
    import entmax

    torch.manual_seed(0)
    scores = torch.randn(64, 1000, requires_grad=True)
    grad = torch.randn(64, 1000)

    def ours() -> torch.Tensor:
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u))
        fg.solve()
        return u.value

    def theirs() -> torch.Tensor:
        return entmax.sparsemax(scores, -1)

    a, b = ours(), theirs()
    error = float((a - b).detach().abs().max())
    require(error <= 1e-5, f"Xor differs from sparsemax by {error}")
    times = interleaved(
        {
            "forward": ours,
            "entmax forward": theirs,
            "backward": lambda: a.backward(grad, retain_graph=True),
            "entmax backward": lambda: b.backward(grad, retain_graph=True),
        },
        3 if quick else 10,
        warmup=5,
        in_a_row=dict.fromkeys(("forward", "entmax forward", "backward", "entmax backward"), 20),
    )
    ms = {k: 1e3 * v for k, v in times.items()}
    rows: list[list[object]] = [
        [k, ms[k], ms[f"entmax {k}"], ms[f"entmax {k}"] / ms[k]] for k in ("forward", "backward")
    ]
    text = table("Xor over 1000, batch of 64 (ms)", ["", "factormax", "entmax", "ratio"], rows)
    return text, {"ms": ms, "error": error}


#: Factors that are rows: how many of their variables are on, and whether exactly so many.
ROWS: dict[str, tuple[Callable[..., Any], int, bool]] = {
    "Xor": (fm.Xor, 1, True),
    "AtMostOne": (fm.AtMostOne, 1, False),
    "Exactly(8)": (lambda u, axis: fm.Exactly(u, 8, axis=axis), 8, True),
    "Budget(8)": (lambda u, axis: fm.Budget(u, 8, axis=axis), 8, False),
}


def components(quick: bool) -> Section:
    """Rows as a batch and as one graph, which falls apart; forward and backward, beside a copy."""
    rows: list[list[object]] = []
    numbers: dict[str, Any] = {}
    for shape, (name, (factor, count, equal)) in itertools.product(
        ((8192, 128), (1024, 1000)), ROWS.items()
    ):
        torch.manual_seed(0)
        scores = torch.randn(shape, requires_grad=True)
        grad = torch.randn(shape)

        def run(
            batch_dims: int,
            factor: Callable[..., Any] = factor,
            scores: torch.Tensor = scores,
            grad: torch.Tensor = grad,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            fg = fm.FactorGraph(batch_dims=batch_dims)
            u = fg.variable_from(scores)
            fg.add(factor(u, axis=None if batch_dims else 1))
            fg.solve()
            scores.grad = None
            u.value.backward(grad)
            assert scores.grad is not None
            return u.value.detach(), scores.grad

        def copy(scores: torch.Tensor = scores, grad: torch.Tensor = grad) -> object:
            return scores.detach().clone(), grad.clone()

        exact, slope = bisected(scores.detach().double(), grad.double(), count, equal)
        for batch_dims in (0, 1):
            value, ours = run(batch_dims)
            error = float((value - exact).abs().max())
            require(error <= 1e-5, f"{name} of {shape} is off by {error}")
            error = float((ours - slope).abs().max())
            require(error <= 1e-4, f"the gradient of {name} of {shape} is off by {error}")
        times = interleaved(
            {"batch": partial(run, 1), "one graph": partial(run, 0), "copy": copy},
            10 if quick else 40,
            warmup=3,
        )
        ms = {k: 1e3 * v for k, v in times.items()}
        size = f"{shape[0]}x{shape[1]}"
        ratios = [ms["one graph"] / ms["batch"], ms["batch"] / ms["copy"]]
        rows.append([f"{name}, {size}", *ms.values(), *ratios])
        numbers[f"{name}, {size}"] = ms
    header = ["", "batch", "one graph", "two copies", "graph to batch", "batch to copies"]
    return table("Rows, forward + backward through torch (ms)", header, rows), {"ms": numbers}


def bisected(
    scores: torch.Tensor, grad: torch.Tensor, count: int, equal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The projection of each row onto those with so many on, or at most, and its derivative."""
    low = scores.amin(1, keepdim=True) - 1
    high = scores.amax(1, keepdim=True)
    for _ in range(60):
        middle = (low + high) / 2
        above = (scores - middle).clamp(0, 1).sum(1, keepdim=True) > count
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    tight = torch.ones_like(high) if equal else (high > 0).to(high)
    value = (scores - high * tight).clamp(0, 1)
    free = ((value > 0) & (value < 1)).to(value)
    mean = (grad * free).sum(1, keepdim=True) / free.sum(1, keepdim=True).clamp(min=1)
    return value, free * (grad - tight * mean)


def mrf(quick: bool) -> Section:
    """The full MRF of 159 labels, one instance."""
    n = 159
    rng = np.random.default_rng(0)
    first, second = np.triu_indices(n, 1)
    scores = torch.tensor(rng.standard_normal(n), requires_grad=True)
    coupling = torch.tensor(rng.standard_normal(len(first)) / np.sqrt(n), requires_grad=True)

    def build() -> tuple[fm.FactorGraph, fm.Variable]:
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(fm.Pair(u[first], u[second], coupling))
        return fg, u

    def compile_anew() -> None:
        _form._remembered.clear()
        _model._remembered.clear()
        fg, _ = build()
        fg._form()

    def forward() -> torch.Tensor:
        fg, u = build()
        fg.solve()
        return u.value

    value = forward()
    exact = mrf_qp(scores.detach().numpy(), first, second, coupling.detach().numpy())
    error = float(np.abs(value.detach().numpy() - exact).max())
    require(error <= 1e-5, f"the MRF is off by {error}")
    grad = torch.randn(n, dtype=torch.float64)
    times = interleaved(
        {
            "forward": forward,
            "backward": lambda: value.backward(grad, retain_graph=True),
            "build and compile": compile_anew,
        },
        10 if quick else 50,
    )
    rows: list[list[object]] = []
    for (name, seconds), quoted in zip(times.items(), REFERENCE_MRF, strict=True):
        rows.append([name, 1e3 * seconds, quoted, quoted / 1e3 / seconds])
    text = table(
        "Full MRF, 159 labels, 12,561 pairs, one instance (ms)",
        ["", "factormax", "reference (quoted)", "ratio"],
        rows,
    )
    return text, {"ms": {k: 1e3 * v for k, v in times.items()}, "error": error}


def neighbours(n: int) -> tuple[int, np.ndarray, np.ndarray]:
    """The pairs of neighbours on a grid: how many variables there are, and the pairs' ends."""
    index = np.arange(n * n).reshape(n, n)
    first = np.concatenate([index[:, :-1].ravel(), index[:-1].ravel()])
    second = np.concatenate([index[:, 1:].ravel(), index[1:].ravel()])
    return n * n, first, second


def strangers(n: int, pairs: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Random pairs: no variable is far from any other."""
    first, second = np.random.default_rng(1).integers(0, n, (2, pairs))
    apart = first != second
    return n, first[apart], second[apart]


def grids(quick: bool) -> Section:
    """One large instance: pairs of neighbours on a grid of binary variables, and others."""
    cores = os.cpu_count() or 1
    threads = sorted({1, min(2, cores), cores})
    graphs = {
        "100x100": (neighbours(100), 1.0),
        "300x300": (neighbours(300), 1.0),
        "100,000, 200,000 random": (strangers(100_000, 200_000), 1.0),
        "1,000, all pairs": ((1000, *np.triu_indices(1000, 1)), 1000**-0.5),
    }
    if not quick:  # a minute
        graphs["100,000, 400,000 random"] = (strangers(100_000, 400_000), 1.0)
    rows: list[list[object]] = []
    for (name, ((n, first, second), size)), scale in itertools.product(
        graphs.items(), (0.3, 1.0, 3.0)
    ):
        if "400" in name and scale == 3:  # takes minutes
            continue
        rng = np.random.default_rng(0)
        scores = scale * rng.standard_normal(n)
        coupling = scale * size * rng.standard_normal(len(first))
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(fm.Pair(u[first], u[second], coupling))
        solution = fg.solve(on_failure="raise")
        if name == "100x100":  # a minute for larger ones
            error = float(np.abs(u.value - mrf_qp(scores, first, second, coupling)).max())
            require(error <= 1e-4, f"the grid is off by {error}")  # Clarabel's error is 2e-5
        value = u.value.copy()
        on_threads(1, fg.solve)
        require(bool((u.value == value).all()), "it depends on the threads")
        grad = {u: rng.standard_normal(n)}
        calls: dict[str, Callable[[], object]] = {
            f"forward {k}": partial(on_threads, k, fg.solve) for k in threads
        }
        calls["backward"] = partial(on_threads, 1, partial(solution.vjp, grad))
        times = interleaved(calls, 1 if "400" in name else 3 if quick else 9)
        rows.append([f"{name}, scale {scale:g}", int(solution.iterations)])
        rows[-1] += [1e3 * seconds for seconds in times.values()]
    fm.set_num_threads(None)
    header = ["", "passes", *[f"on {k} of {cores} cores" for k in threads], "backward"]
    text = table("One graph of pairs, NumPy, forward and backward (ms)", header, rows)
    return text, {"rows": rows}


def scaling(quick: bool) -> Section:
    """Does the cost of a pass grow linearly with the incidences?"""
    rows: list[list[object]] = []
    sizes = (250, 1000, 4000) if quick else (250, 1000, 4000, 16000)
    for n in sizes:
        rng = np.random.default_rng(0)
        fg = fm.FactorGraph()
        u = fg.variable_from(rng.standard_normal(n))
        members = np.stack([rng.permutation(n).reshape(-1, 5) for _ in range(4)]).reshape(-1, 5)
        fg.add(fm.Budget(u[members], 2, axis=1))
        solution = fg.solve(tol=1e-8, on_failure="raise")
        seconds = interleaved({"solve": lambda: fg.solve(tol=1e-8)}, 5)["solve"]  # noqa: B023
        passes = int(solution.iterations)
        pass_us = 1e6 * seconds / passes
        incidences = members.size
        memory = working_memory(start(fg).inputs)
        rows.append(
            [n, incidences, passes, pass_us, 1e3 * pass_us / incidences, memory / incidences]
        )
    header = ["variables", "incidences", "passes", "µs per pass"]
    header += ["ns per incidence", "bytes per incidence"]
    text = table("Random budgets of 5, every variable in 4", header, rows)
    return text, {"rows": rows}


def lpsmap(quick: bool) -> Section:
    """A direct comparison, where the reference implementation can be imported."""
    try:
        import lpsmap
    except ImportError:
        return "lpsmap is not installed: its times above are quoted.\n", {"installed": False}
    torch.manual_seed(0)
    scores = torch.randn(20, 20)
    exact = torch.tensor(matching_qp(scores.double().numpy()))

    def run(step_size: float) -> torch.Tensor:
        fg = lpsmap.TorchFactorGraph()
        u = fg.variable_from(scores)
        for i in range(20):
            fg.add(lpsmap.Xor(u[i]))
            fg.add(lpsmap.AtMostOne(u[:, i]))
        fg.solve(max_iter=10_000, step_size=step_size)
        return u.value

    right = [s for s in (0.1, 0.3, 1, 3, 10) if (run(s) - exact).abs().max() < 1e-4]
    contestants: dict[str, Callable[[], object]] = {
        f"lpsmap, step size {s:g}": (lambda s=s: run(s)) for s in right
    }

    def ours() -> None:
        fg, _ = build_matching(scores)
        fg.solve()

    times = interleaved(contestants | {"factormax": ours}, 5 if quick else 20)
    rows: list[list[object]] = [[k, 1e3 * v, v / times["factormax"]] for k, v in times.items()]
    text = table("LP-matching 20x20, one instance, forward (ms)", ["", "ms", "ratio"], rows)
    return text, {"ms": times}


SECTIONS: dict[str, Callable[[bool], Section]] = {
    "matching": matching,
    "core": core,
    "xor": xor,
    "components": components,
    "mrf": mrf,
    "grids": grids,
    "scaling": scaling,
    "lpsmap": lpsmap,
}
