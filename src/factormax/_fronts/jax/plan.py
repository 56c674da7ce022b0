"""What a traced solve needs besides its arrays.

JAX keeps it with the traced function, so it holds nothing that was traced.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from factormax._columns import Columns
from factormax._core import Model, NativePlan
from factormax._engines.cpu import BY_ROWS, _settings
from factormax._inputs import Inputs
from factormax._model import is_large
from factormax._options import Options
from factormax._raw import RawSolution
from factormax._space import NumpySpace
from factormax.arrays import is_tracer
from factormax.checks import check_scores
from factormax.conflict import Conflicts, conflicts_of
from factormax.factors.base import BaseFactor
from factormax.factors.structured import StructuredFactor
from factormax.scope import ListedPart

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["Operands", "Plan", "Query", "plan_of"]

Names = list[tuple[str, tuple[int, ...]]]


class Operands(NamedTuple):
    """Which arrays a solve takes besides the two arrays of scores.

    In this order, but parameters come last. The scores `shared` are those that all instances have;
    the second array then holds only the others. `heat` divides them, `(B, 1)`.
    """

    mask: bool = False
    held: bool = False
    warm: bool = False
    params: int = 0  # how many are traced
    shared: bool = False
    heat: bool = False


class FactorParams(NamedTuple):
    """The parameters of one factor."""

    factor: str  # the name under which its class is registered
    name: str  # what messages call it
    size: int  # d
    given: tuple[Any, ...]  # numbers, or (1 | B, size); None for those that are traced

    @property
    def is_traced(self) -> bool:
        """Whether any of them is traced."""
        return any([p is None for p in self.given])


class Query:
    """A query while it is being answered; used to name the factors if it fails.

    Attributes:
        graph: the graph of the query.
        conflicts: the conflicts of its infeasible instances, once it is solved outside jit.
    """

    def __init__(self, graph: FactorGraph) -> None:
        self.graph = graph
        self.conflicts: Conflicts | None = None

    def find_conflicts(self, inputs: Inputs, raw: RawSolution) -> Conflicts | None:
        """The conflicts of a solution."""
        shape = self.graph._known_batch_shape()
        own = shape if math.prod(shape) == inputs.batch else None  # vmap adds instances
        self.conflicts = conflicts_of(self.graph._factors, inputs, raw, own)
        return self.conflicts


class Plan:
    """A graph, without its numbers, and how to solve it. Compared by identity.

    Attributes:
        model: the compiled model.
        options: how to solve.
        operands: which arrays there are.
        tensors, scores: names and shapes of the variables and of the factors' scores.
        allow_minus_inf: whether −inf is allowed, for each of the factors' scores.
        factors: the parameters of all factors.
        oracles: the user-defined ones, as in `Inputs`.
        wiring: a description of the factors, to be written; None if that is not possible.
        query: the query it was made for, by a weak reference, because it refers to traced arrays.
        is_shared: for each of the factors' scores, whether the batch shares it; empty unless those
            are in an array of their own.
    """

    def __init__(
        self,
        model: Model,
        options: Options,
        operands: Operands,
        tensors: Names,
        scores: Names,
        allow_minus_inf: list[bool],
        factors: list[FactorParams],
        oracles: tuple[Any, ...] = (),
        wiring: list[Any] | None = None,
        query: weakref.ref[Query] | None = None,
        is_shared: Sequence[bool] = (),
    ) -> None:
        self.model, self.options, self.operands = model, options, operands
        self.tensors, self.scores, self.allow_minus_inf = tensors, scores, allow_minus_inf
        self.factors, self.oracles, self.wiring = factors, oracles, wiring
        self.query, self.is_shared = query, is_shared

    def replace(self, **changes: Any) -> Plan:
        """A copy with these changes."""
        names = ("model", "options", "operands", "tensors", "scores", "allow_minus_inf", "factors")
        more = ("oracles", "wiring", "query", "is_shared")
        return Plan(**({name: getattr(self, name) for name in (*names, *more)} | changes))

    def conflicts_of(self, inputs: Inputs, raw: RawSolution) -> Conflicts | None:
        """The conflicts of a solution; None if there are none, or if the query is over."""
        query = None if self.query is None else self.query()
        return None if query is None else query.find_conflicts(inputs, raw)

    @cached_property
    def cold(self) -> Plan:
        """The same plan without multipliers to start from."""
        return self.replace(operands=self.operands._replace(warm=False))

    @cached_property
    def native(self) -> NativePlan | None:
        """The plan for the core to solve and differentiate without Python; None if it can't."""
        operands = self.operands
        if self.is_structured or self.options.linear:
            return None
        if operands.held or operands.warm or operands.params:
            return None
        given = [p for f in self.factors for p in f.given]
        params = [p if isinstance(p, float) else np.ascontiguousarray(p, np.float64) for p in given]
        if not all([isinstance(p, float) or len(p) == 1 for p in params]):
            return None
        runs = self.runs if operands.shared else ()
        how = _settings(self.options, BY_ROWS)
        return NativePlan(self.model, how, params, operands.mask, runs, operands.heat)

    @cached_property
    def runs(self) -> tuple[int, ...]:
        """The `runs` of the factors' scores as `Columns`, if some are in an array of their own."""
        return Columns.runs_of([math.prod(shape) for _, shape in self.scores], self.is_shared)

    @property
    def held_place(self) -> int:
        """Which array says what the variables are held at; −1 if none does."""
        return 2 + self.operands.mask if self.operands.held else -1

    def without_warm(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays of a solve except the multipliers to start from."""
        place = 2 + self.operands.mask + self.operands.held if self.operands.warm else -1
        return [a for i, a in enumerate(arrays) if i != place]

    @property
    def score_places(self) -> list[int]:
        """Which arrays hold the factors' scores, and what divides some of them."""
        after = 2 + sum(self.operands[:3])
        return [1, *range(after, after + self.operands.shared + self.operands.heat)]

    def full(self, xp: Any, own: Any, shared: Any = None, heat: Any = None) -> Any:
        """The factors' scores as one matrix, `(1 | B, P)`, from the arrays that hold them."""
        return own if shared is None else Columns(shared, own, self.runs, heat).full(xp)

    @property
    def is_structured(self) -> bool:
        """Whether there are structured factors."""
        return bool(self.model.num_structured)

    @property
    def num_sides(self) -> int:
        """How many numbers per instance tell its sides and how it ended."""
        return int(self.model.num_variables + self.num_dual + 1)

    @property
    def num_reported(self) -> int:
        """How many numbers per instance tell how it ended."""
        return 7 if self.options.linear else 5

    @property
    def num_dual(self) -> int:
        """How many multipliers an instance has, including one per variable that may be held."""
        held = self.model.num_variables if self.operands.held else 0
        return int(self.model.num_dual + held)

    def inputs(
        self, arrays: Sequence[Any], check: bool, place: int | None = None
    ) -> tuple[Inputs, Any]:
        """The numbers of a batch, and the multipliers to start from (or None).

        check: whether to check what could not be checked while the graph was built.
        place: if this is one instance of a batch, which one.

        Raises:
            ValueError: if a number is invalid.
        """
        taken = iter(arrays)
        eta_u, eta_v = next(taken), next(taken)
        mask = next(taken) if self.operands.mask else None
        held = next(taken) if self.operands.held else None
        warm = next(taken) if self.operands.warm else None
        shared = next(taken) if self.operands.shared else None
        heat = next(taken) if self.operands.heat else None
        factor_scores: Any = eta_v
        if shared is not None and len(shared) == 1:
            factor_scores = Columns(shared, eta_v, self.runs, heat)
        elif shared is not None:  # vmap put instances in front
            factor_scores = self.full(NumpySpace, eta_v, shared, heat)
        params: list[Any] = []
        for factor in self.factors:
            given = [next(taken) if p is None else p for p in factor.given]
            own = tuple([_of_batch(p, len(eta_u), place) for p in given])
            if check and factor.is_traced:
                cls = BaseFactor._registry[factor.factor]
                cls._check_params(own, factor.size, factor.name)
            params += own
        inputs = Inputs(self.model, eta_u, factor_scores, params, mask, self.oracles, held)
        if check and inputs.core.needs_a_look:
            check_scores(inputs.eta_u, inputs.mask, self.tensors, ())
            check_scores(inputs.eta_v, None, self.scores, (), self.allow_minus_inf)
        return inputs, warm


def _of_batch(param: Any, batch: int, place: int | None) -> Any:
    """A parameter as the core takes it."""
    if isinstance(param, float):
        return param
    array = np.ascontiguousarray(param, np.float64)
    if len(array) in (1, batch):
        return array
    if place is not None:
        place %= len(array)
        return array[place : place + 1]
    return np.tile(array, (batch // len(array), 1))  # vmap put instances in front


def plan_of(query: Query, options: Options, shared: bool, heat: bool) -> tuple[Plan, list[Any]]:
    """The plan of a graph, and its traced parameters; shared, heat: see `Operands`."""
    graph = query.graph
    factors, traced = [], []
    few = len(graph._factors) <= 16  # with more, making names takes too long
    for f in graph._factors:
        given = tuple([None if is_tracer(p) else p for p in f._params])
        traced += [p for p in f._params if is_tracer(p)]
        factors.append(FactorParams(f._registered, f.name if few else f.kind, f._size, given))
    plan = Plan(
        graph._form().model,
        options,
        Operands(mask=graph._masked, params=len(traced), shared=shared, heat=heat),
        [(t.name, t.shape) for t in graph._tensors],
        graph._score_layout(),
        [p.allow_minus_inf for p in graph._score_parts()],
        factors,
        graph._own_oracles(),
        _wiring_of(graph),
        weakref.ref(query),
        graph._form().layout.is_shared if shared else (),
    )
    return plan, traced


def _wiring_of(graph: FactorGraph) -> list[Any] | None:
    """A description of a graph's factors; None if it can't be written, or is too long."""
    if graph._own_oracles() or is_large(graph._factors):
        return None
    return [_wiring(f) for f in graph._factors]


def _wiring(factor: BaseFactor) -> list[Any]:
    scope: list[Any] = [
        p.literals.tolist() if isinstance(p, ListedPart) else list(p) for p in factor._scope
    ]
    oracle: list[Any] = []
    if isinstance(factor, StructuredFactor):
        scores, slots = factor._num_scores, factor._slots
        oracle = [int(factor._oracle), factor._link, scores, slots, list(factor._oracle_shape)]
    listed = [isinstance(p, ListedPart) for p in factor._scope]
    return [factor._registered, scope, listed, len(factor._params), oracle]
