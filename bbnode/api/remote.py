"""A running daemon, asked over its control plane: trio, and through it asyncio.

Rule: each request has a connection of its own, so that one that waits holds up no other.
`bbnode/api/blocking_remote.py` is made of this file (`scripts/blocking-methods`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any, Final, Self

import trio

from bbnode.api.errors import WaitTimeout
from bbnode.api.inputs import deadline, named, seconds, to_json
from bbnode.api.methods import LOOK_EVERY_S, AsyncMethods
from bbnode.api.outcome import InvokeResult, checked_outcome, outcome_of
from bbnode.api.where import control_address
from bbnode.daemon.control.async_client import AsyncControlClient, LineStream
from bbnode.daemon.control.client import DEFAULT_TIMEOUT_S, Query, parse_answer
from bbnode.daemon.control.errors import NotRunning

# For the first byte of a file, which the daemon first has to create, and for each further piece.
DOWNLOAD_S: Final = 60.0
# Beyond an execution's own time, for the answer to come.
ANSWER_SLACK_S: Final = 10.0
# For a daemon to stop: the longest node.stop_grace_s that anybody would wait for by hand.
STOP_WAIT_S: Final = 120.0


class TrioRemoteNode(AsyncMethods):
    """A running daemon."""

    def __init__(
        self,
        node: str | os.PathLike[str],
        *,
        token: str | os.PathLike[str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Create a client with the arguments of `bbnode.connect`; nothing is sent yet."""
        self._address = control_address(node, token)
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address}>"

    async def check(self) -> None:
        """Send one request. Raises NotRunning, or ControlError for a token that is refused."""
        await self.log_level()

    async def fetch(
        self, method: str, wanted: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """Send one request of the control plane; return the status and bytes of its answer."""
        return await self._fetch(method, wanted, body, self._timeout_s)

    async def stream(self, path: str, query: Query) -> TrioRemoteLines:
        """Subscribe to the lines of an endpoint, now."""
        async with contextlib.AsyncExitStack() as stack:
            client = AsyncControlClient(self._address, timeout_s=self._timeout_s)
            await stack.enter_async_context(client)
            lines = await client.stream(path, query)
            return TrioRemoteLines(lines, stack.pop_all())

    async def download(self, path: str) -> bytes:
        """Return the bytes of a file that an endpoint sends."""
        timeout_s = max(self._timeout_s, DOWNLOAD_S)
        async with AsyncControlClient(self._address, timeout_s=timeout_s) as client:
            return b"".join(await client.download(path))

    async def invoke(
        self,
        target: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        deadline_s: float | None = None,
    ) -> InvokeResult:
        """Run one execution of a target, and return it with its outputs once it has ended."""
        encoded = {name: to_json(name, value) for name, value in named(inputs).items()}
        body = {"target": target, "inputs": encoded, **_deadline(deadline_s)}
        return await self._finish("/v1/invoke", body, timeout_s)

    async def emit(
        self,
        target: str,
        input: str,  # noqa: A002 - as the endpoint calls it
        value: Any,
        *,
        timeout_s: float = 60.0,
        deadline_s: float | None = None,
    ) -> InvokeResult:
        """Send a target one input, which starts an execution; otherwise as `invoke`."""
        encoded = to_json(input, value)
        body = {"target": target, "input": input, "value": encoded, **_deadline(deadline_s)}
        return await self._finish("/v1/emit", body, timeout_s)

    async def stop(self) -> None:
        """Stop the daemon cleanly and wait for it. Idempotent.

        Raises WaitTimeout if that takes longer than two minutes.
        """
        ends_s = time.monotonic() + STOP_WAIT_S
        try:
            await self._ask("POST", "/v1/stop")
            while time.monotonic() < ends_s:
                await self.healthz()
                await self._sleep(LOOK_EVERY_S)
        except NotRunning:
            return
        raise WaitTimeout(f"the daemon on {self._address} still runs after {STOP_WAIT_S:g} s")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave the daemon as it is."""

    async def _sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    async def _finish(self, path: str, body: Mapping[str, Any], timeout_s: float) -> InvokeResult:
        wait_s = seconds(timeout_s)
        sent = {**body, "wait_s": wait_s, "exact": True}
        answer = parse_answer(*await self._fetch("POST", path, sent, wait_s + ANSWER_SLACK_S))
        return checked_outcome(outcome_of(answer), body["target"], wait_s)

    async def _fetch(
        self, method: str, wanted: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[int, bytes]:
        async with AsyncControlClient(self._address, timeout_s=timeout_s) as client:
            return await client.fetch(method, wanted, body)


def _deadline(deadline_s: float | None) -> dict[str, float]:
    seconds_left = deadline(deadline_s)
    return {} if seconds_left is None else {"deadline_s": seconds_left}


class TrioRemoteLines:
    """The lines of a daemon's stream; it ends with the daemon."""

    def __init__(self, lines: LineStream, connection: contextlib.AsyncExitStack) -> None:
        """Wrap the lines of a connection; made by `TrioRemoteNode.stream`."""
        self._lines = lines
        self._connection = connection

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        return await self._lines.__anext__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the stream."""
        await self._connection.aclose()
