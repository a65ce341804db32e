"""Numbers and dates that are written as text: read as the owner says, or refused with the reason.

Rule: a column is read whole or not at all, and never as another number than a person reads there. A
surrounding blank and the minus of typography (U+2212) have one meaning each; every other mark is
the owner's to name. Reading is vectorised; why a column can't be read is looked up when it fails.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bbnode.ir.decoding import clip, shown

DECIMALS: Final = (".", ",")
THOUSANDS: Final = ("", ",", ".", "'", " ", "_")

# Characters that stand for each mark: spreadsheets write blanks that do not break a line, and
# typography has an apostrophe of its own.
_ALIKE: Final = {" ": "[ \u00a0\u2009\u202f]", "'": "['\u2019]", "": "", "_": "_"}
_BLANKS: Final = r"[\s\p{Zs}]*"
_SECONDS_A_DAY: Final = 86_400
_MOST_WORDS: Final = 1000  # of a column, that are looked at for what they may be
_MOST_SHOWN: Final = 3
_CURRENCIES: Final = (*"$€£¥₹₽₩₺₪฿", "CHF", "USD", "EUR", "GBP", "JPY", "Rs", "kr", "zł", "R$")
_MOST_UNIT_CHARS: Final = 16
_TRUTH: Final = frozenset((
    "yes", "no", "y", "n", "true", "false", "t", "f", "ja", "nein", "oui", "non", "si", "sí",
     "não", "sim", "da", "on", "off", "wahr", "falsch", "vrai", "faux",
))  # fmt: skip
TOTALS: Final = frozenset(
    ("total", "totals", "sum", "sums", "summe", "gesamt", "somme", "suma", "average", "mean")
)

_PLAIN = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_COMMA = r"[+-]?[0-9]*,[0-9]+(?:[eE][+-]?[0-9]+)?"
_GROUPED = (
    r"[+-]?[0-9]{1,3}(?:([,.' \u00a0\u2009\u202f\u2019_])[0-9]{3})(?:\1[0-9]{3})*(?:[.,][0-9]+)?"
)
_DATE = r"[0-9]{1,4}([-/.])[0-9]{1,2}\1[0-9]{1,4}(?:[T ][0-9]{1,2}:[0-9]{2}.*)?"
_TIME = r"-?[0-9]{1,3}:[0-9]{2}(?::[0-9]{2})?(?:[.,][0-9]+)?(?: ?[AaPp][Mm])?"


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """The marks of numbers that are written as text.

    Attributes:
        decimal, thousands: the mark before the fraction, and the one between groups of three
            digits, "" for none.
        parentheses: a number in parentheses is negative.
    """

    decimal: str = "."
    thousands: str = ""
    parentheses: bool = False


def parsed(pa: Any, words: Any, how: NumberFormat, unit: str = "") -> tuple[Any, Any]:
    """Return the numbers that an array of texts holds, float64, null where it holds none.

    With `unit`, each text has it before or behind the number. The second array has the digits,
    [N] texts: whole numbers without a sign match `^[0-9]+$` in it.
    """
    pc = pa.compute
    text = pc.utf8_trim_whitespace(words.cast(pa.large_string()))
    text = pc.replace_substring(text, pattern="\u2212", replacement="-")
    negative = pa.scalar(False)
    if how.parentheses:
        negative = pc.match_substring_regex(text, r"^\(.*\)$")
        inner = pc.utf8_trim_whitespace(pc.utf8_slice_codeunits(text, 1, -1))
        # A sign inside would be a second one.
        inner = pc.if_else(pc.match_substring_regex(inner, "[-+]"), pa.scalar("-"), inner)
        text = pc.if_else(negative, inner, text)
    group = _ALIKE.get(how.thousands, re.escape(how.thousands))
    mark = re.escape(how.decimal)
    whole = rf"[0-9]{{1,3}}(?:{group}[0-9]{{3}})+|[0-9]+" if group else "[0-9]+"
    number = rf"(?:(?:{whole})(?:{mark}[0-9]*)?|{mark}[0-9]+)(?:[eE][+-]?[0-9]+)?"
    plain = rf"^(?P<sign>[+-]?)(?P<digits>{number})$"
    if unit:
        name = r"\Q" + unit.strip() + r"\E"
        behind = rf"^(?P<sign>[+-]?)(?P<digits>{number}){_BLANKS}{name}$"
        before = rf"^(?P<sign>[+-]?){_BLANKS}{name}{_BLANKS}(?P<digits>{number})$"
        between = rf"^{name}{_BLANKS}(?P<sign>[+-]?)(?P<digits>{number})$"
        found = [pc.extract_regex(text, each) for each in (behind, before, between)]
    else:
        found = [pc.extract_regex(text, plain)]
    sign = pc.coalesce(*(pc.struct_field(each, "sign") for each in found))
    digits = pc.coalesce(*(pc.struct_field(each, "digits") for each in found))
    if group:
        digits = pc.replace_substring_regex(digits, group, "")
    if how.decimal != ".":
        digits = pc.replace_substring(digits, pattern=how.decimal, replacement=".")
    # Arrow's cast is correctly rounded, and knows no "+".
    values = pc.cast(digits, pa.float64())
    minus = pc.xor(pc.equal(sign, "-"), negative)
    return pc.if_else(minus, pc.negate(values), values), digits


def days(pa: Any, values: Any, form: str) -> Any:
    """Return dates, times and durations as days, float64: dates since 1970-01-01 in UTC.

    `values` are of a type that Arrow has for these, or texts of the form `form` (as `strptime`; ""
    is ISO 8601). Null where a text is none. Raises pyarrow's errors.
    """
    pc, types = pa.compute, pa.types
    kind = values.type
    if types.is_string(kind) or types.is_large_string(kind):
        text = pc.utf8_trim_whitespace(values).cast(pa.string())
        if not form:
            return _days(pa, _iso(pa, text))
        moment = pc.strptime(text, format=form, unit="s", error_is_null=True)
        # C's strptime takes the 31st of February for the 2nd of March.
        again = pc.strftime(moment, format=form)
        same = pc.equal(_unpadded(pc, again), _unpadded(pc, text))
        return _days(pa, pc.if_else(same, moment, pa.scalar(None, moment.type)))
    return _days(pa, values)


def _days(pa: Any, values: Any) -> Any:
    """Return values of a type that Arrow has for dates, times and durations as days."""
    pc, types, kind = pa.compute, pa.types, values.type
    if types.is_date32(kind):
        return values.cast(pa.int32()).cast(pa.float64())
    if types.is_date64(kind):
        return pc.divide(values.cast(pa.int64()).cast(pa.float64()), 1000.0 * _SECONDS_A_DAY)
    if types.is_time(kind):
        width = pa.int32() if types.is_time32(kind) else pa.int64()
        counts = values.cast(width).cast(pa.int64())
    else:
        counts = values.cast(pa.int64())
    a_day = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit] * _SECONDS_A_DAY
    # Whole days and the rest apart: nanoseconds since 1970 are no float64.
    whole = pc.divide(counts, a_day)
    rest = pc.subtract(counts, pc.multiply(whole, a_day))
    return pc.add(whole.cast(pa.float64()), pc.divide(rest.cast(pa.float64()), float(a_day)))


def is_moment(types: Any, kind: Any) -> bool:
    """Return whether Arrow's type is of dates, times or durations, which `days` takes."""
    return bool(types.is_temporal(kind) and not types.is_interval(kind))


def _iso(pa: Any, text: Any) -> Any:
    """Return texts of ISO 8601 as timestamps, null for others."""
    pc = pa.compute
    good = pc.match_substring_regex(
        text,
        r"^[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6})?)?)?"
        r"(?:Z|[+-][0-9]{2}:?[0-9]{2})?$",
    )
    zoned = pc.match_substring_regex(text, r"[0-9]{2}:[0-9]{2}.*(?:Z|[+-][0-9]{2}:?[0-9]{2})$")
    text = pc.if_else(good, text, pa.scalar(None, text.type))
    kind = pa.timestamp("us", "UTC") if pc.any(zoned).as_py() else pa.timestamp("us")
    return text.cast(kind)


def _unpadded(pc: Any, text: Any) -> Any:
    return pc.utf8_lower(pc.replace_substring_regex(text, r"\b0+([0-9])", r"\1"))


def first_words(words: Sequence[str]) -> str:
    """Return the first few words of a column, as an error may show them."""
    listed = ", ".join(shown(word) for word in words[:_MOST_SHOWN])
    return f"{listed}, …" if len(words) > _MOST_SHOWN else listed


def is_number_like(words: Sequence[str], how: NumberFormat) -> bool:
    """Return whether words are numbers with marks, or mostly: no names of classes.

    Plain digits are names in a file that has them as texts.
    """
    if how.decimal == "." and all(re.fullmatch(_PLAIN, word.strip()) for word in words):
        return False
    found = _cause("", words, how)
    return found is not None


def why_text(name: str, words: Sequence[str], how: NumberFormat) -> tuple[str, str]:
    """Return why a column of these different words is no numbers, and one word that shows it.

    The reason has the setting that reads the column.
    """
    seen = [word for word in words if word.strip()][:_MOST_WORDS] or list(words[:1])
    key = key_of(name)
    cause = _cause(name, seen, how)
    if cause is not None:
        return cause
    lower = {word.strip().casefold() for word in seen}
    if any("\n" in word or "\r" in word for word in seen):
        word = next(word for word in seen if "\n" in word or "\r" in word)
        return (
            f"a value goes over several lines ({shown(word)}); a quote that never closes does "
            "that: mend it, or leave the column out with `ignore`"
        ), word
    if any("\0" in word for word in seen):
        word = next(word for word in seen if "\0" in word)
        return ('its text has NUL bytes, as in a file of another `encoding` ("utf-16-le", …)'), word
    if lower <= _TRUTH and len(lower) <= 2:
        pair = ", ".join(quoted(each) for each in sorted(seen, key=str.casefold))
        return (
            f"it holds text; if these words are no and yes, set categories = {{ {key} = [{pair}] "
            "}, in the order of 0 and 1"
        ), seen[0]
    return (
        f"it holds text, its first values are {first_words(seen)}; name its values in their order "
        f'(categories = {{ {key} = ["…", "…"] }}), the same on all peers, or leave it out with '
        "`ignore`"
    ), seen[0]


def key_of(name: str) -> str:
    """Return a column's name as a key in TOML."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else quoted(name)


def quoted(text: str) -> str:
    """Return a text as a string of TOML, shortened, with a dot for what can't be printed."""
    escaped = clip(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _cause(name: str, words: Sequence[str], how: NumberFormat) -> tuple[str, str] | None:
    """Return why words that look like numbers are none, and one of them; None for other words."""
    key = key_of(name)
    plain = [word.strip().replace("\u2212", "-") for word in words]

    def all_are(form: str) -> bool:
        """Return whether words are of this form; some may be plain numbers."""
        like = [word for word in plain if re.fullmatch(form, word)]
        return bool(like) and all(word in like or re.fullmatch(_PLAIN, word) for word in plain)

    def first_of(form: str) -> str:
        at = next((i for i, word in enumerate(plain) if re.fullmatch(form, word)), 0)
        return words[at]

    if all(re.fullmatch(_PLAIN, word) for word in plain) and how.decimal == ".":
        leading = next((word for word in words if re.fullmatch(r"\s*[+-]?0[0-9]+\s*", word)), None)
        if leading is not None:
            return leading_zeros(name), leading
        return (
            f"it holds numbers as text ({first_words(words)}); if they are quantities, set "
            f"numbers = [{quoted(name)}], and if they are names, `categories`"
        ), words[0]
    if how.decimal == "," and all(re.fullmatch(_PLAIN, word) for word in plain):
        word = next((word for word in words if "." in word), words[0])
        return (
            f'it holds decimal points ({shown(word)}), and `decimal` is ","; write them alike, or '
            'set thousands = "." if the point stands between thousands'
        ), word
    if all_are(_COMMA) and how.decimal != ",":
        maybe = [word for word in plain if "," in word]
        if all(re.fullmatch(r"[+-]?[1-9][0-9]{0,2},[0-9]{3}", word) for word in maybe):
            return (
                f'it holds {shown(first_of(_COMMA))}: set thousands = "," if the comma stands '
                'between thousands, and decimal = "," if it begins the fraction'
            ), first_of(_COMMA)
        return (
            f'it holds decimal commas ({shown(first_of(_COMMA))}); set decimal = ","'
        ), first_of(_COMMA)
    marks = _marks(plain)
    if "thousands" in marks:
        word = first_of(_GROUPED)
        return f"it holds marks between thousands ({shown(word)}); set {marks}", word
    if all_are(r"\(\D*[0-9][0-9.,' ]*\D*\)"):
        return (
            f"it holds numbers in parentheses ({shown(first_of(r'[(].+'))}); set parentheses = "
            "true if they are negative"
        ), first_of(r"\(.+\)")
    if all_are(r"[0-9.,]+-"):
        return (
            f"it holds numbers with the minus behind them ({shown(first_of('.+-'))}); write it "
            "before them"
        ), first_of(r".+-")
    if all(re.fullmatch(_DATE, word) for word in plain):
        form = _date_form(plain)
        return (
            f"it holds dates ({first_words(words)}); to have them as days since 1970, set "
            f'dates = {{ {key} = "{form}" }}, else leave it out with `ignore`'
        ), words[0]
    if all(re.fullmatch(_TIME, word) for word in plain):
        return (
            f"it holds times ({first_words(words)}); write them as numbers, of hours say, or "
            "leave it out with `ignore`"
        ), words[0]
    affixed = _affix(plain)
    if affixed is not None:
        units, at, inner = affixed
        if len(units) > 1:
            listed = ", ".join(map(shown, units[:_MOST_SHOWN]))
            return (
                f"it holds numbers with several units ({listed}); write all of them in one"
            ), words[at]
        more = _marks(inner)
        more = f", and {more}" if more and (how.decimal, how.thousands) == (".", "") else ""
        return (
            f"it holds numbers with the unit {shown(units[0])} ({shown(words[at])}); set units = "
            f"{{ {key} = {quoted(units[0])} }}{more}"
        ), words[at]
    return _among(name, words, plain, how)


def _marks(plain: Sequence[str]) -> str:
    """Return the settings that read numbers with other marks; "" where there are none."""
    grouped = [found for word in plain if (found := re.fullmatch(_GROUPED, word))]
    if not all(
        any(re.fullmatch(form, word) for form in (_GROUPED, _PLAIN, _COMMA)) for word in plain
    ):
        return ""
    comma = 'decimal = ","'
    if not grouped:
        return comma if any(re.fullmatch(_COMMA, word) and "," in word for word in plain) else ""
    mark = {"\u2019": "'", "\u00a0": " ", "\u2009": " ", "\u202f": " "}.get(
        grouped[0][1], grouped[0][1]
    )
    if mark == "," and not any("." in word or word.count(",") > 1 for word in plain):
        return f'thousands = "," or {comma}, whichever the comma is'
    has_comma = mark == "." or any(re.search(r"[^,],[0-9]+$", word) for word in plain)
    return f'thousands = "{mark}"' + (f", {comma}" if has_comma and mark != "," else "")


def leading_zeros(name: str) -> str:
    """Return why whole numbers that begin with 0 are refused, and what to do."""
    key = key_of(name)
    return (
        "it holds whole numbers that begin with 0, as names do (a postal code, a number of a "
        f'product); leave it out with `ignore`, list categories = {{ {key} = ["…"] }}, or set '
        f"numbers = [{quoted(name)}] if they are quantities"
    )


def _date_form(words: Sequence[str]) -> str:
    mark = next(mark for mark in "-/." if mark in words[0])
    first, second, third = (
        [int(part) for part in parts]
        for parts in zip(*(re.split(r"[T ]", word)[0].split(mark) for word in words), strict=True)
    )
    time = " %H:%M" if ":" in words[0] else ""
    time += ":%S" if words[0].count(":") > 1 else ""
    if max(first) > 31 or all(len(word.split(mark)[0]) == 4 for word in words):
        return f"%Y{mark}%m{mark}%d{time}"
    year = "%Y" if max(third) > 99 else "%y"
    if max(second) > 12 or (mark == "/" and max(first) <= 12):
        return f"%m{mark}%d{mark}{year}{time}"
    return f"%d{mark}%m{mark}{year}{time}"


_AFFIXED = re.compile(
    r"[+-]?([^0-9+-]*?)\s*([+-]?[0-9.,'\u2019 \u00a0\u202f]*[0-9][.,]?)\s*([^0-9]*)"
)


def _affix(plain: Sequence[str]) -> tuple[list[str], int, list[str]] | None:
    """Return the units that words have besides a number, most frequent first.

    Then the first word with the most frequent one, and the numbers without units.
    """
    units: Counter[str] = Counter()
    first: dict[str, int] = {}
    inner: list[str] = []
    for at, word in enumerate(plain):
        found = _AFFIXED.fullmatch(word)
        if found is None:
            return None
        before, number, behind = (part.strip() for part in found.groups())
        unit = before or behind
        if (before and behind) or len(unit) > _MOST_UNIT_CHARS:
            return None
        inner.append(number)
        if not unit:
            continue
        # Words such as "class 1" and "A1" are names; money stands before its number.
        if unit.strip(".,'()-_#/<>=~≤≥*? ") == "" or (
            before and not any(each in before for each in _CURRENCIES)
        ):
            return None
        units[unit] += 1
        first.setdefault(unit, at)
    if not units or len(units) > max(1, len(plain) // 2 + 1):
        return None
    ordered = [unit for unit, _ in units.most_common()]
    return ordered, first[ordered[0]], inner


def _among(
    name: str, words: Sequence[str], plain: Sequence[str], how: NumberFormat
) -> tuple[str, str] | None:
    """Return which words stand among numbers, and the first of them; None where they are many."""
    forms = (_PLAIN, _COMMA if how.decimal == "," else _PLAIN,
             _GROUPED if how.thousands else _PLAIN)  # fmt: skip
    others = [
        word
        for word, each in zip(words, plain, strict=True)
        if not any(re.fullmatch(form, each) for form in forms)
    ]
    if not others or len(others) == len(words):
        return None
    listed = first_words(others)
    first = others[0]
    beginning = f"it has words among numbers ({listed})"
    if any(word.strip() == name for word in others):
        return f"{beginning}: the heading is repeated; remove these lines", name
    if any(word.strip().casefold() in TOTALS for word in others):
        return f"{beginning}: a line of totals; remove it", first
    if any(re.match(r"\s*[<>≤≥~]", word) for word in others):
        word = next(word for word in others if re.match(r"\s*[<>≤≥~]", word))
        return (
            f"{beginning}: {shown(word)} is a bound and no number; decide what stands for it in "
            "the file, or count it as missing with missing_words"
        ), word
    words_in_toml = ", ".join(quoted(word) for word in others[:_MOST_SHOWN])
    return (
        f"{beginning}; if they stand for missing values, set missing_words = [{words_in_toml}], if "
        "the first of them is a row of units, skip_rows = 1, else name all values in `categories`"
    ), first
