"""UAI files written on the spot, and the real ones where they are."""

import io
import tarfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from real_data import real_data

ARCHIVE, needs_data = real_data("mrf_uai/mrf_instances.tar.xz")


def unpack(folder: Path) -> None:
    """Unpacks the real instances."""
    with tarfile.open(fileobj=io.BytesIO(ARCHIVE.read_bytes())) as archive:
        for member in archive.getmembers():
            if member.isfile():
                target = folder / member.name
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(archive.extractfile(member).read())


@dataclass
class Tables:
    """Potentials, as a file has them."""

    cardinalities: list[int]
    scopes: list[tuple[int, ...]]
    potentials: list[np.ndarray]

    def text(self, kind: str = "MARKOV") -> str:
        lines = [kind, str(len(self.cardinalities)), " ".join(map(str, self.cardinalities))]
        lines.append(str(len(self.scopes)))
        lines += [" ".join(map(str, (len(scope), *scope))) for scope in self.scopes]
        for table in self.potentials:
            numbers = [np.format_float_scientific(x) for x in table.ravel()]
            lines += ["", str(table.size), " ".join(numbers)]
        return "\n".join(lines) + "\n"

    def write(self, path: Path, kind: str = "MARKOV") -> Path:
        path.write_text(self.text(kind))
        return path

    def score(self, states) -> float:
        with np.errstate(divide="ignore"):
            return sum(
                float(np.log(table[tuple(states[v] for v in scope)]))
                for scope, table in zip(self.scopes, self.potentials, strict=True)
            )

    def assignments(self):
        return product(*[range(k) for k in self.cardinalities])


def random_tables(
    rng: np.random.Generator,
    variables: int = 5,
    tables: int = 7,
    most_states: int = 4,
    most_variables: int = 4,
    zeros: float = 0.1,
) -> Tables:
    """Random scopes (in any order, some twice) and potentials, a share of them zero."""
    cardinalities = rng.choice(
        np.arange(1, most_states + 1), size=variables, p=_mostly_two(most_states)
    ).tolist()
    scopes, potentials = [], []
    for _ in range(tables):
        arity = int(rng.integers(1, min(most_variables, variables) + 1))
        scope = tuple(rng.permutation(variables)[:arity].tolist())
        if scopes and rng.random() < 0.2:
            scope = tuple(rng.permutation(scopes[-1]).tolist())
        table = np.exp(rng.standard_normal([cardinalities[v] for v in scope]))
        table[rng.random(table.shape) < zeros] = 0
        scopes.append(scope)
        potentials.append(table)
    return Tables(cardinalities, scopes, potentials)


def _mostly_two(most: int) -> np.ndarray:
    weights = np.ones(most)
    weights[0] = 0.3
    weights[1] = 3
    return weights / weights.sum()
