"""Problems for the tests: random ones, the benchmark models, and how to build them in factormax."""

import numpy as np
from meaning import random_params
from oracle import Problem, Term

LOGIC = ("Xor", "AtMostOne", "Or", "Nand", "Imply", "XorOut", "OrOut", "AndOut")
COUNTING = ("Budget", "AtLeast", "Exactly")
ALL = (*LOGIC, *COUNTING, "Knapsack", "Pair")


def random_term(kind: str, variables, rng, negate=False, scale=1.0) -> Term:
    d = len(variables)
    neg = rng.random(d) < 0.5 if negate else ()
    scores = float(scale * rng.normal()) if kind == "Pair" else 0.0
    return Term(kind, variables, neg, random_params(kind, d, rng), scores)


def random_problem(rng, n=8, factors=6, kinds=ALL, scale=1.0, max_degree=5, max_size=5) -> Problem:
    """Overlapping factors with negation, feasible because a planted assignment satisfies them."""
    planted = rng.integers(0, 2, n)
    degree, terms = np.zeros(n, int), []
    while len(terms) < factors:
        kind = str(rng.choice(kinds))
        d = 2 if kind == "Pair" else int(rng.integers(1, max_size + 1))
        free = np.flatnonzero(degree < max_degree)
        if len(free) < d:
            break
        term = random_term(kind, rng.choice(free, d, replace=False), rng, negate=True, scale=scale)
        if term.holds(planted):
            terms.append(term)
            degree[list(term.vars)] += 1
    return Problem(scale * rng.normal(size=n), tuple(terms))


def fuzzed_problem(seed: int) -> Problem:
    """One of an endless supply, at all scales: larger and more tangled than the others."""
    rng = np.random.default_rng([7, seed])
    scale = (0.1, 1.0, 10.0, 100.0, 1e3, 1e4)[seed % 6]
    n, factors = int(rng.integers(3, 30)), int(rng.integers(2, 25))
    return random_problem(rng, n, factors, scale=scale)


def tangled_problem(seed: int, scale: float) -> Problem:
    """Hundreds of variables with constraints and more pairs: nearly a linear program."""
    rng = np.random.default_rng([16, seed])
    n = int(rng.integers(600, 951))
    kinds, size = (*LOGIC, *COUNTING, "Knapsack"), int(rng.integers(3, 12))
    factors = int(n * rng.uniform(0.2, 1.0))
    base = random_problem(rng, n, factors, kinds, scale, max_degree=6, max_size=size)
    pairs = []
    for _ in range(int(n * rng.choice([0.5, 1, 2, 4]))):
        first = int(rng.integers(n))
        second = (first + int(rng.integers(1, (n, 30, 5)[seed % 3]))) % n
        score = scale * rng.normal()
        pairs.append(Term("Pair", (first, second), scores=score if seed % 6 < 3 else abs(score)))
    return Problem(base.eta * (1 if seed % 2 else 0.1), (*base.terms, *pairs))


def unplanted_problem(seed: int) -> Problem:
    """A random graph that may well be infeasible; one in five with masked variables."""
    rng = np.random.default_rng([8, seed])
    scale = (0.1, 1.0, 10.0, 100.0, 1e3, 1e4)[seed % 6]
    n, terms = int(rng.integers(2, 10)), []
    for _ in range(int(rng.integers(2, 10))):
        kind = str(rng.choice(ALL))
        d = 2 if kind == "Pair" else int(rng.integers(1, min(5, n) + 1))
        variables = rng.choice(n, d, replace=False)
        terms.append(random_term(kind, variables, rng, negate=True, scale=scale))
    problem = Problem(scale * rng.normal(size=n), tuple(terms))
    return problem.masked(rng.random(n) < 0.7) if seed % 5 == 0 else problem


# The models of the convergence tests --------------------------------------------------------------


def matching(rng, n: int, scale: float) -> Problem:
    cells = np.arange(n * n).reshape(n, n)
    terms = [Term("Xor", row) for row in cells] + [Term("AtMostOne", column) for column in cells.T]
    return Problem(scale * rng.normal(size=n * n), tuple(terms))


def random_logic(rng, n: int, scale: float) -> Problem:
    return random_problem(rng, n, factors=n, kinds=LOGIC + COUNTING, scale=scale, max_size=6)


def full_mrf(rng, labels: int, scale: float) -> Problem:
    pairs = zip(*np.triu_indices(labels, 1), strict=True)
    terms = [Term("Pair", pair, scores=scale * rng.normal()) for pair in pairs]
    return Problem(scale * rng.normal(size=labels), tuple(terms))
