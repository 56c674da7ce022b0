"""`factormax.jax.nn`: each function is the layer of `factormax.nn`."""

import numpy as np
import pytest

import factormax as fm

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import factormax.jax.nn as fjn  # noqa: E402
import factormax.nn as fnn  # noqa: E402

ROWS, COLUMNS = np.array([5, 2, 1]), np.array([3, 5, 4])
PAIRS = {"mask": fjn.pairs_present(fjn.present(ROWS, 5), fjn.present(COLUMNS, 6))}
WORDS = {"mask": fjn.pairs_present(fjn.present(ROWS, 5), fjn.present(ROWS, 5))}
LINE = {"mask": fjn.present(ROWS, 6)}
EDGES = [(0, 1), (3, 2), (0, 5)]

#: The function, its arguments, the layer, what is learned, and the shape of the scores.
CASES = [
    (fjn.matching, (), {}, fnn.Matching(), None, (5, 3)),
    (fjn.matching, (), PAIRS, fnn.Matching(), None, (3, 5, 6)),
    (fjn.matching, (), {"form": "coarse", **PAIRS}, fnn.Matching("coarse"), None, (3, 5, 6)),
    (
        fjn.matching,
        (),
        {"complete": False, "budget": 0.4, **PAIRS},
        fnn.Matching(complete=False, budget=0.4),
        None,
        (3, 5, 6),
    ),
    (fjn.sequential_alignment, (0.5,), PAIRS, fnn.SequentialAlignment(0.5), None, (3, 5, 6)),
    (
        fjn.sequential_alignment,
        (0.5,),
        {"symmetric": False},
        fnn.SequentialAlignment(0.5, symmetric=False),
        None,
        (4, 3),
    ),
    (
        fjn.dependency_tree,
        (),
        {"valency": 1, **WORDS},
        fnn.DependencyTree(valency=1),
        None,
        (3, 5, 5),
    ),
    (
        fjn.dependency_tree,
        (),
        {"projective": True, "single_root": True},
        fnn.DependencyTree(projective=True, single_root=True),
        None,
        (4, 4),
    ),
    (fjn.k_subset, (0.5,), LINE, fnn.KSubset(0.5), None, (3, 6)),
    (fjn.k_subset, (4,), LINE, fnn.KSubset(4), None, (3, 6)),
    (fjn.at_most_k, (2,), {}, fnn.AtMostK(2), None, (3, 6)),
    (
        fjn.contiguous_selection,
        (0.5, 0.3),
        {"exactly": True, **LINE},
        fnn.ContiguousSelection(0.5, transition=0.3, exactly=True),
        None,
        (3, 6),
    ),
    (
        fjn.pairwise_mrf,
        (jnp.array([0.5, -0.3, 0.2]), EDGES),
        {},
        fnn.PairwiseMRF(6, EDGES),
        [0.5, -0.3, 0.2],
        (3, 6),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__} {case[5]}")
def test_it_is_the_layer(case):
    function, args, options, layer, weight, shape = case
    scores = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    if weight is not None:
        layer.weight.data = torch.tensor(weight)
    mask = options.get("mask")
    given = {} if mask is None else {"mask": torch.tensor(np.asarray(mask))}
    exact = layer(torch.tensor(scores), temperature=0.8, **given).detach()
    own = {k: v for k, v in options.items() if k != "mask"}
    found = function(jnp.asarray(scores), *args, mask=mask, temperature=0.8, **own)
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_masks_and_counts_may_be_traced():
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 6)), jnp.float32)

    def both(scores, mask, k):
        matched = fjn.matching(scores, mask=mask)
        return matched, fjn.k_subset(scores[:, 0], k, mask=mask.any(1))

    k = jnp.array([1, 4, 9])
    for value, exact in zip(
        jax.jit(both)(scores, PAIRS["mask"], k), both(scores, PAIRS["mask"], k), strict=True
    ):
        np.testing.assert_allclose(value, exact, atol=1e-6)


def test_a_mask_may_be_one_for_each_side():
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 5)), jnp.float32)
    words = fjn.present(ROWS, 5)
    found = fjn.dependency_tree(scores, mask=(words, words))
    np.testing.assert_array_equal(found, fjn.dependency_tree(scores, **WORDS))
    with pytest.raises(fm.ShapeError, match="pairs_present"):
        fjn.dependency_tree(scores, mask=words)


def test_what_is_refused():
    scores = jnp.zeros((3, 4))
    for call, message in [
        (lambda: fjn.matching(np.zeros((3, 4))), "matching takes a JAX array, got ndarray"),
        (lambda: fjn.matching(scores[0]), "must have 2 dimensions"),
        (lambda: fjn.matching(scores, form="dense"), "form must be"),
        (lambda: fjn.matching(scores, budget=2), "set complete=False"),
        (lambda: fjn.matching(scores, mask=scores), "mask must be boolean"),
        (lambda: fjn.matching(scores, mask=scores[:, :2] == 0), "mask must be broadcastable"),
        (lambda: fjn.k_subset(scores, 1.5), "fraction of the length"),
        (lambda: jax.jit(fjn.k_subset)(scores, 0.5), "an integer dtype, got float"),
        (lambda: fjn.pairwise_mrf(scores, jnp.zeros(3)), "weight must have shape"),
    ]:
        with pytest.raises(fm.GraphError, match=message):
            call()
