from functools import cache

import numpy as np
import pytest
from structured_contract import Case, Padded, StructuredContract, solved

import factormax as fm
from factormax._core import ByRows
from factormax._engines import cpu
from factormax.reference.structures import trees

KINDS = [(False, False), (False, True), (True, False), (True, True)]


@cache
def tree(n, projective=False, single_root=False) -> Case:
    M, N = trees(n, projective, single_root)
    name = f"DepTree({n}, projective={projective}, single_root={single_root})"
    return Case((n, n), lambda u: fm.DepTree(u, projective, single_root), M, N, name=name)


def words(*present):
    """The index of what is between these words."""
    return np.ix_(present, present)


class TestDepTree(StructuredContract):
    kind = "DepTree"

    def cases(self):
        return [tree(n, *kind) for n in (1, 2, 3, 4) for kind in KINDS]

    def padded(self):
        for kind in KINDS:
            for n, present in [(4, (0, 1)), (5, (0, 1, 2)), (4, (1, 3)), (5, (0, 2, 3, 4))]:
                large, small = tree(n, *kind), tree(len(present), *kind)
                keep = words(*present)
                yield Padded(large, small, keep)
                # The rows alone: an absent word is nobody's head.
                rows = np.zeros((n, n), dtype=bool)
                rows[list(present)] = True
                yield Padded(large, small, keep, mask=rows)

    def impossible(self):
        no_root = ~np.eye(3, dtype=bool)  # and so only cycles
        cut_off = np.ones((3, 3), dtype=bool)
        cut_off[0] = [False, True, False]
        cut_off[1] = [True, False, False]  # 0 and 1 hang from each other
        for kind in KINDS:
            yield tree(3, *kind), no_root
            yield tree(3, *kind), cut_off
        two_roots = np.ones((3, 3), dtype=bool)
        two_roots[0] = [True, False, False]
        two_roots[1] = [False, True, False]
        yield tree(3, False, True), two_roots
        yield tree(3, True, True), two_roots
        crossing = np.zeros((4, 4), dtype=bool)  # 0 -> 2 and 1 -> 3 cross, whatever the rest does
        crossing[0, 0] = crossing[2, 0] = crossing[1, 0] = crossing[3, 1] = True
        yield tree(4, True, False), crossing

    @pytest.mark.parametrize(("projective", "single_root"), KINDS)
    def test_marginals_of_a_tree(self, projective, single_root):
        """Every word has one head, and the roots are one, or at least one."""
        scores = np.random.default_rng(0).normal(size=(5, 12, 12))
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        fg.add(fm.DepTree(u, projective=projective, single_root=single_root))
        fg.solve()
        np.testing.assert_allclose(u.value.sum(-1), 1, atol=1e-12)
        roots = np.trace(u.value, axis1=1, axis2=2)
        assert (roots >= 1 - 1e-12).all()
        if single_root:
            np.testing.assert_allclose(roots, 1, atol=1e-12)

    @pytest.mark.parametrize("single_root", [False, True])
    def test_what_is_projective_costs(self, single_root):
        """Fewer structures: the objective is no better, and the same where no arc crosses."""
        rng = np.random.default_rng(1)
        same = 0
        for _ in range(30):
            scores = rng.normal(size=(5, 5))
            found = []
            for projective in (False, True):
                fg = fm.FactorGraph()
                u = fg.variable_from(scores)
                fg.add(fm.DepTree(u, projective, single_root))
                found.append((fg.solve().objective, u.value))
            assert found[1][0] <= found[0][0] + 1e-12
            if abs(found[1][0] - found[0][0]) <= 1e-12:
                same += 1
                np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-6)
        assert 0 < same < 30

    def test_slices_of_larger_variables(self):
        """The shape of the slice is the sentence."""
        rng = np.random.default_rng(2)
        scores = rng.normal(size=(4, 5))
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        factor = fg.add(fm.DepTree(u[1:, 2:]))
        fg.solve()
        alone, _ = solved(tree(3), scores[1:, 2:], {})
        np.testing.assert_array_equal(u.value[1:, 2:], alone.u.value)
        np.testing.assert_array_equal(factor.structures, alone.factor.structures)
        np.testing.assert_array_equal(u.value[0], np.clip(scores[0], 0, 1))

    def test_packed_is_this_layout(self):
        fg = fm.FactorGraph()
        u = fg.variable(3 * (2,))
        fm.DepTree(u[0], packed=True)
        with pytest.raises(fm.GraphError, match=r"DepTree over u.*packed=False.*diagonal"):
            fm.DepTree(u[0], packed=False)

    @pytest.mark.parametrize(
        ("shape", "message"),
        [((3,), r"\(n, n\).*got \(3,\)"), ((2, 3), r"square, \(n, n\), got \(2, 3\)")],
    )
    def test_shapes(self, shape, message):
        with pytest.raises(fm.ShapeError, match=f"DepTree over u.*{message}"):
            fm.DepTree(fm.FactorGraph().variable(shape))

    def test_a_list_has_no_shape(self):
        u = fm.FactorGraph().variable((2, 2))
        with pytest.raises(fm.ShapeError, match=r"DepTree over u\[0\], u\[1\]: u must have shape"):
            fm.DepTree([u[0], u[1]])

    def test_it_has_no_value(self):
        built, _ = solved(tree(2), np.zeros((2, 2)), {})
        with pytest.raises(fm.GraphError, match="DepTree over u has no scores of its own"):
            _ = built.factor.value


@pytest.mark.parametrize("single_root", [False, True])
@pytest.mark.parametrize("projective", [False, True])
def test_oracle_equals_all_trees_of_six_words(projective, single_root):
    """On random and on tied scores."""
    rng = np.random.default_rng(6)
    M, _ = trees(6, projective, single_root)
    scores = np.concatenate(
        [rng.standard_normal((300, 36)), rng.integers(-1, 2, (300, 36)), np.zeros((1, 36))]
    )
    factor = fm.DepTree(fm.FactorGraph().variable((6, 6)), projective, single_root)
    best = (scores @ M).max(axis=1)
    for eta, most in zip(scores, best, strict=True):
        found = factor.map(eta.reshape(6, 6))[0].ravel()
        assert abs(found @ eta - most) <= 1e-12 * (1 + abs(most))
        assert (found @ M == 6).any()  # it is one of them


class TestDepTreeByRows(TestDepTree):
    """The same contract where rows take the place of the structures, however few there are."""

    @pytest.fixture(autouse=True)
    def _always(self, monkeypatch):
        monkeypatch.setattr(cpu, "BY_ROWS", ByRows.always)
