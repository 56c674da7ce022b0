"""How many threads a batch may use."""

from __future__ import annotations

from factormax import _core
from factormax.checks import shown

__all__ = ["set_num_threads"]


def set_num_threads(threads: int | None) -> None:
    """Sets how many threads a batch may use, in this process; None restores one per core.

    Raises:
        ValueError: unless it is None or a whole number from 1 to 4096.
    """
    if threads is None:
        _core.set_num_threads(0)
        return
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 4096:
        raise ValueError(
            f"threads must be None or a whole number from 1 to 4096, got {shown(threads)}."
        )
    _core.set_num_threads(threads)
