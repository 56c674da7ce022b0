"""Data sets that are not part of the repository: tests that need them are skipped without."""

from pathlib import Path

import pytest

from experiments.data_folder import data_folder


def real_data(name: str) -> tuple[Path, pytest.MarkDecorator]:
    """The path of a file in the data folder, and the mark of the tests that read it."""
    folder = data_folder()
    if folder is None:
        return Path(name), pytest.mark.skip(reason=f"needs {name}: FACTORMAX_DATA is not set")
    path = folder / name
    reason = f"needs {name}, which is not in the folder that FACTORMAX_DATA names"
    return path, pytest.mark.skipif(not path.exists(), reason=reason)
