"""Multilabel prediction with a learned score for every pair of labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from factormax.checks import shown
from factormax.errors import GraphError, ShapeError
from factormax.factors import Pair
from factormax.graph import FactorGraph
from factormax.nn.base import StructuredLayer
from factormax.nn.padding import as_tensor
from factormax.variable import Variable

__all__ = ["PairwiseMRF"]


class PairwiseMRF(StructuredLayer):
    r"""A pairwise Markov random field over labels, each of which is on or off.

    $$\sum_i \eta_i \mu_i + \sum_{(i, j)} \eta_{ij} \mu_{ij}$$

    The scores of the labels come from a network; the scores of pairs, `weight`, are learned here,
    one for each edge, and start at 0. `coupling` returns them as a symmetric matrix.

    Args:
        labels: the number of labels.
        edges: the pairs of labels that have a score, `(edges, 2)`; by default all.
        **settings: `temperature`, `eval_map`, `tol` and the other settings of `StructuredLayer`.

    Shapes:
        scores, marginals and targets `(*batch, labels)`; `mask` `(*batch, labels)`; loss
        `(*batch,)`; `weight` `(edges,)`, `coupling` `(labels, labels)`.

    Example:
        >>> import torch, factormax.nn
        >>> class Tagger(torch.nn.Module):
        ...     def __init__(self, dim, labels):
        ...         super().__init__()
        ...         self.score = torch.nn.Linear(dim, labels)
        ...         self.mrf = factormax.nn.PairwiseMRF(labels)
        ...
        ...     def forward(self, x):
        ...         return self.mrf(self.score(x))
        >>> model = Tagger(dim=8, labels=5)
        >>> x, y = torch.randn(4, 8), torch.randint(0, 2, (4, 5))
        >>> model(x).shape, model.mrf.weight.shape
        (torch.Size([4, 5]), torch.Size([10]))
        >>> loss = model.mrf.loss(model.score(x), y, kind="sparsemap").mean()
        >>> loss.backward()
        >>> predicted = model.mrf.predict(model.score(x))  # 0/1 labels
    """

    axes: ClassVar[tuple[str, ...]] = ("labels",)
    edges: Tensor
    _pairs: npt.NDArray[np.int64]

    def __init__(
        self,
        labels: int,
        edges: Tensor | Sequence[Sequence[int]] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        whole = isinstance(labels, int) and not isinstance(labels, bool)
        if not whole or not 1 <= labels <= 2**20:
            raise GraphError(
                f"PairwiseMRF: labels must be a whole number from 1 to {2**20}, got "
                f"{shown(labels)}."
            )
        self.labels = labels
        if edges is None:
            pairs = torch.triu_indices(labels, labels, offset=1).T.contiguous()
        else:
            pairs = _checked_edges(edges, labels)
        self.register_buffer("edges", pairs)
        self._read_edges(self)
        after_loading: Any = self.register_load_state_dict_post_hook
        after_loading(self._read_edges)
        self.weight = nn.Parameter(torch.zeros(len(pairs)))

    @staticmethod
    def _read_edges(layer: PairwiseMRF, *_: Any) -> None:
        """Keeps a NumPy copy, since `torch.export` and `torch.func` hide a buffer's numbers."""
        if not layer.edges.is_meta:
            layer._pairs = layer.edges.detach().cpu().numpy()

    @property
    def coupling(self) -> Tensor:
        """The scores of pairs as a symmetric matrix, `(labels, labels)`; 0 where there is none."""
        first, second = self.edges.T
        matrix = self.weight.new_zeros(self.labels, self.labels)
        matrix = matrix.index_put((first, second), self.weight)
        return matrix + matrix.T

    def check_scores(self, scores: Tensor) -> None:
        """Raises unless there is a score for each label."""
        super().check_scores(scores)
        if scores.shape[-1] != self.labels:
            raise ShapeError(
                f"PairwiseMRF: scores must have shape (*batch, {self.labels}), one for each label, "
                f"got {tuple(scores.shape)}."
            )

    def add_factors(self, fg: FactorGraph, u: Variable, present: Tensor | None) -> None:
        """Adds one pair for each edge."""
        if len(self.edges):
            first, second = self._pairs.T
            fg.add(Pair(u[first], u[second], self.weight))

    def _repr_parts(self) -> list[str]:
        return [f"labels={self.labels}", f"edges={len(self.edges)}"]


def _checked_edges(edges: Any, labels: int) -> Tensor:
    pairs = as_tensor("PairwiseMRF", "edges", edges).detach().clone()
    if pairs.numel() == 0:
        return torch.zeros((0, 2), dtype=torch.long)
    whole = not (pairs.is_floating_point() or pairs.is_complex() or pairs.dtype == torch.bool)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not whole:
        raise ShapeError(
            f"PairwiseMRF: edges must be whole numbers of shape (edges, 2), got "
            f"{tuple(pairs.shape)} of dtype {pairs.dtype}."
        )
    pairs = pairs.long()
    outside = (pairs < 0) | (pairs >= labels)
    if outside.any():
        raise GraphError(
            f"PairwiseMRF: edges must hold labels from 0 to {labels - 1}, got "
            f"{int(pairs[outside][0])}."
        )
    ordered = pairs.sort(dim=1).values
    if (ordered[:, 0] == ordered[:, 1]).any():
        raise GraphError("PairwiseMRF: an edge joins a label to itself; leave it out.")
    if len(set(map(tuple, ordered.tolist()))) < len(ordered):
        raise GraphError("PairwiseMRF: an edge is given twice (in either order); leave one out.")
    return pairs
