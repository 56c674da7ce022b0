"""The guide to a new factor, carried out from its own words."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def test_a_factor_made_of_rows():
    text = GUIDE.read_text()
    section = text[text.index("## Add a factor") : text.index("## Add a structured factor")]
    blocks = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert len(blocks) == 2
    code = "\n".join(line[3:] for block in blocks for line in block.splitlines())
    exec(compile(code, str(GUIDE), "exec"), {"__name__": "guide"})


def test_files_that_are_named_are_there():
    text = GUIDE.read_text()
    section = text[text.index("## Where things are") : text.index("## Add a factor")]
    for path in re.findall(r"`((?:src|cpp|docs|fuzz|experiments)/[^`]*)`", section):
        assert (GUIDE.parent / path).exists(), path
