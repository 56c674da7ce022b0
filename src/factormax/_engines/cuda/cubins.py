"""Machine code of kernels, kept on disk from one process to the next.

The folder is the one that the environment variable `FACTORMAX_CACHE` names, else `factormax` in
`XDG_CACHE_HOME` or `~/.cache`. If `FACTORMAX_CACHE` is empty, nothing is kept. Any number of
processes may use a folder at once, and a file in it may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

__all__ = ["folder", "read", "write"]


def folder() -> Path | None:
    """Where code is kept, or None."""
    chosen = os.environ.get("FACTORMAX_CACHE")
    if chosen is not None:
        return Path(chosen) if chosen else None
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(shared) if shared else Path.home() / ".cache") / "factormax"
    except RuntimeError:  # there is no home folder
        return None


def read(key: str) -> bytes | None:
    """What was written under this key; None if there is nothing, or it is damaged."""
    place = folder()
    if place is None:
        return None
    try:
        content = (place / f"{key}.cubin").read_bytes()
    except OSError:
        return None
    size = hashlib.sha256().digest_size
    digest, code = content[:size], content[size:]
    return code if hashlib.sha256(code).digest() == digest else None


def write(key: str, code: bytes) -> bool:
    """Keeps the code. Returns False if the folder can't be written to, which is not an error."""
    place = folder()
    if place is None:
        return False
    try:
        place.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=place, prefix=f"{key}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, place / f"{key}.cubin")  # atomically, so nobody reads half of it
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError:
        return False
    return True
