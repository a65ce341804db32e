"""The blocking client of the control plane: the standard library only.

Rule: it never waits without a deadline, except for the next line of a stream; and it imports
neither trio nor libp2p, so that `bbnode status` answers at once.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlencode

from bbnode.daemon.control import errors
from bbnode.daemon.control.json_lines import Answered, parse_object
from bbnode.ir.caps import MAX_ARTIFACT_BYTES, MAX_CONTROL_ANSWER_BYTES

DEFAULT_TIMEOUT_S = 5.0
# The media type of an answer that is a file, such as a model.
FILE = "application/octet-stream"
# Bytes of a download that are read at once.
PIECE_BYTES = 1 << 20
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpAddress:
    """The address of `control.tcp`, and the token that it asks for."""

    host: str
    port: int
    token: str = field(repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class ControlClient:
    """A context manager that queries a daemon; connects when entered.

    Raises `NotRunning`, `ControlTimeout`, `ControlProtocolError`, and `ControlError` for a refusal
    of the daemon.
    """

    def __init__(self, path: Path | TcpAddress, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Create a client; `path` is `paths.control_socket(state_dir)`; `timeout_s` bounds each
        answer.
        """
        self._path = path
        self._timeout_s = timeout_s
        self._headers = {"Accept": "application/json"}
        self._http: http.client.HTTPConnection
        if isinstance(path, TcpAddress):
            self._http = http.client.HTTPConnection(path.host, path.port, timeout=timeout_s)
            self._headers["Authorization"] = f"Bearer {path.token}"
        else:
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
            # The response holds the socket as well, if the daemon announced that it is the last.
            self._response.close()
        self._http.close()

    def abort(self) -> None:
        """End the connection, from any thread; a thread that waits on it gets NotRunning."""
        if self._http.sock is not None:
            with contextlib.suppress(OSError):
                self._http.sock.shutdown(socket.SHUT_RDWR)

    def get(self, path: str, query: Query | None = None) -> dict[str, Any]:
        """Send a GET request, as in `get("/v1/status")`, and return its JSON."""
        return self.request("GET", target(path, query))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a POST request and return its JSON."""
        return self.request("POST", target(path), {} if body is None else body)

    def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Change something."""
        return self.request("PUT", target(path), body)

    def request(
        self, method: str, wanted: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send one request and return its JSON; `wanted` is the target of the request line."""
        return parse_answer(*self.fetch(method, wanted, body))

    def fetch(
        self, method: str, wanted: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """Send one request; return the status and bytes of its answer, whatever they are."""
        response = self._send(method, wanted, body)
        return response.status, self._read(wanted, response)

    def _read(self, wanted: str, response: http.client.HTTPResponse) -> bytes:
        is_file = response.headers.get_content_type() == FILE and response.length is not None
        most = MAX_ARTIFACT_BYTES if is_file else MAX_CONTROL_ANSWER_BYTES
        try:
            data = response.read(most + 1)
        except TimeoutError as error:
            raise too_slow(wanted, self._timeout_s) from error
        except (OSError, http.client.HTTPException) as error:
            raise gone(self._path) from error
        if response.length and len(data) <= most:
            raise gone(self._path)  # the answer was cut short, which http.client does not report
        if len(data) > most:
            raise errors.ControlProtocolError(f"the answer to {wanted} is over {most} B")
        return data

    def download(self, path: str, *, max_bytes: int = MAX_ARTIFACT_BYTES) -> Iterator[bytes]:
        """Send a GET request, and return the bytes of its answer in pieces.

        Each piece has to arrive within the time of an answer. The iterator raises `NotRunning` if
        they end too early, and `ControlProtocolError` beyond `max_bytes`.
        """
        wanted = target(path)
        response = self._send("GET", wanted, None)
        if response.status != 200:
            parse_answer(response.status, self._read(wanted, response))
        if response.length is None or response.length > max_bytes:
            raise errors.ControlProtocolError(
                f"the answer to {wanted} is over {max_bytes} B, or of no known length"
            )
        return self._pieces(wanted, response)

    def _pieces(self, wanted: str, response: http.client.HTTPResponse) -> Iterator[bytes]:
        while response.length:
            try:
                piece = response.read(PIECE_BYTES)
            except TimeoutError as error:
                raise too_slow(wanted, self._timeout_s) from error
            except (OSError, http.client.HTTPException) as error:
                raise gone(self._path) from error
            if not piece:
                raise gone(self._path)
            yield piece

    def stream(self, path: str, query: Query | None = None) -> Iterator[dict[str, Any]]:
        """Subscribe now; the iterator ends with the daemon. The client takes no more requests."""
        wanted = target(path, query)
        response = self._send("GET", wanted, None)
        if response.status != 200:
            parse_answer(response.status, self._read(wanted, response))
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
        self, method: str, wanted: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode("utf-8")
        try:
            self._http.request(method, wanted, body=data, headers=self._headers)
            self._response = self._http.getresponse()
            return self._response
        except TimeoutError as error:
            raise too_slow(wanted, self._timeout_s) from error
        except ConnectionRefusedError as error:
            raise cannot_connect(self._path, error) from error
        except (OSError, http.client.HTTPException) as error:
            raise gone(self._path) from error


def target(path: str, query: Query | None = None) -> str:
    """Return the target of a request line."""
    escaped = quote(path, safe="/")
    return f"{escaped}?{urlencode(query, doseq=True)}" if query else escaped


def parse_answer(status: int, data: bytes) -> dict[str, Any]:
    """Return the object in an answer. Raises `ControlError` for a refusal."""
    message = parse_object(data, Answered)
    if status >= 400:
        raise errors.error_of(status, message)
    return message


def cannot_connect(path: Path | TcpAddress, error: OSError) -> Exception:
    """Return the error that says why a daemon can't be reached."""
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


def gone(path: Path | TcpAddress) -> errors.NotRunning:
    """Return the error for a connection that the daemon closed."""
    return errors.NotRunning(f"the daemon on {path} closed the connection; it may have stopped")


def too_slow(what: str, timeout_s: float) -> errors.ControlTimeout:
    """Return the error for an answer that did not come in time."""
    return errors.ControlTimeout(
        f"the daemon did not answer {what} within {timeout_s:g} s; try a longer --timeout"
    )
