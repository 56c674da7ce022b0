"""The checks, and which of them fall to a case."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fuzz.agreement import check_batch, check_permuted, check_precision, check_torch, check_warm
from fuzz.case import Case
from fuzz.gradients import check_gradient, check_symmetry
from fuzz.judge import Failure, Reference, Run, Tally, strict
from fuzz.solving import check_solve, check_tight
from fuzz.whole import check_decode, check_map

__all__ = ["CHECKS", "QUERIES", "Failure", "Tally", "check"]


#: The checks, and how likely each is for graphs of each size.
CHECKS: dict[str, tuple[Callable[[Run], None], dict[str, float]]] = {
    "solve": (check_solve, {"small": 1.0, "mid": 1.0, "large": 1.0}),
    "tight": (check_tight, {"small": 0.6, "mid": 0.5, "large": 0.2}),
    "map": (check_map, {"small": 0.4, "mid": 0.4, "large": 0.2}),
    "decode": (check_decode, {"small": 0.35, "mid": 0.2, "large": 0.0}),
    "gradient": (check_gradient, {"small": 0.4, "mid": 0.3, "large": 0.1}),
    "symmetry": (check_symmetry, {"small": 0.3, "mid": 0.3, "large": 0.3}),
    "batch": (check_batch, {"small": 0.5, "mid": 0.5, "large": 0.5}),
    "warm": (check_warm, {"small": 0.2, "mid": 0.3, "large": 0.3}),
    "permuted": (check_permuted, {"small": 0.2, "mid": 0.3, "large": 0.3}),
    "precision": (check_precision, {"small": 0.2, "mid": 0.2, "large": 0.2}),
    "torch": (check_torch, {"small": 0.1, "mid": 0.1, "large": 0.1}),
}
#: What to write into a snippet for each.
QUERIES = {
    "tight": "fg.solve(tol=1e-10)",
    "map": "fg.solve_map()",
    "decode": "fg.decode()",
    "gradient": "fg.solve(tol=1e-12)",
    "symmetry": "fg.solve(tol=1e-10)",
}


def check(
    case: Case, seed: int, size: str = "small", only: str | None = None, tally: Tally | None = None
) -> list[Failure]:
    """Puts a case through the checks that fall to it, or through those named, as in "solve,map"."""
    tally = Tally() if tally is None else tally
    lots = np.random.default_rng([seed, 1])
    failures: list[Failure] = []
    references: list[Reference] | None = None
    for name, (function, odds) in CHECKS.items():
        drawn = lots.random() < odds[size]
        if not (drawn if only is None else name in only.split(",")):
            continue
        run = Run(case, name, seed, tally)
        if references is not None:
            run.references = references
        references = run.references
        try:
            with strict():
                function(run)
        except Exception as error:
            kind = type(error).__name__
            run.expect(kind, False, f"{kind}: {error}")
        failures += run.failures
    return failures
