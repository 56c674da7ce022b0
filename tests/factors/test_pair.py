import numpy as np
import oracle
import pytest
from contract import ALONE, FactorContract
from graphs import build
from oracle import Problem, Term

import factormax as fm


def pair_graph(scores, coupling, **options):
    fg = fm.FactorGraph(**options)
    u = fg.variable_from(scores)
    return fg, u, fg.add(fm.Pair(u[0], u[1], coupling))


class TestPair(FactorContract):
    kind = "Pair"
    sizes = (2,)

    def problems(self, repeat=3, **options):
        return super().problems(repeat=7 * repeat, **options)

    def test_agreement_and_repulsion(self):
        fg, u, pair = pair_graph(np.array([0.2, 0.4]), 0.3)
        fg.solve()
        np.testing.assert_allclose([*u.value, pair.value], 0.45, atol=ALONE)
        fg, u, pair = pair_graph(np.array([0.9, 0.8]), -5.0)
        fg.solve()
        np.testing.assert_allclose([*u.value, pair.value], [0.55, 0.45, 0], atol=ALONE)

    def test_a_score_of_zero_changes_nothing(self):
        fg, u, pair = pair_graph(np.array([0.9, 0.3]), 0.0)
        fg.solve()
        np.testing.assert_array_equal(u.value, [0.9, 0.3])
        assert pair.value == 0.3

    @pytest.mark.parametrize("row", [fm.Or, fm.AtMostOne])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_a_score_of_zero_between_equal_variables_that_a_row_ties(self, row, dtype):
        """As the one goes up the other goes down, so the pair can move neither."""
        at = -0.5 if row is fm.Or else 1.5
        scores = np.full(2, at, dtype)

        def graph(coupling):
            fg, u, pair = pair_graph(scores, dtype(coupling))
            fg.add(row(u))
            return fg.solve(), u, pair

        for step in (0.01, -0.01) if row is fm.AtMostOne else (0.01,):
            np.testing.assert_allclose(graph(step)[1].value, 0.5, atol=1e-6)
        solution, u, pair = graph(0.0)
        np.testing.assert_allclose(u.value, 0.5, rtol=2 * np.finfo(dtype).eps)
        rounding = 8 * np.finfo(dtype).eps
        for way in np.eye(2, dtype=dtype):
            grads = solution.vjp({u: way})
            np.testing.assert_allclose(grads[pair], 0, atol=rounding)
            np.testing.assert_allclose(np.abs(grads[u]), 0.5, atol=rounding)

    def test_value_has_the_shape_of_the_scores(self):
        """Given ones: the expected number of pairs that are on, summed where they broadcast."""
        rng = np.random.default_rng(0)
        eta = rng.normal(size=(4, 3, 2))
        for shape in [(3,), (1,), (), (4, 3), (4, 1)]:
            coupling = rng.normal(size=shape)
            fg = fm.FactorGraph(batch_dims=1)
            u = fg.variable_from(eta)
            pair = fg.add(fm.Pair(u[:, 0], u[:, 1], coupling))
            solution = fg.solve()
            full = np.broadcast_to(coupling, (4, 3))
            marginals = np.zeros((4, 3))
            for index in np.ndindex(4, 3):
                term = Term("Pair", (0, 1), scores=full[index])
                marginals[index] = oracle.solve(Problem(eta[index], (term,))).mu_pair[0]
            event = shape if len(shape) < 2 else shape[1:]
            expected = marginals if event == (3,) else marginals.sum(1, keepdims=bool(event))
            assert pair.value.shape == (4, *event)
            np.testing.assert_allclose(pair.value, expected, atol=ALONE)
            assert solution.vjp({u: eta})[pair].shape == shape

    def test_scores_per_instance(self):
        rng = np.random.default_rng(1)
        problem = Problem(np.zeros(4), tuple(Term("Pair", (i, i + 1), scores=1) for i in range(3)))
        eta, coupling = rng.normal(size=(5, 4)), rng.normal(size=(5, 3))
        built = build(problem, eta, batch_dims=1, pair_scores=coupling)
        solution = built.fg.solve()
        grads = {built.u: rng.normal(size=(5, 4)), built.pair: rng.normal(size=(5, 3))}
        out = solution.vjp(grads)
        for row in range(5):
            exact = oracle.solve(problem.with_eta(eta[row]).with_pair_scores(coupling[row]))
            np.testing.assert_allclose(built.u.value[row], exact.mu, atol=1e-5)
            expected = exact.vjp(*(grad[row] for grad in grads.values()))
            np.testing.assert_allclose(out[built.u][row], expected[0], atol=1e-6)
            np.testing.assert_allclose(out[built.pair][row], expected[1], atol=1e-6)

    def test_gradient_of_shared_scores_is_the_sum_over_instances(self):
        rng = np.random.default_rng(2)
        eta, grad = rng.normal(size=(2, 6, 2))
        fg, u, pair = pair_graph(eta, 0.4, batch_dims=1)
        shared = fg.solve().vjp({u: grad})[pair]
        gg, v, each = pair_graph(eta, np.full(6, 0.4), batch_dims=1)
        np.testing.assert_allclose(shared, gg.solve().vjp({v: grad})[each].sum(), atol=1e-12)

    def test_one_masked_end_means_no_pair(self):
        fg = fm.FactorGraph()
        u = fg.variable_from(np.array([0.3, 0.6]), mask=np.array([True, False]))
        pair = fg.add(fm.Pair(u[0], u[1], 9.0))
        solution = fg.solve()
        np.testing.assert_array_equal(u.value, [0.3, 0])
        assert pair.value == 0
        out = solution.vjp({u: np.ones(2), pair: np.ones(())})
        np.testing.assert_array_equal(out[u], [1, 0])
        assert out[pair] == 0

    def test_negation_is_right_or_refused(self):
        fg = fm.FactorGraph()
        u = fg.variable_from(np.array([0.3, 0.6]))
        try:
            fg.add(fm.Pair(~u[0], u[1], 0.8))
        except fm.GraphError as error:
            assert "Pair" in str(error)
            return
        fg.solve()
        term = Term("Pair", (0, 1), (True, False), scores=0.8)
        np.testing.assert_allclose(u.value, oracle.solve(Problem(np.array([0.3, 0.6]), (term,))).mu)

    @pytest.mark.parametrize("ends", [(slice(3), slice(2)), (slice(3), 0)])
    def test_ends_of_unequal_shape(self, ends):
        fg = fm.FactorGraph()
        u, v = fg.variable(3), fg.variable(3)
        with pytest.raises(fm.ShapeError, match="Pair"):
            fg.add(fm.Pair(u[ends[0]], v[ends[1]], 1.0))

    def test_scores_of_another_shape(self):
        fg = fm.FactorGraph()
        u, v = fg.variable(3), fg.variable(3)
        with pytest.raises(fm.ShapeError, match="Pair"):
            fg.add(fm.Pair(u, v, np.ones(2)))

    def test_a_variable_with_itself(self):
        fg = fm.FactorGraph()
        u = fg.variable(3)
        with pytest.raises(fm.GraphError, match="Pair"):
            fg.add(fm.Pair(u[[0, 1]], u[[1, 1]], 1.0))

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_scores_that_are_not_finite(self, bad):
        with pytest.raises(ValueError, match="Pair"):
            pair_graph(np.zeros(2), bad)[0].solve()

    def test_a_score_of_minus_infinity_is_right_or_refused(self):
        try:
            fg, u, pair = pair_graph(np.array([0.9, 0.8]), -np.inf)
            fg.solve()
        except ValueError as error:
            assert "Pair" in str(error)
            return
        np.testing.assert_allclose([*u.value, pair.value], [0.55, 0.45, 0], atol=ALONE)


def test_lists_of_variables():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([0.5, -0.25, 0.1, 0.4]))
    pair = fg.add(fm.Pair([u[0], ~u[1:3]], [u[3], u[0], u[1]], np.array([1.0, -0.5, 0.3])))
    fg.solve()
    listed, shape = u.value, pair.value.shape
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([0.5, -0.25, 0.1, 0.4]))
    fg.add(fm.Pair(u[0], u[3], 1.0))
    fg.add(fm.Pair(~u[1:3], u[:2], np.array([-0.5, 0.3])))
    fg.solve()
    np.testing.assert_allclose(listed, u.value, atol=1e-6)
    assert shape == (3,)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("shape", [(), (4,), (2, 2)])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_scores_of_shape_one_are_broadcast(batch, shape, library):
    rng = np.random.default_rng(0)
    eta = rng.normal(size=(*batch, 2, *shape))
    grad = rng.normal(size=eta.shape)
    found = []
    for score in (np.array([0.7]), np.array(0.7)):
        fg = fm.FactorGraph(batch_dims=len(batch))
        if library == "torch":
            torch = pytest.importorskip("torch")
            own = torch.tensor(score, requires_grad=True)
            u = fg.variable_from(torch.tensor(eta))
            pair = fg.add(fm.Pair(u[0], u[1], own))
            fg.solve(tol=1e-10)
            ((u.value * torch.tensor(grad)).sum() + (pair.value**2).sum()).backward()
            found.append(
                (u.value.numpy(force=True), pair.value.numpy(force=True), own.grad.numpy())
            )
        else:
            u = fg.variable_from(eta)
            pair = fg.add(fm.Pair(u[0], u[1], score))
            solution = fg.solve(tol=1e-10)
            out = solution.vjp({u: grad, pair: 2 * pair.value})[pair]
            found.append((u.value, pair.value, out))
        assert np.shape(found[-1][2]) == score.shape
    for one, plain in zip(*found, strict=True):
        np.testing.assert_allclose(np.reshape(one, np.shape(plain)), plain, rtol=0, atol=1e-12)
