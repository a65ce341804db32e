"""The messages between a relay and its users, before a circuit is theirs: libp2p's circuit v2.

Rule: as the specification has it (relay/circuit-v2.md of libp2p/specs). Each message is a protobuf
with its length before it. On a `hop` stream a user asks a relay, which answers once; after an
accepted CONNECT the stream is the circuit. On a `stop` stream the relay offers a circuit to a peer
that has reserved; after its OK that stream is the other half. What a message names is a claim: the
peer at the other end is the one that the handshake through the circuit proves.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from multiaddr import Multiaddr

from bbnode.ir.caps import MAX_RELAY_ADDRESSES, MAX_RELAY_MESSAGE_BYTES
from bbnode.ir.decoding import Boundary
from bbnode.ir.envelope import varint
from bbnode.ir.errors import PeerError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ProtocolStream, read_exactly
from bbnode.transport.libp2p.keys import decode_fields, encode_field

HOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/stop"

# Fields of HopMessage, of StopMessage, and of what is in them.
_TYPE, _PEER, _RESERVATION, _HOP_LIMIT, _HOP_STATUS = 1, 2, 3, 4, 5
_STOP_LIMIT, _STOP_STATUS = 3, 4
_PEER_ID: Final = 1
_EXPIRE, _ADDRESSES = 1, 2
_SECONDS, _BYTES = 1, 2
_STOP_CONNECT, _STOP_STATUS_TYPE = 0, 1
# Bytes of a length: 14 bits are four times what a message may have.
_LENGTH_BYTES: Final = 2


class RelayCommand(enum.IntEnum):
    """The types of messages on a hop stream."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class RelayStatus(enum.IntEnum):
    """The outcome of a request."""

    OK = 100
    # It has no room for one more reservation.
    RESERVATION_REFUSED = 200
    # Too many circuits, in all or with one of the two peers as an end; too many requests.
    RESOURCE_LIMIT_EXCEEDED = 201
    # Asked over a connection that is relayed itself; by somebody, or of somebody, who may not.
    PERMISSION_DENIED = 202
    # The peer to be reached did not take the circuit.
    CONNECTION_FAILED = 203
    # The peer to be reached is not connected, or has no reservation.
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


REASONS: Final[Mapping[RelayStatus, str]] = {
    RelayStatus.OK: "it agrees",
    RelayStatus.RESERVATION_REFUSED: "it has as many reservations as it takes "
    "(relay.reservations there)",
    RelayStatus.RESOURCE_LIMIT_EXCEEDED: "it has as many circuits as it takes (relay.circuits and "
    "relay.circuits_per_peer there), or is asked too often",
    RelayStatus.PERMISSION_DENIED: "it does not relay for us: our own connection with it is "
    "relayed, or its lists do not let us",
    RelayStatus.CONNECTION_FAILED: "the peer did not take the circuit",
    RelayStatus.NO_RESERVATION: "the peer is not connected with it, or has no reservation "
    "(relay.use there)",
    RelayStatus.MALFORMED_MESSAGE: "it does not understand us",
    RelayStatus.UNEXPECTED_MESSAGE: "it did not expect that",
}


class RelayMessageError(PeerError):
    """A relay, or one of its users, sent something other than a message of the protocol."""


class UnexpectedMessageError(RelayMessageError):
    """A message of the protocol that does not belong there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitLimit:
    """The bounds of a circuit; 0 is none."""

    seconds: int = 0
    bytes: int = 0


NO_LIMIT: Final = CircuitLimit()


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayRequest:
    """A request to a relay, RESERVE or CONNECT; `peer` is the one to connect with."""

    ask: RelayCommand
    peer: PeerId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayAnswer:
    """The answer to a request.

    `expires_s` is when a reservation ends, in Unix time, and `addresses` are the relay's, with its
    PeerId; of a circuit there is a `limit`.
    """

    status: RelayStatus
    expires_s: int = 0
    addresses: tuple[Multiaddr, ...] = ()
    limit: CircuitLimit = NO_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitOffer:
    """A circuit that a relay offers, on which `source` is said to be."""

    source: PeerId
    limit: CircuitLimit = NO_LIMIT


# -- hop -------------------------------------------------------------------------------------------


async def write_request(stream: ProtocolStream, request: RelayRequest) -> None:
    """Send a request; raises StreamBrokenError."""
    body = encode_field(_TYPE, request.ask)
    if request.peer is not None:
        body += encode_field(_PEER, _peer_message(request.peer))
    await write_message(stream, body)


async def read_request(stream: ProtocolStream) -> RelayRequest:
    """Read the request of a peer; raises RelayMessageError and StreamBrokenError."""
    fields = await _read(stream)
    with Boundary(f"{stream.peer} asks for something unknown", RelayMessageError):
        ask = RelayCommand(_number(fields, _TYPE))
    if ask is RelayCommand.STATUS:
        raise UnexpectedMessageError(f"{stream.peer} answers where it should ask")
    if ask is RelayCommand.RESERVE:
        # It is for who asks, whoever a request names.
        return RelayRequest(ask=ask)
    return RelayRequest(ask=ask, peer=_peer_in(stream, fields))


async def write_answer(stream: ProtocolStream, answer: RelayAnswer) -> None:
    """Send an answer; raises StreamBrokenError."""
    body = encode_field(_TYPE, RelayCommand.STATUS)
    if answer.expires_s:
        reservation = encode_field(_EXPIRE, answer.expires_s) + b"".join(
            encode_field(_ADDRESSES, each.to_bytes())
            for each in answer.addresses[:MAX_RELAY_ADDRESSES]
        )
        body += encode_field(_RESERVATION, reservation)
    body += _limit_field(_HOP_LIMIT, answer.limit) + encode_field(_HOP_STATUS, answer.status)
    await write_message(stream, body)


async def read_answer(stream: ProtocolStream) -> RelayAnswer:
    """Read the answer of a relay; raises RelayMessageError and StreamBrokenError.

    Its addresses are left out: we know where we have dialled it.
    """
    fields = await _read(stream)
    with Boundary(f"{stream.peer} answers something unknown", RelayMessageError):
        kind = RelayCommand(_number(fields, _TYPE))
        if kind is RelayCommand.STATUS:
            reservation = decode_fields(_message(fields, _RESERVATION))
            return RelayAnswer(
                status=RelayStatus(_number(fields, _HOP_STATUS)),
                expires_s=_number(reservation, _EXPIRE),
                limit=_limit_in(fields, _HOP_LIMIT),
            )
    raise UnexpectedMessageError(f"{stream.peer} asks where it should answer")


# -- stop ------------------------------------------------------------------------------------------


async def write_offer(stream: ProtocolStream, offer: CircuitOffer) -> None:
    """Offer a circuit to a peer; raises StreamBrokenError."""
    body = encode_field(_TYPE, _STOP_CONNECT) + encode_field(_PEER, _peer_message(offer.source))
    await write_message(stream, body + _limit_field(_STOP_LIMIT, offer.limit))


async def read_offer(stream: ProtocolStream) -> CircuitOffer:
    """Read the offer of a relay; raises RelayMessageError and StreamBrokenError."""
    fields = await _read(stream)
    with Boundary(f"{stream.peer} offers something unknown", RelayMessageError):
        kind = _number(fields, _TYPE)
        limit = _limit_in(fields, _STOP_LIMIT)
    if kind != _STOP_CONNECT:
        raise UnexpectedMessageError(f"{stream.peer} sends {kind} where it should offer a circuit")
    return CircuitOffer(source=_peer_in(stream, fields), limit=limit)


async def write_acceptance(stream: ProtocolStream, status: RelayStatus) -> None:
    """Take a circuit (OK), or say why not; raises StreamBrokenError."""
    body = encode_field(_TYPE, _STOP_STATUS_TYPE) + encode_field(_STOP_STATUS, status)
    await write_message(stream, body)


async def read_acceptance(stream: ProtocolStream) -> RelayStatus:
    """Read whether a peer takes a circuit; raises RelayMessageError and StreamBrokenError."""
    fields = await _read(stream)
    with Boundary(f"{stream.peer} answers something unknown", RelayMessageError):
        kind = _number(fields, _TYPE)
        if kind == _STOP_STATUS_TYPE:
            return RelayStatus(_number(fields, _STOP_STATUS))
    raise UnexpectedMessageError(f"{stream.peer} sends {kind} where it should answer")


# -- parts -----------------------------------------------------------------------------------------


async def write_message(stream: ProtocolStream, body: bytes) -> None:
    """Send one message with its length; raises StreamBrokenError."""
    await stream.write(varint(len(body)) + body)


async def read_message(stream: ProtocolStream) -> bytes:
    """Read one message of MAX_RELAY_MESSAGE_BYTES at most, and nothing of what comes after it.

    Raises RelayMessageError and StreamBrokenError.
    """
    size = 0
    for index in range(_LENGTH_BYTES):
        (byte,) = await read_exactly(stream, 1)
        size |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            break
    else:
        raise RelayMessageError(f"{stream.peer} sends a message without an end to its length")
    if size > MAX_RELAY_MESSAGE_BYTES:
        raise RelayMessageError(
            f"{stream.peer} sends a message of {size} bytes; at most {MAX_RELAY_MESSAGE_BYTES} are "
            "read"
        )
    return await read_exactly(stream, size)


async def _read(stream: ProtocolStream) -> dict[int, int | bytes]:
    """Read one message; return its fields."""
    raw = await read_message(stream)
    with Boundary(f"{stream.peer} sends no message of relays", RelayMessageError):
        return decode_fields(raw)


def _number(fields: Mapping[int, int | bytes], number: int) -> int:
    """Return a number; one that is not there is 0, as in protobuf."""
    value = fields.get(number, 0)
    if not isinstance(value, int):
        raise RelayMessageError(f"field {number} is no number")
    return value


def _message(fields: Mapping[int, int | bytes], number: int) -> bytes:
    """Return a message inside of a message; one that is not there is empty."""
    value = fields.get(number, b"")
    if not isinstance(value, bytes):
        raise RelayMessageError(f"field {number} is no message")
    return value


def _peer_message(peer: PeerId) -> bytes:
    return encode_field(_PEER_ID, peer.to_bytes())


def _peer_in(stream: ProtocolStream, fields: Mapping[int, int | bytes]) -> PeerId:
    """Return the peer that a message names; its addresses are of no use here."""
    with Boundary(f"{stream.peer} names no peer", RelayMessageError):
        inner = decode_fields(_message(fields, _PEER))
        return PeerId.from_bytes(_message(inner, _PEER_ID))


def _limit_field(number: int, limit: CircuitLimit) -> bytes:
    if limit == NO_LIMIT:
        return b""
    return encode_field(
        number, encode_field(_SECONDS, limit.seconds) + encode_field(_BYTES, limit.bytes)
    )


def _limit_in(fields: Mapping[int, int | bytes], number: int) -> CircuitLimit:
    inner = decode_fields(_message(fields, number))
    return CircuitLimit(seconds=_number(inner, _SECONDS), bytes=_number(inner, _BYTES))
