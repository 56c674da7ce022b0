"""The code of the README runs as it is printed."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_readme_code_runs():
    assert len(BLOCKS) >= 2
    names: dict[str, object] = {}
    for block in BLOCKS:  # one after the other, as a reader would type them
        exec(compile(block, "README.md", "exec"), names)
    assert names["solution"].converged.all()
    assert (names["u"].value[~names["mask"]] == 0).all()
