"""Untrusted texts, made safe to show.

Rule: text for a terminal or a log contains no control characters: none that move the cursor or
set a title (C0, C1), none that change the writing direction, and no line break that could forge
another line of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

REPLACEMENT = "�"


def printable(text: str, *, keep: str = "") -> str:
    """Return the text on one line, each control character replaced; those of `keep` stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else REPLACEMENT for c in text)


def escaped(text: str, *, keep: str = "") -> str:
    """Return the text with escapes in the place of control characters, as Python writes them."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def escaped_json(text: str) -> str:
    """Return JSON with escapes for characters that are not printable, except line breaks."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _json_escape(c) for c in text)


# PeerIds in base58; their ends identify them, also as arguments of commands.
_PEER_ID = re.compile(r"\b[1-9A-HJ-NP-Za-km-z]{40,46}([1-9A-HJ-NP-Za-km-z]{6})\b")


def short_peer(text: str) -> str:
    """Return a text with each PeerId shortened to its end, as in `…jo8hW9`."""
    return _PEER_ID.sub(r"…\1", text)


def listed(rows: Sequence[str], most: int) -> str:
    """Return the first rows and the number of further ones; "none" without any."""
    shown = ", ".join(rows[:most])
    return f"{shown} and {len(rows) - most} more" if len(rows) > most else shown or "none"


def failure_text(failure: Mapping[str, Any]) -> str:
    """Return the failure of an op as a line: the fault, the source line, and the requester.

    `failure` has the fields of an OpFailed, and `peer` if it was on another peer; a node of another
    version may leave some out.
    """
    details = {name: failure.get(name) or "" for name in ("inner", "line", "module", "source_peer")}
    inner = "" if details["inner"] == failure["op"] else details["inner"]
    place = [inner, details["line"], details["module"] and f"in Module {details['module']}"]
    if details["source_peer"]:
        place.append(f"for a message of {details['source_peer']}")
    where = ", ".join(filter(None, place))
    text = f"{failure['op']}: {failure['kind']}: {failure['detail']}"
    text = f"{text} ({where})" if where else text
    return f"on {failure['peer']}: {text}" if failure.get("peer") else text


def _json_escape(character: str) -> str:
    code = ord(character)
    if code > 0xFFFF:
        code -= 0x10000
        return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
    return f"\\u{code:04x}"


def cut_text(text: str, max_bytes: int | None) -> str:
    """Return the text cut to at most `max_bytes` of UTF-8, at a character boundary."""
    if max_bytes is None or len(text) * 4 <= max_bytes:
        return text
    raw = text.encode("utf-8", "replace")
    return text if len(raw) <= max_bytes else raw[:max_bytes].decode("utf-8", "ignore")


# The folders of an absolute path, on POSIX or Windows.
_FOLDERS = re.compile(r"(?<![\w.…])(?:[A-Za-z]:)?(?:[/\\][^\s/\\'\",;()<>]+)+(?=[/\\])")


def without_folders(text: str) -> str:
    """Return the text with "…" for the folders of absolute paths; their last parts stay."""
    return _FOLDERS.sub("…", text)
