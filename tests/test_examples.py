"""Every example runs, as a reader would run it, with its settings made small."""

import os
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


def test_paper_matching():
    assert run("paper_matching.py").count("tensor(") == 2


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


def test_every_example_is_tested():
    tested = {"paper_matching.py", "batch_with_masks.py", "matching_points.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested
