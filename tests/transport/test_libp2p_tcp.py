"""Reading a connection ahead: the same bytes in the same order, with fewer calls of the system."""

from __future__ import annotations

import pytest
import trio
from libp2p.io.exceptions import ConnectionClosedError
from trio.testing import memory_stream_pair

from bbnode.transport.libp2p.tcp import ReadAheadStream
from tests.patience import PATIENCE_S

DATA = bytes(range(256)) * 1200


class Counting:
    """A stream that counts what it is asked for."""

    def __init__(self, stream) -> None:
        self.stream = stream
        self.asked: list[int | None] = []

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        self.asked.append(max_bytes)
        return bytes(await self.stream.receive_some(max_bytes))


@pytest.mark.parametrize("wanted", [1, 2, 65_533, 131_072, 500_000, None])
async def test_all_comes_in_order_whatever_is_asked_for(wanted):
    ours, theirs = memory_stream_pair()
    await theirs.send_all(DATA)
    await theirs.send_eof()
    reader, got = ReadAheadStream(ours), bytearray()
    reader.secured()
    with trio.fail_after(PATIENCE_S):
        while data := await reader.read(wanted):
            assert wanted is None or len(data) <= wanted
            got += data
    assert got == DATA
    assert await reader.read(wanted) == b""


async def test_a_packet_and_its_length_are_read_at_once():
    ours, theirs = memory_stream_pair()
    counting = Counting(ours)
    reader = ReadAheadStream(counting)
    await theirs.send_all(b"\x00\x05hello" * 2)
    for _ in range(2):
        assert await reader.read(2) == b"\x00\x05"
        assert await reader.read(5) == b"hello"
    assert len(counting.asked) == 1
    # What has been given out is not asked for again, nor waited for with nothing there.
    await theirs.send_all(b"next")
    assert await reader.read(65_533) == b"next"
    assert await reader.read(0) == b""


async def test_a_cancelled_read_loses_nothing():
    ours, theirs = memory_stream_pair()
    reader = ReadAheadStream(ours)
    with trio.CancelScope() as scope:
        scope.cancel()
        await reader.read(2)
    assert scope.cancelled_caught
    await theirs.send_all(b"late")
    assert await reader.read(2) + await reader.read(2) == b"late"


async def test_a_broken_connection_raises_what_libp2p_expects():
    ours, _ = memory_stream_pair()

    async def broken(max_bytes: int | None = None) -> bytes:
        raise trio.BrokenResourceError

    ours.receive_some = broken
    with pytest.raises(ConnectionClosedError):
        await ReadAheadStream(ours).read(2)
