"""Classes of structured factors that are put together wrongly say what is wrong."""

import numpy as np
import pytest

import factormax as fm
from factormax._core import OracleKind
from factormax.factors.structured import StructuredFactor
from factormax.testing import check_factor


def matching(**changed):
    """A class like `Matching`, of which some attributes are others; None: they are not set."""

    class Odd(StructuredFactor):
        def __init__(self, u):
            self._take_structured(u)
            own = {"_oracle": OracleKind.matching, "_oracle_shape": (2, 3), "_slots": 2}
            for name, value in {**own, **changed}.items():
                if value is not None:
                    setattr(self, name, value)

    return Odd


def solve(kind):
    fg = fm.FactorGraph()
    fg.add(kind(fg.variable_from(np.zeros((2, 3)))))
    fg.solve()


def check(kind):
    check_factor(kind(fm.FactorGraph().variable((2, 3))))


@pytest.mark.parametrize("ask", [solve, check])
class TestClass:
    def test_as_it_should_be(self, ask):
        ask(matching())

    @pytest.mark.parametrize("slots", [0, 1, 3, 6])
    def test_slots_that_are_not_those_of_the_oracle(self, ask, slots):
        message = rf"Odd.*: slots is {slots}, but must be 2, as slots\(\) of its oracle says"
        with pytest.raises(fm.GraphError, match=message):
            ask(matching(_slots=slots))

    @pytest.mark.parametrize("name", ["_oracle", "_oracle_shape", "_slots"])
    def test_what_is_missing_is_named(self, ask, name):
        with pytest.raises(fm.GraphError, match=f"Odd over u: its class must set {name} in"):
            ask(matching(**{name: None}))

    def test_a_shape_that_does_not_fit(self, ask):
        message = r"Odd.*: its oracle has no shape \(2, 4\) with 6 variables and 0 scores"
        with pytest.raises(fm.GraphError, match=message):
            ask(matching(_oracle_shape=(2, 4)))
