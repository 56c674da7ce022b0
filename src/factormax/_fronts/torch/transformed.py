"""Solves inside the transforms of `torch.func`, and in forward mode.

There, a tensor stands for others (one per sample of a `vmap`, or one with a tangent), so its
numbers can't be read. Everything around the solve is ordinary torch, which torch transforms itself;
`FlatSolve` has a rule for each transform. A solve that is not transformed avoids the cost of this:
see `factormax._fronts.torch.eager.EagerSolve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from factormax._fronts.torch.arrays import as_tensor, match
from factormax._fronts.torch.flat import (
    cooled,
    first_tensor,
    flat_numbers,
    flat_target,
    set_answer,
)
from factormax._fronts.torch.flat_solve import FlatLossPlan, FlatPlan, FlatProbs, FlatSolve
from factormax._fronts.torch.optimum import optimum
from factormax._options import Options
from factormax.errors import GraphError
from factormax.queries.loss import check_shape, check_target
from factormax.solution import Solution
from factormax.structures import Support

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["is_transformed", "loss_transformed", "solve_transformed"]

_forward_ad: Any = torch.autograd.forward_ad


def is_transformed() -> bool:
    """Whether scores may belong to a transform, or have a tangent."""
    return torch._C._are_functorch_transforms_active() or _forward_ad._current_level >= 0


def solve_transformed(
    graph: FactorGraph, options: Options, warm_start: Solution | None, temperature: Any
) -> Solution:
    """Solves a graph whose scores belong to a transform."""
    plan = FlatPlan(graph, options)
    layout = plan.form.layout
    warm = None
    if warm_start is not None:
        tau = graph._check_multipliers(warm_start, layout.batch, plan.form.model.num_dual)
        warm = torch.as_tensor(tau).detach()
    scores, found = _applied_to(plan, graph, warm, temperature)
    mu, mu_v, objective, tau, report, place = found
    listing = FlatListing(plan, place, scores)
    objective = optimum(objective, *plan.terms(scores, mu, mu_v))
    like = first_tensor(graph)
    answers = [(f, FlatAnswer(listing, i, f, like)) for i, f in enumerate(graph._structured)]
    numbers = (mu, mu_v, objective, tau, report.T)
    return set_answer(graph, layout, *numbers, options, answers, plan.task.raw.engine)


def _applied_to(
    plan: FlatPlan, graph: FactorGraph, warm: Tensor | None, temperature: Any, *more: Tensor
) -> tuple[list[Tensor], Any]:
    """The flat scores of a graph, in two blocks or three, and what `FlatSolve` returns for them."""
    layout = plan.form.layout
    eta_u, eta_v, shared, heat, mask = flat_numbers(graph, layout, temperature, plan.device)
    rows = layout.batch
    if shared is not None:
        plan.runs = layout.runs
        if heat is not None:  # each instance has its own then
            shared = cooled(shared, heat)
    if mask is not None:
        mask = mask.expand(rows, mask.shape[1])
    if warm is not None:
        warm = warm.to(plan.device, eta_u.dtype)
    params = [
        p if isinstance(p, float) else as_tensor(p).expand(rows, p.shape[1])
        for p in graph._params()
    ]
    apply: Any = FlatSolve.apply
    scores = [s for s in (eta_u, eta_v, shared) if s is not None]
    return scores, apply(plan, *_of_instances(scores, rows), mask, warm, *params, *more)


def _of_instances(scores: list[Tensor], rows: int) -> tuple[Any, ...]:
    """The scores as `FlatSolve` takes them: a row per instance, without copies."""
    eta_u, *own = [s.expand(rows, s.shape[1]) for s in scores]
    return (eta_u, *own) if len(own) == 2 else (eta_u, *own, None)


def loss_transformed(
    graph: FactorGraph,
    targets: Any,
    kind: str,
    cost: Any,
    mask: Any,
    options: Options,
    temperature: Any,
) -> Tensor:
    """The losses of a graph whose scores belong to a transform."""
    given = check_target(graph, targets, kind, cost)
    if mask is not None:
        raise GraphError(
            "loss: mask= is not supported inside the transforms of torch.func. Call loss outside "
            "them, or give the whole target."
        )
    for u, target in targets.items():
        check_shape(u, torch.as_tensor(target).shape, graph._known_batch_shape())
    plan = FlatLossPlan(graph, options, kind, given)
    more = [flat_target(graph, "the target", targets, plan.device)]
    if kind == "hinge":
        costs = cost if isinstance(cost, Mapping) else dict.fromkeys(targets, cost)
        filled = {u: 1.0 if costs.get(u) is None else costs[u] for u in targets}
        more.append(flat_target(graph, "the cost", filled))
    scores, found = _applied_to(plan, graph, None, temperature, *more)
    grad_u, grad_v, losses, mu, mu_v, tau, report, place = found
    listing = FlatListing(plan, place, [s.detach() for s in scores])
    value = optimum(losses, *plan.terms(scores, grad_u, grad_v))
    like = first_tensor(graph)
    answers = [(f, FlatAnswer(listing, i, f, like)) for i, f in enumerate(graph._structured)]
    layout = plan.form.layout
    numbers = (mu, mu_v, value, tau, report.T)
    solution = set_answer(graph, layout, *numbers, options, answers, plan.task.raw.engine)
    return solution.objective  # type: ignore[return-value]


class FlatListing:
    """The probabilities of the structures of a solve, found on first access."""

    def __init__(self, plan: FlatPlan, place: Tensor, scores: list[Tensor]) -> None:
        self.plan, self.place = plan, place
        self.scores = _of_instances(scores, plan.form.layout.batch)

    @cached_property
    def probs(self) -> tuple[Tensor, ...]:
        """The probabilities of each structured factor, `(B, ..., K)`, with their history."""
        apply: Any = FlatProbs.apply
        return apply(self.plan, self.place, *self.scores)  # type: ignore[no-any-return]


class FlatAnswer:
    """What a structured factor returns: the rows of a transform's instances."""

    def __init__(self, listing: FlatListing, number: int, factor: Any, like: Tensor) -> None:
        self.listing, self.number = listing, number
        self.size, self.laid_out = factor._size, factor._laid_out
        self.like = like

    @property
    def _support(self) -> Support:
        return self.listing.plan.task.supports[self.number]

    def _rows(self, array: Any, *rest: int) -> Tensor:
        """The rows of this transform's instances, in the shape of the batch."""
        plan = self.listing.plan
        form = plan.form
        shape = (*form.groups[self.number], *rest)
        own = torch.as_tensor(array.reshape(plan.task.batch, *shape), device=plan.device)
        rows = own[self.listing.place]
        return match(rows, self.like).reshape((*form.layout.batch_shape, *shape))

    @property
    def probs(self) -> Tensor:
        """`(*batch, K)`, differentiable."""
        found, form = self.listing.probs[self.number], self.listing.plan.form
        return match(found.reshape((*form.layout.batch_shape, *found.shape[1:])), self.like)

    @property
    def structures(self) -> Tensor:
        """`(*batch, K, *shape of the variables)`."""
        dense = self.laid_out(self._support.structures(self.size))
        return self._rows(dense, *dense.shape[1:])

    @property
    def num_structures(self) -> Tensor:
        """`(*batch,)`."""
        return self._rows(self._support.counts).long()
