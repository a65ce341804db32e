"""go-libp2p on the other side of our own Noise packets and Yamux, in both roles.

Set BBNODE_P2PD to go-libp2p's daemon, such as `hivemind/hivemind_cli/p2pd` of PyPI's `hivemind`;
without it the tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio
from libp2p.peer.id import ID
from libp2p.utils import encode_uvarint
from multiaddr import Multiaddr

from bbnode.transport.libp2p.workarounds import running
from tests.interop.test_js_libp2p import SIZE, ours
from tests.patience import PATIENCE_S
from tests.transport.test_libp2p_workarounds import ECHO, LOOPBACK

P2PD = os.environ.get("BBNODE_P2PD", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not P2PD, reason="BBNODE_P2PD is not set"),
]
IDENTIFY, CONNECT, STREAM_OPEN, STREAM_HANDLER = range(4)


# -- the daemon's control protocol: protobuf messages, each with its length ---------------------


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return encode_uvarint(number << 3) + encode_uvarint(value)
    return encode_uvarint(number << 3 | 2) + encode_uvarint(len(value)) + value


def uvarint(data: bytes) -> tuple[int, bytes]:
    value = shift = 0
    for at, byte in enumerate(data):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, data[at + 1 :]
    raise ValueError("cut short")


def fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    while data:
        key, data = uvarint(data)
        value, data = uvarint(data)
        if key & 7:
            yield key >> 3, data[:value]
            data = data[value:]
        else:
            yield key >> 3, value


async def message_of(stream: trio.SocketStream) -> dict[int, bytes | int]:
    size = shift = 0
    while True:
        (byte,) = await stream.receive_some(1)
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    body = b""
    while len(body) < size:
        body += await stream.receive_some(size - len(body))
    return dict(fields(body))


class Daemon:
    """A go-libp2p host, told by its control socket what to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @asynccontextmanager
    async def ask(
        self, kind: int, *parts: bytes
    ) -> AsyncIterator[tuple[trio.SocketStream, dict[int, bytes | int]]]:
        async with await trio.open_unix_socket(self.folder / "control") as stream:
            body = field(1, kind) + b"".join(parts)
            await stream.send_all(encode_uvarint(len(body)) + body)
            answer = await message_of(stream)
            assert answer[1] == 0, answer
            yield stream, answer

    async def address(self) -> tuple[ID, Multiaddr]:
        async with self.ask(IDENTIFY) as (_, answer):
            found = list(fields(answer[4]))
        peer = next(value for number, value in found if number == 1)
        listening = [Multiaddr(value) for number, value in found if number == 2]
        return ID(peer), next(each for each in listening if "127.0.0.1" in str(each))


@asynccontextmanager
async def daemon(folder: Path) -> AsyncIterator[Daemon]:
    command = [P2PD, "-listen", f"/unix{folder}/control", "-hostAddrs", "/ip4/127.0.0.1/tcp/0"]
    async with trio.open_nursery() as nursery:
        process = await nursery.start(
            partial(
                trio.run_process,
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )
        )
        with trio.fail_after(PATIENCE_S):
            while not (folder / "control").exists():  # noqa: ASYNC110 - another process makes it
                await trio.sleep(0.02)
            yield Daemon(folder)
        process.kill()


async def test_go_dials_us(tmp_path):
    host = ours()
    async with running(host, [LOOPBACK]), daemon(tmp_path) as go:
        peer, address = host.get_id().to_bytes(), host.get_transport_addrs()[0]
        if "/p2p/" in str(address):
            address = address.decapsulate_code(0x01A5)
        async with go.ask(CONNECT, field(2, field(1, peer) + field(2, address.to_bytes()))):
            pass
        asked = field(3, field(1, peer) + field(2, ECHO.encode()))
        body, got = os.urandom(SIZE), bytearray()
        async with go.ask(STREAM_OPEN, asked) as (stream, _), trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, body)
            while len(got) < SIZE:
                got += await stream.receive_some()
        assert bytes(got) == body


async def test_we_dial_go(tmp_path):
    host = ours()
    async with running(host, []), daemon(tmp_path) as go, trio.open_nursery() as nursery:
        # Whoever opens a stream to the daemon is given to this socket.
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def give_back(stream: trio.SocketStream) -> None:
            # The daemon resets it when both sides have ended theirs.
            with suppress(trio.BrokenResourceError):
                async with stream:
                    await message_of(stream)
                    async for data in stream:
                        await stream.send_all(data)

        nursery.start_soon(trio.serve_listeners, give_back, [listener])
        port = listener.socket.getsockname()[1]
        handler = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}").to_bytes()
        asked = field(4, field(1, handler) + field(2, ECHO.encode()) + field(3, 0))
        async with go.ask(STREAM_HANDLER, asked):
            pass
        peer, address = await go.address()
        await host.get_network().dial_addr(address, peer)
        stream = await host.new_stream(peer, [ECHO])
        body, got = os.urandom(SIZE), bytearray()
        nursery.start_soon(stream.write, body)
        while len(got) < SIZE:
            got += await stream.read(65_536)
        assert bytes(got) == body
        # The daemon passes no half-closed streams on.
        await stream.reset()
        nursery.cancel_scope.cancel()
