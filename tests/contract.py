"""What every factor must do. A factor's test file inherits it, and adds its own facts."""

from itertools import product

import numpy as np
import oracle
import pytest
from graphs import (
    AWAY_FROM_KINKS,
    assert_gradient,
    assert_solves,
    build,
    exact_or_none,
    solved,
)
from meaning import RELAXED
from oracle import Problem
from problems import random_term

import factormax as fm

SCALES = [0.1, 1.0, 10.0, 100.0, 1e4]
ALONE = 1e-9  # one factor alone is solved at once, not by iteration


class FactorContract:
    kind: str
    sizes = range(1, 8)

    def problem(self, d, rng, scale=1.0, negate=False) -> Problem:
        term = random_term(self.kind, range(d), rng, negate, scale)
        return Problem(scale * rng.normal(size=d), (term,))

    def problems(self, seed=0, sizes=None, repeat=3, **options):
        rng = np.random.default_rng(seed)
        for d in sizes or self.sizes:
            for _ in range(repeat):
                yield self.problem(d, rng, **options)

    def make(self, u, **params):
        """The factor over u, by the public constructor."""
        return getattr(fm, self.kind)(u, **params)

    @pytest.mark.parametrize("negate", [False, True])
    @pytest.mark.parametrize("scale", SCALES)
    def test_alone_it_is_exact(self, scale, negate):
        compared = [
            assert_solves(problem, atol=ALONE)
            for problem in self.problems(scale=scale, negate=negate)
        ]
        assert np.mean(compared) > 0.5

    @pytest.mark.parametrize("negate", [False, True])
    def test_ties(self, negate):
        rng = np.random.default_rng(1)
        for problem in self.problems(negate=negate):
            for values in ([0.0], [1.0], [-2.0, 3.0], [0.0, 0.5, 1.0]):
                tied = problem.with_eta(rng.choice(values, len(problem.eta)))
                built, _ = solved(tied)
                np.testing.assert_allclose(built.u.value, oracle.solve(tied).mu, atol=ALONE)

    @pytest.mark.parametrize("negate", [False, True])
    def test_huge_and_tiny_scores(self, negate):
        rng = np.random.default_rng(2)
        for problem in self.problems(negate=negate):
            for values in ([1e9, -1e9], [1e9, -1e9, 0.3, 0.0], [1e-12, -1e-300, 0.5]):
                extreme = problem.with_eta(rng.choice(values, len(problem.eta)))
                built, _ = solved(extreme)
                exact = oracle.solve(extreme).mu
                np.testing.assert_allclose(built.u.value, exact, atol=1e-6)  # 1e9 resolves 1e-7

    @pytest.mark.parametrize("method", ["auto", "admm"])
    @pytest.mark.parametrize("negate", [False, True])
    def test_masked_variables_are_off(self, negate, method):
        """A ragged batch is padding plus a mask; −inf says the same."""
        rng = np.random.default_rng(3)
        for problem in self.problems(negate=negate, repeat=1):
            d = len(problem.eta)
            masks = rng.random((6, d)) < 0.6
            masks[0], masks[1] = True, False
            masks[2, -1] = False
            eta = rng.normal(size=(6, d))
            options = {"on_failure": "ignore", "method": method}
            if method == "admm":
                options |= {"tol": 1e-9, "max_iter": 100_000}
            built = build(problem, eta, masks, batch_dims=1)
            solution = built.fg.solve(**options)
            grad = rng.normal(size=eta.shape)
            grad_eta = solution.vjp({built.u: grad})[built.u]
            for row, mask in enumerate(masks):
                exact = exact_or_none(problem.with_eta(eta[row]).masked(mask))
                if exact is None:
                    assert solution.status[row] is fm.Status.INFEASIBLE
                    assert np.isnan(built.u.value[row][mask]).all()
                    assert not grad_eta[row].any()
                    continue
                assert solution.status[row] is fm.Status.CONVERGED
                np.testing.assert_allclose(built.u.value[row], exact.mu, atol=1e-6)
                assert not built.u.value[row][~mask].any()
                assert not grad_eta[row][~mask].any()
                if exact.kink_distance > AWAY_FROM_KINKS:
                    np.testing.assert_allclose(grad_eta[row], exact.vjp(grad[row])[0], atol=1e-6)
            if method == "auto":
                absent = build(problem, np.where(masks, eta, -np.inf), batch_dims=1)
                absent.fg.solve(**options)
                np.testing.assert_array_equal(absent.u.value, built.u.value)

    def test_gradient_is_zero_at_integral_solutions(self):
        found = 0
        for problem in self.problems(scale=100.0, repeat=6):
            exact = oracle.solve(problem)
            if np.isin(exact.mu, (0, 1)).all() and exact.kink_distance > AWAY_FROM_KINKS:
                built, solution = solved(problem)
                grad = np.arange(1.0, 1 + len(exact.mu))
                assert not solution.vjp({built.u: grad})[built.u].any()
                found += 1
        assert found

    def test_large_scores_give_the_best_assignment(self):
        if self.kind in RELAXED:
            pytest.skip("the relaxation has fractional vertices, by definition")
        for problem in self.problems(scale=1e6, negate=True):
            (term,) = problem.terms
            structures = [y for y in product((0, 1), repeat=len(problem.eta)) if term.holds(y)]
            value = [problem.eta @ y + term.scores * all(term.literals(y)) for y in structures]
            built, _ = solved(problem)
            np.testing.assert_allclose(built.u.value, structures[np.argmax(value)], atol=1e-9)

    @pytest.mark.parametrize("negate", [False, True])
    def test_admm_agrees(self, negate):
        rng = np.random.default_rng(5)
        for problem in self.problems(negate=negate, repeat=1):
            exact = oracle.solve(problem)
            built, solution = solved(problem, method="admm", tol=1e-9, max_iter=100_000)
            np.testing.assert_allclose(built.u.value, exact.mu, atol=1e-7)
            if exact.kink_distance > AWAY_FROM_KINKS:
                assert_gradient(built, solution, exact, rng)

    def test_a_batch_is_a_loop(self):
        rng = np.random.default_rng(6)
        for problem in self.problems(negate=True, repeat=1):
            eta, grad = rng.normal(size=(2, 2, 3, len(problem.eta)))
            batch = build(problem, eta, batch_dims=2)
            solution = batch.fg.solve()
            out = solution.vjp({batch.u: grad})[batch.u]
            assert solution.objective.shape == solution.status.shape == (2, 3)
            for index in np.ndindex(2, 3):
                single, alone = solved(problem.with_eta(eta[index]))
                np.testing.assert_array_equal(batch.u.value[index], single.u.value)
                np.testing.assert_array_equal(
                    out[index], alone.vjp({single.u: grad[index]})[single.u]
                )
                assert solution.objective[index] == alone.objective

    def test_float32(self):
        for problem in self.problems(negate=True):
            built = build(problem, problem.eta.astype(np.float32))
            built.fg.solve()
            assert built.u.value.dtype == np.float32
            np.testing.assert_allclose(built.u.value, oracle.solve(problem).mu, atol=1e-5)


class AxisContract(FactorContract):
    """For the factors over one variable tensor: every one but Pair."""

    each = "costs"  # the parameter with a number for each variable, if there is one

    @pytest.mark.parametrize("axis", [0, 1, -1, -3])
    def test_axis_is_one_factor_for_each_of_the_rest(self, axis):
        rng = np.random.default_rng(7)
        scores = rng.normal(size=(3, 4, 2))
        params = random_term(self.kind, range(scores.shape[axis]), rng).params
        group_params = dict(params)
        if self.each in params:  # they broadcast against the variables
            others = [k for k in range(3) if k != axis % 3]
            group_params[self.each] = np.expand_dims(params[self.each], others)
        at_once = fm.FactorGraph()
        u = at_once.variable_from(scores)
        at_once.add(self.make(u, axis=axis, **group_params))
        at_once.solve()
        one_by_one = fm.FactorGraph()
        v = one_by_one.variable_from(scores)
        for rest in np.ndindex(*np.delete(scores.shape, axis)):
            where = [*rest]
            where.insert(axis % 3, slice(None))
            one_by_one.add(self.make(v[tuple(where)], **params))
        one_by_one.solve()
        np.testing.assert_allclose(u.value, v.value, rtol=0, atol=1e-12)

    def test_tensor_slice_and_list_are_one_factor(self):
        """A tensor is flattened in C order; a list is concatenated."""
        rng = np.random.default_rng(8)
        scores = rng.normal(size=(2, 3))
        params = random_term(self.kind, range(6), rng).params
        values = []
        for pick in (lambda u: u, lambda u: u[:, :], lambda u: [u[0], u[1, 0], u[1, 1:]]):
            fg = fm.FactorGraph()
            u = fg.variable_from(scores)
            variables = pick(u)
            if self.each in params:  # they have the shape of the variables; of a list, flat
                shape = (6,) if isinstance(variables, list) else (2, 3)
                params[self.each] = params[self.each].reshape(shape)
            fg.add(self.make(variables, **params))
            fg.solve()
            values.append(u.value)
        np.testing.assert_array_equal(values[0], values[1])
        np.testing.assert_array_equal(values[0], values[2])

    def test_a_variable_given_twice_is_an_error(self):
        rng = np.random.default_rng(9)
        params = random_term(self.kind, range(3), rng).params
        for pick in (lambda u: u[[0, 1, 0]], lambda u: [u[:2], u[0]], lambda u: [u[:2], ~u[0]]):
            fg = fm.FactorGraph()
            u = fg.variable_from(np.zeros(3))
            with pytest.raises(fm.GraphError, match=self.kind):
                fg.add(self.make(pick(u), **params))

    def test_no_variables_is_an_error(self):
        fg = fm.FactorGraph()
        u = fg.variable_from(np.zeros(3))
        params = random_term(self.kind, range(3), np.random.default_rng(9)).params
        if self.each in params:
            params[self.each] = np.zeros(0)
        with pytest.raises(fm.GraphError, match=self.kind):
            fg.add(self.make(u[:0], **params))


class CountContract(AxisContract):
    """For the factors with a `parameter` that may be shared or given for each instance."""

    parameter: str
    bad = (-1, 1.5, np.nan)  # negative, fractional
    message = r"{kind} over u\[1:\].*{parameter}"

    def others(self, d) -> dict:
        """Further parameters that the factor needs."""
        return {}

    def test_per_instance(self):
        rng = np.random.default_rng(10)
        d, counts = 5, np.array([0, 1, 2, 5])
        eta = rng.normal(size=(4, d))
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta)
        fg.add(self.make(u, **{self.parameter: counts}, **self.others(d)))
        fg.solve()
        for row, count in enumerate(counts):
            params = {self.parameter: count, **self.others(d)}
            problem = Problem(eta[row], (oracle.Term(self.kind, range(d), params=params),))
            np.testing.assert_allclose(u.value[row], oracle.solve(problem).mu, atol=ALONE)

    @pytest.mark.parametrize("per_instance", [False, True])
    def test_per_group_of_an_axis(self, per_instance):
        rng = np.random.default_rng(11)
        eta = rng.normal(size=(2, 3, 4)) + 1
        counts = rng.integers(0, 5, (2, 3)) if per_instance else np.array([0, 2, 4])
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta)
        fg.add(self.make(u, axis=1, **{self.parameter: counts}, **self.others(4)))
        fg.solve()
        for (b, g), count in np.ndenumerate(np.broadcast_to(counts, (2, 3))):
            params = {self.parameter: count, **self.others(4)}
            problem = Problem(eta[b, g], (oracle.Term(self.kind, range(4), params=params),))
            np.testing.assert_allclose(u.value[b, g], oracle.solve(problem).mu, atol=ALONE)

    @pytest.mark.parametrize("per_instance", [False, True])
    def test_bad_parameter(self, per_instance):
        message = self.message.format(kind=self.kind, parameter=self.parameter)
        for value in self.bad:
            fg = fm.FactorGraph(batch_dims=1)
            u = fg.variable_from(np.zeros((2, 4)))
            bad = np.array([1, value]) if per_instance else value
            with pytest.raises(fm.GraphError, match=message) as error:
                fg.add(self.make(u[1:], **{self.parameter: bad}, **self.others(3)))
            assert isinstance(error.value, ValueError)

    def test_wrong_shape_of_the_parameter(self):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(np.zeros((2, 4)))
        with pytest.raises(fm.ShapeError, match=self.kind):
            fg.add(self.make(u, **{self.parameter: np.ones(3, int)}, **self.others(4)))


def values_of(scores, *factors):
    """Solve with the factors made by the given functions of u; the marginals."""
    fg = fm.FactorGraph()
    u = fg.variable_from(np.asarray(scores, float))
    for factor in factors:
        fg.add(factor(u))
    fg.solve()
    return u.value
