"""What every factor means, written from its definition: as rows, and for 0/1 assignments.

Nothing is taken from the library. `relaxation` writes a graph as one linear program: the graph's
variables, further ones for pairs, transitions, joint states and flows, and rows. Every structured
factor is described exactly: sequences by flows through their states, trees by the cuts or flows
that reach every word, projective trees by flows through the spans of Eisner's algorithm.
`holds` and `worth` judge 0/1 assignments.

A masked variable is off: 0 in every factor. A factor all of whose variables are masked is absent,
and in a structured factor so is a row (a step, a word, a group) that is masked altogether.
"""

from __future__ import annotations

from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt

from fuzz.case import Case, Term
from fuzz.program import Program

__all__ = ["best_assignment", "holds", "relaxation", "valid_structure", "worth"]

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

#: Trees of more words than this are described by flows instead of all cuts.
CUT_WORDS = 7


def relaxation(case: Case) -> Program:
    """The linear program of a graph without a batch. `solve` subtracts half the squared norm."""
    program = Program(case.n)
    present = case.present
    for j in range(case.n):
        if present[j]:
            program.add_score(j, case.scores[j])
        else:
            program.off.add(j)
    for term in case.terms:
        if not present[term.index].any():
            continue
        if term.kind == "Pair":
            _lift_pairs(program, term, present)
        elif term.kind in _LIFTS:
            _LIFTS[term.kind](program, term, present)
        else:
            for k, index in enumerate(term.index):
                if present[index].any():
                    _lift_row(program, term, k)
    return program


# ---- rows over literals --------------------------------------------------------------------------


def linear_rows(term: Term, k: int) -> list[tuple[FloatArray, float, float]]:
    """The rows of the k-th factor over its literals: lower ≤ coefs · literals ≤ upper."""
    d = term.index.shape[1]
    one, inf = np.ones(d), np.inf
    out = np.append(np.ones(d - 1), -1.0)

    def number(name: str, missing: float = 0.0) -> float:
        return _number(term, k, name, missing)

    def weights(name: str) -> FloatArray:
        shaped = np.asarray(term.params[name], dtype=float).reshape(len(term.index), d)
        return np.asarray(shaped[k])

    match term.kind:
        case "Xor":
            return [(one, 1, 1)]
        case "AtMostOne":
            return [(one, -inf, 1)]
        case "Or":
            return [(one, 1, inf)]
        case "Nand":
            return [(one, -inf, d - 1)]
        case "Imply":
            return [(out, -inf, d - 2)]
        case "XorOut":
            return [(out, 0, 0)]
        case "OrOut":  # each input ≤ output ≤ their sum
            return [*((np.eye(d)[i] - np.eye(d)[-1], -inf, 0) for i in range(d - 1)), (out, 0, inf)]
        case "AndOut":  # output ≤ each input, output ≥ their sum − (how many − 1)
            each = ((np.eye(d)[-1] - np.eye(d)[i], -inf, 0) for i in range(d - 1))
            return [*each, (out, -inf, d - 2)]
        case "Budget":
            return [(one, -inf, number("budget"))]
        case "AtLeast":
            return [(one, number("count"), inf)]
        case "Exactly":
            return [(one, number("count"), number("count"))]
        case "Knapsack":
            return [(weights("costs"), -inf, number("budget"))]
        case "Linear":
            return [(weights("coefs"), number("lower", -inf), number("upper", inf))]
    raise ValueError(term.kind)


def _number(term: Term, k: int, name: str, missing: float) -> float:
    """A parameter of the k-th factor."""
    given = np.asarray(term.params.get(name, missing), dtype=float)
    return float(np.broadcast_to(given, (len(term.index),))[k])


def _lift_row(program: Program, term: Term, k: int) -> None:
    negated = np.array(term.negated)
    for coefs, lower, upper in linear_rows(term, k):
        # A negated literal is 1 − x.
        signed, moved = np.where(negated, -coefs, coefs), float(coefs[negated].sum())
        if lower == upper:
            program.row(term.index[k], signed, upper - moved, equal=True)
            continue
        if upper < np.inf:
            program.row(term.index[k], signed, upper - moved)
        if lower > -np.inf:
            program.row(term.index[k], -signed, moved - lower)


def _lift_pairs(program: Program, term: Term, present: BoolArray) -> None:
    scores = np.broadcast_to(term.params["scores"], (len(term.index),))
    for (i, j), score in zip(term.index, scores, strict=True):
        if not (present[i] or present[j]):
            continue
        (both,) = program.extra([score])
        signs = [-1.0 if neg else 1.0 for neg in term.negated]
        ones = [1.0 if neg else 0.0 for neg in term.negated]
        program.row([both, i], [1, -signs[0]], ones[0])
        program.row([both, j], [1, -signs[1]], ones[1])
        program.row([i, j, both], [*signs, -1], 1 - sum(ones))


# ---- structures ----------------------------------------------------------------------------------


def _lift_table(program: Program, term: Term, present: BoolArray) -> None:
    groups = _groups(term)
    here = [bool(present[g].any()) for g in groups]
    for group, is_here in zip(groups, here, strict=True):
        if is_here:
            program.row(group, 1, 1, equal=True)
    if not all(here):  # no joint score
        return
    joint = program.extra(term.params["scores"]).reshape(term.params["sizes"])
    for axis, group in enumerate(groups):
        for state, j in enumerate(group):
            program.row(
                [*np.take(joint, state, axis).ravel(), j], [1] * _rest(joint, axis) + [-1], 0, True
            )


def _rest(joint: npt.NDArray[Any], axis: int) -> int:
    return int(joint.size // joint.shape[axis])


def _groups(term: Term) -> list[npt.NDArray[np.int64]]:
    return np.split(term.index, np.cumsum(term.params["sizes"])[:-1])


def _transitions(term: Term, length: int, states: int) -> FloatArray:
    given = np.asarray(term.params["transitions"], dtype=float)
    return np.broadcast_to(given, (max(0, length - 1), states, states))


def _lift_sequence(program: Program, term: Term, present: BoolArray) -> None:
    steps = term.index[present[term.index].any(axis=1)]
    length, states = steps.shape
    scores = _transitions(term, len(term.index), states)
    for name, step in (("initial", 0), ("final", -1)):
        if name in term.params:
            for j, score in zip(steps[step], term.params[name], strict=True):
                program.add_score(j, float(score))
    program.row(steps[0], 1, 1, equal=True)
    for t in range(length - 1):
        edges = program.extra(scores[t]).reshape(states, states)
        for s in range(states):
            program.row([*edges[s], steps[t, s]], [1] * states + [-1], 0, True)
            program.row([*edges[:, s], steps[t + 1, s]], [1] * states + [-1], 0, True)


def _lift_sequence_budget(program: Program, term: Term, present: BoolArray) -> None:
    """A flow through (step, how many are on so far, whether this one is)."""
    length, budget = len(term.index), int(term.params["budget"])
    budget = min(budget, length)
    scores = np.broadcast_to(np.asarray(term.params["transitions"], float), (max(0, length - 1),))
    inflow: dict[tuple[int, int], list[int]] = {}
    for on in range(min(1, budget) + 1):
        inflow[on, on] = [int(program.extra([0.0])[0])]
    program.row([e for into in inflow.values() for e in into], 1, 1, equal=True)
    for t in range(length):
        arrived = [e for (_, on), into in inflow.items() for e in into if on]
        program.row([*arrived, term.index[t]], [1] * len(arrived) + [-1], 0, True)
        if t == length - 1:
            break
        after: dict[tuple[int, int], list[int]] = {}
        for (count, on), into in inflow.items():
            leaving = []
            for then in (0, 1):
                if count + then <= budget:
                    (e,) = program.extra([scores[t] if on and then else 0.0])
                    leaving.append(int(e))
                    after.setdefault((count + then, then), []).append(int(e))
            program.row(into + leaving, [1] * len(into) + [-1] * len(leaving), 0, True)
        inflow = after


def _lift_matching(program: Program, term: Term, present: BoolArray) -> None:
    rows = term.index[present[term.index].any(axis=1)]
    for row in rows:
        program.row(row, 1, 1, equal=True)
    for column in rows.T:
        program.row(column, 1, 1)


def _lift_tree(program: Program, term: Term, present: BoolArray) -> None:
    words = np.flatnonzero(present[term.index].any(axis=1))
    for gone in np.setdiff1d(np.arange(len(term.index)), words):  # it heads nobody
        program.off |= {int(j) for j in term.index[:, gone]}
    arcs = term.index[np.ix_(words, words)]  # [modifier, head], the root on the diagonal
    n = len(words)
    for row in arcs:
        program.row(row, 1, 1, equal=True)
    if term.params["single_root"]:
        program.row(np.diag(arcs), 1, 1, equal=True)
    if term.params["projective"]:
        _projective(program, arcs)
    elif n <= CUT_WORDS:
        for count in range(2, n + 1):
            for inside in combinations(range(n), count):
                # Some word of the set has its head outside.
                heads = [arcs[i, h] for i in inside for h in range(n) if h == i or h not in inside]
                program.row(heads, -1, -1)
    else:
        for word in range(n):
            _reach(program, arcs, word)


def _reach(program: Program, arcs: npt.NDArray[np.int64], word: int) -> None:
    """A flow of 1 from the root to the word, along arcs no wider than their marginals."""
    n = len(arcs)
    into: list[list[int]] = [[] for _ in range(n)]
    out: list[list[int]] = [[] for _ in range(n)]
    for m, h in product(range(n), repeat=2):
        if h == word and m != word:
            continue  # nothing need leave it again
        (flow,) = program.extra([0.0])
        program.row([flow, arcs[m, h]], [1, -1], 0)
        into[m].append(int(flow))
        if h != m:
            out[h].append(int(flow))
    for m in range(n):
        signs = [1] * len(into[m]) + [-1] * len(out[m])
        program.row(into[m] + out[m], signs, float(m == word), equal=True)


def _projective(program: Program, arcs: npt.NDArray[np.int64]) -> None:
    """A flow through the derivations of Eisner's algorithm; node 0 is the root, left of all."""
    n = len(arcs)
    made: dict[tuple[str, int, int], list[int]] = {}
    used: dict[tuple[str, int, int], list[int]] = {}
    marginal: dict[tuple[int, int], list[int]] = {}

    def derive(item: tuple[str, int, int], *parts: tuple[str, int, int]) -> int:
        (edge,) = program.extra([0.0])
        made.setdefault(item, []).append(int(edge))
        for part in parts:
            if part[1] != part[2]:
                used.setdefault(part, []).append(int(edge))
        return int(edge)

    for s in range(n + 1):
        for t in range(s + 1, n + 1):
            for k in range(s, t):
                halves = ("right", s, k), ("left", k + 1, t)
                edge = derive(("arc right", s, t), *halves)
                marginal.setdefault((t, s), []).append(edge)
                if s > 0:
                    edge = derive(("arc left", s, t), *halves)
                    marginal.setdefault((s, t), []).append(edge)
                    derive(("left", s, t), ("left", s, k), ("arc left", k, t))
            for k in range(s + 1, t + 1):
                derive(("right", s, t), ("arc right", s, k), ("right", k, t))
    goal = ("right", 0, n)
    for item in made:
        uses = used.get(item, [])
        signs = [1] * len(made[item]) + [-1] * len(uses)
        program.row(made[item] + uses, signs, float(item == goal), equal=True)
    for (m, h), edges in marginal.items():
        j = arcs[m - 1, h - 1 if h else m - 1]
        program.row([*edges, j], [1] * len(edges) + [-1], 0, equal=True)


def _lift_own(program: Program, term: Term, present: BoolArray) -> None:
    structures = np.asarray(term.params["structures"], dtype=float)
    probs = program.extra(np.zeros(len(structures)))
    program.row(probs, 1, 1, equal=True)
    for j, column in zip(term.index, structures.T, strict=True):
        program.row([*probs, j], [*column, -1], 0, equal=True)


_LIFTS = {
    "Table": _lift_table,
    "Sequence": _lift_sequence,
    "SequenceBudget": _lift_sequence_budget,
    "Matching": _lift_matching,
    "DepTree": _lift_tree,
    "Own": _lift_own,
}


# ---- 0/1 assignments -----------------------------------------------------------------------------


def holds(term: Term, x: FloatArray, present: BoolArray, rounding: float = 1e-9) -> BoolArray:
    """Which of the 0/1 assignments `(N, n)` the factors of a term allow, `(N,)`.

    rounding: of weighted sums, relative to what they are sums of.
    """
    allowed = np.ones(len(x), dtype=bool)
    if term.kind == "Pair" or not present[term.index].any():
        return allowed
    if term.kind in _LIFTS:
        for i, point in enumerate(x):
            allowed[i] = valid_structure(term, point[term.index], present)
        return allowed
    negated = np.array(term.negated)
    for k, index in enumerate(term.index):
        if not present[index].any():
            continue
        literals = np.where(negated, 1 - x[:, index], x[:, index])
        allowed &= _allows(term, k, literals, rounding)
    return allowed


def _allows(term: Term, k: int, literals: FloatArray, rounding: float) -> BoolArray:
    """From the words of the definition, not from the rows."""
    on, d = literals.sum(axis=1), literals.shape[1]
    rest, last = literals[:, :-1].sum(axis=1), literals[:, -1]

    def number(name: str, missing: float = 0.0) -> float:
        return _number(term, k, name, missing)

    def total(name: str) -> tuple[FloatArray, FloatArray]:
        """The weighted sum, and by what it may be off."""
        costs = np.asarray(term.params[name], float).reshape(len(term.index), d)[k]
        return literals @ costs, rounding * (1 + literals @ np.abs(costs))

    answer: Any
    match term.kind:
        case "Xor":
            answer = on == 1
        case "AtMostOne":
            answer = on <= 1
        case "Or":
            answer = on >= 1
        case "Nand":
            answer = on < d
        case "Imply":
            answer = (rest < d - 1) | (last == 1)
        case "XorOut":
            answer = (rest <= 1) & (last == rest)
        case "OrOut":
            answer = last == (rest > 0)
        case "AndOut":
            answer = last == (rest == d - 1)
        case "Budget":
            answer = on <= number("budget")
        case "AtLeast":
            answer = on >= number("count")
        case "Exactly":
            answer = on == number("count")
        case "Knapsack":
            spent, slack = total("costs")
            answer = spent <= number("budget") + slack
        case "Linear":
            sums, slack = total("coefs")
            low, high = number("lower", -np.inf), number("upper", np.inf)
            answer = (sums <= high + slack) & (sums >= low - slack)
        case _:
            raise ValueError(term.kind)
    return np.asarray(answer, dtype=bool)


def valid_structure(term: Term, x: FloatArray, present: BoolArray) -> bool:
    """Whether a 0/1 array of the shape of the term's variables is one of its structures."""
    here = present[term.index]
    if (x[~here] != 0).any():
        return False
    match term.kind:
        case "Table":
            sizes = np.cumsum(term.params["sizes"])[:-1]
            for part, group in zip(np.split(x, sizes), np.split(here, sizes), strict=True):
                if group.any() and part.sum() != 1:
                    return False
            return bool(_table_score(term, x, here) > -np.inf)
        case "Sequence":
            x = x[here.any(axis=1)]
            return bool((x.sum(axis=1) == 1).all()) and _sequence_score(term, x) > -np.inf
        case "SequenceBudget":
            return bool(x.sum() <= term.params["budget"])
        case "Matching":
            rows = here.any(axis=1)
            return bool((x[rows].sum(axis=1) == 1).all() and (x.sum(axis=0) <= 1).all())
        case "DepTree":
            return _is_tree(term, x, np.asarray(here.any(axis=1)))
        case "Own":
            return bool((np.asarray(term.params["structures"]) == x).all(axis=1).any())
    raise ValueError(term.kind)


def _is_tree(term: Term, x: FloatArray, words: BoolArray) -> bool:
    if (x[words].sum(axis=1) != 1).any() or x[~words].any() or x[:, ~words].any():
        return False
    head = {int(m): int(np.argmax(x[m])) for m in np.flatnonzero(words)}
    for m in head:  # upwards from every word to the root
        at, seen = m, 0
        while head[at] != at:
            at, seen = head[at], seen + 1
            if seen > len(head):
                return False
    roots = sum(h == m for m, h in head.items())
    if term.params["single_root"] and roots != 1:
        return False
    if term.params["projective"]:
        spans = [
            (min(m, h), max(m, h)) for m, h in ((m, h if h != m else -1) for m, h in head.items())
        ]
        for a, b in combinations(spans, 2):
            (s, t), (v, w) = sorted((a, b))
            if s < v < t < w:
                return False
    return True


def worth(term: Term, x: FloatArray, present: BoolArray) -> float:
    """What the term's own scores add for a 0/1 assignment that it allows."""
    here = present[term.index]
    if not here.any():
        return 0.0
    match term.kind:
        case "Pair":
            ends = x[term.index]
            on = np.where(np.array(term.negated), 1 - ends, ends).prod(axis=1) * here.any(axis=1)
            return float(np.broadcast_to(term.params["scores"], len(on)) @ on)
        case "Table":
            return _table_score(term, x[term.index], here)
        case "Sequence":
            return _sequence_score(term, x[term.index][here.any(axis=1)])
        case "SequenceBudget":
            chosen = x[term.index]
            both = chosen[1:] * chosen[:-1]
            return float(
                np.broadcast_to(np.asarray(term.params["transitions"], float), len(both)) @ both
            )
    return 0.0


def _table_score(term: Term, x: FloatArray, here: BoolArray) -> float:
    sizes = np.cumsum(term.params["sizes"])[:-1]
    if not all(group.any() for group in np.split(here, sizes)):
        return 0.0
    state = tuple(int(np.argmax(part)) for part in np.split(x, sizes))
    return float(np.asarray(term.params["scores"])[state])


def _sequence_score(term: Term, x: FloatArray) -> float:
    path = [int(np.argmax(step)) for step in x]
    if not path:  # all steps are masked
        return 0.0
    scores = _transitions(term, len(term.index), x.shape[1])
    total = sum(float(scores[t, a, b]) for t, (a, b) in enumerate(pairwise(path)))
    if "initial" in term.params:
        total += float(np.asarray(term.params["initial"])[path[0]])
    if "final" in term.params:
        total += float(np.asarray(term.params["final"])[path[-1]])
    return total


def best_assignment(case: Case) -> tuple[FloatArray | None, float]:
    """The best of all 0/1 assignments by enumeration, and its score; None if none is allowed."""
    present = case.present
    free = np.flatnonzero(present)
    count = 1 << len(free)
    x = np.zeros((count, case.n))
    x[:, free] = (np.arange(count)[:, None] >> np.arange(len(free))) & 1
    # Rows first: they are quick, and leave few for the structures.
    for term in sorted(case.terms, key=lambda t: t.kind in _LIFTS):
        x = x[holds(term, x, present)]
    if not len(x):
        return None, -np.inf
    totals = x[:, free] @ case.scores[free]
    totals = totals + [sum(worth(t, point, present) for t in case.terms) for point in x]
    best = int(np.argmax(totals))
    return x[best], float(totals[best])
