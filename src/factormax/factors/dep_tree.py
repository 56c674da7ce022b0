"""Dependency trees."""

from __future__ import annotations

from typing import ClassVar

from factormax._core import OracleKind
from factormax.errors import GraphError, ShapeError
from factormax.factors.structured import StructuredFactor
from factormax.variable import Variable

__all__ = ["DepTree"]


class DepTree(StructuredFactor):
    """A dependency tree over n words: each has one head, another word or the root; no cycles.

    Args:
        u: `(n, n)`. `u[m, h]`: the head of word m is word h; `u[m, m]`: its head is the root. A
            word whose row is all masked is absent; a single masked entry is a forbidden arc.
        projective: no arcs may cross; the root stands to the left of the first word.
        single_root: exactly one word has the root as its head; otherwise several may.
        packed: must be True, which means the layout of `u` above.

    A budget on the modifiers of head h covers its column without the root arc:
    `fm.Budget([u[:h, h], u[h + 1:, h]], 3)`.

    If trees tie, the oracle always returns the same one, but which one is unspecified.

    Example:
        >>> import numpy as np, factormax as fm
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable_from(np.array([[2.0, 0.0, 0.0], [1.5, 0.0, 1.3], [0.0, 1.2, 0.0]]))
        >>> tree = fg.add(fm.DepTree(u))
        >>> _ = fg.solve()
        >>> tree.probs.round(3), tree.structures[0]
        (array([0.829, 0.086, 0.086]), array([[1., 0., 0.],
               [1., 0., 0.],
               [0., 1., 0.]]))
    """

    _axes: ClassVar[tuple[str, ...]] = ("n", "n")
    _options = ("projective", "single_root")

    def __init__(
        self,
        u: Variable,
        projective: bool = False,
        single_root: bool = False,
        packed: bool = True,
    ) -> None:
        self._take_structured(u)
        words, heads = self.variable_shape
        if words != heads:
            raise ShapeError(f"{self.name}: u must be square, (n, n), got {self.variable_shape}.")
        if not packed:
            raise GraphError(
                f"{self.name}: packed=False is not supported; u is (n, n) with the root arcs on "
                f"the diagonal."
            )
        self.projective, self.single_root = bool(projective), bool(single_root)
        # One word has only one tree, so it need not keep a graph from being solved by rows.
        eisner = self.projective and words > 1
        self._oracle = OracleKind.projective_tree if eisner else OracleKind.tree
        self._oracle_shape = (words, int(self.single_root))
        self._slots = words
