"""The folder with the data sets, which are not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["HOW_TO_NAME_IT", "data_folder", "require"]

#: What every message about missing data ends with.
HOW_TO_NAME_IT = (
    "Name the data folder with --data FOLDER or with the environment variable FACTORMAX_DATA."
)


def data_folder() -> Path | None:
    """The folder that the environment variable FACTORMAX_DATA names; None if it is not set."""
    named = os.environ.get("FACTORMAX_DATA")
    return Path(named) if named else None


def require(folder: Path | None) -> Path:
    """The folder itself.

    Raises:
        SystemExit: if there is none.
    """
    if folder is None:
        raise SystemExit(f"This needs data sets, and no data folder is known. {HOW_TO_NAME_IT}")
    return folder
