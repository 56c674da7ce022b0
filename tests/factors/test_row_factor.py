"""Factors of one's own with several rows and no kernel: each row is a block by itself."""

from typing import ClassVar

import numpy as np
import pytest

import factormax as fm
from factormax._core import BlockKind
from factormax.factors.base import Row, RowFactor
from factormax.factors.params import take_literal_param, take_param
from factormax.testing import check_factor


class Between(RowFactor):
    """The number of variables that are on is between two numbers."""

    _param_shapes: ClassVar = {"lower": "factor", "upper": "factor"}
    _fixed_rows = 2

    def __init__(self, variables, lower, upper, axis=None):
        self._take(variables, axis)
        self._set_params(
            take_param(self, "lower", lower, self._group_shape),
            take_param(self, "upper", upper, self._group_shape),
        )

    @classmethod
    def rows(cls, d):
        return [Row([-1.0] * d, -1.0, bound_param=0), Row([1.0] * d, 1.0, bound_param=1)]


class Weighted(RowFactor):
    """`Linear`, without its kernel."""

    _param_shapes = fm.Linear._param_shapes

    def __init__(self, variables, coefs, lower, upper, axis=None):
        self._take(variables, axis)
        self._set_params(
            take_literal_param(self, "coefs", coefs, axis),
            take_param(self, "lower", lower, self._group_shape),
            take_param(self, "upper", upper, self._group_shape),
        )

    @classmethod
    def rows(cls, d):
        return fm.Linear.rows(d)


class Equal(RowFactor):
    """All have the same value: d - 1 equations of two literals each."""

    @classmethod
    def rows(cls, d):
        return [Row([1.0, -1.0], 0.0, equality=True, literals=[i, i + 1]) for i in range(d - 1)]


def test_no_rows():
    fg = fm.FactorGraph()
    fg.add(Equal(fg.variable_from(np.zeros(1))))
    with pytest.raises(fm.GraphError, match=r"Equal: rows\(1\) returned no rows.* \[Row\(\[\], 0"):
        fg.solve()


@pytest.mark.parametrize("method", ["auto", "admm"])
def test_a_row_that_always_holds(method):
    class Nothing(RowFactor):
        @classmethod
        def rows(cls, d):
            return [Row([], 0.0)]

    check_factor(Nothing(fm.FactorGraph().variable(1)), allowed=lambda on: True)
    scores = np.array([0.3, 2.0, -1.0])
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    fg.add(Nothing(u))
    fg.add(fm.Budget(u, 2))
    fg.solve(method=method)
    np.testing.assert_allclose(u.value, np.clip(scores, 0, 1), atol=1e-6)


def as_linear(u, lower, upper, axis=None):
    return fm.Linear(u, np.ones(u.shape), lower, upper, axis=axis)


@pytest.mark.parametrize("bounds", [(1, 3), (0, 2), (2, 2), (0, 5)])
def test_contract(bounds):
    u = fm.FactorGraph().variable(5)
    check_factor(
        Between(u, *bounds), allowed=lambda on: bounds[0] <= on.sum() <= bounds[1], masks=True
    )


def test_contract_of_several_factors():
    u = fm.FactorGraph().variable((3, 4))
    check_factor(Between(~u, [0, 1, 3], [1, 3, 3], axis=1))
    coefs = np.random.default_rng(0).normal(size=(3, 4))
    check_factor(Weighted(u, coefs, -0.3, [0.4, 0.1, -0.3], axis=1))
    check_factor(Equal([u[0, :3], ~u[1, 0]]), allowed=lambda on: on.all() or not on.any())
    check_factor(Equal(u, axis=0))


@pytest.mark.parametrize("method", ["auto", "admm"])
def test_as_linear_among_other_factors(method):
    """Values and gradients, with numbers of each instance and masks."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        scores, mask = rng.normal(size=(3, 4, 5)), rng.random((3, 4, 5)) < 0.9
        lower, upper = rng.integers(0, 2, (3, 4)), rng.integers(2, 4, (3, 4))
        coefs = rng.normal(size=(4, 5))
        weights = rng.normal(size=scores.shape)
        found = []
        for between, weighted in [(Between, Weighted), (as_linear, fm.Linear)]:
            fg = fm.FactorGraph(batch_dims=1)
            u = fg.variable_from(scores, mask=mask)
            fg.add(between(u, lower, upper, axis=1))
            fg.add(weighted(~u, coefs, coefs.clip(max=0).sum(0), coefs.clip(min=0).sum(0) / 2, 0))
            fg.add(fm.AtMostOne(u[0]))
            solution = fg.solve(method=method, tol=1e-10, max_iter=200_000)
            assert np.all(solution.converged)
            found.append((u.value, solution.vjp({u: weights})[u]))
        np.testing.assert_allclose(found[0][0], found[1][0], rtol=0, atol=1e-7)
        np.testing.assert_allclose(found[0][1], found[1][1], rtol=0, atol=1e-6)


def test_best_structures():
    """`decode`, `solve_map` and `loss` see all of its rows."""
    rng = np.random.default_rng(2)
    every = np.array(list(np.ndindex(*[2] * 6)))
    allowed = every[(every.sum(1) >= 2) & (every.sum(1) <= 3)]
    for shift in (-2, 0, 2):
        eta = rng.normal(size=6) + shift
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        fg.add(Between(u, 2, 3))
        best = allowed[np.argmax(allowed @ eta)]
        assert fg.decode().optimal
        np.testing.assert_array_equal(u.value, best)
        fg.solve_map()
        np.testing.assert_allclose(u.value, best, atol=1e-9)
        assert fg.loss({u: best}, "perceptron") <= 1e-9
        for bad in (np.zeros(6), np.ones(6)):
            with pytest.raises(fm.GraphError, match="Between over u"):
                fg.loss({u: bad})


@pytest.mark.parametrize("other", [lambda u: fm.AtLeast(u, 3), lambda u: fm.AtLeast(~u, 4)])
@pytest.mark.parametrize("method", ["auto", "admm"])
def test_conflict(method, other):
    """Either of its rows may be what excludes another factor; the factor is named once."""
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros((2, 4)))
    fg.add(Between(u, [0, 1], [4, 2], axis=1))
    fg.add(fm.Xor(u[0]))
    fg.add(other(u[1]))
    solution = fg.solve(method=method, on_failure="ignore")
    assert solution.status is fm.Status.INFEASIBLE
    names = sorted(solution.conflict())
    assert len(names) == 2 and names[0].startswith("AtLeast over ")
    assert names[1] == "Between over u[1, :]" and names[1].row == (1,)


def test_numbers_that_exclude_each_other():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros(4))
    fg.add(Between(u, 3, 2))
    solution = fg.solve(on_failure="ignore")
    assert solution.conflict() == ["Between over u"]


def test_gradients_in_torch():
    torch = pytest.importorskip("torch")

    def values(scores):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(Between(u, 1, 2, axis=1))
        fg.add(fm.AtMostOne(u, axis=0))
        fg.solve(tol=1e-11)
        return u.value

    torch.manual_seed(0)
    scores = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(values, (scores,))


OTHER_BLOCK = "its rows are not those of its block kind"


@pytest.mark.parametrize(
    "kind, rows, message",
    [
        (BlockKind.row, [Row([1.0, 1.0], 1.0, literals=[0, 0])], "row 0: literal 0 is in it twice"),
        (BlockKind.row, [Row([1.0], 1.0, literals=[2])], "row 0: literal 2, but there are 2"),
        (BlockKind.row, [Row([1.0], 1.0, bound_param=0)], "bound_param=0, but it has 0 parameters"),
        (BlockKind.band, [Row([1.0, 1.0], 1.0)], OTHER_BLOCK),
        (BlockKind.band, [Row([-1.0, -2.0], 0.0), Row([1.0, 1.0], 1.0)], OTHER_BLOCK),
        (BlockKind.or_out, [Row([1.0, 1.0], 1.0), Row([1.0, 1.0], 2.0)], OTHER_BLOCK),
    ],
)
def test_rows_that_make_no_sense(kind, rows, message):
    """A kernel would answer as if they were other rows."""

    class Odd(RowFactor):
        _block_kind = kind

        @classmethod
        def rows(cls, d):
            return rows

    fg = fm.FactorGraph()
    fg.add(Odd(fg.variable_from(np.zeros(2))))
    with pytest.raises(fm.GraphError, match=f"Odd.*: {message}"):
        fg.solve()


def test_a_number_per_factor_is_no_coefficient():
    """The message says which parameter."""

    class Times(RowFactor):
        _param_shapes: ClassVar[dict[str, str]] = {"times": "factor"}

        def __init__(self, variables, times, axis=None):
            self._take(variables, axis)
            self._set_params(take_param(self, "times", times, self._group_shape))

        @classmethod
        def rows(cls, d):
            return [Row([1.0] * d, 1.0, coef_param=0)]

    fg = fm.FactorGraph()
    fg.add(Times(fg.variable_from(np.zeros(3)), 2.0))
    message = r"Times: row 0: coef_param=0 \(times\) has one number per factor, but must have one"
    with pytest.raises(fm.GraphError, match=message):
        fg.solve()


@pytest.mark.parametrize("ask", ["solve", "check_factor"])
def test_parameters_that_are_not_kept(ask):
    class Forgetful(RowFactor):
        _param_shapes: ClassVar[dict[str, str]] = {"most": "factor"}

        @classmethod
        def rows(cls, d):
            return [Row([1.0] * d, 1.0, bound_param=0)]

    fg = fm.FactorGraph()
    factor = Forgetful(fg.variable_from(np.zeros(3)))
    message = r"Forgetful over u: it has the parameters most, but keeps 0.*_set_params"
    with pytest.raises(fm.GraphError, match=message):
        if ask == "check_factor":
            check_factor(factor)
        fg.add(factor)
        fg.solve()
