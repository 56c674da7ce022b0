"""ListOps expressions: the published files, or made from the same grammar; and their gold trees.

The tokens of `[MAX 2 9 [MIN 4 7 ] 0 ]` are operators, digits, and `]`. In the gold tree an operator
is the head of its arguments, the outermost one hangs from the root, and `]` hangs from the token to
its left. That token is a digit or another `]`, neither of which has other dependents, so that no
token has more dependents than an operator has arguments: five at most.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.data_folder import HOW_TO_NAME_IT

__all__ = [
    "VALENCIES",
    "VOCABULARY",
    "Batch",
    "Expression",
    "Expressions",
    "Splits",
    "Tree",
    "evaluate",
    "generate",
    "load",
    "make_splits",
    "parse",
    "read_tsv",
]

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSE = "]"
DIGITS = tuple("0123456789")
#: The numbers of the tokens; 0 is padding.
VOCABULARY = {token: i for i, token in enumerate((*OPERATORS, CLOSE, *DIGITS), start=1)}
#: How many arguments an operator can have: the tags.
VALENCIES = (2, 3, 4, 5)

MAX_LENGTH = 100
MAX_DEPTH = 20
#: Drawn from the grammar if there is no file: as many as the paper keeps of the published one.
TRAINING = 80446
VALIDATION = 10_000

#: Below the data folder, the first that is there: the published file, else what stands in for it.
_FILES = {
    "train": ("listops/train_d20s.tsv", "listops/listops_train_regen.tsv.gz"),
    "test": ("listops/test_d20s.tsv", "listops/listops_test_d20s.tsv.gz"),
}


class Expression(NamedTuple):
    """An expression and its value."""

    label: int
    tokens: list[str]


class Tree(NamedTuple):
    """The gold tree: for every token its head (itself: the root), and how many arguments it has."""

    heads: list[int]
    valency: list[int]


def evaluate(tokens: Sequence[str]) -> int:
    """The value of an expression. MED is the median, truncated; SM the sum modulo 10.

    Example:
        >>> evaluate("[MAX 2 [MED 4 7 ] [SM 5 6 ] ]".split())
        5
    """
    stack: list[list[int]] = [[]]
    names: list[str] = []
    for token in tokens:
        if token in OPERATORS:
            names.append(token)
            stack.append([])
        elif token == CLOSE:
            arguments = stack.pop()
            stack[-1].append(_apply(names.pop(), arguments))
        else:
            stack[-1].append(int(token))
    ((value,),) = stack
    return value


def parse(tokens: Sequence[str]) -> Tree:
    """The gold tree.

    Example:
        >>> parse("[MAX 2 [MIN 4 7 ] ]".split())
        Tree(heads=[0, 0, 0, 2, 2, 4, 5], valency=[2, 0, 2, 0, 0, 0, 0])
    """
    heads, valency = [], [0] * len(tokens)
    open_operators: list[int] = []
    for i, token in enumerate(tokens):
        if token == CLOSE:
            heads.append(i - 1)
            open_operators.pop()
            continue
        if open_operators:
            heads.append(open_operators[-1])
            valency[open_operators[-1]] += 1
        else:
            heads.append(i)
        if token in OPERATORS:
            open_operators.append(i)
    return Tree(heads, valency)


def generate(count: int, seed: int = 0, max_length: int = MAX_LENGTH) -> list[Expression]:
    """Expressions drawn from the grammar of ListOps, no two of them equal.

    Args:
        count: how many.
        seed: the seed of the random numbers.
        max_length: longer ones, in tokens, are drawn again.
    """
    rng = random.Random(seed)
    found: dict[str, Expression] = {}
    while len(found) < count:
        tokens: list[str] = []
        label = _draw(rng, 1, tokens)
        if len(tokens) <= max_length:
            found.setdefault(" ".join(tokens), Expression(label, tokens))
    return list(found.values())


def read_tsv(path: Path) -> list[Expression]:
    """A file of ListOps, a label and tokens on every line; parentheses are left out."""
    opener = gzip.open if path.suffix == ".gz" else open
    expressions = []
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            label, tab, text = line.rstrip("\n").partition("\t")
            tokens = [token for token in text.split() if token not in "()"]
            if not tab or not label.isdecimal() or not VOCABULARY.keys() >= set(tokens):
                raise ValueError(f"{path}, line {number}: not a label, a tab and an expression.")
            expressions.append(Expression(int(label), tokens))
    return expressions


def _apply(name: str, arguments: list[int]) -> int:
    if name == "[MIN":
        return min(arguments)
    if name == "[MAX":
        return max(arguments)
    if name == "[SM":
        return sum(arguments) % 10
    ordered, middle = sorted(arguments), len(arguments) // 2
    if len(arguments) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) // 2


def _draw(rng: random.Random, depth: int, tokens: list[str]) -> int:
    """Appends an expression drawn from the grammar, and returns its value."""
    if depth >= MAX_DEPTH or rng.random() >= 0.25:
        digit = rng.randrange(10)
        tokens.append(str(digit))
        return digit
    name = rng.choice(OPERATORS)
    tokens.append(name)
    arguments = [_draw(rng, depth + 1, tokens) for _ in range(rng.choice(VALENCIES))]
    tokens.append(CLOSE)
    return _apply(name, arguments)


# ---- as tensors ----------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Expressions of similar length, padded at the end.

    Attributes:
        tokens: `(batch, n)`, by `VOCABULARY`, 0 is padding.
        heads: `(batch, n)`, the head of each token in the gold tree; the root's is itself.
        valency: `(batch, n)`, the arguments of each operator, 0 elsewhere.
        lengths: `(batch,)`.
    """

    tokens: Tensor
    heads: Tensor
    valency: Tensor
    lengths: Tensor

    @property
    def present(self) -> Tensor:
        """Which tokens are there, `(batch, n)`."""
        return self.tokens > 0

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(part.to(device) for part in self))

    def words(self) -> list[list[str]]:
        """The tokens as they are written, without padding."""
        names = ["", *VOCABULARY]
        return [[names[t] for t in row if t] for row in self.tokens.tolist()]


class Expressions:
    """Many expressions as tensors, from which batches are cut.

    Args:
        expressions: the tokens of each; those longer than `max_length` are left out.
        max_length: in tokens.
    """

    def __init__(self, expressions: Iterable[Sequence[str]], max_length: int = MAX_LENGTH) -> None:
        kept = [tokens for tokens in expressions if len(tokens) <= max_length]
        self.lengths = torch.tensor([len(tokens) for tokens in kept], dtype=torch.long)
        # A byte a token: the whole training set is 3 × 8 MB.
        arrays = np.zeros((3, len(kept), max_length), np.uint8)
        for row, tokens in enumerate(kept):
            arrays[:, row, : len(tokens)] = [VOCABULARY[t] for t in tokens], *parse(tokens)
        self._tokens, self._heads, self._valency = torch.from_numpy(arrays)

    def __len__(self) -> int:
        return len(self.lengths)

    def part(self, index: Tensor | slice) -> Expressions:
        """Those expressions alone."""
        part = object.__new__(Expressions)
        for name, value in vars(self).items():
            setattr(part, name, value[index])
        return part

    def batch(self, index: Tensor) -> Batch:
        """The expressions of these numbers, padded to the longest."""
        lengths = self.lengths[index]
        n = int(lengths.max())
        tokens, heads, valency = (
            part[index, :n].long() for part in (self._tokens, self._heads, self._valency)
        )
        return Batch(tokens, heads, valency, lengths)

    def valency_counts(self) -> dict[int, int]:
        """The number of operators, by their number of arguments."""
        counts = torch.bincount(self._valency.flatten(), minlength=max(VALENCIES) + 1)
        return {valency: int(counts[valency]) for valency in VALENCIES}


@dataclass(frozen=True)
class Splits:
    """What to train on, to choose by, and to test on."""

    train: Expressions
    valid: Expressions
    test: Expressions


def load(folder: Path, max_length: int = MAX_LENGTH) -> Splits:
    """The files below the data folder; 10000 of the training expressions are for validation.

    Without a file of training expressions, as many as the paper has are drawn from the grammar;
    none of them is in the test set.

    Raises:
        SystemExit: if there is no test set.
    """
    test = [e.tokens for e in read_tsv(_find(folder, "test"))]
    if any((folder / name).exists() for name in _FILES["train"]):
        train = [e.tokens for e in read_tsv(_find(folder, "train"))]
    else:
        known = set(map(tuple, test))
        drawn = (e.tokens for e in generate(TRAINING + len(test)))
        train = [tokens for tokens in drawn if tuple(tokens) not in known][:TRAINING]
    kept = Expressions(train, max_length)
    return _hold_out(kept, Expressions(test, max_length), min(VALIDATION, len(kept) // 2))


def make_splits(sizes: tuple[int, int, int], max_length: int = MAX_LENGTH) -> Splits:
    """Made-up expressions, all different; sizes: of the training, validation and test sets."""
    tokens = [e.tokens for e in generate(sum(sizes), max_length=max_length)]
    test = Expressions(tokens[: sizes[2]], max_length)
    return _hold_out(Expressions(tokens[sizes[2] :], max_length), test, sizes[1])


def _hold_out(train: Expressions, test: Expressions, count: int) -> Splits:
    """Takes the validation set out of the training set, the same for all seeds."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(train)))
    return Splits(train.part(order[count:]), train.part(order[:count]), test)


def _find(folder: Path, split: str) -> Path:
    for name in _FILES[split]:
        if (folder / name).exists():
            return folder / name
    raise SystemExit(
        f"No {' or '.join(_FILES[split])} in {folder}. {HOW_TO_NAME_IT} "
        f"Without data: --generate COUNT."
    )
