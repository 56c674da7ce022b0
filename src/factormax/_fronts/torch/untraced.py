"""What `torch.compile` must not trace: it breaks the graph there, and continues afterwards.

With `fullgraph=True`, the error says why. This module is imported only when torch's compiler is in
use, because marking a function imports all of the compiler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from factormax._fronts.torch import find_optimum as find_eagerly
from factormax._fronts.torch import solve_eager
from factormax.graph import FactorGraph
from factormax.record import Record

__all__ = ["find_optimum", "listed", "loss", "solve", "solve_map", "solve_own"]


def _hidden(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    disable: Any = torch.compiler.disable
    if "reason" not in inspect.signature(disable).parameters:  # before torch 2.7
        return disable(function)  # type: ignore[no-any-return]
    return disable(function, reason=f"factormax: {reason}")  # type: ignore[no-any-return]


solve = _hidden(solve_eager, "a solve outside the compiled graph.")
solve_map = _hidden(
    solve_eager, "solve_map and decode can't be compiled: their answers are piecewise constant."
)
solve_own = _hidden(
    solve_eager, "a user-defined factor, with an oracle in Python, can't be compiled."
)
find_optimum = _hidden(find_eagerly, "the objective of a solve outside the compiled graph.")
loss = _hidden(FactorGraph._loss, "loss can't be compiled.")


def _listed(record: Record, factor: Any, what: str) -> Any:
    return getattr(record.answer_of(factor), what)


listed = _hidden(_listed, "structures and probs are not available in a compiled graph.")
