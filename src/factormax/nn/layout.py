"""How the scores of a batch are laid out for the graph, and its answers for the caller."""

from __future__ import annotations

from torch import Tensor, where
from torch.nn.functional import pad

from factormax.nn.padding import is_out_of_sight

__all__ = ["Layout", "ShorterFirst"]


class Layout:
    """Leaves the scores as they are."""

    def apply(self, x: Tensor) -> Tensor:
        """Converts from the layout of the scores to that of the graph."""
        return x

    def undo(self, x: Tensor) -> Tensor:
        """Converts from the layout of the graph to that of the scores."""
        return x


class ShorterFirst(Layout):
    """Makes rows the shorter side of every instance, by transposing those with more rows.

    If a batch has instances of both kinds, all are padded to a square.

    Args:
        scores: `(*batch, m, n)`.
        present: which pairs are present, in the same shape; None for all.
    """

    def __init__(self, scores: Tensor, present: Tensor | None) -> None:
        self.rows, self.columns = scores.shape[-2:]
        self.flip: Tensor | bool = self.rows > self.columns
        if present is not None:
            rows = present.any(dim=-1).sum(dim=-1)
            columns = present.any(dim=-2).sum(dim=-1)
            flip = rows > columns
            self.flip = flip[..., None, None]
            # One answer for all, if the numbers can be read and the padded sizes fit it too.
            if not is_out_of_sight(flip):
                if not flip.any() and self.rows <= self.columns:
                    self.flip = False
                elif flip.all() and self.rows >= self.columns:
                    self.flip = True

    def apply(self, x: Tensor) -> Tensor:
        """Transposes where there are more rows than columns."""
        if isinstance(self.flip, bool):
            return x.transpose(-1, -2) if self.flip else x
        size = max(self.rows, self.columns)
        # As numbers, because the code that Inductor makes of padded booleans does not compile.
        numbers = x if x.is_floating_point() else x.byte()
        square = pad(numbers, (0, size - self.columns, 0, size - self.rows)).to(x.dtype)
        return where(self.flip, square.transpose(-1, -2), square)

    def undo(self, x: Tensor) -> Tensor:
        """Transposes back."""
        if isinstance(self.flip, bool):
            return x.transpose(-1, -2) if self.flip else x
        square = where(self.flip, x.transpose(-1, -2), x)
        return square[..., : self.rows, : self.columns]
