"""A small example of every factor, for the tests that put all of them through something.

Factors made of rows come by themselves, from their `MEANING` and `random_params` in `meaning.py`. A
structured factor needs an entry of `EXAMPLES`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from meaning import MEANING, random_params

import factormax as fm


@dataclass(frozen=True)
class Example:
    """The shape of its variables, those of its own scores, and how it is made of both.

    `allowed` says which 0/1 assignments of the variables it allows; None: all.
    """

    shape: tuple[int, ...]
    own: tuple[tuple[int, ...], ...]
    make: Callable[..., Any]
    structured: bool = False
    allowed: Callable[[np.ndarray], Any] | None = None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.shape, *self.own)

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def point(self, *batch: int) -> np.ndarray:
        return np.random.default_rng(3).normal(size=(*batch, self.size))

    def with_scores(self, u, *own):
        """The factor over u. Its own scores that are not given are 0."""
        return self.make(u, *own, *[np.zeros(shape) for shape in self.own[len(own) :]])


class Cheapest(fm.Factor):
    """One variable is on, and so is its score."""

    def map(self, eta_u, eta_v):
        best = int(np.argmax(np.asarray(eta_u) + np.asarray(eta_v)))
        return np.eye(len(eta_u))[best], np.eye(len(eta_u))[best]


def is_tree(on):
    """Every word has one head, and leads to a word that hangs from the root."""
    heads = on.argmax(axis=1)
    for _ in heads:
        above = heads[heads]
        heads = above
    return (on.sum(axis=1) == 1).all() and np.diag(on)[heads].all()


def is_matching(on):
    return (on.sum(axis=1) == 1).all() and (on.sum(axis=0) <= 1).all()


def one_a_row(on):
    return (on.sum(axis=1) == 1).all()


def of_rows(kind, d=4):
    """With parameters that allow neither hardly any assignment nor nearly all."""

    def share(params):
        return np.mean([bool(MEANING[kind](x, params)) for x in product((0, 1), repeat=d)])

    drawn = [random_params(kind, d, np.random.default_rng(seed)) for seed in range(20)]
    params = min(drawn, key=lambda p: abs(share(p) - 0.5))
    return Example(
        (d,),
        (),
        lambda u: getattr(fm, kind)(u, **params),
        allowed=lambda on: MEANING[kind](on, params),
    )


def logic(kind):
    return Example((2, 3), (), lambda u: getattr(fm, kind)(u, axis=1))


EXAMPLES = {kind: of_rows(kind) for kind in MEANING if kind != "Pair"}
EXAMPLES |= {kind: logic(kind) for kind in ("Xor", "AtMostOne", "Or", "Nand", "Imply", "XorOut")}
EXAMPLES |= {kind: logic(kind) for kind in ("OrOut", "AndOut")}
EXAMPLES |= {
    "Budget": Example((4,), (), lambda u: fm.Budget(u, 1)),
    "AtLeast": Example((4,), (), lambda u: fm.AtLeast(u, 2)),
    "Exactly": Example((4,), (), lambda u: fm.Exactly(u, 2)),
    "Knapsack": Example((4,), (), lambda u: fm.Knapsack(u, [1.0, 2.0, 0.5, 1.5], 1.7)),
    "Linear": Example(
        (4,), (), lambda u: fm.Linear(u, [1.0, -2.0, 0.5, 1.5], lower=-0.2, upper=0.7)
    ),
    "Pair": Example((4,), ((2,),), lambda u, s: fm.Pair(u[:2], u[1:3], s)),
    "Table": Example(
        (5,),
        ((2, 3),),
        lambda u, s: fm.Table([u[:2], u[2:]], s),
        True,
        lambda on: on[:2].sum() == on[2:].sum() == 1,
    ),
    "Sequence": Example(
        (3, 2),
        ((2, 2), (2,)),
        lambda u, s, first: fm.Sequence(u, s, initial=first),
        True,
        one_a_row,
    ),
    "SequenceBudget": Example(
        (4,), ((3,),), lambda u, s: fm.SequenceBudget(u, s, 2), True, lambda on: on.sum() <= 2
    ),
    "DepTree": Example((3, 3), (), fm.DepTree, True, is_tree),
    "Matching": Example((2, 3), (), fm.Matching, True, is_matching),
    "Factor": Example((3,), ((3,),), Cheapest, True, lambda on: on.sum() == 1),
}
