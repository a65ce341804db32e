"""Columns of texts as the numbers and dates that they hold, or why they hold none.

Rule: each different text is read once, however often it stands in the column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bbnode.components.data import number_text
from bbnode.components.data.number_text import NumberFormat
from bbnode.ir.decoding import shown

_MOST_WORDS = 2000  # different ones, that a refusal looks at
_LONG = 16  # digits of whole numbers that a float64 may not hold


class UnsuitableColumn(ValueError):
    """A column can't be features or labels; the text says why, and what to do.

    Attributes:
        row: that shows it, counted from 0; None for all.
    """

    def __init__(self, why: str, row: int | None = None) -> None:
        super().__init__(why)
        self.row = row


@dataclass(frozen=True, slots=True)
class Words:
    """A chunk of strings: the different ones, and by row which one it is, or null."""

    words: Any
    places: Any

    @classmethod
    def of(cls, pa: Any, chunk: Any, missing_words: Sequence[str]) -> Words:
        if not pa.types.is_dictionary(chunk.type):
            chunk = chunk.cast(pa.large_string()).dictionary_encode()
        words = chunk.dictionary.cast(pa.large_string())
        if missing_words:
            given = pa.array(list(missing_words), words.type)
            is_missing = pa.compute.is_in(words, value_set=given)
            words = pa.compute.if_else(is_missing, pa.scalar(None, words.type), words)
        return cls(words, chunk.indices)

    def by_row(self, of_words: Any) -> Any:
        """Return by row what stands beside its word; null where it has none."""
        return of_words.take(self.places)


def is_text(types: Any, kind: Any) -> bool:
    """Return whether a type is of texts, or a dictionary of them."""
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def as_numbers(
    pa: Any, name: str, column: Any, how: NumberFormat, unit: str, missing_words: Sequence[str],
    *, must: bool, exact: bool,
) -> Any:  # fmt: skip
    """Return a column of texts as numbers: int64 if all are whole, else float64.

    None where one of them is no number; UnsuitableColumn with `must`, and with `exact` where whole
    numbers begin with 0 or are too large for a float64.
    """
    pc = pa.compute
    parts = [Words.of(pa, chunk, missing_words) for chunk in column.chunks if len(chunk)]
    made, whole = [], True
    for part in parts:
        values, digits = number_text.parsed(pa, part.words, how, unit)
        bad = pc.and_(_is_written(pc, part.words), values.is_null())
        if pc.any(part.by_row(bad)).as_py():
            if not must:
                return None
            word = part.words.filter(bad)[0].as_py()
            wanted = f"a number with the unit {shown(unit)}" if unit else "a number"
            row = row_of(pa, parts, word)
            raise UnsuitableColumn(
                f"row {row} has {shown(word)}, which is not {wanted} (decimal is "
                f"{shown(how.decimal)}, and thousands {shown(how.thousands)})", row
            )  # fmt: skip
        is_whole = pc.match_substring_regex(digits, "^[0-9]+$")
        if exact:
            _refuse_identifiers(pa, name, parts, part, digits)
        whole = whole and bool(pc.all(pc.fill_null(is_whole, True)).as_py())
        made.append((part, values))
    if all(values.null_count == len(values) for _, values in made):  # of which type, who knows
        return pa.nulls(len(column), pa.float64()) if must else None
    if whole and all(
        pc.all(pc.less_equal(pc.abs(values), float(1 << 53))).as_py() in (True, None)
        for _, values in made
    ):
        made = [(part, values.cast(pa.int64())) for part, values in made]
    return pa.chunked_array([part.by_row(values) for part, values in made])


def _is_written(pc: Any, words: Any) -> Any:
    """Return which texts have more than blanks; those of blanks alone are missing values."""
    return pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(words), ""), False)


def _refuse_identifiers(
    pa: Any, name: str, parts: Sequence[Words], part: Words, digits: Any
) -> None:
    pc = pa.compute
    beyond = (
        "it has whole numbers of more than 15 digits, which a float64 does not tell apart; leave "
        f"it out with `ignore`, or set numbers = [{number_text.quoted(name)}]"
    )
    for form, why in (
        ("^0[0-9]+$", number_text.leading_zeros(name)),
        (rf"^[0-9]{{{_LONG},}}$", beyond),
    ):
        found = pc.fill_null(pc.match_substring_regex(digits, form), False)
        if pc.any(found).as_py():
            word = part.words.filter(found)[0].as_py()
            row = row_of(pa, parts, word)
            raise UnsuitableColumn(f"row {row} has {shown(word)}: {why}", row)


def as_days(pa: Any, column: Any, form: str, missing_words: Sequence[str]) -> Any:
    """Return a column of dates, times or durations as days, float64. Raises UnsuitableColumn."""
    types = pa.types
    if types.is_null(column.type):
        return column.cast(pa.float64())
    if number_text.is_moment(types, column.type):
        return pa.chunked_array(
            [number_text.days(pa, chunk, "") for chunk in column.chunks], pa.float64()
        )
    if not is_text(types, column.type):
        raise UnsuitableColumn(
            f"`dates` names it, and it holds {str(column.type)[:80]}, no dates; leave it out there"
        )
    parts = [Words.of(pa, chunk, missing_words) for chunk in column.chunks if len(chunk)]
    made = []
    for part in parts:
        try:
            values = number_text.days(pa, part.words, form)
        except pa.lib.ArrowException:  # a form that C knows nothing of, or no moment at all
            values = pa.nulls(len(part.words), pa.float64())
        bad = pa.compute.and_(_is_written(pa.compute, part.words), values.is_null())
        if pa.compute.any(part.by_row(bad)).as_py():
            word = part.words.filter(bad)[0].as_py()
            row = row_of(pa, parts, word)
            wanted = (
                f"of the form {shown(form)}" if form else
                "of ISO 8601 (with a time zone, if others have one)"
            )  # fmt: skip
            raise UnsuitableColumn(f"row {row} has {shown(word)}, which is no date {wanted}", row)
        made.append(part.by_row(values))
    return pa.chunked_array(made, pa.float64())


def refusal(
    pa: Any, name: str, column: Any, how: NumberFormat, missing_words: Sequence[str],
    more: str = "",
) -> UnsuitableColumn:  # fmt: skip
    """Return why a column of texts can't be used as it is, with the setting that reads it."""
    parts = [Words.of(pa, chunk, missing_words) for chunk in column.chunks if len(chunk)]
    words = different(parts, _MOST_WORDS)
    if not words:
        return UnsuitableColumn("all of its values are missing; leave it out with `ignore`")
    why, word = number_text.why_text(name, words, how)
    row = row_of(pa, parts, word)
    return UnsuitableColumn(f"row {row}: {why}{more}", row)


def looks_like_numbers(
    pa: Any, column: Any, how: NumberFormat, missing_words: Sequence[str]
) -> bool:
    """Return whether the texts of a column are numbers with marks: no names of classes."""
    parts = [Words.of(pa, chunk, missing_words) for chunk in column.chunks if len(chunk)]
    words = different(parts, _MOST_WORDS)
    return bool(words) and number_text.is_number_like(words, how)


def different(parts: Sequence[Words], most: int) -> list[str]:
    """Return the first different texts that rows have, in their order."""
    found: dict[str, None] = {}
    for part in parts:
        used = part.words.take(part.places.unique().drop_null()).drop_null()
        found.update(dict.fromkeys(used.slice(0, most).to_pylist()))
        if len(found) >= most:
            break
    return list(found)[:most]


def row_of(pa: Any, parts: Sequence[Words], word: str) -> int:
    """Return the first row that holds a word which is there."""
    at = 0
    for part in parts:
        found = pa.compute.index(part.by_row(pa.compute.equal(part.words, word)), True).as_py()
        if found >= 0:
            return int(at + found)
        at += len(part.places)
    return at
