"""Selections: exactly k, at most k, and contiguous ones."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import factormax as fm  # noqa: E402
from factormax.nn import AtMostK, ContiguousSelection, KSubset  # noqa: E402


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("k, sizes", [(3, [3, 3, 2, 0]), (0.5, [4, 2, 1, 0]), (0, [0] * 4)])
def test_exactly_k_or_all_there_are(k, sizes):
    lengths = torch.tensor([8, 3, 2, 0])
    value = KSubset(k)(randn(4, 8), lengths=lengths)
    torch.testing.assert_close(value.sum(dim=1), torch.tensor(sizes).double(), rtol=0, atol=1e-6)


def test_more_than_there_are():
    torch.testing.assert_close(KSubset(5)(torch.randn(2, 3)), torch.ones(2, 3))
    scores = torch.tensor([[0.5, -torch.inf, 0.1]])
    torch.testing.assert_close(KSubset(5)(scores), torch.tensor([[1.0, 0.0, 1.0]]))


def test_one_of_all_is_sparsemax():
    scores = randn(4, 6)
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u))
    fg.solve()
    torch.testing.assert_close(KSubset(1)(scores), u.value, rtol=0, atol=1e-9)


def test_at_most_k():
    scores = torch.tensor([[0.2, -1.0, 0.4, -0.1], [2.0, 1.5, 1.0, 0.9]])
    expected = torch.tensor([[0.2, 0.0, 0.4, 0.0], [1.0, 0.7, 0.2, 0.1]])  # the second: less 0.8
    torch.testing.assert_close(AtMostK(2)(scores), expected)


@pytest.mark.parametrize("layer", [KSubset, AtMostK, ContiguousSelection])
def test_a_fraction_is_rounded_up_and_not_by_mistake(layer):
    """0.1 · 30 is above 3 in floating point."""
    scores = randn(1, 41).abs() + 5
    for length, expected in ((30, 3), (31, 4), (1, 1), (0, 0)):
        total = layer(0.1)(scores, lengths=[length]).sum().item()
        assert total == pytest.approx(expected, abs=1e-5)
    assert layer(0.1)(scores).sum().item() == pytest.approx(5, abs=1e-5)


@pytest.mark.parametrize("layer", [KSubset, AtMostK, ContiguousSelection])
def test_counts(layer):
    assert layer(np.int64(2))(randn(5) + 5).sum().item() == pytest.approx(2, abs=1e-5)
    for bad in (-1, 1.5, 0.0, True, "2"):
        with pytest.raises(fm.GraphError, match=r"must be a non-negative whole number"):
            layer(bad)


def test_contiguous_selection_written_by_hand():
    scores, lengths = randn(3, 7), torch.tensor([7, 4, 5])
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores, mask=torch.arange(7) < lengths[:, None])
    fg.add(fm.SequenceBudget(u, 0.75, budget=torch.tensor([3, 2, 2])))
    fg.solve()
    value = ContiguousSelection(0.4, transition=0.75)(scores, lengths=lengths)
    torch.testing.assert_close(value, u.value, rtol=0, atol=0)


def test_a_great_score_selects_one_span():
    layer = ContiguousSelection(3, transition=20.0)
    value = layer.predict(randn(4, 9), lengths=[9, 8, 7, 6])
    together = (value[:, 1:] * value[:, :-1]).sum(dim=1)
    assert (value.sum(dim=1) == 3).all() and (together == 2).all()


@pytest.mark.parametrize("learned", [True, False])
def test_the_transition(learned):
    layer = ContiguousSelection(2, transition=0.5, learn_transition=learned)
    layer(randn(2, 5)).sum().backward() if learned else layer(randn(2, 5))
    assert len(list(layer.parameters())) == int(learned)
    assert list(layer.state_dict()) == ["transition"]


@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
def test_scores_that_gain_nothing_learn_nothing(temperature):
    """As the layers' documentation says, which advises to start with a positive bias."""
    layers = [AtMostK(2), ContiguousSelection(3, transition=0.5)]
    for layer, most in zip(layers, (0.0, -0.5), strict=True):
        for bias, learns in ((most, False), (0.5, True)):
            scores = (torch.arange(6.0) / -100 + bias).requires_grad_()
            value = layer(scores, temperature=temperature)
            (grad,) = torch.autograd.grad((value * torch.arange(6.0)).sum(), scores)
            assert (bool(value.any()), bool(grad.any())) == (learns, learns)
