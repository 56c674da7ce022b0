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
    assert len(pydoc.plain(pydoc.render_doc(cls)).splitlines()) <= 90


def test_a_factor_of_ones_own_can_be_typed(tmp_path):
    api = pytest.importorskip("mypy.api")
    code = re.search(r"class Interval\(fm.Factor\):.*?\n\n\n", README.read_text(), re.DOTALL)[0]
    untyped = "def map(self, eta_u, eta_v):"
    assert untyped in code
    typed = "def map(self, eta_u: Vector, eta_v: Vector) -> tuple[Vector, list[float]]:"
    file = tmp_path / "own.py"
    file.write_text(TYPED.format(code=code.replace(untyped, typed)))
    config = tmp_path / "mypy.ini"  # torch is not needed, and takes time
    config.write_text("[mypy]\nstrict = true\n[mypy-torch.*]\nfollow_imports = skip\n")
    out, _, status = api.run([f"--config-file={config}", f"--cache-dir={tmp_path}", str(file)])
    assert status == 0, out
