"""Matching attention: no word on either side is matched twice."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from factormax.errors import GraphError
from factormax.factors import AtMostOne, Budget, Xor
from factormax.factors import Matching as MatchingFactor
from factormax.graph import FactorGraph
from factormax.nn.base import StructuredLayer
from factormax.nn.layout import Layout, ShorterFirst
from factormax.nn.padding import Count, check_count, count_of_call, number_of
from factormax.variable import Variable

__all__ = ["Matching"]


class Matching(StructuredLayer):
    r"""Matches rows and columns one to one: attention normalised over both sides at once.

    $$\sum_j \mu_{ij} = 1, \qquad \sum_i \mu_{ij} \le 1 \qquad\text{where } m \le n.$$

    Every row is matched to exactly one column, and no column twice. If an instance has more rows
    than columns, it is the other way round: every column is matched, and no row twice. So the
    shorter side is always matched completely, even if a batch holds instances of both kinds.

    Args:
        form: "lp", one `Xor` per row and one `AtMostOne` per column (the paper's LP-matching), or
            "coarse", a single `fm.Matching`. Both give the same marginals; "lp" is usually faster.
        complete: False: rows may stay unmatched too, so that only pairs with high enough scores are
            matched (`AtMostOne` both ways). Only for "lp".
        budget: the most pairs to match; a float is that fraction of the shorter side, rounded up.
            Only with `complete=False`. `forward(scores, budget=...)` takes another for that call,
            or one per instance.
        **settings: `temperature`, `eval_map`, `tol` and the other settings of `StructuredLayer`.

    Shapes:
        scores and marginals `(*batch, m, n)`; `lengths` and `mask` are tuples, for rows and
        columns: `lengths=(rows, columns)` of `(*batch,)`, `mask=(rows, columns)` of `(*batch, m)`
        and `(*batch, n)`, or one `(*batch, m, n)` mask of the pairs that are allowed.

    Example:
        Attention between two sentences of different lengths:

        >>> import torch, factormax.nn
        >>> class Compare(torch.nn.Module):
        ...     def __init__(self, words, dim):
        ...         super().__init__()
        ...         self.embedding = torch.nn.Embedding(words, dim)
        ...         self.attention = factormax.nn.Matching(temperature=0.5)
        ...         self.output = torch.nn.Linear(2 * dim, 3)
        ...
        ...     def forward(self, first, second, lengths):
        ...         a, b = self.embedding(first), self.embedding(second)
        ...         weights = self.attention(a @ b.mT, lengths=lengths)
        ...         pairs = torch.cat([a, weights @ b], dim=-1)
        ...         return self.output((pairs * weights.sum(dim=2, keepdim=True)).sum(dim=1))
        >>> model = Compare(words=100, dim=8)
        >>> first, second = torch.randint(0, 100, (2, 5)), torch.randint(0, 100, (2, 7))
        >>> model(first, second, lengths=([5, 4], [7, 3])).shape
        torch.Size([2, 3])
    """

    axes: ClassVar[tuple[str, ...]] = ("m", "n")

    def __init__(
        self,
        form: str = "lp",
        *,
        complete: bool = True,
        budget: Count | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if form not in ("lp", "coarse"):
            raise GraphError(f'Matching: form must be "lp" or "coarse", got {form!r}.')
        if form == "coarse" and not complete:
            raise GraphError('Matching: complete=False needs form="lp".')
        if budget is not None and complete:
            raise GraphError(
                "Matching: a complete matching has as many pairs as the shorter side has entries. "
                "For a budget, set complete=False."
            )
        self.form = form
        self.complete = bool(complete)
        self.budget = None if budget is None else check_count("Matching", "budget", budget)

    def layout(self, scores: Tensor, present: Tensor | None) -> Layout:
        """Puts the shorter side first if the matching is complete."""
        return ShorterFirst(scores, present) if self.complete else Layout()

    def add_factors(
        self,
        fg: FactorGraph,
        u: Variable,
        present: Tensor | None,
        budget: Count | Tensor | None = None,
    ) -> None:
        """Adds one factor for each row and each column, or one for all."""
        if budget is not None:
            if self.complete:
                raise GraphError("Matching: for a budget, set complete=False.")
            budget = count_of_call("Matching", "budget", budget, fg._known_batch_shape())
        if self.form == "coarse":
            fg.add(MatchingFactor(u))
            return
        fg.add(Xor(u, axis=1) if self.complete else AtMostOne(u, axis=1))
        fg.add(AtMostOne(u, axis=0))
        budget = self.budget if budget is None else budget
        if budget is not None:
            shorter: Tensor | int = min(u.shape)
            if present is not None:
                rows = present.any(dim=-1).sum(dim=-1)
                shorter = rows.minimum(present.any(dim=-2).sum(dim=-1))
            fg.add(Budget(u, number_of(budget, shorter)))

    def _repr_parts(self) -> list[str]:
        parts = [repr(self.form)] + ["complete=False"] * (not self.complete)
        return parts + ([] if self.budget is None else [f"budget={self.budget}"])
