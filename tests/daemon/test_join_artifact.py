"""An artifact over a connection that breaks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from bbnode.daemon.join.artifact import MAX_ATTEMPTS, cache_file, obtain
from bbnode.daemon.join.dial import Dialled
from bbnode.daemon.join.invitation import InviterLost
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Hello, ProtocolHandler
from bbnode.transport.errors import StreamBrokenError

INVITER, OWN = PeerId.from_seed("inviter"), PeerId.from_seed("own")
SHA256 = "ab" * 32


class Broken:
    """Opens streams that end after a part of the answer."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def register_protocol(self, protocol_id: str, handler: ProtocolHandler) -> None:
        raise AssertionError

    @asynccontextmanager
    async def open_stream(self, peer: PeerId, protocol_id: str) -> AsyncIterator[Stream]:
        assert peer == INVITER
        yield Stream(self.asked)


class Stream:
    """Answers with its head and 5 of 100 bytes, and breaks."""

    peer = INVITER

    def __init__(self, asked: list[bytes]) -> None:
        self._asked = asked
        self._answers = [b"\x00" + (100).to_bytes(8, "big"), b"five."]

    async def read(self, max_bytes: int) -> bytes:
        if not self._answers:
            raise StreamBrokenError("the stream was reset")
        return self._answers.pop(0)

    async def write(self, data: bytes) -> None:
        self._asked.append(bytes(data))

    async def end(self) -> None:
        pass


async def test_each_attempt_goes_on_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    host = Broken()
    dialled = Dialled(backend=host, hello=Hello(), address="")
    with pytest.raises(InviterLost, match=f"broke {MAX_ATTEMPTS} times"):
        await obtain(dialled, INVITER, SHA256, own=OWN, state_dir=tmp_path / "state")
    offsets = [int.from_bytes(request[32:], "big") for request in host.asked]
    assert offsets == [5 * n for n in range(MAX_ATTEMPTS)]
    (partial,) = cache_file(tmp_path / "state", SHA256).parent.iterdir()
    assert partial.stat().st_size == 5 * MAX_ATTEMPTS
