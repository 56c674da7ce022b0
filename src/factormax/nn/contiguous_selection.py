"""Contiguous selection: a few words, preferably neighbours, such as a rationale."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from factormax.checks import finite_number
from factormax.errors import GraphError
from factormax.factors import Exactly, SequenceBudget
from factormax.graph import FactorGraph
from factormax.nn.base import StructuredLayer
from factormax.nn.padding import Count, at_most, check_count, count_of_call, number_of
from factormax.variable import Variable

__all__ = ["ContiguousSelection"]


class ContiguousSelection(StructuredLayer):
    r"""Selects at most `budget` positions of a sequence, and rewards neighbours.

    $$\sum_t \eta_t x_t + T \sum_t x_t x_{t+1}, \qquad \sum_t x_t \le B,$$

    with $x$ a binary sequence. The greater the score T of two neighbours, `transition`, the fewer
    and longer the spans. The weights sum to at most B, but unless the scores are decisive, more
    than B positions have some weight. For a single selection, call `predict`, or set
    `eval_map=True` for eval mode.

    If no span has a positive score, as when all scores are at most −T, all values and gradients are
    0, at any temperature, and nothing is learned. So start with a positive bias,
    `nn.init.constant_(scorer.bias, 0.5)`, or require a number with `exactly=True`. For a single
    contiguous run, whatever the scores, write an oracle: see `Interval` in *A factor of your own*.

    Args:
        budget: how many; a float is that fraction of the length, rounded up. `forward(scores,
            budget=...)` takes another for that call, or one per instance.
        transition: the score of two neighbours, or its initial value if it is learned. At exactly 0
            the layer has a kink.
        learn_transition: False: the score is fixed.
        exactly: True: select exactly `budget`, or all if fewer are present.
        **settings: `temperature`, `eval_map`, `tol` and the other settings of `StructuredLayer`.

    Shapes:
        scores and marginals `(*batch, n)`; `lengths` `(*batch,)`; `mask` `(*batch, n)`, where a gap
        separates its neighbours.

    Example:
        A classifier that reads a third of the words, and so shows which ones matter:

        >>> import torch, factormax.nn
        >>> class Rationale(torch.nn.Module):
        ...     def __init__(self, words, dim, classes):
        ...         super().__init__()
        ...         self.embedding = torch.nn.Embedding(words, dim)
        ...         self.score = torch.nn.Linear(dim, 1)
        ...         torch.nn.init.constant_(self.score.bias, 0.5)
        ...         self.select = factormax.nn.ContiguousSelection(budget=1 / 3, transition=0.5)
        ...         self.output = torch.nn.Linear(dim, classes)
        ...
        ...     def forward(self, words, lengths):
        ...         x = self.embedding(words)
        ...         weights = self.select(self.score(x).squeeze(-1), lengths=lengths)
        ...         return self.output((weights[..., None] * x).sum(dim=1))
        >>> model = Rationale(words=100, dim=8, classes=2)
        >>> model(torch.randint(0, 100, (2, 9)), lengths=[9, 6]).shape
        torch.Size([2, 2])
    """

    axes: ClassVar[tuple[str, ...]] = ("n",)
    transition: Tensor

    def __init__(
        self,
        budget: Count,
        *,
        transition: float = 0.1,
        learn_transition: bool = True,
        exactly: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.exactly = bool(exactly)
        self.budget = check_count("ContiguousSelection", "budget", budget)
        start = torch.tensor(finite_number(f"{self._name}: transition", transition, GraphError))
        if learn_transition:
            self.transition = nn.Parameter(start)
        else:
            self.register_buffer("transition", start)

    def add_factors(
        self,
        fg: FactorGraph,
        u: Variable,
        present: Tensor | None,
        budget: Count | Tensor | None = None,
    ) -> None:
        """Adds a binary sequence with a budget."""
        there = u.size if present is None else present.sum(dim=-1)
        given: Count | Tensor = self.budget
        if budget is not None:
            given = count_of_call("ContiguousSelection", "budget", budget, fg._known_batch_shape())
        number = number_of(given, there)
        fg.add(SequenceBudget(u, self.transition, number))
        if self.exactly:
            fg.add(Exactly(u, at_most(number, there)))

    def _repr_parts(self) -> list[str]:
        parts = [f"budget={self.budget:.4g}", f"transition={float(self.transition.detach()):.4g}"]
        parts += ["learn_transition=False"] * (not self.transition.requires_grad)
        return parts + ["exactly=True"] * self.exactly
