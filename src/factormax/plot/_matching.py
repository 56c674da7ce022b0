"""Lines between two sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from factormax.arrays import ArrayLike, FloatArray
from factormax.errors import ShapeError
from factormax.factors.structured import StructuredFactor
from factormax.plot._style import (
    BLUE,
    INK,
    ORANGE,
    SHOWN,
    as_floats,
    axes_for,
    labels_for,
    numbers_of,
)
from factormax.variable import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["matching"]


def matching(
    u: ArrayLike | Variable | StructuredFactor,
    ax: Axes | None = None,
    *,
    left: Sequence[object] | None = None,
    right: Sequence[object] | None = None,
    points: tuple[ArrayLike, ArrayLike] | None = None,
    truth: ArrayLike | None = None,
    unmatched: ArrayLike | None = None,
) -> Axes:
    """Draws a matching: a line for every pair that has weight, darker where it has more.

    Args:
        u: `(m, n)`; an array, or a variable or a `Matching` that has a value.
        ax: where to draw; by default a new figure.
        left: labels of the rows, which are on the left, from top to bottom.
        right: labels of the columns.
        points: `(m, 2)` and `(n, 2)`: draw the two sets as points in the plane, side by side.
        truth: `(m, n)`, the true matching as 0 and 1: its pairs are blue, others orange, and a
            point without a partner in it is hollow.
        unmatched: `(m,)`: the weight with which each row is unmatched, drawn as a ring.

    Returns:
        The axes.

    Raises:
        ShapeError: if the shapes do not fit each other, or labels are missing.
        GraphError: if the values are not between 0 and 1, or there are none yet.
    """
    values = numbers_of("matching", u, (2,), "(m, n)")
    m, n = values.shape
    names = labels_for("matching", "left", left, m), labels_for("matching", "right", right, n)
    right_ones = np.ones((m, n), dtype=bool)
    if truth is not None:
        right_ones = _fitting("truth", truth, (m, n)) > 0.5
    alone = np.zeros(m) if unmatched is None else _fitting("unmatched", unmatched, (m,))
    if points is None:
        first, second = _columns(m, n)
        drawn = axes_for(ax, 3.4, min(max(2.0, 0.42 * max(m, n) + 0.4), 10))
    else:
        first, second = _planes(*points, m, n)
        drawn = axes_for(ax, 6.0, 2.8)
        drawn.set_aspect("equal")
    _lines(drawn, values, right_ones, first, second)
    has_partner: tuple[Any, Any] = (np.ones(m, bool), np.ones(n, bool))
    if truth is not None:
        has_partner = right_ones.any(axis=1), right_ones.any(axis=0)
    _rings(drawn, alone, first, ~has_partner[0] if truth is not None else np.ones(m, bool))
    for places, paired in zip((first, second), has_partner, strict=True):
        for chosen, fill in ((paired, INK), (~paired, "white")):
            style = {"facecolor": fill, "edgecolor": INK, "linewidth": 1.3}
            drawn.scatter(*places[chosen].T, s=42, zorder=5, clip_on=False, **style)
    for texts, places, side in zip(names, (first, second), (-1, 1), strict=True):
        _write(drawn, texts, places, side)
    drawn.margins(0.06)
    drawn.axis("off")
    return drawn


def _fitting(word: str, given: ArrayLike, shape: tuple[int, ...]) -> FloatArray:
    array = as_floats(f"matching: {word}", given)
    if array.shape != shape:
        raise ShapeError(f"matching: {word} must have shape {shape}, got {array.shape}.")
    return array


def _columns(m: int, n: int) -> tuple[FloatArray, FloatArray]:
    """The places of two columns of equal height, from the top."""
    tallest = max(m, n, 2) - 1

    def column(x: float, size: int) -> FloatArray:
        heights = np.linspace(0, -tallest, size) if size > 1 else np.full(size, -tallest / 2)
        return np.stack([np.full(size, x), heights], axis=1)

    return column(0, m), column(1, n)


def _planes(a: ArrayLike, b: ArrayLike, m: int, n: int) -> tuple[FloatArray, FloatArray]:
    """The places of both sets, centred, the second to the right of the first."""
    first, second = _fitting("points", a, (m, 2)), _fitting("points", b, (n, 2))

    def centred(places: FloatArray) -> tuple[FloatArray, float]:
        if not len(places):
            return places, 0.0
        low, high = places.min(axis=0), places.max(axis=0)
        return places - (low + high) / 2, float(high[0] - low[0])

    (first, width), (second, other) = centred(first), centred(second)
    second = second + np.array([0.75 * (width + other), 0.0])
    return first, second


def _lines(
    ax: Any,
    values: FloatArray,
    right: Any,
    first: FloatArray,
    second: FloatArray,
) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgba

    drawn = np.argwhere(values > SHOWN)
    drawn = drawn[np.argsort(values[tuple(drawn.T)], kind="stable")]  # the heaviest on top
    weights = np.clip(values[tuple(drawn.T)], 0, 1)
    colours = [
        to_rgba(BLUE if right[i, j] else ORANGE, 0.15 + 0.85 * w)
        for (i, j), w in zip(drawn, weights, strict=True)
    ]
    segments: Any = np.stack([first[drawn[:, 0]], second[drawn[:, 1]]], axis=1)
    ax.add_collection(
        LineCollection(segments, colors=colours, linewidths=0.9 + 1.5 * weights, zorder=2)
    )
    ax.autoscale_view()


def _rings(ax: Any, alone: FloatArray, places: FloatArray, right: Any) -> None:
    """Draws a ring around unmatched rows, blue where that is right."""
    from matplotlib.colors import to_rgba

    chosen = np.flatnonzero(alone > SHOWN)
    colours = [
        to_rgba(BLUE if right[i] else ORANGE, 0.15 + 0.85 * min(alone[i], 1)) for i in chosen
    ]
    style = {"facecolors": "none", "edgecolors": colours, "linewidths": 2.0}
    ax.scatter(*places[chosen].T, s=190, zorder=4, clip_on=False, **style)


def _write(ax: Any, texts: list[str] | None, places: FloatArray, side: int) -> None:
    for text, place in zip(texts or [], places, strict=False):
        ax.annotate(
            text,
            place,
            (9 * side, 0),
            textcoords="offset points",
            ha="right" if side < 0 else "left",
            va="center",
            color=INK,
        )
