"""Large graphs that can't be cut into strips: threads share what they are made of."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import factormax as fm


def random_pairs(rng, n=20_000, pairs=36_000):
    fg = fm.FactorGraph()
    u = fg.variable_from(rng.normal(size=n))
    first = rng.integers(0, n, pairs)
    second = (first + rng.integers(1, n, pairs)) % n
    fg.add(fm.Pair(u[first], ~u[second], rng.normal(size=pairs)))
    return fg, u


def random_budgets(rng, n=30_000):
    fg = fm.FactorGraph()
    u = fg.variable_from(2 * rng.normal(size=n))
    members = np.concatenate([rng.permutation(n).reshape(-1, 5) for _ in range(6)])
    fg.add(fm.Budget(u[members], 2, axis=1))
    return fg, u


def trees(rng, count=20, words=8):
    fg = fm.FactorGraph()
    u = fg.variable_from(rng.normal(size=(count, words, words)))
    for tree in range(count):
        fg.add(fm.DepTree(u[tree], projective=tree % 2 == 0))
    fg.add(fm.Budget(u[:, :, 0], count // 5, axis=0))
    return fg, u


def grid_of_chains(rng, n=20, states=3):
    fg = fm.FactorGraph()
    u = fg.variable_from(rng.normal(size=(n, n, states)))
    for i in range(n):
        fg.add(fm.Sequence(u[i], rng.normal(size=(states, states))))
        fg.add(fm.Sequence(u[:, i], rng.normal(size=(states, states))))
    return fg, u


GRAPHS: dict[str, Callable[..., tuple[fm.FactorGraph, fm.Variable]]] = {
    "random pairs": random_pairs,
    "random budgets": random_budgets,
    "trees": trees,
    "grid of chains": grid_of_chains,
}


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    yield fm.set_num_threads
    fm.set_num_threads(None)


@pytest.mark.parametrize("query", ["solve", "solve_map"])
@pytest.mark.parametrize("name", list(GRAPHS))
def test_the_answer_does_not_depend_on_threads(name, query, threads):
    fg, u = GRAPHS[name](np.random.default_rng(0))
    grad = {u: np.random.default_rng(1).normal(size=u.shape)}
    answers = []
    for count in (1, 2, 5):
        threads(count)
        solution = getattr(fg, query)(max_iter=300, on_failure="ignore")
        answers.append([u.value.copy(), solution.objective, solution.iterations])
        if query == "solve":
            assert solution.converged
            answers[-1].append(solution.vjp(grad)[u])
    for answer in answers[1:]:
        for found, expected in zip(answer, answers[0], strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["trees", "grid of chains"])
def test_factors_that_threads_share_agree_with_admm(name, threads):
    fg, u = GRAPHS[name](np.random.default_rng(2))
    threads(3)
    fg.solve(on_failure="raise")
    value = u.value.copy()
    fg.solve(method="admm", max_iter=20_000, tol=1e-7, on_failure="raise")
    np.testing.assert_allclose(value, u.value, atol=1e-5)


def test_a_factor_without_a_structure_is_found_among_many(threads):
    fg, u = trees(np.random.default_rng(3))
    fg.add(fm.AtLeast(u[7, :, 0], 8))  # word 0 as the head of all words, of itself too
    fg.add(fm.Xor([u[7, 0, 0], ~u[7, 1, 0], ~u[7, 2, 0]]))
    statuses = set()
    for count in (1, 2, 5):
        threads(count)
        statuses.add(fg.solve(on_failure="ignore").status)
    assert len(statuses) == 1


def test_functions_of_ones_own_are_called_one_after_the_other(threads):
    running, most = 0, 0

    class Best(fm.Factor):
        def map(self, eta_u, eta_v):
            nonlocal running, most
            running += 1
            most = max(most, running)
            on = np.eye(len(eta_u))[eta_u.argmax()]
            running -= 1
            return on, []

    fg = fm.FactorGraph()
    u = fg.variable_from(np.random.default_rng(4).normal(size=(40, 30)))
    for row in range(40):
        fg.add(Best(u[row]))
    fg.add(fm.Budget(u[:, :10], 12, axis=0))
    threads(4)
    fg.solve(on_failure="raise")
    assert most == 1
    np.testing.assert_allclose(u.value.sum(1), 1, atol=1e-6)
