"""Solves on one machine, with the programs and numbers of models kept from call to call."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from factormax import _core
from factormax._columns import Columns
from factormax._core import Model
from factormax._engines.cuda.plan import Plan
from factormax._engines.cuda.program import Kernel, Machine, Numbers, Program
from factormax._inputs import Inputs
from factormax._model import Remembered
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
_ONE_RUN, _LISTED = 1, 2


@lru_cache(maxsize=_KEPT)
def plan_of(model: Model) -> Plan:
    """The model as the kernels take it."""
    return Plan(model)


class _Stage:
    """One precision: the program, and where the numbers of the rows are on the device."""

    def __init__(self, program: Program, numbers: Numbers, runs: tuple[int, ...]) -> None:
        self.program = program
        machine = program.machine
        coef, rhs, scale = numbers.coef, numbers.rhs, numbers.scale
        given = {"coef": coef, "rhs": rhs} | ({} if scale is None else {"scale": scale})
        if program.plan.hubs:
            given["hub_param"] = numbers.hub_param
        mixed = _mixture(runs)
        if mixed == _LISTED:
            given["score_place"] = Columns.places(runs)
        self._kept = {name: machine.upload(array) for name, array in given.items()}
        own = {name: machine.pointer(array) for name, array in self._kept.items()}
        own["coef_stride"] = 0 if len(coef) == 1 else coef.shape[1]
        own["rhs_stride"] = 0 if len(rhs) == 1 else rhs.shape[1]
        if mixed == _ONE_RUN:
            first, stop = next(iter(Columns.own_runs(runs)), (0, 0))
            own["first_own"], own["num_own"] = first, stop - first
        if program.plan.hubs:
            param = numbers.hub_param
            own["hub_param_stride"] = 0 if len(param) == 1 else param.shape[1]
        self.forward, self.backward = program.forward.having(own), program.backward.having(own)

    @property
    def rows(self) -> tuple[Any, Any]:
        """The coefficients and bounds, `(1 | B, entries)` and `(1 | B, rows)`, on the device."""
        return self._kept["coef"], self._kept["rhs"]

    def backward_at(self, index: Any) -> tuple[Kernel, list[Any]]:
        """`backward` for these instances, and what must be kept alive until the launch."""
        own = {name: a[index] for name, a in self._kept.items() if a.ndim > 1 and len(a) > 1}
        at = self.program.machine.pointer
        given = {name: at(array) for name, array in own.items()}
        return self.backward.having(given), list(own.values())


class DeviceRun:
    """A solve that was queued, and what its gradient needs.

    Attributes:
        inputs: what is solved.
        scores: B × n numbers, contiguous.
        found: the answers.
        stages: one per precision, the least precise first.
    """

    def __init__(self, stages: _Stages, inputs: Inputs, tol: float, max_iter: int) -> None:
        plain = stages.machine.plain
        self.stages, self.inputs = stages, inputs
        self.scores = plain(inputs.scores)
        blocks = [None if b is None else plain(b) for b in inputs.blocks]
        self._factor_scores: list[Any] = blocks
        self._mask = None if inputs.mask is None else plain(inputs.mask)
        self._tol, self._max_iter = tol, max_iter
        self.found: Any = None

    def solve(self, number: int, warm: Any, unsolved: int) -> None:
        """Queues a stage; each one after the first solves what the previous one could not."""
        stage = self.stages[number]
        self.found = stage.program.solve(
            stage.forward,
            self.scores,
            self._factor_scores,
            self._mask,
            warm,
            self.inputs.batch,
            self._tol,
            min(self._max_iter, _PASSES[stage.program.choice.precision]),
            unsolved,
            self.found,
        )

    def go_on(self, unsolved: Any) -> bool:
        """Queues the stages after the first, and waits for each; returns whether any is unsolved.

        unsolved: the flag of the machine that the first one has set.
        """
        for number in range(1, len(self.stages)):
            self.solve(number, None, unsolved.address)
            if not unsolved.wait():
                return False
        return True

    def vjp(self, grad_mu: Any, grad_mu_v: Any) -> tuple[Any, Any, Any]:
        """The gradients of `eta_u`, in the shape of `grad_mu`, and of `eta_v`, `(B, scores)`.

        The third is their relative residuals.
        """
        given = self.scores, self._factor_scores, self.found, grad_mu, grad_mu_v
        out: Any = None
        for stage in self.stages.all:
            out = stage.program.vjp(stage.backward, *given, out)
        return out  # type: ignore[no-any-return]

    def vjp_at(self, index: Any, grad_mu: Any, grad_mu_v: Any) -> tuple[Any, Any, Any]:
        """The same for these instances, `(N,)` on the device, each as often as it is named."""
        own, shared, heat = self._factor_scores
        own_v = own if len(own) == 1 else own[index]
        blocks = own_v, shared, None if heat is None else heat[index]
        given = self.inputs.eta_u[index], blocks, self.found.taken(index), grad_mu, grad_mu_v
        out: Any = None
        for stage in self.stages.all:
            kernel, _kept = stage.backward_at(index)
            out = stage.program.vjp(kernel, *given, out)
        return out  # type: ignore[no-any-return]


class _Stages:
    """The precisions of a model with its parameters; each is made on first use."""

    def __init__(
        self,
        launcher: Launcher,
        model: Model,
        params: list[Any],
        dtype: Any,
        batch: int,
        runs: tuple[int, ...],
    ) -> None:
        self.plan, self.machine = plan_of(model), launcher.machine
        self._precisions = self.plan.precisions(dtype)
        self._made: dict[int, _Stage] = {}
        self._key = launcher, model, list(params), dtype, batch, runs

    def __len__(self) -> int:
        return len(self._precisions)

    def __getitem__(self, number: int) -> _Stage:
        found = self._made.get(number)
        if found is None:
            launcher, model, params, dtype, batch, runs = self._key
            precision = self._precisions[number]
            coef, rhs, own = _rows(model, params)
            given = (coef, rhs, own, precision, bool(params), launcher.general)
            numbers = Numbers(self.plan, *given)
            kind = dtype, precision, batch, _mixture(runs)
            program = launcher.program(model, numbers, *kind)
            found = self._made.setdefault(number, _Stage(program, numbers, runs))
        return found

    @cached_property
    def all(self) -> list[_Stage]:
        """All of them."""
        return [self[number] for number in range(len(self))]


class Launcher:
    """Solves batches on one machine; keeps the programs and the numbers of models.

    Args:
        machine: where to solve.
        general: whether to use kernels that fit many models. They are slower, but save compiling
            time if many models are solved once.
    """

    def __init__(self, machine: Machine, general: bool = False) -> None:
        self.machine, self.general = machine, general
        self._programs: Remembered[Program] = Remembered(_KEPT)
        self._stages: Remembered[_Stages] = Remembered(_KEPT)

    def solve(
        self, inputs: Inputs, options: Options, warm: Any = None, unsolved: Any = None
    ) -> DeviceRun:
        """Queues a solve of inputs whose arrays are on the device.

        Args:
            inputs: what to solve; all scores and the mask are on the device.
            options: how to solve it.
            warm: `(B, rows of the model + pairs)`, multipliers to start from.
            unsolved: a flag of the machine, which the first stage sets if the next one is needed;
                see `DeviceRun.go_on`. None queues all stages.
        """
        stages = self.stages_of(inputs)
        plan = stages.plan
        # A set of words is violated if it lacks more than rounding.
        tol, passes = options.tol, options.max_iter
        if plan.trees.most_words:
            tol = min(tol, _TREE_TOL)
            if unsolved is not None:  # otherwise all stages are queued
                passes = min(passes, _TREE_PASSES)
        run = DeviceRun(stages, inputs, tol, passes)
        start = None if warm is None else self._all_rows(plan, warm)
        if unsolved is not None:
            run.solve(0, start, unsolved.address)
            return run
        for number in range(len(stages)):
            run.solve(number, start, 0)
        return run

    def solved(self, inputs: Inputs, sides: Any) -> DeviceRun:
        """A solve with known sides, `(B, n + rows + 1)`, of a graph without structures."""
        stages = self.stages_of(inputs)
        plan, run = stages.plan, DeviceRun(stages, inputs, 0.0, 0)
        run.found = stages[0].program.answer(inputs.batch, run.scores)
        run.found.var_side[...] = sides[:, : plan.n]
        run.found.row_side[...] = sides[:, plan.n : plan.n + plan.rows]
        return run

    def _all_rows(self, plan: Plan, warm: Any) -> Any:
        """The multipliers, with zeros for the rows of matchings, which the model lacks."""
        more = plan.hard - plan.model_rows
        if not more:
            return self.machine.plain(warm)
        return self.machine.with_zeros(warm, plan.model_rows, more)

    def stages_of(self, inputs: Inputs) -> _Stages:
        """The precisions in which these inputs are solved."""
        dtype, mixed = self.machine.dtype(inputs.scores), inputs.blocks[1] is not None
        runs = inputs.runs if mixed else ()
        return self.stages(inputs.model, inputs.params, dtype, inputs.batch, runs)

    def stages(
        self,
        model: Model,
        params: list[Any],
        dtype: Any,
        batch: int,
        runs: tuple[int, ...] = (),
    ) -> _Stages:
        """The precisions of a model with these parameters, for batches of about this size.

        runs: those of `Columns`, if the instances share some factor scores, but not all.
        """
        key = (model, tuple(map(_content, params)), dtype, Plan.batch_size(batch), runs)
        found = self._stages.get(key)
        if found is None:
            found = _Stages(self, model, params, dtype, batch, runs)
            self._stages.keep(key, found)
        return found

    def program(
        self,
        model: Model,
        numbers: Numbers,
        dtype: Any,
        precision: Any,
        batch: int,
        mixed: int = 0,
    ) -> Program:
        """The kernels for a model with any parameters, in batches of about this size.

        mixed: see `Plan.choose`.
        """
        key = (model, dtype, precision, Plan.batch_size(batch), numbers.scale is None, mixed)
        program = self._programs.get(key)
        if program is None:
            plan, shared = plan_of(model), self.machine.shared_bytes
            uneven = self.general or bool(numbers.uneven.any())
            choice = plan.choose(
                *(dtype, precision, batch, numbers.coefs, uneven, shared),
                general=self.general,
                mixed=mixed,
            )
            program = Program(plan, choice, numbers, self.machine)
            self._programs.keep(key, program)
        return program


def _mixture(runs: tuple[int, ...]) -> int:
    """How the instances share factor scores, as a `Mixture` of `graph.cuh`."""
    if not runs:
        return 0
    return _ONE_RUN if len(Columns.own_runs(runs)) <= 1 else _LISTED


def _content(param: Any) -> Any:
    return param if isinstance(param, float) else (param.shape, param.tobytes())


def _rows(model: Model, params: list[Any]) -> tuple[Any, Any, Any]:
    """What depends only on the parameters, in float64.

    These are the coefficients and bounds of the rows, and the parameters of structured factors.
    """
    batch = max([1, *(len(p) for p in params if not isinstance(p, float))])
    none = np.zeros((batch, model.num_variables)), np.zeros((1, model.num_scores))
    core = _core.Inputs(model, *none, params, None, None)
    return *core.rows, core.oracle_params
