"""Every recipe of the cookbook runs, draws, and is short. What a recipe claims, it asserts."""

import ast
import io
import runpy
import shutil
import tokenize
from pathlib import Path

import pytest

import factormax as fm

COOKBOOK = Path(__file__).parent.parent / "examples" / "cookbook"
RECIPES = sorted(COOKBOOK.glob("*.py"))
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of_code(source: str) -> int:
    """Lines that hold code: no comments, no docstrings; a longer string counts as one line."""
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len({t.start[0] for t in tokens if t.type not in LAYOUT} - docstrings)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default", "error::factormax.NotConvergedWarning")
def test_recipe_runs(recipe, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    plt = pytest.importorskip("matplotlib.pyplot")
    source = recipe.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                pytest.importorskip(alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            pytest.importorskip(node.module.split(".")[0])
    if '"cc"' in source and shutil.which("cc") is None:
        pytest.skip("needs a C compiler")

    plt.close("all")
    monkeypatch.setattr(plt, "show", lambda: None)
    try:
        runpy.run_path(str(recipe))
        assert plt.get_fignums() or "matplotlib" not in source, "nothing was drawn"
    finally:
        plt.close("all")
        fm.set_num_threads(None)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_short_and_has_a_title(recipe):
    source = recipe.read_text(encoding="utf-8")
    assert lines_of_code(source) <= 30
    title, underline, *_ = ast.get_docstring(ast.parse(source)).splitlines()
    assert underline == "=" * len(title)


def test_there_are_recipes():
    assert len(RECIPES) >= 12
