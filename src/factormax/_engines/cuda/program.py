"""A model on a device: its arrays, the kernels of a variant, and their launches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from factormax._core import BlockKind
from factormax._engines.cuda.answer import Answer, places_of
from factormax._engines.cuda.lists import Lists
from factormax._engines.cuda.memory import Layout
from factormax._engines.cuda.plan import Choice, Plan, args_type

__all__ = ["Kernel", "Machine", "Numbers", "Program"]

_ABSENT, _EQUALITY = 0, 2
_BYTE, _DOUBLE = np.dtype(np.int8), np.dtype(np.float64)

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

    def like(self, array: Any) -> Any:
        """Another array of the same shape and dtype as this contiguous one."""

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

        It is in use until it is left as a context.
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


class Kernel(NamedTuple):
    """A kernel of a program, and what is the same in all its launches."""

    function: Any
    args: Any
    shared: int  # bytes, of a block

    def having(self, numbers: dict[str, Any]) -> Kernel:
        """The same with other arguments, by name."""
        args = type(self.args).from_buffer_copy(self.args)
        for name, value in numbers.items():
            setattr(args, name, value)
        return self._replace(args=args)


class Program:
    """The kernels for a model, ready to be launched.

    Attributes:
        forward, backward: the kernels, without the numbers of the rows.
    """

    def __init__(self, plan: Plan, choice: Choice, numbers: Numbers, machine: Machine) -> None:
        self.plan, self.choice, self.machine = plan, choice, machine
        functions = machine.load(choice.source, ("forward", "backward"))
        self.args = args = args_type()()
        self._copy = type(args).from_buffer_copy
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
        given = functions["forward"], choice.forward, "kRowArrays"
        self.forward = self._kernel(*given)
        given = functions["backward"], choice.backward, "kBackwardRowArrays"
        self.backward = self._kernel(*given)
        self._saved = choice.hubs.saved if choice.hubs else 0

    def _kernel(self, function: Any, layout: Layout, row_arrays: str) -> Kernel:
        args = self._copy(self.args)
        for name, value in layout.offsets.items():
            setattr(args, name, value)
        args.work_stride = self.choice.constants[row_arrays] * self.plan.padded_rows
        if self.choice.hubs:
            for name, value in self.choice.hubs.in_work.items():
                setattr(args, name, value)
        return Kernel(function, args, args.team_bytes * self.choice.teams_per_block)

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
        kernel: Kernel,
        eta_u: Any,
        blocks: Any,
        mask: Any,
        warm: Any,
        batch: int,
        tol: float,
        max_iter: int,
        unsolved: int = 0,
        again: Answer | None = None,
    ) -> Answer:
        """Queues the solve of a batch.

        Args:
            kernel: `forward`, with the numbers of the rows.
            eta_u: B × n numbers, in any shape. All arrays are contiguous and on the device.
            blocks: the factor scores, as `Inputs.blocks` has them.
            mask: `(1 | B, n)` of bytes, or None.
            warm: `(B, rows)`, or None.
            batch: B.
            tol: the residual to reach.
            max_iter: the most passes.
            unsolved: the address of an integer that becomes 1 if an instance is not solved.
            again: the answers of a less precise program: only what it could not solve is solved,
                and written there.
        """
        machine = self.machine
        found = again or self.answer(batch, eta_u)
        args = self._args(kernel, eta_u, blocks, found)
        base, start = found.address, found.places.start
        if mask is not None:
            args.mask = machine.pointer(mask)
            args.mask_stride = 0 if mask.shape[0] == 1 else self.plan.n
        if again is not None:
            args.warm, args.retry = base + start["tau"], 1
        elif warm is not None:
            args.warm = machine.pointer(warm)
        args.residual, args.objective = base + start["residual"], base + start["objective"]
        args.iterations, args.status = base + start["iterations"], base + start["status"]
        args.unsolved = unsolved
        args.tol, args.max_iter = tol, max_iter
        self._launch(kernel, args, batch)
        return found

    def answer(self, batch: int, eta_u: Any) -> Answer:
        """An answer that nothing was written to; the values have the shape of `eta_u`."""
        places = places_of(self.plan, batch, self.choice.dtype, self._saved)
        return Answer(places, self.machine, self.machine.like(eta_u))

    def vjp(
        self,
        kernel: Kernel,
        eta_u: Any,
        blocks: Any,
        found: Answer,
        grad_mu: Any,
        grad_mu_v: Any,
        again: tuple[Any, Any, Any] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Queues the gradients of `eta_u` and `eta_v`, `(B, scores)`, and their relative residuals.

        The gradient of `eta_u` has the shape of `grad_mu`, or of `found.values` if that is None.

        Args:
            kernel: `backward`, with the numbers of the rows.
            eta_u: the scores, as `solve` takes them.
            blocks: likewise.
            found: what it found.
            grad_mu: B × n numbers, in any shape, or None, which means 0.
            grad_mu_v: `(B, scores)`, or None.
            again: the results of a less precise program; only what it could not solve is
                overwritten.
        """
        machine, places = self.machine, found.places
        at, batch = machine.pointer, places.variables[0]
        out = again or (
            machine.like(found.values if grad_mu is None else grad_mu),
            machine.empty(places.scores, places.dtype),
            machine.empty((batch,), _DOUBLE),
        )
        args = self._args(kernel, eta_u, blocks, found)
        if grad_mu is not None:
            args.grad_mu = at(grad_mu)
        if grad_mu_v is not None:
            args.grad_mu_v = at(grad_mu_v)
        args.grad_eta_u, args.grad_eta_v, args.residual = at(out[0]), at(out[1]), at(out[2])
        args.retry = int(again is not None)
        self._launch(kernel, args, batch)
        return out

    def _args(self, kernel: Kernel, eta_u: Any, blocks: Any, found: Answer) -> Any:
        args, at = self._copy(kernel.args), self.machine.pointer
        base, start = found.address, found.places.start
        args.eta_u, args.mu = at(eta_u), at(found.values)
        if self.plan.scores:
            own, shared, heat = blocks
            args.eta_v, args.mu_v = at(own), at(found.mu_v)
            args.eta_v_stride = 0 if own.shape[0] == 1 else own.shape[1]
            if shared is not None:
                args.shared, args.heat = at(shared), 0 if heat is None else at(heat)
        args.tau, args.cuts_saved = base + start["tau"], base + start["cuts"]
        args.hub_saved, args.calls = base + start["structures"], base + start["oracle_calls"]
        args.var_side, args.row_side = base + start["var_side"], base + start["row_side"]
        return args

    def _launch(self, kernel: Kernel, args: Any, batch: int) -> None:
        choice, machine = self.choice, self.machine
        teams = choice.teams_per_block
        if not choice.rows_shared:
            work = machine.empty((batch, args.work_stride), choice.precision)
            args.work = machine.pointer(work)
        if args.hub_work_stride:
            more = machine.empty((batch, args.hub_work_stride), _BYTE)
            args.hub_work = machine.pointer(more)
        args.batch = batch
        blocks, threads = -(-batch // teams), choice.team * teams
        kernel.function.launch(blocks, threads, kernel.shared, machine.stream, args)


@cache
def _corners(size: int) -> npt.NDArray[np.uint32]:
    """Rows and columns of a lower triangle, row by row."""
    x, y = np.tril_indices(size)
    return ((x << 16) | y).astype(np.uint32)
