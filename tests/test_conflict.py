"""Infeasible instances say which factors exclude each other."""

import copy
import pickle
import re

import numpy as np
import pytest

import factormax as fm
from factormax._names import literals_name
from factormax.scope import ListedPart

QUERIES = {
    "auto": lambda fg, **o: fg.solve(**o),
    "admm": lambda fg, **o: fg.solve(method="admm", **o),
    "map": lambda fg, **o: fg.solve_map(**o),
    "ad3": lambda fg, **o: fg.solve_map(method="ad3", **o),
    "decode": lambda fg, **o: fg.decode(**o),
}
every_query = pytest.mark.parametrize("ask", QUERIES.values(), ids=QUERIES.keys())
LIBRARIES = ["numpy", "torch"]


def array(library, scores):
    return pytest.importorskip("torch").tensor(scores) if library == "torch" else scores


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


class Half(fm.Factor):
    """Exactly half of the variables are on."""

    def map(self, eta_u, eta_v):
        on = np.zeros(eta_u.size)
        on[np.argsort(-eta_u.reshape(-1))[: eta_u.size // 2]] = 1
        return on, []


@every_query
@pytest.mark.parametrize("library", LIBRARIES)
def test_rows_of_an_axis_and_what_has_nothing_to_do_with_it(ask, library):
    fg = fm.FactorGraph()
    u = fg.variable_from(array(library, 3 * random(4, 5)))
    v = fg.variable_from(array(library, 3 * random(6, seed=1)), name="v")
    fg.add(fm.Xor(v))
    fg.add(fm.AtMostOne(v[:3]))
    rows = fg.add(fm.Xor(u, axis=1))
    none = fg.add(fm.Budget(u[2], 0))
    solution = ask(fg, on_failure="ignore")
    names = solution.conflict()
    assert names == ["Xor over u[2, :]", "Budget over u[2]"]
    assert [n.factor for n in names] == [rows, none] and [n.row for n in names] == [(2,), ()]
    assert solution.conflict(0) == names
    assert not np.asarray(solution.multipliers).any()
    with pytest.warns(fm.NotConvergedWarning, match=r"exclude each other: Xor over u\[2, :\]; Bud"):
        ask(fg)
    with pytest.raises(fm.InfeasibleError, match=r"Xor over u\[2, :\]; Budget over u\[2\]"):
        ask(fg, on_failure="raise")


@every_query
def test_only_the_infeasible_instances_of_a_batch(ask):
    fg = fm.FactorGraph(batch_dims=2)
    u = fg.variable_from(random(2, 3, 4))
    budget = np.array([[4, 0, 4], [4, 4, 1]])
    fg.add(fm.Budget(u, budget))
    fg.add(fm.AtLeast(u[:2], 2))
    fg.add(fm.Or(u[2:]))
    solution = ask(fg, on_failure="ignore")
    for place in np.ndindex(2, 3):
        names = solution.conflict(place)
        assert bool(names) == (solution.status[place] is fm.Status.INFEASIBLE)
        if names:
            assert "Budget over u" in names and set(names) <= {
                "Budget over u",
                "AtLeast over u[:2]",
                "Or over u[2:]",
            }
    first = next(place for place in np.ndindex(2, 3) if solution.conflict(place))
    message = re.escape(f"The first is instance {first}. These exclude each other: Budget")
    with pytest.raises(fm.InfeasibleError, match=message):
        ask(fg, on_failure="raise")
    with pytest.warns(fm.NotConvergedWarning, match=message):
        ask(fg)
    for bad in (0, (0,), (2, 0), (0, 0, 0), "x", None):
        with pytest.raises(fm.GraphError, match="is not an index into a batch of shape"):
            solution.conflict(bad)


@every_query
def test_a_feasible_instance_has_no_conflict(ask):
    fg = fm.FactorGraph()
    fg.add(fm.Xor(fg.variable_from(random(3))))
    solution = ask(fg)
    assert solution.conflict() == [] and solution.conflict(0) == []
    with pytest.raises(fm.GraphError, match="not an index"):
        solution.conflict(1)


@every_query
@pytest.mark.parametrize("minus_inf", [False, True])
def test_what_is_masked(ask, minus_inf):
    fg = fm.FactorGraph()
    mask = np.ones((3, 5), dtype=bool)
    mask[1, 1:] = False
    scores = random(3, 5)
    if minus_inf:
        scores[~mask] = -np.inf
        mask = None
    u = fg.variable_from(scores, mask=mask)
    fg.add(fm.AtLeast(u, 2, axis=1))
    with pytest.warns(
        fm.NotConvergedWarning,
        match=r"AtLeast over u\[1, :\] \(all but u\[1, 0\] masked\) can't hold, whatever",
    ):
        assert ask(fg).conflict() == ["AtLeast over u[1, :]"]


@every_query
@pytest.mark.parametrize(
    "make",
    [
        lambda u: fm.DepTree(u),
        lambda u: fm.DepTree(u, projective=True),
        lambda u: fm.Matching(u),
        lambda u: fm.Sequence(u, np.zeros((4, 4))),
        lambda u: fm.Table(list(u), np.zeros((4,) * 4)),
    ],
    ids=["tree", "projective tree", "matching", "sequence", "table"],
)
def test_structured_factors_take_part(ask, make):
    fg = fm.FactorGraph()
    u = fg.variable_from(random(4, 4))
    v = fg.variable_from(random(3, seed=1))
    fg.add(fm.Xor(v))
    fg.add(make(u))
    fg.add(fm.Budget(u, 3))
    names = ask(fg, on_failure="ignore").conflict()
    assert len(names) == 2 and names[1] == "Budget over u"
    assert names[0].factor is fg._factors[1]


@every_query
def test_factors_of_the_users_own_take_part(ask):
    fg = fm.FactorGraph()
    u = fg.variable_from(random(6))
    fg.add(fm.Nand(u[:2]))
    fg.add(Half(u))
    fg.add(fm.AtLeast(u, 4))
    assert ask(fg, on_failure="ignore").conflict() == ["Half over u", "AtLeast over u"]


@every_query
def test_linked_factors_take_part(ask):
    fg = fm.FactorGraph()
    u = fg.variable_from(random(4))
    fg.add(fm.SequenceBudget(u, 0.1, 1))
    fg.add(fm.Nand(u[:2]))
    fg.add(Half(u))  # two
    names = ask(fg, on_failure="ignore").conflict()
    assert {"SequenceBudget over u", "Half over u"} <= set(names)


@every_query
def test_a_box_is_enough(ask):
    """A structured factor that shares the variables of a conflict is not to blame."""
    fg = fm.FactorGraph()
    u = fg.variable_from(random(4, 4))
    fg.add(fm.DepTree(u))
    fg.add(fm.AtLeast(u[0], 3))
    fg.add(fm.Budget(u, 2))
    names = ask(fg, on_failure="ignore").conflict()
    assert len(names) == 2 and "AtLeast over u[0]" in names


def test_a_structured_factor_without_structure():
    fg = fm.FactorGraph(batch_dims=1)
    mask = np.ones((2, 3, 3), dtype=bool)
    mask[1, :2, 1:] = False  # two rows have only the first column
    u = fg.variable_from(random(2, 3, 3), mask=mask)
    fg.add(fm.Budget(u, 8))
    fg.add(fm.Matching(u))
    with pytest.raises(
        fm.InfeasibleError, match=r"Matching over u \(4 of its 9 variables masked\) can't hold"
    ) as caught:
        fg.solve(on_failure="raise")
    assert caught.value.solution.conflict(1) == ["Matching over u"]


def test_a_conflict_is_as_small_as_the_proof_allows():
    """Every set that is named is infeasible by itself."""
    rng = np.random.default_rng(0)
    infeasible = 0
    for trial in range(60):
        fg = fm.FactorGraph()
        scores = 3 * rng.normal(size=(4, 5))
        u = fg.variable_from(scores)
        most, least = rng.integers(20, size=2)
        parts = [
            lambda u: fm.Xor(u, axis=1),
            lambda u: fm.AtMostOne(u, axis=0),
            lambda u: fm.Or(u, axis=0),
            lambda u: fm.OrOut(u, axis=1),
            lambda u: fm.Imply(~u[:, :2], axis=1),
            lambda u, b=most: fm.Budget(u, b),
            lambda u, b=least: fm.AtLeast(u, b),
        ]
        chosen = [parts[i] for i in rng.permutation(len(parts))[:4]]
        for make in chosen:
            fg.add(make(u))
        solution = fg.solve(on_failure="ignore", method=["auto", "admm"][trial % 2])
        if solution.status is not fm.Status.INFEASIBLE:
            continue
        infeasible += 1
        again = fm.FactorGraph()
        v = again.variable_from(scores)
        for name in solution.conflict():
            one = chosen[fg._factors.index(name.factor)](v)
            if name.row:
                negated = 0 if one._negated is None else one._negated[name.row[0]][None]
                one._scope = (ListedPart(2 * one._index[name.row[0]][None] + negated),)
                one._count = 1
            again.add(one)
        again._record.made.clear()  # whole factors, of which only a row was added
        assert again.solve(on_failure="ignore").status is fm.Status.INFEASIBLE
    assert infeasible > 20


@pytest.mark.parametrize("query", ["auto", "map", "decode"])
def test_clues_that_contradict_each_other(query):
    """A Sudoku with two fives in its first row: three of the 202 factors of a proof suffice."""
    rows = """55..7.... 6..195... .98....6. 8...6...3 4..8.3..1
              7...2...6 .6....28. ...419..5 ....8..79"""
    given = np.array([[int(c) for c in row.replace(".", "0")] for row in rows.split()])
    mask = (given[:, :, None] == 0) | (given[:, :, None] == np.arange(1, 10))
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros((9, 9, 9)), mask=mask)
    fg.add(fm.Xor(u, axis=2))
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.Xor(u, axis=0))
    fg.add(fm.Xor(u.reshape(3, 3, 3, 3, 9), axis=(1, 3)))
    names = QUERIES[query](fg, on_failure="ignore").conflict()
    assert names == ["Xor over u[0, 0, :]", "Xor over u[0, 1, :]", "Xor over u[0, :, 4]"]


def test_rows_that_exclude_each_other_in_turn():
    fg = fm.FactorGraph()
    u = fg.variable_from(random(12))
    fg.add(fm.Or(u[:1]))
    chain = fg.add(fm.Imply(u[:-1], u[1:]))
    last = fg.add(fm.Budget(u[7:9], 1))
    names = fg.solve(on_failure="ignore").conflict()
    assert names[0] == "Or over u[:1]" and names[-1].factor is last
    assert [n.row for n in names[1:-1]] == [(i,) for i in range(8)]
    assert all(n.factor is chain for n in names[1:-1])


def test_masked_squares_that_have_no_solution():
    infeasible = 0
    for trial in range(60):
        rng = np.random.default_rng(trial)
        mask = rng.random((4, 4, 4)) < 0.35
        scores = rng.normal(size=(4, 4, 4))
        fg = fm.FactorGraph()
        u = fg.variable_from(scores, mask=mask)
        for axis in range(3):
            fg.add(fm.Xor(u, axis=axis))
        fg.add(fm.Linear(u, rng.normal(size=(4, 4, 4)), upper=5.0))
        solution = fg.solve(on_failure="ignore")
        if solution.status is not fm.Status.INFEASIBLE:
            continue
        infeasible += 1
        again = fm.FactorGraph()
        v = again.variable_from(scores, mask=mask).flatten()
        for name in solution.conflict():
            factor = name.factor
            k = int(np.ravel_multi_index(name.row, factor._group_shape)) if name.row else 0
            part = v[factor._index[k]]
            if factor.kind == "Xor":
                again.add(fm.Xor(part))
            else:
                again.add(fm.Linear(part, factor._params[0].value.reshape(-1), upper=5.0))
        assert again.solve(on_failure="ignore").status is fm.Status.INFEASIBLE
    assert infeasible > 20


def test_names_are_pickled():
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(random(2, 2, 3))
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.Budget(u[1], np.array([1, 0])))
    solution = fg.solve(on_failure="ignore")
    for again in (copy.deepcopy(solution), pickle.loads(pickle.dumps(solution))):
        assert again.conflict(0) == []
        assert again.conflict(1) == ["Xor over u[1, :]", "Budget over u[1]"]
        assert again.conflict(1)[0].row == (1,) and again.conflict(1)[0].factor is None


def test_many_names_are_cut_short():
    fg = fm.FactorGraph()
    u = fg.variable_from(random(30, 2))
    fg.add(fm.Or(u, axis=1))
    fg.add(fm.Budget(u, 29))
    solution = fg.solve(on_failure="ignore")
    assert len(solution.conflict()) == 31
    with pytest.warns(fm.NotConvergedWarning, match=r"Or over u\[7, :\]; and 23 more\."):
        fg.solve()


@pytest.mark.parametrize(
    "make, names",
    [
        (lambda u, v: fm.Xor(u, axis=(0, 2)), "u[:, 0, :] | u[:, 1, :] | u[:, 2, :]"),
        (lambda u, v: fm.Xor(u[0], axis=0), "u[0, :, 0] | u[0, :, 1]"),
        (lambda u, v: fm.Xor(~u[:, 1:, 0], axis=1), "~u[0, 1:3, 0] | ~u[1, 1:3, 0]"),
        (lambda u, v: fm.Xor([u[:, 0, 0], ~v], axis=0), "u[:, 0, 0], ~v"),
        (
            lambda u, v: fm.Xor(u[:, ::2, 1], axis=1),
            "u[0, 0, 1], u[0, 2, 1] | u[1, 0, 1], u[1, 2, 1]",
        ),
        (
            lambda u, v: fm.Xor(u[::-1, 0], axis=0),
            "u[1, 0, 0], u[0, 0, 0] | u[1, 0, 1], u[0, 0, 1]",
        ),
        (lambda u, v: fm.Pair(u[0, 0], v, 1.0), "u[0, 0, 0], v[0] | u[0, 0, 1], v[1]"),
    ],
)
def test_names_of_rows(make, names):
    fg = fm.FactorGraph()
    u, v = fg.variable((2, 3, 2)), fg.variable(2, name="v")
    factor = make(u, v)
    signs = [None] * factor._count if factor._negated is None else factor._negated
    found = [literals_name(fg._record, i, s) for i, s in zip(factor._index, signs, strict=True)]
    assert " | ".join(found) == names


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_target_that_breaks_a_row(library):
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(array(library, random(2, 3, 3)))
    fg.add(fm.Budget(u, 9))
    fg.add(fm.Xor(u, axis=1))
    target = np.stack([np.eye(3), np.eye(3)])
    target[1, 2] = 1, 1, 0
    with pytest.raises(
        fm.GraphError, match=r"target of instance \(1,\) breaks Xor over u\[2, :\]\."
    ):
        fg.loss({u: target})
    with pytest.raises(
        fm.GraphError, match=r"known entries .* of instance \(1,\) .* It breaks Xor over u\[2, :\]"
    ):
        fg.loss({u: target}, mask=np.array([True, True, False]))


@pytest.mark.parametrize("library", LIBRARIES)
def test_losses_of_infeasible_instances(library):
    fg = fm.FactorGraph()
    u = fg.variable_from(array(library, random(3)))
    fg.add(fm.Xor(u))
    fg.add(fm.Budget(u, 0))
    with pytest.raises(fm.GraphError, match="breaks Budget over u"):
        fg.loss({u: [1, 0, 0]})
