"""Selections of a given size: sparse, differentiable top-k."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from factormax.factors import Budget, Exactly
from factormax.graph import FactorGraph
from factormax.nn.base import StructuredLayer
from factormax.nn.padding import Count, at_most, check_count, count_of_call, number_of
from factormax.variable import Variable

__all__ = ["AtMostK", "KSubset"]


class _Selection(StructuredLayer):
    """What both selections share."""

    axes: ClassVar[tuple[str, ...]] = ("n",)

    def __init__(self, k: Count, **settings: Any) -> None:
        super().__init__(**settings)
        self.k = check_count(self._name, "k", k)

    def _number(self, fg: FactorGraph, k: Count | Tensor | None, there: Tensor | int) -> Any:
        """The k of the call, or else the layer's, as a number or one per instance."""
        given = self.k if k is None else count_of_call(self._name, "k", k, fg._known_batch_shape())
        return number_of(given, there)

    def _repr_parts(self) -> list[str]:
        return [f"k={self.k}"]


class KSubset(_Selection):
    r"""Selects exactly k: $\mu \in [0, 1]^n$, $\sum_i \mu_i = k$.

    Args:
        k: how many; a float is that fraction of the length, rounded up. `forward(scores, k=...)`
            takes another for that call, or a tensor of whole numbers, one per instance,
            broadcastable to the batch. In an instance with fewer than k entries, all are selected.
        **settings: `temperature`, `eval_map`, `tol` and the other settings of `StructuredLayer`.

    Shapes:
        scores and marginals `(*batch, n)`; `lengths` `(*batch,)`; `mask` `(*batch, n)`.

    Example:
        Pooling over the k best positions:

        >>> import torch, factormax.nn
        >>> class PoolBest(torch.nn.Module):
        ...     def __init__(self, dim, k):
        ...         super().__init__()
        ...         self.score = torch.nn.Linear(dim, 1)
        ...         self.select = factormax.nn.KSubset(k)
        ...
        ...     def forward(self, x, lengths):
        ...         weights = self.select(self.score(x).squeeze(-1), lengths=lengths)
        ...         return (weights[..., None] * x).sum(dim=1) / self.select.k
        >>> model = PoolBest(dim=8, k=3)
        >>> model(torch.randn(4, 10, 8), lengths=[10, 8, 5, 3]).shape
        torch.Size([4, 8])
    """

    def add_factors(
        self,
        fg: FactorGraph,
        u: Variable,
        present: Tensor | None,
        k: Count | Tensor | None = None,
    ) -> None:
        """Adds a factor: exactly k of the present entries, or all if there are fewer."""
        there = u.size if present is None else present.sum(dim=-1)
        fg.add(Exactly(u, at_most(self._number(fg, k, there), there)))


class AtMostK(_Selection):
    r"""Selects at most k with high enough scores: $\mu \in [0, 1]^n$, $\sum_i \mu_i \le k$.

    Unless more than k compete, each marginal is the score clipped to [0, 1]. The weights sum to at
    most k, but unless the scores are decisive, more than k entries have some weight. For a single
    selection, call `predict`, or set `eval_map=True` for eval mode.

    An entry with a score of 0 or less has value and gradient 0, at any temperature: if all start
    there, nothing is learned. So start with a positive bias, `nn.init.constant_(scorer.bias, 0.5)`,
    or require a number with `KSubset`.

    Args:
        k: how many; a float is that fraction of the length, rounded up. `forward(scores, k=...)`
            takes another for that call, or a tensor of whole numbers, one per instance,
            broadcastable to the batch.
        **settings: `temperature`, `eval_map`, `tol` and the other settings of `StructuredLayer`.

    Shapes:
        scores and marginals `(*batch, n)`; `lengths` `(*batch,)`; `mask` `(*batch, n)`.

    Example:
        A gate that opens for a few experts at most:

        >>> import torch, factormax.nn
        >>> class Experts(torch.nn.Module):
        ...     def __init__(self, dim, experts):
        ...         super().__init__()
        ...         self.router = torch.nn.Linear(dim, experts)
        ...         torch.nn.init.constant_(self.router.bias, 0.5)
        ...         self.gate = factormax.nn.AtMostK(2)
        ...         self.experts = torch.nn.ModuleList(
        ...             torch.nn.Linear(dim, dim) for _ in range(experts)
        ...         )
        ...
        ...     def forward(self, x):
        ...         weights = self.gate(self.router(x))
        ...         parts = torch.stack([expert(x) for expert in self.experts], dim=-1)
        ...         return (parts * weights[:, None]).sum(dim=-1)
        >>> model = Experts(dim=8, experts=5)
        >>> model(torch.randn(3, 8)).shape
        torch.Size([3, 8])
    """

    def add_factors(
        self,
        fg: FactorGraph,
        u: Variable,
        present: Tensor | None,
        k: Count | Tensor | None = None,
    ) -> None:
        """Adds a factor: at most k of the present entries."""
        there = u.size if present is None else present.sum(dim=-1)
        fg.add(Budget(u, self._number(fg, k, there)))
