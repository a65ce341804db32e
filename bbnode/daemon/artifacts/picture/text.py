"""Texts in a picture: their widths, how they are cut, and how numbers are written.

Rule: widths are generous estimates for a common sans-serif face, since the viewer's machine
provides the font. No text of an artifact reaches the output unescaped.
"""

from __future__ import annotations

from html import escape

from bbnode.ir.texts import printable

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

# Advance widths of Helvetica in units of the font size, by class of letter; rounded up, since its
# substitutes are rather wider.
_NARROW = frozenset("ijl.,:;'|!()[]{}ftrI /-`\"")
_WIDE = frozenset("mwMW@%—…→←")
_NARROW_EM, _PLAIN_EM, _UPPER_EM, _WIDE_EM = 0.36, 0.58, 0.70, 0.92


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """Return the estimated width in pixels at a font size in pixels."""
    return sum(map(_em, text)) * size * (1.06 if bold else 1.0)


def _em(letter: str) -> float:
    if letter in _NARROW:
        return _NARROW_EM
    if letter in _WIDE:
        return _WIDE_EM
    return _UPPER_EM if letter.isupper() else _PLAIN_EM


def fit(text: str, size: float, room: float, *, bold: bool = False) -> str:
    """Return the text, cut with an ellipsis where it is wider than `room` pixels."""
    if width_of(text, size, bold=bold) <= room:
        return text
    # Letter by letter from the front: a stranger's name may be 16,384 letters long.
    width = width_of("…", size, bold=bold)
    kept = 0
    for letter in text:
        width += width_of(letter, size, bold=bold)
        if width > room:
            break
        kept += 1
    return text[:kept] + "…"


def clean(text: str) -> str:
    """Return text escaped for XML text and quoted attributes, without what XML can't hold."""
    return escape(printable(text), quote=True)


def duration(nanoseconds: int) -> str:
    """Return a time as `10 s`, `250 ms`, `40 ns`."""
    if nanoseconds >= NS_PER_S:
        return f"{nanoseconds / NS_PER_S:g} s"
    if nanoseconds >= NS_PER_MS:
        return f"{nanoseconds / NS_PER_MS:g} ms"
    return f"{nanoseconds} ns"


def counted(count: int, word: str) -> str:
    """Return a count with its word: `1 op`, `2 ops`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
