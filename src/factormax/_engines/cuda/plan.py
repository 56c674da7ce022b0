"""What the kernels need for a model, and the variant of them that solves it."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax._core import BlockKind, Model, OracleKind
from factormax._engines.cuda.hubs import HubMemory, Hubs
from factormax._engines.cuda.lists import even_packs, lanes_for, offsets
from factormax._engines.cuda.memory import Layout, Sizes
from factormax._engines.cuda.trees import Trees, rows_of_tree
from factormax._inputs import structured_of
from factormax.arrays import IndexArray

__all__ = ["Args", "Choice", "Plan", "args_type"]

_ABSENT, _EQUALITY, _INEQUALITY = 0, 2, 1
_OF_FACTOR, _BAND_LOWER, _BAND_UPPER, _UNEVEN = 1, 2, 4, 8

#: Pairs of rows of a variable, in total; with more, it is not checked whether some meet twice.
_MOST_MEETINGS = 200_000
#: With fewer pairs, a solve is quicker than a search for variables that are 0.
_MANY_PAIRS = 64
#: From this many pairs per variable, or variables per row, on, sums over them lose digits in
#: float, so everything is computed in double.
_PAIRS_TO_WIDEN, _LONG_ROW = 8, 128
#: The threads that a multiprocessor needs at least, to hide the latency of memory.
_ENOUGH_THREADS = 512
#: Batches up to the first size leave multiprocessors idle, up to the second fill them a few times.
_SMALL_BATCH, _MIDDLE_BATCH = 256, 4096
#: From this many rows on, more than 256 threads pay off.
_MANY_ROWS = 4000
#: Threads per instance at most, with hubs.
_HUB_TEAM = 128

Args = ctypes.Structure


@cache
def args_type() -> type[ctypes.Structure]:
    """The argument of the kernels, as `graph.cuh` declares it."""
    text = files("factormax._engines.cuda").joinpath("kernels/graph.cuh").read_text()
    body = text[text.index("struct Args {") : text.index("\n};", text.index("struct Args {"))]
    types = {"int": ctypes.c_int, "i64": ctypes.c_int64, "double": ctypes.c_double}
    found = re.findall(r"^  (?:const )?(\w+)(\*?) (\w+);", body, re.MULTILINE)
    fields = [(name, ctypes.c_void_p if star else types[kind]) for kind, star, name in found]
    return type("Args", (ctypes.Structure,), {"_fields_": fields})


def _power_of_two(value: float) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(0, int(np.ceil(np.log2(max(value, 1)))))


@dataclass(frozen=True)
class Choice:
    """How a model is solved in a batch: a variant of the kernels, and the memory of a team."""

    dtype: Any  # of the scores
    precision: Any
    constants: dict[str, Any]  # of the variant
    forward: Layout
    backward: Layout
    most_active: int
    hubs: HubMemory | None = None

    @cached_property
    def team(self) -> int:
        """Threads per instance."""
        return int(self.constants["kTeam"])

    @cached_property
    def teams_per_block(self) -> int:
        """Instances per block."""
        return int(self.constants["kTeamsPerBlock"])

    @cached_property
    def rows_shared(self) -> bool:
        """Whether arrays over rows are in shared memory."""
        return bool(self.constants["kRowsShared"])

    @property
    def source(self) -> str:
        """The variant, in CUDA C++."""
        types = {"T": self.precision, "Io": self.dtype}
        names = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
        lines = [f"  using {k} = {names[np.dtype(v)]};" for k, v in types.items()]
        for name, value in self.constants.items():
            kind = "bool" if isinstance(value, bool) else "int"
            lines.append(f"  static constexpr {kind} {name} = {str(value).lower()};")
        body = "\n".join(lines)
        return f'#include "rows.cuh"\nstruct Variant {{\n{body}\n}};\nFACTORMAX_KERNELS(Variant)\n'


class Plan:
    """A model of rows, pairs and structured factors, as the kernels take it.

    Attributes:
        n, hard, pairs: the numbers of variables, constraints and pairs; `rows`: of constraints and
            pairs together.
        hubs: the structured factors that are not solved by rows, or None; `scores`: the number of
            their scores and those of the pairs.
        trees: the trees; their cuts are the last constraints, from `first_cut` on.
        coef_params: whether coefficients depend on parameters.
        model_rows: the model's own constraints; those of matchings come after them.
        unsupported: why the kernels can't solve it, or "".
    """

    def __init__(self, model: Model) -> None:
        self.unsupported = self._reason(model)
        if self.unsupported:
            return
        self.n, self.pairs = model.num_variables, model.num_pairs
        self.coef_params = model.has_coef_params
        self.model_rows = model.num_rows
        every = structured_of(model)
        self.trees = Trees(model)
        matchings = [
            self._rows_of_matching(f) if f.kind == OracleKind.matching else rows_of_tree(f)
            for f in every
            if f.kind in (OracleKind.matching, OracleKind.tree)
        ]
        self.hubs = Hubs(model) if len(matchings) < len(every) else None
        self._rows_of_words = self.trees.rows_of_words(model)
        self.scores = self.pairs + (self.hubs.scores if self.hubs else 0)
        columns = [c for rows, _ in matchings for c in rows]
        cuts = self.trees.most_cuts
        lengths = [*np.diff(model.row_ptr), *(len(c) for c in columns), *([0] * cuts)]
        self.row_ptr = offsets(lengths)
        self.col = np.concatenate([model.col, *columns]).astype(np.int64)
        kinds = [*model.row_kind, *(k for _, ks in matchings for k in ks)]
        self.first_cut = len(kinds)
        self.kind = np.array(kinds + [_ABSENT] * cuts, np.int8)
        self.hard = len(self.kind)
        self.rows = self.hard + self.pairs
        more = np.arange(self.model_rows, self.hard) + 1
        self.block_ptr = np.concatenate([model.block_ptr, more]).astype(np.int32)
        self.block_kind = np.array([*model.block_kind, *([0] * len(more))], np.int8)
        self.pair_var = np.asarray(model.pairs, np.int64).reshape(-1, 2)
        self.pair_negated = np.asarray(model.pair_negated, np.int64).reshape(-1, 2)
        self.zeros = int(self.pairs >= _MANY_PAIRS and not every and not self.pair_negated.any())

    @staticmethod
    def _reason(model: Model) -> str:
        for factor in structured_of(model):
            reason = Trees.reason(factor) if Trees.has(factor) else Hubs.reason(factor)
            if reason:
                return reason
            if factor.linked:
                return "structured factors that share variables have no kernel"
        return ""

    @staticmethod
    def _rows_of_matching(factor: Any) -> tuple[list[Any], list[int]]:
        rows, columns = (int(s) for s in factor.shape)
        grid = np.asarray(factor.variables).reshape(rows, columns)
        return [*grid, *grid.T], [_EQUALITY] * rows + [_INEQUALITY] * columns

    # ---- the rows --------------------------------------------------------------------------------

    def with_matchings(self, coef: Any, rhs: Any) -> tuple[Any, Any]:
        """The numbers of the model's rows, `(1 | B, ...)`, followed by those of the matchings."""

        def widened(array: Any, size: int) -> Any:
            ones = np.ones((len(array), size - array.shape[1]), array.dtype)
            return np.concatenate([array, ones], axis=1) if ones.size else array

        return widened(coef, len(self.col)), widened(rhs, self.hard)

    @cached_property
    def row_of_entry(self) -> IndexArray:
        """The row of each entry."""
        return np.repeat(np.arange(self.hard), np.diff(self.row_ptr))

    @cached_property
    def degrees(self) -> IndexArray:
        """The number of rows that each variable is in."""
        both = np.concatenate([self.col, self.pair_var.reshape(-1)])
        return np.bincount(both, minlength=self.n)

    @cached_property
    def isolated(self) -> IndexArray:
        """The rows that share no variable with another row or a hub, and the rows of words.

        Solving the latter as if they were alone is a good start.
        """
        more = self.degrees[self.col] > 1
        if self.hubs:
            more |= np.isin(self.col, self.hubs.var)
        more &= ~np.isin(self.row_of_entry, self._rows_of_words)
        shared = np.bincount(self.row_of_entry, more, minlength=self.hard)
        return np.flatnonzero((shared == 0) & (self.kind != _ABSENT)).astype(np.int32)

    @cached_property
    def lead(self) -> int:
        """The number of leading rows that share no variable with each other."""
        if self.hubs:
            return 0
        before = np.full(self.n, -1)
        for r in range(self.first_cut):
            own = self.col[self.row_ptr[r] : self.row_ptr[r + 1]]
            if (before[own] >= 0).any():
                return r
            before[own] = r
        return self.first_cut

    @cached_property
    def simple(self) -> bool:
        """Whether no two variables are both in the same two rows."""
        ptr, code, _ = self.by_variable(np.zeros(len(self.col), np.int64))
        if (self.degrees.astype(np.int64) ** 2).sum() > _MOST_MEETINGS:
            return False
        rows, seen = code >> 2, []
        for j in range(self.n):
            own = np.unique(rows[ptr[j] : ptr[j + 1]])
            i, k = np.triu_indices(len(own), 1)
            seen.append(own[i] * self.rows + own[k])
        meetings = np.concatenate(seen) if seen else np.zeros(0, np.int64)
        return len(np.unique(meetings)) == len(meetings)

    @cached_property
    def longest(self) -> int:
        """The largest number of variables in a row."""
        return max(1, int(np.diff(self.row_ptr).max(initial=1)), 2 if self.pairs else 1)

    @property
    def unit_at(self) -> int:
        """The place of a coefficient of trees' rows, which is 1."""
        return int(self.row_ptr[self.model_rows])

    @property
    def minus_at(self) -> int:
        """The place of a coefficient of −1, after those of all rows."""
        return len(self.col)

    def flags(self, uneven: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
        """The flags of each row, see `RowFlag`."""
        found = np.full(self.hard, _OF_FACTOR, np.uint8)
        found[uneven] |= _UNEVEN
        bands = np.flatnonzero(self.block_kind == int(BlockKind.band.value))
        found[self.block_ptr[bands]] |= _BAND_LOWER
        found[self.block_ptr[bands + 1] - 1] |= _BAND_UPPER
        return found

    @cached_property
    def block_of_row(self) -> IndexArray:
        """`(hard, 2)`, the first row of its factor, and one past the last."""
        sizes = np.diff(self.block_ptr)
        both = np.stack([self.block_ptr[:-1], self.block_ptr[1:]], axis=1)
        return np.repeat(both, sizes, axis=0).astype(np.int32)

    def by_variable(self, negative: IndexArray) -> tuple[IndexArray, IndexArray, IndexArray]:
        """The entries of each variable: where they begin, their codes, their places in `coef`."""
        pairs = (self.hard + np.arange(self.pairs))[:, None] * 4 + np.array([0, 2])
        pairs += np.stack([1 - self.pair_negated[:, 0], self.pair_negated[:, 1]], axis=1)
        owner = np.concatenate([self.col, self.pair_var.reshape(-1)])
        code = np.concatenate([self.row_of_entry * 4 + negative, pairs.reshape(-1)])
        place = np.concatenate([np.arange(len(self.col)), np.full(2 * self.pairs, -1)])
        order = np.argsort(owner, kind="stable")
        return offsets(self.degrees), code[order], place[order]

    # ---- the variant -----------------------------------------------------------------------------

    def fits(self, shared_bytes: int) -> bool:
        """Whether an instance fits into the shared memory of a block, even in double."""
        sizes = Sizes(self, 8, True)
        layouts = sizes.forward, sizes.backward
        active = sizes.most_active(shared_bytes)
        return all(layout(512, active, False).bytes <= shared_bytes for layout in layouts)

    def precisions(self, dtype: npt.DTypeLike) -> list[np.dtype[Any]]:
        """The precisions for scores of this dtype; a second one solves what the first can't."""
        wide = self.pairs >= _PAIRS_TO_WIDEN * self.n or self.longest > _LONG_ROW
        both = [np.dtype(dtype), np.dtype(np.float64)]
        wide = wide or bool(self.hubs) or bool(self.trees)
        return both[1:] if wide or both[0] == both[1] else both

    def choose(
        self,
        dtype: npt.DTypeLike,
        precision: np.dtype[Any],
        batch: int,
        coefs: int,
        uneven: bool,
        shared_bytes: int,
        general: bool = False,
        mixed: int = 0,
        **given: int,
    ) -> Choice:
        """A variant for batches of about this size.

        Args:
            dtype: the dtype of the scores.
            precision: the dtype of the computation.
            batch: the number of instances.
            coefs: 0 if all coefficients are 1, 1 if they are 1 or −1, 2 for any.
            uneven: whether coefficients of a row differ in magnitude.
            shared_bytes: the shared memory that a block can have.
            general: whether the variant should fit as many models as possible.
            mixed: how the instances share factor scores, a `Mixture` of `graph.cuh`.
            given: `team`, `row_lanes`, `var_lanes`, `teams_per_block`, to use as they are.
        """
        sizes = Sizes(self, precision.itemsize, uneven)
        active = sizes.most_active(shared_bytes)
        rows = sizes.forward(512, active, True).bytes <= shared_bytes
        memory = None
        if self.hubs:
            taken = sizes.forward(_HUB_TEAM, active, rows).bytes
            memory = self.hubs.memory(shared_bytes, taken, active)
            sizes = Sizes(self, precision.itemsize, uneven, memory)
        team = given.get("team") or self._team(batch)
        while "team" not in given and not self.hubs and team < 512:
            together = shared_bytes // sizes.forward(team, active, rows).bytes
            if team * together >= _ENOUGH_THREADS:
                break
            team *= 2
        forward = sizes.forward(team, active, rows)
        # A multiprocessor holds only 32 blocks, so small teams share one.
        teams = 4 if team == 32 and forward.bytes < shared_bytes // 32 and not general else 1
        lengths = np.diff(self.row_ptr)
        row_width = var_width = 4
        if general:
            given = {"row_lanes": 2, "var_lanes": 2} | given
        else:
            row_width = min(4, _power_of_two(self.longest))
            var_width = min(4, _power_of_two(int(self.degrees.max(initial=1))))
        row_lanes = given.get("row_lanes") or lanes_for(lengths, row_width, team)
        var_lanes = given.get("var_lanes") or lanes_for(self.degrees, var_width, team)
        packs = (lambda *_: 0) if general else even_packs
        constants = {
            "kTeam": team,
            "kTeamsPerBlock": given.get("teams_per_block") or teams,
            "kRowLanes": row_lanes,
            "kRowWidth": row_width,
            "kRowPacks": packs(lengths, (team, row_lanes, row_width)),
            "kVarLanes": var_lanes,
            "kVarWidth": var_width,
            "kVarPacks": packs(np.append(self.degrees, 0), (team, var_lanes, var_width)),
            "kIsolatedLanes": 1 if general else self._isolated_lanes(team),
            "kCoefs": coefs,
            "kRowArrays": sizes.row_arrays(active),
            "kBackwardRowArrays": sizes.backward_row_arrays(active),
            "kPairs": self.pairs > 0,
            "kMixed": mixed,
            "kSimple": self.simple and not general,
            "kUneven": uneven,
            "kRowsShared": rows,
            "kConjugate": active < self.rows,
            **_hub_constants(self.hubs, memory),
            "kTrees": bool(self.trees),
        }
        backward = sizes.backward(team, active, rows)
        return Choice(np.dtype(dtype), precision, constants, forward, backward, active, memory)

    @property
    def padded_rows(self) -> int:
        """The length of an array over all rows."""
        return max(4, (self.rows + 3) & ~3)

    @staticmethod
    def batch_size(batch: int) -> int:
        """0 if it leaves multiprocessors idle, 1 if it fills them, 2 if it does many times over."""
        return int(batch > _SMALL_BATCH) + int(batch > _MIDDLE_BATCH)

    def _team(self, batch: int) -> int:
        """More threads for larger graphs, fewer in larger batches, which fill the device."""
        if self.hubs:  # their memory leaves room for few teams; one warp does most of the work
            return int(np.clip(_power_of_two((self.n + self.rows) / 5), 32, _HUB_TEAM))
        each = (5, 10, 20)[self.batch_size(batch)]
        most = 512 if self.rows > _MANY_ROWS else 256
        return int(np.clip(_power_of_two((self.n + self.rows) / each), 32, most))

    def _isolated_lanes(self, team: int) -> int:
        lengths = np.diff(self.row_ptr)[self.isolated]
        if not len(lengths):
            return 1
        lanes = lanes_for(lengths, 1, team)
        return team if lanes == 32 and len(lengths) < team // 32 else lanes


def _hub_constants(hubs: Hubs | None, memory: HubMemory | None) -> dict[str, int]:
    kinds = hubs.kinds if hubs else set()
    return {
        "kHubs": hubs is not None,
        "kHubsShared": memory is not None and memory.shared,
        "kHubMoreShared": memory is not None and memory.more_shared,
        "kStructureChunks": memory.chunks if memory else 0,
        "kSequences": OracleKind.sequence in kinds,
        "kSequenceBudgets": OracleKind.sequence_budget in kinds,
        "kTables": OracleKind.table in kinds,
    }
