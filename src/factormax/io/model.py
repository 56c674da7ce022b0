"""Turns tables over multi-state variables into a graph of binary variables.

States that evidence or zeros in the tables rule out are removed first. A variable with only one
state left disappears. One with two states becomes a single binary variable, on in the second state,
unless a `Table` needs it; all others become one-hot groups. A table over two variables with two
states,

    [[a, b], [c, d]] = a + (c − a) x + (b − a) y + (a − b − c + d) x y,

becomes scores and a `Pair` or, if it has zeros, scores and logic. Other tables become `Table`s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from factormax.arrays import ArrayLike, FloatArray, IndexArray, to_numpy
from factormax.errors import GraphError, InfeasibleError, ShapeError
from factormax.factors import AtMostOne, Imply, Or, Pair, Table, Xor
from factormax.graph import FactorGraph
from factormax.variable import Variable

__all__ = ["UAIModel", "build_model"]

Scope = tuple[int, ...]
TableDict = dict[Scope, FloatArray]


@dataclass(eq=False, repr=False)
class UAIModel:
    """A model read from a file: its tables, and the graph made from them.

    Attributes:
        path: the file.
        cardinalities: how many states each variable has.
        scopes: the variables of each table, as in the file.
        tables: the logarithms of the potentials, one axis per variable of the scope.
        evidence: the observed states.
        graph: the factor graph. Observed and forbidden states are not in it.
        variable: all its variables, `(n,)`.
        offset: what to add to the graph's objective (without the quadratic term) to get the value
            of the model in the file.
        domains: the possible states of each variable.
        starts: where the binary variables of each variable begin.
        sizes: how many binary variables each has: none if its state is known, 1 if it has two
            states and no `Table` needs it, else one per state of its domain.
    """

    path: str
    cardinalities: list[int]
    scopes: list[Scope]
    tables: list[FloatArray]
    evidence: dict[int, int]
    graph: FactorGraph
    variable: Variable
    offset: float
    domains: list[IndexArray] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @property
    def num_variables(self) -> int:
        """The number of variables in the file."""
        return len(self.cardinalities)

    def __repr__(self) -> str:
        graph = repr(self.graph)[1:-1].replace("FactorGraph", "graph", 1)
        return (
            f"<UAIModel of {self.num_variables} variables and {len(self.tables)} tables, "
            f"as a {graph}>"
        )

    def marginals(self, values: ArrayLike | None = None) -> list[FloatArray]:
        """The marginals of each variable in the file, one number per state.

        Args:
            values: values of `variable`, `(n,)`; by default those from the last query.

        Raises:
            GraphError: if there are none yet, or if they are NaN (nothing satisfies the model).
        """
        mu = np.asarray(to_numpy(self.variable.value if values is None else values), np.float64)
        if mu.shape != self.variable.shape:
            raise ShapeError(f"values must have shape {self.variable.shape}, got {mu.shape}.")
        if np.isnan(mu).any():
            raise GraphError(f"{self.path}: the values are NaN, so there is no assignment.")
        marginals: list[FloatArray] = []
        for v, states in enumerate(self.cardinalities):
            mine = mu[self.starts[v] : self.starts[v] + self.sizes[v]]
            full = np.zeros(states)
            if len(mine) < 2:  # the first state has the rest
                mine = np.append(1 - mine.sum(), mine)
            full[self.domains[v]] = mine
            marginals.append(full)
        return marginals

    def assignment(self, values: ArrayLike | None = None) -> list[int]:
        """The state of each variable in the file, observed ones included.

        Fractional values are rounded: the state with the largest marginal wins. The assignment may
        then be impossible, in which case its `score` is −inf.

        Args:
            values: values of `variable`, `(n,)`; by default those from the last query.
        """
        return [int(np.argmax(m)) for m in self.marginals(values)]

    def values(self, states: Sequence[int]) -> FloatArray:
        """The 0/1 values of `variable` for an assignment; the inverse of `assignment`.

        Raises:
            ValueError: for a state that evidence or a zero in the tables rules out.
        """
        self._check_states(states)
        mu = np.zeros(self.variable.size)
        for v, state in enumerate(states):
            place = np.flatnonzero(self.domains[v] == state)
            if not place.size:
                raise ValueError(
                    f"variable {v} can't be in state {state}, only in {self.domains[v].tolist()}."
                )
            if self.sizes[v] == 1:
                mu[self.starts[v]] = place[0]
            elif self.sizes[v] > 1:
                mu[self.starts[v] + place[0]] = 1
        return mu

    def score(self, states: Sequence[int]) -> float:
        """The logarithm of the product of the potentials, from the tables in the file."""
        self._check_states(states)
        return math.fsum(
            float(table[tuple([states[v] for v in scope])])
            for scope, table in zip(self.scopes, self.tables, strict=True)
        )

    def _check_states(self, states: Sequence[int]) -> None:
        if len(states) != self.num_variables:
            raise ValueError(
                f"expected the states of {self.num_variables} variables, got {len(states)}."
            )
        for v, state in enumerate(states):
            if not 0 <= state < self.cardinalities[v]:
                raise ValueError(
                    f"variable {v} has the states 0 to {self.cardinalities[v] - 1}, got {state}."
                )


def build_model(
    path: str,
    cardinalities: list[int],
    scopes: list[Scope],
    tables: list[FloatArray],
    evidence: dict[int, int],
    dtype: npt.DTypeLike,
) -> UAIModel:
    """The model made from these tables of logarithms."""
    simple, domains = _simplified(path, cardinalities, scopes, tables, evidence)
    offset = float(simple.pop((), np.zeros(())))

    # Which tables become pairs, and which variables need a one-hot group.
    pairs: TableDict = {}
    large: TableDict = {}
    for scope, table in simple.items():
        if len(scope) > 1:
            (pairs if table.shape == (2, 2) else large)[scope] = table
    in_table = {v for scope in large for v in scope}
    sizes = [
        0 if len(d) == 1 else 1 if len(d) == 2 and v not in in_table else len(d)
        for v, d in enumerate(domains)
    ]
    starts = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]

    scores = np.zeros(starts[-1])
    for scope, table in simple.items():
        if len(scope) == 1:
            begin, size = starts[scope[0]], sizes[scope[0]]
            if size == 1:
                offset += float(table[0])
                table = table[1:] - table[0]
            scores[begin : begin + size] += table
    # The binary variable that is on in the second of two states: alone, or second in its group.
    on = np.array(starts[:-1], dtype=np.int64) + (np.array(sizes, dtype=np.int64) == 2)
    ends = on[np.array(list(pairs), dtype=np.int64).reshape(-1, 2)]
    entries = np.array(list(pairs.values())).reshape(-1, 4)
    holes = np.isneginf(entries)
    a, b, c, d = _filled(entries, holes).T
    offset += math.fsum(a)
    np.add.at(scores, ends[:, 0], c - a)
    np.add.at(scores, ends[:, 1], b - a)

    graph = FactorGraph()
    u = graph.variable_from(scores.astype(dtype), name="x")
    weights = np.where(holes.any(axis=1), 0.0, a - b - c + d)
    linked = weights != 0
    if linked.any():
        first, second = ends[linked].T
        graph.add(Pair(u[first], u[second], weights[linked].astype(dtype)))
    _add_logic(graph, u, ends, holes)
    _add_groups(graph, u, [*zip(starts, sizes, strict=False)], large, dtype)
    return UAIModel(
        path=path,
        cardinalities=cardinalities,
        scopes=scopes,
        tables=tables,
        evidence=evidence,
        graph=graph,
        variable=u,
        offset=offset,
        domains=domains,
        starts=starts[:-1],
        sizes=sizes,
    )


def _add_groups(
    graph: FactorGraph,
    u: Variable,
    places: list[tuple[int, int]],
    tables: TableDict,
    dtype: npt.DTypeLike,
) -> None:
    """Makes exactly one state of each group be on: by its tables, or by `Xor` if it has none.

    Args:
        graph: the graph to add the factors to.
        u: all of its variables.
        places: where the group of each variable of the model begins in `u`, and its size.
        tables: the tables that are not pairs.
        dtype: the dtype of their scores.
    """
    in_table = {v for scope in tables for v in scope}
    for size in sorted({s for _, s in places if s > 1}):
        alone = [start for v, (start, s) in enumerate(places) if s == size and v not in in_table]
        if alone:
            graph.add(Xor(u[np.array(alone)[:, None] + np.arange(size)], axis=1))
    for scope, table in tables.items():
        groups = [u[start : start + size] for start, size in (places[v] for v in scope)]
        graph.add(Table(groups, table.astype(dtype)))


def _simplified(
    path: str,
    cardinalities: list[int],
    scopes: list[Scope],
    tables: list[FloatArray],
    evidence: dict[int, int],
) -> tuple[TableDict, list[IndexArray]]:
    """One table for each set of variables, over the possible states, and these states.

    A state is possible if every table has an entry for it that is not −inf.
    """
    domains = [np.arange(states) for states in cardinalities]
    keep = {v: np.array([0]) for v, states in enumerate(cardinalities) if states == 1}
    keep |= {v: np.array([state]) for v, state in evidence.items()}
    given = zip(scopes, tables, strict=True)
    while True:
        simple: TableDict = {}
        for scope, table in given:
            scope, table = _canonical(scope, table, keep)
            simple[scope] = simple[scope] + table if scope in simple else table
        for v, states in keep.items():
            domains[v] = domains[v][states]
        keep = _possible(path, simple)
        if not keep:
            return {s: t for s, t in simple.items() if t.any()}, domains
        given = zip(list(simple), list(simple.values()), strict=True)


def _canonical(
    scope: Scope, table: FloatArray, keep: dict[int, IndexArray]
) -> tuple[Scope, FloatArray]:
    """The table over the states that are kept, with its variables in order.

    A variable that keeps only one state has no axis.
    """
    if any([v in keep for v in scope]):
        for axis, v in enumerate(scope):
            if v in keep:
                table = table.take(keep[v], axis=axis)
        left = [i for i, v in enumerate(scope) if v not in keep or len(keep[v]) > 1]
        table = table.reshape([table.shape[i] for i in left])
        scope = tuple([scope[i] for i in left])
    if any([v > w for v, w in pairwise(scope)]):
        order = sorted(range(len(scope)), key=scope.__getitem__)
        scope, table = tuple([scope[i] for i in order]), table.transpose(order)
    return scope, table


def _possible(path: str, tables: TableDict) -> dict[int, IndexArray]:
    """The possible states of the variables that have impossible ones."""
    possible: dict[int, npt.NDArray[np.bool_]] = {}
    for scope, table in tables.items():
        if table.min() > -math.inf:
            continue
        finite = table > -math.inf
        if not finite.any():
            over = f"the variables {' '.join(map(str, scope))}" if scope else "no variables"
            raise InfeasibleError(
                f"{path}: every assignment has potential 0, as the zeros over {over} show."
            )
        for axis, v in enumerate(scope):
            others = tuple([i for i in range(len(scope)) if i != axis])
            some = np.asarray(finite.any(axis=others))
            possible[v] = possible[v] & some if v in possible else some
    for v, some in possible.items():
        if not some.any():
            raise InfeasibleError(
                f"{path}: every assignment has potential 0: no state of variable {v} is possible "
                f"in all of its tables."
            )
    return {v: np.flatnonzero(some) for v, some in possible.items() if not some.all()}


def _filled(entries: FloatArray, holes: npt.NDArray[np.bool_]) -> FloatArray:
    """The entries a, b, c, d, `(k, 4)`, with −inf replaced so that a − b − c + d = 0.

    There is one hole, or two on a diagonal, which have the same sign: any others would rule out a
    state.
    """
    sign = np.array([1.0, -1.0, -1.0, 1.0])
    known = np.where(holes, 0.0, entries)
    count = np.maximum(holes.sum(axis=1, keepdims=True), 1)
    return np.where(holes, -sign * (known @ sign)[:, None] / count, entries)


def _add_logic(
    graph: FactorGraph, u: Variable, ends: IndexArray, holes: npt.NDArray[np.bool_]
) -> None:
    """Adds what zeros in pairwise tables forbid; holes: `(k, 4)`, for the states 00 01 10 11."""
    code = holes @ np.array([1, 2, 4, 8])
    for kind, forbidden in ((Or, 1), (Imply, 2), (Imply, 4), (AtMostOne, 8), (Xor, 9), (Xor, 6)):
        x, y = (u[end[:, None]] for end in ends[code == forbidden].T)
        if x.size == 0:
            continue
        if forbidden == 2:  # y implies x
            x, y = y, x
        elif forbidden == 6:  # equal
            y = ~y
        graph.add(kind([x, y], axis=1))
