"""Graphs of which the batch shares some factor scores, made again with repeated ones."""

import sys

import numpy as np

import factormax as fm

BATCH = 150
TOLERANCE = {np.float32: 1e-4, np.float64: 1e-11}


def labels(fg, draw):
    """One connected graph of pairs: most of them shared."""
    u = fg.variable_from(draw(BATCH, 8), name="u")
    i, j = np.triu_indices(8, 1)
    yield u
    yield fg.add(fm.Pair(u[i], u[j], draw(len(i))))
    yield fg.add(fm.Pair(u[:3], u[3:6].negate(), draw(BATCH, 3)))
    yield fg.add(fm.Pair(u[1:4], u[5:8], draw(1)))  # one score of all pairs
    fg.add(fm.Budget(u, 3))


def many(fg, draw):
    """So many shared scores that gradients are summed over blocks of several instances."""
    u = fg.variable_from(draw(BATCH, 48), name="u")
    i, j = np.triu_indices(48, 1)
    yield u
    yield fg.add(fm.Pair(u[i], u[j], draw(len(i))))
    yield fg.add(fm.Pair(u[:3], u[3:6], draw(BATCH, 3)))


def sequences(fg, draw):
    """Shared transitions, beside scores of the ends per instance."""
    u = fg.variable_from(draw(BATCH, 5, 3), name="u")
    yield u
    yield fg.add(fm.Sequence(u, draw(3, 3), initial=draw(BATCH, 3), final=draw(3)))
    fg.add(fm.AtMostOne(u[:, 0]))


def components(fg, draw):
    """Parts that are solved one by one; their scores are not side by side."""
    u = fg.variable_from(draw(BATCH, 12, 3), name="u")
    yield u
    fg.add(fm.Xor(u, axis=1))
    for k in range(0, 12, 2):
        yield fg.add(fm.Table([u[k], u[k + 1]], draw(3, 3) if k % 4 else draw(BATCH, 3, 3)))
    yield fg.add(fm.Pair(u[0::4, 0], u[1::4, 1], draw(3)))
    yield fg.add(fm.Pair(u[2::4, 0], u[3::4, 1], draw(BATCH, 3)))


def one_row(fg, draw):
    """Shared scores that have a batch dimension of 1."""
    u = fg.variable_from(draw(BATCH, 6), name="u")
    yield u
    yield fg.add(fm.Pair(u[:3], u[3:], draw(1, 3)))
    yield fg.add(fm.Pair(u[:-1], u[1:], draw(BATCH, 1)))
    fg.add(fm.Xor(u))


def all_shared(fg, draw):
    """Nothing but shared scores."""
    u = fg.variable_from(draw(BATCH, 6), name="u")
    yield u
    yield fg.add(fm.Pair(u[:-1], u[1:], draw(5)))
    yield fg.add(fm.Table([u[:2], u[2:4]], draw(2, 2)))
    fg.add(fm.Xor(u[4:]))


MODELS = [labels, many, sequences, components, one_row, all_shared]
DTYPES = [np.float64, np.float32]


class Drawn:
    """Draws scores; made again, or repeated for every instance, they are the same numbers."""

    def __init__(self, dtype, repeated=False, convert=np.asarray):
        self.rng = np.random.default_rng(3)
        self.dtype, self.repeated, self.convert = dtype, repeated, convert
        self.given = []  # what was handed out: whether it is shared

    def __call__(self, *shape):
        array = self.rng.normal(size=shape).astype(self.dtype)
        if self.repeated and shape[0] == 1 and len(shape) > 1:
            array = np.repeat(array, BATCH, axis=0)
        elif self.repeated and shape[0] != BATCH:
            array = np.broadcast_to(array, (BATCH, *shape)).copy()
        self.given.append(self.convert(array))
        return self.given[-1]


def made(model, dtype=np.float64, repeated=False, convert=np.asarray, mask=None):
    """The graph, its variable and its factors with scores, and all scores."""
    draw = Drawn(dtype, repeated, convert)
    fg = fm.FactorGraph(batch_dims=1)
    if mask is not None:
        plain = fg.variable_from
        fg.variable_from = lambda scores, name: plain(scores, mask=mask, name=name)
    u, *factors = model(fg, draw)
    return fg, u, factors, draw.given


def both(model, dtype, **options):
    return [made(model, dtype, repeated, **options) for repeated in (False, True)]


def assert_same(found, expected):
    """Bit for bit."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def assert_sums(found, expected, dtype):
    """Gradients in the shape of the scores, of the same numbers as those of each instance."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape == expected.shape:
        return assert_same(found, expected)
    assert found.dtype == expected.dtype
    total = expected.astype(np.float64).sum(axis=0).reshape(found.shape)
    atol = TOLERANCE[dtype] * max(1, np.abs(expected).sum(axis=0).max())
    np.testing.assert_allclose(found, total, rtol=0, atol=atol)


def tensor_of(array):
    return sys.modules["torch"].tensor(array, requires_grad=True)
