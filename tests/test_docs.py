"""The code of the pages runs as it is printed, and gives what the comments beside it say."""

import ast
import io
import re
import tokenize
from pathlib import Path

import numpy as np
import pytest

import factormax as fm

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
MADE = {"cookbook", "generated", "tutorials"}  # folders that are made when the site is built
PAGES = [
    page
    for page in sorted((ROOT / "docs").glob("**/*.md"))
    if page.relative_to(ROOT / "docs").parts[0] not in MADE
]
# A line before a block of code says why it is not run: `<!-- not run: needs a GPU -->`.
BLOCK = re.compile(
    r"(<!-- not run: .+? -->\n)?^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE
)
SHAPE = re.compile(r"\(\d[\d, ]*\)")
LIST = re.compile(r"\[.*\](?=$|:)")
TEXT = re.compile(r'"[^"]*"(?=$|:)')
NUMBER = re.compile(r"-?\d+(\.\d+)?(?=$|[:;,])")
WORD = re.compile(r"True|False|Status\.\w+")


def blocks(page: Path) -> list[str]:
    """The blocks of code of a page that are run."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [re.sub(f"^{indent}", "", code, flags=re.M) for why, indent, code in found if not why]


def run(page: Path) -> dict[str, object]:
    """Runs the blocks of a page one after the other, as a reader would type them."""
    names: dict[str, object] = {"__name__": "__main__"}
    for code in blocks(page):
        comments = {
            token.start[0]: token.string[1:].strip()
            for token in tokenize.generate_tokens(io.StringIO(code).readline)
            if token.type == tokenize.COMMENT
        }
        for statement in ast.parse(code).body:
            comment = comments.get(statement.end_lineno, "")
            if isinstance(statement, ast.Expr):
                value = eval(compile(ast.Expression(statement.value), page.name, "eval"), names)
                assert agrees(value, comment), f"{ast.unparse(statement)} is {value}, not {comment}"
                continue
            exec(compile(ast.Module([statement], []), page.name, "exec"), names)
            if isinstance(statement, ast.Assign) and re.match(r"\(\d|Status\.", comment):
                value = eval(ast.unparse(statement.targets[0]), names)
                assert agrees(value, comment), f"{ast.unparse(statement)}: not {comment}"
    return names


def agrees(value: object, comment: str) -> bool:
    """Whether a value is what a comment says, if that begins with a shape or a value."""
    if found := SHAPE.match(comment):
        return getattr(value, "shape", None) == ast.literal_eval(found[0])
    if found := LIST.match(comment):
        said = ast.literal_eval(found[0])
        return value == said if isinstance(value, list) else close(value, said, found[0])
    if found := WORD.match(comment):
        return str(value) == found[0]
    if found := TEXT.match(comment):
        return value == ast.literal_eval(found[0])
    if value is not None and (found := NUMBER.match(comment)):
        return close(value, float(found[0]), found[0])
    return True


def close(value: object, said: object, text: str) -> bool:
    """Up to the digits that are printed."""
    digits = max([len(part) for part in re.findall(r"\.(\d+)", text)], default=0)
    array = value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    said = np.asarray(said)
    return array.shape == said.shape and bool(
        np.allclose(array, said, rtol=0, atol=0.5 / 10**digits)
    )


@pytest.mark.parametrize("value, comment, right", [
    (np.array([0.375, 0.625]), "[0.375, 0.625]: two of them", True),
    (np.array([0.375, 0.625]), "[0.375, 0.629]", False),
    (np.zeros((2, 3)), "(2, 3): zeros", True),
    (np.zeros((2, 3)), "(3, 2)", False),
    (np.log(6), "1.792: log(2 · 3)", True),
    (np.log(6), "1.793", False),
    (fm.Status.CONVERGED, "Status.CONVERGED", True),
    (False, "True", False),
    (["a", "b"], '["a", "b"]', True),
    (None, "8 of them", True),
])  # fmt: skip
def test_comments_are_compared(value, comment, right):
    assert agrees(value, comment) == right


@pytest.fixture
def plain_jax():
    """JAX as it comes, in single precision."""
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.stem)
def test_code_of_the_docs_runs(page, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)  # what a page writes
    if re.search(r"^\s*(import|from) (factormax\.)?jax", "".join(blocks(page)), re.MULTILINE):
        request.getfixturevalue("plain_jax")
    names = run(page)
    if page.name == "jax.md":
        for library in ("torch", "jax"):
            value, grad = names[library + "_value"], names[library + "_grad"]
            value = value.detach() if library == "torch" else value
            np.testing.assert_allclose(value, names["numpy_value"], atol=1e-6)
            np.testing.assert_allclose(grad, names["numpy_grad"], atol=1e-5)
        np.testing.assert_allclose(names["chosen"], [[2 / 3] * 3 + [0], [1, 0, 0, 0]], atol=1e-6)
    if page.name == "start.md":
        assert names["accuracy"] > 0.95


def test_cited_equations_exist():
    """Code cites "docs/math.md (13)"; that page says where (13) is."""
    tagged: dict[str, Path] = {}
    for page in PAGES:
        for number in re.findall(r"\\tag\{(\w+)\}", page.read_text(encoding="utf-8")):
            assert number not in tagged, f"({number}) is in {page} and in {tagged[number]}"
            tagged[number] = page
    cited = set()
    cites = re.compile(r"docs/math\.md(?:,\s+equation)?((?:[\s–,-]*\(\d+\w?\))+)")
    for folder in ("src", "cpp", "tests", "fuzz"):
        for path in (ROOT / folder).glob("**/*.*"):
            if path.suffix in {".py", ".hpp", ".cpp", ".cuh"}:
                for numbers in cites.findall(path.read_text(encoding="utf-8")):
                    cited.update(re.findall(r"\((\w+)\)", numbers))
    assert len(cited) > 30
    assert not cited - set(tagged)

    index = (ROOT / "docs" / "math.md").read_text(encoding="utf-8")
    order = sorted(tagged, key=lambda number: (int(re.match(r"\d+", number)[0]), number))
    for ranges, name in re.findall(
        r"\| ((?:\(\w+\)–\(\w+\)(?:, )?)+) \| \[.*?\]\((.*?)\) \|", index
    ):
        for first, last in re.findall(r"\((\w+)\)–\((\w+)\)", ranges):
            for number in order[order.index(first) : order.index(last) + 1]:
                assert tagged[number] == ROOT / "docs" / name, f"({number}) is not in {name}"
