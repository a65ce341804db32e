"""Messages of AutoNAT (libp2p/specs, autonat v1), for hosts that do not speak our dial-back.

Rule: only the messages are here; `dial_back` decides whom to dial, and how often.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from multiaddr import Multiaddr

from bbnode.ir.address import address_from_bytes
from bbnode.ir.caps import MAX_CLAIMED_ADDRESSES, MAX_DIAL_BACK_REQUEST_BYTES
from bbnode.ir.decoding import Boundary
from bbnode.ir.envelope import varint
from bbnode.ir.errors import DecodeError, PeerError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ProtocolStream, read_exactly
from bbnode.transport.libp2p.keys import decode_all_fields, decode_fields, encode_field

AUTONAT_PROTOCOL: Final = "/libp2p/autonat/1.0.0"
_DIAL: Final = 0
_RESPONSE: Final = 1
_MORE: Final = 0x80


class AutonatStatus(enum.IntEnum):
    """The outcome of a request, as the specification numbers them."""

    OK = 0
    DIAL_ERROR = 100
    DIAL_REFUSED = 101
    BAD_REQUEST = 200


class NotAutonat(PeerError):
    """The bytes are no request of AutoNAT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutonatRequest:
    """A peer to dial, and its addresses."""

    peer: PeerId
    addresses: tuple[Multiaddr, ...]


async def read_request(stream: ProtocolStream) -> AutonatRequest:
    """Read one request with its length prefix; raises NotAutonat, StreamBrokenError."""
    size = shift = 0
    while True:
        (byte,) = await read_exactly(stream, 1)
        size |= (byte & ~_MORE) << shift
        shift += 7
        if not byte & _MORE:
            break
        if size > MAX_DIAL_BACK_REQUEST_BYTES or shift > 28:
            raise NotAutonat("a length that no request has")
    if not 0 < size <= MAX_DIAL_BACK_REQUEST_BYTES:
        raise NotAutonat(f"a request of {size} bytes")
    return decode_request(await read_exactly(stream, size))


@Boundary("no request of AutoNAT", NotAutonat)
def decode_request(raw: bytes) -> AutonatRequest:
    """Return a request; addresses of unknown kinds are left out."""
    message = decode_fields(raw)
    dial = message.get(2)
    if message.get(1, _DIAL) != _DIAL or not isinstance(dial, bytes):
        raise NotAutonat("it asks for no dial")
    peer = decode_fields(dial).get(1)
    if not isinstance(peer, bytes):
        raise NotAutonat("it names no peer")
    named: bytes | int = b""
    addresses: list[Multiaddr] = []
    for number, value in decode_all_fields(peer):
        if number == 1:
            named = value
        elif number == 2 and isinstance(value, bytes) and len(addresses) < MAX_CLAIMED_ADDRESSES:
            try:
                addresses.append(address_from_bytes(value))
            except DecodeError:
                continue
    if not isinstance(named, bytes):
        raise NotAutonat("it names no peer")
    return AutonatRequest(peer=PeerId.from_bytes(named), addresses=tuple(dict.fromkeys(addresses)))


async def answer(
    stream: ProtocolStream, status: AutonatStatus, text: str, address: Multiaddr | None = None
) -> None:
    """Send the answer with its length prefix, and end the stream."""
    response = encode_field(1, int(status)) + encode_field(2, text.encode())
    if address is not None:
        response += encode_field(3, address.to_bytes())
    message = encode_field(1, _RESPONSE) + encode_field(3, response)
    await stream.write(varint(len(message)) + message)
    await stream.end()
