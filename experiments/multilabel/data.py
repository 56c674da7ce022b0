"""Multilabel data: Mulan's ARFF files, OpenML, compact .npz files, or made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.data_folder import HOW_TO_NAME_IT, require
from experiments.multilabel.arff import Attribute, label_columns, read_table

__all__ = ["Dataset", "load", "make_synthetic", "read_arff", "read_npz", "read_openml"]

FloatArray = npt.NDArray[np.float32]

#: How many labels Mulan's data sets have, for files without the XML that names them.
LABELS = {"bibtex": 159, "bookmarks": 208, "delicious": 983, "enron": 53, "yeast": 14}
LABELS |= {"tmc2007-500": 22}


@dataclass(frozen=True)
class Dataset:
    """Examples with features, `(n, features)`, and the labels they have, `(n, labels)` of 0 and 1.

    Attributes:
        feature_names: empty if they are not known.
    """

    name: str
    X_train: FloatArray
    Y_train: FloatArray
    X_test: FloatArray
    Y_test: FloatArray
    label_names: tuple[str, ...]
    feature_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for split in ("train", "test"):
            x, y = getattr(self, f"X_{split}"), getattr(self, f"Y_{split}")
            if len(x) != len(y) or y.shape[1] != len(self.label_names):
                raise SystemExit(
                    f"{self.name}, {split}: features {x.shape}, labels {y.shape} and "
                    f"{len(self.label_names)} names of labels do not fit together."
                )
            if not np.isin(y, (0, 1)).all():
                raise SystemExit(f"{self.name}, {split}: labels must be 0 or 1.")

    @property
    def cardinality(self) -> float:
        """How many labels an example has, on average over both splits."""
        return float(np.concatenate([self.Y_train, self.Y_test]).sum(axis=1).mean())


def load(folder: Path | None, name: str, source: str = "auto") -> Dataset:
    """A data set by its name: "synthetic", or one in the data folder, or on OpenML.

    Args:
        folder: has `NAME/NAME.npz` or `mulan_extra/NAME.npz`; or, as Mulan's archives unpack,
            `NAME/NAME-train.arff` and `NAME-test.arff` (or `.arff.gz`), with `NAME.xml`.
        name: such as "bibtex".
        source: "npz", "arff", "openml"; "auto" takes the first of the files that is there.

    Raises:
        SystemExit: if there is no such file, or no folder.
    """
    if name == "synthetic":
        return make_synthetic()
    if source == "openml":
        return read_openml(name, labels=LABELS.get(name))
    folder = require(folder)
    compact = [folder / name / f"{name}.npz", folder / "mulan_extra" / f"{name}.npz"]
    plain = [folder / name / f"{name}-train.arff{end}" for end in ("", ".gz")]
    candidates = {"npz": compact, "arff": plain, "auto": compact + plain}[source]
    path = next((path for path in candidates if path.exists()), None)
    if path is None:
        raise SystemExit(
            f"No data for {name!r}: none of {', '.join(map(str, candidates))} is there. "
            f"{HOW_TO_NAME_IT} Or give another --dataset, or download it: --source openml."
        )
    if path.suffix == ".npz":
        return read_npz(path)
    named = path.with_name(f"{name}.xml")
    labels = named if named.exists() else LABELS.get(name)
    if labels is None:
        raise SystemExit(f"{named} is not there, to say which columns of {path} are labels.")
    return read_arff(path, path.with_name(path.name.replace("-train", "-test")), labels, name=name)


def read_npz(path: Path) -> Dataset:
    """A compact file: `X_train`, `Y_train`, `X_test`, `Y_test` and `label_names`.

    A matrix is dense; or CSR, of ones (`_indptr`, `_indices`, `_shape`); or, for Y, the bits that
    `np.packbits(axis=1)` makes, with `_shape`.
    """
    with np.load(path) as file:
        parts = {name: file[name] for name in file.files}
    arrays = {key: _matrix(path, parts, key) for key in ("X_train", "Y_train", "X_test", "Y_test")}
    features = tuple(map(str, parts.get("feature_names", ())))
    labels = tuple(map(str, parts["label_names"]))
    return Dataset(path.stem, **arrays, label_names=labels, feature_names=features)


def read_arff(
    train: Path, test: Path, labels: int | str | Path, *, name: str | None = None
) -> Dataset:
    """Mulan's files of a data set, dense or sparse, gzipped or not.

    Args:
        train: the training examples.
        test: the test examples, with the same columns.
        labels: which columns are labels: how many of the last ones, or what their names begin
            with, or the path of the XML file with their names.
        name: by default what the files are called.
    """
    attributes, rows = read_table(train)
    others, test_rows = read_table(test)
    if [a.name for a in others] != [a.name for a in attributes]:
        raise SystemExit(f"{train} and {test} do not have the same columns.")
    name = name or train.name.split(".")[0].removesuffix("-train")
    return _from_columns(name, attributes, rows, test_rows, label_columns(attributes, labels))


def read_openml(
    name: str,
    *,
    version: int | str = "active",
    labels: int | str | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """A data set of openml.org, downloaded by scikit-learn.

    OpenML has no official split: a test set is drawn, as the paper does for bookmarks.

    Args:
        name: on OpenML.
        version: its version there.
        labels: where OpenML does not know which columns are labels: how many of the last
            ones, or what their names begin with.
        test_fraction: the share of the examples to test on.
        seed: the seed of the split.

    Raises:
        SystemExit: if scikit-learn is not installed, or can't get the data.
    """
    try:
        from sklearn.datasets import fetch_openml
    except ImportError:
        raise SystemExit(
            'Data from OpenML need scikit-learn: pip install "factormax[experiments]".'
        ) from None
    try:
        found = fetch_openml(name=name, version=version, as_frame=False)
    except (OSError, ValueError) as error:  # no network; no such data set
        raise SystemExit(f"Could not get {name!r} from OpenML: {error}") from error
    columns = [Attribute(str(column)) for column in found.feature_names]
    values = _to_numbers(found.data)
    targets = [str(target) for target in getattr(found, "target_names", None) or ()]
    if len(targets) > 1:
        columns += [Attribute(target) for target in targets]
        values = np.concatenate([values, _to_numbers(found.target)], axis=1)
        is_label = np.arange(len(columns)) >= len(columns) - len(targets)
    elif labels is None:
        raise SystemExit(f"OpenML does not say which columns of {name!r} are labels.")
    else:
        is_label = label_columns(columns, labels)
    order = np.random.default_rng(seed).permutation(len(values))
    held_out = round(test_fraction * len(values))
    test, train = values[order[:held_out]], values[order[held_out:]]
    return _from_columns(name, columns, train, test, is_label)


def make_synthetic(
    train: int = 512, test: int = 256, *, features: int = 60, labels: int = 12, seed: int = 0
) -> Dataset:
    """Examples of a few topics: a topic has words, and labels that go together.

    Every label of a topic is dropped now and then, whatever the words: the others still tell of it.
    """
    rng = np.random.default_rng(seed)
    topics = labels // 2
    words = rng.random((topics, features)) < 0.2
    tags = np.zeros((topics, labels), bool)
    for topic in range(topics):
        tags[topic, rng.choice(labels, 3, replace=False)] = True
    size = train + test
    about = np.zeros((size, topics), bool)
    about[np.arange(size), rng.integers(topics, size=size)] = True
    about |= rng.random((size, topics)) < 0.05
    noise = rng.random((size, features)) < 0.05
    x = (((about @ words) & (rng.random((size, features)) < 0.5)) | noise).astype(np.float32)
    y = ((about @ tags) & (rng.random((size, labels)) < 0.9)).astype(np.float32)
    names = tuple(f"label {i}" for i in range(labels))
    return Dataset("synthetic", x[:train], y[:train], x[train:], y[train:], names)


def _matrix(path: Path, parts: Mapping[str, Any], key: str) -> FloatArray:
    if f"{key}_indices" in parts:
        matrix = np.zeros(parts[f"{key}_shape"], np.float32)
        rows = np.repeat(np.arange(len(matrix)), np.diff(parts[f"{key}_indptr"]))
        matrix[rows, parts[f"{key}_indices"]] = 1
        return matrix
    if key not in parts:
        raise SystemExit(f"{path} has no {key}, and no {key}_indices either.")
    if f"{key}_shape" in parts:
        return np.unpackbits(parts[key], axis=1, count=parts[f"{key}_shape"][1]).astype(np.float32)
    return np.asarray(parts[key], np.float32)


def _from_columns(
    name: str,
    attributes: list[Attribute],
    train: FloatArray,
    test: FloatArray,
    is_label: npt.NDArray[np.bool_],
) -> Dataset:
    def names(which: npt.NDArray[np.bool_]) -> tuple[str, ...]:
        return tuple(a.name for a, wanted in zip(attributes, which, strict=True) if wanted)

    return Dataset(
        name,
        train[:, ~is_label],
        train[:, is_label],
        test[:, ~is_label],
        test[:, is_label],
        label_names=names(is_label),
        feature_names=names(~is_label),
    )


def _to_numbers(table: Any) -> FloatArray:
    """Dense or sparse, of numbers, truth values, or their names, as OpenML has them."""
    array = np.asarray(table.toarray() if hasattr(table, "toarray") else table)
    if array.dtype.kind in "biuf":
        return array.astype(np.float32)
    text = np.char.lower(array.astype(str))
    on, off = np.isin(text, ("1", "1.0", "true", "yes")), np.isin(text, ("0", "0.0", "false", "no"))
    if not (on | off).all():
        return array.astype(np.float32)
    return on.astype(np.float32)
