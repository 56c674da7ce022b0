"""Attribute-relation files, dense and sparse, as Mulan publishes multilabel data."""

from __future__ import annotations

import csv
import gzip
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["Attribute", "label_columns", "read_table"]

_ATTRIBUTE = re.compile(
    r"@attribute\s+(?:'((?:\\.|[^'])*)'|\"((?:\\.|[^\"])*)\"|(\S+))\s+(.*)", re.IGNORECASE
)
_NUMERIC = ("numeric", "real", "integer")


@dataclass(frozen=True)
class Attribute:
    """A column.

    Attributes:
        name: without quotes.
        values: what the values of a nominal column stand for: themselves if all are numbers, else
            their place in the list. None for a numeric column.
    """

    name: str
    values: dict[str, float] | None = None

    @property
    def default(self) -> float:
        """What a sparse row leaves out: 0, which for a nominal column is its first value."""
        return next(iter(self.values.values())) if self.values else 0.0


def read_table(path: Path) -> tuple[list[Attribute], npt.NDArray[np.float32]]:
    """The columns, and the rows as numbers, `(rows, columns)`; gzipped or not.

    Raises:
        SystemExit: if the file is not of this format, or a value is missing or of another type.
    """
    attributes: list[Attribute] = []
    rows: list[npt.NDArray[np.float32]] = []
    in_data = False
    defaults = np.zeros(0, np.float32)
    for number, line in _lines(path):
        try:
            if in_data:
                rows.append(_row(line, attributes, defaults))
            elif line.lower().startswith("@attribute"):
                attributes.append(_attribute(line))
            elif line.lower().startswith("@data"):
                in_data = True
                defaults = np.array([a.default for a in attributes], np.float32)
        except ValueError as error:
            raise SystemExit(f"{path}, line {number}: {error!s} in {line[:60]!r}.") from None
    if not rows:
        raise SystemExit(f"{path} has no rows after @data: is it an ARFF file?")
    return attributes, np.stack(rows)


def label_columns(
    attributes: Sequence[Attribute], labels: int | str | Path
) -> npt.NDArray[np.bool_]:
    """Which columns are labels.

    Args:
        attributes: the columns.
        labels: how many of the last columns; or what their names begin with; or the path of
            Mulan's XML file with their names.

    Raises:
        SystemExit: if there are none such.
    """
    names = [attribute.name for attribute in attributes]
    if isinstance(labels, int):
        found = np.arange(len(names)) >= len(names) - labels
    elif isinstance(labels, Path):
        elements = ElementTree.parse(labels).iter()
        wanted = {element.attrib["name"] for element in elements if "name" in element.attrib}
        if missing := wanted - set(names):
            raise SystemExit(f"{labels} names labels that are no columns: {sorted(missing)[:3]}.")
        found = np.array([name in wanted for name in names])
    else:
        found = np.array([name.startswith(labels) for name in names])
    if not 0 < found.sum() < len(names):
        raise SystemExit(f"labels={labels!r} makes {found.sum()} of {len(names)} columns labels.")
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that say something, with their numbers."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if (text := line.strip()) and not text.startswith("%"):
                yield number, text


def _attribute(line: str) -> Attribute:
    match = _ATTRIBUTE.fullmatch(line)
    if match is None:
        raise ValueError("no name and type")
    *names, kind = match.groups()
    name = re.sub(r"\\(.)", r"\1", next(n for n in names if n is not None))
    if kind.startswith("{"):
        values = _split(kind.strip("{} \t"))
        try:
            return Attribute(name, {value: float(value) for value in values})
        except ValueError:
            return Attribute(name, {value: float(i) for i, value in enumerate(values)})
    if kind.split()[0].lower() not in _NUMERIC:
        raise ValueError(f"type {kind} (only numbers and nominal values are read)")
    return Attribute(name)


def _row(
    line: str, attributes: Sequence[Attribute], defaults: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    row = defaults.copy()
    if line.startswith("{"):
        for entry in _split(line.strip("{} \t")):
            place, value = entry.split(None, 1)
            if not 0 <= int(place) < len(attributes):
                raise ValueError(f"there is no column {place}")
            row[int(place)] = _number(attributes[int(place)], value)
        return row
    values = _split(line)
    if len(values) != len(attributes):
        raise ValueError(f"{len(values)} values for {len(attributes)} columns")
    row[:] = [_number(a, value) for a, value in zip(attributes, values, strict=True)]
    return row


def _number(attribute: Attribute, text: str) -> float:
    text = text.strip("'\" \t")
    if attribute.values is None:
        return float(text)  # "?" is no number: data with gaps are not for these models
    if text not in attribute.values:
        raise ValueError(f"{text!r} is no value of {attribute.name}")
    return attribute.values[text]


def _split(text: str) -> list[str]:
    """At commas, except in quotes. Without the quotes, where a value is nothing but quoted."""
    if not text:
        return []
    if "'" not in text and '"' not in text:
        return [part.strip() for part in text.split(",")]
    quote = "'" if "'" in text else '"'
    reader = csv.reader([text], quotechar=quote, escapechar="\\", skipinitialspace=True)
    return [part.strip() for part in next(reader)]
