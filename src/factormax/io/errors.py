"""The error for a malformed file."""

from __future__ import annotations

from factormax.errors import FactormaxError

__all__ = ["UAIError"]


class UAIError(FactormaxError, ValueError):
    """A file that is not in the UAI format.

    Attributes:
        path: the file.
        line: the line number, counted from 1.
    """

    def __init__(self, message: str, path: str = "", line: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.line = line
