"""A solve whose numbers stay on the device of the scores."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from factormax._columns import Columns
from factormax._core import Model
from factormax._engines.cuda.solution import DeviceSolution
from factormax._fronts.torch.arrays import TorchSpace, space_of
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._report import report_backward, report_failures
from factormax._task import Gradients, Task
from factormax.arrays import to_numpy
from factormax.status import Status

if TYPE_CHECKING:
    from factormax._form import Form
    from factormax.graph import FactorGraph

__all__ = ["DeviceTask", "beside_scores", "score_product", "solve_flat", "vjp_flat"]

#: Rows of a Jacobian product that are computed in one launch, each with a copy of its instance.
_AT_ONCE = 1 << 16

_TYPES = {np.float32: torch.float32, np.float64: torch.float64}


class DeviceInputs(Inputs):
    """The numbers of B instances on a device.

    The kernels need only the address of the scores, so they are laid out as `(B, n)` when somebody
    else reads them.

    Args:
        model, params, eta_v, mask, device: see `Inputs`.
        scores: B × n numbers, contiguous, in any shape.
        batch: B.
    """

    oracles, held = (), None
    scores: Any = None
    batch: int = 0

    def __init__(
        self,
        model: Model,
        scores: Tensor,
        batch: int,
        eta_v: Any,
        params: list[Any],
        mask: Tensor | None,
        device: str,
    ) -> None:
        self.model, self.params, self.device = model, params, device
        self.scores, self.batch = scores, batch
        self._factor_scores = eta_v
        self.mask: Any = mask

    @cached_property
    def eta_u(self) -> Any:  # type: ignore[override]
        """`(B, n)`."""
        return self.scores.reshape(self.batch, self.model.num_variables)


class DeviceTask(Task):
    """The same as a `Task`, in tensors on the device.

    Args:
        engine: the engine that solves there.
        graph: the graph to solve.
        scores: one per variable tensor, on the device and in the compute dtype; None means 0.
        factor_scores: the factors' own scores, tensors on the device or NumPy arrays.
        dtype: the NumPy dtype, float32 or float64.
        temperature: on the host, broadcastable to the batch, divides all scores; None means 1.
        device: the name of the device.
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
        real = _TYPES[dtype]
        self.space = space = _space_of(device)
        eta_u = scores[0] if len(scores) == 1 else None
        if eta_u is None:
            eta_u = layout.flat_scores(space, scores, real)
        eta_u = eta_u.contiguous()
        if self.form.places:  # structures may be read after the caller has changed the scores
            eta_u = eta_u.clone()
        eta_v: Any = _no_scores(real, device)
        shared = heat = None
        if layout.parts:
            own = [torch.as_tensor(s, dtype=real, device=device) for s in factor_scores]
            # A copy: the backward pass reads the signs, and the caller may change the tensor.
            eta_v, shared = layout.factor_blocks(space, own, real, copy=True)
        mask = None
        if graph._masked:
            masks = [
                None if t.mask is None else torch.as_tensor(t.mask, device=device)
                for t in graph._tensors
            ]
            mask = layout.flat_mask(space, masks)
        model = self.form.model
        self.temperature: Any = None  # (B, 1)
        if temperature is not None:
            given = torch.as_tensor(temperature, device=device, dtype=real)
            self.temperature_shape = tuple(given.shape)
            self.temperature = given.expand(self.batch_shape).reshape(-1, 1)
            flat = eta_u.reshape(self.batch, model.num_variables)
            numbers = layout.cooled(space, flat, eta_v, shared, given, torch.div)
            eta_u, eta_v, shared, heat = numbers
        if shared is not None:
            divisor = None if heat is None else heat.double()
            eta_v = Columns(shared, eta_v, layout.runs, divisor)
        params = graph._params()
        self.inputs = DeviceInputs(model, eta_u, self.batch, eta_v, params, mask, device)
        self._given: Any = (graph, scores, factor_scores, dtype, temperature)  # until it is solved

    @classmethod
    def of_inputs(cls, engine: Any, form: Form | None, inputs: Inputs) -> DeviceTask:
        """A task of flat numbers on the device, for as many instances as they hold."""
        self = cls.__new__(cls)
        self.engine, self.inputs = engine, inputs
        if form is not None:
            self.form, self.layout = form, form.layout
        self.batch = len(inputs.eta_u)
        self.batch_shape = (self.batch,)
        self.space = _space_of(inputs.device)
        self.temperature = self._given = None
        return self

    def run(self, options: Options, warm: Any = None, refuse: Any = None) -> Any:
        """Solves; `values`, `factor_values`, `supports` and `pull_back` then work.

        refuse: called if a score is NaN or +inf.
        """
        self.begin(options, warm)
        self.settle(refuse)
        return self.raw

    def begin(self, options: Options, warm: Any = None) -> Any:
        """Queues the solve: the numbers are not final before `settle`."""
        self.options = options
        if warm is not None:
            scores = self.inputs.scores
            warm = torch.as_tensor(warm).to(scores.device, scores.dtype)
        self.raw = self.engine.begin(self.inputs, options, warm)
        return self.raw

    def settle(self, refuse: Any = None) -> bool:
        """Waits for the solve; returns whether any numbers have changed since `begin`."""
        changed: bool = self.raw.settle(refuse or self._refuse)
        self._given = None
        return changed

    def _refuse(self) -> None:
        """Raises what a solve on the CPU would, because a score is NaN or infinite."""
        graph, scores, own, dtype, temperature = self._given

        def taken(array: Any) -> Any:
            return to_numpy(array).astype(dtype)

        heat = None if temperature is None else to_numpy(temperature)
        on_host = [None if s is None else taken(s) for s in scores]
        Task(graph, on_host, [taken(s) for s in own], dtype, heat)

    def values(self) -> list[Any]:
        """The marginals of each variable tensor, `(*batch, *shape)`."""
        # Tensors of their own: autograd keeps this task with what is returned to the caller.
        return self.layout.by_tensor(self.raw.run.found.values.detach())

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
            eta_v=self.inputs.moved_factor_scores(lambda scores: scores.cpu().numpy()),
            mask=None if mask is None else mask.cpu().numpy(),
            device="cpu",
        )
        return found

    @cached_property
    def host(self) -> Task:
        """The same on the host, for what has no kernel: structures and their probabilities."""
        batch = None if self.batch_shape == self.layout.batch_shape else self.batch
        raw = self.raw.to_raw()
        return Task.answered(self.form, self.host_inputs, self.options, raw, batch)

    @cached_property
    def supports(self) -> Any:
        """The structures of each structured factor."""
        return self.host.supports

    def found(self, factor: int) -> Any:
        """The structures of a structured factor, and their probabilities, `(*batch, K)`."""
        return self.host.found(factor)

    def multipliers(self) -> Tensor:
        """`(B, multipliers)`; 0 where they are a proof of infeasibility."""
        infeasible = self.raw.there("status") == Status.INFEASIBLE.code
        tau: Tensor = self.raw.there("tau")
        return tau.masked_fill(infeasible[:, None], 0)

    def report(self, rows: int) -> Tensor:
        """How each instance ended, `(rows, B)`: see `RawSolution.report`. Further rows are NaN."""
        names = ("primal_residual", "dual_residual", "iterations", "status", "oracle_calls")
        found = [self.raw.there(name).double() for name in names]
        return torch.stack([*found, *[torch.full_like(found[0], torch.nan)] * (rows - 5)])

    # ---- the way back ----------------------------------------------------------------------------

    @cached_property
    def place(self) -> Tensor:
        """`(B,)`, the numbers of all instances."""
        return torch.arange(self.batch, device=self.inputs.eta_u.device)

    @property
    def applies_there(self) -> bool:
        """Whether `applied_there` works, that is, the CPU solved none of the instances."""
        return bool(self.raw.finished_there)

    def applied_there(self, place: Tensor, moved_u: Tensor, moved_v: Tensor) -> tuple[Tensor, ...]:
        """The Jacobian applied to vectors `(N, ...)` on the device, each for one instance."""
        real = self.inputs.eta_u.dtype
        given = moved_u.detach().to(real), moved_v.detach().to(real)
        own = self.place
        if place.shape == own.shape and place.data_ptr() == own.data_ptr():
            *found, residual = self.raw.vjp(*given)
        else:
            parts = [
                self.raw.vjp_at(*rows)
                for rows in zip(*[torch.split(t, _AT_ONCE) for t in (place, *given)], strict=True)
            ]
            *found, residual = [torch.cat(column) for column in zip(*parts, strict=True)]
        _report_backward(residual, real, self.options)
        return tuple([f.to(moved_u.dtype) for f in found])

    def pull_back(
        self, grads: list[Any], factor_grads: list[Any], objective: Any = None
    ) -> Gradients:
        """Turns gradients of `values` and `factor_values` into gradients of the scores."""
        found: DeviceSolution = self.raw
        layout, real = self.layout, self.inputs.scores.dtype
        grad_mu = grad_mu_v = None
        if len(grads) == 1:
            grad_mu = grads[0]
        elif any([g is not None for g in grads]):
            grad_mu = layout.flat_scores(self.space, grads, real)
        if factor_grads and any([g is not None for g in factor_grads]):
            grad_mu_v = layout.flat_factor_grads(self.space, factor_grads, real)
        grad_u, grad_v, residual = found.vjp(grad_mu, grad_mu_v)
        _report_backward(residual, real, self.options)
        if objective is not None:
            weight = objective.reshape(self.batch, 1)
            grad_u = grad_u.view_as(found.mu) + torch.nan_to_num(found.mu) * weight
            grad_v = grad_v + torch.nan_to_num(found.mu_v) * weight
        return self.to_scores(grad_u, grad_v)

    def pull_back_probs(self, grads: list[Any]) -> Gradients:
        """Turns gradients of the probabilities of structures into gradients of the scores."""
        flat = self.host.pull_back_probs_flat(grads)
        device = self.inputs.eta_u.device
        return self.to_scores(*(torch.from_numpy(g).to(device) for g in flat))

    def to_scores(self, grad_u: Any, grad_v: Any) -> Gradients:
        """Turns gradients of the flat scores into gradients of the scores as given."""
        of_temperature = None
        if self.temperature is not None:
            grad_u = grad_u.view_as(self.inputs.eta_u)
            inner = _dot(grad_u, self.inputs.eta_u) + score_product(self.inputs, grad_v)
            per_instance = (-inner / self.temperature[:, 0]).reshape(self.batch_shape)
            of_temperature = per_instance.sum_to_size(self.temperature_shape)
            grad_u, grad_v = grad_u / self.temperature, grad_v / self.temperature
        totals = self.layout.by_given(self.space, grad_v) if self.layout.parts else []
        return Gradients(self.layout.by_tensor(grad_u), totals, of_temperature)


# ---- For the operators ---------------------------------------------------------------------------


def solve_flat(
    engine: Any, inputs: Inputs, options: Options, warm: Any, refuse: Any
) -> tuple[Tensor, ...]:
    """What the operator `factormax::solve` returns, on the device of the scores.

    refuse: called with the inputs on the host if a score is NaN or +inf.
    """
    task = DeviceTask.of_inputs(engine, None, inputs)
    raw = task.run(options, warm, lambda: refuse(task.host_inputs))
    if not raw.all_converged:
        report_failures(raw, options.on_failure)
    tau = task.multipliers()
    if inputs.model.num_structured:  # structures are found again, whatever the sides are
        sides = tau.new_zeros((task.batch, raw.mu.shape[1] + tau.shape[1] + 1), dtype=torch.int8)
    else:
        status = raw.there("status")[:, None].to(torch.int8)
        sides = torch.cat([*raw.sides_there(), status], 1)
    return raw.mu, raw.mu_v, raw.objective, tau, sides, task.report(5)


def vjp_flat(
    engine: Any, inputs: Inputs, options: Options, sides: Tensor, tau: Any, *grads: Any
) -> tuple[Tensor, Tensor]:
    """The gradients of scores from those of the marginals; tau: given if there are structures."""
    launcher = engine.launcher(inputs.device)
    if tau is not None:
        found = engine.solve_there(inputs, options, tau)
    else:
        found = launcher.solved(inputs, sides)
    own = [None if g is None else launcher.machine.plain(g) for g in grads]
    grad_u, grad_v, residual = found.vjp(*own)
    _report_backward(residual, grad_u.dtype, options)
    return grad_u, grad_v


def _report_backward(residual: Tensor, dtype: Any, options: Options) -> None:
    if options.on_failure == "raise":  # worth waiting for
        host = residual.cpu().numpy()
        report_backward(host, host.max(initial=0), dtype, "raise")


@lru_cache(maxsize=16)
def _space_of(device: str) -> Any:
    return space_of(torch.device(device))


@lru_cache(maxsize=16)
def _no_scores(dtype: torch.dtype, device: str) -> Tensor:
    """The scores of factors that have none."""
    return torch.zeros((1, 0), dtype=dtype, device=device)


def beside_scores(inputs: Inputs, rows: Tensor) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """From `(B, P)` those columns that belong to each block of factor scores, and that block.

    Also what divides these scores, `(B, 1)`.
    """
    own, shared, heat = inputs.blocks
    if shared is None:
        return [(rows, own, None)]
    of_own, of_shared = Columns.split(TorchSpace, rows, inputs.runs)
    return [(of_own, own, None), (of_shared, shared, heat)]


def score_product(inputs: Inputs, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The factor scores times `(B, P)`, summed per instance, in this dtype."""
    parts = [
        _dot(own, scores, dtype) / (1 if heat is None else heat[:, 0].to(own.dtype))
        for own, scores, heat in beside_scores(inputs, rows)
    ]
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


def _dot(grad: Tensor, scores: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of the products for each instance; scores that are not finite count as 0."""
    return (grad * torch.where(scores.isfinite(), scores, 0)).sum(1, dtype=dtype)
