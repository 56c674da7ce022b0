"""How a query ended, in words that say what to do."""

from __future__ import annotations

from enum import Enum

from factormax import _core

__all__ = ["Status"]


class Status(Enum):
    """How a query ended; the value is the advice.

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
    INTERRUPTED = "The solve was stopped from outside; the values are not a solution."
    STALLED = (
        "No further progress was possible in double precision before the tolerance was met. "
        "Scale the scores down."
    )

    NOT_PROVED = (
        "The search ended before the best structure was proved to be the best. "
        "Raise `max_nodes` or `time_limit`; `upper_bound` tells how far off it may be."
    )
    INVALID = (
        "A score, mask or parameter that was traced by JAX makes no sense (NaN, +inf, a negative "
        "count); the values are NaN. Outside of jax.jit the same call raises, and names it."
    )

    @property
    def code(self) -> int:
        """The number by which the core knows the status."""
        return _CODES[self]

    @classmethod
    def from_code(cls, code: int) -> Status:
        """The status of a code of the core."""
        return _MEMBERS[code]


_CODES = {
    Status.CONVERGED: int(_core.Status.converged),
    Status.MAX_ITER: int(_core.Status.max_iter),
    Status.INFEASIBLE: int(_core.Status.infeasible),
    Status.INTERRUPTED: int(_core.Status.interrupted),
    Status.STALLED: int(_core.Status.stalled),
    Status.NOT_PROVED: int(_core.Status.not_proved),
    Status.INVALID: 1 + max(map(int, _core.Status)),  # the core is never asked
}
_MEMBERS = {code: status for status, code in _CODES.items()}
