"""A factor graph as text for Graphviz."""

from __future__ import annotations

from typing import TYPE_CHECKING

from factormax._names import scalar_name
from factormax.plot._layout import squares_of

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["to_dot"]


def to_dot(graph: FactorGraph) -> str:
    """A factor graph in the DOT language of Graphviz; `fg.to_dot()` is the same.

    Variables are circles, and factors squares; the edge of a negated variable ends in a hollow dot.
    Draw it with `neato -Tsvg`, for example.

    Args:
        graph: the graph.

    Returns:
        The text; the same graph always gives the same text.

    Example:
        >>> import numpy as np, factormax as fm
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable_from(np.zeros(2))
        >>> _ = fg.add(fm.Imply(u[0], ~u[1]))
        >>> print(fm.plot.to_dot(fg))
        graph factormax {
          node [fontname="sans-serif"];
          v0 [shape=circle, label="u[0]"];
          v1 [shape=circle, label="u[1]"];
          f0 [shape=square, label="Imply"];
          f0 -- v0;
          f0 -- v1 [arrowhead=odot, dir=forward];
        }
    """
    lines = ['node [fontname="sans-serif"];']
    for i in range(graph._num_variables):
        lines.append(f"v{i} [shape=circle, label={_quoted(scalar_name(graph._record, i))}];")
    for k, square in enumerate(squares_of(graph)):
        lines.append(f"f{k} [shape=square, label={_quoted(square.label)}];")
        for i, negated in zip(square.members, square.negated, strict=True):
            lines.append(f"f{k} -- v{i}{' [arrowhead=odot, dir=forward]' if negated else ''};")
    return "\n".join(["graph factormax {", *[f"  {line}" for line in lines], "}"])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
