"""The structures that make up a solution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from factormax.arrays import ArrayLike, FloatArray, to_numpy
from factormax.errors import GraphError, ShapeError
from factormax.factors import DepTree, Matching
from factormax.factors.structured import StructuredFactor
from factormax.plot._matching import matching
from factormax.plot._matrix import marginals
from factormax.plot._style import INK, PALE, as_floats, axes_for, labels_for, mask_of
from factormax.plot._tree import tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["structures"]

Drawing = Callable[..., Any]


def structures(
    factor: StructuredFactor | ArrayLike,
    ax: Axes | None = None,
    *,
    probs: ArrayLike | None = None,
    words: Sequence[object] | None = None,
    most: int = 6,
    draw: Drawing | None = None,
) -> Axes:
    """Draws the structures of a solution, the most probable first, each with its probability.

    Trees are drawn as arcs, matchings as lines, and everything else as cells, in grey where masked;
    `draw` overrides this. "(none)" marks a structure with nothing on.

    Args:
        factor: a structured factor after a query; or structures, `(K, *shape)`, with `probs`.
        ax: where to draw; by default a new figure. Each structure gets its own inset.
        probs: `(K,)`; required with structures, by default those of the factor.
        words: labels of the words of a tree, or of the positions of a sequence.
        most: draw at most this many; a line below says how many there are in total.
        draw: a function that draws one structure, called as `draw(structure, ax)` with a NumPy
            array.

    Returns:
        The axes; those of the structures are its `child_axes`.

    Raises:
        ShapeError: if structures and probabilities do not fit each other.
        GraphError: before any query, and for a batch.

    Example:
        >>> import numpy as np, factormax as fm
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable_from(np.array([0.4, 0.5, -0.2, 0.6]))
        >>> spans = fg.add(fm.SequenceBudget(u, 0.5, budget=2))
        >>> _ = fg.solve()
        >>> ax = fm.plot.structures(spans, words=["not", "good", "at", "all"])
        >>> len(ax.child_axes) == len(spans.probs)
        True
    """
    all_of_them, weights = _listed(factor, probs)
    if most < 1:
        raise GraphError(f"structures: most must be at least 1, got {most}.")
    shape = all_of_them.shape[1:]
    own_way = draw is not None
    if draw is None:
        draw = _drawing(factor, shape, np.tensordot(weights, all_of_them, 1), words)
    shown = min(len(weights), most)
    wide = isinstance(factor, DepTree) or len(shape) == 1
    columns = 1 if wide else min(shown, 3)
    lines = -(-shown // columns)
    width, height = _size(factor, shape, wide)
    drawn = axes_for(ax, min(width * columns + 0.4, 14), min(height * lines + 0.2, 14))
    drawn.axis("off")
    for k in range(shown):
        inset = drawn.inset_axes(_place(k, lines, columns, wide, words is not None))
        draw(all_of_them[k], inset)
        if wide:
            place = {"x": -0.02, "y": 0.5, "ha": "right", "va": "center"}
        else:
            place = {"x": 0.5, "y": 1.03, "ha": "center", "va": "bottom"}
        text = f"{weights[k]:.2f}" if weights[k] >= 0.005 else "< 0.01"
        style = {"fontsize": 13, "fontweight": "bold", "color": INK}
        if not own_way and not all_of_them[k].any():
            place["va"] = "bottom"
            aside = {"x": -0.02, "ha": "right", "va": "top"} if wide else {"x": 0.5, "ha": "center"}
            inset.text(y=0.5, s="(none)", transform=inset.transAxes, color=PALE, **aside)
        inset.text(s=text, transform=inset.transAxes, **place, **style)
    if shown < len(weights):
        rest = f"{shown} of {len(weights)}; the others have {weights[shown:].sum():.2f} in total"
        drawn.text(0.5, 0, rest, transform=drawn.transAxes, ha="center", va="top", color=PALE)
    return drawn


def _listed(factor: Any, probs: ArrayLike | None) -> tuple[FloatArray, FloatArray]:
    """Structures `(K, *shape)` and probabilities `(K,)`, without padding."""
    given, weights = factor, probs
    label = "structures"
    if isinstance(factor, StructuredFactor):
        label = f"structures of {factor.name}"
        given, weights = factor.structures, factor.probs if probs is None else probs
        if to_numpy(weights).ndim != 1:
            raise GraphError(
                f"{label}: there are several instances or factors: probs have shape "
                f"{to_numpy(weights).shape}. Pick one: structures(f.structures[0], "
                f"probs=f.probs[0])."
            )
    if weights is None:
        raise ShapeError("structures: without a factor, give probs, (K,), too.")
    found, chances = as_floats(label, given), as_floats("structures: probs", weights)
    if found.ndim not in (2, 3) or chances.shape != found.shape[:1]:
        raise ShapeError(
            f"{label}: structures must be (K, n) or (K, m, n) and probs (K,), got {found.shape} "
            f"and {chances.shape}."
        )
    kept = chances > 0
    if not kept.any():
        raise GraphError(f"{label}: there are none, because the instance is infeasible.")
    return found[kept], chances[kept]


def _drawing(
    factor: Any, shape: tuple[int, ...], mean: FloatArray, words: Sequence[object] | None
) -> Drawing:
    """How structures of this factor are drawn."""
    if isinstance(factor, DepTree):
        open_arcs = (mean > 1e-3) & (mean < 1 - 1e-3)

        def draw_tree(structure: FloatArray, ax: Axes) -> None:
            tree(structure, ax, words=words, highlight=open_arcs)

        return draw_tree
    if isinstance(factor, Matching):
        return matching
    there = mask_of(factor, shape)
    if len(shape) == 1:
        names = labels_for("structures", "words", words, *shape) or []

        def draw_strip(structure: FloatArray, ax: Any) -> None:
            marginals(structure[None], ax, numbers=False, mask=there)
            ax.set(xticks=[], yticks=[])
            for j, word in enumerate(names):
                colour = "white" if structure[j] > 0.6 else PALE
                ax.text(j, 0, word, ha="center", va="center", color=colour)

        return draw_strip

    def draw_cells(structure: FloatArray, ax: Any) -> None:
        marginals(structure, ax, numbers=False, rows=words, mask=there)
        ax.set_xticks([])
        if words is None:
            ax.set_yticks([])

    return draw_cells


def _size(factor: Any, shape: tuple[int, ...], wide: bool) -> tuple[float, float]:
    """The width and height of one structure, in inches."""
    n = shape[-1]
    if isinstance(factor, DepTree):
        return max(3.0, 0.9 * n) + 0.6, 1.5
    if wide:
        return max(3.0, 0.55 * n) + 0.6, 0.8
    return max(2.0, 0.32 * n + 0.4), max(1.7, 0.3 * shape[0] + 0.6)


def _place(k: int, lines: int, columns: int, wide: bool, named: bool) -> list[float]:
    """Left, bottom, width and height of the k-th inset, with room for its labels."""
    row, column = divmod(k, columns)
    left = 0.08 if wide else 0.0
    width, height = (1 - left) / columns, 1 / lines
    margin = 0.2 if named and not wide else 0.04
    return [
        left + (column + margin) * width,
        1 - (row + 0.94) * height,
        (0.96 - margin) * width,
        (0.88 if wide else 0.76) * height,
    ]
