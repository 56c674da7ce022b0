"""Random graphs: every factor, masked or not, in batches, of scores from 1e-8 to 1e4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fuzz.case import ROWS, STRUCTURED, Case, Term
from fuzz.model import holds, valid_structure

__all__ = ["SIZES", "factors_of", "generate"]

Rng = np.random.Generator
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

#: The fewest and the most variables.
SIZES = {"small": (1, 12), "mid": (13, 200), "large": (1500, 2500)}
SCALES = (1e-8, 1e-4, 1e-2, 0.1, 1.0, 1.0, 1.0, 10.0, 100.0, 1e3, 1e4)


def generate(
    seed: int, number: int, size: str = "small", dtype: str = "any", masks: bool = True
) -> Case:
    """Case `number` of a run. The same arguments always make the same graph.

    Most graphs are feasible, because a planted assignment satisfies every factor; one small graph
    in eight is drawn without, and may well be infeasible.
    """
    rng = np.random.default_rng([seed, number, sorted(SIZES).index(size)])
    return _Draw(rng, size, dtype, masks).case()


class _Draw:
    def __init__(self, rng: Rng, size: str, dtype: str, masks: bool) -> None:
        self.rng, self.size = rng, size
        low, high = SIZES[size]
        # Few variables are as likely as many: that is where the corners are.
        self.n = int(rng.integers(low, high + 1))
        if size == "mid" and rng.random() < 0.6:
            self.n = int(rng.integers(low, 60))
        self.dtype = str(rng.choice(["float64", "float64", "float32"])) if dtype == "any" else dtype
        self.scale = float(rng.choice(SCALES))
        batches = {"small": 0.35, "mid": 0.3, "large": 0.1}
        self.batch = int(rng.integers(1, 5)) if rng.random() < batches[size] else 0
        self.planted = bool(size != "small" or rng.random() < 0.875)
        self.masks = masks and rng.random() < 0.35
        self.style = str(rng.choice(["normal", "normal", "normal", "tied", "mixed", "sparse"]))
        self.x = (rng.random(self.n) < rng.uniform(0.1, 0.6)).astype(float)
        self.gone = np.zeros(self.n, dtype=bool)  # masked in every instance
        self.terms: list[Term] = []

    def case(self) -> Case:
        rng = self.rng
        if self.masks and rng.random() < 0.6:
            self.gone = rng.random(self.n) < rng.uniform(0, 0.5)
            self.x[self.gone] = 0
        if rng.random() < 0.45:
            self._add_structured()
        most = {"small": 8, "mid": max(4, self.n // 3), "large": 12}[self.size]
        for _ in range(int(rng.integers(0 if self.terms else 1, most + 1))):
            self._add_rows()
        if rng.random() < 0.5:
            self._add_pairs()
        rng.shuffle(self.terms)
        shape = (self.batch, self.n) if self.batch else (self.n,)
        scores, mask = self._scores(shape), None
        if self.masks:
            mask = self._mask(shape)
            if rng.random() < 0.3:
                scores, mask = np.where(mask, scores, -np.inf), None
            elif rng.random() < 0.3:  # both at once
                scores = np.where(~mask & (rng.random(shape) < 0.5), -np.inf, scores)
        case = Case(scores, tuple(self.terms), mask, self.dtype, self.style != "tied")
        return _rounded(case)

    # ---- numbers ---------------------------------------------------------------------------------

    def _scores(self, shape: tuple[int, ...]) -> FloatArray:
        rng = self.rng
        raw = np.asarray(rng.normal(size=shape), dtype=float)
        match self.style:
            case "tied":
                raw = np.round(2 * raw) / 2
            case "mixed":  # a few far larger than the others
                raw = raw * np.where(rng.random(shape) < 0.1, 100.0, 1.0)
            case "sparse":  # most are well below 0
                raw = raw - np.where(rng.random(shape) < 0.7, 3.0, 0.0)
        return raw * self.scale

    def _own_scores(self, shape: tuple[int, ...], forbid: bool = False) -> FloatArray:
        scores = self._scores(shape)
        if forbid and self.rng.random() < 0.15:
            scores = np.where(self.rng.random(shape) < 0.1, -np.inf, scores)
        return scores

    def _each(self, shape: tuple[int, ...], forbid: bool = False) -> tuple[FloatArray, bool]:
        """Scores of a factor: shared, or one for each instance."""
        each = bool(self.batch) and self.rng.random() < 0.5
        return self._own_scores((self.batch, *shape) if each else shape, forbid), each

    # ---- rows ------------------------------------------------------------------------------------

    def _pick(self, d: int) -> IntArray:
        pool = np.arange(self.n)
        if self.gone.sum() >= d and self.rng.random() < 0.2:
            pool = np.flatnonzero(self.gone)  # a factor that is absent
        elif self.n > 40 and self.rng.random() < 0.8:  # neighbours: graphs that hang together
            start = int(self.rng.integers(0, self.n))
            pool = np.unique(np.arange(start, start + max(2 * d, 20)) % self.n)
        return np.sort(self.rng.choice(pool, d, replace=False)).astype(np.int64)

    def _add_rows(self) -> None:
        rng = self.rng
        for _ in range(20):
            kind = str(rng.choice(ROWS))
            d = int(rng.integers(1, min(self.n, 6 if self.n < 40 else 12) + 1))
            many = {"small": 1, "mid": 4, "large": 150}[self.size]
            k = int(rng.integers(2, many + 1)) if many > 1 and rng.random() < 0.4 else 1
            if self.size == "large":
                k = int(rng.integers(10, many))
            index = np.stack([rng.permutation(self._pick(d)) for _ in range(k)])
            negated = tuple(bool(b) for b in rng.random(d) < 0.3)
            if k > 1:
                negated = (bool(rng.random() < 0.2),) * d
            literals = np.where(np.array(negated), 1 - self.x[index], self.x[index])
            term = Term(kind, index, negated, *self._row_params(kind, literals))
            if self._keep(term):
                return

    def _keep(self, term: Term) -> bool:
        """Takes the factors of the term that the planted assignment satisfies."""
        if self.planted:
            first = term.instance(0) if self.batch else term
            x, present = self.x[None], ~self.gone
            good = [k for k in range(len(term.index)) if holds(_factor(first, k), x, present)[0]]
            if not good:
                return False
            if len(good) < len(term.index):
                term = factors_of(term, good)
        self.terms.append(term)
        return True

    def _row_params(self, kind: str, literals: FloatArray) -> tuple[dict[str, Any], frozenset[str]]:
        """Numbers that the planted literals `(k, d)` satisfy, and that often bind."""
        rng, (k, d) = self.rng, literals.shape
        each = bool(self.batch) and rng.random() < 0.4
        front = (self.batch,) if each else ()
        shape = front if k == 1 else (*front, k)
        on = np.broadcast_to(literals.sum(axis=1)[0] if k == 1 else literals.sum(axis=1), shape)
        names: dict[str, Any] = {}
        if kind == "Budget":
            slack = rng.integers(0, 2, shape) if self.planted else rng.integers(-1, 2, shape)
            names["budget"] = np.maximum(0, on + slack).astype(int)
        elif kind == "AtLeast":
            names["count"] = np.maximum(0, on - rng.integers(0, 2, shape)).astype(int)
        elif kind == "Exactly":
            names["count"] = np.asarray(on).astype(int)
        elif kind in ("Knapsack", "Linear"):
            signed = kind == "Linear"
            wide = rng.random() < 0.1
            size = 10.0 ** rng.uniform(-3, 3) if wide else 1.0
            costs = size * rng.uniform(-1.0 if signed else 0.05, 1.0, (*shape, d))
            if rng.random() < 0.15:
                costs = np.where(rng.random(costs.shape) < 0.3, 0.0, costs)
            if rng.random() < 0.2:
                costs = np.round(costs / size * 4) / 4 * size
            spent = (costs * (literals if k > 1 else literals[0])).sum(axis=-1)
            room = size * rng.uniform(0.01, 0.8, shape)
            if signed:
                low = spent - size * rng.uniform(0.01, 0.8, shape)
                equal = rng.random() < 0.2
                names["coefs"] = costs
                names["lower"] = np.asarray(spent if equal else low)
                names["upper"] = np.asarray(spent if equal else spent + room)
                if not equal and rng.random() < 0.4:
                    del names[str(rng.choice(["lower", "upper"]))]
            else:
                names["costs"], names["budget"] = costs, np.asarray(spent + room)
        return names, frozenset(names) if each else frozenset()

    def _add_pairs(self) -> None:
        rng, n = self.rng, self.n
        if n < 2:
            return
        most = {"small": 10, "mid": 2 * n, "large": 3 * n}[self.size]
        count = int(rng.integers(1, most + 1))
        first = rng.integers(0, n, count)
        near = rng.integers(1, min(n, 30), count) if n > 40 else rng.integers(1, n, count)
        index = np.stack([first, (first + near) % n], axis=1).astype(np.int64)
        negated = (bool(rng.random() < 0.15), bool(rng.random() < 0.15))
        scores, each = self._each((count,))
        if rng.random() < 0.3:
            scores = scores * 0.1
        kinds = rng.random()
        if kinds < 0.2:
            scores = np.abs(scores)
        elif kinds < 0.4:
            scores = -np.abs(scores)
        self.terms.append(
            Term("Pair", index, negated, {"scores": scores}, frozenset({"scores"} if each else ()))
        )

    # ---- structures ------------------------------------------------------------------------------

    def _add_structured(self) -> None:
        rng = self.rng
        free = list(rng.permutation(np.flatnonzero(~self.gone)))
        most = {"small": 2, "mid": 4, "large": 6}[self.size]
        for _ in range(int(rng.integers(1, most + 1))):
            kind = str(rng.choice(STRUCTURED))
            shape, params = self._shape(kind, len(free))
            need = int(np.prod(shape))
            if need == 0 or need > len(free):
                continue
            index = np.array(free[:need], dtype=np.int64).reshape(shape)
            if rng.random() < 0.9:  # else the next one may share variables with it
                free = free[need:]
            else:
                free = [int(j) for j in rng.permutation(free)]
            self._add_structure(kind, index, params)

    def _shape(self, kind: str, room: int) -> tuple[tuple[int, ...], dict[str, Any]]:
        rng = self.rng
        side = int(np.sqrt(room))
        cap = {"small": 12, "mid": 12, "large": 14}[self.size]
        if kind == "DepTree":
            n = int(rng.integers(1, min(side, cap) + 1)) if side else 0
            flags = {
                "projective": bool(rng.random() < 0.5),
                "single_root": bool(rng.random() < 0.5),
            }
            return (n, n), flags
        if kind == "Matching":
            m = int(rng.integers(1, min(side, 10) + 1)) if side else 0
            return (m, int(rng.integers(m, max(m, min(12, room // max(m, 1))) + 1)) if m else 0), {}
        if kind == "Sequence":
            states = int(rng.integers(1, 5))
            length = min(room // states, 20)
            return (int(rng.integers(1, length + 1)) if length else 0, states), {}
        if kind == "SequenceBudget":
            return (int(rng.integers(1, min(room, 20) + 1)) if room else 0,), {}
        if kind == "Table":
            groups = int(rng.integers(1, 4))
            sizes = tuple(int(k) for k in rng.integers(1, 5, groups))
            return (sum(sizes),), {"sizes": sizes}
        return (int(rng.integers(1, min(room, 8) + 1)) if room else 0,), {}

    def _add_structure(self, kind: str, index: IntArray, params: dict[str, Any]) -> None:
        rng = self.rng
        names: dict[str, tuple[npt.NDArray[Any], bool]] = {}
        if kind == "Table":
            names["scores"] = self._each(params["sizes"], forbid=True)
        elif kind == "Sequence":
            length, states = index.shape
            steps = length > 1 and rng.random() < 0.5
            shape = (length - 1, states, states) if steps else (states, states)
            names["transitions"] = self._each(shape, forbid=True)
            if self.batch and self.batch == length - 1:  # any other shape would be ambiguous
                shape = (length - 1, states, states)
                names["transitions"] = (self._own_scores((self.batch, *shape)), True)
            for end in ("initial", "final"):
                if rng.random() < 0.3:
                    names[end] = self._each((states,), forbid=True)
        elif kind == "SequenceBudget":
            length = len(index)
            budget = rng.integers(0, length + 1, (self.batch,) if self.batch else ())
            names["transitions"] = self._each((length - 1,) if rng.random() < 0.5 else ())
            if self.batch and self.batch == length - 1:
                names["transitions"] = (self._own_scores((self.batch, length - 1)), True)
            each_budget = bool(self.batch) and rng.random() < 0.5
            params["budget"] = int(np.max(budget))
            if each_budget:
                names["budget"] = (budget, True)
        elif kind == "Own":
            count = int(rng.integers(1, 9))
            params["structures"] = np.unique(rng.integers(0, 2, (count, len(index))), axis=0)
        params.update({k: v for k, (v, _) in names.items()})
        each = frozenset(k for k, (_, per) in names.items() if per)
        term = Term(kind, index, (), params, each)
        if self.planted:
            taken = np.concatenate([np.zeros(0, int), *(t.index.ravel() for t in self.terms)])
            if np.isin(index, taken).any():  # shares variables: the plant is fixed
                if not all(self._fits(t) for t in self._instances(term)):
                    return
            elif not self._plant(term):
                return
        self.terms.append(term)

    def _instances(self, term: Term) -> list[Term]:
        return [term.instance(i) for i in range(self.batch)] if self.batch else [term]

    def _fits(self, term: Term) -> bool:
        return valid_structure(term, self.x[term.index], ~self.gone)

    def _plant(self, term: Term) -> bool:
        """Writes a structure of the term into the planted assignment."""
        rng = self.rng
        for _ in range(30):
            gone = self.gone.copy()
            if self.masks and rng.random() < 0.3:
                self._leave_out(term)
            self.x[term.index.ravel()] = self._sample(term).ravel()
            if all(self._fits(t) for t in self._instances(term)):
                return True
            self.gone = gone
        return False

    def _leave_out(self, term: Term) -> None:
        """Masks whole rows: last steps, words with their columns, sources, a group."""
        rng, index = self.rng, term.index
        if term.kind == "Sequence":
            self.gone[index[int(rng.integers(1, len(index) + 1)) :]] = True
        elif term.kind == "DepTree":
            words = rng.random(len(index)) < 0.3
            self.gone[index[words]] = True
            self.gone[index[:, words]] = True
        elif term.kind == "Matching":
            self.gone[index[rng.random(len(index)) < 0.3]] = True
        elif term.kind == "Table":
            groups = np.split(index, np.cumsum(term.params["sizes"])[:-1])
            self.gone[groups[int(rng.integers(len(groups)))]] = True

    def _sample(self, term: Term) -> FloatArray:
        rng, shape = self.rng, term.index.shape
        out = np.zeros(shape)
        here = ~self.gone[term.index]
        match term.kind:
            case "Table":
                cuts = np.cumsum(term.params["sizes"])[:-1]
                for part, on in zip(np.split(out, cuts), np.split(here, cuts), strict=True):
                    if on.any():
                        part[rng.choice(np.flatnonzero(on))] = 1
            case "Sequence":
                for step, on in zip(out, here, strict=True):
                    if on.any():
                        step[rng.choice(np.flatnonzero(on))] = 1
            case "SequenceBudget":
                budget = int(np.min(term.params["budget"]))
                chosen = rng.permutation(shape[0])[: int(rng.integers(0, budget + 1))]
                out[chosen] = 1
                out[~here] = 0
            case "Matching":
                columns = rng.permutation(shape[1])[: shape[0]]
                for row in np.flatnonzero(here.any(axis=1)):
                    out[row, columns[row]] = 1
            case "DepTree":  # a chain is a tree, projective and with one root
                words = np.flatnonzero(here.any(axis=1))
                if rng.random() < 0.5:
                    words = words[::-1]
                for place, word in enumerate(words):
                    out[word, words[place - 1] if place else word] = 1
            case "Own":
                out = np.array(rng.choice(term.params["structures"]), dtype=float)
        return out

    # ---- masks -----------------------------------------------------------------------------------

    def _mask(self, shape: tuple[int, ...]) -> BoolArray:
        """Masks what is gone, and some of what the planted assignment has off."""
        rng = self.rng
        mask = rng.random(shape) >= rng.uniform(0, 0.4)
        if self.planted:
            mask |= self.x == 1
        mask &= ~self.gone
        own = [t.index.ravel() for t in self.terms if t.kind == "Own"]
        shared = np.bincount(
            np.concatenate([np.zeros(0, int), *(t.index.ravel() for t in self._structured())]),
            minlength=self.n,
        )
        if own and (shared > 1).any():
            return np.ones(shape, dtype=bool)
        for index in own:  # a list of structures knows nothing of masks
            mask[..., index] = True
        for _ in range(10):  # what one needs may be wrong for another that shares its variables
            before = mask.copy()
            for term in self.terms:
                if term.kind == "DepTree":
                    _whole_words(mask, term.index)
                if term.kind == "Sequence":
                    _absent_last(mask, term.index)
            if np.array_equal(mask, before):
                return mask
        return np.ones(shape, dtype=bool)

    def _structured(self) -> list[Term]:
        return [t for t in self.terms if t.kind in STRUCTURED]


def _whole_words(mask: BoolArray, index: IntArray) -> None:
    """A word that is absent in an instance heads nobody there, by the mask itself."""
    for row in mask.reshape(-1, mask.shape[-1]):
        for _ in index:  # that can take away the last head of another
            absent = ~row[index].any(axis=1)
            row[index[:, absent]] = False


def _absent_last(mask: BoolArray, index: IntArray) -> None:
    """Steps that are masked altogether come last."""
    for row in mask.reshape(-1, mask.shape[-1]):
        here = np.flatnonzero(row[index].any(axis=1))
        for step in index[: here[-1] if len(here) else 0]:
            if not row[step].any():
                row[step] = True


def _factor(term: Term, k: int) -> Term:
    return factors_of(term, [k]) if len(term.index) > 1 else term


def factors_of(term: Term, keep: Sequence[int]) -> Term:
    """The term with these of its k factors only."""
    rows, k = list(keep), len(term.index)
    params = {}
    for name, value in term.params.items():
        v = np.asarray(value)
        axis = int(name in term.each)
        if v.ndim > axis and v.shape[axis] == k:
            v = np.take(v, rows, axis)
            if len(rows) == 1 and term.kind != "Pair":
                v = np.take(v, 0, axis)
        params[name] = v
    return replace(term, index=term.index[rows], params=params)


def _rounded(case: Case) -> Case:
    """With scores that the case's precision can hold, so that all see the same numbers."""
    if case.dtype == "float64":
        return case

    def to(a: Any) -> Any:
        return np.asarray(a).astype(np.float32).astype(np.float64)

    terms = tuple(
        replace(
            t,
            params={
                k: to(v) if k in ("scores", "transitions", "initial", "final") else v
                for k, v in t.params.items()
            },
        )
        for t in case.terms
    )
    return replace(case, scores=to(case.scores), terms=terms)
