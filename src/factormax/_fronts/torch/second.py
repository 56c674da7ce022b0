"""Second and higher derivatives of an eager solve.

The gradients of a solve are expressed as torch functions of the incoming gradients, the scores and
the temperature. Only `create_graph=True` and transforms need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from factormax._columns import Columns
from factormax._fronts.torch.arrays import as_tensor, space_of
from factormax._fronts.torch.jacobian import Applied

if TYPE_CHECKING:
    from factormax._fronts.torch.plan import EagerPlan

__all__ = ["LastDerivative", "differentiable_gradients"]


def differentiable_gradients(
    ctx: Any, plan: EagerPlan, which: str, grads: Sequence[Any]
) -> list[Any]:
    """The gradients of the scores. which: the Jacobian to apply."""
    task, pattern = plan.task, plan.pattern
    layout, dtype = task.layout, pattern.dtype
    device = torch.device("cpu") if task.host is task else pattern.kinds[0].device
    space = space_of(device)
    given = [None if g is None else g.to(device, dtype) for g in grads]
    if which == "jacobian":
        own = given[plan.num_tensors :]
        columns = sum([part.count for part in layout.parts])
        vectors = [
            layout.flat_scores(space, given[: plan.num_tensors], dtype),
            layout.flat_factor_grads(space, own, dtype)
            if own
            else torch.zeros((layout.batch, columns), dtype=dtype),
        ]
    else:
        vectors = [
            torch.zeros(task.batch, *group, s.width, dtype=dtype)
            if g is None
            else g.reshape(task.batch, *g.shape[len(task.batch_shape) :])
            for g, s, group in zip(given, task.supports, task.form.groups, strict=True)
        ]
    there: Any = task  # or on the host
    place = torch.arange(layout.batch, device=device) if task.host is task else there.place
    apply: Any = Applied.apply
    grad_u, grad_v = apply(plan, which, place, *[v.to(device) for v in vectors])
    of_temperature = None
    if plan.kept and plan.options.surrogate is None:
        *scores, temperature = ctx.saved_tensors
        of_temperature, divisor = _of_temperature(plan, scores, temperature, grad_u, grad_v)
        grad_u, grad_v = grad_u / divisor, grad_v / divisor
    elif task.temperature is not None:
        divisor = as_tensor(task.temperature).to(device, dtype)
        grad_u, grad_v = grad_u / divisor, grad_v / divisor
    found = layout.by_tensor(grad_u)
    found += layout.by_given(space, grad_v) if layout.parts else []
    out = [
        found[i].to(k.device, k.dtype) for i, k in zip(pattern.places, pattern.kinds, strict=True)
    ]
    if of_temperature is not None:
        out.append(of_temperature)
    wanted = ctx.needs_input_grad[1:]
    return [g if want else None for g, want in zip(out, wanted, strict=True)]


def _of_temperature(
    plan: EagerPlan, scores: Sequence[Tensor], temperature: Tensor, grad_u: Tensor, grad_v: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of a temperature, from those of the scores it divided; and the divisor."""
    layout, pattern = plan.task.layout, plan.pattern
    given: list[Any] = [None] * len(pattern.outputs)
    for i, array in plan.constants:
        given[i] = torch.as_tensor(array).to(grad_u.device, grad_u.dtype)
    for i, tensor in zip(pattern.places, scores, strict=True):
        given[i] = tensor.to(grad_u.device, grad_u.dtype)
    space = space_of(grad_u.device)
    eta_u = layout.flat_scores(space, given[: plan.num_tensors], grad_u.dtype)
    own, shared = layout.factor_blocks(space, given[plan.num_tensors :], grad_u.dtype)
    pairs = [(grad_u, eta_u)]
    if shared is None:
        pairs.append((grad_v, own))
    else:
        grads = Columns.split(space, grad_v, layout.runs)
        pairs += zip(grads, (own, shared), strict=True)
    shape = layout.batch_shape
    divisor = temperature.to(grad_u.device, grad_u.dtype).expand(shape).reshape(-1, 1)
    # d(eta / T) = d eta / T - eta dT / T^2; scores that are not finite have no gradient.
    inner = sum([(grad * torch.where(eta.isfinite(), eta, 0)).sum(1) for grad, eta in pairs])
    found = (-inner / divisor[:, 0] ** 2).reshape(shape).sum_to_size(temperature.shape)
    return found.to(temperature.device, temperature.dtype), divisor


class LastDerivative(torch.autograd.Function):
    """A gradient that depends on others, but can't be differentiated any further."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *origins: Tensor) -> Tensor:
        """The gradient itself, which depends on `origins`."""
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Raises."""
        raise RuntimeError(
            "factormax: autograd can't differentiate the gradient of a loss again. Call backward() "
            "without create_graph=True, or use torch.func.hessian or torch.func.grad."
        )
