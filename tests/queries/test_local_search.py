"""Local search: what it finds is feasible, and never worse than simple search."""

import numpy as np
import pytest
from exact import best_of
from hard import dense_pairs, prepared
from test_decode import GRAPHS

import factormax as fm
from factormax import _core
from factormax.queries.assignment import check_assignment, score_assignment
from factormax.queries.local_search import LocalSearch

EXACT = 1e-9


def value_of(inputs, x):
    """The score of an assignment, -inf if it is not feasible."""
    x = np.asarray(x, dtype=np.float64)[None]
    checked = check_assignment(inputs, x)
    return float(score_assignment(inputs, x, checked)[0]) if checked.feasible[0] else -np.inf


def one_flip(inputs, x):
    """Where no single flip improves."""
    x, value = np.array(x, dtype=np.float64), value_of(inputs, x)
    improved = value > -np.inf
    while improved:
        improved = False
        for j in range(len(x)):
            x[j] = 1 - x[j]
            there = value_of(inputs, x)
            absent = inputs.eta_u[0, j] == -np.inf
            if there > value + 1e-12 and not absent:
                value, improved = there, True
            else:
                x[j] = 1 - x[j]
    return value


def found_from(search, inputs, x, passes=500, **options):
    values = [value_of(inputs, y) for y in search.improve(x, passes * search.size, **options)]
    return max(values)


@pytest.mark.parametrize("name", GRAPHS)
def test_no_worse_than_flips(name):
    """From all off and from a feasible structure; nothing is better than the best there is."""
    rng = np.random.default_rng([17, list(GRAPHS).index(name)])
    optima = graphs = 0
    for k in range(40):
        mixture = GRAPHS[name](rng, k)
        best, structures = best_of(mixture.problem())
        if best == -np.inf:
            continue
        inputs = prepared(mixture.built().fg)
        search = LocalSearch(inputs)
        slack = EXACT * (1 + abs(best))
        top = -np.inf
        for start in (np.zeros(mixture.n), structures[0], np.round(rng.random(mixture.n))):
            found = found_from(search, inputs, start)
            assert found <= best + slack
            assert found >= value_of(inputs, start) - slack
            top = max(top, found)
        assert top >= one_flip(inputs, np.zeros(mixture.n)) - slack
        graphs += 1
        optima += top >= best - slack
    assert optima >= (0.8 if "structures" in name else 0.95) * graphs


def test_literals_of_pairs():
    """With negated variables, in groups and out of them."""
    rng = np.random.default_rng(0)
    every = np.indices((2,) * 10).reshape(10, -1).T
    possible = every[(every[:, :3].sum(axis=1) == 1) & (every[:, 3:6].sum(axis=1) == 1)]
    for _ in range(20):
        eta = rng.normal(size=10)
        scores = possible @ eta
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        fg.add(fm.Xor(u[:3]))
        fg.add(fm.Xor(u[3:6]))
        for _ in range(20):
            pair, negated, score = rng.choice(10, 2, False), rng.random(2) < 0.5, rng.normal()
            first, second = (~u[i] if n else u[i] for i, n in zip(pair, negated, strict=True))
            fg.add(fm.Pair(first, second, score))
            scores = scores + score * (possible[:, pair] ^ negated).all(axis=1)
        inputs = prepared(fg)
        found = found_from(LocalSearch(inputs), inputs, np.zeros(10))
        assert found == pytest.approx(scores.max(), abs=1e-9)


def test_tables_that_forbid():
    rng = np.random.default_rng(1)
    for _ in range(20):
        fg = fm.FactorGraph()
        groups = [fg.variable_from(rng.normal(size=k)) for k in (2, 3, 4, 2)]
        for scope in ((0, 1), (1, 2), (0, 2, 3)):
            scores = rng.normal(size=[groups[g].size for g in scope])
            scores[rng.random(scores.shape) < 0.3] = -np.inf
            fg.add(fm.Table([groups[g] for g in scope], scores))
        exact = fg.decode(on_failure="ignore")
        inputs = prepared(fg)
        found = found_from(LocalSearch(inputs), inputs, np.zeros(11))
        if exact.status is fm.Status.INFEASIBLE:
            assert found == -np.inf
        else:
            assert found == pytest.approx(float(exact.objective), abs=1e-9)


def test_absent_variables_stay_off():
    rng = np.random.default_rng(2)
    fg = fm.FactorGraph()
    scores = rng.normal(size=(4, 5))
    scores[1, 2] = scores[3, 0] = -np.inf
    mask = np.ones((4, 5), bool)
    mask[0, 1] = False
    u = fg.variable_from(scores, mask=mask)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    inputs = prepared(fg)
    for x in LocalSearch(inputs).improve(np.ones(20), 10_000):
        x = x.reshape(4, 5)
        assert not x[1, 2] and not x[3, 0] and not x[0, 1]
        assert (x.sum(axis=1) == 1).all() and (x.sum(axis=0) <= 1).all()


def test_matchings_are_mended():
    """Swaps: every move of one row alone breaks a column."""
    from scipy.optimize import linear_sum_assignment

    for seed in range(5):
        cost = np.random.default_rng(seed).normal(size=(12, 12))
        i, j = linear_sum_assignment(cost)
        fg = fm.FactorGraph()
        u = fg.variable_from(-cost)
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.Xor(u, axis=0))
        inputs = prepared(fg)
        found = found_from(LocalSearch(inputs), inputs, np.zeros(144))
        assert found >= -cost[i, j].sum() - 0.05 * np.abs(cost[i, j]).sum()


def test_the_same_work_gives_the_same():
    inputs = prepared(dense_pairs(0, 30))
    search = LocalSearch(inputs)
    answers = [
        next(iter(s.improve(np.zeros(30), 200_000, seed=3)))
        for s in (search, search, LocalSearch(inputs))
    ]
    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_array_equal(answers[0], answers[2])


def test_it_stops_when_told():
    inputs = prepared(dense_pairs(0, 30))
    asked = []

    def over():
        asked.append(None)
        return len(asked) == 2

    list(LocalSearch(inputs).improve(np.zeros(30), 10**12, over=over))
    assert len(asked) == 2


# The core checks what it is given -----------------------------------------------------------------


def arrays():
    """Two units of two states, one table, one row."""
    return {
        "state_ptr": np.array([0, 2, 4], np.int32),
        "score": np.zeros(4),
        "allowed": np.ones(4, np.uint8),
        "scope_ptr": np.array([0, 2], np.int32),
        "scope": np.array([0, 1], np.int32),
        "table_ptr": np.array([0, 4], np.int64),
        "table": np.array([0.0, 0.0, 0.0, 1.0]),
        "row_ptr": np.array([0, 2], np.int32),
        "row_state": np.array([1, 3], np.int32),
        "coef": np.ones(2),
        "rhs": np.ones(1),
        "equal": np.zeros(1, np.uint8),
    }


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("state_ptr", np.array([0, 0, 4], np.int32)),
        ("state_ptr", np.array([0, 2, 5], np.int32)),
        ("score", np.array([0.0, np.nan, 0, 0])),
        ("allowed", np.ones(3, np.uint8)),
        ("allowed", np.full(4, 2, np.uint8)),
        ("scope", np.array([0, 2], np.int32)),
        ("table_ptr", np.array([0, 3], np.int64)),
        ("table_ptr", np.array([4, 8], np.int64)),
        ("table", np.array([0.0, -np.inf, 0, 0])),
        ("row_ptr", np.array([0, 3], np.int32)),
        ("row_state", np.array([1, 4], np.int32)),
        ("coef", np.ones(3)),
        ("rhs", np.ones(2)),
        ("equal", np.zeros(2, np.uint8)),
    ],
)
def test_wrong_arrays(name, wrong):
    with pytest.raises(ValueError):
        _core.LocalSearch(**(arrays() | {name: wrong}))


def test_wrong_states():
    search = _core.LocalSearch(**arrays())
    movable = np.ones(2, np.uint8)
    for x in (np.array([0, 2]), np.array([0, -1]), np.array([0])):
        with pytest.raises(ValueError):
            search.run(x.astype(np.int32), movable, 100, 0)
    with pytest.raises(ValueError):
        search.run(np.zeros(2, np.int32), movable[:1], 100, 0)
    with pytest.raises(ValueError):
        search.conditional(np.zeros(2, np.int32), np.zeros(3))
