"""What every layer does: padding, gradients, dtypes, copies, MAP in eval, training."""

import copy
import pickle
import re
import warnings

import pytest

torch = pytest.importorskip("torch")

import factormax as fm  # noqa: E402
import factormax.nn as fnn  # noqa: E402

from .cases import CASES, TIGHT, every_case  # noqa: E402


def padded(case, seed=0, padding=torch.nan):
    """Scores with `padding` wherever nothing is."""
    return case.scores(seed).where(case.present, torch.tensor(padding, dtype=torch.float64))


# Padding -----------------------------------------------------------------------------------------


@every_case
def test_padding_changes_nothing(case):
    layer = case.layer(**TIGHT)
    scores = padded(case).requires_grad_()
    value = layer(scores, **case.where)
    weights = case.scores(1)
    (grad,) = torch.autograd.grad((value * weights).sum(), scores)
    assert value.shape == scores.shape
    assert not value[~case.present].any() and not grad[~case.present].any()
    for i in range(len(scores)):
        corner = case.corner(i)
        alone = scores[i][corner].detach().requires_grad_()
        own = layer(alone)  # without a batch
        (own_grad,) = torch.autograd.grad((own * weights[i][corner]).sum(), alone)
        torch.testing.assert_close(value[i][corner], own, rtol=0, atol=1e-9)
        torch.testing.assert_close(grad[i][corner], own_grad, rtol=0, atol=1e-8)


@every_case
def test_a_mask_and_lengths_and_minus_infinity_say_the_same(case):
    layer = case.layer()
    scores = padded(case, padding=0.7)
    expected = layer(scores, **case.where)
    masked = layer(scores, mask=case.present)
    torch.testing.assert_close(masked, expected, rtol=0, atol=0)
    out = layer(padded(case, padding=-torch.inf))
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@every_case
def test_masks_by_side(case):
    if case.lengths is None:
        return
    layer, scores = case.layer(), case.scores()
    expected = layer(scores, **case.where)
    sides = []
    for axis, lengths in enumerate(case.lengths, start=1):
        sides.append(torch.arange(case.shape[axis]) < torch.tensor(lengths)[:, None])
    mask = sides[0] if len(sides) == 1 else tuple(sides)
    torch.testing.assert_close(layer(scores, mask=mask), expected, rtol=0, atol=0)
    if len(sides) == 2:  # one way each
        both = layer(scores, mask=(sides[0], None), lengths=(None, case.lengths[1]))
        torch.testing.assert_close(both, expected, rtol=0, atol=0)


@every_case
def test_nothing_there(case):
    layer = case.layer()
    value = layer(case.scores(), mask=torch.zeros(case.shape, dtype=torch.bool))
    assert not value.any()


@every_case
def test_more_batch_dimensions(case):
    layer = case.layer()
    scores = torch.stack([case.scores(0), case.scores(1)], dim=1)  # (batch, 2, ...)
    where = case.where
    if "lengths" in where:
        given = where["lengths"]
        where["lengths"] = (
            tuple(g[:, None] for g in given) if isinstance(given, tuple) else given[:, None]
        )
    value = layer(scores, **where)
    for k in range(2):
        expected = layer(case.scores(k), **case.where)
        torch.testing.assert_close(value[:, k], expected, rtol=0, atol=1e-6)


# Gradients and dtypes ----------------------------------------------------------------------------


@every_case
def test_gradcheck(case):
    layer = case.layer(temperature=0.8, **TIGHT)
    names = [name for name, _ in layer.named_parameters()]

    def forward(scores, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, given, scores, case.where)

    scores = case.scores(3).requires_grad_()
    assert torch.autograd.gradcheck(forward, (scores, *layer.parameters()))


@every_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_dtype_of_the_scores(case, dtype):
    layer = case.layer().float()
    scores = case.scores().to(dtype).requires_grad_()
    value = layer(scores, **case.where)
    assert value.dtype == dtype
    wide = layer(scores.detach().double(), **case.where)
    atol = max(1e-5, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(value.detach().double(), wide, rtol=0, atol=atol)
    value.sum().backward()
    assert scores.grad.dtype == dtype
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


@every_case
def test_autocast(case):
    torch.manual_seed(0)
    layer = case.layer().float()
    network = torch.nn.Linear(case.shape[-1], case.shape[-1])
    x = case.scores().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = network(x)
        value = layer(scores, **case.where)
    assert scores.dtype == value.dtype == torch.bfloat16
    value.square().sum().backward()
    for parameter in [*network.parameters(), *layer.parameters()]:
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all()


@every_case
def test_temperature_divides_all_scores(case):
    cold, plain = case.layer(temperature=0.5), case.layer()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    scores = case.scores()
    value = cold(scores, **case.where)
    torch.testing.assert_close(value, plain(2 * scores, **case.where), rtol=0, atol=1e-9)
    plain.temperature, cold.temperature = 3, 1.5
    value = cold(scores, **case.where)
    torch.testing.assert_close(value, plain(2 * scores, **case.where), rtol=0, atol=1e-9)


# Copies ------------------------------------------------------------------------------------------


@every_case
def test_copies(case):
    layer = case.layer(temperature=0.7)
    scores = case.scores().requires_grad_()
    expected = layer(scores, **case.where)
    expected.sum().backward()  # whatever it keeps, it has now
    scores = scores.detach()
    fresh = case.make(temperature=0.7).double()
    fresh.load_state_dict(layer.state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        value = other(scores, **case.where)
        torch.testing.assert_close(value, expected.detach(), rtol=0, atol=0)
        assert repr(other) == repr(layer)
        for a, b in zip(other.parameters(), layer.parameters(), strict=True):
            assert a is not b


@every_case
def test_repr(case):
    layer = case.layer(temperature=0.25, eval_map=True)
    assert repr(layer).startswith(type(layer).__name__ + "(")
    assert "temperature=0.25" in repr(layer) and "eval_map=True" in repr(layer)
    assert "eval_map" not in repr(case.layer())


# MAP ---------------------------------------------------------------------------------------------


@every_case
def test_eval_can_switch_to_map(case):
    plain, layer = case.layer(), case.layer(eval_map=True)
    scores = case.scores()
    soft = plain(scores, **case.where)
    torch.testing.assert_close(layer(scores, **case.where), soft, rtol=0, atol=0)
    plain.eval(), layer.eval()
    torch.testing.assert_close(plain(scores, **case.where), soft, rtol=0, atol=0)
    best = layer(scores, **case.where)
    expected = plain.predict(scores, kind="perceptron", **case.where)
    torch.testing.assert_close(best, expected, rtol=0, atol=0)
    assert not torch.equal(best, soft)
    layer.train()
    torch.testing.assert_close(layer(scores, **case.where), soft, rtol=0, atol=0)


@every_case
def test_map_is_the_limit_of_low_temperature(case):
    scores = case.scores()
    cold = case.layer(temperature=1e-3)(scores, **case.where)
    best = case.layer().predict(scores, kind="hinge", **case.where)
    whole = ((cold - cold.round()).abs() < 1e-6).flatten(1).all(dim=1)  # the relaxation decides
    torch.testing.assert_close(cold[whole], best[whole], rtol=0, atol=1e-6)
    exact = case.layer().predict(scores, kind="hinge", exact=True, **case.where)
    for found in (best, exact):
        assert ((found == 0) | (found == 1)).all() and not found.requires_grad
    torch.testing.assert_close(exact[whole], best[whole], rtol=0, atol=0)


@every_case
def test_predictions_have_the_least_loss(case):
    """No other structure among the best ones of other scores has less."""
    layer, scores = case.layer(), case.scores()
    others = [layer.predict(case.scores(k), exact=True, **case.where) for k in range(10, 18)]
    for kind in ("sparsemap", "perceptron"):
        found = layer.predict(scores, kind=kind, exact=True, **case.where)
        least = layer.loss(scores, found, kind=kind, **case.where)
        for other in others:
            loss = layer.loss(scores, other, kind=kind, **case.where)
            assert (loss > least - 1e-6).all()


# Losses and training -----------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("kind", ["sparsemap", "hinge", "perceptron"])
def test_the_loss_lowers(case, kind):
    """Supervised by the best structures of other scores; ragged, but for the labels of an MRF."""
    layer = case.layer()
    target = case.layer().predict(case.scores(5), exact=True, **case.where)
    scores = case.scores().requires_grad_()
    optimizer = torch.optim.SGD([scores, *layer.parameters()], lr=0.3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = layer.loss(scores, target, kind=kind, **case.where)
        assert loss.shape == case.shape[:1] and (loss > -1e-6).all()
        loss.sum().backward()
        optimizer.step()
        losses.append(float(loss.detach().sum()))
    assert losses[-1] < 0.5 * losses[0]
    assert not scores.grad[~case.present].any()


@every_case
@pytest.mark.parametrize("kind", ["sparsemap", "hinge"])
def test_losses_of_a_padded_batch(case, kind):
    """Each is that of the instance alone, with costs, and where part of the target is not known."""
    layer = case.layer()
    scores = padded(case, padding=0.3)
    target = layer.predict(case.scores(5), exact=True, **case.where)
    known = case.scores(6) > 0
    cost = case.scores(7).abs() if kind == "hinge" else None
    for partial in (None, known):
        losses = layer.loss(scores, target, kind=kind, cost=cost, known=partial, **case.where)
        for i in range(len(scores)):
            given = {} if cost is None else {"cost": cost[i][case.corner(i)]}
            if partial is not None:
                given["known"] = known[i][case.corner(i)]
            corner = case.corner(i)
            alone = layer.loss(scores[i][corner], target[i][corner], kind=kind, **given)
            torch.testing.assert_close(losses[i], alone, rtol=0, atol=1e-5)


@every_case
def test_trains_as_a_hidden_layer(case):
    """A network learns to have its layer answer what another layer does; ragged batches."""
    torch.manual_seed(0)
    layer = case.layer()
    network = torch.nn.Sequential(
        torch.nn.Linear(case.shape[-1], 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, case.shape[-1]),
    ).double()
    x = case.scores(1)
    target = case.layer(temperature=0.5)(case.scores(2), **case.where)
    optimizer = torch.optim.Adam([*network.parameters(), *layer.parameters()], lr=0.03)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = (layer(network(x), **case.where) - target.detach()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


# What is wrong -----------------------------------------------------------------------------------


@every_case
def test_wrong_shapes(case):
    layer, name = case.layer(), type(case.layer()).__name__
    with pytest.raises(fm.ShapeError, match=rf"{name}: scores must have shape \(\*batch, "):
        layer(torch.zeros(()))
    with pytest.raises(fm.GraphError, match=f"{name} takes a torch tensor, got list"):
        layer([1.0, 2.0])
    with pytest.raises(fm.ShapeError, match=f"{name}: the mask must be broadcastable to"):
        layer(case.scores(), mask=torch.ones(*case.shape[:-1], 9, dtype=torch.bool))
    with pytest.raises(fm.GraphError, match=f"{name}: a mask must be boolean"):
        layer(case.scores(), mask=torch.ones(case.shape))
    with pytest.raises(fm.ShapeError, match=f"{name}: the target must have the shape"):
        layer.loss(case.scores(), torch.zeros(1, 1))
    pair = len(case.lengths or [()]) == 2
    with pytest.raises(fm.ShapeError, match=f"{name}: lengths must be broadcastable to the batch"):
        layer(case.scores(), lengths=([1, 1], None) if pair else [1, 1])
    with pytest.raises(fm.GraphError, match=r"lengths must be between 0 and .*, got 9"):
        layer(case.scores(), lengths=([1, 1, 9], None) if pair else [1, 1, 9])
    with pytest.raises(fm.GraphError, match="lengths must be whole numbers, got dtype"):
        layer(case.scores(), lengths=([1.5] * 3, None) if pair else [1.5] * 3)
    if pair:
        with pytest.raises(fm.ShapeError, match=r"as a tuple of 2, for \(m, n\), each"):
            layer(case.scores(), lengths=torch.tensor([1, 1, 1]))


@every_case
def test_nan_is_named(case):
    scores = case.scores()
    scores[1] = torch.nan
    with pytest.raises(ValueError, match=r"scores must be .*NaN"):
        case.layer()(scores)


def test_the_kind_of_a_prediction():
    with pytest.raises(fm.GraphError, match=r"KSubset: kind must be one of .*, got 'best'"):
        fnn.KSubset(1).predict(torch.zeros(3), kind="best")


@pytest.mark.parametrize("temperature", [0, -1.0, torch.inf, torch.nan])
def test_a_temperature_is_positive(temperature):
    for bad in (None, "x", [1.0, 2.0], 10**400, True):
        with pytest.raises(fm.GraphError, match="KSubset: temperature must be a positive number"):
            fnn.KSubset(2, temperature=bad)
    for bad in (None, "x", torch.inf):
        with pytest.raises(fm.GraphError, match="SequentialAlignment: transition must be a finite"):
            fnn.SequentialAlignment(bad)
    for word in ("mask", "lengths"):
        with pytest.raises(fm.GraphError, match=f"KSubset: {word} must hold numbers"):
            fnn.KSubset(2)(torch.zeros(1, 3), **{word: "x"})
    with pytest.raises(fm.GraphError, match="KSubset: temperature must be a positive number"):
        fnn.KSubset(1, temperature=temperature)
    layer = fnn.KSubset(1)
    with pytest.raises(fm.GraphError, match="temperature must be a positive number"):
        layer.temperature = temperature


def test_on_failure():
    layer = fnn.Matching(max_iter=1)
    scores = 5 * CASES["lp-matching"].scores()
    with pytest.warns(fm.NotConvergedWarning):
        layer(scores)
    layer.on_failure = "raise"
    with pytest.raises(fm.NotConvergedError):
        layer(scores)
    layer.on_failure = "ignore"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(scores)


def test_a_layer_without_factors():
    with pytest.raises(NotImplementedError, match="must define add_factors"):
        fnn.StructuredLayer()(torch.zeros(3))


# Compiled ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CASES if "mrf" not in name])
@pytest.mark.slow
def test_compile(name):
    case = CASES[name]
    torch._dynamo.reset()
    layer = case.layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for where in ({}, case.where):
        results = []
        for run in (layer, compiled):
            scores = case.scores().requires_grad_()
            value = run(scores, **where)
            value.square().sum().backward()
            results.append((value.detach(), scores.grad))
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"methd": "auto"}, TypeError, "Matching has no setting methd. Did you mean method?"),
        (
            {"colour": 1},
            TypeError,
            "Matching has no setting colour. It takes form, complete, budget; and, like all "
            "layers, temperature, learn_temperature, eval_map, method, tol,",
        ),
        ({"budgets": 1}, TypeError, "has no setting budgets. Did you mean budget? It takes form,"),
        ({"on_failure": "rise"}, fm.GraphError, "Matching: on_failure must be one of"),
        ({"tol": -1}, fm.GraphError, "Matching: tol must be a positive number, got -1"),
        ({"max_iter": 0.5}, fm.GraphError, "Matching: max_iter must be a whole number"),
    ],
)
def test_settings_are_checked_when_a_layer_is_made(settings, error, message):
    with pytest.raises(error, match=re.escape(message)):
        fnn.Matching(**settings)
