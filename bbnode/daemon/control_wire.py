"""The words of the control plane: requests and answers, one JSON object a line.

Rule: pure functions and the errors; server and clients do the I/O.

    request   {"v": 1, "id": 7, "cmd": "status", "args": {}}
    answer    {"v": 1, "id": 7, "ok": true, "result": {…}}
    failure   {"v": 1, "id": 7, "ok": false, "error": {"kind": "UnknownCommand", "message": "…"}}
    stream    {"v": 1, "id": 7, "ok": true, "event": {…}, "dropped": 0}   any number of times

`id` is chosen by the client and only echoed. `dropped` counts the events that this
subscriber lost, before this one, because it read too slowly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bbnode.ir.errors import BbnodeError, DeploymentError, EnvironmentFault

VERSION = 1

# A request is a command and a few arguments; an answer may list every peer and counter.
MAX_REQUEST_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 4 * 1024 * 1024


class ControlError(BbnodeError):
    """The daemon refused or failed a request; `kind` is the name of its error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class NotRunning(EnvironmentFault):
    """Nobody listens on the control socket."""


class ControlTimeout(EnvironmentFault):
    """The daemon did not answer in time."""


class ControlProtocolError(DeploymentError):
    """What came over the control socket is not this protocol."""


class AlreadyRunning(DeploymentError):
    """Another daemon answers on the control socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as the server reads it."""

    cmd: str
    args: Mapping[str, Any] = field(default_factory=dict)
    id: int | str | None = None


class LineBuffer:
    """Cuts what comes in into lines, and bounds each."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._buffer = bytearray()
        self._searched = 0

    def add(self, data: bytes) -> None:
        """Take in what was received."""
        self._buffer += data

    def take(self) -> bytes | None:
        """The next whole line without its end, or None when there is none yet.

        Raises `ControlProtocolError` once a line is over the cap.
        """
        end = self._buffer.find(b"\n", self._searched)
        if (end if end >= 0 else len(self._buffer)) > self._max_line_bytes:
            raise ControlProtocolError(f"a line is over the cap of {self._max_line_bytes} bytes")
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line


def encode(message: Mapping[str, Any]) -> bytes:
    """One line. NaN and infinities become null: they are not JSON.

    Raises `ControlProtocolError` for a value that JSON has no form for, and for a line longer
    than `MAX_ANSWER_BYTES`.
    """
    try:
        text = json.dumps(_finite(message), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ControlProtocolError(f"a control message is not JSON: {error}") from error
    line = text.encode("utf-8", "replace") + b"\n"
    if len(line) > MAX_ANSWER_BYTES:
        raise ControlProtocolError(
            f"a control message of {len(line)} bytes is over the cap of {MAX_ANSWER_BYTES}"
        )
    return line


def request_line(cmd: str, args: Mapping[str, Any], number: int) -> bytes:
    """A request as it goes over the socket."""
    return encode({"v": VERSION, "id": number, "cmd": cmd, "args": dict(args)})


def parse_request(line: bytes) -> Request:
    """Read a request. Raises `ControlProtocolError` for anything else."""
    message = _parse_object(line)
    version = message.get("v")
    if version != VERSION or isinstance(version, bool):
        raise ControlProtocolError(
            f"control protocol version {_short(version)} is not supported; this daemon speaks "
            f"version {VERSION} ('v': {VERSION})"
        )
    unknown = message.keys() - {"v", "id", "cmd", "args"}
    if unknown:
        raise ControlProtocolError(f"unknown field {_short(min(unknown))} in the request")
    cmd, args, number = message.get("cmd"), message.get("args", {}), message.get("id")
    if not isinstance(cmd, str) or not cmd:
        raise ControlProtocolError("'cmd' has to be the name of a command")
    if not isinstance(args, dict):
        raise ControlProtocolError("'args' has to be an object")
    if number is not None and (not isinstance(number, int | str) or len(str(number)) > 64):
        raise ControlProtocolError("'id' has to be a number or a text of up to 64 characters")
    return Request(cmd=cmd, args=args, id=number)


def parse_answer(line: bytes, number: int) -> dict[str, Any]:
    """Read an answer to request `number`: the whole object, once it says "ok".

    Raises `ControlError` for a failure, `ControlProtocolError` for anything else.
    """
    message = _parse_object(line)
    if message.get("v") != VERSION:
        raise ControlProtocolError(
            f"the daemon speaks control protocol version {_short(message.get('v'))}, this "
            f"client {VERSION}: use the client that was installed with the daemon"
        )
    if message.get("ok") is True and message.get("id") == number:
        return message
    error = message.get("error")
    if message.get("ok") is False and isinstance(error, dict):
        raise ControlError(str(error.get("kind", "")), str(error.get("message", "")))
    raise ControlProtocolError(f"the daemon answered something else: {_short(message)}")


def success(number: int | str | None, result: Mapping[str, Any]) -> bytes:
    """The line that answers a request."""
    return encode({"v": VERSION, "id": number, "ok": True, "result": result})


def failure(number: int | str | None, kind: str, message: str) -> bytes:
    """The line that refuses a request."""
    error = {"kind": kind, "message": message}
    return encode({"v": VERSION, "id": number, "ok": False, "error": error})


def event(number: int | str | None, data: Mapping[str, Any], dropped: int) -> bytes:
    """One line of a stream."""
    return encode({"v": VERSION, "id": number, "ok": True, "event": data, "dropped": dropped})


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        # ValueError holds both bad JSON and bad UTF-8.
        raise ControlProtocolError(f"not a line of JSON: {_short(line)}") from error
    if not isinstance(message, dict):
        raise ControlProtocolError(f"not a JSON object: {_short(message)}")
    return message


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        # NaN is the one number that differs from itself.
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
