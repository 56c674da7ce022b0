"""Utilities for CUDA devices. Scores that are on one are solved there automatically."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Literal

import numpy as np

from factormax._engines import ENGINES
from factormax._engines.cuda import driver
from factormax._engines.cuda.engine import CudaEngine
from factormax._engines.cuda.launcher import plan_of
from factormax.errors import GraphError

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["precompile", "unavailable"]


def unavailable(device: int = 0) -> str:
    """The reason why kernels can't run on a device, in one clause, or "" if they can."""
    return driver.unavailable(device)


def precompile(
    graph: FactorGraph,
    batch_sizes: Sequence[int] = (1, 1024, 131072),
    dtypes: Sequence[Literal["float32", "float64"]] = ("float32",),
    device: int = 0,
) -> None:
    """Compiles the kernels for a graph, so that no later solve has to wait for them.

    They are kept on disk, in the folder that the environment variable `FACTORMAX_CACHE` names, or
    else in the user's cache folder, where other processes find them.

    Args:
        graph: a graph with its variables and factors. Its numbers do not matter, but which factor
            scores have batch dimensions does: there are other kernels for a batch that shares only
            some of them.
        batch_sizes: roughly how many instances will be solved at once. There are different kernels
            for up to 256, for up to 4096, and for more.
        dtypes: the dtypes of the scores.
        device: the number of the device.

    Raises:
        GraphError: if the graph has no kernel, or the device can't run any.
    """
    form = graph._form()
    model, layout = form.model, form.layout
    # Shared scores have kernels of their own if others are not, or if temperatures divide them.
    kinds = [()] * (not layout.is_mixed) + [layout.runs] * (True in layout.is_shared)
    reason = plan_of(model).unsupported or driver.unavailable(device)
    if reason:
        raise GraphError(f"precompile: {reason}.")
    engine = next(e for e in ENGINES if isinstance(e, CudaEngine))
    launcher = engine.launcher(f"cuda:{device}")
    for batch, dtype, runs in product(batch_sizes, dtypes, kinds):
        stages = launcher.stages(model, graph._params(), np.dtype(dtype), batch, runs)
        for number in range(len(stages)):
            _ = stages[number]
