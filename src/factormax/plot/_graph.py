"""The factor graph itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from factormax.arrays import FloatArray, is_hidden, to_numpy
from factormax.errors import GraphError
from factormax.plot._layout import HALF_HEIGHT, RADIUS, Layout, Square, lay_out
from factormax.plot._style import INK, PALE, axes_for, colour_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from factormax.graph import FactorGraph

__all__ = ["graph"]

# A light tint for each kind of factor, in the order in which they are added.
_TINTS = ("#FBE3C4", "#CFE8F6", "#CDEBDF", "#F4D6E6", "#F8F2BE", "#E3E0F3", "#E6E6E6")
_EDGES = ("#B36B00", "#2A7FB0", "#00795A", "#A8528A", "#857A00", "#6A5FA8", "#666666")
_LEGIBLE = 5.0  # points; smaller text is left out


def graph(
    fg: FactorGraph,
    ax: Axes | None = None,
    *,
    instance: int | tuple[int, ...] | None = None,
    most: int = 300,
) -> Axes:
    """Draws a factor graph: variables as circles in the shape of their tensor, factors as boxes.

    A line joins a factor to each of its variables, and ends in a hollow dot if that is negated. A
    factor over a whole block of variables is an outline around them. After a query, the circles are
    shaded by value.

    Indices and labels are left out where they would be too small to read.

    The layout is deterministic: the same graph always looks the same.

    Args:
        fg: the graph.
        ax: where to draw; by default a new figure.
        instance: which instance of a batch to show the values of; by default none.
        most: the most variables and factors to draw.

    Returns:
        The axes.

    Raises:
        GraphError: if the graph is empty or too large, or the instance does not exist.
    """
    count = fg._num_variables + sum(f._count for f in fg._factors)
    if fg._num_variables == 0:
        raise GraphError("graph: the graph has no variables to draw.")
    if count > most:
        raise GraphError(
            f"graph: {count} variables and factors are too many to draw; fg.summary() lists them. "
            f"Draw a smaller graph of the same kind, or raise most={most}."
        )
    layout = lay_out(fg)
    left, right, bottom, top = layout.box
    width, height = right - left + 0.3, top - bottom + 0.3
    scale = min(0.72, 13 / width, 10 / height)  # inches per unit
    drawn = axes_for(ax, max(width * scale, 1.5), max(height * scale, 1.2))
    drawn.set(xlim=(left - 0.15, right + 0.15), ylim=(bottom - 0.15, top + 0.15))
    drawn.set_aspect("equal")
    drawn.axis("off")
    unit = _points_per_unit(drawn, width, height)
    _draw_factors(drawn, fg, layout, unit)
    _draw_variables(drawn, fg, layout, _values(fg, instance), unit)
    return drawn


def _points_per_unit(ax: Any, width: float, height: float) -> float:
    box = ax.get_window_extent()
    return float(min(box.width / width, box.height / height)) * 72 / float(ax.figure.dpi)


def _values(fg: FactorGraph, instance: int | tuple[int, ...] | None) -> FloatArray | None:
    """The values of all variables in an instance, NaN where masked; None if there are none."""
    if fg._record.values is None or (fg.batch_dims and instance is None):
        return None
    place = () if instance is None else instance if isinstance(instance, tuple) else (instance,)
    if len(place) != fg.batch_dims:
        raise GraphError(
            f"graph: instance={instance!r} is not an index into {fg.batch_dims} batch dimensions."
        )
    found = []
    for tensor, value in zip(fg._tensors, fg._record.values, strict=False):
        if is_hidden(value):
            return None
        numbers = np.asarray(to_numpy(value), float)
        try:
            one = numbers[place].copy()
            if tensor.mask is not None:
                full = np.broadcast_to(to_numpy(tensor.mask), numbers.shape)
                one[~full[place]] = np.nan
        except IndexError:
            raise GraphError(
                f"graph: instance={instance!r} is not in a batch of shape {fg.batch_shape}."
            ) from None
        found.append(one.ravel())
    flat = np.concatenate(found)
    return flat if len(flat) == fg._num_variables else None


def _draw_variables(
    ax: Any, fg: FactorGraph, layout: Layout, values: FloatArray | None, unit: float
) -> None:
    from matplotlib.patches import Circle

    colours = colour_map()
    longest = max([len(",".join(map(str, t.shape))) for t in fg._tensors])
    size = min(9.0, 2 * RADIUS * unit / (0.62 * max(longest, 2)))
    for tensor in fg._tensors:
        for k in range(tensor.size):
            place = layout.places[tensor.start + k]
            value = 0.0 if values is None else values[tensor.start + k]
            absent = np.isnan(value)
            style = {"edgecolor": INK}
            if absent:
                style = {"edgecolor": PALE, "linestyle": "--"}
            fill = colours(np.ma.masked_invalid(value))
            ax.add_patch(Circle(place, RADIUS, facecolor=fill, linewidth=1.1, zorder=3, **style))
            if size < _LEGIBLE:
                continue
            index = ",".join(str(int(i)) for i in np.unravel_index(k, tensor.shape))
            dark = not absent and value > 0.6
            colour = "white" if dark else PALE if absent else INK
            ax.text(*place, index, fontsize=size, color=colour, zorder=4, ha="center", va="center")
    for name, x, y in layout.names:
        points = max(min(12.0, 0.3 * unit), _LEGIBLE)
        look = {"fontsize": points, "fontstyle": "italic", "color": INK}
        ax.text(x, y, name, ha="right", va="center", **look)


def _draw_factors(ax: Any, fg: FactorGraph, layout: Layout, unit: float) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    kinds = list(dict.fromkeys(f.kind for f in fg._factors))
    for square in layout.squares:
        k = kinds.index(square.factor.kind) % len(_TINTS)
        tint, edge = _TINTS[k], _EDGES[k]
        if square.outline is None:
            _draw_edges(ax, square, layout.places, edge)
        else:
            left, bottom, width, height = square.outline
            style: Any = {"facecolor": "none", "edgecolor": edge, "linewidth": 1.4, "zorder": 1}
            rounded = "round,pad=0,rounding_size=0.2"
            ax.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle=rounded, **style))
        half, label = square.half_width, square.label
        size = min(9.0, 2 * half * unit / (0.6 * max(len(label), 3)))
        if size < _LEGIBLE:
            x, y = map(float, square.centre)
            corner = x - half, y - HALF_HEIGHT
            box = Rectangle(corner, 2 * half, 2 * HALF_HEIGHT, facecolor=tint, edgecolor=edge)
            ax.add_patch(box).set_zorder(5)
            continue
        style = {"boxstyle": "square,pad=0.3", "facecolor": tint, "edgecolor": edge}
        look = {"fontsize": size, "color": INK, "ha": "center", "va": "center", "zorder": 5}
        ax.text(*square.centre, label, bbox=style, **look)


def _draw_edges(ax: Any, square: Square, places: FloatArray, colour: str) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    for k, control in enumerate(square.controls):
        end = places[square.members[k]]
        path = Path([square.centre, control, end], [Path.MOVETO, Path.CURVE3, Path.CURVE3])
        ax.add_patch(PathPatch(path, fill=False, edgecolor=colour, linewidth=1.2, zorder=2))
        if square.negated[k]:
            towards = (control - end) / max(float(np.hypot(*(control - end))), 1e-9)
            dot = end + (RADIUS + 0.055) * towards
            style = {"markerfacecolor": "white", "markeredgecolor": colour, "zorder": 4}
            ax.plot(*dot, "o", markersize=5, **style)
