from functools import cache

import numpy as np
import pytest
from structured_contract import Case, Padded, StructuredContract, solved

import factormax as fm
from factormax._core import ByRows
from factormax._engines import cpu
from factormax.reference.structures import matchings


@cache
def matching(m, n) -> Case:
    if m > n:  # the transposed problem, its variables in the order of the rows
        assignments, features = matchings(n, m)
        assignments = assignments.reshape(n, m, -1).swapaxes(0, 1).reshape(m * n, -1)
        return Case((m, n), fm.Matching, assignments, features, name=f"Matching({m}, {n})")
    return Case((m, n), fm.Matching, *matchings(m, n), name=f"Matching({m}, {n})")


class TestMatching(StructuredContract):
    kind = "Matching"
    sizes = ((1, 1), (1, 3), (2, 2), (2, 4), (3, 3), (3, 5), (4, 4), (3, 1), (4, 2))

    def cases(self):
        return [matching(*size) for size in self.sizes]

    def padded(self):
        for (m, n), rows, cols in [
            ((3, 4), (0, 1), (0, 1, 2)),
            ((4, 4), (0, 1), (0, 1)),
            ((3, 3), (0, 2), (1, 2)),
            ((4, 5), (1, 2, 3), (0, 2, 4)),
            ((4, 4), (0, 1, 3), (0, 1, 2, 3)),  # only a row is absent
            ((2, 5), (0, 1), (1, 2, 4)),  # only columns are
            ((5, 2), (1, 2, 4), (0, 1)),  # more rows than columns
            ((4, 3), (0, 1, 3), (0, 2)),
        ]:
            large, small = matching(m, n), matching(len(rows), len(cols))
            yield Padded(large, small, np.ix_(rows, cols))

    def impossible(self):
        taken = np.ones((3, 3), dtype=bool)
        taken[:2, 1:] = False  # two rows, one column
        yield matching(3, 3), taken
        narrow = np.ones((3, 5), dtype=bool)
        narrow[:, 2:] = False  # three rows, two columns
        yield matching(3, 5), narrow
        absent = np.ones((4, 4), dtype=bool)
        absent[0], absent[:, 1:] = False, False  # three rows, one column
        yield matching(4, 4), absent

    @pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 3), (3, 7), (10, 10), (8, 12)])
    @pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
    def test_rows_and_columns(self, shape, scale):
        """The same as Xor along rows and AtMostOne along columns, gradient included."""
        rng = np.random.default_rng(0)
        scores, grad = scale * rng.normal(size=shape), rng.normal(size=shape)
        answers = []
        for factors in (
            lambda u: [fm.Matching(u)],
            lambda u: [fm.Xor(u, axis=1), fm.AtMostOne(u, axis=0)],
        ):
            fg = fm.FactorGraph()
            u = fg.variable_from(scores)
            for factor in factors(u):
                fg.add(factor)
            solution = fg.solve(tol=1e-12)
            answers.append((u.value, solution.vjp({u: grad})[u], solution.objective))
        np.testing.assert_allclose(answers[0][0], answers[1][0], rtol=0, atol=1e-8)
        np.testing.assert_allclose(answers[0][1], answers[1][1], rtol=0, atol=1e-6)
        assert abs(answers[0][2] - answers[1][2]) <= 1e-8 * scale

    def test_equal_scores_share(self):
        built, solution = solved(matching(4, 4), np.zeros((4, 4)), {})
        np.testing.assert_allclose(built.u.value, 0.25, atol=1e-12)
        grad = np.random.default_rng(1).normal(size=(4, 4))
        centred = grad - grad.mean(0) - grad.mean(1, keepdims=True) + grad.mean()
        np.testing.assert_allclose(solution.vjp({built.u: grad})[built.u], centred, atol=1e-10)

    @pytest.mark.parametrize("batch_dims", [0, 1])
    @pytest.mark.parametrize("scale", [0.3, 3.0])
    def test_more_rows_than_columns(self, batch_dims, scale):
        """The transposed problem: the columns are matched. Shapes stay as they were given."""
        rng = np.random.default_rng(2)
        scores, grad = scale * rng.normal(size=(2, *[3] * batch_dims, 5, 3))
        mask = rng.random(scores.shape) < 0.9
        mask[..., 4, :] = False  # a row that is absent
        mask[..., :3, :] = True  # enough for a matching
        answers = []
        for swap in (False, True):
            fg = fm.FactorGraph(batch_dims=batch_dims)
            given = [np.swapaxes(x, -1, -2) if swap else x for x in (scores, mask, grad)]
            u = fg.variable_from(given[0], mask=given[1])
            matching = fg.add(fm.Matching(u))
            solution = fg.solve(tol=1e-10)
            out = solution.vjp({u: given[2]}, probs={matching: np.cos(matching.probs)})[u]
            found = [u.value, out, matching.structures]
            if swap:
                found = [np.swapaxes(x, -1, -2) for x in found]
            answers.append([*found, matching.probs, matching.num_structures, solution.objective])
            best = matching.map(np.zeros(matching.variable_shape))[0]
            assert best.shape == u.shape and best.sum() == 3
        assert answers[0][2].shape[-2:] == (5, 3)
        np.testing.assert_array_equal((answers[0][2].sum(-2) == 1).all(-1), answers[0][3] > 0)
        for tall, wide in zip(*answers, strict=True):
            np.testing.assert_allclose(tall, wide, rtol=0, atol=1e-12)

    def test_tall_by_rows_and_columns(self):
        """The same as Xor along columns and AtMostOne along rows."""
        rng = np.random.default_rng(3)
        scores = rng.normal(size=(6, 4))
        for query in ("solve", "solve_map", "decode"):
            values = []
            for factors in (
                lambda u: [fm.Matching(u)],
                lambda u: [fm.Xor(u, axis=0), fm.AtMostOne(u, axis=1)],
            ):
                fg = fm.FactorGraph()
                u = fg.variable_from(scores)
                for factor in factors(u):
                    fg.add(factor)
                getattr(fg, query)()
                values.append(u.value)
            np.testing.assert_allclose(values[0], values[1], rtol=0, atol=1e-5)
        assert abs(fg.loss({u: u.value}, "perceptron")) < 1e-6

    @pytest.mark.parametrize("shape", [(3,), (2, 2, 2)])
    def test_shapes(self, shape):
        with pytest.raises(fm.ShapeError, match=r"Matching over u: u must have shape \(m, n\)"):
            fm.Matching(fm.FactorGraph().variable(shape))

    def test_a_variable_given_twice(self):
        u = fm.FactorGraph().variable((2, 3))
        with pytest.raises(fm.GraphError, match=r"Matching over u.*u\[0, 1\] is in it twice"):
            fm.Matching(u[:, [1, 0, 1]])

    def test_it_has_no_value(self):
        built, _ = solved(matching(2, 2), np.zeros((2, 2)), {})
        with pytest.raises(fm.GraphError, match="Matching over u has no scores of its own"):
            _ = built.factor.value


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (20, 20), (40, 60), (100, 200), (200, 200)])
@pytest.mark.parametrize("kind", ["normal", "integers", "zeros"])
def test_oracle_equals_scipy(shape, kind):
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(shape[0])
    draw = {
        "normal": rng.standard_normal,
        "integers": lambda shape: rng.integers(0, 4, shape).astype(float),
        "zeros": np.zeros,
    }
    scores = draw[kind](shape)
    matching = fm.Matching(fm.FactorGraph().variable(shape))
    found, _ = matching.map(scores)
    assert (found.sum(axis=1) == 1).all() and (found.sum(axis=0) <= 1).all()
    best = scores[optimize.linear_sum_assignment(scores, maximize=True)].sum()
    assert abs((found * scores).sum() - best) <= 1e-10 * (1 + abs(best))


class TestMatchingByRows(TestMatching):
    """The same contract where rows take the place of the structures, however few there are."""

    @pytest.fixture(autouse=True)
    def _always(self, monkeypatch):
        monkeypatch.setattr(cpu, "BY_ROWS", ByRows.always)
