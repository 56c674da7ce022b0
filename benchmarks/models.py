"""The models of the benchmarks, as graphs: those of the table of passes, at a given score scale."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import factormax as fm

Model = Callable[[int, float], fm.FactorGraph]


def matching(n: int) -> Model:
    """LP-matching: every row exactly one, every column at most one."""

    def build(seed: int, scale: float) -> fm.FactorGraph:
        rng = np.random.default_rng(seed)
        fg = fm.FactorGraph()
        u = fg.variable_from(scale * rng.standard_normal((n, n)))
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.AtMostOne(u, axis=0))
        return fg

    return build


def random_logic(n: int) -> Model:
    """Overlapping logic and counting factors over 2 to 6 of n variables, with negation.

    A planted assignment satisfies them all, so that the graph is feasible.
    """

    def build(seed: int, scale: float) -> fm.FactorGraph:
        rng = np.random.default_rng(seed)
        truth = rng.random(n) < 0.4
        fg = fm.FactorGraph()
        u = fg.variable_from(scale * rng.standard_normal(n))
        for factor in logic_factors(rng, truth):
            fg.add(factor(u))
        return fg

    return build


def logic_factors(
    rng: np.random.Generator, truth: np.ndarray
) -> list[Callable[[fm.Variable], Any]]:
    """As many factors as variables, all of which the assignment satisfies; given the variables."""
    n = len(truth)
    kinds = [fm.Xor, fm.AtMostOne, fm.Or, fm.Nand, fm.Imply, fm.OrOut, fm.AndOut, fm.Budget]
    found: list[Callable[[fm.Variable], Any]] = []
    while len(found) < n:
        kind = kinds[rng.integers(len(kinds))]
        members = rng.choice(n, size=int(rng.integers(2, 7)), replace=False)
        negated = rng.random(len(members)) < 0.3
        on = truth[members] ^ negated
        budget = int(rng.integers(1, len(members)))
        if satisfied(kind, on, budget):
            found.append(partial(_logic, kind, members.tolist(), negated.tolist(), budget))
    return found


def _logic(kind: Any, members: list[int], negated: list[bool], budget: int, u: fm.Variable) -> Any:
    literals = [~u[i] if flip else u[i] for i, flip in zip(members, negated, strict=True)]
    return kind(literals, budget) if kind is fm.Budget else kind(literals)


def satisfied(kind: type[Any], on: np.ndarray, budget: int) -> bool:
    """Whether an assignment of the literals satisfies a factor."""
    count, last, others = int(on.sum()), bool(on[-1]), on[:-1]
    meanings = {
        fm.Xor: count == 1,
        fm.AtMostOne: count <= 1,
        fm.Or: count >= 1,
        fm.Nand: count < len(on),
        fm.Imply: last or not others.all(),
        fm.OrOut: last == others.any(),
        fm.AndOut: last == others.all(),
        fm.Budget: count <= budget,
    }
    return bool(meanings[kind])


def full_mrf(n: int) -> Model:
    """A score for every pair of n labels, as in multilabel classification."""

    def build(seed: int, scale: float) -> fm.FactorGraph:
        rng = np.random.default_rng(seed)
        i, j = np.triu_indices(n, 1)
        fg = fm.FactorGraph()
        u = fg.variable_from(scale * rng.standard_normal(n))
        fg.add(fm.Pair(u[i], u[j], scale * rng.standard_normal(len(i))))
        return fg

    return build


def pair_grid(n: int) -> Model:
    """An n x n grid of binary variables, with a score for each pair of neighbours."""

    def build(seed: int, scale: float) -> fm.FactorGraph:
        rng = np.random.default_rng(seed)
        fg = fm.FactorGraph()
        u = fg.variable_from(scale * rng.standard_normal((n, n)))
        fg.add(fm.Pair(u[:, :-1], u[:, 1:], scale * rng.standard_normal((n, n - 1))))
        fg.add(fm.Pair(u[:-1], u[1:], scale * rng.standard_normal((n - 1, n))))
        return fg

    return build


def tree_budgets(n: int, budget: int | None) -> Model:
    """A dependency tree in which no word is the head of more than `budget` others."""
    return lambda seed, scale: _tree(n, budget, seed, scale)[0]


def _tree(
    n: int, budget: int | None, seed: int, scale: float
) -> tuple[fm.FactorGraph, fm.Variable]:
    fg = fm.FactorGraph()
    u = fg.variable_from(scale * np.random.default_rng(seed).standard_normal((n, n)))
    fg.add(fm.DepTree(u))
    if budget is not None:
        others = [np.delete(np.arange(n), h) for h in range(n)]
        for h in range(n):
            fg.add(fm.Budget(u[others[h], h], budget))
    return fg, u


def sequence_at_most_one(length: int, states: int, free: int = 1) -> Model:
    """A linear chain in which every state but the first `free` occurs at most once."""

    def build(seed: int, scale: float) -> fm.FactorGraph:
        rng = np.random.default_rng(seed)
        fg = fm.FactorGraph()
        u = fg.variable_from(scale * rng.standard_normal((length, states)))
        fg.add(fm.Sequence(u, scale * rng.standard_normal((states, states))))
        fg.add(fm.AtMostOne(u[:, free:], axis=0))
        return fg

    return build


def matching_budget(n: int) -> Model:
    """A matching as one factor, with at most n / 4 in the left half."""

    def build(seed: int, scale: float) -> fm.FactorGraph:
        rng = np.random.default_rng(seed)
        fg = fm.FactorGraph()
        u = fg.variable_from(scale * rng.standard_normal((n, n + n // 2)))
        fg.add(fm.Matching(u))
        fg.add(fm.Budget(u[:, : n // 2], n // 4))
        return fg

    return build


def chain_grid(n: int, states: int = 3) -> Model:
    """An n x n grid: a chain along every row and every column, so two structured factors each."""

    def build(seed: int, scale: float) -> fm.FactorGraph:
        rng = np.random.default_rng(seed)
        fg = fm.FactorGraph()
        u = fg.variable_from(scale * rng.standard_normal((n, n, states)))
        for i in range(n):
            fg.add(fm.Sequence(u[i], scale * rng.standard_normal((states, states))))
        for j in range(n):
            fg.add(fm.Sequence(u[:, j], scale * rng.standard_normal((states, states))))
        return fg

    return build


def tree_logic(n: int) -> Model:
    """A tree with budgets of 2, and random logic over its arcs that a chain of words satisfies."""

    def build(seed: int, scale: float) -> fm.FactorGraph:
        rng = np.random.default_rng(seed)
        fg, u = _tree(n, 2, seed, scale)
        truth = np.eye(n, k=-1, dtype=bool)
        truth[0, 0] = True
        added = 0
        while added < n:
            members = rng.choice(n * n, size=4, replace=False)
            rows, cols = np.unravel_index(members, (n, n))
            negated = rng.random(4) < 0.5
            on = truth.ravel()[members] ^ negated
            kind = [fm.Or, fm.Nand, fm.AtMostOne, fm.Imply][rng.integers(4)]
            if not satisfied(kind, on, 0):
                continue
            literals = [
                ~u[r, c] if flip else u[r, c]
                for r, c, flip in zip(rows, cols, negated, strict=True)
            ]
            fg.add(kind(literals))
            added += 1
        return fg

    return build
