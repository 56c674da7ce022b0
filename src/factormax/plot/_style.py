"""What all drawings share: colours, axes, and how arrays are taken."""

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

# Colours that the colour-blind tell apart too (Okabe and Ito's blue and vermilion).
INK = "#222222"
PALE = "#8C8C8C"
FAINT = "#E4E4E4"
ABSENT = "#F1F1F1"
BLUE = "#0072B2"
ORANGE = "#D55E00"
SHOWN = 1e-3  # what has less weight is not drawn


def pyplot() -> Any:
    """The pyplot of matplotlib.

    Raises:
        ImportError: if it is not installed, with the remedy.
    """
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError(
            'factormax.plot needs matplotlib: pip install "factormax[plot]".'
        ) from error
    return plt


def axes_for(ax: Axes | None, width: float, height: float) -> Any:
    """`ax`, or one in a new figure of this size, in inches."""
    plt = pyplot()
    if ax is not None:
        if not hasattr(ax, "transAxes"):
            raise TypeError(f"ax must be an Axes of matplotlib, got {type(ax).__name__}.")
        return ax
    _, new = plt.subplots(figsize=(width, height), layout="constrained")
    return new


def numbers_of(what: str, given: Any, ndims: Sequence[int], shape: str) -> FloatArray:
    """The numbers of an array, of a variable that has a value, or of a structured factor's.

    Raises:
        ShapeError: unless they have as many dimensions as one of `ndims`.
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
    """An array of floats of NumPy."""
    try:
        return np.asarray(to_numpy(given), dtype=np.float64)
    except FactormaxError:
        raise
    except (TypeError, ValueError) as error:
        raise ShapeError(
            f"{label}: an array of numbers, a variable or a structured factor is needed, got "
            f"{type(given).__name__}."
        ) from error


def masked(what: str, values: FloatArray, mask: ArrayLike | None, given: Any = None) -> FloatArray:
    """The values, with NaN where the mask is False; by default that of the variable given."""
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
    """The mask of a variable, or of a structured factor's, whose value has this shape; or None."""
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
    """The labels as texts; None without any.

    Raises:
        ShapeError: unless there is one for each.
    """
    if given is None:
        return None
    texts = [str(label) for label in given]
    if len(texts) != size:
        raise ShapeError(f"{what}: {word} must name all {size}, got {len(texts)}.")
    return texts


def colour_map() -> Any:
    """From white, for 0, to blue, for 1; grey for what is absent."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("factormax", ["white", BLUE])
    return colours.with_extremes(bad=ABSENT)


def number_text(value: float) -> str:
    """Two digits, without the leading zero: ".35", "1"."""
    text = f"{value:.2f}"
    return {"1.00": "1", "0.00": "0"}.get(text, text.removeprefix("0"))


def hide_frame(ax: Any) -> None:
    """Takes the box and the marks of the ticks away."""
    ax.spines[:].set_visible(False)
    ax.tick_params(which="both", length=0, colors=INK)
