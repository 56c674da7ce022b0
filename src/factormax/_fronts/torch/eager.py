"""Solves in eager mode, as autograd functions.

Everything that the compiled operator leaves to torch (casts, copies between devices, layout)
happens in NumPy, unseen by autograd, which sees only scores in, values out, and the backward pass.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from factormax._fronts.torch.arrays import numbers_of
from factormax._fronts.torch.plan import EagerPlan
from factormax._fronts.torch.second import LastDerivative, differentiable_gradients
from factormax.structures import Support

__all__ = ["EagerLoss", "EagerProbs", "Listing", "apply_solve"]


class EagerSolve(torch.autograd.Function):
    """A solve in eager mode: scores of variables and factors in, values of both out."""

    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, *scores: Tensor) -> Any:
        """The values of variables and factors, which the plan found."""
        outputs = plan.outputs()
        if plan.kept:
            # A surrogate reads the values, which belong to the task.
            ctx.save_for_backward(*(scores if plan.options.surrogate is None else outputs))
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores."""
        plan = ctx.plan
        if plan.kept:
            _ = ctx.saved_tensors  # raises if any was changed in place
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return None, *differentiable_gradients(ctx, plan, "jacobian", grads)
        numbers, first = plan.numbers, plan.num_tensors
        given = [g if g is None else numbers(g) for g in grads]
        found = plan.task.pull_back(given[:first], given[first:])
        return None, *plan.gradients_of(found, ctx.needs_input_grad[1:])


#: `EagerSolve.apply` without its overhead for the transforms of `torch.func`.
apply_solve: Any = super(torch.autograd.Function, EagerSolve).apply


class EagerProbs(torch.autograd.Function):
    """The probabilities of the structures: scores in, probabilities of each factor out."""

    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, *scores: Tensor) -> Any:
        """The probabilities, `(*batch, K)` of each structured factor."""
        ctx.set_materialize_grads(False)
        ctx.plan, task = plan, plan.task
        if plan.kept:
            ctx.save_for_backward(*scores)
        found = [task.found(i)[1] for i in range(len(task.form.places))]
        return tuple([plan.pattern.outputs[0].tensor(p) for p in found])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores."""
        plan = ctx.plan
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return None, *differentiable_gradients(ctx, plan, "probs_back", grads)
        given = [None if g is None else numbers_of(g, torch.float64) for g in grads]
        found = plan.task.pull_back_probs(given)
        return None, *plan.gradients_of(found, ctx.needs_input_grad[1:])


class EagerLoss(torch.autograd.Function):
    """A loss in eager mode; its gradient is found together with its value.

    Args (of `apply`):
        plan: the plan that holds the solve, as `task`.
        found: the loss of each instance, `(B,)`, and its gradients by the flat scores.
        *scores: the scores of variables and factors.
    """

    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, found: Any, *scores: Tensor) -> Any:
        """The loss of each instance."""
        values, *ctx.grads = found
        ctx.plan, ctx.scores = plan, scores
        return plan.pattern.outputs[0].tensor(values.reshape(plan.task.batch_shape))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the scores."""
        plan, task = ctx.plan, ctx.plan.task
        if task.host is task:
            weight = numbers_of(grads[0], torch.float64).reshape(-1)
            given = task.weighted(*ctx.grads, weight)
        else:
            flat = [g * grads[0].reshape(-1, 1).to(g.dtype) for g in ctx.grads]
            given = task.to_scores(*flat)
        found = plan.gradients_of(given, ctx.needs_input_grad[2:])
        pairs = zip(found, ctx.scores, strict=True)
        found = [None if g is None else g.to(s.dtype) for g, s in pairs]
        if torch.is_grad_enabled():  # create_graph=True
            apply: Any = LastDerivative.apply
            found = [None if g is None else apply(g, *grads, *ctx.scores) for g in found]
        return None, None, *found


class Listing:
    """The structures of a solve with their probabilities, found on first access."""

    def __init__(self, plan: EagerPlan, inputs: list[Tensor]) -> None:
        self.plan, self.inputs = plan, inputs

    @cached_property
    def probs(self) -> tuple[Tensor, ...]:
        """The probabilities of each structured factor, `(*batch, K)`, with their history."""
        apply: Any = EagerProbs.apply
        return apply(self.plan, *self.inputs)  # type: ignore[no-any-return]

    def __call__(self, factor: int) -> tuple[Support, Tensor]:
        """The support of a factor, and its probabilities."""
        return self.plan.task.supports[factor], self.probs[factor]
