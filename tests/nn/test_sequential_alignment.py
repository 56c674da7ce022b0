"""Sequential alignment."""

import pytest

torch = pytest.importorskip("torch")

import factormax as fm  # noqa: E402
from factormax.nn import SequentialAlignment  # noqa: E402


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_graph_written_by_hand(symmetric):
    scores = randn(3, 4, 5)
    transitions = torch.zeros(5, 5).double()
    for j in range(4):
        transitions[j, j + 1] = 1.6
        if symmetric:
            transitions[j + 1, j] = 1.6
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    fg.add(fm.Sequence(u, transitions))
    for j in range(5):
        fg.add(fm.AtMostOne(u[:, j]))
    fg.solve(tol=1e-10)
    layer = SequentialAlignment(1.6, symmetric=symmetric, tol=1e-10).double()
    torch.testing.assert_close(layer(scores), u.value, rtol=0, atol=1e-7)


def test_a_great_score_aligns_along_a_diagonal():
    scores = randn(2, 4, 6)
    value = SequentialAlignment(50.0, symmetric=False)(scores)
    steps = torch.stack([value[:, i, i : i + 3] for i in range(4)], dim=1)  # along diagonals
    torch.testing.assert_close(steps, steps[:, :1].expand_as(steps), rtol=0, atol=1e-5)


def test_the_other_way_round():
    layer = SequentialAlignment(0.8, tol=1e-10)
    scores = randn(3, 6, 4)
    torch.testing.assert_close(layer(scores), layer(scores.mT).mT, rtol=0, atol=1e-8)


def test_the_transition_is_learned():
    """Targets that go along a diagonal raise the score, from scores that say nothing of it."""
    layer = SequentialAlignment(0.1, symmetric=False)
    target = torch.eye(4).expand(2, 4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    scores = 0.3 * randn(2, 4, 4).float() + 0.3 * target
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = (layer(scores) - target).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert layer.transition > 0.3 and losses[-1] < 0.7 * losses[0]


def test_a_fixed_transition():
    layer = SequentialAlignment(0.5, learn_transition=False)
    assert not list(layer.parameters()) and "transition" in layer.state_dict()
    assert "learn_transition=False" in repr(layer)


def test_absent_words_come_last():
    mask = torch.tensor([[True, False, True]]), None
    with pytest.raises(fm.GraphError, match=r"absent steps .* must come last"):
        SequentialAlignment()(torch.zeros(1, 3, 4), mask=mask)
