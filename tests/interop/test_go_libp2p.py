"""go-libp2p on the other side, in both roles: negotiations, Noise and Yamux."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import trio
from multiaddr import Multiaddr

from bbnode.ir.envelope import varint
from bbnode.ir.peer import PeerId
from bbnode.transport.libp2p.keys import encode_field
from tests.interop.installed import P2PD, needs
from tests.interop.test_js_libp2p import SIZE
from tests.patience import PATIENCE_S
from tests.transport.hosts import ECHO, LOOPBACK, OurHost

pytestmark = needs("go-libp2p's p2pd", P2PD)
IDENTIFY, CONNECT, STREAM_OPEN, STREAM_HANDLER = range(4)


# -- the daemon's control protocol: protobuf messages, each with its length ---------------------


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
            body = encode_field(1, kind) + b"".join(parts)
            await stream.send_all(varint(len(body)) + body)
            answer = await message_of(stream)
            assert answer[1] == 0, answer
            yield stream, answer

    async def address(self) -> tuple[PeerId, Multiaddr]:
        async with self.ask(IDENTIFY) as (_, answer):
            found = list(fields(answer[4]))
        peer = next(value for number, value in found if number == 1)
        listening = [Multiaddr(value) for number, value in found if number == 2]
        return PeerId.from_bytes(peer), next(each for each in listening if "127.0.0.1" in str(each))


async def answers(path: Path) -> None:
    """Return when a process listens on this socket."""
    while True:
        with suppress(OSError):
            await (await trio.open_unix_socket(path)).aclose()
            return
        await trio.sleep(0.02)


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
            await answers(folder / "control")
            yield Daemon(folder)
        process.kill()


async def test_go_dials_us(tmp_path):
    host = OurHost(1)
    async with host.running([LOOPBACK]), daemon(tmp_path) as go:
        peer, address = host.peer_id.to_bytes(), host.address
        async with go.ask(
            CONNECT, encode_field(2, encode_field(1, peer) + encode_field(2, address.to_bytes()))
        ):
            pass
        asked = encode_field(3, encode_field(1, peer) + encode_field(2, ECHO.encode()))
        body, got = os.urandom(SIZE), bytearray()
        async with go.ask(STREAM_OPEN, asked) as (stream, _), trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, body)
            while len(got) < SIZE:
                got += await stream.receive_some()
        assert bytes(got) == body


async def test_we_dial_go(tmp_path):
    host = OurHost(1)
    async with host.running([]), daemon(tmp_path) as go, trio.open_nursery() as nursery:
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
        asked = encode_field(
            4, encode_field(1, handler) + encode_field(2, ECHO.encode()) + encode_field(3, 0)
        )
        async with go.ask(STREAM_HANDLER, asked):
            pass
        peer, address = await go.address()
        connection = await host.dial(address, peer)
        stream = await connection.open_protocol(ECHO)
        body, got = os.urandom(SIZE), bytearray()
        nursery.start_soon(stream.write, body)
        while len(got) < SIZE:
            got += await stream.read(65_536)
        assert bytes(got) == body
        # The daemon passes no half-closed streams on.
        await stream.reset()
        nursery.cancel_scope.cancel()
