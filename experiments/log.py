"""The file of a run: what was run, what every epoch gave, and the result, as JSON lines."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Run", "RunFile", "machine", "read_runs"]


@dataclass
class Run:
    """A run as read from its file.

    Attributes:
        header: experiment, dataset, model, seed, settings, machine, versions.
        epochs: one record for each epoch: loss, validation metrics, times.
        result: the best epoch: its number, metrics, exhibits. None while the run goes on.
    """

    header: dict[str, Any]
    epochs: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        """Entries of the header, as `run.model`."""
        try:
            return self.__dict__["header"][name]
        except KeyError:
            raise AttributeError(name) from None


class RunFile:
    """The file of one run, written a line at a time.

    Args:
        path: its folder is made if need be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Run | None:
        """The run so far; None if the file is not there. A half-written last line is dropped."""
        if not self.path.exists():
            return None
        records = list(_records(self.path))
        if not records or records[0]["kind"] != "run":
            raise SystemExit(f"{self.path} is not the file of a run: move it away.")
        run = Run(records[0])
        for record in records[1:]:
            if record["kind"] == "epoch":
                run.epochs.append(record)
            else:
                run.result = record
        return run

    def start(self, header: dict[str, Any], epochs: Iterable[dict[str, Any]] = ()) -> None:
        """Writes the file anew: the header, and the epochs of an interrupted run that count."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"kind": "run", **header}, *epochs]
        beside = self.path.with_suffix(".part")
        beside.write_text("".join(_line(record) for record in lines), encoding="utf-8")
        os.replace(beside, self.path)

    def append(self, kind: str, **record: Any) -> None:
        """Adds a record: an "epoch", or the "result"."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line({"kind": kind, **record}))


def read_runs(folder: Path) -> list[Run]:
    """All finished runs below a folder, in the order of their files."""
    runs = (RunFile(path).read() for path in sorted(folder.rglob("*.jsonl")))
    return [run for run in runs if run is not None and run.result is not None]


def machine(device: str = "cpu") -> dict[str, Any]:
    """What a run on this device was on, as far as it bears on times."""
    import torch

    import factormax

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0].split(":", 1)[1].strip() if models else name
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "factormax": factormax.__version__,
        **({"gpu": torch.cuda.get_device_name(device)} if device != "cpu" else {}),
    }


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _records(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise SystemExit(f"{path}, line {number}: {error}. Move the file away.") from None
