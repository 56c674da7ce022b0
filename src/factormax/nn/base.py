"""What the layers share: the graph of a forward pass, temperature, MAP in eval, and losses."""

from __future__ import annotations

import difflib
import inspect
import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from factormax._options import METHODS
from factormax.arrays import is_tensor
from factormax.checks import positive_number
from factormax.errors import GraphError, ShapeError
from factormax.graph import FactorGraph, checked_options
from factormax.nn.layout import Layout
from factormax.nn.padding import Lengths, Mask, presence
from factormax.queries.loss import KINDS
from factormax.variable import Variable

__all__ = ["StructuredLayer"]

_SOLVE = ("method", "tol", "max_iter", "max_inner_iter", "step_size", "on_failure")


class StructuredLayer(nn.Module):
    r"""Scores in, LP-SparseMAP marginals out; the base class of all layers, your own included.

    $$\max_\mu\; \tfrac1T \big(\eta \cdot \mu + \sum_f \eta_f \cdot \mu_f\big) - \tfrac12\|\mu\|^2$$

    A subclass names its `axes` and adds, in `add_factors`, the constraints on the variables. The
    graph lives only as long as the forward pass: a layer keeps only numbers and parameters, so it
    can be copied, pickled, saved and distributed like any other.

    Args:
        temperature: T; divides all scores, learned ones too. Towards 0 the answer becomes a single
            structure. It may be set again later, to anneal. `forward` and `loss` also take one for
            that call: a number, or a tensor broadcastable to the batch, which may require a
            gradient.
        learn_temperature: learn the temperature, starting from the one given, as the parameter
            `log_temperature`.
        eval_map: in eval mode, return the structure with the highest score,
            `predict(scores, kind="perceptron")`. It switches on every entry that adds to the score,
            even one whose marginal is small; `predict` without `kind` switches on from 1/2.
        tol, max_iter, on_failure: see `FactorGraph.solve`.
        method, max_inner_iter, step_size: see `FactorGraph.solve`.

    Shapes:
        scores and marginals `(*batch, *axes)`, of the same dtype and device.

    Example:
        A layer that picks one entry per row, and at most three entries outside the first column:

        >>> import torch, factormax as fm, factormax.nn
        >>> class FewOthers(fm.nn.StructuredLayer):
        ...     axes = ("rows", "columns")
        ...
        ...     def add_factors(self, fg, u, present):
        ...         fg.add(fm.Xor(u, axis=1))
        ...         fg.add(fm.Budget(u[:, 1:], budget=3))
        >>> layer = FewOthers(temperature=0.5)
        >>> marginals = layer(torch.randn(2, 6, 4), lengths=([6, 5], None))
        >>> marginals.shape, marginals.sum(dim=(1, 2)).round(decimals=3)
        (torch.Size([2, 6, 4]), tensor([6., 5.]))
    """

    #: What the axes of the scores count, after the batch dimensions. Axes with the same name share
    #: masks and lengths.
    axes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        learn_temperature: bool = False,
        eval_map: bool = False,
        method: str = "auto",
        tol: float = 1e-6,
        max_iter: int = 10_000,
        max_inner_iter: int = 100_000,
        step_size: float = 1.0,
        on_failure: str = "warn",
        **unknown: Any,
    ) -> None:
        super().__init__()
        for word in unknown:
            shared = _named(StructuredLayer.__init__)
            classes = type(self).__mro__[: type(self).__mro__.index(StructuredLayer)]
            makers = [vars(c)["__init__"] for c in classes if "__init__" in vars(c)]
            own = list(dict.fromkeys(name for make in makers for name in _named(make)))
            own = [name for name in own if name not in shared]
            hint = _did_you_mean(word, own + shared)
            own_list = f" {', '.join(own)}; and" if own else ""
            raise TypeError(
                f"{self._name} has no setting {word}.{hint} It takes{own_list}, like all layers, "
                f"{', '.join(shared)}."
            )
        if method not in METHODS:
            raise GraphError(
                f"{self._name}: method must be one of {sorted(METHODS)}, got {method!r}."
            )
        try:
            checked_options(method, tol, max_iter, max_inner_iter, step_size, on_failure)
        except ValueError as error:
            raise GraphError(f"{self._name}: {error}") from None
        if is_tensor(temperature):
            raise GraphError(
                f"{self._name}: temperature must be a number. To learn it, set "
                f"learn_temperature=True, or pass a tensor to the call."
            )
        self.log_temperature: nn.Parameter | None = None
        if learn_temperature:
            self.log_temperature = nn.Parameter(torch.zeros(()))
        self.temperature = temperature
        self.eval_map = bool(eval_map)
        self.method = method
        self.tol = tol
        self.max_iter = max_iter
        self.max_inner_iter = max_inner_iter
        self.step_size = step_size
        self.on_failure = on_failure

    #: The names of the extra arguments of `add_factors`; None if it takes any.
    _changes: ClassVar[list[str] | None] = []

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        kinds = [p.kind for p in inspect.signature(cls.add_factors).parameters.values()]
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        cls._changes = None if takes_all else _named(cls.add_factors)[3:]  # after fg, u, present

    @property
    def temperature(self) -> Any:
        """The number that the scores are divided by, or a tensor if it is learned."""
        return self._temperature if self.log_temperature is None else self.log_temperature.exp()

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        number = positive_number(f"{self._name}: temperature", temperature, GraphError)
        if self.log_temperature is None:
            self._temperature = number
        else:
            with torch.no_grad():
                self.log_temperature.fill_(math.log(number))

    # ---- queries ---------------------------------------------------------------------------------

    def forward(
        self,
        scores: Tensor,
        *,
        mask: Mask = None,
        lengths: Lengths = None,
        temperature: float | Tensor | None = None,
        **changes: Any,
    ) -> Tensor:
        """The marginals, `(*batch, *axes)`; in eval mode with `eval_map`, the best structure.

        Args:
            scores: `(*batch, *axes)`.
            mask: boolean, True for what is present: with as many dimensions as the scores, or
                broadcastable to `(*batch, size)`, for the words, steps or elements; a tuple of
                these if the scores have several sides.
            lengths: how many are present, broadcastable to the batch, instead of a mask or together
                with one; a tuple of these if the scores have several sides.
            temperature: replaces the layer's in this call.
            **changes: settings of the layer to replace in this call, such as `k`: any that its
                `add_factors` takes.
        """
        fg, u, layout = self._build("forward", scores, mask, lengths, changes)
        if self.eval_map and not self.training:
            fg._solve_whole(**self._options("tol", "max_iter", "max_inner_iter", "on_failure"))
        else:
            fg.solve(**self._options(*_SOLVE), temperature=self._temperature_of(temperature))
        return layout.undo(u.value)

    def loss(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        kind: Literal["sparsemap", "perceptron", "hinge"] = "sparsemap",
        cost: float | Tensor | None = None,
        mask: Mask = None,
        lengths: Lengths = None,
        known: Tensor | None = None,
        temperature: float | Tensor | None = None,
        **changes: Any,
    ) -> Tensor:
        """How far the scores are from preferring the target, `(*batch,)`: see `FactorGraph.loss`.

        Args:
            scores: `(*batch, *axes)`.
            target: a 0/1 structure of the same shape; 0 where masked.
            kind: "sparsemap", "hinge" or "perceptron".
            cost: the cost of an entry that differs, used only by "hinge": a number (1 by default),
                or one for each entry, broadcastable to the target.
            mask: as in `forward`.
            lengths: as in `forward`.
            known: boolean, broadcastable to the target; False where the target is not known.
            temperature: as in `forward`.
            **changes: as in `forward`.

        Raises:
            GraphError: if the target is not a structure of the layer.
        """
        fg, u, layout = self._build("loss", scores, mask, lengths, changes)
        if tuple(target.shape) != tuple(scores.shape):
            raise ShapeError(
                f"{self._name}: the target must have the shape of the scores, "
                f"{tuple(scores.shape)}, got {tuple(target.shape)}."
            )
        if isinstance(cost, Tensor):
            cost = layout.apply(cost.expand(target.shape))
        if known is not None:
            known = layout.apply(known.expand(target.shape))
        targets = {u: layout.apply(target)}
        losses = fg.loss(
            targets,
            kind,
            cost=cost,
            mask=known,
            **self._options("tol", "max_iter", "on_failure"),
            temperature=self._temperature_of(temperature),
        )
        return losses  # type: ignore[no-any-return]

    @torch.no_grad()
    def predict(
        self,
        scores: Tensor,
        *,
        kind: Literal["sparsemap", "perceptron", "hinge"] = "sparsemap",
        mask: Mask = None,
        lengths: Lengths = None,
        exact: bool = False,
        temperature: float | Tensor | None = None,
        **changes: Any,
    ) -> Tensor:
        r"""The structure with the least loss, `(*batch, *axes)`, without gradients.

        For "hinge" and "perceptron" this is the best structure (MAP). "sparsemap" pulls the score
        of an entry to 1 if it is on and to 0 if it is off, so it decides at ½: it takes the
        structure y with the greatest score minus ½‖y‖². Where all structures have the same number
        of entries on, as trees do, the two agree.

        Args:
            scores: `(*batch, *axes)`.
            kind: the loss it was trained with.
            mask: as in `forward`.
            lengths: as in `forward`.
            exact: False: solve the relaxation (LP-MAP). If several structures tie, the same one of
                them is returned each time; within a lone row or selection, entries that come first
                win. If the relaxation is not tight, a short search follows; if that proves nothing,
                the best structure found is returned, and `on_failure` decides whether to warn or to
                raise. True: search for as long as it takes (`FactorGraph.decode`).
            temperature: as in `forward`; it matters only for "sparsemap".
            **changes: as in `forward`.
        """
        if kind not in KINDS:
            raise GraphError(f"{self._name}: kind must be one of {KINDS}, got {kind!r}.")
        less: float | Tensor = 0.0
        if kind == "sparsemap":  # the scores are not divided by T, so subtract T times as much
            given = self._temperature_of(temperature)
            less = 0.5 if given is None else 0.5 * given
        fg, u, layout = self._build("predict", scores, mask, lengths, changes, less)
        if exact:
            fg.decode(**self._options("tol", "max_iter", "on_failure"))
        else:
            fg._solve_whole(**self._options("tol", "max_iter", "max_inner_iter", "on_failure"))
        return layout.undo(u.value)

    # ---- for subclasses --------------------------------------------------------------------------

    def add_factors(self, fg: FactorGraph, u: Variable, present: Tensor | None) -> None:
        """Adds the constraints on the variables.

        Args:
            fg: the graph, with all dimensions of the batch.
            u: the variables, in the shape of `axes`.
            present: which of them are present, `(*batch, *axes)`; None for all.

        A subclass may take more arguments, by name, with defaults: `forward` passes them on.
        """
        raise NotImplementedError(f"{self._name} must define add_factors(self, fg, u, present).")

    def layout(self, scores: Tensor, present: Tensor | None) -> Layout:
        """How the scores are laid out for the graph; by default as they are."""
        return Layout()

    def check_scores(self, scores: Tensor) -> None:
        """Raises unless the scores have the right shape."""
        if not isinstance(scores, Tensor):
            raise GraphError(f"{self._name} takes a torch tensor, got {type(scores).__name__}.")
        shape, axes = tuple(scores.shape), self.axes
        if len(shape) < len(axes):
            raise ShapeError(f"{self._name}: scores must have shape {self._wanted}, got {shape}.")
        sizes: dict[str, int] = {}
        for axis, size in zip(axes, shape[len(shape) - len(axes) :], strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ShapeError(
                    f"{self._name}: scores must be square, {self._wanted}, got {shape}."
                )

    def _build(
        self,
        query: str,
        scores: Tensor,
        mask: Mask,
        lengths: Lengths,
        changes: dict[str, Any],
        less: float | Tensor = 0.0,
    ) -> tuple[FactorGraph, Variable, Layout]:
        """The graph of these scores minus `less`, its variables, and their layout."""
        for word in changes:
            if self._changes is not None and word not in self._changes:
                raise self._unknown_change(query, word)
        self.check_scores(scores)
        present = presence(self._name, scores, self.axes, mask, lengths)
        layout = self.layout(scores, present)
        own_mask = None if present is None else layout.apply(present)
        fg = FactorGraph(batch_dims=scores.ndim - len(self.axes))
        own_scores = layout.apply(scores)
        if isinstance(less, Tensor):
            own_scores = own_scores - less.to(scores).reshape(*less.shape, *[1] * len(self.axes))
        elif less != 0:
            own_scores = own_scores - less
        u = fg.variable_from(own_scores, mask=own_mask, name="scores")
        self.add_factors(fg, u, own_mask, **changes)
        return fg, u, layout

    def _unknown_change(self, query: str, word: str) -> TypeError:
        """What to raise for an argument that a query does not take."""
        call = "a call" if query == "forward" else query
        named = _named(getattr(StructuredLayer, query))
        known = [name for name in named if name not in ("scores", "target")]
        known += self._changes or []
        hint = _did_you_mean(word, known)
        return TypeError(
            f"{self._name}: {call} takes no {word}.{hint} It takes {', '.join(known)}."
        )

    def _options(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def _temperature_of(self, given: float | Tensor | None) -> Any:
        """The temperature of a call, or else the layer's; None for 1."""
        temperature = self.temperature if given is None else given
        if not isinstance(temperature, Tensor) and temperature == 1:
            return None
        return temperature

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _wanted(self) -> str:
        return f"(*batch, {', '.join(self.axes)})"

    def _repr_parts(self) -> list[str]:
        """The layer's own settings, for `extra_repr`."""
        return []

    def extra_repr(self) -> str:
        """The settings, as they would be given."""
        parts = [
            *self._repr_parts(),
            f"temperature={float(torch.as_tensor(self.temperature).detach()):g}",
        ]
        parts += ["learn_temperature=True"] * (self.log_temperature is not None)
        return ", ".join(parts + ["eval_map=True"] * self.eval_map)


def _named(function: Any) -> list[str]:
    """The arguments that a method takes by name, without `self`."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    collected = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.kind not in collected]


def _did_you_mean(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f" Did you mean {close[0]}?" if close else ""
