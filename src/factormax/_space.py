"""What flat arrays need of an array library, and NumPy's functions for it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

__all__ = ["NumpySpace", "Space"]


class Space(Protocol):
    """The functions of an array library that flat arrays need."""

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
        """An array of zeros."""

    @staticmethod
    def ones(shape: tuple[int, ...]) -> Any:
        """A boolean array, all True."""

    @staticmethod
    def joined(columns: list[Any]) -> Any:
        """Matrices side by side."""

    @staticmethod
    def spread(array: Any, shape: tuple[int, ...]) -> Any:
        """Broadcast to a shape."""

    @staticmethod
    def total(array: Any, axes: tuple[int, ...], keep: bool) -> Any:
        """Summed over some axes, at least one; with `keep` they stay, with size 1."""


class NumpySpace:
    """The `Space` of NumPy."""

    zeros = staticmethod(np.zeros)
    spread = staticmethod(np.broadcast_to)

    @staticmethod
    def ones(shape: tuple[int, ...]) -> Any:
        """A boolean array, all True."""
        return np.ones(shape, bool)

    @staticmethod
    def joined(columns: list[Any]) -> Any:
        """Matrices side by side."""
        return np.concatenate(columns, axis=1)

    @staticmethod
    def total(array: Any, axes: tuple[int, ...], keep: bool) -> Any:
        """Summed over some axes."""
        return np.asarray(array.sum(axis=axes, keepdims=keep))
