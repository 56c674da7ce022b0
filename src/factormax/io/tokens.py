"""The words of a text file, with line numbers for error messages."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from decimal import Decimal, InvalidOperation
from pathlib import Path

import numpy as np

from factormax.arrays import FloatArray
from factormax.io.errors import UAIError

__all__ = ["Tokens"]

_COMMENT = re.compile(r"(#|//)[^\n]*")


class Tokens:
    """The words of a file, read one after the other. Comments begin with `#` or `//`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path)
        self.text = _COMMENT.sub("", self._read())
        self.words = self.text.split()
        self.position = 0

    def _read(self) -> str:
        data = Path(self.path).read_bytes()
        if data[:2] == b"\x1f\x8b":  # gzip, whatever the name of the file
            try:
                data = gzip.decompress(data)
            except (OSError, EOFError, zlib.error) as error:
                raise UAIError(
                    f"{self.path}: the gzip file is damaged ({error}).", self.path
                ) from error
        return data.decode("utf-8-sig", errors="replace")

    def error(self, message: str, position: int | None = None) -> UAIError:
        """An error at a word, by default the next one."""
        at = self.position if position is None else position
        line, seen = 0, 0
        for number, text in enumerate(self.text.split("\n"), start=1):
            count = len(text.split())
            if count:
                line = number  # past the last word, this is the last line that has any
            seen += count
            if seen > at:
                break
        line = max(line, 1)
        return UAIError(f"{self.path}, line {line}: {message}", self.path, line)

    @property
    def left(self) -> int:
        """How many words are left."""
        return len(self.words) - self.position

    def word(self, what: str) -> str:
        """The next word."""
        if not self.left:
            raise self.error(f"expected {what}, but the file ends here.")
        self.position += 1
        return self.words[self.position - 1]

    def whole(self, what: str) -> int:
        """The next word, which must be a whole number."""
        word = self.word(what)
        if not word.isdecimal():
            raise self.error(
                f"expected {what}, a whole number, got {_short(word)}.", self.position - 1
            )
        return int(word)

    def end(self, what: str) -> None:
        """Raises if there is anything left."""
        if self.left:
            raise self.error(
                f"expected the end of the file after {what}, got "
                f"{_short(self.words[self.position])}."
            )

    def log_potentials(self, start: int) -> FloatArray:
        """The logarithms of all words from `start` on; 0 gives −inf."""
        words = self.words[start:]
        try:
            values = np.array(words, dtype=np.float64)
        except ValueError:
            bad = next(i for i, word in enumerate(words) if not _is_number(word))
            raise self.error(f"expected a number, got {_short(words[bad])}.", start + bad) from None
        wrong = np.flatnonzero(~(values >= 0))
        if wrong.size:
            at = int(wrong[0])
            raise self.error(
                f"expected a potential, a non-negative number, got {_short(words[at])}.",
                start + at,
            )
        with np.errstate(divide="ignore"):
            logs = np.log(values)
        # Numbers that double precision can't hold (1e-400) still have a logarithm.
        known: dict[str, float] = {}
        for i in np.flatnonzero((values < np.finfo(np.float64).tiny) | np.isinf(values)):
            word = words[i]
            if word not in known:
                exact = Decimal(word)
                if exact.is_infinite():
                    raise self.error(f"expected a finite potential, got {word!r}.", start + int(i))
                known[word] = float(exact.ln())
            logs[i] = known[word]
        return logs


def _is_number(word: str) -> bool:
    try:
        float(word)
        Decimal(word)
    except (ValueError, InvalidOperation):
        return False
    return True


def _short(word: str) -> str:
    return repr(word if len(word) <= 24 else word[:20] + "...")
