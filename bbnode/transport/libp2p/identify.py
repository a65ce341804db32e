"""The answers to identify and ping, which other implementations send to any host.

Rule: they follow the specifications of identify and ping. They reveal no more than our public key,
our addresses and our protocols.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio
from multiaddr import Multiaddr

from bbnode.ir.address import address_from_bytes
from bbnode.ir.caps import MAX_PEER_RECORD_BYTES
from bbnode.ir.envelope import varint
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.libp2p.connection import Connection
from bbnode.transport.libp2p.keys import decode_fields, encode_field
from bbnode.transport.libp2p.muxer import MuxedStream
from bbnode.transport.links.shares import PING_US

IDENTIFY_PROTOCOL: Final = "/ipfs/id/1.0.0"
PING_PROTOCOL: Final = "/ipfs/ping/1.0.0"

_PING_BYTES: Final = 32
# Read at once: pings that a peer sends in a row are answered together, and charged one by one.
_PINGS_BYTES: Final = 64 * 1024
_PING_IDLE_S: Final = 60.0
_OBSERVED: Final = 4  # a field of the message
_AGENT: Final = b"bbnode"
_VERSION: Final = b"ipfs/0.1.0"


def identify_message(
    own: PeerId, listening: Sequence[Multiaddr], protocols: Sequence[str], observed: Multiaddr
) -> bytes:
    """Return the answer to identify, with its length; `observed` is the requester's address."""
    # The PeerId of an Ed25519 key is the key itself, after two bytes of the multihash.
    fields = [encode_field(1, own.to_bytes()[2:])]
    fields += [encode_field(2, address.to_bytes()) for address in listening]
    fields += [encode_field(3, protocol.encode()) for protocol in protocols]
    fields += [encode_field(4, observed.to_bytes()), encode_field(5, _VERSION)]
    message = b"".join((*fields, encode_field(6, _AGENT)))
    return varint(len(message)) + message


async def ask_observed(connection: Connection) -> Multiaddr:
    """Return where a peer sees us come from, as it says itself.

    Raises DecodeError and StreamBrokenError.
    """
    stream = await connection.open_protocol(IDENTIFY_PROTOCOL)
    got = b""
    try:
        while len(got) <= MAX_PEER_RECORD_BYTES and (data := await stream.read()):
            got += data
    finally:
        stream.abort("it is read")
    if len(got) > MAX_PEER_RECORD_BYTES:
        raise DecodeError(f"{connection.peer} says over {MAX_PEER_RECORD_BYTES} bytes of itself")
    # Behind the length of the message, which has one byte or two more.
    start = next((at + 1 for at, byte in enumerate(got[:3]) if byte < 0x80), len(got))
    return address_from_bytes(bytes_of(decode_fields(got[start:]).get(_OBSERVED, b"")))


def bytes_of(value: int | bytes) -> bytes:
    """Return the value of a field that has to be bytes; raises DecodeError."""
    if isinstance(value, int):
        raise DecodeError("a number where bytes belong")
    return value


async def answer_pings(connection: Connection, stream: MuxedStream) -> None:
    """Echo pings of 32 bytes to their sender, until the peer ends the stream.

    Raises StreamBrokenError, also if the peer is silent for a minute.
    """
    received = b""
    while True:
        with trio.move_on_after(_PING_IDLE_S) as idle:
            data = await stream.read(_PINGS_BYTES)
        if idle.cancelled_caught:
            raise StreamBrokenError(f"no ping came for {_PING_IDLE_S:g} s")
        if not data:
            return
        received += data
        whole = len(received) - len(received) % _PING_BYTES
        if whole:
            connection.place.share.work(PING_US * (whole // _PING_BYTES))
            await stream.write(received[:whole])
            received = received[whole:]
