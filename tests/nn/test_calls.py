"""What a call of a layer takes: masks and lengths to broadcast, counts, a temperature."""

import pytest

torch = pytest.importorskip("torch")

import factormax as fm  # noqa: E402
import factormax.nn as fnn  # noqa: E402

from .cases import every_case  # noqa: E402


def randn(*shape, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, **options)


def same(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=1e-9)


# Masks and lengths -------------------------------------------------------------------------------


@every_case
def test_masks_and_lengths_are_broadcast(case):
    if case.lengths is None:
        return
    layer, scores = case.layer(), torch.stack([case.scores(0), case.scores(1)])  # (2, batch, ...)
    expected = torch.stack([layer(s, **case.where) for s in scores])
    same(layer(scores, **case.where), expected)
    same(layer(scores, mask=case.present[None]), expected)
    sides = []
    for axis, lengths in enumerate(case.lengths, start=1):
        sides.append(torch.arange(case.shape[axis]) < torch.tensor(lengths)[:, None])
    same(layer(scores, mask=sides[0] if len(sides) == 1 else tuple(sides)), expected)
    # One for all instances.
    shortest = [min(lengths) for lengths in case.lengths]
    pair = len(shortest) == 2
    full = [torch.full(scores.shape[:2], length) for length in shortest]
    expected = layer(scores, lengths=tuple(full) if pair else full[0])
    same(layer(scores, lengths=tuple(shortest) if pair else shortest[0]), expected)
    masks = [torch.arange(case.shape[a + 1]) < n for a, n in enumerate(shortest)]
    same(layer(scores, mask=tuple(masks) if pair else masks[0]), expected)


def test_masks_of_three_sides():
    class Roles(fnn.StructuredLayer):
        axes = ("predicates", "spans", "roles")

        def add_factors(self, fg, u, present):
            fg.add(fm.AtMostOne(u, axis=2))

    scores, there = randn(2, 2, 3, 2), torch.tensor([True, True, False])
    message = r"Roles: .* as a tuple of 3, for \(predicates, spans, roles\), each of which may"
    with pytest.raises(fm.ShapeError, match=message):
        Roles()(scores, mask=there)
    assert not Roles()(scores + 1, mask=(None, there, None))[:, :, 2].any()


# Counts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [fnn.KSubset(4), fnn.AtMostK(4)])
@pytest.mark.parametrize("lengths", [None, [6, 4, 2]])
def test_k_of_a_call(layer, lengths):
    scores, make = randn(3, 6) + 2, type(layer)
    same(layer(scores, k=2, lengths=lengths), make(2)(scores, lengths=lengths))
    same(layer(scores, k=0.5, lengths=lengths), make(0.5)(scores, lengths=lengths))
    same(layer(scores, lengths=lengths), make(4)(scores, lengths=lengths))
    value = layer(scores, k=torch.tensor([1, 2, 3]), lengths=lengths)
    for i, k in enumerate([1, 2, 3]):
        own = None if lengths is None else lengths[i]
        same(value[i], make(k)(scores[i], lengths=own))
    same(layer(scores, k=torch.tensor(2)), make(2)(scores))
    same(
        layer.predict(scores, k=torch.tensor([1, 2, 3])).sum(dim=1),
        torch.tensor([1.0, 2, 3]).double(),
    )
    target = torch.zeros(3, 6).double()
    target[:, 0] = 1
    same(layer.loss(scores, target, k=1), make(1).loss(scores, target))
    for bad in (torch.tensor([1, 2]), torch.tensor([[1, 2, 3]])):
        with pytest.raises(fm.ShapeError, match="k must be broadcastable to the batch shape"):
            layer(scores, k=bad)
    same(layer(scores, k=torch.tensor([1.0, 2, 3]), lengths=lengths), value)
    for bad in (1.5, torch.nan, torch.inf, 2.0**31):
        with pytest.raises(fm.GraphError, match=r"k as a tensor must hold whole numbers, got \w"):
            layer(scores, k=torch.tensor([1.0, bad, 3.0]))
    counts, message = torch.tensor([1.0, 2, 3]), r"k must be whole numbers, got dtype torch\.float"
    with pytest.raises(fm.GraphError, match=message):
        torch.func.vmap(lambda s, k: layer(s, k=k))(scores, counts)
    with pytest.raises(fm.GraphError, match=message):
        layer(scores, k=counts.requires_grad_())
    with pytest.raises(fm.GraphError, match="k must be a non-negative whole number"):
        layer(scores, k=-1)
    with pytest.raises(TypeError, match="budget"):
        layer(scores, budget=1)


def test_k_above_the_size():
    same(
        fnn.KSubset(1)(randn(2, 3), k=torch.tensor([5, 2])).sum(1), torch.tensor([3.0, 2]).double()
    )


def test_budgets_of_a_call():
    scores, budgets = randn(3, 7), torch.tensor([1, 2, 3])
    select = fnn.ContiguousSelection(5, transition=0.5).double()
    pick = fnn.Matching(complete=False, budget=4)
    table = randn(3, 4, 5)
    selected, picked = select(scores, budget=budgets), pick(table, budget=budgets)
    for i in range(3):
        same(selected[i], select(scores[i], budget=i + 1))
        same(picked[i], fnn.Matching(complete=False, budget=i + 1)(table[i]))
    with pytest.raises(fm.GraphError, match="set complete=False"):
        fnn.Matching()(table, budget=2)


@pytest.mark.parametrize("lengths", [None, [7, 3, 1]])
def test_contiguous_selection_of_exactly_so_many(lengths):
    select = fnn.ContiguousSelection(2, transition=0.75, exactly=True).double()
    scores = randn(3, 7) - 3  # at most: none would be on
    value = select(scores, lengths=lengths)
    sizes = [2.0, 2, 2] if lengths is None else [2.0, 2, 1]
    torch.testing.assert_close(value.sum(1), torch.tensor(sizes).double(), rtol=0, atol=1e-6)
    assert "exactly=True" in repr(select)
    # The answer is the mixture of sequences of that size: by enumeration, the best of them.
    best = select.predict(scores, kind="perceptron", exact=True)
    on = torch.tensor([[i, j] for i in range(7) for j in range(i)])
    if lengths is None:
        gain = scores[:, on].sum(-1) + 0.75 * (on[:, 0] - on[:, 1] == 1)
        found = (best * scores).sum(1) + 0.75 * (best[:, 1:] * best[:, :-1]).sum(1)
        torch.testing.assert_close(found, gain.max(1).values, rtol=0, atol=1e-9)
    torch.autograd.gradcheck(lambda s: select(s, lengths=lengths), randn(3, 7, requires_grad=True))


# Temperature -------------------------------------------------------------------------------------


@every_case
def test_temperature_of_a_call(case):
    scores = case.scores()
    expected = case.layer(temperature=0.7)(scores, **case.where)
    layer = case.layer()
    same(layer(scores, temperature=0.7, **case.where), expected)
    same(layer(scores, temperature=torch.tensor(0.7, dtype=torch.float64), **case.where), expected)
    each = torch.tensor([0.7, 1.0, 2.0], dtype=torch.float64)
    value = layer(scores, temperature=each, **case.where)
    for i, t in enumerate(each.tolist()):
        corner = case.corner(i)
        same(value[i][corner], case.layer(temperature=t)(scores[i][corner]))
    predicted = layer.predict(scores, temperature=each, **case.where)
    for i, t in enumerate(each.tolist()):
        corner = case.corner(i)
        own = case.layer(temperature=t).predict(scores[i][corner])
        torch.testing.assert_close(predicted[i][corner], own, rtol=0, atol=1e-5)


@every_case
def test_a_learned_temperature(case):
    layer = case.layer(learn_temperature=True, tol=1e-12)
    with torch.no_grad():
        layer.temperature = 0.8
    assert "log_temperature" in dict(layer.named_parameters())
    assert "temperature=0.8, learn_temperature=True" in repr(layer)
    scores = case.scores()
    fixed = case.layer(temperature=0.8, tol=1e-12)
    fixed.load_state_dict({k: v for k, v in layer.state_dict().items() if k != "log_temperature"})
    same(layer(scores, **case.where), fixed(scores, **case.where))
    weights = case.scores(1)

    def total(log_temperature):
        with torch.no_grad():
            layer.log_temperature.copy_(log_temperature)
        return (layer(scores, **case.where) * weights).sum()

    start = layer.log_temperature.detach().clone()
    loss = total(start)
    if loss.requires_grad:
        (grad,) = torch.autograd.grad(loss, layer.log_temperature)
        ends = [total(start + step).item() for step in (1e-6, -1e-6)]
        assert abs((ends[0] - ends[1]) / 2e-6 - grad.item()) < 1e-5 * (1 + abs(grad.item()))
    if case.lengths is not None:  # what is masked by -inf has no part in it
        out = layer(scores.where(case.present, -torch.inf))
        (grad,) = torch.autograd.grad((out * weights).sum(), layer.log_temperature)
        assert grad.isfinite()


def test_losses_have_a_temperature():
    scores, target = randn(3, 6, requires_grad=True), torch.eye(6)[:3].double()
    t = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    layer = fnn.KSubset(1)
    found = layer.loss(scores, target, temperature=t)
    for i in range(3):
        same(found[i], fnn.KSubset(1, temperature=t[i].item()).loss(scores[i], target[i]))
    torch.autograd.gradcheck(lambda s, t: layer.loss(s, target, temperature=t), (scores, t))


def test_bad_temperatures():
    for bad in (0, -1.0, float("nan")):
        with pytest.raises(fm.GraphError, match="temperature must be positive"):
            fnn.KSubset(1)(randn(3), temperature=bad)
    with pytest.raises(fm.GraphError, match=r"KSubset: temperature must be a number.*learn_temp"):
        fnn.KSubset(1, temperature=torch.nn.Parameter(torch.ones(())))


def test_it_learns_a_temperature():
    """Marginals of half the spread: the temperature that gives them is found."""
    torch.manual_seed(0)
    scores = randn(20, 6)
    goal = fnn.KSubset(2, temperature=3.0)(scores)
    layer = fnn.KSubset(2, learn_temperature=True).double()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        ((layer(scores) - goal) ** 2).sum().backward()
        optimizer.step()
    assert layer.temperature.item() == pytest.approx(3, rel=1e-2)


# Options -----------------------------------------------------------------------------------------


def test_options_of_the_solve():
    scores = randn(2, 4, 4)
    expected = fnn.Matching()(scores)
    layer = fnn.Matching(method="admm", step_size=2.0, tol=1e-8, max_iter=10_000)
    torch.testing.assert_close(layer(scores), expected, rtol=0, atol=1e-5)
    limited = fnn.DependencyTree(max_inner_iter=1, on_failure="raise")
    with pytest.raises(fm.NotConvergedError):
        limited(randn(6, 6) * 0.1)
    with pytest.raises(fm.GraphError, match=r"Matching: method must be one of .*'simplex'"):
        fnn.Matching(method="simplex")
    assert fnn.Matching(method="admm", eval_map=True).eval()(scores).sum() == 8  # by LP-MAP


# Arguments by other names ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"length": 3},
            r"ContiguousSelection: a call takes no length\. Did you mean lengths\? It takes mask, "
            r"lengths, temperature, budget\.",
        ),
        ({"k": 2}, r"a call takes no k\. It takes mask, lengths, temperature, budget\."),
    ],
)
def test_a_call_names_what_it_takes(arguments, message):
    with pytest.raises(TypeError, match=f"{message}$"):
        fnn.ContiguousSelection(3)(randn(5), **arguments)


def test_losses_and_predictions_name_what_they_take():
    layer, scores = fnn.KSubset(1), randn(3)
    with pytest.raises(TypeError, match=r"KSubset: loss takes no knwn\. Did you mean known\?"):
        layer.loss(scores, torch.eye(3)[0], knwn=True)
    with pytest.raises(TypeError, match=r"KSubset: predict takes no cost\. It takes kind, mask"):
        layer.predict(scores, cost=1)


def test_a_layer_that_takes_any_argument():
    class Any(fnn.StructuredLayer):
        axes = ("n",)

        def add_factors(self, fg, u, present, **rest):
            fg.add(fm.Budget(u, rest["most"]))

    assert Any()(randn(4) + 3, most=2).sum() == pytest.approx(2)


def test_settings_of_a_subclass_are_named_with_those_of_its_base():
    class Few(fnn.KSubset):
        def __init__(self, colour, k=2, **settings):
            super().__init__(k, **settings)

    with pytest.raises(
        TypeError, match=r"Few has no setting temp\. .*It takes colour, k; and, like"
    ):
        Few("red", temp=1)
    message = r"transitions\. Did you mean transition\? It takes budget, transition, learn_trans"
    with pytest.raises(TypeError, match=message):
        fnn.ContiguousSelection(3, transitions=2.0)
