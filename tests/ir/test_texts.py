"""Texts that somebody else chose do nothing to a terminal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.ir.texts import escaped, escaped_json, printable

HARMFUL = [
    "\x1b[2J",  # clears the screen
    "\x9b31m",  # the same as ESC [ in one character
    "\x1b]0;title\x07",
    "a\rb",
    "a\nerror: forged",
    "\x7f",
    "\u202egnp.exe",  # turns the direction
    "\u2066x\u2069",
    "\u2028",
]


@pytest.mark.parametrize("text", HARMFUL)
def test_no_control_character_is_left(text: str) -> None:
    assert printable(text).isprintable()
    assert escaped(text).isprintable()
    assert len(printable(text)) == len(text)


def test_what_reads_well_stays() -> None:
    assert printable("Größe 東京 ✓") == escaped("Größe 東京 ✓") == "Größe 東京 ✓"
    assert printable("a\n\tb", keep="\n\t") == "a\n\tb"


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_says_the_same_without_them(value: object) -> None:
    for indent in (None, 2):
        text = escaped_json(json.dumps(value, ensure_ascii=False, indent=indent))
        assert json.loads(text) == value
        assert text.replace("\n", "").isprintable()
