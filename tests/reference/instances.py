"""Small graphs for the tests, and an oracle that shares nothing with what it tests.

`compile_graph` writes factors as rows, by the table of docs/math.md, section 3. The oracle never
sees a row: it enumerates the 0/1 assignments that each factor allows, by the factor's
*meaning*, and gives Clarabel the paper's own problem over their convex hulls, docs/math.md (3).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import clarabel
import numpy as np
import scipy.sparse as sp

from factormax.reference import Compiled, DenseProblem, from_compiled
from factormax.reference.rows import EQUALITY, INEQUALITY


@dataclass(frozen=True)
class Factor:
    """A logic, counting or knapsack factor over literals."""

    name: str
    var: tuple[int, ...]
    negated: tuple[bool, ...]
    count: float = 0  # Budget, AtLeast, Exactly; the budget of a Knapsack
    costs: tuple[float, ...] = ()  # Knapsack


@dataclass(frozen=True)
class Graph:
    """A factor graph of one instance, with its scores."""

    eta_u: np.ndarray
    factors: tuple[Factor, ...] = ()
    pairs: np.ndarray = None  # (P, 2)
    pair_negated: np.ndarray = None  # (P, 2)
    eta_v: np.ndarray = None  # (P,)

    def __post_init__(self):
        if self.pairs is None:
            object.__setattr__(self, "pairs", np.zeros((0, 2), int))
            object.__setattr__(self, "pair_negated", np.zeros((0, 2), bool))
            object.__setattr__(self, "eta_v", np.zeros(0))

    def problem(self, eta_u=None, eta_v=None) -> DenseProblem:
        """The graph as rows, at these scores or at other ones."""
        eta_u = self.eta_u if eta_u is None else eta_u
        eta_v = self.eta_v if eta_v is None else eta_v
        return from_compiled(compile_graph(self), 0, eta_u, eta_v)


# ------------------------------------------------------------------------------------------
# Rows


def literal_rows(factor: Factor) -> list[tuple[dict[int, float], float, int]]:
    """[(weight of each literal that occurs, right-hand side, kind)]: the table of section 3."""
    d = len(factor.var)
    everyone = dict.fromkeys(range(d), 1.0)
    but_last = {**everyone, d - 1: -1.0}
    minus = dict.fromkeys(range(d), -1.0)
    implications = [{i: 1.0, d - 1: -1.0} for i in range(d - 1)]
    total = {**minus, d - 1: 1.0}
    match factor.name:
        case "Xor":
            return [(everyone, 1, EQUALITY)]
        case "AtMostOne":
            return [(everyone, 1, INEQUALITY)]
        case "Or":
            return [(minus, -1, INEQUALITY)]
        case "Nand":
            return [(everyone, d - 1, INEQUALITY)]
        case "Imply":
            return [(but_last, d - 2, INEQUALITY)]
        case "XorOut":
            return [(but_last, 0, EQUALITY)]
        case "Budget":
            return [(everyone, factor.count, INEQUALITY)]
        case "AtLeast":
            return [(minus, -factor.count, INEQUALITY)]
        case "Exactly":
            return [(everyone, factor.count, EQUALITY)]
        case "Knapsack":
            return [(dict(enumerate(factor.costs)), factor.count, INEQUALITY)]
        case "OrOut" | "AndOut" if d == 2:
            return [(total, 0, EQUALITY)]
        case "OrOut" | "AndOut":
            return [(row, 0, INEQUALITY) for row in (*implications, total)]
    raise AssertionError(factor.name)


def compile_graph(graph: Graph) -> Compiled:
    """What the real compiler makes, for one instance without a mask."""
    col, coef, rhs, kind, row_ptr, block_ptr = [], [], [], [], [0], [0]
    for factor in graph.factors:
        # AndOut is OrOut with every literal negated (De Morgan).
        negated = np.array(factor.negated) ^ (factor.name == "AndOut")
        sigma = np.where(negated, -1.0, 1.0)
        for weights, bound, row_kind in literal_rows(factor):
            # docs/math.md (7): a negated literal flips its coefficient and moves the bound.
            col += [factor.var[k] for k in weights]
            coef += [w * sigma[k] for k, w in weights.items()]
            rhs.append(bound - sum(w for k, w in weights.items() if negated[k]))
            kind.append(row_kind)
            row_ptr.append(len(col))
        block_ptr.append(len(rhs))
    return Compiled(
        num_variables=len(graph.eta_u),
        row_ptr=np.array(row_ptr, np.int32),
        col=np.array(col, np.int32),
        coef=np.array([coef], np.float64),
        rhs=np.array([rhs], np.float64),
        kind=np.array(kind, np.int8),
        pairs=np.array(graph.pairs, np.int32),
        pair_negated=np.array(graph.pair_negated, np.bool_),
        block_ptr=np.array(block_ptr, np.int32),
        block_kind=np.array([f.name in ("OrOut", "AndOut") for f in graph.factors], np.int8),
    )


# ------------------------------------------------------------------------------------------
# Meaning


def allows(factor: Factor, assignment: tuple[bool, ...]) -> bool:
    """Does the factor allow these 0/1 values of its variables?"""
    ell = [bool(x) != neg for x, neg in zip(assignment, factor.negated, strict=True)]
    *inputs, last = ell
    return {
        "Xor": lambda: sum(ell) == 1,
        "AtMostOne": lambda: sum(ell) <= 1,
        "Or": lambda: any(ell),
        "Nand": lambda: not all(ell),
        "Imply": lambda: last or not all(inputs),
        "XorOut": lambda: sum(inputs) <= 1 and last == (sum(inputs) == 1),
        "OrOut": lambda: last == any(inputs),
        "AndOut": lambda: last == all(inputs),
        "Budget": lambda: sum(ell) <= factor.count,
        "AtLeast": lambda: sum(ell) >= factor.count,
        "Exactly": lambda: sum(ell) == factor.count,
    }[factor.name]()


def oracle(graph: Graph) -> tuple[np.ndarray, np.ndarray, float] | None:
    """(μ, pair values, objective) of docs/math.md (3) by an interior-point method, or None.

    Unknowns: μ, and for every factor a distribution p_f over the assignments it allows. A
    Knapsack is defined as a half-space, not as a hull, so it is one row here too.
    """
    n = len(graph.eta_u)
    literals = [(0, 0), (0, 1), (1, 0), (1, 1)]
    hulls = [
        (f.var, np.array([a for a in itertools.product((0, 1), repeat=len(f.var)) if allows(f, a)]))
        for f in graph.factors
        if f.name != "Knapsack"
    ]
    hulls += [(tuple(pair), np.array(literals)) for pair in graph.pairs]
    if any(len(vertices) == 0 for _, vertices in hulls):
        return None
    size = n + sum(len(vertices) for _, vertices in hulls)

    q = np.zeros(size)
    q[:n] = -graph.eta_u
    equal, equal_rhs, start, both_on = [], [], n, []
    for h, (var, vertices) in enumerate(hulls):
        k = len(vertices)
        p = slice(start, start + k)
        simplex = np.zeros(size)
        simplex[p] = 1.0
        equal.append(simplex)
        equal_rhs.append(1.0)
        for j, on in zip(var, vertices.T, strict=True):  # M_f p_f = μ_f
            agree = np.zeros(size)
            agree[p] = on
            agree[j] -= 1.0
            equal.append(agree)
            equal_rhs.append(0.0)
        pair = h - (len(hulls) - len(graph.pairs))
        if pair >= 0:
            on = (vertices != graph.pair_negated[pair]).all(axis=1)
            q[p] = -graph.eta_v[pair] * on
            both_on.append((p, on))
        start += k

    below, below_rhs = [-np.eye(size), np.eye(size)[:n]], [np.zeros(size), np.ones(n)]
    for f in graph.factors:
        if f.name == "Knapsack":
            row = np.zeros(size)
            sigma = np.where(f.negated, -1.0, 1.0)
            np.add.at(row, list(f.var), np.array(f.costs) * sigma)
            below.append(row[None])
            below_rhs.append([f.count - np.array(f.costs) @ np.array(f.negated)])

    A = np.concatenate([np.reshape(equal, (-1, size)), *below])
    b = np.concatenate([equal_rhs, *below_rhs])
    x = clarabel_qp(np.diag((np.arange(size) < n) * 1.0), q, A, b, len(equal))
    if x is None:
        return None
    mu = x[:n]
    mu_v = np.array([x[p] @ on for p, on in both_on])
    return mu, mu_v, float(graph.eta_u @ mu + graph.eta_v @ mu_v - 0.5 * mu @ mu)


def clarabel_qp(P, q, A, b, num_equal) -> np.ndarray | None:
    """min ½xᵀPx + qᵀx with Ax = b in the first rows and Ax ≤ b in the others; None: infeasible."""
    cones = [clarabel.ZeroConeT(num_equal), clarabel.NonnegativeConeT(len(b) - num_equal)]
    for tol in (1e-13, 1e-11, 1e-9):  # redundant rows can keep it from the tightest
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        settings.max_iter = 500
        settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = tol
        solution = clarabel.DefaultSolver(
            sp.csc_matrix(np.triu(P)), q, sp.csc_matrix(A), b, cones, settings
        ).solve()
        if solution.status == clarabel.SolverStatus.Solved:
            return np.array(solution.x)
        if solution.status == clarabel.SolverStatus.PrimalInfeasible:
            return None
    raise AssertionError(f"the oracle failed: {solution.status}")


# ------------------------------------------------------------------------------------------
# Random graphs

NAMES = (
    "Xor", "AtMostOne", "Or", "Nand", "Imply", "XorOut", "OrOut", "AndOut",
    "Budget", "AtLeast", "Exactly", "Knapsack",
)  # fmt: skip


def random_factor(rng, name: str, var) -> Factor:
    """A factor of this kind over these variables, some negated, never empty."""
    d = len(var)
    return Factor(
        name,
        tuple(int(j) for j in var),
        tuple(bool(x) for x in rng.random(d) < 0.3),
        count=rng.integers(1, d) if name != "Knapsack" else rng.uniform(0.5, d),
        costs=tuple(rng.uniform(0, 2, d)) if name == "Knapsack" else (),
    )


def random_graph(rng, n: int, num_factors: int, num_pairs: int, scale: float) -> Graph:
    """Overlapping factors and pairs, every variable in a few of them; it may be infeasible."""
    factors = tuple(
        random_factor(rng, rng.choice(NAMES), rng.permutation(n)[: rng.integers(2, min(n, 5) + 1)])
        for _ in range(num_factors)
    )
    pairs = np.array([rng.permutation(n)[:2] for _ in range(num_pairs)]).reshape(-1, 2)
    return Graph(
        eta_u=scale * rng.standard_normal(n),
        factors=factors,
        pairs=pairs,
        pair_negated=rng.random((num_pairs, 2)) < 0.3,
        eta_v=scale * rng.standard_normal(num_pairs),
    )


def feasible_graphs(seed: int, count: int, **kwargs) -> list[tuple[Graph, tuple]]:
    """`count` random graphs that have a solution, each with the oracle's answer."""
    rng, found = np.random.default_rng(seed), []
    while len(found) < count:
        graph = random_graph(rng, **kwargs)
        answer = oracle(graph)
        if answer is not None:
            found.append((graph, answer))
    return found


def matching(rng, m: int, n: int, scale: float) -> Graph:
    """Every row exactly one, every column at most one."""
    index = np.arange(m * n).reshape(m, n)
    plain = lambda name, var: Factor(name, tuple(var.tolist()), (False,) * len(var))  # noqa: E731
    factors = [plain("Xor", row) for row in index] + [plain("AtMostOne", c) for c in index.T]
    return Graph(scale * rng.standard_normal(m * n), tuple(factors))
