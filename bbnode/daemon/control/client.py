"""The plain client of the control plane, for the command line: blocking, standard library only.

Rule: it never waits without a deadline, except for the next line of a stream; and it imports
neither trio nor libp2p, so that `bbnode status` answers at once.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlencode

from bbnode.daemon.control import errors
from bbnode.daemon.control.json_lines import Answered, parse_object
from bbnode.ir.caps import MAX_CONTROL_ANSWER_BYTES

DEFAULT_TIMEOUT_S = 5.0
Query = Mapping[str, str] | Mapping[str, str | int | list[str]]


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Open the socket; http.client calls it."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(os.fspath(self._path))
        except OSError:
            self.sock.close()
            raise


class ControlClient:
    """Asks a daemon. A context manager; connects when entered.

    Raises `NotRunning`, `ControlTimeout`, `ControlProtocolError`, and `ControlError` for what
    the daemon refuses.
    """

    def __init__(self, path: Path, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """`path` is `paths.control_socket(state_dir)`; `timeout_s` bounds each answer."""
        self._path = path
        self._timeout_s = timeout_s
        self._http = _UnixConnection(path, timeout_s)
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> Self:
        try:
            self._http.connect()
        except OSError as error:
            raise cannot_connect(self._path, error) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._response is not None:
            # It holds the socket as well, where the daemon said that it is the last.
            self._response.close()
        self._http.close()

    def get(self, path: str, query: Query | None = None) -> dict[str, Any]:
        """Ask for something, as in `get("/v1/status")`."""
        return self.request("GET", path, query=query)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Have something done."""
        return self.request("POST", path, body={} if body is None else body)

    def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Change something."""
        return self.request("PUT", path, body=body)

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One request and its JSON answer."""
        status, data = self.fetch(method, path, query=query, body=body)
        return parse_answer(status, data)

    def fetch(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> tuple[int, bytes]:
        """One request: its status and the bytes of its answer, whatever they are."""
        response = self._send(method, path, query, body)
        return response.status, self._read(path, response)

    def _read(self, path: str, response: http.client.HTTPResponse) -> bytes:
        try:
            data = response.read(MAX_CONTROL_ANSWER_BYTES + 1)
        except TimeoutError as error:
            raise too_slow(path, self._timeout_s) from error
        except (OSError, http.client.HTTPException) as error:
            raise gone(self._path) from error
        if len(data) > MAX_CONTROL_ANSWER_BYTES:
            raise errors.ControlProtocolError(
                f"the answer to {path} is over {MAX_CONTROL_ANSWER_BYTES} B"
            )
        return data

    def stream(self, path: str, query: Query | None = None) -> Iterator[dict[str, Any]]:
        """Subscribe now; the iterator ends with the daemon, and uses the client up."""
        response = self._send("GET", path, query, None)
        if response.status != 200:
            parse_answer(response.status, self._read(path, response))
        if self._http.sock is not None:
            self._http.sock.settimeout(None)
        return self._lines(response)

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        while True:
            try:
                line = response.readline(MAX_CONTROL_ANSWER_BYTES)
            except (OSError, http.client.HTTPException, ValueError):
                return  # the daemon went away; ValueError: the client was closed meanwhile
            if not line:
                return
            yield parse_object(line, Answered)

    def _send(
        self, method: str, path: str, query: Query | None, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode("utf-8")
        try:
            self._http.request(
                method, target(path, query), body=data, headers={"Accept": "application/json"}
            )
            self._response = self._http.getresponse()
            return self._response
        except TimeoutError as error:
            raise too_slow(path, self._timeout_s) from error
        except ConnectionRefusedError as error:
            raise cannot_connect(self._path, error) from error
        except (OSError, http.client.HTTPException) as error:
            raise gone(self._path) from error


def target(path: str, query: Query | None) -> str:
    """The target of a request line."""
    escaped = quote(path, safe="/")
    return f"{escaped}?{urlencode(query, doseq=True)}" if query else escaped


def parse_answer(status: int, data: bytes) -> dict[str, Any]:
    """The object in an answer. Raises `ControlError` for a refusal."""
    message = parse_object(data, Answered)
    if status >= 400:
        raise errors.error_of(status, message)
    return message


def cannot_connect(path: Path, error: OSError) -> Exception:
    """Why a daemon can't be reached, as the error to raise."""
    match error:
        case FileNotFoundError() | ConnectionRefusedError():
            return errors.NotRunning(f"no daemon is running on {path}; start it with `bbnode run`")
        case PermissionError():
            return errors.NotRunning(
                f"{path} belongs to another user; ask as the user that runs the daemon, or as a "
                "member of control.group"
            )
        case TimeoutError():
            return errors.ControlTimeout(f"the daemon on {path} takes no connection")
        case _:
            return errors.NotRunning(f"{path}: {error}")


def gone(path: Path) -> errors.NotRunning:
    """The daemon closed the connection."""
    return errors.NotRunning(f"the daemon on {path} closed the connection; it may have stopped")


def too_slow(what: str, timeout_s: float) -> errors.ControlTimeout:
    """The daemon did not answer."""
    return errors.ControlTimeout(
        f"the daemon did not answer {what} within {timeout_s:g} s; try a longer --timeout"
    )
