"""JSON as the control plane writes and reads it: one line, bounded, finite.

Rule: pure functions. NaN and infinities become null, since JSON has no form for them; any input but
an object is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bbnode.daemon.control.errors import ControlProtocolError
from bbnode.ir.caps import MAX_CONTROL_ANSWER_BYTES
from bbnode.ir.texts import escaped_json

MAX_SHOWN_CHARS = 80


def encode(message: Mapping[str, Any]) -> bytes:
    """Return one line with its end.

    Raises `ControlProtocolError` for a value that JSON has no form for, and for a line longer
    than `MAX_CONTROL_ANSWER_BYTES`.
    """
    try:
        text = json.dumps(_finite(message), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ControlProtocolError(f"a control message is not JSON: {error}") from error
    line = escaped_json(text).encode("utf-8", "replace") + b"\n"
    if len(line) > MAX_CONTROL_ANSWER_BYTES:
        raise ControlProtocolError(
            f"a control message of {len(line)} bytes is over the cap of {MAX_CONTROL_ANSWER_BYTES}"
        )
    return line


class Answered(dict[str, Any]):
    """An object in a daemon's answer; a missing field raises ControlProtocolError."""

    def __missing__(self, name: str) -> Any:
        raise ControlProtocolError(
            f"the daemon's answer has no {short(name)}; run daemon and command of one version"
        )


def parse_object(data: bytes, kind: type[dict[str, Any]] = dict) -> dict[str, Any]:
    """Read one JSON object; it and those in it are of `kind`.

    Raises `ControlProtocolError` for anything else.
    """
    try:
        message = json.loads(data, object_pairs_hook=None if kind is dict else kind)
    except (ValueError, RecursionError) as error:
        # ValueError covers both bad JSON and bad UTF-8.
        raise ControlProtocolError(f"not JSON: {short(data)}") from error
    if not isinstance(message, dict):
        raise ControlProtocolError(f"not a JSON object: {short(message)}")
    return message


def short(value: object) -> str:
    """Return a value in the form that errors show."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        # NaN is the one number that differs from itself.
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
