"""What a stranger can do before it has said who it is, or just after: fill memory, hold places."""

from __future__ import annotations

import contextlib
from typing import Any

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.utils import encode_uvarint
from multiaddr import Multiaddr

from tests.hostile.stranger import liar, stranger
from tests.patience import PATIENCE_S

SOCKETS = 6
MIB = 1024 * 1024
# More than the node may keep of all of them together.
EACH_BYTES = 100 * MIB
SILENT = 1024
# Before a silent socket that the node has closed is opened again.
AGAIN_S = 5.0
# The length of a message of 8 GiB.
ANNOUNCED = encode_uvarint(2**33)
# Its handler writes, and reads nothing.
IDENTIFY = "/ipfs/id/1.0.0"
NEWCOMERS = 3


async def tcp(address: Multiaddr) -> trio.SocketStream:
    """A bare connection."""
    host, port = address.value_for_protocol("ip4"), address.value_for_protocol("tcp")
    return await trio.open_tcp_stream(str(host), int(port or 0))


async def lengths(address: Multiaddr) -> None:
    """A message of 8 GiB is announced before Noise, and begun."""

    async def one() -> None:
        stream = await tcp(address)
        async with stream:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(ANNOUNCED)
                for _ in range(EACH_BYTES // MIB):
                    await stream.send_all(bytes(MIB))

    async with trio.open_nursery() as nursery:
        for _ in range(SOCKETS):
            nursery.start_soon(one)


async def unread(address: Multiaddr) -> None:
    """Much more than their windows is poured into streams that nobody reads: those of a handler
    that has done what it does, and those that are not negotiated. Each connection has to be cut.
    """

    async def pour(stream: Any, begin: bytes) -> None:
        # The muxer's own: it writes whatever the node has said of the stream.
        muxed = stream.muxed_stream
        muxed.send_window = 2**40
        with contextlib.suppress(BaseLibp2pError):
            await muxed.write(begin)
            for _ in range(EACH_BYTES // MIB):
                await muxed.write(bytes(MIB))

    async def one(number: int) -> None:
        async with stranger(address, number) as peer, trio.open_nursery() as nursery:
            with contextlib.suppress(BaseLibp2pError):
                for _ in range(3):
                    nursery.start_soon(pour, await peer.stream(IDENTIFY), b"")
                    nursery.start_soon(pour, await peer.connection.new_stream(), ANNOUNCED)
            with trio.fail_after(PATIENCE_S):
                await peer.connection.event_closed.wait()

    async with trio.open_nursery() as nursery:
        for number in range(SOCKETS):
            nursery.start_soon(one, number)


async def silent(address: Multiaddr) -> None:
    """As many silent sockets as a node has connections, each opened again when it is closed; and
    newcomers, who have to get in meanwhile.
    """

    async def hold() -> None:
        while True:
            with contextlib.suppress(OSError, trio.BrokenResourceError):
                async with await tcp(address) as stream:
                    while await stream.receive_some(4096):
                        pass
            # Sockets that are held, no flood of new ones.
            await trio.sleep(AGAIN_S)

    async with trio.open_nursery() as nursery:
        for _ in range(SILENT):
            nursery.start_soon(hold)
        with trio.fail_after(PATIENCE_S):
            for number in range(NEWCOMERS):
                async with liar(address, 500 + number):
                    pass
        nursery.cancel_scope.cancel()
