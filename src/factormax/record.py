"""What the variables and factors of a graph know about it.

They refer to this record rather than to the graph, which refers to them. So there are no cycles,
and a graph is freed as soon as nobody holds it; a training loop, which builds one at each step,
would otherwise pay for the garbage collector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from factormax.arrays import Array, may_be_traced
from factormax.errors import GraphError

if TYPE_CHECKING:
    from factormax.factors.base import BaseFactor
    from factormax.factors.scores import Scores
    from factormax.factors.structured import StructuredFactor
    from factormax.graph import FactorGraph
    from factormax.variable import Variable

__all__ = ["Record", "VariableTensor"]


@dataclass(eq=False)
class VariableTensor:
    """A whole tensor of variables, as it was given."""

    name: str
    start: int  # in the graph's list of variables
    size: int
    shape: tuple[int, ...]  # without batch dimensions
    scores: Any  # (*batch, *shape), or None for zero scores
    mask: Any  # broadcastable to that, or None


class Record:
    """The variables of a graph, and the answers of the last query."""

    values: Sequence[Any] | None = None  # one per tensor of variables
    factor_values: Sequence[Any] = ()  # one for each of the `scored`
    scored: Sequence[Scores] = ()  # the factors' own scores
    structures: Sequence[Any] = ()  # one per structured factor that was added
    #: The graph, if a compiled function solved it: it is solved again to list structures.
    compiled: FactorGraph | None = None

    def __init__(self, batch_dims: int) -> None:
        self.batch_dims = batch_dims
        self.batch_shape: tuple[int, ...] | None = None if batch_dims else ()
        self.tensors: list[VariableTensor] = []
        self.made: list[BaseFactor] = []  # factors over the variables, not added yet

    @property
    def num_variables(self) -> int:
        """How many binary variables there are."""
        return sum([t.size for t in self.tensors])

    def expect_no_more_of(self, factor: BaseFactor) -> None:
        """Keeps queries from warning that this factor was never added."""
        self.made[:] = [f for f in self.made if f is not factor]

    def value_of(self, variable: Variable) -> Any:
        """The marginals of a variable; see `Variable.value`."""
        if self.values is None or variable.position >= len(self.values):
            raise GraphError(f"{variable.name} has no value yet: call fg.solve() first.")
        value = self.values[variable.position]
        if variable.keys:
            tensor = self.tensors[variable.position]
            batch = value.shape[: self.batch_dims]
            value = value.reshape((*batch, tensor.size))[..., variable.index - tensor.start]
        return 1 - value if variable.negated else value

    def factor_value_of(self, factor: BaseFactor) -> Array:
        """The marginals of a factor's scores; see `BaseFactor.value`."""
        own = factor._score_parts[0]
        for place, scores in enumerate(self.scored):
            if scores is own:
                return self.factor_values[place]  # type: ignore[no-any-return]
        raise GraphError(
            f"{factor.name} has no value yet: call fg.solve() after adding it to the graph."
        )

    def listed(self, factor: StructuredFactor, what: str) -> Any:
        """What a structured factor returns for "structures", "probs" or "num_structures"."""
        if may_be_traced():
            from factormax._fronts.torch import untraced

            return untraced.listed(self, factor, what)
        return getattr(self.answer_of(factor), what)

    def answer_of(self, factor: StructuredFactor) -> Any:
        """What the last query found for a structured factor."""
        place = factor._place
        if place is None or place >= len(self.structures):
            raise GraphError(
                f"{factor.name} has no structures yet: call fg.solve() after adding it to the "
                f"graph."
            )
        if self.structures[place] is None:  # found by a compiled solve, which does not list them
            assert self.compiled is not None
            self.compiled._front().list_structures(self.compiled)
        return self.structures[place]
