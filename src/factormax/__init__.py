"""factormax: sparse structured inference in factor graphs, as a differentiable layer.

Write a graph in a few lines, solve it, and differentiate through the solution::

    fg = fm.FactorGraph()
    u = fg.variable_from(scores)  # (m, n), NumPy, torch or JAX
    fg.add(fm.Xor(u, axis=1))  # every row exactly one
    fg.add(fm.AtMostOne(u, axis=0))  # every column at most one
    fg.solve()
    u.value  # a sparse combination of matchings
"""

from typing import Any

from factormax import io, testing
from factormax._core import get_num_threads
from factormax.errors import (
    FactormaxError,
    GraphError,
    GraphWarning,
    InfeasibleError,
    NotConvergedError,
    NotConvergedWarning,
    ShapeError,
)
from factormax.factors import (
    AndOut,
    AtLeast,
    AtMostOne,
    Budget,
    DepTree,
    Exactly,
    Factor,
    Imply,
    Knapsack,
    Linear,
    Matching,
    Nand,
    Or,
    OrOut,
    Pair,
    Sequence,
    SequenceBudget,
    Table,
    Xor,
    XorOut,
)
from factormax.factors.structured import NO_STRUCTURE
from factormax.graph import FactorGraph, TorchFactorGraph
from factormax.solution import Solution
from factormax.status import Status
from factormax.threads import set_num_threads
from factormax.variable import Variable

__version__ = "0.2.0"

__all__ = [
    "NO_STRUCTURE",
    "AndOut",
    "AtLeast",
    "AtMostOne",
    "Budget",
    "DepTree",
    "Exactly",
    "Factor",
    "FactorGraph",
    "FactormaxError",
    "GraphError",
    "GraphWarning",
    "Imply",
    "InfeasibleError",
    "Knapsack",
    "Linear",
    "Matching",
    "Nand",
    "NotConvergedError",
    "NotConvergedWarning",
    "Or",
    "OrOut",
    "Pair",
    "Sequence",
    "SequenceBudget",
    "ShapeError",
    "Solution",
    "Status",
    "Table",
    "TorchFactorGraph",
    "Variable",
    "Xor",
    "XorOut",
    "get_num_threads",
    "io",
    "set_num_threads",
    "testing",
]


def __getattr__(name: str) -> Any:
    """Imports `nn` (which needs torch), `jax`, `cuda` and `plot` on first use."""
    if name in ("cuda", "jax", "nn", "plot"):
        from importlib import import_module

        return import_module(f"factormax.{name}")
    raise AttributeError(f"module 'factormax' has no attribute {name!r}")
