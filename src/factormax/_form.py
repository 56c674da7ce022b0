"""What graphs that are built alike have in common: everything but the numbers.

A training loop builds the same graph again and again. Its form is worked out once, and then looked
up by the shapes of its variables and scores and by its factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from factormax._core import Model
from factormax._layout import Layout
from factormax._model import Remembered, is_large, model_of

if TYPE_CHECKING:
    from factormax.factors.structured import StructuredFactor
    from factormax.graph import FactorGraph

__all__ = ["Form", "form_of"]


class Form:
    """The model of a graph, and its layout. It holds no reference to the graph.

    Attributes:
        model: the compiled model.
        layout: where the variables and scores are in the flat arrays.
        places: for each structured factor, which of the core's factors it is.
        slots: for each structured factor of the core, the most variables a structure has on.
        groups: for each structured factor, the shape that `axis` leaves.
    """

    def __init__(
        self, model: Model, layout: Layout, structured: Sequence[StructuredFactor]
    ) -> None:
        self.model, self.layout = model, layout
        self.places: list[range] = []
        self.slots: list[int] = []
        for f in structured:
            self.places.append(range(len(self.slots), len(self.slots) + f._count))
            self.slots += [f._slots] * f._count
        self.groups = [f._group_shape for f in structured]


_remembered: Remembered[Form] = Remembered(64)


def form_of(graph: FactorGraph) -> Form:
    """The form of a graph.

    Raises:
        GraphError: if its factors do not fit together, or it has no variables.
    """
    parts, factors, structured = graph._score_parts(), graph._factors, graph._structured
    key = (
        graph._known_batch_shape(),
        tuple([t.shape for t in graph._tensors]),
        tuple([f._key for f in factors]),
        tuple([(p.shape, p.own_shape, tuple(p.given.shape)) for p in parts]) if parts else (),
        tuple([f._group_shape for f in structured]) if structured else (),
    )
    found = _remembered.get(key)
    if found is None:
        model = model_of(graph._num_variables, factors)
        found = Form(model, Layout.of(graph), structured)
        if not is_large(factors):
            _remembered.keep(key, found)
    return found
