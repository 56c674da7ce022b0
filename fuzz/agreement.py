"""What must not matter to an answer: the batch, the start, order, precision, library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import factormax as fm
from fuzz.case import SCORES, Case
from fuzz.judge import (
    TIGHT,
    FloatArray,
    Infeasible,
    Run,
    hidden_in_rows,
    may_stall,
    nearness,
    per_instance,
    states_of,
)
from fuzz.solving import score_name, values_of_factors

__all__ = ["check_batch", "check_permuted", "check_precision", "check_torch", "check_warm"]


def check_batch(run: Run) -> None:
    """An instance of a batch gets the answer it gets alone, bit for bit."""
    case = run.case
    if not case.batched:
        run.skip("no batch")
        return
    try:
        built, solution = run.solve(case)
        singles = [run.solve(one) for one in case.singles()]
    except Infeasible:
        return
    values = np.asarray(built.u.value)
    for i, (one, alone) in enumerate(singles):
        same = np.array_equal(values[i], np.asarray(one.u.value), equal_nan=True)
        error = float(np.nanmax(np.abs(values[i] - one.u.value), initial=0.0))
        run.expect("values", same, f"instance {i}: {error:.3g} off from alone")
        same = bool(states_of(solution)[i] is states_of(alone)[0])
        run.expect("status", same, f"instance {i}: another status alone")
        if one.factors and case.batched:
            a, b = values_of_factors(case, built), values_of_factors(case.instance(i), one)
            same = all(
                x is None or np.array_equal(x[i], y[0], equal_nan=True)
                for x, y in zip(a, b, strict=True)
            )
            run.expect("factor values", same, f"instance {i}: other factor values")


def check_warm(run: Run) -> None:
    """A warm start, from the same scores or from others, changes nothing."""
    case = run.case
    other = replace(case, scores=case.scores + 0.1 * run.rng.normal(size=case.scores.shape))
    tol = 1e-6 if case.dtype == "float32" else TIGHT
    try:
        built, solution = run.solve(case, tol=tol)
        cold = np.array(built.u.value)
        start = run.solve(other, tol=tol)[1] if run.rng.random() < 0.5 else solution
        again = built.fg.solve(on_failure="ignore", tol=tol, warm_start=start)
    except Infeasible:
        return
    _compare(run, case, cold, solution, np.asarray(built.u.value), again, tol)


def _compare(
    run: Run,
    case: Case,
    value: Any,
    solution: fm.Solution,
    other_value: Any,
    other: fm.Solution,
    tol: float,
) -> None:
    """Two ways to the same answer."""
    near = 2 * nearness(case, tol) + 1e-8
    pairs = zip(states_of(solution), states_of(other), strict=True)
    for i, (status, second) in enumerate(pairs):
        if fm.Status.CONVERGED not in (status, second):
            continue
        if may_stall(case) and status is not second:
            run.skip("status")
            continue
        run.expect(
            "status",
            status is second,
            f"status {status.name} and {second.name}",
        )
        if status is second and hidden_in_rows(case) > near:
            run.skip("values")
        elif status is second:
            a, b = per_instance(case, value)[i], per_instance(case, other_value)[i]
            error = float(np.abs(a.astype(float) - b).max(initial=0.0))
            run.expect("values", error <= near, f"{error:.3g} apart (> {near:.2g})")


def check_permuted(run: Run) -> None:
    """The order of variables and factors does not matter."""
    case = run.case
    order = run.rng.permutation(case.n)
    place = np.argsort(order)
    terms = [replace(t, index=place[t.index]) for t in case.terms]
    shuffled = tuple(terms[k] for k in run.rng.permutation(len(terms)))
    mask = None if case.mask is None else case.mask[..., order]
    moved = replace(case, scores=case.scores[..., order], terms=shuffled, mask=mask)
    tol = 1e-6 if case.dtype == "float32" else TIGHT
    try:
        built, solution = run.solve(case, tol=tol)
        second, other = run.solve(moved, tol=tol)
    except Infeasible:
        return
    back = np.asarray(second.u.value)[..., place]
    _compare(run, case, built.u.value, solution, back, other, tol)


def check_precision(run: Run) -> None:
    """Float32 answers what float64 does, as far as it can tell."""
    case = replace(run.case, dtype="float32")
    small = np.asarray(case.scores.astype(np.float32), dtype=float)
    terms = tuple(
        replace(
            t,
            params={
                k: np.asarray(v, np.float32).astype(float) if k in SCORES else v
                for k, v in t.params.items()
            },
        )
        for t in case.terms
    )
    case = replace(case, scores=small, terms=terms)
    try:
        built, solution = run.solve(case)
        second, other = run.solve(replace(case, dtype="float64"))
    except Infeasible:
        return
    _compare(run, case, built.u.value, solution, second.u.value, other, 1e-6)
    dtype = np.asarray(built.u.value).dtype
    run.expect("dtype", dtype == np.float32, f"values of {dtype}")


def check_torch(run: Run) -> None:
    """The torch front gives the same values, and its tape the gradients of `vjp`."""
    try:
        import torch
    except ImportError:  # pragma: no cover - depends on the machine
        run.skip("torch")
        return
    case = run.case

    leaves: list[Any] = []  # in the order in which the graph is built

    def convert(array: FloatArray) -> Any:
        leaves.append(torch.from_numpy(array.astype(case.dtype)).requires_grad_())
        return leaves[-1]

    try:
        built, solution = run.solve(case)
        second = run.build(case, convert)
        other = second.fg.solve(on_failure="ignore")
    except Infeasible:
        return
    value: Any = second.u.value
    ours = np.asarray(built.u.value)
    same = np.array_equal(ours, value.detach().numpy(), equal_nan=True)
    run.expect("values", same, "other values than with NumPy")
    if any(s is not fm.Status.CONVERGED for s in (*states_of(solution), *states_of(other))):
        run.skip("gradients")
        return
    weights = run.rng.normal(size=ours.shape).astype(case.dtype)
    (value * torch.from_numpy(weights)).sum().backward()
    expected = solution.vjp({built.u: weights})
    keys: list[Any] = [built.u]
    for term, factor in zip(case.terms, built.factors, strict=True):
        names = [name for name in term.params if name in SCORES]
        keys += [factor if name == score_name(term) else (factor, name) for name in names]
    for leaf, key in zip(leaves, keys, strict=True):
        taped = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        error = float(np.abs(taped - expected[key]).max(initial=0.0))
        size = 1 + float(np.abs(expected[key]).max(initial=0.0))
        run.expect("gradients", error <= 1e-6 * size, f"gradients {error:.3g} apart")
