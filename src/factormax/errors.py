"""What can go wrong. Every error names the object, what was expected, what came, and the remedy."""

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
    """Base class of all errors of factormax."""


class GraphError(FactormaxError, ValueError):
    """The graph is put together wrongly."""


class ShapeError(GraphError):
    """An array has a shape that does not fit."""


class VariableIndexError(GraphError, IndexError):
    """An index does not fit the variable it is applied to."""


class GraphWarning(UserWarning):
    """The graph is probably not put together as it was meant."""


class NotConvergedError(FactormaxError, RuntimeError):
    """A query did not reach an answer. `solution` holds what there is, where there is one."""

    def __init__(self, message: str, solution: Any = None) -> None:
        super().__init__(message)
        self.solution = solution


class InfeasibleError(NotConvergedError, ValueError):
    """No assignment can satisfy the factors."""


class NotConvergedWarning(UserWarning):
    """A query did not reach an answer, and `on_failure="warn"`."""
