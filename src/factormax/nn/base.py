"""What the layers share: the graph of a forward pass, temperature, MAP in eval, and losses."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from factormax.checks import positive_number
from factormax.errors import GraphError, ShapeError
from factormax.graph import FactorGraph
from factormax.nn.layout import Layout
from factormax.nn.padding import Lengths, Mask, presence
from factormax.queries.loss import KINDS
from factormax.variable import Variable

__all__ = ["StructuredLayer"]


class StructuredLayer(nn.Module):
    r"""Scores in, LP-SparseMAP marginals out; the base of all layers, and of your own.

    $$\max_\mu\; \tfrac1T \big(\eta \cdot \mu + \sum_f \eta_f \cdot \mu_f\big) - \tfrac12\|\mu\|^2$$

    A subclass names its `axes` and says, in `add_factors`, what the variables have to obey. The
    graph lives only as long as the forward pass: what a layer keeps are numbers and parameters, so
    it can be copied, pickled, saved and distributed like any other.

    Args:
        temperature: T; all scores, learned ones too, are divided by it. Towards 0 the answer
            becomes a single structure. It may be set again later, to anneal.
        eval_map: in eval mode, return the best structure (`solve_map`) instead. If structures may
            have more or fewer entries on, every entry that adds to the score is then on, also one
            with a small score and so a small marginal.
        tol, max_iter, on_failure: as of `FactorGraph.solve`.

    Shapes:
        scores and marginals `(*batch, *axes)`, of the same dtype and device.

    Example:
        A layer that picks one of each row, and at most three of all others than the first column:

        >>> import torch, factormax as fm, factormax.nn
        >>> class FewOthers(fm.nn.StructuredLayer):
        ...     axes = ("rows", "columns")
        ...
        ...     def add_factors(self, fg, u, present):
        ...         fg.add(fm.Xor(u, axis=1))
        ...         fg.add(fm.Budget(u[:, 1:], budget=3))
        >>> layer = FewOthers(temperature=0.5)
        >>> marginals = layer(torch.randn(2, 6, 4), lengths=([6, 5], None))
        >>> marginals.shape, marginals.sum(dim=(1, 2)).round(decimals=3)
        (torch.Size([2, 6, 4]), tensor([6., 5.]))
    """

    #: What the axes of the scores count, batch aside. Axes of one name share masks and lengths.
    axes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        eval_map: bool = False,
        tol: float = 1e-6,
        max_iter: int = 1000,
        on_failure: str = "warn",
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.eval_map = bool(eval_map)
        self.tol = tol
        self.max_iter = max_iter
        self.on_failure = on_failure

    @property
    def temperature(self) -> float:
        """What the scores are divided by."""
        return self._temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        self._temperature = positive_number(f"{self._name}: temperature", temperature, GraphError)

    # ---- queries ---------------------------------------------------------------------------------

    def forward(self, scores: Tensor, *, mask: Mask = None, lengths: Lengths = None) -> Tensor:
        """The marginals, `(*batch, *axes)`; in eval mode with `eval_map`, the best structure.

        Args:
            scores: `(*batch, *axes)`.
            mask: boolean, True for what is there: of as many dimensions as the scores, or
                `(*batch, size)` for the words, steps or elements; a pair of such for two sides.
            lengths: `(*batch,)`, how many are there, instead of a mask or together with one; a
                pair of such for two sides.
        """
        fg, u, layout = self._build(scores, mask, lengths)
        if self.eval_map and not self.training:
            fg.solve_map(**self._options())
        else:
            fg.solve(**self._options())
        return layout.undo(u.value)  # type: ignore[arg-type]

    def loss(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        kind: str = "sparsemap",
        cost: float | Tensor | None = None,
        mask: Mask = None,
        lengths: Lengths = None,
        known: Tensor | None = None,
    ) -> Tensor:
        """How far the scores are from preferring the target, `(*batch,)`: see `FactorGraph.loss`.

        Args:
            scores: `(*batch, *axes)`.
            target: a 0/1 structure of the same shape; 0 where masked.
            kind: "sparsemap", "hinge" or "perceptron".
            cost: of "hinge", for an entry that differs: a number (1 by default), or one for each
                entry, broadcastable to the target.
            mask: as in `forward`.
            lengths: as in `forward`.
            known: boolean, broadcastable to the target: where it is False the target is not known.

        Raises:
            GraphError: if the target is no structure of the layer.
        """
        fg, u, layout = self._build(scores, mask, lengths)
        if tuple(target.shape) != tuple(scores.shape):
            raise ShapeError(
                f"{self._name}: the target must have the shape of the scores, "
                f"{tuple(scores.shape)}, got {tuple(target.shape)}."
            )
        if isinstance(cost, Tensor):
            cost = layout.apply(cost.expand(target.shape))
        if known is not None:
            known = layout.apply(known.expand(target.shape))
        targets = {u: layout.apply(target)}
        losses = fg.loss(targets, kind, cost=cost, mask=known, **self._options())
        return losses  # type: ignore[no-any-return]

    @torch.no_grad()
    def predict(
        self,
        scores: Tensor,
        *,
        kind: str = "sparsemap",
        mask: Mask = None,
        lengths: Lengths = None,
        exact: bool = False,
    ) -> Tensor:
        r"""The structure with the least loss, `(*batch, *axes)`, without gradients.

        For "hinge" and "perceptron" this is the best structure (MAP). "sparsemap" asks of an entry
        a score of 1 to be on, and of 0 to be off, so that it decides at ½: it takes the structure
        with the greatest score less ½‖y‖². Where all structures have as many entries on, as trees
        have, that is the same one.

        Args:
            scores: `(*batch, *axes)`.
            kind: the loss it was trained with.
            mask: as in `forward`.
            lengths: as in `forward`.
            exact: by default the relaxation is solved (LP-MAP), which can leave entries open, as
                fractions. True: search for the best 0/1 structure (`FactorGraph.decode`).
        """
        if kind not in KINDS:
            raise GraphError(f"{self._name}: kind must be one of {KINDS}, got {kind!r}.")
        fg, u, layout = self._build(scores, mask, lengths, 0.5 if kind == "sparsemap" else 0.0)
        if exact:
            fg.decode(**self._options())
        else:
            fg.solve_map(**self._options())
        return layout.undo(u.value)  # type: ignore[arg-type]

    # ---- for subclasses --------------------------------------------------------------------------

    def add_factors(self, fg: FactorGraph, u: Variable, present: Tensor | None) -> None:
        """Adds what the variables have to obey.

        Args:
            fg: the graph, with all dimensions of the batch.
            u: the variables, of the shape of `axes`.
            present: which of them are there, `(*batch, *axes)`; None for all.
        """
        raise NotImplementedError(f"{self._name} must define add_factors(self, fg, u, present).")

    def layout(self, scores: Tensor, present: Tensor | None) -> Layout:
        """How the scores are laid out for the graph: as they come."""
        return Layout()

    def scaled(self, scores: Tensor) -> Tensor:
        """Scores, divided by the temperature; for the scores of factors."""
        return scores if self._temperature == 1 else scores / self._temperature

    def check_scores(self, scores: Tensor) -> None:
        """Raises unless the scores have the right shape."""
        if not isinstance(scores, Tensor):
            raise GraphError(f"{self._name} takes a torch tensor, got {type(scores).__name__}.")
        shape, wanted = tuple(scores.shape), f"(*batch, {', '.join(self.axes)})"
        if scores.ndim < len(self.axes):
            raise ShapeError(f"{self._name}: scores must have shape {wanted}, got {shape}.")
        own = shape[scores.ndim - len(self.axes) :]
        if len(set(zip(self.axes, own, strict=True))) > len(set(self.axes)):
            raise ShapeError(f"{self._name}: scores must be square, {wanted}, got {shape}.")

    def _build(
        self, scores: Tensor, mask: Mask, lengths: Lengths, less: float = 0.0
    ) -> tuple[FactorGraph, Variable, Layout]:
        """The graph of these scores (so much less), its variables, and how they are laid out."""
        self.check_scores(scores)
        present = presence(self._name, scores, self.axes, mask, lengths)
        layout = self.layout(scores, present)
        own_mask = None if present is None else layout.apply(present)
        fg = FactorGraph(batch_dims=scores.ndim - len(self.axes))
        own_scores = self.scaled(layout.apply(scores))
        if less != 0:
            own_scores = own_scores - less
        u = fg.variable_from(own_scores, mask=own_mask, name="scores")
        self.add_factors(fg, u, own_mask)
        return fg, u, layout

    def _options(self) -> dict[str, Any]:
        return {"tol": self.tol, "max_iter": self.max_iter, "on_failure": self.on_failure}

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _repr_parts(self) -> list[str]:
        """What `extra_repr` says besides what all layers share."""
        return []

    def extra_repr(self) -> str:
        """The settings, as they would be given."""
        parts = [*self._repr_parts(), f"temperature={self.temperature:g}"]
        return ", ".join(parts + ["eval_map=True"] * self.eval_map)
