"""Drawings of solutions and graphs, with matplotlib: `pip install "factormax[plot]"`.

Every function takes an `ax` to draw into and returns the one it drew into; without one, it makes a
figure of a suitable size. Arrays may be NumPy, torch or JAX arrays, on any device. A variable may
be given instead, for its `value` from the last query, or a structured factor, for the values of its
variables. matplotlib is imported only when something is drawn.

- `marginals`: bars for a vector, a heat map for a matrix.
- `attention`: weights of queries over keys, and how much each key receives.
- `matching`: lines between two sets, as lists of labels or as points in the plane.
- `tree`: arcs over words.
- `structures`: the few structures that make up a solution, with their probabilities.
- `graph`: the factor graph itself. `to_dot` is the same as text for Graphviz.

Example:
    >>> import numpy as np, factormax as fm
    >>> fg = fm.FactorGraph()
    >>> u = fg.variable_from(np.array([[1.0, 0.9], [0.8, 0.1]]))
    >>> matching = fg.add(fm.Matching(u))
    >>> _ = fg.solve()
    >>> ax = fm.plot.marginals(u, rows=["Ann", "Ben"], columns=["left", "right"])
    >>> ax.figure.savefig("marginals.png")  # doctest: +SKIP
"""

from factormax.plot._dot import to_dot
from factormax.plot._graph import graph
from factormax.plot._matching import matching
from factormax.plot._matrix import attention, marginals
from factormax.plot._structures import structures
from factormax.plot._tree import tree

__all__ = ["attention", "graph", "marginals", "matching", "structures", "to_dot", "tree"]
