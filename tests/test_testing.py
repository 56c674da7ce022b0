"""`check_factor` passes every built-in factor, and notices a broken one."""

import ctypes

import numpy as np
import pytest
from every_factor import EXAMPLES, is_matching, is_tree, one_a_row

import factormax as fm
from factormax import factors, testing
from factormax._structured_checks import Seen
from factormax.factors.base import Row, RowFactor
from factormax.scope import ListedPart
from factormax.testing import check_factor

# Of 4 variables.
CONTRACT = {
    kind: (example.make, example.allowed)
    for kind, example in EXAMPLES.items()
    if not example.structured
}
CONTRACT |= {
    "Xor": (lambda u: fm.Xor(u), lambda on: on.sum() == 1),
    "AtMostOne": (lambda u: fm.AtMostOne(u), lambda on: on.sum() <= 1),
    "Or": (lambda u: fm.Or(u), lambda on: on.any()),
    "Nand": (lambda u: fm.Nand(u), lambda on: not on.all()),
    "Imply": (lambda u: fm.Imply(u), lambda on: on[-1] or not on[:-1].all()),
    "XorOut": (lambda u: fm.XorOut(u), lambda on: on[:-1].sum() == on[-1]),
    "OrOut": (lambda u: fm.OrOut(u), lambda on: on[-1] == on[:-1].any()),
    "AndOut": (lambda u: fm.AndOut(u), lambda on: on[-1] == on[:-1].all()),
    "Budget": (lambda u: fm.Budget(u, 2), lambda on: on.sum() <= 2),
    "AtLeast": (lambda u: fm.AtLeast(u, 2), lambda on: on.sum() >= 2),
    "Exactly": (lambda u: fm.Exactly(u, 2), lambda on: on.sum() == 2),
    "Knapsack": (
        lambda u: fm.Knapsack(u, [1.0, 2.0, 0.5, 0.0], 2.0),
        lambda on: on @ np.array([1.0, 2.0, 0.5, 0.0]) <= 2,
    ),
    "Linear": (
        lambda u: fm.Linear(u, [1.0, -2.0, 0.5, 1.0], -1.5, 1.5),
        lambda on: abs(on @ np.array([1.0, -2.0, 0.5, 1.0])) <= 1.5,
    ),
    "Pair": (lambda u: fm.Pair(u[:3], u[1:], 0.0), None),
}


class TwoOf(fm.Factor):
    """Exactly two are on; all, where fewer are left."""

    def map(self, eta_u, eta_v):
        m = np.zeros(eta_u.shape)
        m[np.argsort(-eta_u, kind="stable")[:2]] = 1
        return np.where(eta_u == -np.inf, 0, m), []


# The shape of u, the factor, and what it allows; of these, larger ones than the examples.
STRUCTURED = {
    kind: (example.shape, example.with_scores, example.allowed)
    for kind, example in EXAMPLES.items()
    if example.structured
}
STRUCTURED |= {
    "DepTree": ((4, 4), lambda u: fm.DepTree(u), is_tree),
    "Matching": ((3, 4), lambda u: fm.Matching(u), is_matching),
    "Sequence": (
        (4, 3),
        lambda u: fm.Sequence(u, np.zeros((3, 3)), initial=np.zeros(3), final=np.zeros(3)),
        one_a_row,
    ),
    "SequenceBudget": (
        (6,),
        lambda u: fm.SequenceBudget(u, np.zeros(5), 3),
        lambda on: on.sum() <= 3,
    ),
    "Table": (
        (5,),
        lambda u: fm.Table([u[:2], u[2:]], np.zeros((2, 3))),
        lambda on: on[:2].sum() == on[2:].sum() == 1,
    ),
    "Factor": ((5,), TwoOf, lambda on: on.sum() == 2),
}
OTHERS = {
    "projective": ((4, 4), lambda u: fm.DepTree(u, projective=True), is_tree),
    "single root": (
        (4, 4),
        lambda u: fm.DepTree(u, single_root=True),
        lambda on: is_tree(on) and np.trace(on) == 1,
    ),
    "a slice": ((5, 5), lambda u: fm.Matching(u[:2, 1:4]), is_matching),
    "more rows": ((4, 2), lambda u: fm.Matching(u), lambda on: is_matching(on.T)),
    "one transition": ((5,), lambda u: fm.SequenceBudget(u, 0.0, 2), lambda on: on.sum() <= 2),
    "transitions per step": ((4, 2), lambda u: fm.Sequence(u, np.zeros((3, 2, 2))), one_a_row),
    "three groups": ((3, 2), lambda u: fm.Table(u, np.zeros((2, 2, 2))), None),
}


def test_many_factors_of_one_call():
    u = fm.FactorGraph().variable((4, 2))
    with pytest.raises(fm.GraphError, match="check_factor takes one structured factor, not 2"):
        check_factor(fm.Table([u[:2], u[2:]], np.zeros((2, 2, 2))))


@pytest.mark.parametrize("make", [fm.Xor, TwoOf], ids=["rows", "structured"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "trials must be a whole number from 1 "),
        ({"trials": "ten"}, "trials must be a whole number from 1 "),
        ({"scales": ()}, "scales must hold at least one number"),
        ({"scales": 1.0}, r"scales must be a tuple of numbers, such as \(1.0,\), got 1.0"),
        ({"scales": (1.0, np.nan)}, "each of scales must be a finite number, got nan"),
    ],
    ids=str,
)
def test_a_check_of_nothing_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        check_factor(make(fm.FactorGraph().variable(4)), **options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (TwoOf, r"such as TwoOf\(fm.FactorGraph\(\).variable\(4\)\), got the class TwoOf"),
        (np.zeros(4), r"such as fm.Xor\(.*\), got ndarray"),
        (fm.FactorGraph, r"such as fm.Xor\(.*\), got the class FactorGraph"),
    ],
    ids=["a class", "an array", "another class"],
)
def test_what_is_no_factor_is_refused(given, message):
    with pytest.raises(fm.GraphError, match=f"check_factor takes a factor, {message}"):
        check_factor(given)


def test_every_factor_is_here():
    assert set(CONTRACT) | set(STRUCTURED) == set(factors.__all__)


@pytest.mark.parametrize("negate", [False, True])
@pytest.mark.parametrize("kind", CONTRACT)
def test_builtin(kind, negate):
    make, allowed = CONTRACT[kind]
    u = fm.FactorGraph().variable(4)
    factor = make(u)
    if negate and kind not in ("Pair",):
        factor._scope = (ListedPart(2 * factor._index + [[1, 0, 0, 1]]),)
    check_factor(factor, allowed=allowed)


@pytest.mark.parametrize("kind", [*STRUCTURED, *OTHERS])
def test_structured(kind):
    shape, make, allowed = (STRUCTURED | OTHERS)[kind]
    check_factor(make(fm.FactorGraph().variable(shape)), allowed=allowed)


class AtMostTwo(RowFactor):
    """A factor of one's own, as in CONTRIBUTING."""

    @classmethod
    def rows(cls, d):
        return [Row([1.0] * d, 2.0)]


def test_a_new_factor():
    check_factor(AtMostTwo(fm.FactorGraph().variable(4)), allowed=lambda on: on.sum() <= 2)


def test_wrong_assignments_are_noticed():
    with pytest.raises(AssertionError, match="AtMostTwo: its rows"):
        check_factor(AtMostTwo(fm.FactorGraph().variable(4)), allowed=lambda on: on.sum() <= 1)


def test_a_wrong_gradient_is_noticed(monkeypatch):
    from factormax import _engines

    honest = _engines.vjp

    def doubled(*args):
        grad_u, grad_v, *rest = honest(*args)
        return 2 * grad_u, 2 * grad_v, *rest

    monkeypatch.setattr(_engines, "vjp", doubled)
    with pytest.raises(AssertionError, match="by differences"):
        check_factor(fm.Xor(fm.FactorGraph().variable(4)))


# Structured factors that are wrong ---------------------------------------------------------------


def check(make, d=4, **options):
    check_factor(make(fm.FactorGraph().variable(d)), **options)


class One(fm.Factor):
    """Exactly one, with a score of its own for each."""

    def map(self, eta_u, eta_v):
        m = np.zeros(4)
        m[np.argmax(eta_u + eta_v)] = 1
        return m, m


def scored(kind):
    return lambda u: kind(u, np.zeros(4))


def test_a_factor_with_scores():
    check(scored(One), allowed=lambda on: on.sum() == 1)


def test_a_structure_that_is_not_allowed_is_noticed():
    with pytest.raises(
        AssertionError, match=r"One over u: the structure .* is not allowed.*scores"
    ):
        check(scored(One), allowed=lambda on: not on[0])
    with pytest.raises(AssertionError, match="DepTree over u: the structure"):
        check(fm.DepTree, (3, 3), allowed=lambda on: np.trace(on) == 1)


def test_an_oracle_that_is_not_optimal_is_noticed():
    class Second(One):
        def map(self, eta_u, eta_v):
            m = np.zeros(4)
            order = np.argsort(-(eta_u + eta_v))
            m[order[1] if eta_u[order[1]] > -np.inf else order[0]] = 1
            return m, m

    with pytest.raises(AssertionError, match=r"Second over u: map returned .* is worth.*scores"):
        check(scored(Second))


def test_an_oracle_that_is_rarely_wrong_is_noticed():
    class Greedy(fm.Factor):
        """A matching, row after row: the best only if the rows do not compete."""

        def map(self, eta_u, eta_v):
            m, left = np.zeros((3, 3)), eta_u.copy()
            for i in range(3):
                j = np.argmax(left[i])
                if left[i, j] == -np.inf:
                    return fm.NO_STRUCTURE
                m[i, j] = 1
                left[:, j] = -np.inf
            return m, []

    with pytest.raises(AssertionError, match="Greedy over u: map"):
        check(Greedy, (3, 3))


def test_a_better_structure_that_was_found_without_a_mask_is_called_so():
    class Fewer(TwoOf):
        """Where something is masked, one is on."""

        def map(self, eta_u, eta_v):
            m = TwoOf.map(self, eta_u, eta_v)[0]
            if (eta_u == -np.inf).any():
                m[np.flatnonzero(m)[-1:]] = 0
            return m, []

    with pytest.raises(AssertionError, match=r"; but .* \(found without a mask\) is worth"):
        check(Fewer, 5)


@pytest.mark.parametrize(("kind", "hint"), [(fm.Matching, True), (TwoOf, False)])
def test_a_variable_that_changes_its_slot_is_hinted_at(kind, hint):
    """The lists of an oracle are compared slot by slot; a factor of one's own has none."""
    factor = kind(fm.FactorGraph().variable((2, 2)))
    numbers = testing._random_numbers(factor, 1.0, 1, False, np.random.default_rng(0), None)
    structures = np.array([[1.0, 0, 0, 1], [0, 1, 1, 0]])
    with pytest.raises(AssertionError, match="differ in reduced score: ") as error:
        Seen(factor, None)._check_optimal(
            numbers, 0, np.array([0.9, 0.1]), structures, np.zeros((2, 0))
        )
    assert ("does a variable always stand in the same slot" in str(error.value)) == hint


def test_features_that_do_not_match_are_noticed():
    class Forgets(One):
        def map(self, eta_u, eta_v):
            return super().map(eta_u, eta_v)[0], np.zeros(4)

    class Doubles(One):
        def map(self, eta_u, eta_v):
            m, n = super().map(eta_u, eta_v)
            return m, 2 * n

    for kind in (Forgets, Doubles):
        with pytest.raises(AssertionError, match=f"{kind.__name__} over u: map returned"):
            check(scored(kind))


def test_an_oracle_that_changes_its_mind_is_noticed():
    class Fickle(fm.Factor):
        """Breaks ties as it likes: and there are many."""

        calls = 0

        def map(self, eta_u, eta_v):
            self.calls += 1
            m = np.zeros(4)
            m[int(np.argmax(eta_u[:2]))] = 1
            m[2 + self.calls % 2] = float(eta_u[2 + self.calls % 2] > -np.inf)
            return m, []

    with pytest.raises(AssertionError, match=r"Fickle over u: map answered .*, then"):
        check(Fickle)


def test_an_oracle_that_finds_nothing_is_noticed():
    class Shy(TwoOf):
        """Gives up where anything is masked."""

        def map(self, eta_u, eta_v):
            if (eta_u == -np.inf).any():
                return fm.NO_STRUCTURE
            return super().map(eta_u, eta_v)

    message = r"Shy over u: map found nothing, not even array\(.*\) \(found without a mask\)"
    with pytest.raises(AssertionError, match=message):
        check(Shy, 5)
    check(Shy, 5, masks=False)


@pytest.mark.parametrize("allowed", [None, lambda on: on.sum() == 1])
def test_an_oracle_that_never_finds_a_structure_is_noticed(allowed):
    class Never(fm.Factor):
        def map(self, eta_u, eta_v):
            return fm.NO_STRUCTURE

    message = "Never over u: map never found a structure in 30 trials"
    with pytest.raises(AssertionError, match=message):
        check(Never, 5, allowed=allowed)


def test_an_oracle_that_ignores_masks_is_noticed():
    class Blind(fm.Factor):
        def map(self, eta_u, eta_v):
            m = np.zeros(4)
            m[0] = 1
            return m, []

    with pytest.raises(
        fm.GraphError, match="Blind over u: map switched on a variable that is mask"
    ):
        check(Blind)


def test_map_and_map_batch_must_agree():
    class Apart(TwoOf):
        def map_batch(self, eta_u, eta_v):
            answers = [self.map(row, ())[0] for row in -eta_u]
            return np.where(eta_u == -np.inf, 0, answers), ()

    with pytest.raises(AssertionError, match="Apart over u: map"):
        check(Apart)


def test_native_map_is_asked_too():
    double, whole = ctypes.POINTER(ctypes.c_double), ctypes.c_int64

    def native(sign):
        @ctypes.CFUNCTYPE(
            ctypes.c_int32, double, whole, double, whole, double, double, ctypes.c_void_p, whole
        )
        def call(eta_u, d, eta_v, s, m, n, data, instance):
            present = [j for j in range(d) if eta_u[j] > -np.inf]
            m[max(present, key=lambda j: sign * eta_u[j])] = 1
            return 0

        return call

    best, worst = native(1), native(-1)
    check(lambda u: fm.Factor(u, native_map=best), allowed=lambda on: on.sum() == 1)
    with pytest.raises(AssertionError, match="Factor over u: native_map returned"):
        check(lambda u: fm.Factor(u, native_map=worst))


def test_a_wrong_gradient_of_a_structured_factor_is_noticed(monkeypatch):
    from factormax import _engines

    honest = _engines.vjp

    def doubled(*args):
        grad_u, grad_v, *rest = honest(*args)
        return 2 * grad_u, 2 * grad_v, *rest

    monkeypatch.setattr(_engines, "vjp", doubled)
    with pytest.raises(AssertionError, match=r"Matching over u: slope .*by differences.*scores"):
        check(fm.Matching, (2, 3))


def test_a_wrong_solution_of_a_structured_factor_is_noticed(monkeypatch):
    from factormax import _engines

    honest = _engines.solve

    def solve(inputs, options, warm=None):
        """Of other scores."""
        return honest(inputs.replace(eta_u=0.9 * inputs.eta_u), options, warm)

    monkeypatch.setattr(_engines, "solve", solve)
    with pytest.raises(AssertionError, match="DepTree over u"):
        check(fm.DepTree, (3, 3))


class Cheapest(fm.Factor):
    """One variable is on; like Dijkstra's, the oracle needs costs, which are not negative."""

    def map(self, eta_u, eta_v):
        if not (eta_u <= 1e-3).all():
            raise ValueError("a negative cost")
        return np.arange(len(eta_u)) == np.argmax(eta_u), []

    def features_of(self, m):
        return [] if m.sum() == 1 else fm.NO_STRUCTURE


def test_scores_that_the_oracle_may_see():
    with pytest.raises(ValueError, match="a negative cost"):
        check(Cheapest)
    check(Cheapest, sample=lambda rng: -0.01 - 3 * rng.random(4))
    with pytest.raises(ValueError, match=r"sample must draw 4 scores for Cheapest over u, got"):
        check(Cheapest, sample=lambda rng: -rng.random(3))


def test_a_sample_of_the_factors_own_scores():
    class Scored(Cheapest):
        def map(self, eta_u, eta_v):
            assert (eta_v >= 0).all() and eta_v.shape == (2, 2)
            on = super().map(eta_u + eta_v.reshape(-1), ())[0]
            return on, on.reshape(2, 2)

        def features_of(self, m):
            return m if m.sum() == 1 else fm.NO_STRUCTURE

    fg = fm.FactorGraph()
    factor = Scored(fg.variable(4), np.zeros((2, 2)))
    check_factor(factor, sample=lambda rng: (-2 - rng.random(4), 0.5 + rng.random((2, 2))))
    with pytest.raises(ValueError, match="and 4 scores of its own, as a pair"):
        check_factor(factor, sample=lambda rng: -rng.random(4))


@pytest.mark.parametrize("answer", [fm.NO_STRUCTURE, [1.0]], ids=str)
def test_features_that_are_not_those_of_map_are_noticed(answer):
    class Plain(TwoOf):
        def features_of(self, m):
            return answer

    message = "Plain over u: features_of returned (factormax.NO_STRUCTURE for|1 features)"
    with pytest.raises((AssertionError, fm.ShapeError), match=message):
        check(Plain)
