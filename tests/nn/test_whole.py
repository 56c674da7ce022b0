"""Predictions are 0/1 structures, also where several tie and the relaxation mixes them."""

import pytest

torch = pytest.importorskip("torch")

import factormax as fm  # noqa: E402
import factormax.nn as fnn  # noqa: E402
from factormax import _engines  # noqa: E402
from factormax.queries import whole  # noqa: E402

from .cases import every_case  # noqa: E402


def is_whole(x):
    return bool(((x == 0) | (x == 1)).all())


def test_the_first_win():
    scores = torch.tensor([[1.0, 1, 1, 0], [0, 1, 1, 1], [2, 2, 2, 2]])
    expected = torch.tensor([[1.0, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 0]])
    assert torch.equal(fnn.KSubset(2).predict(scores), expected)
    assert torch.equal(fnn.KSubset(2, eval_map=True).eval()(scores), expected)
    assert torch.equal(fnn.KSubset(2).predict(scores[0]), expected[0])
    assert torch.equal(fnn.AtMostK(2).predict(scores), expected)
    ones = fnn.KSubset(2).predict(torch.ones(3, 5), lengths=[5, 3, 1])
    assert torch.equal(ones, torch.tensor([[1.0, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]))


@every_case
@pytest.mark.parametrize("values", [1, 2, 3])
def test_ties(case, values):
    """Whole numbers as scores: a structure, as good as the best, and the same one again."""
    layer = case.layer()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter.sign())
    for seed in range(5):
        scores = (values * case.scores(seed).sigmoid()).floor()
        for kind in ("sparsemap", "hinge"):
            found = layer.predict(scores, kind=kind, **case.where)
            assert is_whole(found)
            loss = layer.loss(scores, found, kind="perceptron", **case.where)  # or it would raise
            assert torch.equal(layer.predict(scores, kind=kind, **case.where), found)
        best = layer.predict(scores, kind=kind, exact=True, **case.where)
        least = layer.loss(scores, best, kind="perceptron", **case.where)
        torch.testing.assert_close(loss, least, rtol=0, atol=1e-5)
        mapped = case.layer(eval_map=True).eval()
        mapped.load_state_dict(layer.state_dict())
        assert torch.equal(mapped(scores, **case.where), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeated_words(dtype):
    """Two of every word: all budgeted matchings have ties, and so do complete ones."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(20, 6, generator=generator, dtype=dtype)
    first = words[torch.randint(0, 20, (30, 3), generator=generator)].repeat(1, 2, 1)
    second = words[torch.randint(0, 20, (30, 7), generator=generator)]
    scores = first @ second.mT
    for layer in (fnn.Matching(complete=False, budget=0.5), fnn.Matching()):
        found = layer.predict(scores)
        assert is_whole(found) and found.dtype == dtype
        exact = layer.predict(scores, exact=True)
        value, best = ((scores - 0.5) * found).sum((1, 2)), ((scores - 0.5) * exact).sum((1, 2))
        torch.testing.assert_close(value, best, rtol=1e-5, atol=1e-5)


def test_only_what_is_fractional_is_solved_again(monkeypatch):
    sizes, solve = [], _engines.solve

    def spy(inputs, *arguments):
        sizes.append(inputs.batch)
        return solve(inputs, *arguments)

    monkeypatch.setattr(_engines, "solve", spy)
    scores = torch.tensor([[3.0, 1, 2, 0], [1, 1, 1, 0], [4, 3, 2, 1], [0, 2, 2, 2]])
    layer = fnn.KSubset(2)
    expected = torch.tensor([[1.0, 0, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]])
    assert torch.equal(layer.predict(scores), expected)
    assert sizes == [4, 2]
    sizes.clear()
    layer.predict(scores[::2])
    assert sizes == [2]


def test_no_gradient_and_no_complaint():
    scores = torch.ones(2, 4, requires_grad=True)
    value = fnn.KSubset(2, eval_map=True, on_failure="raise").eval()(scores)
    value.sum().backward()
    assert not scores.grad.any()


def frustrated(n=12):
    """Labels that repel each other: one half everywhere is far better than any structure."""
    layer = fnn.PairwiseMRF(n).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(-1 - torch.rand(parameter.shape, generator=generator))
    return layer, 2 + torch.rand(4, n, generator=generator, dtype=torch.float64)


def test_where_the_relaxation_is_not_tight():
    layer, scores = frustrated()
    assert is_whole(layer.predict(scores, kind="hinge"))
    assert torch.equal(
        layer.predict(scores, kind="hinge"), layer.predict(scores, kind="hinge", exact=True)
    )


def test_what_is_not_proved(monkeypatch):
    monkeypatch.setattr(whole, "_MOST_NODES", 1)
    monkeypatch.setattr("factormax.queries.decode.best_by_elimination", lambda *_: None)
    layer, scores = frustrated()
    with pytest.warns(fm.NotConvergedWarning, match="before any structure was proved"):
        found = layer.predict(scores, kind="hinge")
    assert is_whole(found)
    layer.on_failure = "raise"
    with pytest.raises(fm.NotConvergedError):
        layer.predict(scores, kind="hinge")
    layer.on_failure = "ignore"
    assert torch.equal(layer.predict(scores, kind="hinge"), found)
