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


def build(source: str, includes: dict[str, str] | None = None, flags: Sequence[str] = ()) -> Path:
    """A shared library made of a C++ source and its headers, all given as text.

    It is kept under `build/` by its content. Processes that want the same one may each compile it:
    the last to finish replaces the file of the others, which is equal.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("There is no C++ compiler: install one, or set CXX to its path.")
    includes = includes or {}
    flags = [*_FLAGS, *flags]
    content = json.dumps([compiler, flags, source, sorted(includes.items())])
    library = _BUILD / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.so"
    if library.exists():
        return library
    _BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_BUILD) as folder:
        for name, text in {**includes, "source.cpp": source}.items():
            Path(folder, name).write_text(text)
        command = [*compiler.split(), *flags, "source.cpp", "-o", "library.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{compiler} failed:\n{done.stderr}")
        os.replace(Path(folder, "library.so"), library)
    return library
