"""The plan of an eager solve: its task, and how to get from tensors to numbers and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from factormax import _engines
from factormax._fronts.torch.arrays import (
    Kind,
    device_numbers,
    numbers_of,
    plain_numbers_of,
)
from factormax._options import Options
from factormax._task import Gradients, Task

if TYPE_CHECKING:
    from factormax.graph import FactorGraph

__all__ = ["EagerPlan", "given_scores"]


def given_scores(graph: FactorGraph) -> list[Any]:
    """The scores of a graph as given: those of variables, then those of factors."""
    given = [t.scores for t in graph._tensors]
    if graph._parts is None or graph._parts:
        given += [p.given for p in graph._score_parts()]
    return given


class Pattern:
    """Which of the scores of a graph are tensors, and of which kinds.

    Args:
        default: the default dtype, which marginals of integer scores have.
        *places: the device and the dtype of each tensor; None for scores that are not tensors.
    """

    def __init__(self, default: torch.dtype, *places: Any) -> None:
        given = [None if place is None else Kind.of(*place) for place in places]
        kinds = [kind for kind in given if kind is not None]
        wide = any([kind.dtype == torch.float64 for kind in kinds])
        self.places = [i for i, kind in enumerate(given) if kind is not None]
        self.all_tensors = len(kinds) == len(given)
        self.kinds = kinds  # of the tensors
        self.outputs = [kind or kinds[0] for kind in given]  # of the values
        self.dtype = torch.float64 if wide else torch.float32  # of the computation
        self.numpy_dtype: Any = np.float64 if wide else np.float32
        self.is_cpu = kinds[0].is_cpu
        self.device = "cpu" if self.is_cpu else str(kinds[0].device)
        plain = all([k.is_cpu and k.same and k.dtype == self.dtype for k in kinds])
        #: The numbers of a tensor in the dtype of the computation, on the CPU.
        self.numbers: Callable[[Tensor], Any] = (
            plain_numbers_of if plain else partial(numbers_of, dtype=self.dtype)
        )
        #: The same on the device.
        self.numbers_there = partial(device_numbers, kinds[0].device, self.dtype)
        #: Turn computed numbers into the values, and into the gradients of the tensors.
        self.values: list[Callable[[Any], Tensor]] = [
            torch.from_numpy if plain else kind.tensor for kind in self.outputs
        ]
        self.gradients: list[Callable[[Any], Tensor]] = [
            torch.from_numpy if plain else kind.tensor for kind in kinds
        ]


_remembered_pattern = lru_cache(maxsize=256)(Pattern)


def _pattern_of(given: Sequence[Any]) -> Pattern:
    """The pattern of these scores."""
    places = [(s.device, s.dtype) if isinstance(s, Tensor) else None for s in given]
    return _remembered_pattern(torch.get_default_dtype(), *places)


class EagerPlan:
    """The task of an eager solve, and what turns its numbers into tensors.

    Autograd keeps it with the values, so it must refer neither to them nor to the graph.

    Args:
        graph: the graph to solve.
        given: its scores, see `given_scores`.
        options: the options of the query.
        temperature: an array, a tensor that may require a gradient, or None.
        stays: whether to stay on the device of the scores, if there is an engine.
    """

    constants: Sequence[tuple[int, Any]] = ()  # scores that are not tensors, and their places
    temperature: Any = None  # if it is not a tensor
    #: Whether the backward pass needs tensors, to be differentiated or to notice changes.
    kept: bool = False

    def __init__(
        self,
        graph: FactorGraph,
        given: Sequence[Any],
        options: Options,
        temperature: Any = None,
        stays: bool = False,
    ) -> None:
        self.options = options
        self.num_tensors = first = len(graph._tensors)
        self.pattern = pattern = _pattern_of(given)
        self.gradients = pattern.gradients  # of the inputs
        #: The numbers of a tensor, on the device and in the dtype of the computation.
        self.numbers = pattern.numbers
        engine = None
        if stays and not pattern.is_cpu:
            model, oracles = graph._form().model, bool(graph._own_oracles())
            engine = _engines.engine_there(model, options, pattern.device, oracles)
            if engine is not None:
                self.numbers = pattern.numbers_there
        if options.surrogate is not None:
            self.kept = True
        if temperature is not None:
            temperature = self._take_temperature(temperature, engine is None)
        if pattern.all_tensors:
            arrays = list(map(self.numbers, given))
        else:
            arrays = self._with_constants(given)
        scores, own = arrays[:first], arrays[first:]
        numbers = graph, scores, own, pattern.numpy_dtype, temperature, pattern.device
        self.task: Task = Task(*numbers) if engine is None else _task_there()(engine, *numbers)

    def inputs_of(self, given: list[Any], temperature: Any) -> list[Tensor]:
        """The tensors among the arguments, which may require gradients."""
        inputs = given if self.pattern.all_tensors else [given[i] for i in self.pattern.places]
        return [*inputs, temperature] if isinstance(temperature, Tensor) else inputs

    def outputs(self) -> list[Tensor]:
        """The values of variables and factors."""
        found, make = self.task.values(), self.pattern.values
        if len(make) > len(found):
            found += self.task.factor_values()
        return [make[i](value) for i, value in enumerate(found)]

    def cast(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Values that were computed in float64, cast like the scores."""
        kinds = self.pattern.outputs
        return [kind.tensor(t) for kind, t in zip(kinds, tensors, strict=True)]

    def gradients_of(self, grads: Gradients, wanted: Sequence[bool]) -> list[Any]:
        """The gradients of the scores, in the dtype and on the device of their tensors."""
        found: list[Any] = grads.variables + grads.factors
        if not self.pattern.all_tensors:
            found = [found[i] for i in self.pattern.places]
        if grads.temperature is not None:
            found.append(grads.temperature)
        make = self.gradients
        return [make[i](found[i]) if want else None for i, want in enumerate(wanted)]

    def _take_temperature(self, temperature: Any, here: bool) -> Any:
        """The numbers of the temperature, which may require a gradient if it is a tensor."""
        if not isinstance(temperature, Tensor):
            self.temperature = temperature
            return temperature
        self.kept = True
        kind = Kind.of(temperature.device, temperature.dtype)
        self.gradients = [*self.gradients, kind.tensor]
        return numbers_of(temperature, torch.float64) if here else temperature.detach()

    def _with_constants(self, given: Sequence[Any]) -> list[Any]:
        """The numbers of all scores, including those that are not tensors."""
        dtype = self.pattern.numpy_dtype
        arrays = [
            self.numbers(s) if isinstance(s, Tensor) else s if s is None else np.asarray(s, dtype)
            for s in given
        ]
        tensors = self.pattern.places
        self.constants = [
            (i, array) for i, array in enumerate(arrays) if array is not None and i not in tensors
        ]
        return arrays


@cache
def _task_there() -> Any:
    """The class of tasks on a device, which most processes never see."""
    from factormax._fronts.torch.device import DeviceTask

    return DeviceTask
