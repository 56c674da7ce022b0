"""Pairwise multilabel models."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import factormax as fm  # noqa: E402
from factormax.nn import PairwiseMRF  # noqa: E402


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_weights(layer, weights):
    with torch.no_grad():
        layer.double().weight.copy_(weights)
    return layer


def best_by_enumeration(scores, coupling):
    """The best 0/1 labels of each row of scores."""
    labels = scores.shape[-1]
    all_ = torch.tensor(list(itertools.product([0.0, 1.0], repeat=labels))).double()
    pairs = 0.5 * torch.einsum("ci,ij,cj->c", all_, coupling, all_)
    return all_[(scores @ all_.T + pairs).argmax(dim=1)]


def test_the_graph_written_by_hand():
    scores, weights = randn(3, 4), randn(6, seed=1)
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    for (i, j), w in zip(itertools.combinations(range(4), 2), weights, strict=True):
        fg.add(fm.Pair(u[i], u[j], w))
    fg.solve(tol=1e-10)
    layer = with_weights(PairwiseMRF(4, tol=1e-10), weights)
    torch.testing.assert_close(layer(scores), u.value, rtol=0, atol=1e-8)


def test_the_coupling_is_symmetric():
    edges = [(0, 2), (3, 1)]
    layer = PairwiseMRF(4, edges)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, -2.0]))
    expected = torch.zeros(4, 4)
    for (i, j), w in zip(edges, (0.5, -2.0), strict=True):
        expected[i, j] = expected[j, i] = w
    torch.testing.assert_close(layer.coupling.detach(), expected)
    layer.coupling.sum().backward()
    torch.testing.assert_close(layer.weight.grad, torch.full((2,), 2.0))
    assert PairwiseMRF(4).coupling.shape == (4, 4) and len(PairwiseMRF(7).weight) == 21


def test_it_starts_as_independent_labels():
    scores = randn(3, 5)
    torch.testing.assert_close(PairwiseMRF(5)(scores), scores.clamp(0, 1), rtol=0, atol=1e-6)
    for layer in (PairwiseMRF(1), PairwiseMRF(1, [])):
        assert layer(torch.tensor([[0.3]])).item() == pytest.approx(0.3)


def test_predictions_of_attractive_labels_are_exact():
    scores, weights = randn(6, 5), randn(10, seed=1).abs()
    layer = with_weights(PairwiseMRF(5), weights)
    expected = best_by_enumeration(scores, layer.coupling.detach())
    torch.testing.assert_close(layer.predict(scores, kind="hinge"), expected, rtol=0, atol=0)


def test_exact_predictions():
    scores, weights = randn(6, 6), 2 * randn(15, seed=1)
    layer = with_weights(PairwiseMRF(6), weights)
    expected = best_by_enumeration(scores, layer.coupling.detach())
    found = layer.predict(scores, kind="hinge", exact=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    expected = best_by_enumeration(scores - 0.5, layer.coupling.detach())
    torch.testing.assert_close(layer.predict(scores, exact=True), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["sparsemap", "hinge"])
def test_it_learns_which_labels_go_together(kind):
    """Labels 0 and 1 are alike, 2 excludes 3; the inputs tell only one of each."""
    torch.manual_seed(0)
    tell = torch.randint(0, 2, (64, 2)).float()
    target = torch.stack([tell[:, 0], tell[:, 0], tell[:, 1], 1 - tell[:, 1]], dim=1)
    x = torch.zeros(64, 4)
    x[:, [0, 2]] = 2 * tell - 1
    layer = PairwiseMRF(4)
    scale, bias = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adam([scale, bias, *layer.parameters()], lr=0.1)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = layer.loss(scale * x + bias, target, kind=kind).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]
    assert layer.coupling[0, 1] > 0.2 and layer.coupling[2, 3] < -0.2
    assert torch.equal(layer.predict((scale * x + bias).detach(), kind=kind), target)


def test_targets_that_are_not_known():
    layer = with_weights(PairwiseMRF(3), randn(3, seed=1).abs())
    scores = randn(2, 3).requires_grad_()
    target = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    known = torch.tensor([[True, True, False], [True, True, True]])
    loss = layer.loss(scores, target, known=known)
    whole = layer.loss(scores, target)
    assert loss.shape == (2,)
    assert loss[0] <= whole[0] + 1e-9 and torch.allclose(loss[1], whole[1])


def test_what_is_wrong():
    with pytest.raises(fm.ShapeError, match=r"\(\*batch, 4\), one for each label, got \(2, 3\)"):
        PairwiseMRF(4)(torch.zeros(2, 3))
    with pytest.raises(
        fm.GraphError, match="labels must be a whole number from 1 to 1048576, got 0"
    ):
        PairwiseMRF(0)
    with pytest.raises(fm.GraphError, match="edges must hold labels from 0 to 2, got 3"):
        PairwiseMRF(3, [(0, 3)])
    with pytest.raises(fm.GraphError, match="joins a label to itself"):
        PairwiseMRF(3, [(0, 1), (2, 2)])
    with pytest.raises(fm.GraphError, match="given twice"):
        PairwiseMRF(3, [(0, 1), (1, 0)])
    for edges in ([0, 1], [[0, 1, 2]], [[0.5, 1.0]]):
        with pytest.raises(fm.ShapeError, match=r"edges must be whole numbers of shape \(edges, 2"):
            PairwiseMRF(3, edges)
