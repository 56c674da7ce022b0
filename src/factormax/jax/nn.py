"""The layers of `factormax.nn` as functions of JAX arrays: scores in, LP-SparseMAP marginals out.

What is learned there (a transition, the scores of pairs, a temperature) is an argument here, to be
kept among the parameters of a flax, equinox or haiku module.

All functions take `mask` (boolean, in the shape of the scores, True for what is present; or, for
scores of pairs, a tuple of two, for rows and columns), `temperature` (a number, or broadcastable to
the batch) and the options of `FactorGraph.solve`. Shapes are `(*batch, ...)`; inside `vmap` there
is no batch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from factormax.arrays import is_jax
from factormax.errors import GraphError, ShapeError
from factormax.factors import (
    AtMostOne,
    Budget,
    DepTree,
    Exactly,
    Pair,
    Sequence,
    SequenceBudget,
    Xor,
)
from factormax.factors import Matching as MatchingFactor
from factormax.graph import FactorGraph
from factormax.variable import Variable

__all__ = [
    "at_most_k",
    "contiguous_selection",
    "dependency_tree",
    "k_subset",
    "matching",
    "pairs_present",
    "pairwise_mrf",
    "present",
    "sequential_alignment",
]


def present(lengths: Any, size: int) -> jax.Array:
    """The mask that lengths, `(*batch,)`, stand for: `(*batch, size)`.

    Example:
        >>> import factormax.jax
        >>> factormax.jax.nn.present([1, 3], 3).tolist()
        [[True, False, False], [True, True, True]]
    """
    return jnp.arange(size) < jnp.asarray(lengths)[..., None]


def pairs_present(rows: Any, columns: Any) -> jax.Array:
    """The mask of all pairs of present rows and present columns: `(*batch, m, n)`.

    Args:
        rows: `(*batch, m)`, boolean.
        columns: `(*batch, n)`, boolean.
    """
    return jnp.asarray(rows)[..., :, None] & jnp.asarray(columns)[..., None, :]


def matching(
    scores: jax.Array,
    *,
    mask: Any = None,
    form: str = "lp",
    complete: bool = True,
    budget: Any = None,
    temperature: Any = None,
    **options: Any,
) -> jax.Array:
    r"""Matches rows and columns one to one, `(*batch, m, n)`: see `factormax.nn.Matching`.

    The shorter side of each instance is matched completely.

    Args:
        scores: `(*batch, m, n)`.
        mask: which pairs are present; `pairs_present` makes it from both sides.
        form: "lp", an `Xor` for each row and an `AtMostOne` for each column, or "coarse", a single
            `Matching` factor.
        complete: False: rows may stay unmatched too. Only for "lp".
        budget: the most pairs to match, a number or one for each instance; a float is that fraction
            of the shorter side, rounded up. Only with `complete=False`.
        temperature: what all scores are divided by.
        **options: passed on to `FactorGraph.solve`.

    Example:
        >>> import jax, jax.numpy as jnp, factormax.jax
        >>> scores = jnp.array([[1.0, 0.9], [0.8, 0.1]])
        >>> jax.jit(factormax.jax.nn.matching)(scores).round(2).tolist()
        [[0.3..., 0.6...], [0.6..., 0.3...]]
    """
    if form not in ("lp", "coarse"):
        raise GraphError(f'matching: form must be "lp" or "coarse", got {form!r}.')
    if form == "coarse" and not complete:
        raise GraphError('matching: complete=False needs form="lp".')
    if budget is not None and complete:
        raise GraphError("matching: for a budget, set complete=False.")
    here = _here("matching", scores, mask, 2)
    if complete:
        side = _ShorterFirst(scores, here)
        fg, u = _graph(side.apply(scores), None if here is None else side.apply(here), 2)
        if form == "coarse":
            fg.add(MatchingFactor(u))
        else:
            fg.add(Xor(u, axis=1))
            fg.add(AtMostOne(u, axis=0))
        return side.undo(_solved(fg, u, temperature, options))
    fg, u = _graph(scores, here, 2)
    fg.add(AtMostOne(u, axis=1))
    fg.add(AtMostOne(u, axis=0))
    if budget is not None:
        shorter: Any = min(u.shape)
        if here is not None:
            shorter = jnp.minimum(*[here.any(axis).sum(-1) for axis in (-1, -2)])
        fg.add(Budget(u, _count("matching", "budget", budget, shorter, min(u.shape))))
    return _solved(fg, u, temperature, options)


def sequential_alignment(
    scores: jax.Array,
    transition: Any,
    *,
    mask: Any = None,
    symmetric: bool = True,
    temperature: Any = None,
    **options: Any,
) -> jax.Array:
    """Aligns neighbours preferably with neighbours: see `factormax.nn.SequentialAlignment`.

    Args:
        scores: `(*batch, m, n)`.
        transition: a score, added whenever the alignment goes from (i, j) to (i + 1, j ± 1).
        mask: which pairs are present. Absent words must come last.
        symmetric: False: only j + 1 after j counts.
        temperature: what all scores are divided by.
        **options: passed on to `FactorGraph.solve`.

    Returns:
        The marginals, `(*batch, m, n)`.
    """
    here = _here("sequential_alignment", scores, mask, 2)
    side = _ShorterFirst(scores, here)
    fg, u = _graph(side.apply(scores), None if here is None else side.apply(here), 2)
    state = np.arange(u.shape[1])
    step = state - state[:, None]  # [from, to]
    near = np.abs(step) == 1 if symmetric else step == 1
    fg.add(Sequence(u, jnp.asarray(transition) * near))
    fg.add(AtMostOne(u, axis=0))
    return side.undo(_solved(fg, u, temperature, options))


def dependency_tree(
    scores: jax.Array,
    *,
    mask: Any = None,
    projective: bool = False,
    single_root: bool = False,
    valency: int | None = None,
    temperature: Any = None,
    **options: Any,
) -> jax.Array:
    """A head for every word: see `factormax.nn.DependencyTree`.

    Args:
        scores: `(*batch, n, n)`; `scores[m, h]` scores word h as the head of word m, and
            `scores[m, m]` the root as its head.
        mask: which arcs are allowed; the tuple `(words, words)` allows those between present words.
        projective: no arcs may cross.
        single_root: exactly one word has the root as its head.
        valency: no word may have more modifiers than this.
        temperature: what all scores are divided by.
        **options: passed on to `FactorGraph.solve`.

    Returns:
        The marginals, `(*batch, n, n)`.
    """
    fg, u = _graph(scores, _here("dependency_tree", scores, mask, 2), 2)
    fg.add(DepTree(u, projective=projective, single_root=single_root))
    n = u.shape[0]
    if valency is not None and n > 1:
        head, other = np.arange(n), np.arange(n - 1)[:, None]
        fg.add(Budget(u[other + (other >= head), head], valency, axis=0))
    return _solved(fg, u, temperature, options)


def k_subset(
    scores: jax.Array, k: Any, *, mask: Any = None, temperature: Any = None, **options: Any
) -> jax.Array:
    """Selects exactly k, or all if fewer are present: see `factormax.nn.KSubset`.

    Args:
        scores: `(*batch, n)`.
        k: a number, or one for each instance; a float is that fraction of the length, rounded up.
        mask: which entries are present.
        temperature: what all scores are divided by.
        **options: passed on to `FactorGraph.solve`.

    Returns:
        The marginals, `(*batch, n)`.

    Example:
        >>> import jax, jax.numpy as jnp, factormax.jax
        >>> factormax.jax.nn.k_subset(jnp.array([0.9, 0.8, 0.6, -1.0]), 2).round(1).tolist()
        [0.8..., 0.6..., 0.5, 0.0]
    """
    here = _here("k_subset", scores, mask, 1)
    fg, u = _graph(scores, here, 1)
    there = u.size if here is None else here.sum(-1)
    fg.add(Exactly(u, _smaller(_count("k_subset", "k", k, there, u.size), there)))
    return _solved(fg, u, temperature, options)


def at_most_k(
    scores: jax.Array, k: Any, *, mask: Any = None, temperature: Any = None, **options: Any
) -> jax.Array:
    """Selects at most k, those with high enough scores: see `factormax.nn.AtMostK`.

    The arguments are those of `k_subset`.
    """
    here = _here("at_most_k", scores, mask, 1)
    fg, u = _graph(scores, here, 1)
    there = u.size if here is None else here.sum(-1)
    fg.add(Budget(u, _count("at_most_k", "k", k, there, u.size)))
    return _solved(fg, u, temperature, options)


def contiguous_selection(
    scores: jax.Array,
    budget: Any,
    transition: Any,
    *,
    mask: Any = None,
    exactly: bool = False,
    temperature: Any = None,
    **options: Any,
) -> jax.Array:
    """Selects a few positions, preferably neighbours: see `factormax.nn.ContiguousSelection`.

    Args:
        scores: `(*batch, n)`.
        budget: how many, like `k` of `k_subset`.
        transition: the score of two neighbours.
        mask: which positions are present; a gap separates its neighbours.
        exactly: select exactly `budget`, or all if fewer are present.
        temperature: what all scores are divided by.
        **options: passed on to `FactorGraph.solve`.

    Returns:
        The marginals, `(*batch, n)`.
    """
    here = _here("contiguous_selection", scores, mask, 1)
    fg, u = _graph(scores, here, 1)
    there = u.size if here is None else here.sum(-1)
    number = _count("contiguous_selection", "budget", budget, there, u.size)
    fg.add(SequenceBudget(u, transition, number))
    if exactly:
        fg.add(Exactly(u, _smaller(number, there)))
    return _solved(fg, u, temperature, options)


def pairwise_mrf(
    scores: jax.Array,
    weight: Any,
    edges: Any = None,
    *,
    mask: Any = None,
    temperature: Any = None,
    **options: Any,
) -> jax.Array:
    """Labels with a score for every pair of them: see `factormax.nn.PairwiseMRF`.

    Args:
        scores: `(*batch, labels)`.
        weight: `(edges,)`, the scores of pairs of labels that are both on.
        edges: `(edges, 2)`, whole numbers that are known while tracing; by default all pairs of
            labels, in the order of `np.triu_indices(labels, 1)`.
        mask: which labels are present.
        temperature: what all scores are divided by.
        **options: passed on to `FactorGraph.solve`.

    Returns:
        The marginals, `(*batch, labels)`.
    """
    fg, u = _graph(scores, _here("pairwise_mrf", scores, mask, 1), 1)
    if edges is None:
        first, second = np.triu_indices(u.size, 1)
    else:
        pairs = np.asarray(edges, np.int64).reshape(-1, 2)
        first, second = pairs[:, 0], pairs[:, 1]
    if jnp.shape(weight)[-1:] != (len(first),):
        raise ShapeError(
            f"pairwise_mrf: weight must have shape ({len(first)},), one for each edge, got "
            f"{jnp.shape(weight)}."
        )
    if len(first):
        fg.add(Pair(u[first], u[second], weight))
    return _solved(fg, u, temperature, options)


# ---- What they share -----------------------------------------------------------------------------


def _here(name: str, scores: Any, mask: Any, axes: int) -> jax.Array | None:
    """Which variables are present, in the shape of the scores; None for all of them."""
    if not is_jax(scores):
        raise GraphError(f"{name} takes a JAX array, got {type(scores).__name__}.")
    if scores.ndim < axes:
        raise ShapeError(
            f"{name}: scores must have {axes} dimensions after those of the batch, got shape "
            f"{scores.shape}."
        )
    if mask is None:
        return None
    if isinstance(mask, tuple) and len(mask) == axes == 2:  # one for each side
        mask = pairs_present(*mask)
    given = jnp.asarray(mask)
    if given.dtype != bool:
        raise GraphError(f"{name}: the mask must be boolean, got dtype {given.dtype}.")
    try:
        return jnp.broadcast_to(given, scores.shape)
    except ValueError:
        both = "; pairs_present makes it from masks of the rows and columns" if axes == 2 else ""
        raise ShapeError(
            f"{name}: the mask must be broadcastable to {scores.shape}, got {given.shape}{both}."
        ) from None


def _graph(scores: jax.Array, here: jax.Array | None, axes: int) -> tuple[FactorGraph, Variable]:
    fg = FactorGraph(batch_dims=scores.ndim - axes)
    return fg, fg.variable_from(scores, mask=here, name="scores")


def _solved(fg: FactorGraph, u: Variable, temperature: Any, options: dict[str, Any]) -> jax.Array:
    fg.solve(temperature=temperature, **options)
    marginals: Any = u.value
    return marginals  # type: ignore[no-any-return]


class _ShorterFirst:
    """Makes rows the shorter side of every instance, by transposing those with more rows.

    With a mask, whose numbers may be traced, all instances are padded to a square.
    """

    def __init__(self, scores: jax.Array, here: jax.Array | None) -> None:
        self.rows, self.columns = scores.shape[-2:]
        self.flip: Any = self.rows > self.columns
        if here is not None:
            rows, columns = (here.any(axis).sum(-1) for axis in (-1, -2))
            self.flip = (rows > columns)[..., None, None]

    def apply(self, x: jax.Array) -> jax.Array:
        """Transposes where there are more rows than columns."""
        if isinstance(self.flip, bool):
            return jnp.swapaxes(x, -1, -2) if self.flip else x
        size = max(self.rows, self.columns)
        more = [(0, 0)] * (x.ndim - 2) + [(0, size - self.rows), (0, size - self.columns)]
        square = jnp.pad(x, more)  # with 0, or False
        return jnp.where(self.flip, jnp.swapaxes(square, -1, -2), square)

    def undo(self, x: jax.Array) -> jax.Array:
        """Transposes back."""
        if isinstance(self.flip, bool):
            return jnp.swapaxes(x, -1, -2) if self.flip else x
        square = jnp.where(self.flip, jnp.swapaxes(x, -1, -2), x)
        return square[..., : self.rows, : self.columns]


def _count(name: str, word: str, given: Any, there: Any, most: int) -> Any:
    """The number that a count means if `there` of `most` are present, `(*batch,)` or a number.

    A fraction is rounded up (0.1 of 30 is 3, although the product of the floats is above 3).
    """
    if not isinstance(given, float):
        if jnp.issubdtype(jnp.result_type(given), jnp.floating):
            raise GraphError(
                f"{name}: {word} as an array must have an integer dtype, got "
                f"{jnp.result_type(given)}. For a fraction of the length, pass a Python float."
            )
        return given
    if not 0 < given <= 1:
        raise GraphError(
            f"{name}: {word} must be a whole number, or a fraction of the length (a float above 0 "
            f"and at most 1), got {given}."
        )
    rounded = np.ceil(given * np.arange(most + 1) - 1e-9).astype(np.int32)  # in float64
    return int(rounded[there]) if isinstance(there, int) else jnp.asarray(rounded)[there]


def _smaller(number: Any, there: Any) -> Any:
    """The smaller of the two, per instance if either of them is."""
    if isinstance(number, int) and isinstance(there, int):
        return min(number, there)
    return jnp.minimum(jnp.asarray(number), there)
