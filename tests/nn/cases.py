"""One case for each kind of layer, with a ragged batch, for what all layers have to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import factormax.nn as fnn  # noqa: E402

TIGHT = {"tol": 1e-12}


@dataclass(frozen=True)
class Case:
    """A layer, and the sizes of a padded batch; a pair of lengths for two sides."""

    make: Callable[..., Any]
    shape: tuple[int, ...]
    lengths: tuple[Any, ...] | None  # each (batch,)

    def layer(self, **settings):
        """In float64, with learned scores that are neither 0 nor alike."""
        layer = self.make(**settings).double()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in layer.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(0.3 * noise)
        return layer

    def scores(self, seed=0, **options):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.shape, generator=generator, dtype=torch.float64, **options)

    @property
    def where(self) -> dict[str, Any]:
        """The lengths, as a layer takes them."""
        if self.lengths is None:
            return {}
        if len(self.lengths) == 1:
            return {"lengths": torch.tensor(self.lengths[0])}
        return {"lengths": tuple(torch.tensor(side) for side in self.lengths)}

    def corner(self, i: int) -> tuple[slice, ...]:
        """What is there of instance i."""
        if self.lengths is None:
            return tuple(slice(None) for _ in self.shape[1:])
        sides = [slice(side[i]) for side in self.lengths]
        return tuple(sides * (len(self.shape) - 1) if len(sides) == 1 else sides)

    @property
    def present(self):
        """The mask that the lengths stand for."""
        mask = torch.zeros(self.shape, dtype=torch.bool)
        for i in range(self.shape[0]):
            mask[(i, *self.corner(i))] = True
        return mask


WIDE = ((3, 2, 4), (5, 4, 4))  # no more rows than columns
TALL = ((5, 4, 4), (3, 2, 4))
MIXED = ((5, 2, 1), (3, 5, 4))

CASES = {
    "lp-matching": Case(fnn.Matching, (3, 4, 5), WIDE),
    "lp-matching, tall": Case(fnn.Matching, (3, 5, 4), TALL),
    "lp-matching, mixed": Case(fnn.Matching, (3, 5, 6), MIXED),
    "coarse matching": Case(lambda **s: fnn.Matching("coarse", **s), (3, 4, 5), WIDE),
    "coarse matching, mixed": Case(lambda **s: fnn.Matching("coarse", **s), (3, 6, 5), MIXED),
    "partial matching": Case(
        lambda **s: fnn.Matching(complete=False, budget=2, **s), (3, 5, 5), MIXED
    ),
    "sequential alignment": Case(fnn.SequentialAlignment, (3, 4, 5), WIDE),
    "sequential alignment, mixed": Case(
        lambda **s: fnn.SequentialAlignment(symmetric=False, **s), (3, 5, 6), MIXED
    ),
    "tree": Case(fnn.DependencyTree, (3, 5, 5), ((5, 3, 4),)),
    "projective tree with valency": Case(
        lambda **s: fnn.DependencyTree(projective=True, single_root=True, valency=2, **s),
        (3, 5, 5),
        ((4, 3, 5),),
    ),
    "k-subset": Case(lambda **s: fnn.KSubset(3, **s), (3, 6), ((6, 4, 2),)),
    "at most k": Case(lambda **s: fnn.AtMostK(0.5, **s), (3, 6), ((6, 3, 5),)),
    "contiguous selection": Case(
        lambda **s: fnn.ContiguousSelection(0.4, transition=0.6, **s), (3, 7), ((7, 3, 5),)
    ),
    "contiguous selection, exactly": Case(
        lambda **s: fnn.ContiguousSelection(0.4, exactly=True, **s), (3, 7), ((7, 3, 5),)
    ),
    "mrf": Case(lambda **s: fnn.PairwiseMRF(5, **s), (3, 5), None),
    "mrf with edges": Case(
        lambda **s: fnn.PairwiseMRF(5, [(0, 1), (2, 1), (3, 4)], **s), (3, 5), None
    ),
}

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
