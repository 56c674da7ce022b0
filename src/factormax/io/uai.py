"""The UAI format: Markov and Bayesian networks as products of tables of potentials.

A file gives the kind of the network, the number of variables, their cardinalities, the number of
tables, the variables of each table, and then each table: the number of entries and the entries, the
last variable changing fastest. Line breaks have no meaning.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from factormax.arrays import FloatArray
from factormax.io.model import UAIModel, build_model
from factormax.io.tokens import Tokens

__all__ = ["read_uai"]

KINDS = ("MARKOV", "BAYES")


def read_uai(
    path: str | os.PathLike[str],
    evidence: str | os.PathLike[str] | Mapping[int, int] | None = None,
    dtype: npt.DTypeLike = np.float64,
) -> UAIModel:
    r"""Reads a model in the UAI format, of any arity and cardinality, as a factor graph.

    The value of an assignment is $\sum_f \log \phi_f(x_f)$, the logarithm of the product of its
    potentials; a potential of 0 forbids. For 0/1 values of the variables it equals
    `model.offset` plus the objective of `model.graph` (from `solve_map` and `decode`).

    Args:
        path: the file, which may be compressed with gzip. "BAYES" networks are read the same way.
        evidence: a file of observed states, with or without the number of samples (1) in front;
            or a dict from variables to states.
        dtype: the dtype of the scores.

    Raises:
        UAIError: for a bad file; the message gives the line and what was expected there.
        InfeasibleError: if the tables alone show that every assignment has potential 0.

    Example:
        >>> import tempfile, pathlib, factormax as fm
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name) / "two.uai"
        >>> _ = path.write_text("MARKOV  2  2 3  2  1 0  2 0 1   2  1 2   6  1 1 4  3 1 1")
        >>> model = fm.io.read_uai(path)
        >>> model
        <UAIModel of 2 variables and 2 tables, as a graph of 5 variables (x: (5,)) and 1 factor
        (1 Table)>
        >>> _ = model.graph.solve()
        >>> model.assignment()
        [1, 0]
        >>> round(model.score([1, 0]), 6)  # log(2 · 3)
        1.791759
        >>> model = fm.io.read_uai(path, evidence={0: 0})
        >>> _ = model.graph.solve()
        >>> model.assignment()
        [0, 2]
        >>> folder.cleanup()
    """
    tokens = Tokens(path)
    kind = tokens.word("MARKOV or BAYES").upper()
    if kind not in KINDS:
        raise tokens.error(f"expected MARKOV or BAYES, got {kind[:24]!r}.", 0)
    cardinalities = _cardinalities(tokens)
    scopes = _scopes(tokens, cardinalities)
    tables = _tables(tokens, cardinalities, scopes)
    if evidence is None:
        observed: dict[int, int] = {}
    elif isinstance(evidence, Mapping):
        observed = _checked_evidence(evidence, cardinalities)
    else:
        observed = _read_evidence(evidence, cardinalities)
    return build_model(tokens.path, cardinalities, scopes, tables, observed, dtype)


def _cardinalities(tokens: Tokens) -> list[int]:
    count = tokens.whole("the number of variables")
    cardinalities = []
    for v in range(count):
        states = tokens.whole(f"the number of states of variable {v}")
        if states == 0:
            raise tokens.error(
                f"expected at least one state of variable {v}, got 0.", tokens.position - 1
            )
        cardinalities.append(states)
    return cardinalities


def _scopes(tokens: Tokens, cardinalities: list[int]) -> list[tuple[int, ...]]:
    count, n = tokens.whole("the number of tables"), len(cardinalities)
    scopes = []
    for k in range(count):
        arity = tokens.whole(f"the number of variables of table {k}")
        begin = tokens.position
        scope = tuple([tokens.whole(f"a variable of table {k}") for _ in range(arity)])
        for i, v in enumerate(scope):
            if v >= n:
                raise tokens.error(
                    f"table {k}: expected a variable from 0 to {n - 1}, got {v}.", begin + i
                )
            if v in scope[:i]:
                raise tokens.error(f"table {k} has variable {v} twice.", begin + i)
        scopes.append(scope)
    return scopes


def _tables(
    tokens: Tokens, cardinalities: list[int], scopes: list[tuple[int, ...]]
) -> list[FloatArray]:
    first, places = tokens.position, []
    for k, scope in enumerate(scopes):
        size = math.prod([cardinalities[v] for v in scope])
        over = f"table {k} (variables {' '.join(map(str, scope))})" if scope else f"table {k}"
        given = tokens.whole(f"the number of entries of {over}")
        if given != size:
            before = f" Or table {k - 1} has more or fewer entries than it says." if k else ""
            raise tokens.error(
                f"{over}: expected its number of entries, {size}, got {given}.{before}",
                tokens.position - 1,
            )
        if tokens.left < size:
            raise tokens.error(
                f"{over}: expected {size} entries, but the file ends after {tokens.left}.",
                len(tokens.words),
            )
        places.append((tokens.position - first, size))
        tokens.position += size
    tokens.end("the last table")
    logs = tokens.log_potentials(first)
    return [
        logs[begin : begin + size].reshape([cardinalities[v] for v in scope])
        for (begin, size), scope in zip(places, scopes, strict=True)
    ]


def _read_evidence(path: str | os.PathLike[str], cardinalities: list[int]) -> dict[int, int]:
    """Reads `count variable state variable state …`, perhaps after the number of samples."""
    tokens = Tokens(path)
    count = tokens.whole("the number of observed variables")
    if tokens.left != 2 * count and _are_samples(tokens.words):
        if count != 1:
            raise tokens.error(f"expected one sample of evidence, got {count}.", 0)
        count = tokens.whole("the number of observed variables")
    observed: dict[int, int] = {}
    for i in range(count):
        v = tokens.whole(f"the variable of observation {i + 1} of {count}")
        state = tokens.whole(f"the state of variable {v}")
        wrong = _evidence_problem(v, state, cardinalities, observed)
        if wrong:
            raise tokens.error(wrong, tokens.position - 1)
        observed[v] = state
    tokens.end(f"{count} observations")
    return observed


def _are_samples(words: list[str]) -> bool:
    """Whether the words are the number of samples, then a count and pairs for each sample."""
    place = 1
    for _ in range(int(words[0])):
        if place >= len(words) or not words[place].isdecimal():
            return False
        place += 1 + 2 * int(words[place])
    return place == len(words)


def _checked_evidence(evidence: Mapping[int, int], cardinalities: list[int]) -> dict[int, int]:
    observed: dict[int, int] = {}
    for v, state in evidence.items():
        wrong = _evidence_problem(v, state, cardinalities, observed)
        if wrong:
            raise ValueError(f"evidence: {wrong}")
        observed[int(v)] = int(state)
    return observed


def _evidence_problem(
    v: int, state: int, cardinalities: list[int], observed: dict[int, int]
) -> str | None:
    if not 0 <= v < len(cardinalities):
        return f"expected a variable from 0 to {len(cardinalities) - 1}, got {v}."
    if not 0 <= state < cardinalities[v]:
        return f"expected a state of variable {v}, from 0 to {cardinalities[v] - 1}, got {state}."
    if observed.get(v, state) != state:
        return f"variable {v} is observed twice, in the states {observed[v]} and {state}."
    return None
