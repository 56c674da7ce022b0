"""A solve whose numbers are, and stay, on the device of the scores."""

from __future__ import annotations

from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from factormax._engines.cuda.solution import DeviceSolution
from factormax._fronts.torch.arrays import TorchSpace
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._report import report_backward
from factormax._task import Gradients, Task
from factormax.checks import check_scores

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["DeviceTask"]

_TYPES = {np.float32: torch.float32, np.float64: torch.float64}


class DeviceSpace(TorchSpace):
    """Torch, with what is new on a device."""

    def __init__(self, device: torch.device) -> None:
        self.zeros: Any = partial(torch.zeros, device=device)
        self.ones: Any = partial(torch.ones, dtype=torch.bool, device=device)


class DeviceTask(Task):
    """The same as a `Task`, in tensors on the device.

    Args:
        engine: that solves there.
        graph: what to solve.
        scores: of each variable tensor, on the device and in the compute dtype; None is zero.
        factor_scores: the factors' own, tensors there or NumPy arrays.
        dtype: of NumPy, float32 or float64.
        temperature: on the host, broadcastable to the batch, divides all scores; None is 1.
        device: its name.
    """

    raw: Any
    inputs: Any

    def __init__(
        self,
        engine: Any,
        graph: FactorGraph,
        scores: list[Tensor | None],
        factor_scores: list[Any],
        dtype: Any,
        temperature: Any = None,
        device: str = "cuda",
    ) -> None:
        self.engine, self.form = engine, graph._form()
        self.layout = layout = self.form.layout
        self.batch_shape, self.batch = layout.batch_shape, layout.batch
        place, real = torch.device(device), _TYPES[dtype]
        self.space = space = DeviceSpace(place)
        eta_u = layout.flat_scores(space, scores, real)
        eta_v: Any = _no_scores(real, place)
        if layout.parts:
            own = [torch.as_tensor(s, dtype=real, device=place) for s in factor_scores]
            # A copy: the backward pass looks at the signs, whatever became of the caller's tensor.
            eta_v = layout.flat_factor_scores(space, own, real).clone()
        mask = None
        if graph._masked:
            masks = [
                None if t.mask is None else torch.as_tensor(t.mask, device=place)
                for t in graph._tensors
            ]
            mask = layout.flat_mask(space, masks)
        self.spread: Tensor | None = None  # the temperature, (B, 1)
        if temperature is not None:
            given = torch.as_tensor(temperature, device=place, dtype=real)
            self.temperature_shape = tuple(given.shape)
            self.spread = given.expand(self.batch_shape).reshape(-1, 1)
            eta_u, eta_v = eta_u / self.spread, eta_v / self.spread
        self.inputs = Inputs(self.form.model, eta_u, eta_v, graph._params(), mask, device=device)
        self._graph: FactorGraph | None = graph  # until it is solved

    def run(self, options: Options, warm: Any = None) -> Any:
        """Solves; `values`, `factor_values`, `supports` and `pull_back` then work."""
        self.options = options
        eta_u = self.inputs.eta_u
        start = None if warm is None else torch.as_tensor(warm).to(eta_u.device, eta_u.dtype)
        self.raw = self.engine.solve_there(self.inputs, options, start, self._refuse)
        self._graph = None
        return self.raw

    def _refuse(self) -> None:
        """Raises: a score is NaN or +inf."""
        graph, numbers = self._graph, self.host_inputs
        assert graph is not None
        names = [(t.name, t.shape) for t in graph._tensors]
        check_scores(numbers.eta_u, numbers.mask, names, self.batch_shape)
        allowed = [p.allow_minus_inf for p in graph._score_parts()]
        shape = self.batch_shape if len(numbers.eta_v) > 1 else ()
        check_scores(numbers.eta_v, None, graph._score_layout(), shape, allowed)

    def factor_values(self) -> list[Any]:
        """The marginals of the factors' scores, `(*batch, *shape as given)`."""
        return self.layout.by_part(self.space, self.raw.mu_v) if self.layout.parts else []

    def objective(self) -> Any:
        """The optimal value of each instance, `(*batch,)`."""
        return self.raw.objective.reshape(self.batch_shape)

    @cached_property
    def host_inputs(self) -> Inputs:
        """The numbers in NumPy."""
        mask = self.inputs.mask
        found: Inputs = self.inputs.replace(
            eta_u=self.inputs.eta_u.cpu().numpy(),
            eta_v=self.inputs.eta_v.cpu().numpy(),
            mask=None if mask is None else mask.cpu().numpy(),
            device="cpu",
        )
        return found

    @cached_property
    def host(self) -> Task:
        """The same on the host, for what has no kernel: structures and their probabilities."""
        return Task.answered(self.form, self.host_inputs, self.options, self.raw.to_raw())

    @cached_property
    def supports(self) -> Any:
        """The structures of each structured factor."""
        return self.host.supports

    def found(self, factor: int) -> Any:
        """The structures of a structured factor, and their probabilities, `(*batch, K)`."""
        return self.host.found(factor)

    # ---- the way back ----------------------------------------------------------------------------

    def pull_back(
        self, grads: list[Any], factor_grads: list[Any], objective: Any = None
    ) -> Gradients:
        """From gradients of what `values` and `factor_values` gave to those of scores."""
        found: DeviceSolution = self.raw
        real = self.inputs.eta_u.dtype
        grad_mu = grad_mu_v = None
        if any([g is not None for g in grads]):
            grad_mu = self.layout.flat_scores(self.space, grads, real)
        if any([g is not None for g in factor_grads]):
            grad_mu_v = self.layout.flat_factor_grads(self.space, factor_grads, real)
        grad_u, grad_v, residual = found.vjp(grad_mu, grad_mu_v)
        if self.options.on_failure == "raise":  # worth waiting for
            host = residual.cpu().numpy()
            report_backward(host, host.max(initial=0), found.machine.dtype(found.mu), "raise")
        if objective is not None:
            weight = objective.reshape(self.batch, 1)
            grad_u = grad_u + torch.nan_to_num(found.mu) * weight
            grad_v = grad_v + torch.nan_to_num(found.mu_v) * weight
        return self.to_scores(grad_u, grad_v)

    def pull_back_probs(self, grads: list[Any]) -> Gradients:
        """From gradients of the probabilities of structures to those of scores."""
        flat = self.host.pull_back_probs_flat(grads)
        device = self.inputs.eta_u.device
        return self.to_scores(*(torch.from_numpy(g).to(device) for g in flat))

    def to_scores(self, grad_u: Any, grad_v: Any) -> Gradients:
        """Gradients of the flat scores as those of the scores that were given."""
        of_temperature = None
        if self.spread is not None:
            inner = _dot(grad_u, self.inputs.eta_u) + _dot(grad_v, self.inputs.eta_v)
            per_instance = (-inner / self.spread[:, 0]).reshape(self.batch_shape)
            of_temperature = per_instance.sum_to_size(self.temperature_shape)
            grad_u, grad_v = grad_u / self.spread, grad_v / self.spread
        totals = self.layout.by_given(self.space, grad_v) if self.layout.parts else []
        return Gradients(self.layout.by_tensor(grad_u), totals, of_temperature)


@lru_cache(maxsize=16)
def _no_scores(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Those of factors without any."""
    return torch.zeros((1, 0), dtype=dtype, device=device)


def _dot(grad: Tensor, scores: Tensor) -> Tensor:
    """For each instance the sum of the products; what is not finite has no gradient."""
    return (grad * torch.where(scores.isfinite(), scores, 0)).sum(1)
