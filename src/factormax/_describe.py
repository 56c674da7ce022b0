"""Descriptions of graphs: the reprs of factors, and `fg.summary()`."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from factormax.arrays import is_hidden, library_of, to_numpy

if TYPE_CHECKING:
    from factormax.factors.base import BaseFactor
    from factormax.graph import FactorGraph
    from factormax.record import VariableTensor

__all__ = ["counted", "factor_settings", "graph_label", "shown_numbers", "summary"]

_MOST_SHOWN = 6  # the most numbers of a parameter that are written out


def counted(count: int, word: str) -> str:
    """A count with its noun, for example "1 factor" or "3 factors"."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def shown_numbers(given: Any) -> str:
    """A parameter in a few characters: a number, a short list, or the range of a long one."""
    if is_hidden(given):
        return "traced"
    numbers = np.atleast_1d(to_numpy(given)).ravel()
    if numbers.size == 0:
        return "[]"
    if numbers.size > 1 and (numbers == numbers[0]).all():
        numbers = numbers[:1]
    if numbers.size == 1:
        return _short(numbers[0])
    if numbers.size <= _MOST_SHOWN:
        return f"[{', '.join(map(_short, numbers))}]"
    return f"{_short(numbers.min())} to {_short(numbers.max())}"


def _short(number: Any) -> str:
    return f"{float(number):.4g}"


def factor_settings(factor: BaseFactor) -> list[str]:
    """The axis, the parameters, the options and the shapes of the scores of a factor."""
    texts = [] if factor._axis is None else [f"axis={factor._axis}"]
    names = list(factor._param_shapes)
    for name, value in zip(names, factor._params, strict=False):
        unbounded = isinstance(value, float) and np.isinf(value)
        texts += [] if unbounded else [f"{name}={shown_numbers(value)}"]
    texts += [option for option in factor._options if getattr(factor, option)]
    for part in factor._score_parts:
        shape = tuple(part.given.shape)
        own = f" {shape}" if shape else f"={shown_numbers(part.given)}"
        texts.append(part.label + own)
    return texts


def graph_label(factor: BaseFactor, row: int) -> str:
    """The label of a factor in a drawing: its kind, and its number if any, as in "Budget 2"."""
    if list(factor._param_shapes.values()) != ["factor"] or is_hidden(*factor._params):
        return factor.kind
    numbers = np.atleast_2d(to_numpy(factor._params[0]))
    own = numbers[:, row if numbers.shape[1] > 1 else 0]
    return f"{factor.kind} {_short(own[0])}" if (own == own[0]).all() else factor.kind


def summary(graph: FactorGraph) -> str:
    """The tables of `fg.summary()`."""
    count = sum(f._count for f in graph._factors)
    title = f"{counted(graph._num_variables, 'variable')}, {counted(count, 'factor')}"
    if graph.batch_dims:
        batch = "of unknown shape" if graph.batch_shape is None else graph.batch_shape
        title += f", batch {batch}"
    variables = [_variable_line(t) for t in graph._tensors]
    factors = _factor_lines(graph._factors)
    heads = ("variable", "shape", "scores", "masked"), ("factor", "over", "count", "size", "with")
    tables = [_table(*pair) for pair in zip(heads, (variables, factors), strict=True) if pair[1]]
    return "\n\n".join([title, *tables])


def _variable_line(tensor: VariableTensor) -> tuple[str, ...]:
    scores, mask = tensor.scores, tensor.mask
    kind = "zeros"
    if scores is not None:
        library = library_of(scores).split()[0]
        kind = f"{library} {str(scores.dtype).removeprefix('torch.')}"
        if getattr(scores, "requires_grad", False):
            kind += ", with gradient"
    off = "none"
    if mask is not None:
        off = "traced"
        if not is_hidden(mask):
            full = np.broadcast_to(to_numpy(mask), tuple(scores.shape))
            off = f"{int((~full).sum())} of {full.size}"
    return tensor.name, str(tensor.shape), kind, off


def _factor_lines(factors: list[BaseFactor]) -> list[tuple[str, ...]]:
    """One line per call; consecutive calls that differ only in their variables share one."""

    def likeness(factor: BaseFactor) -> tuple[Any, ...]:
        return factor.kind, factor._size, factor_settings(factor)

    lines: list[tuple[str, ...]] = []
    for (kind, size, settings), alike in groupby(factors, likeness):
        group = list(alike)
        names = [f._variables_name for f in group]
        over = _cut(names[0]) if len(names) == 1 else f"{_cut(names[0])} … {_cut(names[-1])}"
        count = sum(f._count for f in group)
        lines.append((kind, over, str(count), str(size), ", ".join(settings)))
    return lines


def _cut(name: str) -> str:
    """Shortens a name: arrays of indices make long ones."""
    return name if len(name) <= 30 else name[:29] + "…"


def _table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """A table with columns as wide as their longest entry, and numbers aligned right."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    right = [all(line[c].isdigit() for line in lines) for c in range(len(head))]
    rows = []
    for line in [head, *lines]:
        cells = [
            text.rjust(width) if flush else text.ljust(width)
            for text, width, flush in zip(line, widths, right, strict=True)
        ]
        rows.append("  ".join(cells).rstrip())
    return "\n".join([rows[0], "  ".join("─" * w for w in widths), *rows[1:]])
