"""What the README says is so: its code, its numbers, its links."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from test_docs import run

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_code_runs_and_gives_what_is_printed():
    names = run(README)
    assert (names["u"].value[1, :, 2] == 0).all()


def test_numbers_are_printed():
    """At least those of the matching, its gradient, the batch, the tree and the factor."""
    assert len(re.findall(r"  # \[", TEXT)) >= 6


def test_it_can_be_read_to_the_end():
    assert len(TEXT.splitlines()) <= 130
    assert "make demo" in TEXT and "make test" in TEXT


def test_links_are_absolute_and_lead_to_files():
    """So that they work on a package index too. The address is that of pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    home = re.search(r'^Homepage = "(.+)"', project, re.MULTILINE)[1]
    links = re.findall(r"\]\((.*?)\)", TEXT)
    assert len(links) > 10
    for link in links:
        assert link.startswith("https://")
        if not link.startswith("https://arxiv.org/"):
            found = re.fullmatch(re.escape(home) + r"/(?:blob|raw)/main/(.+)", link)
            assert found, link
            path = ROOT / found[1]
            assert path.is_file() or not path.parent.exists(), link  # an sdist has no pictures


def test_the_comparison_is_that_of_the_benchmarks():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\|$", TEXT, re.MULTILINE)
    assert len(rows) == 5
    assert all([row in page for row in rows])
