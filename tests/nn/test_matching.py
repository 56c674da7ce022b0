"""Matching attention."""

import pytest

torch = pytest.importorskip("torch")

import factormax as fm  # noqa: E402
from factormax.nn import Matching  # noqa: E402


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_graph_written_by_hand():
    scores = randn(4, 3, 5)
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    fg.solve()
    torch.testing.assert_close(Matching()(scores), u.value, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 6), (6, 1)])
def test_coarse_and_lp_agree_either_way_round(shape):
    scores = randn(4, *shape)
    lp, coarse = Matching(tol=1e-10)(scores), Matching("coarse", tol=1e-10)(scores)
    torch.testing.assert_close(lp, coarse, rtol=0, atol=1e-8)
    other = Matching(tol=1e-10)(scores.mT).mT
    torch.testing.assert_close(lp, other, rtol=0, atol=1e-8)


@pytest.mark.parametrize("form", ["lp", "coarse"])
def test_the_shorter_side_is_complete(form):
    rows, columns = torch.tensor([5, 2, 4, 0, 1]), torch.tensor([3, 6, 4, 2, 1])
    value = Matching(form)(randn(5, 5, 6), lengths=(rows, columns))
    total = value.sum(dim=(1, 2))
    torch.testing.assert_close(total, rows.minimum(columns).double(), rtol=0, atol=1e-5)
    assert value.sum(dim=1).max() < 1 + 1e-5 and value.sum(dim=2).max() < 1 + 1e-5


def test_all_instances_are_tall_though_the_padding_is_not():
    """Three words against one, padded to 3 × 4; then one against three in 4 × 3."""
    scores = randn(2, 3, 4)
    value = Matching("coarse")(scores, lengths=([3, 3], [1, 2]))
    torch.testing.assert_close(value.sum(dim=1)[:, 0], torch.ones(2).double(), rtol=0, atol=1e-5)
    other = Matching("coarse")(scores.mT, lengths=([1, 2], [3, 3]))
    torch.testing.assert_close(other, value.mT, rtol=0, atol=1e-5)


def test_incomplete():
    scores = randn(3, 4, 5)
    value = Matching(complete=False)(scores)
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    fg.add(fm.AtMostOne(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    fg.solve()
    torch.testing.assert_close(value, u.value, rtol=0, atol=0)
    assert not Matching(complete=False)(-scores.abs()).any()


@pytest.mark.parametrize("budget, most", [(2, [2, 2, 2]), (0.5, [2, 1, 1]), (0, [0, 0, 0])])
def test_a_budget_of_pairs(budget, most):
    layer = Matching(complete=False, budget=budget)
    value = layer(randn(3, 4, 5).abs() + 1, lengths=([4, 2, 4], [5, 5, 1]))
    found = value.sum(dim=(1, 2))
    expected = torch.tensor(most).minimum(torch.tensor([4, 2, 1])).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_forbidden_pairs():
    scores = torch.zeros(1, 2, 3)
    mask = torch.tensor([[[True, False, False], [True, True, False]]])
    expected = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]])
    for form in ("lp", "coarse"):
        torch.testing.assert_close(Matching(form)(scores, mask=mask), expected)


def test_settings_that_contradict():
    with pytest.raises(fm.GraphError, match='form must be "lp" or "coarse", got \'dense\''):
        Matching("dense")
    with pytest.raises(fm.GraphError, match='complete=False needs form="lp"'):
        Matching("coarse", complete=False)
    with pytest.raises(fm.GraphError, match="For a budget, set complete=False"):
        Matching(budget=2)
    with pytest.raises(
        fm.GraphError, match=r"budget must be a non-negative whole number .* got -1"
    ):
        Matching(complete=False, budget=-1)
