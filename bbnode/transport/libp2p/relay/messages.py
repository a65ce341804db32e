"""The messages between a relay and its users, before a circuit is theirs.

Rule: two protocols. `/bbnode/relay/1` is served by relays: one request, one answer, and after an
accepted connect the stream is the circuit. `/bbnode/relayed/1` is served by those who hold a
reservation: the relay opens it, one answer, and the stream is the other half. Requests and
answers have a fixed layout, big-endian; a change of it is another protocol id.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from bbnode.ir.caps import MAX_DIGEST_BYTES
from bbnode.ir.decoding import Boundary
from bbnode.ir.errors import PeerError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ProtocolStream, read_exactly

RELAY_PROTOCOL: Final = "/bbnode/relay/1"
RELAYED_PROTOCOL: Final = "/bbnode/relayed/1"

# The command, and the length of the PeerId that follows, 0 for none.
_REQUEST: Final = struct.Struct("!BB")
# Status, seconds and bytes: of a reservation its time, of a circuit both of its bounds.
_ANSWER: Final = struct.Struct("!BIQ")
# Code and length of the multihash stand before its digest.
_MAX_PEER_BYTES: Final = MAX_DIGEST_BYTES + 2


class RelayCommand(enum.IntEnum):
    """The commands to a relay."""

    RESERVE = 1
    CONNECT = 2


class RelayStatus(enum.IntEnum):
    """The outcome of a request."""

    OK = 0
    MALFORMED = 1
    # Asked over a connection that is relayed itself.
    RELAYED = 2
    TOO_MANY_RESERVATIONS = 3
    # The peer to be reached is not connected, or has no reservation.
    NO_RESERVATION = 4
    # In all, or with one of the two peers as an end.
    TOO_MANY_CIRCUITS = 5
    # The peer to be reached did not take the circuit.
    NOT_TAKEN = 6


REASONS: Final[dict[RelayStatus, str]] = {
    RelayStatus.OK: "it agrees",
    RelayStatus.MALFORMED: "it does not understand us: run the same release on all nodes",
    RelayStatus.RELAYED: "our own connection with it is relayed",
    RelayStatus.TOO_MANY_RESERVATIONS: "it has as many reservations as it takes "
    "(relay.reservations there)",
    RelayStatus.NO_RESERVATION: "the peer is not connected with it, or has no reservation "
    "(relay.use there)",
    RelayStatus.TOO_MANY_CIRCUITS: "it has as many circuits as it takes (relay.circuits and "
    "relay.circuits_per_peer there)",
    RelayStatus.NOT_TAKEN: "the peer did not take the circuit",
}


class RelayMessageError(PeerError):
    """A relay, or one of its users, sent something other than a message of the protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayRequest:
    """A request to a relay; `peer` is the one to connect with."""

    ask: RelayCommand
    peer: PeerId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayAnswer:
    """The answer to a request, with the seconds and bytes for which it is valid."""

    status: RelayStatus
    seconds: int = 0
    bytes: int = 0


async def write_request(stream: ProtocolStream, request: RelayRequest) -> None:
    """Send a request; raises StreamBrokenError."""
    peer = b"" if request.peer is None else request.peer.to_bytes()
    await stream.write(_REQUEST.pack(request.ask, len(peer)) + peer)


async def read_request(stream: ProtocolStream) -> RelayRequest:
    """Read the request of a peer; raises RelayMessageError and StreamBrokenError."""
    ask, length = _REQUEST.unpack(await read_exactly(stream, _REQUEST.size))
    if length > _MAX_PEER_BYTES:
        raise RelayMessageError(f"{stream.peer} names a peer of {length} bytes, which none has")
    raw = await read_exactly(stream, length)
    with Boundary(f"{stream.peer} asks for something unknown", RelayMessageError):
        request = RelayRequest(ask=RelayCommand(ask), peer=PeerId.from_bytes(raw) if raw else None)
    if (request.peer is None) != (request.ask is RelayCommand.RESERVE):
        raise RelayMessageError(f"{stream.peer} asks to {request.ask.name} with a peer too many")
    return request


async def write_answer(stream: ProtocolStream, answer: RelayAnswer) -> None:
    """Send an answer; raises StreamBrokenError."""
    await stream.write(_ANSWER.pack(answer.status, answer.seconds, answer.bytes))


async def read_answer(stream: ProtocolStream) -> RelayAnswer:
    """Read the answer of a peer; raises RelayMessageError and StreamBrokenError."""
    status, seconds, size = _ANSWER.unpack(await read_exactly(stream, _ANSWER.size))
    with Boundary(f"{stream.peer} answers something unknown", RelayMessageError):
        return RelayAnswer(status=RelayStatus(status), seconds=seconds, bytes=size)
