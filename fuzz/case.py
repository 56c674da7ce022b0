"""One random graph as plain numbers: as a graph of the library, or as a few lines of Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

import factormax as fm

__all__ = ["ROWS", "STRUCTURED", "Built", "Case", "Term", "build", "snippet"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

#: Factors that are linear rows over literals; `Linear` only where the library has it.
ROWS = (
    *("Xor", "AtMostOne", "Or", "Nand", "Imply", "XorOut", "OrOut", "AndOut"),
    *("Budget", "AtLeast", "Exactly", "Knapsack"),
    *(("Linear",) if hasattr(fm, "Linear") else ()),
)
STRUCTURED = ("Table", "Sequence", "SequenceBudget", "DepTree", "Matching", "Own")

#: The parameters that are scores, in the order in which the factor takes them.
SCORES = ("scores", "transitions", "initial", "final")


@dataclass(frozen=True, eq=False)
class Term:
    """One call of a factor.

    Attributes:
        kind: the class of the factor; "Own" is a subclass of `Factor` that lists its structures.
        index: the variables. `(k, d)` for k factors over rows, `(k, 2)` for k pairs, else in the
            shape that the factor takes; of a `Table` flat, `params["sizes"]` parts the groups.
        negated: for each literal of a row, `(d,)`, or each end of the pairs, `(2,)`.
        params: what else the factor takes, by name.
        each: the names of those that have a leading batch dimension.
    """

    kind: str
    index: IntArray
    negated: tuple[bool, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    each: frozenset[str] = frozenset()

    def instance(self, i: int) -> Term:
        """The term as instance i of a batch sees it."""
        params = {k: v[i] if k in self.each else v for k, v in self.params.items()}
        return replace(self, params=params, each=frozenset())

    def instances(self, keep: Iterable[int]) -> Term:
        """The term of a batch with these instances only."""
        rows = list(keep)
        params = {k: v[rows] if k in self.each else v for k, v in self.params.items()}
        return replace(self, params=params)


@dataclass(frozen=True, eq=False)
class Case:
    """A graph over one tensor of variables. `scores` is `(n,)`, or `(B, n)` for a batch.

    Attributes:
        mask: in the shape of the scores, or None. A score of −inf masks too.
        generic: the scores have no ties, so that the factors' marginals are unique.
    """

    scores: FloatArray
    terms: tuple[Term, ...] = ()
    mask: BoolArray | None = None
    dtype: str = "float64"
    generic: bool = True

    @property
    def batched(self) -> bool:
        """Whether it is a batch."""
        return self.scores.ndim == 2

    @property
    def n(self) -> int:
        """The number of variables."""
        return int(self.scores.shape[-1])

    @property
    def present(self) -> BoolArray:
        """Which variables are neither masked nor of score −inf."""
        here = np.asarray(self.scores != -np.inf)
        return here if self.mask is None else np.asarray(here & self.mask)

    @property
    def masks_something(self) -> bool:
        """Whether any variable is off by a mask."""
        return not bool(self.present.all())

    @property
    def size(self) -> float:
        """How large the numbers of a solve are: the largest score, at least 1."""
        return max(1.0, self.largest)

    @property
    def largest(self) -> float:
        """The largest score, of variables and factors, without its sign."""
        largest = [0.0]
        arrays = [self.scores, *(t.params[s] for t in self.terms for s in SCORES if s in t.params)]
        for a in arrays:
            finite = np.abs(a)[np.isfinite(a)]
            largest.append(float(finite.max(initial=0.0)))
        return max(largest)

    def instance(self, i: int) -> Case:
        """Instance i, as a graph without a batch."""
        if not self.batched:
            return self
        return replace(
            self,
            scores=self.scores[i],
            mask=None if self.mask is None else self.mask[i],
            terms=tuple(t.instance(i) for t in self.terms),
        )

    def instances(self, keep: Iterable[int]) -> Case:
        """The batch of these instances."""
        rows = list(keep)
        return replace(
            self,
            scores=self.scores[rows],
            mask=None if self.mask is None else self.mask[rows],
            terms=tuple(t.instances(rows) for t in self.terms),
        )

    def singles(self) -> list[Case]:
        """All instances, each as a graph of its own."""
        return [self.instance(i) for i in range(len(self.scores))] if self.batched else [self]


@dataclass(frozen=True, eq=False)
class Built:
    """The graph of a case, its variable, and its factors in the order of the terms."""

    fg: fm.FactorGraph
    u: fm.Variable
    factors: list[Any]


class Listed(fm.Factor):
    """A factor of the user's own: one of the structures listed, each a 0/1 vector."""

    def __init__(self, u: fm.Variable, structures: Any) -> None:
        super().__init__(u)
        self.listed = np.asarray(structures, dtype=float)

    def map(self, eta_u: Any, eta_v: Any = ()) -> Any:
        """The first of the best."""
        return self.listed[int(np.argmax(self.listed @ np.asarray(eta_u, dtype=float)))], []


def build(case: Case, convert: Callable[[FloatArray], Any] | None = None) -> Built:
    """The case as a graph; `convert` makes the scores (and the factors' scores) of each array."""
    to = convert or (lambda a: a.astype(case.dtype))
    fg = fm.FactorGraph(batch_dims=int(case.batched))
    u = fg.variable_from(to(case.scores), mask=case.mask)
    return Built(fg, u, [fg.add(_factor(t, u, to)) for t in case.terms])


def _factor(term: Term, u: fm.Variable, to: Callable[[FloatArray], Any]) -> Any:
    p = {k: to(np.asarray(v)) if k in SCORES else v for k, v in term.params.items()}
    if term.kind == "Pair":
        ends = [_literal(u, term.index[:, e], term.negated[e]) for e in range(2)]
        return fm.Pair(ends[0], ends[1], p["scores"])
    if term.kind == "Table":
        groups = np.split(term.index, np.cumsum(p["sizes"])[:-1])
        return fm.Table([u[g] for g in groups], p["scores"])
    if term.kind == "Own":
        return Listed(u[term.index], p["structures"])
    make = getattr(fm, term.kind)
    if term.kind in STRUCTURED:
        return make(u[term.index], **p)
    if len(term.index) > 1:
        return make(_literal(u, term.index, term.negated[0]), **p, axis=1)
    literals = [_literal(u, j, neg) for j, neg in zip(term.index[0], term.negated, strict=True)]
    return make(literals, **p)


def _literal(u: fm.Variable, index: Any, negated: bool) -> fm.Variable:
    return ~u[index] if negated else u[index]


# ---- as text -------------------------------------------------------------------------------------


def snippet(case: Case, query: str = "fg.solve()", comment: str = "") -> str:
    """The case as a runnable program of a few lines."""
    lines = ["import numpy as np", "import factormax as fm", "from numpy import inf, nan"]
    if any(t.kind == "Own" for t in case.terms):
        lines += ["from fuzz.case import Listed"]
    masked = "" if case.mask is None else f", mask=np.array({case.mask.tolist()})"
    lines += ["", f"fg = fm.FactorGraph(batch_dims={int(case.batched)})"]
    lines += [f"u = fg.variable_from({_array(case.scores, case.dtype)}{masked})"]
    for i, term in enumerate(case.terms):
        lines += [f"f{i} = fg.add({_call(term, case.dtype)})"]
    lines += [f"solution = {query}", "print(solution, u.value, solution.objective)"]
    text = "\n".join(lines).replace("from numpy import inf, nan\n", "")
    if "inf" in text or "nan" in text:
        text = text.replace("import numpy as np\n", "import numpy as np\nfrom numpy import inf\n")
    notes = "".join(f"# {line}\n" for line in comment.splitlines())
    return notes + text + "\n"


def _call(term: Term, dtype: str) -> str:
    p = {k: _number(v, dtype if k in SCORES else "float64") for k, v in term.params.items()}
    listed = term.index.tolist()
    if term.kind == "Pair":
        ends = [_name(term.index[:, e].tolist(), term.negated[e]) for e in range(2)]
        return f"fm.Pair({ends[0]}, {ends[1]}, {p['scores']})"
    if term.kind == "Table":
        groups = np.split(term.index, np.cumsum(term.params["sizes"])[:-1])
        return f"fm.Table([{', '.join(f'u[{g.tolist()}]' for g in groups)}], {p['scores']})"
    if term.kind == "Own":
        return f"Listed(u[{listed}], {p['structures']})"
    options = "".join(f", {k}={v}" for k, v in p.items())
    if term.kind in STRUCTURED:
        index = f"np.array({listed})" if term.index.ndim > 1 else str(listed)
        return f"fm.{term.kind}(u[{index}]{options})"
    if len(term.index) > 1:
        sign = "~" if term.negated[0] else ""
        return f"fm.{term.kind}({sign}u[np.array({listed})]{options}, axis=1)"
    names = [_name(j, neg) for j, neg in zip(listed[0], term.negated, strict=True)]
    return f"fm.{term.kind}([{', '.join(names)}]{options})"


def _name(index: Any, negated: bool) -> str:
    return f"{'~' if negated else ''}u[{index}]"


def _number(value: Any, dtype: str) -> str:
    if isinstance(value, (bool, int, tuple)):
        return repr(value)
    array = np.asarray(value)
    if array.ndim == 0 and dtype == "float64":
        return repr(array.item())
    return _array(array, dtype)


def _array(array: npt.NDArray[Any], dtype: str) -> str:
    if array.dtype.kind != "f":
        return f"np.array({array.tolist()})"
    text = f"np.array({array.tolist()})"
    return text if dtype == "float64" else f"{text[:-1]}, np.{dtype})"
