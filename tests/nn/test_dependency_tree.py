"""Dependency trees."""

import pytest

torch = pytest.importorskip("torch")

import factormax as fm  # noqa: E402
from factormax.nn import DependencyTree  # noqa: E402


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"projective": True}, {"single_root": True}])
def test_the_paper_listing(options):
    """Budgets over the columns without the diagonal, one at a time."""
    scores, n = 2 * randn(3, 5, 5), 5
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    fg.add(fm.DepTree(u, **options))
    for k in range(n):
        others = [i for i in range(n) if i != k]
        fg.add(fm.Budget(u[others, k], budget=1))
    fg.solve(tol=1e-10)
    value = DependencyTree(valency=1, tol=1e-10, **options)(scores)
    torch.testing.assert_close(value, u.value, rtol=0, atol=1e-7)
    assert not torch.allclose(value, DependencyTree(**options)(scores), atol=1e-3)


def test_the_root_is_not_counted():
    scores = torch.zeros(4, 4)
    scores.fill_diagonal_(9.0)
    torch.testing.assert_close(DependencyTree(valency=0)(scores), torch.eye(4))


def test_single_words():
    value = DependencyTree(valency=1)(torch.randn(2, 1, 1))
    torch.testing.assert_close(value, torch.ones(2, 1, 1))


def test_forbidden_arcs():
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[0, 1] = mask[2, 1] = False  # nothing hangs from word 1
    value = DependencyTree(projective=True)(randn(3, 3), mask=mask)
    assert not value[[0, 2], 1].any()
    torch.testing.assert_close(value.sum(dim=1), torch.ones(3).double(), rtol=0, atol=1e-6)


def test_what_is_wrong():
    with pytest.raises(fm.ShapeError, match=r"must be square, \(\*batch, n, n\), got \(2, 3, 4\)"):
        DependencyTree()(torch.zeros(2, 3, 4))
    for valency in (-1, 1.5, True):
        with pytest.raises(fm.GraphError, match="valency must be a non-negative whole number"):
            DependencyTree(valency=valency)
