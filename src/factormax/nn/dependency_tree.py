"""Latent or supervised dependency trees."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from factormax.errors import GraphError
from factormax.factors import Budget, DepTree
from factormax.graph import FactorGraph
from factormax.nn.base import StructuredLayer
from factormax.variable import Variable

__all__ = ["DependencyTree"]


class DependencyTree(StructuredLayer):
    r"""A head for every word, so that they form a tree: returns a sparse mixture of trees.

    `scores[m, h]` scores word h as the head of word m; `scores[m, m]` scores the root as its head.

    Args:
        projective: no arcs may cross.
        single_root: exactly one word has the root as its head.
        valency: no word may have more modifiers than this; the root may.
        **settings: `temperature`, `eval_map`, `tol` and the other settings of `StructuredLayer`.

    Shapes:
        scores and marginals `(*batch, n, n)`; `lengths` `(*batch,)`; `mask` `(*batch, n)`, the
        words that are present, or `(*batch, n, n)`, the arcs that are allowed.

    Example:
        A network that passes messages along a latent tree:

        >>> import torch, factormax.nn
        >>> class TreeNetwork(torch.nn.Module):
        ...     def __init__(self, dim):
        ...         super().__init__()
        ...         self.head, self.modifier = torch.nn.Linear(dim, dim), torch.nn.Linear(dim, dim)
        ...         self.tree = factormax.nn.DependencyTree(projective=True, valency=3)
        ...
        ...     def forward(self, words, lengths):
        ...         scores = self.modifier(words) @ self.head(words).mT
        ...         arcs = self.tree(scores, lengths=lengths)  # (batch, modifier, head)
        ...         return torch.relu(words + arcs @ words)
        >>> model = TreeNetwork(dim=8)
        >>> model(torch.randn(2, 5, 8), lengths=torch.tensor([5, 3])).shape
        torch.Size([2, 5, 8])
    """

    axes: ClassVar[tuple[str, ...]] = ("n", "n")

    def __init__(
        self,
        *,
        projective: bool = False,
        single_root: bool = False,
        valency: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.projective = bool(projective)
        self.single_root = bool(single_root)
        if valency is not None and (
            isinstance(valency, bool) or not isinstance(valency, int) or valency < 0
        ):
            raise GraphError(
                f"DependencyTree: valency must be a non-negative whole number, got {valency!r}."
            )
        self.valency = valency

    def add_factors(self, fg: FactorGraph, u: Variable, present: Tensor | None) -> None:
        """Adds the tree, and a budget over each column without its root arc."""
        fg.add(DepTree(u, projective=self.projective, single_root=self.single_root))
        n = u.shape[0]
        if self.valency is not None and n > 1:
            head = np.arange(n)
            other = np.arange(n - 1)[:, None]
            fg.add(Budget(u[other + (other >= head), head], self.valency, axis=0))

    def _repr_parts(self) -> list[str]:
        parts = ["projective=True"] * self.projective + ["single_root=True"] * self.single_root
        return parts + ([] if self.valency is None else [f"valency={self.valency}"])
