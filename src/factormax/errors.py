"""Errors and warnings. Each names the object, what was expected, what it got, and the remedy."""

from __future__ import annotations

from typing import Any

__all__ = [
    "FactormaxError",
    "GraphError",
    "GraphWarning",
    "InfeasibleError",
    "NotConvergedError",
    "NotConvergedWarning",
    "ShapeError",
    "VariableIndexError",
]


class FactormaxError(Exception):
    """Base class of all factormax errors."""


class GraphError(FactormaxError, ValueError):
    """The graph, or an argument of a query, is invalid."""


class ShapeError(GraphError):
    """An array has a shape that does not fit."""


class VariableIndexError(GraphError, IndexError):
    """An index does not fit the variable it is applied to."""


class GraphWarning(UserWarning):
    """The graph is probably not what was meant."""


class NotConvergedError(FactormaxError, RuntimeError):
    """A query did not reach an answer. `solution` is what it did reach, or None."""

    def __init__(self, message: str, solution: Any = None) -> None:
        super().__init__(message)
        self.solution = solution


class InfeasibleError(NotConvergedError, ValueError):
    """No assignment can satisfy the factors."""


class NotConvergedWarning(UserWarning):
    """A query did not reach an answer, and `on_failure="warn"`."""
