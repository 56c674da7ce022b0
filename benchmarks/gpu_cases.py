"""The models of the GPU benchmark: batches of one wiring, with scores drawn for each instance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

import factormax as fm
from benchmarks.models import logic_factors

#: Adds variables and factors to a graph, from scores of variables and of factors.
Build = Callable[[fm.FactorGraph, Tensor, Tensor | None], fm.Variable]
#: The scores of a batch, and those of factors.
Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray | None]]
Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        build: adds it to a graph.
        draw: its scores, `(batch, ...)`.
        batches: the sizes that are timed.
        rival: what else would turn such scores into weights, by name.
    """

    build: Build
    draw: Draw
    batches: tuple[int, ...]
    rival: tuple[str, Layer] | None = None


def sinkhorn(scores: Tensor, iterations: int = 20) -> Tensor:
    """Rows and columns that sum to about one: normalised in turn, as logarithms."""
    for _ in range(iterations):
        scores = scores - scores.logsumexp(dim=2, keepdim=True)
        scores = scores - scores.logsumexp(dim=1, keepdim=True)
    return scores.exp()


def sparsemax(scores: Tensor) -> Tensor:
    """The projection onto the simplex of `(batch, n)`, by sorting."""
    ordered = scores.sort(dim=1, descending=True).values
    excess = ordered.cumsum(dim=1) - 1
    rank = torch.arange(1, scores.shape[1] + 1, device=scores.device)
    count = (rank * ordered > excess).sum(dim=1, keepdim=True)
    return (scores - excess.gather(1, count - 1) / count).clamp(min=0)


def chain_marginals(scores: Tensor) -> Tensor:
    """Of a linear chain without transitions, by torch-struct; every step sums to one."""
    import torch_struct

    pairs = scores[:, 1:, :, None].expand(-1, -1, -1, scores.shape[2]).clone()
    pairs[:, 0] += scores[:, 0, None, :]
    found = torch_struct.LinearChainCRF(pairs).marginals
    return torch.cat([found[:, :1].sum(dim=2), found.sum(dim=3)], dim=1)


def tree_marginals(scores: Tensor) -> Tensor:
    """Of projective dependency trees, by torch-struct; every word has one head."""
    import torch_struct

    found: Tensor = torch_struct.DependencyCRF(scores).marginals
    return found


def _if_installed(name: str, layer: Layer) -> tuple[str, Layer] | None:
    return (name, layer) if find_spec("torch_struct") else None


def _normal(*shape: int, pairs: int = 0) -> Draw:
    def draw(rng: np.random.Generator, batch: int) -> tuple[np.ndarray, np.ndarray | None]:
        scores = rng.standard_normal((batch, *shape))
        return scores, rng.standard_normal((batch, pairs)) if pairs else None

    return draw


def _multilabel(labels: int) -> Draw:
    """Like those of bibtex: few labels are likely, and few pairs have a say.

    That is more of a say than after training, where scores of pairs are at most about 0.1. As
    there, they are the same for all instances.
    """

    def draw(rng: np.random.Generator, batch: int) -> tuple[np.ndarray, np.ndarray]:
        scores = -2 + 0.7 * rng.standard_normal((batch, labels))
        likely = rng.random((batch, labels)) < 3 / labels
        scores[likely] = 1 + 0.7 * rng.standard_normal(int(likely.sum()))
        pairs = 0.3 * rng.standard_normal(labels * (labels - 1) // 2)
        return scores, np.where(rng.random(len(pairs)) < 0.1, pairs, 0)

    return draw


def _matching(n: int, batches: tuple[int, ...]) -> Case:
    def build(fg: fm.FactorGraph, scores: Tensor, pairs: Tensor | None) -> fm.Variable:
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.AtMostOne(u, axis=0))
        return u

    return Case(build, _normal(n, n), batches, ("Sinkhorn", sinkhorn))


def _logic(n: int, pairs: int = 0) -> Case:
    rng = np.random.default_rng(1)
    factors = logic_factors(rng, rng.random(n) < 0.4)
    first = rng.integers(0, n, pairs)
    second = (first + rng.integers(1, n, pairs)) % n

    def build(fg: fm.FactorGraph, scores: Tensor, pair_scores: Tensor | None) -> fm.Variable:
        u = fg.variable_from(scores)
        for factor in factors:
            fg.add(factor(u))
        if pair_scores is not None:
            fg.add(fm.Pair(u[first], u[second], pair_scores))
        return u

    return Case(build, _normal(n, pairs=pairs), (1024,))


def _knapsacks(n: int, size: int = 12) -> Case:
    """A knapsack for every four variables, each of them over a dozen, with room for a third."""
    rng = np.random.default_rng(1)
    members = [rng.choice(n, size=size, replace=False) for _ in range(n // 4)]
    costs = [rng.integers(1, 10, size).astype(float) for _ in members]

    def build(fg: fm.FactorGraph, scores: Tensor, pairs: Tensor | None) -> fm.Variable:
        u = fg.variable_from(scores)
        for chosen, cost in zip(members, costs, strict=True):
            fg.add(fm.Knapsack(u[chosen], cost, 0.3 * float(cost.sum())))
        return u

    return Case(build, _normal(n), (1024,))


def _mrf(n: int, draw: Draw) -> Case:
    first, second = np.triu_indices(n, 1)

    def build(fg: fm.FactorGraph, scores: Tensor, pairs: Tensor | None) -> fm.Variable:
        assert pairs is not None
        u = fg.variable_from(scores)
        fg.add(fm.Pair(u[first], u[second], pairs))
        return u

    return Case(build, draw, (32, 256))


def _alone(
    factor: Callable[[fm.Variable], Any], n: int, rival: tuple[str, Layer] | None = None
) -> Case:
    def build(fg: fm.FactorGraph, scores: Tensor, pairs: Tensor | None) -> fm.Variable:
        u = fg.variable_from(scores)
        fg.add(factor(u))
        return u

    return Case(build, _normal(n), (64, 1024), rival)


def _sequence(length: int, states: int, at_most_one: bool) -> Case:
    """A linear chain, in which every state but the first may be said to occur at most once."""

    def draw(rng: np.random.Generator, batch: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.standard_normal((batch, length, states)), rng.standard_normal((states, states))

    def build(fg: fm.FactorGraph, scores: Tensor, transitions: Tensor | None) -> fm.Variable:
        assert transitions is not None
        u = fg.variable_from(scores)
        fg.add(fm.Sequence(u, transitions))
        if at_most_one:
            fg.add(fm.AtMostOne(u[:, 1:], axis=0))
        return u

    rival = _if_installed("torch-struct, a linear chain", chain_marginals)
    return Case(build, draw, (64, 256, 1024), rival)


def _tree(n: int, budget: int = 3) -> Case:
    """Dependency trees in which no word is the head of more than `budget` others."""
    others = [np.delete(np.arange(n), h) for h in range(n)]

    def build(fg: fm.FactorGraph, scores: Tensor, pairs: Tensor | None) -> fm.Variable:
        u = fg.variable_from(scores)
        fg.add(fm.DepTree(u))
        for h in range(n):
            fg.add(fm.Budget(u[others[h], h], budget))
        return u

    rival = _if_installed("torch-struct, projective trees", tree_marginals)
    return Case(build, _normal(n, n), (64, 256, 1024), rival)


CASES = {
    "matching 20x20": _matching(20, (1, 64, 1024, 16384, 131072)),
    "matching 40x40": _matching(40, (64, 1024)),
    "random logic 60": _logic(60),
    "random logic 60 + 100 pairs": _logic(60, 100),
    "knapsacks 60": _knapsacks(60),
    "full MRF 159": _mrf(159, _normal(159, pairs=159 * 158 // 2)),
    "multilabel MRF 159": _mrf(159, _multilabel(159)),
    "Xor 1000": _alone(fm.Xor, 1000, ("sparsemax, sorting", sparsemax)),
    "Exactly 50 of 1000": _alone(lambda u: fm.Exactly(u, 50), 1000),
    "Budget 50 of 1000": _alone(lambda u: fm.Budget(u, 50), 1000),
    "sequence 20x25": _sequence(20, 25, at_most_one=False),
    "sequence 20x25 + at most one": _sequence(20, 25, at_most_one=True),
    "tree 25 + budgets": _tree(25),
    "tree 50 + budgets": _tree(50),
}
