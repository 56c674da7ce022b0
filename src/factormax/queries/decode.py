"""The exact best structure, by branch and bound over the LP-MAP relaxation.

If the relaxation answers with a structure, or the graph is narrow enough for dynamic programming
(`elimination`), no search is needed. Otherwise each node holds some variables at 0 or 1, and its
bound is the dual bound of the relaxation. The nodes with the largest bounds are solved together, on
all cores, starting from the multipliers of their parents. Local search looks for good structures in
between, so that the answer is good even if a limit ends the search.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

import numpy as np
import numpy.typing as npt

from factormax import _engines
from factormax._core import Model, Structures, get_num_threads
from factormax._inputs import Inputs, structured_of
from factormax._options import Options
from factormax._raw import Proof, RawSolution
from factormax.arrays import FloatArray
from factormax.queries.assignment import check_assignment, score_assignment, typical_score
from factormax.queries.elimination import best_by_elimination
from factormax.queries.local_search import LocalSearch
from factormax.status import Status

__all__ = ["Decoded", "decode"]

FREE = -1  # a variable that is held neither at 0 nor at 1

# Work of the local search, in passes over the graph: before the first relaxation (if there is a
# time limit), after it, and per pass that the relaxations have made since.
_FIRST_PASSES, _MORE_PASSES, _PASSES_PER_PASS = 20.0, 100.0, 0.3
_AS_MANY_AS_THERE_IS_TIME_FOR = 1e9
_PROOF_SHARE = 0.8  # share of the time limit for the first relaxations and elimination


@dataclass(frozen=True)
class Decoded:
    """The best assignment of one instance, if one was found."""

    assignment: FloatArray | None  # (n,)
    features: FloatArray | None
    value: float
    upper_bound: float
    optimal: bool
    nodes: int
    passes: int
    calls: int
    status: Status
    proof: Proof | None = None  # of infeasibility; None if only the search shows it


@dataclass(order=True)
class _Node:
    rank: tuple[float, int]  # best bound first, then the newest
    held: npt.NDArray[np.int8] = field(compare=False)
    bound: float = field(compare=False)
    start: FloatArray | None = field(compare=False, default=None)  # the parent's multipliers


def decode(inputs: Inputs, options: Options, max_nodes: int, time_limit: float | None) -> Decoded:
    """Decodes one instance: `inputs` are a batch of 1."""
    search = _Search(inputs, options)
    return search.run(max_nodes, time_limit)


class _Search:
    def __init__(self, inputs: Inputs, options: Options) -> None:
        self.inputs = inputs
        self.options = replace(options, linear=True, method="auto", on_failure="ignore")
        self.n = inputs.model.num_variables
        self.present = inputs.present[0]
        scores = np.concatenate([inputs.eta_u[0, self.present], inputs.eta_v[0]])
        self.size = typical_score(scores)
        self.best_value = -np.inf
        self.best: tuple[FloatArray, FloatArray] | None = None
        self.nodes = self.passes = self.calls = 0
        self.proof: Proof | None = None
        self.deadline: float | None = None
        self._searches, self._credit, self._patience = 0, 0.0, _MORE_PASSES

    @cached_property
    def local(self) -> LocalSearch:
        """Made on first use, because most relaxations are tight."""
        return LocalSearch(self.inputs)

    def run(self, max_nodes: int, time_limit: float | None) -> Decoded:
        if time_limit is not None:  # the relaxation may use up all the time
            begin = time.monotonic()
            self.deadline = begin + _PROOF_SHARE * time_limit
            self._search_near(np.zeros(self.n), _FIRST_PASSES)
        bound, mu, start = self._root()
        if bound == -np.inf or not self._may_improve(bound):
            return self._finish(-np.inf)
        exact = best_by_elimination(self.inputs, self.deadline)
        if exact is not None:
            self._offer(exact)
            return self._finish(-np.inf)
        root = np.full(self.n, FREE, np.int8)

        def over() -> bool:
            return self._late() or self.nodes >= max_nodes

        self._shake(bound, over)
        passes = _MORE_PASSES + _PASSES_PER_PASS * self.passes
        if time_limit is not None:
            if self._late():  # the rest of the time goes to local search
                passes = _AS_MANY_AS_THERE_IS_TIME_FOR
            self.deadline = begin + time_limit
        for x in (mu, np.zeros(self.n)):
            if self._may_improve(bound):
                self._search_near(x, passes)
        self._dive(root, mu, start, over)
        order = count()
        open_nodes = [_Node((-bound, 0), root, bound, start)]
        while open_nodes and not over():
            room = min(max(1, 2 * get_num_threads()), max_nodes - self.nodes)
            chosen = [heapq.heappop(open_nodes) for _ in range(min(room, len(open_nodes)))]
            chosen = [node for node in chosen if self._may_improve(node.bound)]
            if not chosen:
                return self._finish(-np.inf)
            raw = self._solve(chosen)
            self._search_now_and_then(raw)
            bounds = self._tightened(chosen, raw)
            for i, node in enumerate(chosen):
                bound = min(bounds[i], node.bound)
                if raw.status[i] == Status.INFEASIBLE.code:
                    continue
                mu = raw.mu[i]
                self._offer(np.round(mu))
                if not self._may_improve(bound):
                    continue
                split = self._branching_variable(mu, node.held)
                if split is None:  # all are held, so this assignment is the only one
                    self._offer(np.where(node.held == 1, 1.0, 0.0))
                    continue
                for state in (0, 1):
                    held = node.held.copy()
                    held[split] = state
                    # Among equal bounds, the side that mu leans to comes first.
                    lean = int(abs(mu[split] - state) < 0.5)
                    rank = (-bound, -2 * next(order) - lean)
                    heapq.heappush(open_nodes, _Node(rank, held, bound, raw.tau[i]))
        return self._finish(max([node.bound for node in open_nodes], default=-np.inf))

    def _options(self) -> Options:
        return replace(self.options, deadline=self.deadline)

    def _exact_options(self) -> Options:
        return replace(self._options(), tol=1e-12, max_iter=2 * self.options.max_iter)

    def _tightened(self, nodes: list[_Node], raw: RawSolution) -> list[float]:
        """The bounds of relaxations, solved more precisely where the value can't improve.

        Such a node is open only because of the tolerance, and its children would inherit that.
        """
        bounds = [float(bound) for bound in raw.upper_bound]
        loose = [
            i
            for i in np.flatnonzero(raw.status == Status.CONVERGED.code)
            if self._may_improve(bounds[i]) and not self._may_improve(float(raw.objective[i]))
        ]
        if loose and not self._late():
            again = self._solve(
                [replace(nodes[i], start=raw.tau[i]) for i in loose], self._exact_options()
            )
            for i, bound in zip(loose, again.upper_bound, strict=True):
                bounds[i] = min(bounds[i], float(bound))
        return bounds

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _search_near(self, x: FloatArray, passes: float) -> None:
        """Local search from an assignment, which may be fractional."""
        self._searches += 1
        work = int(passes * self.local.size)
        for found in self.local.improve(x, work, self._searches, self._late):
            self._offer(found)

    def _search_now_and_then(self, raw: RawSolution) -> None:
        """Occasional local search, alternately from the relaxations' answers and from the best.

        It keeps its share of the work while it finds improvements, and gets less and less once it
        finds none.
        """
        self._credit += _PASSES_PER_PASS * float(raw.iterations.sum())
        if self._credit < self._patience or self._late():
            return
        feasible = np.flatnonzero(raw.status != Status.INFEASIBLE.code)
        if self.best is not None and (self._searches % 2 or not feasible.size):
            start = self.best[0]
        elif feasible.size:
            start = raw.mu[feasible[0]].astype(np.float64)
        else:
            return
        before = self.best_value
        self._search_near(start, self._credit * _MORE_PASSES / self._patience)
        self._credit = 0.0
        if self.best_value > before or self.best is None:
            self._patience = _MORE_PASSES
        else:
            self._patience = min(2 * self._patience, 32 * _MORE_PASSES)

    def _root(self) -> tuple[float, FloatArray, FloatArray | None]:
        """Solves the relaxation; if the answer is a structure, again to tighten its bound."""
        raw = _engines.solve(self.inputs, self._options())
        self._count(raw)
        if raw.status[0] == Status.INFEASIBLE.code:
            self.proof = raw.proofs[0]
            return -np.inf, raw.mu[0], None
        bound = float(raw.upper_bound[0])
        self._offer(np.round(raw.mu[0]))
        if raw.integral[0] and self._may_improve(bound) and not self._late():
            again = _engines.solve(self.inputs, self._exact_options(), raw.tau)
            self._count(again)
            bound = min(bound, float(again.upper_bound[0]))
            self._offer(np.round(again.mu[0]))
        rows = self.inputs.model.num_rows
        bounds = np.zeros(self.n, raw.tau.dtype)  # their multipliers come after those of the rows
        start = np.concatenate([raw.tau[0, :rows], bounds, raw.tau[0, rows:]])
        return bound, raw.mu[0], start

    def _shake(self, bound: float, over: Callable[[], bool]) -> None:
        """Looks for a structure where several tie, which the relaxation mixes.

        A little noise in the scores breaks the ties. What is found is rated by the original scores.
        """
        scores = self.inputs.eta_u
        rng = np.random.default_rng(0)
        for share in (1e-3, 1e-2):
            if over() or not self._may_improve(bound):
                return
            noisy = scores + share * self.size * rng.uniform(-1, 1, scores.shape)
            asked = self.inputs.replace(eta_u=noisy.astype(scores.dtype))
            raw = _engines.solve(asked, self._options())
            self._count(raw)
            if raw.status[0] == Status.CONVERGED.code and not raw.integral[0] and not over():
                # The noise may be below the tolerance.
                raw = _engines.solve(asked, self._exact_options(), raw.tau)
                self._count(raw)
            self._offer(np.round(raw.mu[0]))

    def _dive(
        self,
        held: npt.NDArray[np.int8],
        mu: FloatArray,
        start: FloatArray | None,
        over: Callable[[], bool],
    ) -> None:
        """Looks for a first structure by repeatedly switching on the likeliest open variable."""
        held = held.copy()
        for _ in range(64):
            undecided = (held == FREE) & (mu > 1e-4) & (mu < 1 - 1e-4)
            if self.best is not None or not undecided.any() or over():
                return
            held[int(np.argmax(np.where(undecided, mu, -1)))] = 1
            raw = self._solve([_Node((0.0, 0), held, np.inf, start)])
            if raw.status[0] == Status.INFEASIBLE.code:
                return
            mu, start = raw.mu[0], raw.tau[0]
            self._offer(np.round(mu))

    def _may_improve(self, bound: float) -> bool:
        if self.best is None:
            return bound > -np.inf
        return bound > self.best_value + 1e-9 * (self.size + abs(self.best_value))

    def _solve(self, nodes: list[_Node], options: Options | None = None) -> RawSolution:
        asked = self.inputs.replace(held=np.stack([node.held for node in nodes]))
        warm = None
        if all(node.start is not None for node in nodes):
            warm = np.stack([node.start for node in nodes])  # type: ignore[misc]
        raw = _engines.solve(asked, options or self._options(), warm)
        self._count(raw)
        return raw

    def _count(self, raw: RawSolution) -> None:
        self.nodes += len(raw.status)
        self.passes += int(raw.iterations.sum())
        self.calls += int(raw.oracle_calls.sum())

    def _offer(self, x: FloatArray) -> None:
        """Keeps a 0/1 assignment if it is feasible and better than the best so far."""
        x = np.where(np.isfinite(x), x, 0.0)[None].astype(np.float64)
        checked = check_assignment(self.inputs, x)
        if not checked.feasible[0]:
            return
        value = float(score_assignment(self.inputs, x, checked)[0])
        if value > self.best_value:
            self.best_value, self.best = value, (x[0], checked.features[0])

    @cached_property
    def _weight(self) -> FloatArray:
        """The total magnitude of the scores that involve each variable, `(n,)`."""
        model = self.inputs.model
        weight = np.abs(np.where(self.present, self.inputs.eta_u[0], 0.0)).astype(np.float64)
        scores = np.abs(self.inputs.eta_v[0, : model.num_pairs].astype(np.float64))
        for end in model.pairs.T:
            weight += np.bincount(end, scores, minlength=self.n)
        return weight

    def _branching_variable(self, mu: FloatArray, held: npt.NDArray[np.int8]) -> int | None:
        """The free variable nearest to one half; among about equally near ones, the weightiest.

        Relaxations of frustrated pairs are full of halves, which rounding would otherwise order.
        """
        free = (held == FREE) & self.present
        if not free.any():
            return None
        distance = np.where(free, np.abs(mu - 0.5), np.inf)
        near = distance <= distance.min() + 1e-3
        return int(np.argmax(np.where(near, self._weight, -1.0)))

    def _finish(self, rest: float) -> Decoded:
        """The result. rest: the largest bound of what was not searched."""
        bound = max(self.best_value, rest)
        optimal = self.best is not None and not self._may_improve(rest)
        if optimal:
            status = Status.CONVERGED
        elif self.best is None and rest == -np.inf:
            status = Status.INFEASIBLE
        else:
            status = Status.NOT_PROVED
        x, features = self.best if self.best is not None else (None, None)
        value = self.best_value if self.best is not None else -np.inf
        if optimal:
            bound = value
        return Decoded(
            x,
            features,
            value,
            bound,
            optimal,
            self.nodes,
            self.passes,
            self.calls,
            status,
            self.proof,
        )


def decoded_solution(inputs: Inputs, found: list[Decoded]) -> RawSolution:
    """The answers of a batch, as the fronts take them."""
    model = inputs.model
    dtype = inputs.eta_u.dtype
    raw = RawSolution.of_size(len(found), model.num_variables, model.num_scores, 0, dtype)
    raw.var_side[...] = 0
    raw.primal_residual[...] = 0
    for i, d in enumerate(found):
        raw.mu[i] = np.nan if d.assignment is None else d.assignment
        raw.mu_v[i] = np.nan if d.features is None else d.features
        raw.objective[i], raw.upper_bound[i] = d.value, d.upper_bound
        raw.dual_residual[i] = d.upper_bound - d.value if np.isfinite(d.value) else np.inf
        raw.iterations[i], raw.oracle_calls[i] = d.passes, d.calls
        raw.status[i] = d.status.code
        raw.integral[i] = d.assignment is not None
    raw.mu[~inputs.present] = 0  # absent variables are always 0
    raw.proofs = {i: d.proof for i, d in enumerate(found) if d.proof is not None}
    raw.nodes = np.array([d.nodes for d in found], dtype=np.int64)
    raw.structures = structures_of(model, [d.assignment for d in found])
    return raw


def structures_of(model: Model, found: Sequence[FloatArray | None]) -> Structures:
    """The single structure of each structured factor, as the core would list it.

    found: the 0/1 assignments of a batch; None where none was found.
    """
    counts, lists = [], [np.zeros(0, dtype=np.int32)]
    for x in found:
        for factor in structured_of(model):
            counts.append(0 if x is None else 1)
            if x is None:
                continue
            on = np.full(factor.slots, -1, dtype=np.int32)
            chosen = np.flatnonzero(x[factor.variables])
            on[: len(chosen)] = chosen
            lists.append(on)
    none = np.zeros(0, dtype=np.int32)
    return Structures(
        count=np.array(counts, dtype=np.int32),
        prob=np.ones(sum(counts)),
        on=np.concatenate(lists),
        features=none,
        dense=np.zeros(0),
        num_cuts=none,
        cuts=np.zeros(0, dtype=np.uint8),
    )
