"""How a query ended, and what to do about it."""

from __future__ import annotations

from enum import Enum

from factormax import _core

__all__ = ["Status"]


class Status(Enum):
    """How a query ended; the value says what to do.

    Example:
        >>> from factormax import Status
        >>> Status.CONVERGED.value
        'Converged.'
    """

    CONVERGED = "Converged."
    MAX_ITER = (
        "The iterations ran out before the tolerance was met. "
        "Raise `max_iter`, loosen `tol`, or scale the scores down."
    )
    INFEASIBLE = (
        "No assignment satisfies all the factors (proved). "
        "Check budgets, counts and masks, or drop a factor; the values are NaN."
    )
    INTERRUPTED = "The solve was interrupted; the values are not a solution."
    STALLED = (
        "No further progress was possible in double precision before the tolerance was met. "
        "Scale the scores down."
    )

    NOT_PROVED = (
        "The search ended before any structure was proved to be the best. "
        "Raise `max_nodes` or `time_limit`; `upper_bound` tells how far off it may be."
    )
    INVALID = (
        "A score, mask or parameter that was traced by JAX is invalid (NaN, +inf, a negative "
        "count); the values are NaN. Outside jax.jit the same call raises an error that names it."
    )

    @property
    def code(self) -> int:
        """The number that stands for the status in the core."""
        return _CODES[self]

    @classmethod
    def from_code(cls, code: int) -> Status:
        """The status that a code stands for."""
        return _MEMBERS[code]


_CODES = {
    Status.CONVERGED: int(_core.Status.converged),
    Status.MAX_ITER: int(_core.Status.max_iter),
    Status.INFEASIBLE: int(_core.Status.infeasible),
    Status.INTERRUPTED: int(_core.Status.interrupted),
    Status.STALLED: int(_core.Status.stalled),
    Status.NOT_PROVED: int(_core.Status.not_proved),
    Status.INVALID: 1 + max(map(int, _core.Status)),  # not known to the core
}
_MEMBERS = {code: status for status, code in _CODES.items()}
