"""The "sparsemap" loss, computed on the device of the scores.

This is for graphs of rows and pairs, with fully known targets; other losses, and those of other
graphs, are computed on the host: see `factormax.queries.loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from factormax._core import Model, RowKind
from factormax._fronts.torch.device import DeviceTask, beside_scores, score_product
from factormax._inputs import Inputs
from factormax._options import Options

__all__ = ["DeviceTarget", "evaluate_there"]


class DeviceTarget(NamedTuple):
    """What a loss compares the answer with."""

    values: Tensor  # (B, n) of 0 and 1
    refuse: Callable[[Inputs], None]  # raises, given the numbers on the host, if it is invalid


class _Places(NamedTuple):
    """Where the rows and pairs of a model are."""

    col: Tensor  # of each entry
    row: Tensor
    block: Tensor
    block_of_row: Tensor
    equality: Tensor
    pairs: Tensor  # (2, P)
    negated: Tensor  # (2, P)


@lru_cache(maxsize=64)
def _places(model: Model, device: torch.device) -> _Places:
    rows = np.repeat(np.arange(model.num_rows), np.diff(model.row_ptr))
    blocks = np.repeat(np.arange(len(model.block_ptr) - 1), np.diff(model.block_ptr))
    found = (
        np.asarray(model.col, np.int64),
        rows,
        blocks[rows],
        blocks,
        np.asarray(model.row_kind) == int(RowKind.equality),
        np.asarray(model.pairs, np.int64).reshape(-1, 2).T,
        np.asarray(model.pair_negated, bool).reshape(-1, 2).T,
    )
    return _Places(*[torch.tensor(np.ascontiguousarray(a), device=device) for a in found])


def evaluate_there(
    task: DeviceTask, target: DeviceTarget, options: Options, refuse: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Solves; returns the loss of each instance, `(B,)`, and its gradients by the flat scores.

    If failures are ignored, nothing waits for the device, and the loss of a target that breaks a
    factor is NaN. refuse: see `DeviceTask.run`.
    """
    raw, inputs = task.run(options, refuse=refuse), task.inputs
    eta_u, wide = inputs.eta_u, torch.float64
    here = eta_u > -torch.inf
    if inputs.mask is not None:
        here = here & inputs.mask
    y = torch.where(here, target.values, 0).to(eta_u.dtype)
    places = _places(inputs.model, eta_u.device)
    n_y = _pair_features(places, here, y)
    wrong = _broken(task, places, here, y)
    wrong |= ((target.values != y) | ((y != 0) & (y != 1))).any(1)  # on where absent, or not 0/1
    waits = options.on_failure != "ignore" and not raw.machine.capturing
    if waits and bool(wrong.any()):
        target.refuse(task.host_inputs)
        wrong = torch.zeros_like(wrong)  # it is valid by the numbers on the host
    # The solution's value minus the target's, term by term: (mu - y) (eta - (mu + y) / 2).
    grad_u, grad_v = raw.mu - y, raw.mu_v - n_y
    scores = torch.where(eta_u.isfinite(), eta_u, 0) - (raw.mu + y) / 2
    values = (grad_u * scores).sum(1, dtype=wide)
    values = values + score_product(inputs, grad_v, wide)
    solved = ~values.isnan()
    for own, eta_v, _ in beside_scores(inputs, n_y):
        solved &= ~((own > 0) & (eta_v == -torch.inf)).any(1)
    values = torch.where(solved, values.clamp(min=0), torch.inf).masked_fill(wrong, torch.nan)
    return values, *(g.masked_fill(~solved[:, None], 0) for g in (grad_u, grad_v))


def _pair_features(places: _Places, here: Tensor, y: Tensor) -> Tensor:
    """What the scores of the pairs are multiplied by at the target, `(B, P)`."""
    on = y > 0
    both = on.new_ones((len(y), places.pairs.shape[1]))
    for var, negated in zip(places.pairs, places.negated, strict=True):
        both &= on[:, var] ^ negated
    first, second = places.pairs
    return (both & (here[:, first] | here[:, second])).to(y.dtype)


def _broken(task: DeviceTask, places: _Places, here: Tensor, y: Tensor) -> Tensor:
    """Whether the target breaks a row by more than rounding, `(B,)`."""
    batch, rows = len(y), len(places.equality)
    if not rows:
        return torch.zeros(batch, dtype=torch.bool, device=y.device)
    coef, rhs = task.raw.run.stages[0].rows
    terms = coef.double() * y[:, places.col].double()

    def totals(terms: Tensor, at: Tensor, count: int) -> Tensor:
        return terms.new_zeros((batch, count)).index_add_(1, at, terms)

    excess = totals(terms, places.row, rows) - rhs
    size = totals(terms.abs(), places.row, rows) + rhs.abs()
    excess = torch.where(places.equality, excess.abs(), excess)
    broken: Tensor = excess > (1e-6 if y.dtype == torch.float32 else 1e-9) * size
    # A factor all of whose variables are off is absent.
    blocks = len(task.inputs.model.block_ptr) - 1
    there = totals(here[:, places.col].double(), places.block, blocks) > 0
    return (broken & there[:, places.block_of_row]).any(1)
