import numpy as np
import oracle
import pytest
from contract import ALONE, CountContract, values_of
from graphs import AWAY_FROM_KINKS, assert_solves, build, exact_or_none
from oracle import Problem, Term
from problems import ALL, random_problem, random_term

import factormax as fm
from factormax import _engines, reference
from factormax._fronts.numpy import start
from factormax._options import Options
from factormax.testing import dense_problem


class TestLinear(CountContract):
    kind = "Linear"
    each = "coefs"
    parameter = "upper"
    bad = (np.nan, -np.inf)

    def others(self, d):
        return {"coefs": np.linspace(-0.5, 1.5, d) + 0.1}

    def test_one_bound_is_a_knapsack(self):
        for scores in np.random.default_rng(0).normal(size=(10, 4)) + 1:
            costs = [1.0, 2.0, 0.0, 0.5]
            value = values_of(scores, lambda u, c=costs: fm.Linear(u, c, upper=1.5))
            expected = values_of(scores, lambda u, c=costs: fm.Knapsack(u, c, 1.5))
            np.testing.assert_allclose(value, expected, atol=ALONE)

    def test_unit_coefficients_are_counts(self):
        for scores in np.random.default_rng(1).normal(size=(10, 5)):
            for bounds, other in [
                ({"lower": 2}, lambda u: fm.AtLeast(u, 2)),
                ({"upper": 2}, lambda u: fm.Budget(u, 2)),
                ({"lower": 2, "upper": 2}, lambda u: fm.Exactly(u, 2)),
            ]:
                value = values_of(scores, lambda u, b=bounds: fm.Linear(u, np.ones(5), **b))
                np.testing.assert_allclose(value, values_of(scores, other), atol=ALONE)

    @pytest.mark.parametrize("method", ["auto", "admm"])
    def test_two_bounds_are_two_factors(self, method):
        rng = np.random.default_rng(2)
        for width in (1.0, 0.1, 1e-3, 1e-12):
            scores, coefs = rng.normal(size=(2, 6))
            low = coefs @ rng.uniform(0.2, 0.8, 6)
            values = []
            for factors in (
                lambda u, a=coefs, b=low, c=low + width: [fm.Linear(u, a, b, c)],
                lambda u, a=coefs, b=low, c=low + width: [
                    fm.Linear(u, a, lower=b),
                    fm.Linear(u, a, upper=c),
                ],
            ):
                fg = fm.FactorGraph()
                u = fg.variable_from(scores)
                for factor in factors(u):
                    fg.add(factor)
                assert fg.solve(method=method, tol=1e-9, max_iter=100_000).converged
                values.append(u.value)
            np.testing.assert_allclose(values[0], values[1], rtol=0, atol=1e-7)

    def test_bounds_per_instance(self):
        """Also where one instance has a bound, another an equation, and a third neither."""
        rng = np.random.default_rng(3)
        eta, coefs = rng.normal(size=(2, 5, 4))
        lower = np.array([-np.inf, -0.2, 0.1, -np.inf, -0.1])
        upper = np.array([0.1, np.inf, 0.1, np.inf, 0.2])
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta)
        coefs[2] = np.abs(coefs[2])
        fg.add(fm.Linear(u, coefs, lower, upper))
        solution = fg.solve()
        grad = rng.normal(size=eta.shape)
        out = solution.vjp({u: grad})[u]
        for row in range(5):
            params = {"coefs": coefs[row], "lower": lower[row], "upper": upper[row]}
            exact = oracle.solve(Problem(eta[row], (Term("Linear", range(4), params=params),)))
            np.testing.assert_allclose(u.value[row], exact.mu, atol=ALONE)
            if exact.kink_distance > AWAY_FROM_KINKS:
                np.testing.assert_allclose(out[row], exact.vjp(grad[row])[0], atol=1e-9)

    def test_coefficients_over_many_magnitudes(self):
        rng = np.random.default_rng(4)
        for _ in range(10):
            coefs = rng.choice([-1, 1], 6) * 10.0 ** rng.integers(-3, 4, 6)
            middle = coefs @ rng.uniform(0.2, 0.8, 6)
            params = {"coefs": coefs, "lower": middle, "upper": middle + 1e-3}
            problem = Problem(rng.normal(size=6) + 1, (Term("Linear", range(6), params=params),))
            value = values_of(problem.eta, lambda u, p=params: fm.Linear(u, **p))
            np.testing.assert_allclose(value, oracle.solve(problem).mu, atol=1e-8)

    @pytest.mark.parametrize(
        "arguments, error, message",
        [
            ({"coefs": [1, 1, 1]}, fm.GraphError, "give lower, upper, or both"),
            ({"coefs": [1, np.nan, 1], "upper": 1}, fm.GraphError, "coefs must be finite, got nan"),
            ({"coefs": [1, 1], "upper": 1}, fm.ShapeError, r"coefs must have shape \(3,\)"),
            ({"coefs": [1, 1, 1], "lower": np.inf}, fm.GraphError, "lower must be a number, or -"),
            ({"coefs": [1, 1, 1], "upper": np.nan}, fm.GraphError, "upper must be a number, or i"),
            (
                {"coefs": [1, 1, 1], "lower": 2, "upper": 1},
                fm.InfeasibleError,
                r"lower is 2\.0, above upper, which is 1\.0",
            ),
            (
                {"coefs": [1, -1, 1], "lower": 2.5},
                fm.InfeasibleError,
                r"lower is 2\.5, but the sum is at most 2\.0",
            ),
            (
                {"coefs": [1, -1, 1], "upper": -1.5},
                fm.InfeasibleError,
                r"upper is -1\.5, but the sum is at least -1\.0",
            ),
        ],
    )
    def test_what_makes_no_sense(self, arguments, error, message):
        with pytest.raises(error, match=f"Linear over u: {message}"):
            fm.Linear(fm.FactorGraph().variable(3), **arguments)

    def test_sums_that_just_reach_a_bound(self):
        """0.7 + 0.1 + 0.2 is less than 1 in floating point."""
        value = values_of(np.zeros(3), lambda u: fm.Linear(u, [0.7, 0.1, 0.2], lower=1.0))
        np.testing.assert_allclose(value, 1, atol=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_among_other_factors(seed):
    """Against the exact solution; the twin and ADMM agree."""
    rng = np.random.default_rng([1, seed])
    problem = random_problem(rng, n=8, factors=6, kinds=ALL)
    term = random_term("Linear", rng.choice(8, 4, replace=False), rng, negate=True)
    problem = Problem(problem.eta, (*problem.terms, term))
    if exact_or_none(problem) is None:
        pytest.skip("infeasible")
    assert_solves(problem)
    built = build(problem)
    inputs = start(built.fg).inputs
    raw = _engines.solve(inputs, Options(tol=1e-11))
    dense = dense_problem(inputs, 0)
    mu, _ = reference.solve(dense)
    np.testing.assert_allclose(raw.mu[0], mu, rtol=0, atol=1e-8)
    np.testing.assert_allclose(reference.admm(dense).mu, mu, rtol=0, atol=1e-6)
    built.fg.solve(method="admm", tol=1e-9, max_iter=100_000)
    np.testing.assert_allclose(built.u.value, mu, rtol=0, atol=1e-6)


def test_best_structures():
    """`solve_map`, `decode` and `loss` see a band as two rows, and none that is not there."""
    rng = np.random.default_rng(5)
    for _ in range(5):
        eta, coefs = rng.normal(size=8), rng.integers(-3, 4, 8).astype(float)
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        fg.add(fm.Linear(u, coefs, -0.5, 1.5))
        assert fg.decode().optimal
        every = np.array(list(np.ndindex(*[2] * 8)))
        allowed = every[(every @ coefs >= -0.5) & (every @ coefs <= 1.5)]
        best = allowed[np.argmax(allowed @ eta)]
        np.testing.assert_array_equal(u.value, best)
        assert (
            fg.loss({u: best}, "perceptron") <= max(0, fg.solve_map().objective - eta @ best) + 1e-9
        )
        with pytest.raises(fm.GraphError, match="Linear over u"):
            fg.loss({u: every[np.argmax(np.abs(every @ coefs))]})


def test_numbers_follow_their_variables_along_an_axis():
    """Also of a slice, and of a tensor that is not the graph's first."""
    rng = np.random.default_rng(6)
    scores, coefs = rng.normal(size=(2, 3, 4))
    for make in (
        lambda u, c, **axis: fm.Linear(u, c, upper=0.2, **axis),
        lambda u, c, **axis: fm.Knapsack(u, np.abs(c), 0.7, **axis),
    ):
        fg = fm.FactorGraph()
        fg.variable(5)
        u = fg.variable_from(scores)
        fg.add(make(u[1:], coefs[1:], axis=0))
        fg.add(make(u, coefs, axis=1))
        fg.solve(tol=1e-9)
        one = fm.FactorGraph()
        v = one.variable_from(scores)
        for j in range(4):
            one.add(make(v[1:, j], coefs[1:, j]))
        for i in range(3):
            one.add(make(v[i], coefs[i]))
        one.solve(tol=1e-9)
        np.testing.assert_allclose(u.value, v.value, rtol=0, atol=1e-7)


def test_torch_and_compile():
    torch = pytest.importorskip("torch")

    def model(scores, coefs, lower):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.Linear(u, coefs, lower, 0.3, axis=1))
        fg.add(fm.Xor(u, axis=0))
        fg.solve(tol=1e-12)  # differences of a millionth need that many digits
        return u.value

    scores = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    coefs, lower = torch.randn(3, 4, dtype=torch.float64), torch.full((2, 3), -0.4)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for run in (model, compiled):
        value = run(scores, coefs, lower)
        (value**2).sum().backward()
        found.append((value.detach(), scores.grad.clone()))
        scores.grad = None
    torch.testing.assert_close(found[0], found[1])
    torch.autograd.gradcheck(lambda s: model(s, coefs, lower), (scores,))
    with pytest.raises(fm.GraphError, match="coefs takes no gradient"):
        model(scores, coefs.clone().requires_grad_(), lower)


@pytest.mark.parametrize(
    ("coefs", "bound"), [([-0.75, -0.5], -1.25), ([-0.15, 0.07], -0.08), ([0.1, 0.2], 0.3)]
)
def test_negated_literals_that_meet_the_bound_exactly(coefs, bound):
    """What rounding leaves of the right-hand side must not exclude the structure."""
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros(2))
    fg.add(fm.Linear(~u, coefs, lower=bound, upper=bound))
    assert fg.decode().optimal
    np.testing.assert_array_equal(u.value, 0)
    fg = fm.FactorGraph()
    v = fg.variable_from(np.zeros(3), mask=np.array([False, False, True]))
    fg.add(fm.Linear([~v[:2], v[2]], [*coefs, 0.0], upper=bound))
    assert fg.solve().converged


def test_coefficients_in_float32_may_miss_their_own_sum():
    coefs = np.array([0.1, 0.2, 0.7], np.float32)
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([1.0, 1.0, -1.0], np.float32))
    fg.add(fm.Linear(u, coefs, lower=0.3, upper=0.3))
    assert fg.decode().optimal
    np.testing.assert_array_equal(u.value, [1, 1, 0])
