"""The models of the benchmarks, as graphs: those of the table of passes, at a given score scale."""

from __future__ import annotations

from collections.abc import Callable

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
        kinds = [fm.Xor, fm.AtMostOne, fm.Or, fm.Nand, fm.Imply, fm.OrOut, fm.AndOut, fm.Budget]
        added = 0
        while added < n:
            kind = kinds[rng.integers(len(kinds))]
            members = rng.choice(n, size=int(rng.integers(2, 7)), replace=False)
            negated = rng.random(len(members)) < 0.3
            on = truth[members] ^ negated
            budget = int(rng.integers(1, len(members)))
            if not satisfied(kind, on, budget):
                continue
            literals = [~u[i] if flip else u[i] for i, flip in zip(members, negated, strict=True)]
            fg.add(kind(literals, budget) if kind is fm.Budget else kind(literals))
            added += 1
        return fg

    return build


def satisfied(kind: type[fm.Factor], on: np.ndarray, budget: int) -> bool:
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
