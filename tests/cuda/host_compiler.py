"""Shared libraries made by the host's C++ compiler, from text, and kept under `build/`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["build"]

_BUILD = Path(__file__).parents[2] / "build" / "cuda-tests"
_FLAGS = ("-std=c++17", "-O0", "-w", "-fPIC", "-shared", "-fvisibility=hidden")


def build(
    source: str,
    includes: dict[str, str] | None = None,
    flags: Sequence[str] = (),
    first: str | None = None,
) -> Path:
    """A shared library made of a C++ source and its headers, all given as text.

    Args:
        source: the text of the library.
        includes: the text of its headers, by name.
        flags: for the compiler, besides the usual ones.
        first: the header that many sources include before all else, and that needs no other: it is
            compiled once for all of them. Compilers that can't use that read its text.
    """
    includes = includes or {}
    files = {**includes, "source.cpp": source}
    if first is None:
        return _made(["source.cpp"], flags, files, ".so")
    header = _made(["-x", "c++-header", first], flags, {first: includes[first]}, ".gch")
    return _made(["source.cpp"], flags, files, ".so", {f"{first}.gch": header})


def _made(
    what: list[str],
    flags: Sequence[str],
    files: dict[str, str],
    suffix: str,
    links: dict[str, Path] | None = None,
) -> Path:
    """What the compiler makes of some files, kept under `build/` by their content.

    Processes that want the same one may each compile it: the last to finish replaces the file of
    the others, which is equal.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("There is no C++ compiler: install one, or set CXX to its path.")
    flags = [*_FLAGS, *flags]
    content = json.dumps([compiler, flags, what, sorted(files.items())])
    made = _BUILD / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}{suffix}"
    if made.exists():
        return made
    _BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_BUILD) as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        for name, target in (links or {}).items():
            Path(folder, name).symlink_to(target)
        command = [*compiler.split(), *flags, *what, "-o", made.name]
        done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8")
        if done.returncode:
            raise RuntimeError(f"{compiler} failed:\n{done.stderr}")
        os.replace(Path(folder, made.name), made)
    return made
