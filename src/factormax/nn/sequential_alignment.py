"""Sequential alignment: neighbours are aligned with neighbours."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from factormax.checks import finite_number
from factormax.errors import GraphError
from factormax.factors import AtMostOne, Sequence
from factormax.graph import FactorGraph
from factormax.nn.base import StructuredLayer
from factormax.nn.layout import Layout, ShorterFirst
from factormax.variable import Variable

__all__ = ["SequentialAlignment"]


class SequentialAlignment(StructuredLayer):
    r"""Aligns every source word with one target word, and neighbours preferably with neighbours.

    This is the paper's LP-sequence: a linear chain over the source words, whose states are the
    target words, with `AtMostOne` for every state. A single learned score $\eta_N$, `transition`,
    is added whenever the alignment goes from (i, j) to (i + 1, j ± 1):

    $$\sum_i \eta_{i, s_i} + \eta_N\, \big|\{i : |s_{i+1} - s_i| = 1\}\big|,
      \qquad \text{no } s_i \text{ twice, on average.}$$

    If an instance has more source than target words, the chain goes over the target words, so that
    the shorter side is always aligned completely.

    Args:
        transition: the initial value of the learned score. At exactly 0 the layer has a kink.
        symmetric: True: going from j to j − 1 counts like going to j + 1. False: only j + 1 counts.
        learn_transition: False: the score is fixed.
        **settings: `temperature`, `eval_map`, `tol` and the other settings of `StructuredLayer`.

    Shapes:
        scores and marginals `(*batch, m, n)`; `lengths=(source, target)` of `(*batch,)`, and
        `mask=(source, target)` of `(*batch, m)` and `(*batch, n)`, or one `(*batch, m, n)` mask
        of the pairs that are allowed. Absent words must come last.

    Example:
        >>> import torch, factormax.nn
        >>> class Align(torch.nn.Module):
        ...     def __init__(self, dim):
        ...         super().__init__()
        ...         self.project = torch.nn.Linear(dim, dim)
        ...         self.align = factormax.nn.SequentialAlignment(transition=0.5)
        ...
        ...     def forward(self, source, target, lengths):
        ...         scores = self.project(source) @ target.mT
        ...         return self.align(scores, lengths=lengths) @ target  # what each is aligned with
        >>> model = Align(dim=8)
        >>> source, target = torch.randn(2, 4, 8), torch.randn(2, 6, 8)
        >>> model(source, target, lengths=([4, 3], [6, 5])).sum().backward()
        >>> model.align.transition.grad.shape
        torch.Size([])
    """

    axes: ClassVar[tuple[str, ...]] = ("m", "n")
    transition: Tensor

    def __init__(
        self,
        transition: float = 0.1,
        *,
        symmetric: bool = True,
        learn_transition: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.symmetric = bool(symmetric)
        start = torch.tensor(finite_number(f"{self._name}: transition", transition, GraphError))
        if learn_transition:
            self.transition = nn.Parameter(start)
        else:
            self.register_buffer("transition", start)

    def layout(self, scores: Tensor, present: Tensor | None) -> Layout:
        """Puts the shorter side first."""
        return ShorterFirst(scores, present)

    def add_factors(self, fg: FactorGraph, u: Variable, present: Tensor | None) -> None:
        """Adds the chain, and at most one step per state."""
        state = torch.arange(u.shape[1], device=self.transition.device)
        step = state - state[:, None]  # [from, to]
        near = step.abs() == 1 if self.symmetric else step == 1
        fg.add(Sequence(u, self.transition * near))
        fg.add(AtMostOne(u, axis=0))

    def _repr_parts(self) -> list[str]:
        parts = [f"transition={float(self.transition.detach()):.4g}"]
        parts += ["symmetric=False"] * (not self.symmetric)
        return parts + ["learn_transition=False"] * (not self.transition.requires_grad)
