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


# Stands for torch, which takes mypy a minute to read.
TORCH = """
class Tensor:
    def sum(self) -> Tensor: ...
    def __float__(self) -> float: ...

def zeros(*shape: int) -> Tensor: ...
"""


def check_types(folder, code):
    """Runs mypy --strict on a file that imports factormax."""
    api = pytest.importorskip("mypy.api")
    (folder / "torch").mkdir()
    (folder / "torch/__init__.pyi").write_text(TORCH)
    (folder / "own.py").write_text(code)
    lines = ["[mypy]", "strict = true", f"mypy_path = {folder}"]
    lines += ["[mypy-factormax.*]", "follow_imports = silent"]
    (folder / "mypy.ini").write_text("\n".join(lines))
    options = [f"--config-file={folder / 'mypy.ini'}", f"--cache-dir={folder / 'cache'}"]
    out, _, status = api.run([*options, str(folder / "own.py")])
    assert status == 0, out


def test_a_factor_of_ones_own_can_be_typed(tmp_path):
    code = re.search(r"class Interval\(fm.Factor\):.*?\n\n\n", README.read_text(), re.DOTALL)[0]
    untyped = "def map(self, eta_u, eta_v):"
    assert untyped in code
    typed = "def map(self, eta_u: Vector, eta_v: Vector) -> tuple[Vector, list[float]]:"
    check_types(tmp_path, TYPED.format(code=code.replace(untyped, typed)))


VALUES = """
from typing import Any

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
total(u) + total(v)
"""


def test_values_have_the_type_of_the_scores(tmp_path):
    check_types(tmp_path, VALUES)
