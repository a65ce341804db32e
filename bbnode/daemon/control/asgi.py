"""The subset of ASGI that the control plane uses: its types, and answers that are applications.

Rule: an answer knows its status and headers; the server decides how to send it, and whether to send
its body (not for HEAD).
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
RawHeaders: TypeAlias = list[tuple[bytes, bytes]]


def header(scope: Scope, name: bytes) -> str | None:
    """Return a header of a request by its name in small letters; the first one of several."""
    content = next((value for key, value in scope["headers"] if key == name), None)
    return None if content is None else content.decode("latin-1")


class Response:
    """An answer with a body that is at hand."""

    def __init__(
        self,
        body: bytes | str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media: str = "application/octet-stream",
    ) -> None:
        """Create an answer with this body, of the type `media`."""
        self.body = body.encode() if isinstance(body, str) else body
        self.status = status
        self.raw_headers = _raw(headers, media, {"content-length": str(len(self.body))})

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await _start(send, self)
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


class StreamedResponse:
    """An answer whose body comes in parts."""

    status = 200

    def __init__(
        self,
        parts: Iterable[bytes] | AsyncIterable[bytes],
        media: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Create an answer of these parts; `headers` may state their total length."""
        self._parts = parts
        self.raw_headers = _raw(headers, media, {})

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        await _start(send, self)
        if scope["method"] != "HEAD":
            if isinstance(self._parts, Iterable):
                for part in self._parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            else:
                async for part in self._parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _raw(headers: Mapping[str, str] | None, media: str, more: Mapping[str, str]) -> RawHeaders:
    all_of_them = {**(headers or {}), **more, "content-type": media}
    return [(name.lower().encode("ascii"), v.encode("latin-1")) for name, v in all_of_them.items()]


async def _start(send: Send, answer: Response | StreamedResponse) -> None:
    start = {"status": answer.status, "headers": answer.raw_headers}
    await send({"type": "http.response.start", **start})
