"""Dependency trees: arcs over words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from factormax.arrays import ArrayLike
from factormax.errors import ShapeError
from factormax.factors.structured import StructuredFactor
from factormax.plot._style import (
    BLUE,
    INK,
    SHOWN,
    as_floats,
    axes_for,
    labels_for,
    number_text,
    numbers_of,
)
from factormax.variable import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["tree"]

_SURE = "#9AA2AA"  # arcs that are certain
_FLAT = 0.42  # the height of an arc, relative to its width


def tree(
    u: ArrayLike | Variable | StructuredFactor,
    ax: Axes | None = None,
    *,
    words: Sequence[object] | None = None,
    highlight: ArrayLike | None = None,
    numbers: bool = True,
) -> Axes:
    """Draws a dependency tree, or the marginals of one: an arc from each head to its modifier.

    Certain arcs are grey; uncertain ones are blue, and fainter the less weight they have. A line
    from above marks a word whose head is the root.

    Args:
        u: `(n, n)`, laid out as for `DepTree`: `u[m, h]` if the head of word m is h, `u[m, m]` if
            it is the root; an array, or a variable or a `DepTree` that has a value.
        ax: where to draw; by default a new figure.
        words: the words.
        highlight: `(n, n)`, boolean: the arcs to draw in blue; by default all uncertain ones.
        numbers: whether to write the weights of uncertain arcs.

    Returns:
        The axes.

    Raises:
        ShapeError: if `u` is not square, or there are not n words.
        GraphError: if the values are not between 0 and 1, or there are none yet.
    """
    values = numbers_of("tree", u, (2,), "(n, n)")
    n = len(values)
    if values.shape != (n, n):
        raise ShapeError(f"tree: the shape must be (n, n), got {values.shape}.")
    texts = labels_for("tree", "words", words, n) or [str(i) for i in range(n)]
    uncertain = (values > SHOWN) & (values < 1 - SHOWN)
    blue = uncertain
    if highlight is not None:
        blue = as_floats("tree: highlight", highlight) > 0.5
        if blue.shape != (n, n):
            raise ShapeError(f"tree: highlight must have shape {(n, n)}, got {blue.shape}.")
    arcs = [(int(m), int(h)) for m, h in np.argwhere(values > SHOWN)]
    arcs.sort(key=lambda arc: bool(blue[arc]))  # blue ones on top
    # As high as the widest arc, with room for its number; the root's lines reach up to it.
    top = max([_height(m, h) for m, h in arcs if m != h], default=0.3) + 0.25
    drawn = axes_for(ax, min(max(3.0, 0.95 * n), 14), min(max(1.4, 0.75 * top + 0.6), 6))
    for m, h in arcs:
        style = {"color": BLUE if blue[m, h] else _SURE, "linewidth": 1.9}
        if uncertain[m, h]:
            style["alpha"] = 0.3 + 0.7 * values[m, h]
        place = _draw_root(drawn, m, top, style) if m == h else _draw_arc(drawn, m, h, style)
        if numbers and uncertain[m, h]:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            text = number_text(values[m, h])
            drawn.text(*place, text, ha="center", va="center", fontsize=8, color=BLUE, bbox=box)
    for m, word in enumerate(texts):
        drawn.text(m, -0.08, word, ha="center", va="top", color=INK)
    drawn.set(xlim=(-0.6, n - 0.4), ylim=(-0.45, top + 0.1))
    drawn.axis("off")
    return drawn


def _height(m: int, h: int) -> float:
    return _FLAT * (abs(m - h) - 0.16)


def _draw_root(ax: Any, m: int, top: float, style: dict[str, Any]) -> tuple[float, float]:
    ax.plot([m, m], [0.08, top], **style)
    ax.plot(m, 0.1, "v", markersize=6, **style)
    return m, top - 0.1


def _draw_arc(ax: Any, m: int, h: int, style: dict[str, Any]) -> tuple[float, float]:
    from matplotlib.patches import Arc

    width, centre = abs(m - h) - 0.16, (m + h) / 2
    ax.add_patch(Arc((centre, 0.08), width, 2 * _height(m, h), theta2=180, **style))
    end = centre + np.sign(m - h) * width / 2
    ax.plot(end, 0.1, "v", markersize=6, **style)
    return centre, 0.08 + _height(m, h)
