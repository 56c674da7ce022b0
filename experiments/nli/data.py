"""Pairs of sentences for NLI: the public SNLI and MultiNLI files, subsets of them, or made up.

Words are lower-cased tokens with frozen GloVe vectors. A word without a vector gets a random one
that depends only on the word, so that a name is still equal to itself on the other side.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.data_folder import HOW_TO_NAME_IT

__all__ = [
    "DATASETS",
    "LABELS",
    "Batch",
    "Corpus",
    "Encoded",
    "Pair",
    "Vocabulary",
    "load",
    "read_jsonl",
    "read_tsv",
    "read_vectors",
    "tokenize",
    "toy",
]

LABELS = ("entailment", "neutral", "contradiction")
SPLITS = ("train", "valid", "test")
DATASETS = ("snli", "mnli", "toy")
TOY_SIZES = {"train": 1920, "valid": 300, "test": 300}

#: Below the data folder, the first that is there: the public file, else a subset.
_FILES = {
    "snli": {
        "train": ("snli_1.0/snli_1.0_train.jsonl", "nli/snli_train_sub.tsv.gz"),
        "valid": ("snli_1.0/snli_1.0_dev.jsonl", "nli/snli_dev.tsv.gz"),
        "test": ("snli_1.0/snli_1.0_test.jsonl", "nli/snli_test.tsv.gz"),
    },
    "mnli": {
        "train": ("multinli_1.0/multinli_1.0_train.jsonl", "nli/mnli_train_sub.tsv.gz"),
        "held out": (
            "multinli_1.0/multinli_1.0_dev_matched.jsonl",
            "nli/mnli_validation_sub.tsv.gz",
        ),
    },
}

#: "isn't" is "is", "n't"; "John's" is "John", "'s"; "U.S." and "3,000" stay whole, as in GloVe.
_TOKEN = re.compile(
    r"n't\b|'(?:s|re|ve|m|d|ll)\b|\w+?(?=n't\b)"
    r"|[a-z]\.(?:[a-z]\.)+|\d+(?:[.,:]\d+)*(?!\w)|\w+|\.\.\.|--|[^\w\s]"
)


class Pair(NamedTuple):
    """Two sentences, as words, and the index of their label in `LABELS`."""

    premise: list[str]
    hypothesis: list[str]
    label: int


def tokenize(text: str) -> list[str]:
    """Lower-case words, with punctuation, "n't" and "'s" split off.

    Example:
        >>> tokenize("The U.S. team isn't well-known.")
        ['the', 'u.s.', 'team', 'is', "n't", 'well', '-', 'known', '.']
    """
    return _TOKEN.findall(text.lower().replace("’", "'"))


def read_jsonl(path: Path) -> list[Pair]:
    """The public format of SNLI and MultiNLI. Pairs that the annotators disagree on are dropped."""
    with _open(path) as file:
        records = (json.loads(line) for line in file)
        rows = [(r["gold_label"], r["sentence1"], r["sentence2"]) for r in records]
    return _pairs(path, (row for row in rows if row[0] != "-"))


def read_tsv(path: Path) -> list[Pair]:
    """Label, premise and hypothesis, after a line of headings."""
    with _open(path) as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    return _pairs(path, (row for row in rows if row[0] != "-"))


def load(folder: Path, dataset: str) -> dict[str, list[Pair]]:
    """The pairs of "train", "valid" and "test".

    The labels of MultiNLI's test set are not public. Of its matched validation set one half, chosen
    by a checksum of the premise, is for validation and the other for testing: no premise is in
    both.

    Raises:
        SystemExit: if a file is not there.
    """
    if dataset == "toy":
        rng = np.random.default_rng(0)
        return {split: toy(size, rng) for split, size in TOY_SIZES.items()}
    parts = {split: _read(_find(folder, files)) for split, files in _FILES[dataset].items()}
    if "held out" in parts:
        halves: tuple[list[Pair], list[Pair]] = [], []
        for pair in parts.pop("held out"):
            halves[zlib.crc32(" ".join(pair.premise).encode()) % 2].append(pair)
        parts["valid"], parts["test"] = halves
    return parts


def toy(count: int, rng: np.random.Generator, words: int = 30) -> list[Pair]:
    """Pairs made up for tests, which need no vectors.

    The hypothesis is some of the premise's words, in any order (entailment); or one of them has
    become its opposite (contradiction), or a word that is never in a premise (neutral).
    """
    pairs = []
    for label in rng.integers(len(LABELS), size=count).tolist():
        chosen = rng.choice(words, size=rng.integers(4, 9), replace=False)
        hypothesis = [f"word{w}" for w in rng.permutation(chosen)[: rng.integers(2, 5)]]
        if LABELS[label] == "contradiction":
            hypothesis[-1] = hypothesis[-1].replace("word", "opposite")
        elif LABELS[label] == "neutral":
            hypothesis[-1] = f"new{rng.integers(words)}"
        order = rng.permutation(len(hypothesis))
        pairs.append(Pair([f"word{w}" for w in chosen], [hypothesis[i] for i in order], label))
    return pairs


# ---- vectors -------------------------------------------------------------------------------------


def read_vectors(path: Path, wanted: Iterable[str]) -> dict[str, np.ndarray]:
    """GloVe vectors of the wanted words that have one.

    Args:
        path: GloVe's own text format (also .gz), or .npz with `words` and `vectors`.
        wanted: the words to keep.

    Raises:
        SystemExit: if the file is not there.
    """
    if not path.exists():
        raise SystemExit(f"There are no word vectors at {path}: name a file with --vectors.")
    keep = set(wanted)
    if path.suffix == ".npz":
        with np.load(path) as archive:
            words, vectors = archive["words"].tolist(), archive["vectors"].astype(np.float32)
        return {word: vectors[i] for i, word in enumerate(words) if word in keep}
    found = {}
    with _open(path) as file:
        for line in file:
            word, *numbers = line.rstrip().split(" ")
            if word in keep:
                found[word] = np.array(numbers, dtype=np.float32)
    return found


class Vocabulary:
    """Numbers for words, from 1, and their vectors; 0 is padding.

    Args:
        counts: how often each word appears.
        vectors: those of the words that have one, all of the same size.
        size: the size of the random vectors, if there are no others.

    Attributes:
        vectors: `(words + 1, size)`, as they come; Parikh et al. scale them to norm 1. Random ones
            are of the same size on average.
        coverage: the share of the tokens whose word has a vector.
    """

    def __init__(
        self, counts: Mapping[str, int], vectors: Mapping[str, np.ndarray], size: int = 100
    ) -> None:
        self.numbers = {word: i for i, word in enumerate(counts, start=1)}
        scale = 0.5
        if vectors:
            known = np.stack(list(vectors.values()))
            size, scale = known.shape[1], float(np.sqrt(np.square(known).mean()))
        table = np.zeros((len(counts) + 1, size), dtype=np.float32)
        for word, i in self.numbers.items():
            table[i] = vectors[word] if word in vectors else scale * _random_vector(word, size)
        self.vectors = torch.from_numpy(table)
        covered = sum(count for word, count in counts.items() if word in vectors)
        self.coverage = covered / max(sum(counts.values()), 1)

    def encode(self, pairs: Sequence[Pair], longest: int) -> Encoded:
        """The pairs as numbers; of each sentence the first `longest` words."""
        return Encoded(
            *self._pad([pair.premise[:longest] for pair in pairs]),
            *self._pad([pair.hypothesis[:longest] for pair in pairs]),
            torch.tensor([pair.label for pair in pairs]),
        )

    def _pad(self, sentences: Sequence[list[str]]) -> tuple[Tensor, Tensor]:
        lengths = np.array([len(words) for words in sentences])
        table = np.zeros((len(sentences), lengths.max(initial=0)), dtype=np.int64)
        table[np.arange(table.shape[1]) < lengths[:, None]] = [
            self.numbers[word] for words in sentences for word in words
        ]
        return torch.from_numpy(table), torch.from_numpy(lengths)


def _random_vector(word: str, size: int) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(word.encode())).standard_normal(size)


# ---- batches -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Padded sentences `(batch, words)`, their lengths `(batch,)`, and labels `(batch,)`."""

    premise: Tensor
    premise_lengths: Tensor
    hypothesis: Tensor
    hypothesis_lengths: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))


class Encoded(Batch):
    """A whole split, to be cut into batches."""

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> Batch:
        """These rows, without the columns that are padding in all of them."""
        m, n = self.premise_lengths[rows], self.hypothesis_lengths[rows]
        premise, hypothesis = self.premise[rows, : m.max()], self.hypothesis[rows, : n.max()]
        return Batch(premise, m, hypothesis, n, self.labels[rows])

    def batches(self, size: int, rng: np.random.Generator | None = None) -> list[Batch]:
        """All rows in batches of similar lengths, which `rng` draws anew and shuffles.

        Sorted by the premise and cut into stretches of 16 batches; each of them is sorted by the
        hypothesis, and cut into batches.
        """
        m, n = self.premise_lengths.numpy(), self.hypothesis_lengths.numpy()
        ties = np.arange(len(self)) if rng is None else rng.permutation(len(self))
        order = np.lexsort((ties, m))
        stretches = [order[i : i + 16 * size] for i in range(0, len(order), 16 * size)]
        order = np.concatenate([rows[np.lexsort((ties[rows], n[rows]))] for rows in stretches])
        cuts = [order[i : i + size] for i in range(0, len(order), size)]
        if rng is not None:
            rng.shuffle(cuts)
        return [self.take(torch.from_numpy(rows)) for rows in cuts]


@dataclass(frozen=True)
class Corpus:
    """A data set, ready to train on.

    Attributes:
        splits: "train", "valid" and "test".
        vectors: those of the words, `(words, size)`.
        valid_pairs: the validation set in words.
        facts: what a table of results has to say of the data.
    """

    splits: dict[str, Encoded]
    vectors: Tensor
    valid_pairs: list[Pair]
    facts: dict[str, Any]

    @classmethod
    def load(
        cls,
        folder: Path,
        dataset: str,
        vectors: Path,
        *,
        longest: int = 60,
        limit: int | None = None,
    ) -> Corpus:
        """Reads a data set.

        Args:
            folder: the data folder.
            dataset: one of `DATASETS`.
            vectors: a file for `read_vectors`; not read for "toy".
            longest: how many words of each sentence are kept.
            limit: how many training pairs are used.
        """
        pairs = load(folder, dataset)
        pairs["train"] = pairs["train"][:limit]
        every = [pair for split in SPLITS for pair in pairs[split]]
        counts = Counter(word for pair in every for word in (*pair.premise, *pair.hypothesis))
        found = {} if dataset == "toy" else read_vectors(vectors, counts)
        vocabulary = Vocabulary(counts, found)
        cut = sum(max(len(pair.premise), len(pair.hypothesis)) > longest for pair in every)
        facts = {
            **{split: len(pairs[split]) for split in SPLITS},
            "vector_size": vocabulary.vectors.shape[1],
            "coverage": round(100 * vocabulary.coverage, 2),
            "cut_pairs": round(100 * cut / len(every), 2),
        }
        splits = {split: vocabulary.encode(pairs[split], longest) for split in SPLITS}
        return cls(splits, vocabulary.vectors, pairs["valid"], facts)


# ---- files ---------------------------------------------------------------------------------------


def _find(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise SystemExit(
        f"There is no {' or '.join(names)} in {folder}. {HOW_TO_NAME_IT} "
        f"Without data: --dataset toy."
    )


def _read(path: Path) -> list[Pair]:
    return read_jsonl(path) if ".jsonl" in path.name else read_tsv(path)


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _pairs(path: Path, rows: Iterable[Sequence[str]]) -> list[Pair]:
    return list(_numbered(path, rows))


def _numbered(path: Path, rows: Iterable[Sequence[str]]) -> Iterator[Pair]:
    for label, premise, hypothesis in rows:
        if label not in LABELS:
            raise SystemExit(f"{path}: unknown label {label!r}, expected {', '.join(LABELS)}.")
        pair = Pair(tokenize(premise), tokenize(hypothesis), LABELS.index(label))
        if pair.premise and pair.hypothesis:
            yield pair
