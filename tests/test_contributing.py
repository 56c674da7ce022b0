"""The guides to new factors, carried out from their own words."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "CONTRIBUTING.md"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def section(begin, end):
    text = GUIDE.read_text(encoding="utf-8")
    return text[text.index(begin) : text.index(end)]


def blocks(language, text):
    found = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    return ["".join(line[3:] + "\n" for line in b.rstrip().split("\n")) for b in found]


def test_a_factor_made_of_rows():
    code = blocks("python", section("## Add a factor", "## Add a structured factor"))
    assert len(code) == 2
    exec(compile("\n".join(code), str(GUIDE), "exec"), {"__name__": "guide"})


def write_structured_factor(root):
    """Does in a copy of the repository what the guide says; returns the code of its check."""
    text = section("## Add a structured factor", "## Add an engine")
    oracle, line, test = blocks("cpp", text)
    factor, check = blocks("python", text)
    for code in (oracle, test, factor):
        path, rest = code.split("\n", 1)
        (root / path.split()[1]).write_text(rest, encoding="utf-8")
    registry = root / "cpp/include/factormax/structured/oracle.hpp"
    before = registry.read_text(encoding="utf-8")
    include = '#include "factormax/oracle/table.hpp"\n'
    after = before.replace(include, include + '#include "factormax/oracle/window.hpp"\n')
    after = after.replace("  ORACLE(callback", f"  {line.strip()}\n  ORACLE(callback")
    assert after.count("window") == 2
    registry.write_text(after, encoding="utf-8")
    return check


@needs_compiler
def test_an_oracle(tmp_path):
    """Its C++ test needs the headers alone."""
    shutil.copytree(ROOT / "cpp", tmp_path / "cpp")
    (tmp_path / "src/factormax/factors").mkdir(parents=True)
    write_structured_factor(tmp_path)
    cpp, program = tmp_path / "cpp", tmp_path / "test_window"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fopenmp-simd"]
    source = [f"-I{cpp / 'include'}", str(cpp / "tests/test_window.cpp"), "-o", str(program)]
    subprocess.run([COMPILER, *flags, *source], check=True)
    subprocess.run([program], check=True)


@needs_compiler
@pytest.mark.slow
def test_a_structured_factor(tmp_path):
    """The whole library, built with a new factor."""
    for part in ("cpp", "src"):
        shutil.copytree(ROOT / part, tmp_path / part)
    for part in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(ROOT / part, tmp_path)
    check = write_structured_factor(tmp_path)
    build, site = tmp_path / "build", tmp_path / "src"
    for command in (
        [
            f"-S{tmp_path}",
            f"-B{build}",
            "-DCMAKE_BUILD_TYPE=Debug",
            f"-DPython_EXECUTABLE={sys.executable}",
        ],
        ["--build", build, "--parallel", "2"],
        ["--install", build, "--prefix", site, "--component", "python"],
    ):
        subprocess.run([shutil.which("cmake", path=search_path()), *command], check=True)
    # Without site, whose hook would find the installed package first.
    path = os.pathsep.join([str(site), *sys.path[1:]])
    subprocess.run(
        [sys.executable, "-S", "-c", check], check=True, env={**os.environ, "PYTHONPATH": path}
    )


def search_path():
    """Programs of the environment that the tests run in come first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def test_files_that_are_named_are_there():
    for text in (section("## Where things are", "## Add an engine"), section("## Fuzz", "## Lint")):
        for path in re.findall(r"`((?:src|cpp|docs|fuzz|experiments|tests)/[^`]*)`", text):
            assert (ROOT / path).exists(), path


# Where the guides send a reader to add something, beside the two that are carried out above.
PLACES = {
    "fuzz/case.py": ["ROWS", "STRUCTURED"],
    "fuzz/generate.py": ["_row_params", "_shape", "_sample", "_mask"],
    "fuzz/model.py": ["_allows", "linear_rows", "valid_structure", "_LIFTS"],
    "tests/contract.py": [
        "AxisContract",
        "CountContract",
        *"each parameter bad others message".split(),
    ],
    "tests/every_factor.py": ["EXAMPLES"],
    "tests/meaning.py": ["MEANING", "random_params", "RELAXED"],
    "tests/oracle.py": ["rows"],
    "tests/structured_contract.py": [
        "StructuredContract",
        *"cases padded impossible whole".split(),
    ],
    "tests/test_fuzz.py": ["single"],
    "tests/test_reference_structures.py": ["FACTORS"],
}


@pytest.mark.parametrize("path", PLACES)
def test_what_a_guide_names_is_there(path):
    guide = section("## Fuzz", "## Lint") + section("## Add a factor", "## Add an engine")
    code = (ROOT / path).read_text(encoding="utf-8")
    assert f"`{path}`" in guide
    for name in PLACES[path]:
        assert f"`{name}`" in guide, name
        assert re.search(rf"^ *(?:def |class )?{name}\b *[=:(|]", code, flags=re.MULTILINE), name
