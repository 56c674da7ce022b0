"""Layers inside the transforms of torch, and exported."""

import io
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch.func import functional_call, grad, vmap  # noqa: E402

import factormax.nn as fnn  # noqa: E402

from .cases import CASES, TIGHT, every_case  # noqa: E402


def lengths_of(case):
    """As tensors, for `vmap` to go over."""
    return () if case.lengths is None else tuple(torch.tensor(side) for side in case.lengths)


def as_given(lengths):
    if not lengths:
        return {}
    return {"lengths": lengths[0] if len(lengths) == 1 else lengths}


@every_case
def test_gradients_of_each_sample(case):
    """Of all parameters and of the scores, in one call, as one at a time."""
    layer = case.layer(learn_temperature=True, **TIGHT)
    parameters = dict(layer.named_parameters())
    buffers = dict(layer.named_buffers())
    weight = torch.randn(case.shape[1:], dtype=torch.float64)

    def loss(parameters, scores, *lengths):
        state = (parameters, buffers)
        value = functional_call(layer, state, (scores,), as_given(lengths))
        return (value * weight).sum()

    scores, lengths = case.scores(), lengths_of(case)
    axes = (None, *[0] * (1 + len(lengths)))
    found = vmap(grad(loss, argnums=(0, 1)), in_dims=axes)(parameters, scores, *lengths)
    for i in range(len(scores)):
        alone = case.layer(learn_temperature=True, **TIGHT)
        own = scores[i].clone().requires_grad_()
        value = alone(own, **as_given([side[i] for side in lengths]))
        (value * weight).sum().backward()
        torch.testing.assert_close(found[1][i], own.grad, rtol=0, atol=1e-8)
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[0][name][i], parameter.grad, rtol=0, atol=1e-8)


def exported(layer, args, kwargs, **options):
    """Through a file, as another process would find it."""
    program = torch.export.export(layer, args, kwargs, **options)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize(
    "name",
    [
        "coarse matching, mixed",
        "sequential alignment",
        "tree",
        "k-subset",
        "at most k",
        "contiguous selection",
        "mrf with edges",
    ],
)
def test_export(name):
    """Of each layer, also for batches of other sizes, with and without lengths."""
    case = CASES[name]
    layer, scores = case.layer(), case.scores()
    batch = torch.export.Dim("batch", min=2, max=64)
    run = exported(layer, (scores,), {}, dynamic_shapes={"scores": {0: batch}})
    for size in (2, 5):
        more = torch.randn(size, *case.shape[1:], dtype=torch.float64)
        torch.testing.assert_close(run(more), layer(more))
    if case.lengths is not None:
        run = exported(layer, (scores,), case.where)
        torch.testing.assert_close(run(scores, **case.where), layer(scores, **case.where))


def test_what_a_process_that_loads_must_import(tmp_path):
    """The layers, and nothing else; the program can be differentiated there."""
    layer, scores = fnn.Matching("coarse"), torch.randn(3, 4, 5)
    program = torch.export.export(layer, (scores,))
    torch.export.save(program, tmp_path / "layer.pt2")
    torch.save((scores, layer(scores)), tmp_path / "numbers.pt")
    code = (
        "import sys, torch, factormax.nn; "
        "run = torch.export.load(sys.argv[1] + '/layer.pt2').module(); "
        "scores, expected = torch.load(sys.argv[1] + '/numbers.pt'); "
        "found = run(scores.requires_grad_()); torch.testing.assert_close(found, expected); "
        "found[0, 0, 0].backward(); assert scores.grad.isfinite().all()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=240)


def test_export_of_what_is_empty():
    """No edges: an array of no numbers is no constant of the program."""
    layer = fnn.PairwiseMRF(5, [])
    scores = torch.randn(3, 5)
    run = exported(layer, (scores,), {})
    torch.testing.assert_close(run(scores), layer(scores))


@pytest.mark.parametrize("name", ["tree", "k-subset"])
def test_export_of_other_lengths(name):
    case = CASES[name]
    layer, scores = case.layer(), case.scores()
    length = torch.export.Dim("length", min=3, max=64)
    axes = dict.fromkeys(range(1, scores.ndim), length)
    run = exported(layer, (scores,), {}, dynamic_shapes={"scores": axes})
    more = torch.randn(len(scores), *[9] * len(axes), dtype=torch.float64)
    torch.testing.assert_close(run(more), layer(more))
