"""From an oracle's `Problem` to a factormax graph, and the comparison of the two answers."""

from typing import Any, NamedTuple

import numpy as np
import oracle
from oracle import Infeasible, Problem, Term

import factormax as fm

AWAY_FROM_KINKS = 1e-4


class Built(NamedTuple):
    """A graph, its variables, and its Pair (all the pairs of the problem in one) or None."""

    fg: fm.FactorGraph
    u: Any
    pair: Any


def make_factor(term: Term, u):
    literals = [~u[j] if negated else u[j] for j, negated in zip(term.vars, term.neg, strict=True)]
    if term.kind == "Pair":
        return fm.Pair(*literals, term.scores)
    return getattr(fm, term.kind)(literals, **term.params)


def build(problem: Problem, scores=None, mask=None, batch_dims=0, pair_scores=None) -> Built:
    """The problem as a graph; `scores` (and `pair_scores`) may replace its own by a batch."""
    fg = fm.FactorGraph(batch_dims=batch_dims)
    u = fg.variable_from(problem.eta if scores is None else scores, mask=mask)
    for term in problem.terms:
        if term.kind != "Pair":
            fg.add(make_factor(term, u))
    pairs = [
        [(~u[j] if negated else u[j])[None] for j, negated in zip(t.vars, t.neg, strict=True)]
        for t in problem.terms
        if t.kind == "Pair"
    ]
    pair = None
    if pairs:
        pair_scores = problem.pair_scores if pair_scores is None else pair_scores
        pair = fg.add(fm.Pair(*map(list, zip(*pairs, strict=True)), pair_scores))
    return Built(fg, u, pair)


def solved(problem: Problem, **options) -> tuple[Built, fm.Solution]:
    built = build(problem)
    return built, built.fg.solve(**options)


def assert_solves(problem: Problem, atol=1e-5, grad_atol=1e-6, seed=0, **options) -> bool:
    """Value and gradient equal the exact ones; whether the gradient could be compared."""
    exact = oracle.solve(problem)
    built, solution = solved(problem, **options)
    assert solution.converged, solution
    assert max(solution.primal_residual, solution.dual_residual) <= options.get("tol", 1e-6)
    np.testing.assert_allclose(built.u.value, exact.mu, rtol=0, atol=atol)
    scale = max(1.0, np.abs(problem.eta).max(), np.abs(problem.pair_scores).max(initial=0))
    assert abs(solution.objective - exact.objective) <= 10 * atol * scale * len(problem.eta)
    if built.pair is not None:
        np.testing.assert_allclose(built.pair.value, exact.mu_pair, rtol=0, atol=2 * atol)
    if exact.kink_distance < AWAY_FROM_KINKS:
        return False
    assert_gradient(built, solution, exact, np.random.default_rng(seed), grad_atol)
    return True


def assert_gradient(built: Built, solution, exact, rng, atol=1e-6):
    """`solution.vjp` equals the exact one, for gradients of the variables and of the pairs."""
    grads = {built.u: rng.normal(size=exact.mu.shape)}
    if built.pair is not None:
        grads[built.pair] = rng.normal(size=exact.mu_pair.shape)
    out = solution.vjp(grads)
    expected_u, expected_pair = exact.vjp(*grads.values())
    np.testing.assert_allclose(out[built.u], expected_u, rtol=0, atol=atol)
    if built.pair is not None:
        np.testing.assert_allclose(out[built.pair], expected_pair, rtol=0, atol=atol)


def exact_or_none(problem: Problem):
    try:
        return oracle.solve(problem)
    except Infeasible:
        return None


def op_args_of(fg, temperature=None):
    """The arguments with which `fg.solve()` would call `torch.ops.factormax.solve`."""
    from factormax._fronts.torch import traced
    from factormax._layout import Layout
    from factormax._options import Options

    return traced._op_args(fg, Layout.of(fg), Options(), None, temperature)
