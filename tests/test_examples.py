"""Every example runs, as a reader would run it, with its settings made small."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    """What the example prints; it must succeed, and every solve in it must converge."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "NotConvergedWarning" not in done.stderr, done.stderr
    return done.stdout


def test_paper_listings():
    printed = run("paper_listings.py")
    assert printed.count("tensor(") == 6  # three problems: a solution and a gradient each
    assert "n=5, constrain=False" in printed and "n=5, constrain=True" in printed


def test_batch_with_masks():
    assert "converged: [True, True, True]" in run("batch_with_masks.py")


def test_matching_points(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    picture = tmp_path / "new folder" / "picture.png"
    printed = run("matching_points.py", "--steps", "3", "--output", str(picture))
    assert "points of A matched correctly" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_matching_points_without_a_picture(tmp_path):
    pytest.importorskip("tqdm")
    picture = tmp_path / "picture.png"
    run("matching_points.py", "--steps", "1", "--output", str(picture), "--no-plot")
    assert not picture.exists()


def test_rationale_mask(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    printed = run("rationale_mask.py", "--steps", "60", "--output", str(picture))
    before, after, right = map(int, re.findall(r"(\d+)%", printed))
    assert before < 60 and after > 90 and right > 90
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_custom_factor():
    printed = run("custom_factor.py")
    assert printed.count("made up of") == 2 and "tensor(" in printed


def test_tree_structures(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    printed = run("tree_structures.py", "--output", str(picture))
    probs = re.findall(r"^(\d\.\d+)  She ← saw", printed, re.MULTILINE)
    assert len(probs) > 1 and sum(map(float, probs)) == pytest.approx(1, abs=0.03)  # two digits
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_structured_attention(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    printed = run("structured_attention.py", "--output", str(picture))
    softmax, matching = map(int, re.findall(r"(\d+)% right", printed))
    assert softmax < 75 and matching > 95
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_jax_training():
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    before, after = map(
        int, re.findall(r"(\d+)% of the points", run("jax_training.py", "--steps", "40"))
    )
    assert before < 40 and after > 80


def test_every_example_is_tested():
    tested = {
        "batch_with_masks.py",
        "custom_factor.py",
        "jax_training.py",
        "matching_points.py",
        "paper_listings.py",
        "rationale_mask.py",
        "structured_attention.py",
        "tree_structures.py",
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested
