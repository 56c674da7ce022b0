"""`check_factor` passes every built-in factor, and notices a broken one."""

import numpy as np
import pytest

import factormax as fm
from factormax import factors
from factormax.factors.base import LinearFactor
from factormax.testing import check_factor

CONTRACT = {
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
    "Pair": (lambda u: fm.Pair(u[:3], u[1:], 0.0), None),
}


def test_every_factor_is_here():
    rows = {name for name in factors.__all__ if not getattr(factors, name).structured}
    assert set(CONTRACT) == rows


@pytest.mark.parametrize("negate", [False, True])
@pytest.mark.parametrize("kind", CONTRACT)
def test_builtin(kind, negate):
    make, allowed = CONTRACT[kind]
    u = fm.FactorGraph().variable(4)
    factor = make(u)
    if negate and kind not in ("Pair",):
        factor.negated = np.array([[True, False, False, True]])
    check_factor(factor, allowed=allowed)


class AtMostTwo(LinearFactor):
    """A factor of one's own, as in CONTRIBUTING."""

    @classmethod
    def bound(cls, group):
        return np.full((1, 1), 2.0)


def test_a_new_factor():
    check_factor(AtMostTwo(fm.FactorGraph().variable(4)), allowed=lambda on: on.sum() <= 2)


def test_wrong_assignments_are_noticed():
    with pytest.raises(AssertionError, match="AtMostTwo: its rows"):
        check_factor(AtMostTwo(fm.FactorGraph().variable(4)), allowed=lambda on: on.sum() <= 1)


def test_a_wrong_gradient_is_noticed(monkeypatch):
    from factormax import engine

    honest = engine.vjp

    def doubled(*args):
        return tuple(2 * g for g in honest(*args))

    monkeypatch.setattr(engine, "vjp", doubled)
    with pytest.raises(AssertionError, match="by differences"):
        check_factor(fm.Xor(fm.FactorGraph().variable(4)))
