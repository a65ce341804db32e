"""Passages: parts of a text that an encoder reads whole, and a language model can quote."""

from __future__ import annotations

import re
from typing import Final

from bbnode.ir.errors import AuthorError

_BREAK: Final = re.compile(r"\n\s*\n|(?<=[.!?…。！？])\s+")  # noqa: RUF001 - full-width marks


def passages(text: str, *, words: int = 120, overlap: int = 20) -> list[str]:
    """Cut a text into passages of whole sentences, in their order.

    An encoder reads the first `max_tokens` of a text and no more; a word of English is 1.3 tokens
    or so.

    Args:
        text: of any length.
        words: of a passage, at most: a longer sentence is cut.
        overlap: words at the end of a passage, at most, that begin the next one too: whole
            sentences, so that what refers to the one before stays with it.

    Raises:
        AuthorError: `words` is below 1, or `overlap` is not between 0 and below `words`.
    """
    if words < 1 or not 0 <= overlap < words:
        raise AuthorError(f"words={words}, overlap={overlap}: 0 <= overlap < words is needed")
    made: list[str] = []
    kept: list[list[str]] = []  # the sentences of the next passage
    for sentence in _BREAK.split(text):
        split = sentence.split()
        for start in range(0, len(split), words):
            part = split[start : start + words]
            if sum(map(len, kept)) + len(part) > words:
                made.append(_joined(kept))
                room = min(overlap, words - len(part))
                while kept and sum(map(len, kept)) > room:
                    del kept[0]
            kept.append(part)
    return [*made, _joined(kept)] if kept else made


def _joined(sentences: list[list[str]]) -> str:
    return " ".join(word for sentence in sentences for word in sentence)
