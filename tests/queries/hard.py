"""Graphs whose relaxation says little, made from a seed."""

import numpy as np

import factormax as fm
from factormax._fronts.numpy import start


def prepared(fg):
    """The inputs of a graph, as the queries take them."""
    return start(fg).inputs


def dense_pairs(seed, n=40):
    """All pairs of n variables."""
    rng = np.random.default_rng(seed)
    first, second = np.triu_indices(n, 1)
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros(n))
    fg.add(fm.Pair(u[first], u[second], rng.normal(size=len(first))))
    return fg


def bipartite_pairs(seed, m=30, n=50):
    """A restricted Boltzmann machine."""
    rng = np.random.default_rng(seed)
    fg = fm.FactorGraph()
    u, v = fg.variable_from(rng.normal(size=m)), fg.variable_from(rng.normal(size=n))
    i, j = np.indices((m, n)).reshape(2, -1)
    fg.add(fm.Pair(u[i], v[j], rng.normal(size=m * n)))
    return fg


def grid(seed, size=25):
    """A spin glass, too wide for elimination: w (2x − 1) (2y − 1) for neighbours x and y."""
    rng = np.random.default_rng(seed)
    right, down = rng.normal(size=(size, size - 1)), rng.normal(size=(size - 1, size))
    eta = np.zeros((size, size))
    for at, w in (((0, 1), right), ((1, 0), down)):
        eta[: size - at[0], : size - at[1]] -= 2 * w
        eta[at[0] :, at[1] :] -= 2 * w
    fg = fm.FactorGraph()
    u = fg.variable_from(eta)
    fg.add(fm.Pair(u[:, :-1], u[:, 1:], 4 * right))
    fg.add(fm.Pair(u[:-1], u[1:], 4 * down))
    return fg


def quadratic_assignment(seed, n=6):
    """Rows and columns, and a score for every two pairs."""
    rng = np.random.default_rng(seed)
    fg = fm.FactorGraph()
    u = fg.variable_from(rng.normal(size=n * n))
    cells = np.arange(n * n).reshape(n, n)
    fg.add(fm.Xor(u[cells], axis=1))
    fg.add(fm.Xor(u[cells], axis=0))
    first, second = np.triu_indices(n * n, 1)
    apart = (first // n != second // n) & (first % n != second % n)
    fg.add(fm.Pair(u[first[apart]], u[second[apart]], rng.normal(size=apart.sum())))
    return fg


def tables(seed, groups=12, states=4):
    """Groups of states in a random graph of tables."""
    rng = np.random.default_rng(seed)
    fg = fm.FactorGraph()
    u = fg.variable_from(rng.normal(size=(groups, states)))
    for a, b in zip(*np.triu_indices(groups, 1), strict=True):
        if rng.random() < 0.4:
            fg.add(fm.Table([u[int(a)], u[int(b)]], 2 * rng.normal(size=(states, states))))
    return fg


def tagged(seed, steps=12, tags=4):
    """A sequence whose tags have pairs and budgets beside it."""
    rng = np.random.default_rng(seed)
    fg = fm.FactorGraph()
    u = fg.variable_from(rng.normal(size=(steps, tags)))
    fg.add(fm.Sequence(u, rng.normal(size=(tags, tags))))
    fg.add(fm.Budget(u, 3, axis=0))
    fg.add(fm.Pair(u[:-3], u[3:], 2 * rng.normal(size=(steps - 3, tags))))
    return fg


HARD = {
    f.__name__: f
    for f in (dense_pairs, bipartite_pairs, grid, quadratic_assignment, tables, tagged)
}
