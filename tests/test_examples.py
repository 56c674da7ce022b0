"""Every tutorial runs, as a reader would run it, and draws its pictures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parent.parent / "examples"

# Runs a script, then says how many figures it drew, if each of them has something on it.
RUN = """
import runpy, sys
import numpy as np
from matplotlib import pyplot as plt

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
for number in plt.get_fignums():
    canvas = plt.figure(number).canvas
    canvas.draw()
    assert (np.asarray(canvas.buffer_rgba())[..., :3] < 250).any(axis=-1).sum() > 500, number
print("figures:", len(plt.get_fignums()))
"""


@pytest.fixture
def run(tmp_path):
    def call(name: str, steps: int | None = None) -> str:
        """What the example prints; it must succeed, and every solve in it must converge."""
        code = (EXAMPLES / name).read_text(encoding="utf-8")
        if steps is not None:
            code, count = re.subn(r"^STEPS = \d+$", f"STEPS = {steps}", code, flags=re.MULTILINE)
            assert count == 1
        script = tmp_path / name  # a copy, so that what it saves is not among the examples
        script.write_text(code, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(script)],
            capture_output=True,
            text=True,
            timeout=300,
            env={
                **os.environ,
                "PYTHONIOENCODING": "utf-8",
                "MPLBACKEND": "Agg",
                "OMP_NUM_THREADS": "1",
            },
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "NotConvergedWarning" not in done.stderr, done.stderr
        return done.stdout

    return call


def figures(printed: str) -> int:
    return int(re.search(r"figures: (\d+)", printed)[1])


def test_batch_with_masks(run):
    printed = run("batch_with_masks.py")
    assert "converged: [True, True, True]" in printed and "b: [0.75, 0.0]" in printed
    assert figures(printed) == 1


def test_custom_factor(run):
    printed = run("custom_factor.py")
    assert printed.count("made up of") == 2 and "in expectation" in printed
    assert figures(printed) == 4


def test_dependency_parsing(run):
    printed = run("dependency_parsing.py", steps=30)
    without, with_valencies = map(int, re.findall(r"right, (\d+)% of the phrases", printed))
    assert without < 75 and with_valencies > 95
    assert figures(printed) == 2


def test_jax_training(run):
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    printed = run("jax_training.py", steps=40)
    before, after = map(int, re.findall(r"(\d+)% of the points", printed))
    assert before < 40 and after > 80
    assert figures(printed) == 1


def test_jax_training_without_jax(tmp_path):
    """It says what is missing, and that is all."""
    code = "import sys, runpy; sys.modules['optax'] = None; runpy.run_path(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(EXAMPLES / "jax_training.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "This tutorial needs" in done.stdout and "pip install" in done.stdout


def test_matching_points(run, tmp_path):
    pytest.importorskip("tqdm")
    printed = run("matching_points.py", steps=3)
    assert "points of A matched correctly" in printed
    assert figures(printed) == 1
    assert (tmp_path / "output/matching_points.png").read_bytes().startswith(b"\x89PNG")


def test_multilabel(run):
    printed = run("multilabel.py", steps=60)
    alone, pairs = map(float, re.findall(r"right, (.*)% of the scenes", printed))
    assert alone + 5 < pairs
    assert figures(printed) == 3


def test_on_a_gpu(run):
    printed = run("on_a_gpu.py")
    assert "engine: " in printed
    assert figures(printed) == 2


def test_paper_listings(run):
    printed = run("paper_listings.py")
    assert printed.count("tensor(") == 6  # three problems: a solution and a gradient each
    assert "n=5, constrain=False" in printed and "n=5, constrain=True" in printed
    assert figures(printed) == 2


def test_rationale_mask(run):
    printed = run("rationale_mask.py", steps=60)
    before, after, right = map(int, re.findall(r"(\d+)%", printed))
    assert before < 60 and after > 90 and right > 90
    assert figures(printed) == 1


def test_structured_attention(run):
    printed = run("structured_attention.py")
    softmax, matching = map(int, re.findall(r"(\d+)% right", printed))
    assert softmax < 75 and matching > 95
    assert figures(printed) == 1


def test_tree_structures(run):
    printed = run("tree_structures.py")
    probs = re.findall(r"^(\d\.\d+)  on ←", printed, re.MULTILINE)
    assert len(probs) > 1 and sum(map(float, probs)) == pytest.approx(1, abs=0.03)  # two digits
    assert figures(printed) == 2


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_they_are_tutorials(path):
    """A title, cells with prose, something to try next, and a test of its own here."""
    text = path.read_text(encoding="utf-8")
    assert re.match(r'"""\n(.+)\n=+\n', text)
    assert text.count("\n# %%\n") >= 4 and "# What to try next\n" in text
    assert "argparse" not in text
    assert f"def test_{path.stem}(" in Path(__file__).read_text(encoding="utf-8")
