"""The programs of docs/howto/several_machines.md, on clusters of local processes."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "several_machines.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)

pytestmark = pytest.mark.slow


def run(folder: Path, marker: str, *launcher: str) -> str:
    """What the program of the page that has this marker prints."""
    (program,) = (code for code in PROGRAMS if marker in code)
    path = folder / "program.py"
    path.write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *launcher, str(path)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}")


def test_training_on_two_processes(tmp_path):
    need("torch")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    printed = run(tmp_path, "DistributedDataParallel", *launcher)
    found = dict(re.findall(r"process (\d) of 2: transition (-?[\d.]+)", printed))
    assert set(found) == {"0", "1"}
    assert found["0"] == found["1"] and float(found["0"]) != 0.1  # learned, and the same


def test_dask_on_two_processes(tmp_path):
    need("distributed")
    printed = run(tmp_path, "LocalCluster")
    mean, used = re.search(r"mean score (\S+), at most (\d+) per row", printed).groups()
    assert float(mean) > 8 and used == "1"


def test_ray_on_two_processes(tmp_path):
    need("ray")
    assert "100% of 2000 proved" in run(tmp_path, "ray.init")
