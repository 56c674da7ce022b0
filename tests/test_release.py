"""The version, in the places that cannot read it from the package."""

import re
from pathlib import Path

import pytest

import factormax as fm

ROOT = Path(__file__).parents[1]


def read(name):
    path = ROOT / name
    if not path.exists():
        pytest.skip(f"needs {name}, which is only in the repository")
    return path.read_text(encoding="utf-8")


def test_the_citation_names_the_version():
    assert f"\nversion: {fm.__version__}\n" in read("CITATION.cff")


def test_the_conda_recipe_names_the_version():
    assert f'default="{fm.__version__}"' in read("conda/recipe.yaml")


def test_the_changelog_has_a_section_for_what_comes_next():
    assert re.search(r"^## \[Unreleased\]$", read("CHANGELOG.md"), flags=re.MULTILINE)
