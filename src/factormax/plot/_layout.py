"""Where the variables and factors of a graph go in its drawing; deterministic.

A tensor of variables is drawn in its shape. A factor over a row of a matrix is placed to the left
of it, one over a column below it, one over a vector in the lanes below it, and one over a whole
block of cells as an outline around them. All others are placed in the middle of their variables, or
as close to it as there is room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from factormax._describe import graph_label
from factormax.arrays import FloatArray, IndexArray

if TYPE_CHECKING:
    from factormax.factors.base import BaseFactor
    from factormax.graph import FactorGraph
    from factormax.record import VariableTensor

__all__ = ["RADIUS", "Layout", "Square", "lay_out", "squares_of"]

RADIUS = 0.28  # of a variable
STEP_X, STEP_Y = 1.5, 1.15  # from one variable to the next
HALF_HEIGHT = 0.2  # of a factor
LANE = 0.75  # from one lane of factors to the next
#: The spans that are taken, by side of a block and number of the lane.
Lanes = dict[tuple[str, int], list[tuple[float, float]]]
_MOST_EDGES = 12  # of a factor over a whole vector; more become an outline
_BENDS = (0.0, 0.12, -0.12, 0.22, -0.22, 0.34, -0.34)  # of an edge, relative to its length


@dataclass(eq=False)
class Square:
    """A single factor; one call may make several."""

    factor: BaseFactor
    label: str
    members: IndexArray  # numbers of its variables
    negated: Any  # which of them are negated
    centre: FloatArray = field(default_factory=lambda: np.zeros(2))
    outline: tuple[float, float, float, float] | None = None  # left, bottom, width, height
    #: The control points of its edges to the members, `(members, 2)`; none with an outline.
    controls: FloatArray = field(default_factory=lambda: np.zeros((0, 2)))

    @property
    def half_width(self) -> float:
        """Half the width of its box, which holds the label."""
        return 0.12 + 0.055 * len(self.label)


@dataclass(eq=False)
class Layout:
    """The centres of the variables, `(N, 2)`; the factors; and where each tensor's name goes."""

    places: FloatArray
    squares: list[Square]
    names: list[tuple[str, float, float]]

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, right, bottom and top of everything."""
        xs = [*self.places[:, 0] - RADIUS, *self.places[:, 0] + RADIUS]
        ys = [*self.places[:, 1] - RADIUS, *self.places[:, 1] + RADIUS]
        for s in self.squares:
            xs += [s.centre[0] - s.half_width, s.centre[0] + s.half_width]
            ys += [s.centre[1] - HALF_HEIGHT, s.centre[1] + HALF_HEIGHT]
            if s.outline is not None:
                left, bottom, width, height = s.outline
                xs += [left, left + width]
                ys += [bottom, bottom + height]
            for member, control in zip(s.members, s.controls, strict=False):
                curve = _curve(s.centre, control, self.places[member])
                xs += curve[:, 0].tolist()
                ys += curve[:, 1].tolist()
        xs += [x - 0.1 - 0.17 * len(name) for name, x, _ in self.names]
        ys += [y for _, _, y in self.names]
        return min(xs), max(xs), min(ys), max(ys)


def squares_of(graph: FactorGraph) -> list[Square]:
    """Every single factor, not yet placed."""
    found = []
    for factor in graph._factors:
        index, negated = factor._index, factor._negated
        flags = np.zeros(index.shape, bool) if negated is None else negated
        found += [
            Square(factor, graph_label(factor, k), index[k], flags[k]) for k in range(len(index))
        ]
    return found


def lay_out(graph: FactorGraph) -> Layout:
    """Places everything, from top to bottom."""
    places = np.zeros((graph._num_variables, 2))
    squares = squares_of(graph)
    names: list[tuple[str, float, float]] = []
    owners = np.concatenate(
        [np.full(t.size, k) for k, t in enumerate(graph._tensors)] or [np.zeros(0, int)]
    )
    later: list[Square] = []
    top = 0.0
    for k, tensor in enumerate(graph._tensors):
        own = slice(tensor.start, tensor.start + tensor.size)
        if tensor.size == 0:
            continue
        places[own] = _block(tensor) + np.array([0, top])
        inside = [s for s in squares if (owners[s.members] == k).all()]
        bottom = _place_inside(inside, places, tensor, later)
        beside = [_left(s) for s in inside if s not in later]
        left = min([places[own][:, 0].min() - RADIUS, *beside])
        names.append((tensor.name, left - 0.15, top))
        top = bottom - 2.0
    across = [s for s in squares if len(set(owners[s.members].tolist())) > 1]
    placed = [s for s in squares if s not in later and s not in across]
    for square in later + across:
        _place_near(square, places, placed)
        placed.append(square)
    for square in squares:
        if square.outline is None:
            strangers = np.delete(places, square.members, axis=0)
            ends = places[square.members]
            square.controls = np.array([_control(square.centre, end, strangers) for end in ends])
    return Layout(places, squares, names)


def _left(square: Square) -> float:
    if square.outline is not None:
        return square.outline[0]
    return float(square.centre[0]) - square.half_width


def _block(tensor: VariableTensor) -> FloatArray:
    """The places of the variables of a tensor, row below row, panel beside panel."""
    rows, columns = (1, 1, *tensor.shape)[-2:]
    number = np.arange(tensor.size)
    panel, row, column = np.unravel_index(number, (tensor.size // (rows * columns), rows, columns))
    x = column * STEP_X + panel * _panel_width(tensor)
    return np.stack([x, -row * STEP_Y], axis=1)


def _panel_width(tensor: VariableTensor) -> float:
    """The distance from one matrix of a tensor to the next, with room for factors over rows."""
    columns = (1, *tensor.shape)[-1]
    return (columns + 1.5) * STEP_X


def _place_inside(
    squares: list[Square], places: FloatArray, tensor: VariableTensor, later: list[Square]
) -> float:
    """Places factors whose variables are all in one tensor; returns how far down they reach.

    Those that only fit among its variables are added to `later`.
    """
    block = places[tensor.start : tensor.start + tensor.size]
    bottom = block[:, 1].min()
    flat = len(np.unique(block[:, 1])) == 1
    taken: Lanes = {}
    outlined: list[Square] = []
    lowest = bottom
    for square in squares:
        own = places[square.members]
        lines = len(np.unique(own[:, 1].round(6))), len(np.unique(own[:, 0].round(6)))
        several = len(own) > 2
        if _is_whole(own, block) and (min(lines) > 1 or len(own) > _MOST_EDGES):
            within = [s for s in outlined if np.isin(square.members, s.members).any()]
            _outline(square, own, len(within))
            outlined.append(square)
        elif flat and (several or _covers_others(own, block)):
            lane = _free_lane(square, own[:, 0].mean(), taken, "below")
            square.centre = np.array([own[:, 0].mean(), bottom - RADIUS - LANE * (1 + lane)])
        elif not flat and several and lines[0] == 1:
            panel = int(own[0, 0] / _panel_width(tensor) + 1e-6)
            lane = _free_lane(square, float(own[0, 1]), taken, f"left of {panel}")
            left = panel * _panel_width(tensor)
            square.centre = np.array([left - 1.2 - 1.3 * lane, own[0, 1]])
        elif not flat and several and lines[1] == 1:
            lane = _free_lane(square, float(own[0, 0]), taken, "below")
            square.centre = np.array([own[0, 0], bottom - RADIUS - LANE * (1 + lane)])
        else:
            later.append(square)
            continue
        low = square.centre[1] if square.outline is None else square.outline[1]
        lowest = min(lowest, low)
    return float(lowest)


def _is_whole(own: FloatArray, block: FloatArray) -> bool:
    """Whether the variables fill the block that they span."""
    low, high = own.min(axis=0) - 1e-6, own.max(axis=0) + 1e-6
    return int(((block >= low) & (block <= high)).all(axis=1).sum()) == len(own)


def _covers_others(own: FloatArray, block: FloatArray) -> bool:
    """Whether other variables lie between these variables of a vector."""
    between = (block[:, 0] > own[:, 0].min()) & (block[:, 0] < own[:, 0].max())
    return bool(between.any())


def _free_lane(square: Square, place: float, taken: Lanes, side: str) -> int:
    """The first lane that has room for the box centred at `place`."""
    half = square.half_width if side == "below" else HALF_HEIGHT
    lane = 0
    while True:
        spans = taken.setdefault((side, lane), [])
        if all(place + half < a or b < place - half for a, b in spans):
            spans.append((place - half, place + half))
            return lane
        lane += 1


def _outline(square: Square, own: FloatArray, outlines: int) -> None:
    pad = RADIUS + HALF_HEIGHT + 0.06 + 0.12 * outlines
    low, high = own.min(axis=0) - pad, own.max(axis=0) + pad
    width, height = high - low
    square.outline = (float(low[0]), float(low[1]), float(width), float(height))
    # On the upper edge, beside the labels of the outlines inside it.
    square.centre = np.array([high[0] - square.half_width - 0.15 - 1.3 * outlines, high[1]])


def _place_near(square: Square, places: FloatArray, placed: list[Square]) -> None:
    """Places a factor in the middle of its variables, or at the nearest free spot."""
    middle = places[square.members].mean(axis=0)
    if len(square.members) == 1:
        middle = middle - np.array([0, RADIUS + HALF_HEIGHT + 0.2])
    steps = np.arange(-24, 25)
    grid = np.stack(np.meshgrid(steps * STEP_X / 4, steps * STEP_Y / 4, indexing="ij"), -1)
    spots = grid.reshape(-1, 2)
    # Nearest first; among equally near ones, below and to the right.
    order = np.lexsort((-spots[:, 0], spots[:, 1], np.hypot(*spots.T).round(6)))
    for spot in middle + spots[order]:
        if _is_free(spot, square.half_width, places, placed):
            square.centre = spot
            return
    square.centre = middle  # no free spot


def _is_free(spot: FloatArray, half_width: float, places: FloatArray, placed: list[Square]) -> bool:
    gaps = np.maximum(np.abs(places - spot) - [half_width, HALF_HEIGHT], 0)
    if (np.hypot(*gaps.T) < RADIUS + 0.04).any():
        return False
    for other in placed:
        dx, dy = np.abs(other.centre - spot)
        if dx < half_width + other.half_width + 0.05 and dy < 2 * HALF_HEIGHT + 0.05:
            return False
    return True


def _control(start: FloatArray, end: FloatArray, strangers: FloatArray) -> FloatArray:
    """The control point of an edge that bends only as much as needed to clear other variables."""
    along = end - start
    aside = np.array([-along[1], along[0]])
    middle = (start + end) / 2
    for bend in _BENDS:
        control = middle + 2 * bend * aside
        gaps = _curve(start, control, end)[:, None, :] - strangers[None, :, :]
        if not len(strangers) or np.hypot(gaps[..., 0], gaps[..., 1]).min() > RADIUS + 0.03:
            return control
    return middle


def _curve(start: FloatArray, control: FloatArray, end: FloatArray) -> FloatArray:
    """Points of an edge, `(25, 2)`."""
    steps = np.linspace(0, 1, 25)[:, None]
    found = (1 - steps) ** 2 * start + 2 * steps * (1 - steps) * control + steps**2 * end
    return np.asarray(found)
