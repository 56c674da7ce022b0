"""Solves on one machine, with the programs and numbers of models kept from call to call."""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from typing import Any

import numpy as np

from factormax import _core
from factormax._core import Model
from factormax._engines.cuda.plan import Plan
from factormax._engines.cuda.program import Answer, Machine, Numbers, Program
from factormax._inputs import Inputs
from factormax._options import Options

__all__ = ["DeviceRun", "Launcher", "plan_of"]

#: The most passes of the kernels, by precision: what takes longer needs methods they do not have.
_PASSES = {np.dtype(np.float32): 400, np.dtype(np.float64): 1000}
_KEPT = 64
#: The residual at which cuts of trees are searched for.
_TREE_TOL = 1e-10
#: A pass over trees is long, and the slowest instance keeps the others waiting. Most need fewer
#: passes than this; the CPU, which has other methods, continues with the rest.
_TREE_PASSES = 64


@lru_cache(maxsize=_KEPT)
def plan_of(model: Model) -> Plan:
    """The model as the kernels take it."""
    return Plan(model)


class _Stage:
    """One precision: the program, and where the numbers of the rows are on the device."""

    def __init__(self, program: Program, numbers: Numbers) -> None:
        self.program = program
        machine = program.machine
        coef, rhs, scale = numbers.coef, numbers.rhs, numbers.scale
        given = {"coef": coef, "rhs": rhs} | ({} if scale is None else {"scale": scale})
        if program.plan.hubs:
            given["hub_param"] = numbers.hub_param
        self._kept = {name: machine.upload(array) for name, array in given.items()}
        self.numbers = {name: machine.pointer(array) for name, array in self._kept.items()}
        self.numbers["coef_stride"] = 0 if len(coef) == 1 else coef.shape[1]
        self.numbers["rhs_stride"] = 0 if len(rhs) == 1 else rhs.shape[1]
        if program.plan.hubs:
            param = numbers.hub_param
            self.numbers["hub_param_stride"] = 0 if len(param) == 1 else param.shape[1]

    @property
    def rows(self) -> tuple[Any, Any]:
        """The coefficients and bounds, `(1 | B, entries)` and `(1 | B, rows)`, on the device."""
        return self._kept["coef"], self._kept["rhs"]

    def numbers_at(self, index: Any) -> tuple[dict[str, Any], list[Any]]:
        """The same for these instances, and what must be kept alive until the launch."""
        own = {name: a[index] for name, a in self._kept.items() if a.ndim > 1 and len(a) > 1}
        at = self.program.machine.pointer
        return self.numbers | {name: at(array) for name, array in own.items()}, list(own.values())


class DeviceRun:
    """A solve that was queued, and what its gradient needs.

    Attributes:
        found: the answers.
        stages: one per precision, the least precise first.
    """

    def __init__(
        self, stages: _Stages, given: tuple[Any, Any, Any], tol: float, max_iter: int
    ) -> None:
        self.stages = stages
        self._given, self._tol, self._max_iter = given, tol, max_iter
        self.found: Any = None

    def solve(self, number: int, warm: Any, unsolved: int) -> None:
        """Queues a stage; each one after the first solves what the previous one could not."""
        stage = self.stages[number]
        self.found = stage.program.solve(
            stage.numbers,
            *self._given,
            warm,
            self._tol,
            min(self._max_iter, _PASSES[stage.program.choice.precision]),
            unsolved,
            self.found,
        )

    def vjp(self, grad_mu: Any, grad_mu_v: Any) -> tuple[Any, Any, Any]:
        """The gradients of `eta_u` and of `eta_v`, `(B, scores)`, and their relative residuals."""
        return self._vjp(*self._given[:2], self.found, grad_mu, grad_mu_v)

    def vjp_at(self, index: Any, grad_mu: Any, grad_mu_v: Any) -> tuple[Any, Any, Any]:
        """The same for these instances, `(N,)` on the device, each as often as it is named."""
        eta_u, eta_v, _ = self._given
        own_v = eta_v if len(eta_v) == 1 else eta_v[index]
        return self._vjp(eta_u[index], own_v, self.found.taken(index), grad_mu, grad_mu_v, index)

    def _vjp(
        self, eta_u: Any, eta_v: Any, found: Any, grad_mu: Any, grad_mu_v: Any, index: Any = None
    ) -> tuple[Any, Any, Any]:
        out: Any = None
        for number in range(len(self.stages)):
            stage = self.stages[number]
            numbers, _kept = (stage.numbers, None) if index is None else stage.numbers_at(index)
            out = stage.program.vjp(numbers, eta_u, eta_v, found, grad_mu, grad_mu_v, out)
        return out  # type: ignore[no-any-return]


class _Stages:
    """The precisions of a model with its parameters; each is made on first use."""

    def __init__(
        self, launcher: Launcher, model: Model, params: list[Any], dtype: Any, batch: int
    ) -> None:
        self._precisions = plan_of(model).precisions(dtype)
        self._made: dict[int, _Stage] = {}
        self._key = launcher, model, list(params), dtype, batch

    def __len__(self) -> int:
        return len(self._precisions)

    def __getitem__(self, number: int) -> _Stage:
        found = self._made.get(number)
        if found is None:
            launcher, model, params, dtype, batch = self._key
            precision = self._precisions[number]
            coef, rhs, own = _rows(model, params)
            given = (coef, rhs, own, precision, bool(params), launcher.general)
            numbers = Numbers(plan_of(model), *given)
            program = launcher.program(model, numbers, dtype, precision, batch)
            found = self._made.setdefault(number, _Stage(program, numbers))
        return found


class Launcher:
    """Solves batches on one machine; keeps the programs and the numbers of models.

    Args:
        machine: where to solve.
        general: whether to use kernels that fit many models. They are slower, but save compiling
            time if many models are solved once.
    """

    def __init__(self, machine: Machine, general: bool = False) -> None:
        self.machine, self.general = machine, general
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._stages: OrderedDict[Any, _Stages] = OrderedDict()

    def solve(
        self, inputs: Inputs, options: Options, warm: Any = None, unsolved: Any = None
    ) -> DeviceRun:
        """Queues a solve of inputs whose arrays are on the device.

        Args:
            inputs: what to solve; `eta_u`, `eta_v` and `mask` are on the device.
            options: how to solve it.
            warm: `(B, rows of the model + pairs)`, multipliers to start from.
            unsolved: a flag of the machine, to wait for each stage before the next; None queues all
                of them.
        """
        machine, plan = self.machine, plan_of(inputs.model)
        given = (
            machine.plain(inputs.eta_u),
            machine.plain(inputs.eta_v),
            None if inputs.mask is None else machine.plain(inputs.mask),
        )
        stages = self.stages(
            inputs.model, inputs.params, machine.dtype(given[0]), given[0].shape[0]
        )
        # A set of words is violated if it lacks more than rounding.
        tol, passes = options.tol, options.max_iter
        if plan.trees:
            tol = min(tol, _TREE_TOL)
            if unsolved is not None:  # otherwise all stages are queued
                passes = min(passes, _TREE_PASSES)
        run = DeviceRun(stages, given, tol, passes)
        start = None if warm is None else self._all_rows(plan, warm)
        for number in range(len(run.stages)):
            run.solve(number, start, 0 if unsolved is None else unsolved.address)
            if unsolved is not None and not unsolved.wait():
                break
        return run

    def solved(self, inputs: Inputs, sides: Any) -> DeviceRun:
        """A solve with known sides, `(B, n + rows + 1)`, of a graph without structures."""
        machine, plan = self.machine, plan_of(inputs.model)
        eta_u, eta_v = machine.plain(inputs.eta_u), machine.plain(inputs.eta_v)
        dtype, batch = machine.dtype(eta_u), len(eta_u)
        stages = self.stages(inputs.model, inputs.params, dtype, batch)
        run = DeviceRun(stages, (eta_u, eta_v, None), 0.0, 0)
        run.found = Answer(plan, machine, batch, dtype)
        run.found.var_side[...] = sides[:, : plan.n]
        run.found.row_side[...] = sides[:, plan.n : plan.n + plan.rows]
        return run

    def _all_rows(self, plan: Plan, warm: Any) -> Any:
        """The multipliers, with zeros for the rows of matchings, which the model lacks."""
        more = plan.hard - plan.model_rows
        if not more:
            return self.machine.plain(warm)
        return self.machine.with_zeros(warm, plan.model_rows, more)

    def stages(self, model: Model, params: list[Any], dtype: Any, batch: int) -> _Stages:
        """The precisions of a model with these parameters, for batches of about this size."""
        given = tuple([p if isinstance(p, float) else _bytes(p) for p in params])
        key = (model, given, dtype, Plan.batch_size(batch))
        found = self._stages.get(key) or _Stages(self, model, params, dtype, batch)
        return _keep(self._stages, key, found)  # type: ignore[no-any-return]

    def program(
        self, model: Model, numbers: Numbers, dtype: Any, precision: Any, batch: int
    ) -> Program:
        """The kernels for a model with any parameters, in batches of about this size."""
        key = (model, dtype, precision, Plan.batch_size(batch), numbers.scale is None)
        program = self._programs.get(key)
        if program is None:
            plan, shared = plan_of(model), self.machine.shared_bytes
            uneven = self.general or bool(numbers.uneven.any())
            choice = plan.choose(
                *(dtype, precision, batch, numbers.coefs, uneven, shared), general=self.general
            )
            program = Program(plan, choice, numbers, self.machine)
        return _keep(self._programs, key, program)  # type: ignore[no-any-return]


def _keep(cache: OrderedDict[Any, Any], key: Any, value: Any) -> Any:
    """Puts it at the end of the cache; drops the oldest."""
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > _KEPT:
        cache.popitem(last=False)
    return value


def _bytes(array: Any) -> tuple[Any, ...]:
    return array.shape, array.tobytes()


def _rows(model: Model, params: list[Any]) -> tuple[Any, Any, Any]:
    """What depends only on the parameters, in float64.

    These are the coefficients and bounds of the rows, and the parameters of structured factors.
    """
    batch = max([1, *(len(p) for p in params if not isinstance(p, float))])
    none = np.zeros((batch, model.num_variables)), np.zeros((1, model.num_scores))
    core = _core.Inputs(model, *none, params, None, None)
    return *core.rows, core.oracle_params
