"""The best assignment by dynamic programming, for graphs of small width.

Variables are eliminated one by one: all tables that mention one are added up into a table over it
and its neighbours, which is then maximised over it. The tables grow with the width of the graph,
which is 1 for a tree, and the shorter side for a grid.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax._inputs import Inputs
from factormax.arrays import FloatArray
from factormax.queries.assignment import is_broken

__all__ = ["best_by_elimination"]

_LARGEST_SCOPE = 10  # variables of a row
_LARGEST_WIDTH = 22  # neighbours of a variable when it is eliminated
_MOST_WORK = 2**31  # entries of all tables
_MOST_WORK_PER_SECOND = 2**28  # an upper limit of what a second is enough for


@dataclass(frozen=True)
class _Table:
    scope: tuple[int, ...]
    values: FloatArray  # one axis of size 2 per variable


def best_by_elimination(inputs: Inputs, deadline: float | None = None) -> FloatArray | None:
    """The best assignment of one instance, `(n,)`; `nan` if nothing satisfies the rows.

    None if the graph is too wide, has structured factors, or can't be solved by the deadline (by
    `time.monotonic`).
    """
    if inputs.model.num_structured:
        return None
    here = inputs.present[0]
    scopes = _scopes(inputs, here)
    if scopes is None:
        return None
    left = np.inf if deadline is None else deadline - time.monotonic()
    order = _order(np.flatnonzero(here), scopes, left * _MOST_WORK_PER_SECOND)
    if order is None:
        return None
    return _eliminate(inputs.model.num_variables, order, _tables(inputs, here), deadline)


def _rows(
    inputs: Inputs, here: npt.NDArray[np.bool_]
) -> list[tuple[FloatArray, npt.NDArray[np.int64], float, int]]:
    """Coefficients, variables, right-hand side and kind of every row that is present."""
    model, (coefs, rhs) = inputs.model, inputs.rows
    row_ptr, row_kind, cols = model.row_ptr, model.row_kind, model.col
    present = inputs.rows_present()
    rows = []
    for r in range(model.num_rows) if present is None else np.flatnonzero(present[0]):
        part = slice(row_ptr[r], row_ptr[r + 1])
        col, coef = cols[part].astype(np.int64), coefs[0, part]
        used = (coef != 0) & here[col]
        rows.append((coef[used], col[used], float(rhs[0, r]), int(row_kind[r])))
    return rows


def _scopes(inputs: Inputs, here: npt.NDArray[np.bool_]) -> list[tuple[int, ...]] | None:
    model = inputs.model
    pairs = model.pairs[here[model.pairs].all(axis=1)].astype(np.int64)
    pairs.sort(axis=1)
    n = model.num_variables
    distinct = np.unique(pairs[:, 0] * n + pairs[:, 1])
    degree = np.bincount(np.concatenate([distinct // max(n, 1), distinct % max(n, 1)]))
    if model.num_rows > 20_000 or degree.max(initial=0) > _LARGEST_WIDTH:
        return None
    scopes = [tuple(map(int, col)) for _, col, _, _ in _rows(inputs, here)]
    if any(len(scope) > _LARGEST_SCOPE for scope in scopes):
        return None
    return scopes + [(a, b) for a, b in pairs.tolist()]


def _order(variables: Any, scopes: list[tuple[int, ...]], most_work: float) -> list[int] | None:
    """The order of elimination: as given (good for grids), or by the number of neighbours.

    None if the tables get too wide or have too many entries either way.
    """
    near: dict[int, set[int]] = {int(v): set() for v in variables}
    for scope in scopes:
        for v in scope:
            near[v].update(scope)
    for v, others in near.items():
        others.discard(v)
    if max((len(others) for others in near.values()), default=0) > _LARGEST_WIDTH:
        return None
    found = [_try_order(near, by_degree) for by_degree in (True, False)]
    work, order = min(found, key=lambda pair: pair[0])
    return order if work <= min(most_work, _MOST_WORK) else None


def _try_order(neighbours: dict[int, set[int]], by_degree: bool) -> tuple[float, list[int]]:
    """An order, and the entries of all its tables; inf if one is too wide."""
    near = {v: set(others) for v, others in neighbours.items()}
    queue = [(len(others) if by_degree else 0, v) for v, others in near.items()]
    if by_degree:
        heapq.heapify(queue)
    else:
        queue.reverse()
    order: list[int] = []
    work = 0
    while queue:
        degree, v = heapq.heappop(queue) if by_degree else queue.pop()
        if v not in near or (by_degree and degree != len(near[v])):
            continue  # already eliminated, or in the queue again with its new degree
        others = near.pop(v)
        work += 2 ** (len(others) + 1)
        if len(others) > _LARGEST_WIDTH:
            return float("inf"), order
        for u in others:
            near[u] |= others
            near[u] -= {u, v}
            if by_degree:
                heapq.heappush(queue, (len(near[u]), u))
        order.append(v)
    return work, order


def _tables(inputs: Inputs, here: npt.NDArray[np.bool_]) -> list[_Table]:
    model, eta_u = inputs.model, inputs.eta_u[0]
    tables = [_Table((int(v),), np.array([0.0, float(eta_u[v])])) for v in np.flatnonzero(here)]
    for coef, col, rhs, kind in _rows(inputs, here):
        order = np.argsort(col)
        on = np.indices((2,) * len(col)).reshape(len(col), 2 ** len(col))
        size = np.abs(coef[order]) @ on + abs(rhs)
        wrong = is_broken(coef[order] @ on - rhs, size, kind, eta_u.dtype)
        values = np.where(wrong, -np.inf, 0.0).reshape((2,) * len(col))
        tables.append(_Table(tuple(int(v) for v in col[order]), values))
    for pair, negated, score in zip(
        model.pairs, model.pair_negated, inputs.eta_v[0, : model.num_pairs], strict=True
    ):
        if not here[pair].any():
            continue
        values = np.zeros((2, 2))
        values[int(not negated[0]), int(not negated[1])] = float(score)
        first, second = int(pair[0]), int(pair[1])
        if not here[second]:  # it is off
            tables.append(_Table((first,), values[:, 0]))
        elif not here[first]:
            tables.append(_Table((second,), values[0]))
        else:
            ordered = (first, second) if first < second else (second, first)
            tables.append(_Table(ordered, values if first < second else values.T))
    return tables


def _eliminate(
    n: int, order: list[int], tables: list[_Table], deadline: float | None
) -> FloatArray | None:
    """The best assignment; None if the deadline passes."""
    of: dict[int, list[_Table]] = {v: [] for v in order}
    place = {v: i for i, v in enumerate(order)}
    constant = 0.0

    def file(table: _Table) -> float:
        if not table.scope:
            return float(table.values)
        of[min(table.scope, key=place.__getitem__)].append(table)
        return 0.0

    for table in tables:
        constant += file(table)
    choices: list[tuple[int, tuple[int, ...], npt.NDArray[np.bool_]]] = []
    for v in order:
        if deadline is not None and time.monotonic() >= deadline:
            return None
        # Add up the small tables first: only the last sum is over all the neighbours. Variables
        # that are not in the largest come before its own, so that its entries stay contiguous.
        *small, largest = sorted(of.pop(v), key=lambda table: len(table.scope))
        known = [u for u in largest.scope if u != v]
        new = sorted({u for table in small for u in table.scope}.difference(known, {v}))
        rest = (*new, *known)
        off, on = _split(largest, v, rest)
        if small:
            near = {u for table in small for u in table.scope}
            few = tuple(u for u in rest if u in near)
            parts = [_split(table, v, few) for table in small]
            shape = (2,) * len(few)
            first, second = (
                _Table(few, sum((p[k] for p in parts), np.zeros(shape))) for k in (0, 1)
            )
            off, on = off + _spread(first, rest), on + _spread(second, rest)
        choices.append((v, rest, on > off))
        constant += file(_Table(rest, np.maximum(off, on)))
    x = np.zeros(n)
    if constant == -np.inf:
        return np.full(n, np.nan)
    for v, rest, choice in reversed(choices):
        x[v] = float(choice[tuple(int(x[u]) for u in rest)])
    return x


def _split(table: _Table, v: int, scope: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
    """The table where v is off and where it is on, spread over a scope without v."""
    axis = table.scope.index(v)
    rest = table.scope[:axis] + table.scope[axis + 1 :]
    off, on = np.moveaxis(table.values, axis, 0)
    return _spread(_Table(rest, off), scope), _spread(_Table(rest, on), scope)


def _spread(table: _Table, scope: tuple[int, ...]) -> FloatArray:
    """The table with its axes in the order of the scope, and axes of 1 for the other variables."""
    order = [table.scope.index(u) for u in scope if u in table.scope]
    places = tuple([slice(None) if u in table.scope else None for u in scope])
    return np.asarray(table.values.transpose(order)[places])
