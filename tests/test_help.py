"""What a user meets first: `help` of a class, and the types of a factor of one's own."""

import pydoc
import pytest

import factormax as fm


@pytest.mark.parametrize("cls", [fm.FactorGraph, fm.Xor])
def test_help_is_short(cls):
    """A screen, and what Python adds of every class: __init__, __dict__, __weakref__ and so on."""
    assert len(pydoc.plain(pydoc.render_doc(cls)).splitlines()) <= 90
