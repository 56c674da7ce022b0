from functools import cache

import numpy as np
import pytest
from contract import values_of
from structured_contract import ALONE, Case, Padded, StructuredContract, solved

import factormax as fm
from factormax.reference.structures import tables


def groups(u, sizes):
    ends = np.cumsum(sizes)
    return [u[end - size : end] for size, end in zip(sizes, ends, strict=True)]


@cache
def table(*sizes) -> Case:
    return Case(
        (sum(sizes),),
        lambda u, scores: fm.Table(groups(u, sizes), scores),
        *tables(sizes),
        {"scores": sizes},
        f"Table{sizes}",
    )


class TestTable(StructuredContract):
    kind = "Table"

    def cases(self):
        sizes = [(3,), (1, 3), (1, 1), (2, 2), (2, 3), (4, 4), (2, 2, 2), (3, 1, 4), (2, 3, 2, 2)]
        return [table(*size) for size in sizes]

    def whole(self, case, mask):
        ends = np.cumsum(case.scores["scores"])
        return np.stack([g.any(axis=1) for g in np.split(mask, ends[:-1], axis=1)]).all(axis=0)

    def padded(self):
        """States that are forbidden: what remains is the table without them."""
        for sizes, kept in [
            ((3, 3), ((0, 1), (0, 1))),
            ((2, 4), ((0, 1), (1, 3))),
            ((3, 2, 4), ((2,), (0, 1), (0, 1, 2))),
            ((4,), ((1, 2),)),
        ]:
            starts = np.cumsum([0, *sizes])
            keep = np.concatenate([starts[g] + np.array(k) for g, k in enumerate(kept)])
            small = table(*map(len, kept))
            yield Padded(table(*sizes), small, keep, {"scores": np.ix_(*kept)})

    def impossible(self):
        """Masks alone leave a joint state always, but see `test_no_joint_state_is_allowed`."""
        return []

    def test_no_joint_state_is_allowed(self):
        scores = np.array([[0.0, -np.inf], [-np.inf, 0.0]])
        fg = fm.FactorGraph(batch_dims=1)
        mask = np.array([[True, False, False, True], [True] * 4])
        u = fg.variable_from(np.zeros((2, 4)), mask=mask)
        fg.add(fm.Table([u[:2], u[2:]], scores))
        solution = fg.solve(on_failure="ignore")
        assert list(solution.status) == [fm.Status.INFEASIBLE, fm.Status.CONVERGED]
        assert np.isnan(u.value[0][mask[0]]).all() and np.isfinite(u.value[1]).all()

    @pytest.mark.parametrize("sizes", [(2, 2), (3, 4), (2, 2, 3)])
    def test_forbidden_joint_states(self, sizes):
        rng = np.random.default_rng(0)
        case = table(*sizes)
        for _ in range(5):
            eta, own = case.draw(rng)
            gone = rng.random(sizes) < 0.3
            gone.flat[0] = False
            own["scores"][gone] = -np.inf
            built, solution = solved(case, eta, own)
            mu, mu_v, _ = case.exact(eta, own)
            np.testing.assert_allclose(built.u.value, mu, rtol=0, atol=ALONE)
            np.testing.assert_allclose(built.factor.value.reshape(-1), mu_v, rtol=0, atol=ALONE)
            out = solution.vjp({built.u: rng.normal(size=case.shape)})[built.factor]
            assert not out[gone].any() and np.isfinite(out).all()

    @pytest.mark.parametrize("gone", [0, 1, 2])
    def test_an_absent_group(self, gone):
        """The others still have one state each, but no joint score."""
        rng = np.random.default_rng(1)
        sizes = (2, 3, 2)
        eta, scores = rng.normal(size=7), rng.normal(size=sizes)
        starts = np.cumsum([0, *sizes])
        mask = np.ones(7, dtype=bool)
        mask[starts[gone] : starts[gone + 1]] = False
        built, solution = solved(table(*sizes), eta, {"scores": scores}, mask)
        rest = [s for g, s in enumerate(sizes) if g != gone]
        alone, single = solved(table(*rest), eta[mask], {"scores": np.zeros(rest)})
        np.testing.assert_array_equal(built.u.value[mask], alone.u.value)
        np.testing.assert_array_equal(built.factor.probs, alone.factor.probs)
        assert not built.u.value[~mask].any() and not built.factor.value.any()
        grad = rng.normal(size=7)
        out = solution.vjp({built.u: grad, built.factor: rng.normal(size=sizes)})
        expected = single.vjp({alone.u: grad[mask]})[alone.u]
        np.testing.assert_allclose(out[built.u][mask], expected, rtol=0, atol=1e-12)
        assert not out[built.u][~mask].any() and not out[built.factor].any()
        for g, part in enumerate(np.split(np.arange(7), starts[1:-1])):
            if g != gone:
                sparsemax = values_of(eta[part], fm.Xor)
                np.testing.assert_allclose(built.u.value[part], sparsemax, rtol=0, atol=ALONE)

    def test_rows_of_a_matrix_are_groups(self):
        rng = np.random.default_rng(2)
        eta, scores = rng.normal(size=(3, 2)), rng.normal(size=(2, 2, 2))
        fg = fm.FactorGraph()
        u = fg.variable_from(eta)
        factor = fg.add(fm.Table(u, scores))
        fg.solve()
        alone, _ = solved(table(2, 2, 2), eta.reshape(-1), {"scores": scores})
        np.testing.assert_array_equal(u.value.reshape(-1), alone.u.value)
        np.testing.assert_array_equal(factor.value, alone.factor.value)

    def test_value_is_the_joint_distribution(self):
        rng = np.random.default_rng(3)
        eta, scores = rng.normal(size=(4, 9)), rng.normal(size=(4, 4, 5))
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta)
        factor = fg.add(fm.Table([u[:4], u[4:]], scores))
        fg.solve()
        assert factor.value.shape == (4, 4, 5) and (factor.value >= 0).all()
        np.testing.assert_allclose(factor.value.sum(2), u.value[:, :4], rtol=0, atol=1e-12)
        np.testing.assert_allclose(factor.value.sum(1), u.value[:, 4:], rtol=0, atol=1e-12)

    def test_one_group_is_a_xor_of_the_sums(self):
        rng = np.random.default_rng(4)
        eta, scores = rng.normal(size=6), rng.normal(size=6)
        ours = values_of(eta, lambda u: fm.Table([u], scores))
        np.testing.assert_allclose(ours, values_of(eta + scores, fm.Xor), rtol=0, atol=ALONE)

    @pytest.mark.parametrize("coupling", [0.7, -0.7])
    def test_two_states_each_are_a_pair(self, coupling):
        """½(x² + (1 − x)²) − a x = x² − (1 + a) x + ½: a variable with half the scores, from 1."""
        a, b = np.random.default_rng(5).normal(size=2)
        fg = fm.FactorGraph()
        u = fg.variable_from(np.array([[0, a], [0, b]]))
        fg.add(fm.Table(u, np.array([[0, 0], [0, coupling]])))
        v = fg.variable_from(np.array([1 + a, 1 + b]) / 2)
        fg.add(fm.Pair(v[0], v[1], coupling / 2))
        fg.solve(tol=1e-12)
        np.testing.assert_allclose(u[:, 1].value, v.value, rtol=0, atol=1e-8)

    @pytest.mark.parametrize("bad", [(2,), (3, 2), (2, 3, 1), (1, 3), (1, 2, 3)])
    def test_shapes(self, bad):
        u = fm.FactorGraph().variable(5)
        with pytest.raises(fm.ShapeError, match=r"Table over u\[:2\], u\[2:\]: scores.*\(2, 3\)"):
            fm.Table([u[:2], u[2:]], np.zeros(bad))

    def test_a_group_without_states(self):
        u = fm.FactorGraph().variable(3)
        with pytest.raises(fm.GraphError, match=r"Table over .*a group has no states"):
            fm.Table([u, u[:0]], np.zeros((3, 0)))

    def test_groups_that_overlap(self):
        u = fm.FactorGraph().variable(3)
        with pytest.raises(fm.GraphError, match=r"Table over .*u\[1\] is in it twice"):
            fm.Table([u[:2], u[1:]], np.zeros((2, 2)))
