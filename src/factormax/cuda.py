"""What there is to know of CUDA devices. Scores that are on one are solved there by themselves."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Why no kernel can run on a device, in one clause, or "" if it can."""
    return driver.unavailable(device)


def precompile(
    graph: FactorGraph,
    batch_sizes: Sequence[int] = (1, 1024, 131072),
    dtypes: Sequence[Literal["float32", "float64"]] = ("float32",),
    device: int = 0,
) -> None:
    """Compiles the kernels for a graph, so that no solve has to wait for them later.

    They are kept on disk, in the folder that the environment variable `FACTORMAX_CACHE` names or in
    the user's cache folder, and found there by other processes.

    Args:
        graph: with its variables and factors; the scores do not matter.
        batch_sizes: about how many instances will be solved at once: kernels differ for up to 256,
            up to 4096, and more.
        dtypes: of the scores.
        device: its number.

    Raises:
        GraphError: if the graph has no kernel, or the device can't run any.
    """
    model = graph._form().model
    reason = plan_of(model).unsupported or driver.unavailable(device)
    if reason:
        raise GraphError(f"precompile: {reason}.")
    engine = next(e for e in ENGINES if isinstance(e, CudaEngine))
    launcher = engine.launcher(f"cuda:{device}")
    for batch in batch_sizes:
        for dtype in dtypes:
            stages = launcher.stages(model, graph._params(), np.dtype(dtype), batch)
            for number in range(len(stages)):
                _ = stages[number]
