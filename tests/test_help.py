"""What a user meets first: `help` of a class, and the types of a factor of one's own."""

import pydoc
import re
from pathlib import Path

import pytest

import factormax as fm

README = Path(__file__).parents[1] / "README.md"

# A class of the README, with the types that one would write.
TYPED = """
from typing import Any

import numpy as np
import numpy.typing as npt

import factormax as fm

Vector = npt.NDArray[np.float64]

{code}

fg = fm.FactorGraph()
u = fg.variable_from(np.zeros(4))
interval: Interval = fg.add(Interval(u))
solution: fm.Solution = fg.solve()
fm.DepTree(fg.variable((3, 3))).map(np.zeros((3, 3)))
"""


@pytest.mark.parametrize("cls", [fm.FactorGraph, fm.Xor])
def test_help_is_short(cls):
    """A screen, and what Python adds of every class: __init__, __dict__, __weakref__ and so on."""
    assert len(pydoc.plain(pydoc.render_doc(cls)).splitlines()) <= 73


# Stands for torch and for JAX, which take mypy a minute to read.
STUB = """
class Tensor:
    def sum(self) -> Tensor: ...
    def __float__(self) -> float: ...

def zeros(*shape: int) -> Tensor: ...
"""
STUBS = {"torch": STUB, "jax": STUB.replace("Tensor", "Array")}


VALUES = """
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import assert_type

import factormax as fm


def total(v: fm.Variable) -> float:  # of any library
    return float(v.value.sum())


fg = fm.FactorGraph()
u = fg.variable_from(np.zeros((2, 3)))
assert_type(u.value, npt.NDArray[Any])
assert_type((~u.T[0]).value, npt.NDArray[Any])
assert_type([row.value for row in u], list[npt.NDArray[Any]])
assert_type(fg.variable_from([1.0, 2.0]).value, npt.NDArray[Any])
v = fg.variable_from(torch.zeros(2, 3), mask=np.ones((2, 3), bool))
assert_type(v.value, torch.Tensor)
assert_type((~v.T[0]).value, torch.Tensor)
w = fg.variable_from(jax.zeros(2, 3))
assert_type(w[0].value, jax.Array)
total(u) + total(v) + total(w)
"""


def factor_of_ones_own():
    """The class of the README, typed."""
    code = re.search(r"class Interval\(fm.Factor\):.*?\n\n\n", README.read_text(), re.DOTALL)[0]
    untyped = "def map(self, eta_u, eta_v):"
    assert untyped in code
    typed = "def map(self, eta_u: Vector, eta_v: Vector) -> tuple[Vector, list[float]]:"
    return TYPED.format(code=code.replace(untyped, typed))


def test_mypy_knows_the_types(tmp_path):
    """--strict, for a factor of one's own, and values, which have the type of the scores."""
    api = pytest.importorskip("mypy.api")
    for library, stub in STUBS.items():
        (tmp_path / library).mkdir()
        (tmp_path / library / "__init__.pyi").write_text(stub)
    (tmp_path / "own.py").write_text(factor_of_ones_own())
    (tmp_path / "values.py").write_text(VALUES)
    lines = ["[mypy]", "strict = true", f"mypy_path = {tmp_path}"]
    lines += ["[mypy-factormax.*]", "follow_imports = silent"]
    (tmp_path / "mypy.ini").write_text("\n".join(lines))
    options = [f"--config-file={tmp_path / 'mypy.ini'}", f"--cache-dir={tmp_path / 'cache'}"]
    out, _, status = api.run([*options, str(tmp_path / "own.py"), str(tmp_path / "values.py")])
    assert status == 0, out
