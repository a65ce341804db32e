"""Conditions on the command line: `--where "year >= 2020"`, as the filter of a search.

Rule: NAME OPERATOR VALUE; a value is read as JSON if it is a number, true, false or a quoted text,
and is otherwise a text, unchanged. `in` and `not in` take a JSON list, or values with commas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import typer

HELP = (
    'A condition on the metadata: "language=en", "year >= 2020", "kind != draft", "tag in a,b"; '
    "several have to hold together."
)
_OPTION: Final = "--where"
_CONDITION: Final = re.compile(
    r"\s*(?P<name>.+?)\s*(?P<sign>>=|<=|!=|==|=|<|>|\s(?:not\s+)?in\s)\s*(?P<value>.*?)\s*",
    re.DOTALL,
)


def parse(texts: Sequence[str] | None) -> dict[str, Any]:
    """Return the filter for these conditions; raises a usage error for an invalid one."""
    conditions: dict[str, Any] = {}
    for text in texts or ():
        match = _CONDITION.fullmatch(text)
        if match is None or match["value"].startswith(("=", "<", ">", "!")):
            raise typer.BadParameter(
                f"{text!r} is no condition, as NAME>=VALUE or NAME in A,B; operators are =, !=, "
                "<, <=, >, >=, in, not in",
                param_hint=_OPTION,
            )
        sign = " ".join(match["sign"].split())
        name = match["name"] if sign in ("=", "==") else f"{match['name']} {sign}"
        if name in conditions:
            raise typer.BadParameter(
                f"{text!r} is said of {match['name']!r} a second time; one condition can list "
                "values: NAME in A,B or NAME not in A,B",
                param_hint=_OPTION,
            )
        value = match["value"]
        conditions[name] = _listed(value) if sign.endswith("in") else _value(value)
    return conditions


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | str) else text


def _listed(text: str) -> str:
    if text.startswith("["):
        return text
    return json.dumps([_value(each.strip()) for each in text.split(",")])
