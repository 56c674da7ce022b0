"""A model on a device: its arrays, the kernels of a variant, and their launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from factormax._core import BlockKind
from factormax._engines.cuda.lists import Lists
from factormax._engines.cuda.memory import Layout
from factormax._engines.cuda.plan import Choice, Plan, args_type

__all__ = ["Answer", "Machine", "Numbers", "Program"]

_ABSENT, _EQUALITY = 0, 2
_BYTE, _SHORT, _INT = np.dtype(np.int8), np.dtype(np.int16), np.dtype(np.int32)
_DOUBLE = np.dtype(np.float64)

#: The relative residual up to which a gradient in float is kept.
_GOOD_ENOUGH = 1e-4


class Machine(Protocol):
    """A device and its memory."""

    def load(self, variant: str, names: Sequence[str]) -> dict[str, Any]:
        """The kernels of a variant."""

    @property
    def shared_bytes(self) -> int:
        """The shared memory that a block can have."""

    @property
    def stream(self) -> int:
        """The stream to launch on."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array on the device, with a NumPy dtype."""

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """A copy on the device."""

    def pointer(self, array: Any) -> int:
        """The address where it begins."""

    def plain(self, array: Any) -> Any:
        """The array if it is contiguous, else a contiguous copy."""

    def dtype(self, array: Any) -> np.dtype[Any]:
        """Its NumPy dtype."""

    def view(self, array: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """Bytes as numbers of this dtype."""

    def with_zeros(self, array: Any, at: int, count: int) -> Any:
        """A matrix with columns of zeros from `at` on."""

    def without(self, array: Any, start: int, stop: int) -> Any:
        """A matrix without some of its columns."""

    def download(self, array: Any) -> npt.NDArray[Any]:
        """A copy on the host, once everything queued before is done."""

    def put(self, array: Any, index: Any, values: npt.NDArray[Any]) -> None:
        """Writes rows of an array on the device."""

    @property
    def capturing(self) -> bool:
        """Whether launches are recorded rather than run, so that waiting is impossible."""

    def flag(self) -> AbstractContextManager[Any]:
        """A number that kernels may set, with its `address`; `wait()` returns whether they did.

        `is_set` is what it last returned.
        """


class Numbers:
    """The coefficients and bounds of rows, on the host and as the kernels take them.

    What is decided here depends on the model, not on the parameters: an instance alone must be
    solved as it is in a batch.

    Args:
        plan: the plan with the rows.
        coef, rhs: `(1 | B, entries)` and `(1 | B, rows)` of the model.
        hub_param: `(1 | B, structured factors)`, their parameters.
        dtype: the dtype of the computation.
        params: whether the rows depend on parameters.
        general: whether coefficients are given as numbers, even if they are all 1 or −1.
    """

    def __init__(
        self,
        plan: Plan,
        coef: Any,
        rhs: Any,
        hub_param: Any,
        dtype: npt.DTypeLike,
        params: bool,
        general: bool = False,
    ) -> None:
        coef, rhs = plan.with_matchings(coef, rhs)
        minus = np.full((len(coef), 1 if plan.trees else 0), -1.0)  # see `Plan.minus_at`
        self.coef = np.concatenate([coef, minus], axis=1, dtype=dtype)
        self.rhs = np.ascontiguousarray(rhs, dtype)
        self.hub_param = np.ascontiguousarray(hub_param, np.float64)
        size = np.abs(coef)
        unit = not general and not plan.coef_params and bool((size == 1).all())
        # Cuts of trees may have coefficients of −1.
        self.coefs = 2 if not unit else int((coef < 0).any() or bool(plan.trees))
        self.negative = (coef[0] < 0).astype(np.int64) if self.coefs == 1 else None
        self.uneven = np.ones(plan.hard, bool) if plan.coef_params else _differ(plan, size[0])
        self.kind = plan.kind.copy()
        self.scale = None if params else _scales(plan, coef[0], rhs[0], self.kind, dtype)


def _differ(plan: Plan, size: Any) -> npt.NDArray[np.bool_]:
    """Whether a row has coefficients of different sizes."""
    found = np.zeros(plan.hard, bool)
    filled = np.diff(plan.row_ptr) > 0
    if filled.any():
        starts = plan.row_ptr[:-1][filled]
        least = np.minimum.reduceat(np.where(size > 0, size, np.inf), starts)
        found[filled] = np.maximum.reduceat(size, starts) > least
    return found


def _scales(plan: Plan, coef: Any, rhs: Any, kind: Any, dtype: npt.DTypeLike) -> Any:
    """One over the norm of each row, with no variable masked; 0 if it always holds.

    None if a row can't hold, which the kernel reports. Bands of one value become equations.
    """
    at = plan.row_of_entry
    squares, most = (
        np.bincount(at, v, minlength=plan.hard) for v in (coef**2, np.maximum(coef, 0))
    )
    least = np.bincount(at, np.minimum(coef, 0), minlength=plan.hard)
    for f in np.flatnonzero(plan.block_kind == int(BlockKind.band.value)):
        first, last = plan.block_ptr[f], plan.block_ptr[f + 1] - 1
        if rhs[first] == -rhs[last]:
            kind[first], kind[last] = _ABSENT, _EQUALITY
    slack = 1e-7 * (most - least + np.abs(rhs))
    fails = (least > rhs + slack) | ((kind == _EQUALITY) & (most < rhs - slack))
    if (fails & (kind != _ABSENT)).any():
        return None
    says = (kind != _ABSENT) & (squares > 0) & ((kind == _EQUALITY) | (most > rhs))
    return np.where(says, 1 / np.sqrt(np.where(says, squares, 1)), 0).astype(dtype)


class Answer:
    """What the kernels found, on the device. All but `mu` and `mu_v` share one array.

    Attributes:
        mu: `(B, n)`, `mu_v`: `(B, scores)`; `objective`: `(B,)`.
    """

    __slots__ = ("_machine", "_made", "_places", "_rest", "at", "mu", "mu_v")

    def __init__(
        self, plan: Plan, machine: Machine, batch: int, dtype: Any, saved: int = 0
    ) -> None:
        self._machine, self._made = machine, (plan, machine, dtype, saved)
        self.mu = machine.empty((batch, plan.n), dtype)
        self.mu_v = machine.empty((batch, plan.scores), dtype)
        self._places, size = _layout(plan, batch, dtype, saved)
        self._rest = machine.empty((size,), _BYTE)
        base = machine.pointer(self._rest)
        #: The address of each of these.
        self.at = {name: base + place for name, (place, _, _) in self._places.items()}

    def __getattr__(self, name: str) -> Any:
        if name not in _OTHERS:
            raise AttributeError(name)
        start, shape, dtype = self._places[name]
        stop = start + math.prod(shape) * dtype.itemsize
        return self._machine.view(self._rest[start:stop], dtype, shape)

    def taken(self, index: Any) -> Answer:
        """What the gradients of these instances need, in this order; `index` is on the device."""
        plan, machine, dtype, saved = self._made
        found = Answer(plan, machine, len(index), dtype, saved)
        for name in _KEPT:
            getattr(found, name)[...] = getattr(self, name)[index]
        return found


@lru_cache(maxsize=64)
def _layout(plan: Plan, batch: int, dtype: Any, saved: int) -> tuple[dict[str, Any], int]:
    """Where the arrays of an answer begin, in bytes, their shapes and dtypes; and their size."""
    places: dict[str, tuple[int, Any, Any]] = {}
    start = 0
    for name, shape, kind in (
        ("residual", (batch,), _DOUBLE),
        ("objective", (batch,), dtype),
        ("tau", (batch, plan.rows), dtype),
        ("iterations", (batch,), _INT),
        ("status", (batch,), _INT),
        ("oracle_calls", (batch if saved else 0,), _INT),
        ("cuts", (batch, plan.trees.saved), _INT),
        ("structures", (batch, saved), _SHORT),
        ("var_side", (batch, plan.n), _BYTE),
        ("row_side", (batch, plan.rows), _BYTE),
    ):
        places[name] = start, shape, kind
        start += math.prod(shape) * kind.itemsize
    return places, start


#: What a gradient needs from an answer.
_KEPT = ("cuts", "structures", "var_side", "row_side")
_OTHERS = ("residual", "objective", "tau", "iterations", "status", "oracle_calls", *_KEPT)


class Program:
    """The kernels for a model, ready to be launched."""

    def __init__(self, plan: Plan, choice: Choice, numbers: Numbers, machine: Machine) -> None:
        self.plan, self.choice, self.machine = plan, choice, machine
        functions = machine.load(choice.source, ("forward", "backward"))
        self.forward, self.backward = functions["forward"], functions["backward"]
        self.args = args = args_type()()
        self.kept: list[Any] = []
        self._set(**self._lists(numbers))
        self._set(
            kind=numbers.kind,
            block=plan.block_of_row,
            flags=plan.flags(numbers.uneven),
            isolated=plan.isolated,
            pair=(2 * plan.pair_var + plan.pair_negated).astype(np.int32),
            corner=_corners(choice.most_active),
        )
        if plan.hubs:
            self._set_hubs()
        if plan.trees:
            self._set_trees()
        args.n, args.hard, args.pairs = plan.n, plan.hard, plan.pairs
        args.padded_rows, args.num_isolated = plan.padded_rows, len(plan.isolated)
        args.all_isolated = int(len(plan.isolated) == plan.rows)
        args.most_active, args.lead = choice.most_active, plan.lead
        args.degree = int(plan.degrees.max(initial=1)) + plan.trees.most_cuts
        args.longest, args.zeros = plan.longest, plan.zeros
        args.retry_above = _GOOD_ENOUGH
        self._prepared = {
            "forward": self._with(choice.forward, "kRowArrays"),
            "backward": self._with(choice.backward, "kBackwardRowArrays"),
        }

    def _with(self, layout: Layout, row_arrays: str) -> Any:
        """The arguments that never change."""
        args = type(self.args).from_buffer_copy(self.args)
        for name, value in layout.offsets.items():
            setattr(args, name, value)
        args.work_stride = self.choice.constants[row_arrays] * self.plan.padded_rows
        if self.choice.hubs:
            for name, value in self.choice.hubs.in_work.items():
                setattr(args, name, value)
        return args

    def _set_trees(self) -> None:
        plan, trees, args = self.plan, self.plan.trees, self.args
        arc_of = trees.arc_of(plan.n + self.choice.team)
        self._set(tree=trees.table, tree_var=trees.var, arc_of=arc_of)
        args.num_trees, args.most_words = len(trees.table), trees.most_words
        args.most_cuts, args.cut_words = trees.most_cuts, trees.cut_words
        args.first_cut, args.model_rows = plan.first_cut, plan.model_rows
        args.unit_at, args.minus_at = plan.unit_at, plan.minus_at
        args.cuts_saved_stride = trees.saved

    def _set_hubs(self) -> None:
        hubs, memory, args = self.plan.hubs, self.choice.hubs, self.args
        assert hubs is not None and memory is not None
        self._set(
            hub=memory.table,
            hub_shape=hubs.shape,
            hub_var=hubs.var,
            hub_slot=hubs.slot,
            hub_at=hubs.at(self.plan.n + self.choice.team),
        )
        args.num_hubs, args.hub_vars, args.hub_scores = hubs.count, len(hubs.var), hubs.scores
        args.hub_saved_stride, args.hub_work_stride = memory.saved, memory.work_stride
        for name, value in memory.offsets.items():
            setattr(args, name, value)

    def _set(self, **arrays: Any) -> None:
        """Puts arrays on the device, permanently."""
        for name, array in arrays.items():
            if array.size:
                self.kept.append(self.machine.upload(np.ascontiguousarray(array)))
                setattr(self.args, name, self.machine.pointer(self.kept[-1]))

    def _lists(self, numbers: Numbers) -> dict[str, Any]:
        plan, constants = self.plan, self.choice.constants
        size = self.choice.precision.itemsize
        negative = numbers.negative if numbers.negative is not None else np.zeros_like(plan.col)
        entries = 2 * plan.col + negative
        places = np.arange(len(entries))
        var_ptr, var_code, var_place = plan.by_variable(negative)

        def shape(of: str) -> tuple[int, int, int]:
            return self.choice.team, int(constants[f"k{of}Lanes"]), int(constants[f"k{of}Width"])

        codes = plan.col * size + negative
        rows = Lists.laid_out(plan.row_ptr, codes, places, shape("Row"), plan.n * size)
        codes = (var_code >> 2) * size + (var_code & 3)
        every = np.append(var_ptr, var_ptr[-1])  # one more variable, which is in no row
        columns = Lists.laid_out(every, codes, var_place, shape("Var"), plan.rows * size)
        return {
            "row_first": rows.first,
            "row_code": rows.code.astype(np.uint32),
            "row_place": rows.place,
            "var_first": columns.first,
            "var_code": columns.code.astype(np.uint32),
            "var_place": columns.place,
            "row_ptr": plan.row_ptr,
            "row_entry": entries.astype(np.int32),
            "var_ptr": var_ptr,
            "var_entry": var_code.astype(np.int32),
            "var_at": var_place.astype(np.int32),
        }

    # ---- launches --------------------------------------------------------------------------------

    def solve(
        self,
        numbers: dict[str, Any],
        eta_u: Any,
        eta_v: Any,
        mask: Any,
        warm: Any,
        tol: float,
        max_iter: int,
        unsolved: int = 0,
        again: Answer | None = None,
    ) -> Answer:
        """Queues the solve of a batch.

        Args:
            numbers: the addresses of the rows' numbers on the device, by argument name.
            eta_u: `(B, n)`. All arrays are contiguous and on the device.
            eta_v: `(1 | B, scores)`.
            mask: `(1 | B, n)` of bytes, or None.
            warm: `(B, rows)`, or None.
            tol: the residual to reach.
            max_iter: the most passes.
            unsolved: the address of an integer that becomes 1 if an instance is not solved.
            again: the answers of a less precise program: only what it could not solve is solved,
                and written there.
        """
        at, batch = self.machine.pointer, eta_u.shape[0]
        saved = self.choice.hubs.saved if self.choice.hubs else 0
        found = again or Answer(self.plan, self.machine, batch, self.choice.dtype, saved)
        args = self._args("forward", numbers, eta_u, eta_v, found)
        if mask is not None:
            args.mask = at(mask)
            args.mask_stride = 0 if mask.shape[0] == 1 else self.plan.n
        if again is not None:
            args.warm, args.retry = found.at["tau"], 1
        elif warm is not None:
            args.warm = at(warm)
        args.residual, args.objective = found.at["residual"], found.at["objective"]
        args.iterations, args.status = found.at["iterations"], found.at["status"]
        args.unsolved = unsolved
        args.tol, args.max_iter = tol, max_iter
        self._launch("forward", args, batch)
        return found

    def vjp(
        self,
        numbers: dict[str, Any],
        eta_u: Any,
        eta_v: Any,
        found: Answer,
        grad_mu: Any,
        grad_mu_v: Any,
        again: tuple[Any, Any, Any] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Queues the gradients of `eta_u` and `eta_v`, `(B, scores)`, and their relative residuals.

        again: the results of a less precise program; only what it could not solve is overwritten.
        """
        at, new, batch = self.machine.pointer, self.machine.empty, found.mu.shape[0]
        real = self.choice.dtype
        out = again or (
            new((batch, self.plan.n), real),
            new((batch, self.plan.scores), real),
            new((batch,), _DOUBLE),
        )
        args = self._args("backward", numbers, eta_u, eta_v, found)
        if grad_mu is not None:
            args.grad_mu = at(grad_mu)
        if grad_mu_v is not None:
            args.grad_mu_v = at(grad_mu_v)
        args.grad_eta_u, args.grad_eta_v, args.residual = at(out[0]), at(out[1]), at(out[2])
        args.retry = int(again is not None)
        self._launch("backward", args, batch)
        return out

    def _args(self, kernel: str, numbers: Any, eta_u: Any, eta_v: Any, found: Answer) -> Any:
        prepared, at = self._prepared[kernel], self.machine.pointer
        args = type(prepared).from_buffer_copy(prepared)
        for name, value in numbers.items():
            setattr(args, name, value)
        args.eta_u = at(eta_u)
        if self.plan.scores:
            args.eta_v, args.mu_v = at(eta_v), at(found.mu_v)
            args.eta_v_stride = 0 if eta_v.shape[0] == 1 else self.plan.scores
        if self.plan.trees:
            args.cuts_saved = found.at["cuts"]
        if self.plan.hubs:
            args.hub_saved, args.calls = found.at["structures"], found.at["oracle_calls"]
        args.mu, args.tau = at(found.mu), found.at["tau"]
        args.var_side, args.row_side = found.at["var_side"], found.at["row_side"]
        return args

    def _launch(self, kernel: str, args: Any, batch: int) -> None:
        choice, teams = self.choice, self.choice.teams_per_block
        work = None
        if not choice.rows_shared:
            work = self.machine.empty((batch, args.work_stride), choice.precision)
            args.work = self.machine.pointer(work)
        if args.hub_work_stride:
            more = self.machine.empty((batch, args.hub_work_stride), _BYTE)
            args.hub_work = self.machine.pointer(more)
        args.batch = batch
        function = self.forward if kernel == "forward" else self.backward
        blocks, shared = -(-batch // teams), args.team_bytes * teams
        function.launch(blocks, choice.team * teams, shared, self.machine.stream, args)


@cache
def _corners(size: int) -> npt.NDArray[np.uint32]:
    """Rows and columns of a lower triangle, row by row."""
    x, y = np.tril_indices(size)
    return ((x << 16) | y).astype(np.uint32)
