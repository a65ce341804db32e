"""The protocol to exchange data schemas: a peer's own, and that of the federation.

Rule: one question and one answer per stream, each a length-prefixed text, which the callers encode
and decode. Only peers that `may_ask` allows are answered; this is checked before a byte is read. A
peer of an earlier release does not speak the protocol: `NotSpoken`.

    question, answer   4 bytes big-endian length, then so many bytes
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from bbnode.ir.caps import MAX_SCHEMAS_BYTES, SCHEMA_ANSWER_S
from bbnode.ir.errors import PeerError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ProtocolStream, Transport, read_exactly
from bbnode.transport.errors import NotConnectedError, StreamBrokenError

SCHEMA_PROTOCOL: Final = "/bbnode/schema/1.0.0"

_LENGTH: Final = struct.Struct(">I")
# A message holds escaped texts, which are longer, and some text around them.
_MAX_MESSAGE_BYTES: Final = 2 * MAX_SCHEMAS_BYTES

Answer = Callable[[PeerId, bytes], Awaitable[bytes]]


class NotSpoken(PeerError):
    """A peer of an earlier release does not speak the protocol."""


class SchemaUnanswered(PeerError):
    """A peer gave no answer, or one that is too long."""


def serve(transport: Transport, may_ask: Callable[[PeerId], bool], answer: Answer) -> None:
    """Answer on all connections. Call it before the transport runs."""

    async def handle(stream: ProtocolStream) -> None:
        if not may_ask(stream.peer):
            raise SchemaUnanswered(f"{stream.peer} has no reason to ask what these data mean")
        with trio.fail_after(2 * SCHEMA_ANSWER_S):
            question = await _receive(stream)
            await _send(stream, await answer(stream.peer, question))

    transport.register_protocol(SCHEMA_PROTOCOL, handle)


async def ask(transport: Transport, peer: PeerId, question: bytes) -> bytes:
    """Return a connected peer's answer.

    Raises NotSpoken, SchemaUnanswered, and NotConnectedError and TooManyStreamsError as
    `open_stream`.
    """
    try:
        with trio.move_on_after(2 * SCHEMA_ANSWER_S):
            async with transport.open_stream(peer, SCHEMA_PROTOCOL) as stream:
                await _send(stream, question)
                return await _receive(stream)
    except StreamBrokenError as error:
        if transport.peer_info(peer) is None:
            raise NotConnectedError(f"{peer} has gone") from error
        raise NotSpoken(f"{peer} does not say what its data mean: {error}") from error
    raise SchemaUnanswered(f"{peer} does not answer what its data mean")


async def _send(stream: ProtocolStream, message: bytes) -> None:
    await stream.write(_LENGTH.pack(len(message)))
    await stream.write(message)


async def _receive(stream: ProtocolStream) -> bytes:
    (length,) = _LENGTH.unpack(await read_exactly(stream, _LENGTH.size))
    if length > _MAX_MESSAGE_BYTES:
        raise SchemaUnanswered(
            f"{stream.peer} sends {length} bytes about its data; {_MAX_MESSAGE_BYTES} is the most"
        )
    return await read_exactly(stream, length)
