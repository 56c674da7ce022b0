"""What all drawings share: colours, axes, and the conversion of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from factormax.arrays import ArrayLike, FloatArray, is_hidden, to_numpy
from factormax.errors import FactormaxError, GraphError, ShapeError
from factormax.factors.structured import StructuredFactor
from factormax.variable import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Blue and orange can be told apart by the colour-blind, too (Okabe and Ito's blue and vermilion).
INK = "#222222"
PALE = "#8C8C8C"
FAINT = "#E4E4E4"
ABSENT = "#F1F1F1"
BLUE = "#0072B2"
ORANGE = "#D55E00"
SHOWN = 1e-3  # smaller weights are not drawn


def pyplot() -> Any:
    """The module `matplotlib.pyplot`.

    Raises:
        ImportError: if matplotlib is not installed; the message says how to install it.
    """
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError(
            'factormax.plot needs matplotlib: pip install "factormax[plot]".'
        ) from error
    return plt


def axes_for(ax: Axes | None, width: float, height: float) -> Any:
    """Returns `ax`, or else the axes of a new figure of this size, in inches."""
    plt = pyplot()
    if ax is not None:
        if not hasattr(ax, "transAxes"):
            raise TypeError(f"ax must be a matplotlib Axes, got {type(ax).__name__}.")
        return ax
    _, new = plt.subplots(figsize=(width, height), layout="constrained")
    return new


def numbers_of(what: str, given: Any, ndims: Sequence[int], shape: str) -> FloatArray:
    """The numbers of an array, a variable that has a value, or a structured factor's variable.

    Raises:
        ShapeError: unless their number of dimensions is in `ndims`.
        GraphError: if they are traced, or not between 0 and 1.
    """
    source: Any = given
    if isinstance(source, StructuredFactor) and len(source._given) == 1:
        source = source._given[0]
    label = what
    if isinstance(source, Variable):
        label, source = f"{what} of {source.name}", source.value
    if is_hidden(source):
        raise GraphError(f"{label}: there are no numbers to draw inside a transform.")
    values = as_floats(label, source)
    if values.ndim not in ndims:
        batched = isinstance(given, (Variable, StructuredFactor)) and values.ndim > max(ndims)
        hint = " Pick an instance of the batch, as in u.value[0]." if batched else ""
        raise ShapeError(f"{label}: the shape must be {shape}, got {values.shape}.{hint}")
    known = values[np.isfinite(values)]
    if known.size and not -1e-3 <= known.min() <= known.max() <= 1 + 1e-3:
        raise GraphError(
            f"{label}: the values must be between 0 and 1, got numbers from {known.min():.3g} to "
            f"{known.max():.3g}. Are they scores?"
        )
    return values


def as_floats(label: str, given: ArrayLike) -> FloatArray:
    """The argument as a NumPy array of floats."""
    try:
        return np.asarray(to_numpy(given), dtype=np.float64)
    except FactormaxError:
        raise
    except (TypeError, ValueError) as error:
        raise ShapeError(
            f"{label}: give an array of numbers, a variable or a structured factor, got "
            f"{type(given).__name__}."
        ) from error


def masked(what: str, values: FloatArray, mask: ArrayLike | None, given: Any = None) -> FloatArray:
    """The values, with NaN where the mask (by default that of the variable) is False."""
    if mask is None:
        mask = mask_of(given, values.shape)
    if mask is None:
        return values
    flags = np.asarray(to_numpy(mask)).astype(bool)
    try:
        return np.where(np.broadcast_to(flags, values.shape), values, np.nan)
    except ValueError:
        raise ShapeError(
            f"{what}: the mask must be broadcastable to {values.shape}, got {flags.shape}."
        ) from None


def mask_of(given: Any, shape: tuple[int, ...]) -> Any:
    """The mask of a variable, or a structured factor's, spread to this shape; None without one."""
    if isinstance(given, StructuredFactor) and len(given._given) == 1:
        given = given._given[0]
    if not isinstance(given, Variable):
        return None
    tensor = given._record.tensors[given.position]
    if tensor.mask is None or is_hidden(tensor.mask):
        return None
    batch = shape[: len(shape) - given.ndim]
    full = np.broadcast_to(to_numpy(tensor.mask), (*batch, *tensor.shape))
    return full.reshape(*batch, tensor.size)[..., given.index - tensor.start].reshape(shape)


def labels_for(what: str, word: str, given: Sequence[object] | None, size: int) -> list[str] | None:
    """The labels as strings; None if none are given.

    Raises:
        ShapeError: unless there are `size` of them.
    """
    if given is None:
        return None
    texts = [str(label) for label in given]
    if len(texts) != size:
        raise ShapeError(f"{what}: {word} must have {size} labels, got {len(texts)}.")
    return texts


def colour_map() -> Any:
    """A colour map from white (0) to blue (1), with grey for absent entries."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("factormax", ["white", BLUE])
    return colours.with_extremes(bad=ABSENT)


def number_text(value: float) -> str:
    """Two digits, without the leading zero: ".35", "1"."""
    text = f"{value:.2f}"
    return {"1.00": "1", "0.00": "0"}.get(text, text.removeprefix("0"))


def hide_frame(ax: Any) -> None:
    """Hides the frame and the tick marks."""
    ax.spines[:].set_visible(False)
    ax.tick_params(which="both", length=0, colors=INK)
