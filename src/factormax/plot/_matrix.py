"""Vectors and matrices of marginals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from factormax.arrays import ArrayLike, FloatArray
from factormax.factors.structured import StructuredFactor
from factormax.plot._style import (
    BLUE,
    FAINT,
    INK,
    ORANGE,
    PALE,
    axes_for,
    colour_map,
    hide_frame,
    labels_for,
    masked,
    number_text,
    numbers_of,
)
from factormax.variable import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["attention", "marginals"]

_MOST_WITH_NUMBERS = 16  # with more rows or columns, cells are too small for numbers


def marginals(
    u: ArrayLike | Variable | StructuredFactor,
    ax: Axes | None = None,
    *,
    rows: Sequence[object] | None = None,
    columns: Sequence[object] | None = None,
    mask: ArrayLike | None = None,
    numbers: bool | None = None,
) -> Axes:
    """Draws marginals: as bars for a vector, as cells for a matrix.

    Args:
        u: `(n,)` or `(m, n)`; an array, or a variable that has a value.
        ax: where to draw; by default a new figure.
        rows: labels of the rows of a matrix.
        columns: labels of the columns, or of the entries of a vector.
        mask: False where absent, broadcastable to the shape; drawn in grey. By default the mask of
            the variable.
        numbers: whether to write the numbers that are not 0; by default if there is room.

    Returns:
        The axes.

    Raises:
        ShapeError: if there are not one or two dimensions, or not as many labels as entries.
        GraphError: if the values are not between 0 and 1, or there are none yet.
    """
    values = numbers_of("marginals", u, (1, 2), "(n,) or (m, n)")
    values = masked("marginals", values, mask, u)
    labels = labels_for("marginals", "columns", columns, values.shape[-1])
    if values.ndim == 1:
        return _bars(values, ax, labels, numbers)
    names = labels_for("marginals", "rows", rows, values.shape[0])
    return _cells(values, ax, names, labels, numbers)


def attention(
    weights: ArrayLike | Variable | StructuredFactor,
    ax: Axes | None = None,
    *,
    queries: Sequence[object] | None = None,
    keys: Sequence[object] | None = None,
    mask: ArrayLike | None = None,
    numbers: bool | None = None,
    sums: bool = True,
) -> Axes:
    """Draws how queries attend to keys: a heat map, and below it what each key receives in total.

    If a key receives more than 1, the excess is orange: this happens with softmax attention, but
    never with a matching.

    Args:
        weights: `(queries, keys)`; an array, or a variable that has a value.
        ax: where to draw; by default a new figure.
        queries: the labels of the queries, on the left.
        keys: the labels of the keys, on top.
        mask: False where absent, broadcastable to the shape; drawn in grey. By default the mask of
            the variable.
        numbers: whether to write the weights that are not 0; by default if there is room.
        sums: whether to draw the sums of the columns.

    Returns:
        The axes of the heat map; those of the sums are among its `child_axes`.

    Raises:
        ShapeError: if there are not two dimensions, or not as many labels as entries.
        GraphError: if the weights are not between 0 and 1, or there are none yet.
    """
    values = numbers_of("attention", weights, (2,), "(queries, keys)")
    values = masked("attention", values, mask, weights)
    names = labels_for("attention", "queries", queries, values.shape[0])
    labels = labels_for("attention", "keys", keys, values.shape[1])
    drawn: Any = _cells(values, ax, names, labels, numbers)
    drawn.xaxis.tick_top()
    drawn.xaxis.set_label_position("top")
    drawn.tick_params(length=0)
    for text in drawn.get_xticklabels():
        text.set_ha("left" if text.get_rotation() else "center")
    drawn.set_xlabel("keys")
    drawn.set_ylabel("queries")
    if sums:
        _sums(drawn, np.nansum(values, axis=0))
    return drawn


def _bars(
    values: FloatArray, ax: Axes | None, labels: list[str] | None, numbers: bool | None
) -> Axes:
    size = len(values)
    drawn = axes_for(ax, min(max(2.5, 0.55 * size + 0.8), 14), 2.4)
    drawn.bar(range(size), np.nan_to_num(values), width=0.72, color=BLUE)
    for i in np.flatnonzero(np.isnan(values)):
        drawn.axvspan(i - 0.45, i + 0.45, color=FAINT, linewidth=0)
    if numbers or (numbers is None and size <= _MOST_WITH_NUMBERS):
        for i in np.flatnonzero(values >= 0.005):
            drawn.text(i, values[i] + 0.03, number_text(values[i]), ha="center", color=INK)
    drawn.set(ylim=(0, 1.12), yticks=[0, 1], xlim=(-0.6, size - 0.4))
    _number(drawn.xaxis)
    if labels is not None:
        drawn.set_xticks(range(size), labels, rotation=35 if _are_long(labels, 7) else 0)
    drawn.spines[["top", "right"]].set_visible(False)
    drawn.spines[["bottom", "left"]].set_color(PALE)
    drawn.tick_params(length=0, colors=INK)
    return drawn


def _cells(
    values: FloatArray,
    ax: Axes | None,
    rows: list[str] | None,
    columns: list[str] | None,
    numbers: bool | None,
) -> Axes:
    m, n = values.shape
    drawn = axes_for(ax, min(max(2.4, 0.5 * n + 1.2), 12), min(max(2.0, 0.45 * m + 0.9), 12))
    drawn.imshow(values, cmap=colour_map(), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    drawn.set_xticks(np.arange(n + 1) - 0.5, minor=True)
    drawn.set_yticks(np.arange(m + 1) - 0.5, minor=True)
    lined = max(m, n) <= 60  # with more, the lines would hide the cells
    if lined:
        drawn.grid(which="minor", color=FAINT, linewidth=0.8)
    if numbers or (numbers is None and max(m, n) <= _MOST_WITH_NUMBERS):
        for i, j in np.argwhere(values >= 0.005):
            colour = "white" if values[i, j] > 0.6 else INK
            text = number_text(values[i, j])
            drawn.text(j, i, text, ha="center", va="center", color=colour, fontsize=9)
    tilted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    _number(drawn.xaxis)
    _number(drawn.yaxis)
    if columns is not None:
        drawn.set_xticks(range(n), columns, **(tilted if _are_long(columns, 5) else {}))
    if rows is not None:
        drawn.set_yticks(range(m), rows)
    hide_frame(drawn)
    if lined:  # the axes cut off the grid lines at their edges
        drawn.spines[:].set(visible=True, color=FAINT, linewidth=0.8)
    return drawn


def _sums(ax: Any, totals: FloatArray) -> None:
    """Draws bars below the columns; what exceeds 1 is orange."""
    below = ax.inset_axes([0, -0.24, 1, 0.2])
    places = range(len(totals))
    below.bar(places, np.minimum(totals, 1), width=0.72, color=PALE)
    over = np.where(totals > 1.01, totals - 1, 0)
    below.bar(places, over, bottom=1, width=0.72, color=ORANGE)
    below.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    top = max(1.5, float(totals.max(initial=0)) * 1.05)
    below.set(xlim=(-0.5, len(totals) - 0.5), ylim=(top, 0), xticks=[], yticks=[0, 1])
    below.set_ylabel("sum", color=INK)
    hide_frame(below)


def _number(axis: Any) -> None:
    """Puts whole numbers at the entries, not between them."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def _are_long(labels: list[str], most: int) -> bool:
    return max(map(len, labels), default=0) > most
