"""The upgrade of a byte stream to a secured connection: negotiate Noise, handshake, Yamux.

Rule: only Noise and Yamux are offered or accepted. Until the peer is proved, at most
MAX_UNSECURED_BYTES are read from it, in small pieces, whatever length it announced. Outbound bytes
are buffered until we would wait for the peer, so that each turn is one write. Time-outs are the
caller's; everything may be cancelled, and the caller closes the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from bbnode.ir.caps import MAX_UNSECURED_BYTES
from bbnode.ir.peer import PeerId
from bbnode.transport.errors import HandshakeError
from bbnode.transport.libp2p.handshake import NOISE_ID, NoiseHandshake, NoiseKeys
from bbnode.transport.libp2p.muxer import YAMUX_ID
from bbnode.transport.libp2p.negotiation import Choice, Proposal
from bbnode.transport.libp2p.noise_channel import (
    OVERHEAD_BYTES,
    PACKET_BYTES,
    NoiseChannel,
    PacketError,
)
from bbnode.transport.libp2p.wire import ByteWire, ReusedBuffers
from bbnode.transport.links.shares import HANDSHAKE_US, CoreShare

# Handshake messages have some hundred bytes.
_READ_BYTES: Final = 4 * 1024
_LENGTH_BYTES: Final = 2
_READ_BUFFERS: Final = ReusedBuffers(_READ_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """A connection with a proved peer, on which Yamux starts next."""

    peer: PeerId
    channel: NoiseChannel
    # Plaintext and packets that have been read already.
    ahead: tuple[bytes, bytes]


class _Talk:
    """The buffers before the muxer starts: received bytes, and bytes to send."""

    __slots__ = ("_left", "_on_heard", "_out", "_scope", "_share", "_wire", "ahead")

    def __init__(
        self,
        wire: ByteWire,
        on_heard: Callable[[], None] = lambda: None,
        share: CoreShare | None = None,
        scope: trio.CancelScope | None = None,
    ) -> None:
        self._wire = wire
        self._on_heard = on_heard
        self._share = share
        self._scope = scope
        self._left = MAX_UNSECURED_BYTES
        self._out = bytearray()
        self.ahead = bytearray()

    def put(self, data: bytes | memoryview) -> None:
        """Buffer bytes to send before the next wait."""
        self._out += data

    async def flush(self) -> None:
        """Send the buffered bytes; raises BROKEN."""
        out, self._out = memoryview(self._out), bytearray()
        while out:
            out = out[self._wire.send(out) :]
            if self._wire.blocked:
                await self._wire.drain()

    def grant(self, more_bytes: int) -> None:
        """Allow this many more bytes to be read."""
        self._left += more_bytes

    async def more(self) -> None:
        """Wait for more bytes; raises HandshakeError and BROKEN."""
        await self.flush()
        count = None
        while count is None:
            await self._wire.readable()
            if self._share is not None and (reason := await self._share.begin(self._scope)):
                raise HandshakeError(reason)
            # Taken only for the read, so that a waiting connection holds no buffer.
            buffer = _READ_BUFFERS.take()
            try:
                if not self._left:
                    raise HandshakeError("too much was sent before the handshake was done")
                count = self._wire.receive(buffer[: self._left])
                self.ahead += buffer[: count or 0]
            finally:
                _READ_BUFFERS.give(buffer)
                if self._share is not None:
                    await self._share.end()
        if not count:
            raise HandshakeError("the peer has closed the connection")
        self._left -= count
        self._on_heard()

    async def message(self) -> bytes:
        """Return the next message of the handshake; raises HandshakeError and BROKEN."""
        while len(self.ahead) < _LENGTH_BYTES:
            await self.more()
        end = _LENGTH_BYTES + int.from_bytes(self.ahead[:_LENGTH_BYTES], "big")
        while len(self.ahead) < end:
            await self.more()
        message = bytes(self.ahead[_LENGTH_BYTES:end])
        del self.ahead[:end]
        return message

    def say(self, handshake: NoiseHandshake) -> None:
        """Buffer our next handshake message, with its length."""
        if self._share is not None:
            self._share.due_us += HANDSHAKE_US
        message = handshake.write()
        self.put(len(message).to_bytes(_LENGTH_BYTES, "big") + message)


async def secure_dialled(wire: ByteWire, keys: NoiseKeys, expected: PeerId) -> Secured:
    """Secure a connection that we dialled; raises HandshakeError, NegotiationError and BROKEN."""
    talk, proposal = _Talk(wire), Proposal(NOISE_ID)
    handshake = NoiseHandshake(keys, initiator=True, expected=expected)
    talk.put(proposal.opening)
    talk.say(handshake)
    while not proposal.agreed:
        await talk.more()
        proposal.take(bytes(talk.ahead))
        talk.ahead.clear()
    talk.ahead += proposal.rest()
    handshake.read(await talk.message())
    talk.say(handshake)
    (peer, channel), muxer = handshake.finish(), Proposal(YAMUX_ID)
    _seal(talk, channel, muxer.opening)

    def take(plain: memoryview) -> bool:
        muxer.take(plain)
        return not muxer.agreed

    talk.grant(2 * PACKET_BYTES)
    while not muxer.agreed:
        await talk.more()
        _open(talk, channel, take)
    return Secured(peer=peer, channel=channel, ahead=(muxer.rest(), bytes(talk.ahead)))


async def secure_accepted(
    wire: ByteWire,
    keys: NoiseKeys,
    expected: PeerId | None = None,
    *,
    share: CoreShare | None = None,
    scope: trio.CancelScope | None = None,
    on_heard: Callable[[], None] = lambda: None,
    on_proved: Callable[[], None] = lambda: None,
) -> Secured:
    """Secure a connection that was dialled by the peer; raises what `secure_dialled` does.

    With `expected` that peer has to be there; OtherPeerError if it is not. `share` pays for it;
    what it waits for its turn puts off the deadline of `scope`.
    `on_heard` is called when something has come, `on_proved` when the peer is proved.
    """
    talk, choice = _Talk(wire, on_heard, share, scope), Choice((NOISE_ID,))
    while not choice.chosen:
        await talk.more()
        talk.put(choice.take(bytes(talk.ahead)))
        talk.ahead.clear()
    talk.ahead += choice.rest()
    handshake = NoiseHandshake(keys, initiator=False, expected=expected)
    handshake.read(await talk.message())
    talk.say(handshake)
    handshake.read(await talk.message())
    on_proved()
    (peer, channel), muxer = handshake.finish(), Choice((YAMUX_ID,))

    def take(plain: memoryview) -> bool:
        _seal(talk, channel, muxer.take(plain))
        return not muxer.chosen

    talk.grant(2 * PACKET_BYTES)
    _open(talk, channel, take)
    while not muxer.chosen:
        await talk.more()
        _open(talk, channel, take)
    await talk.flush()
    return Secured(peer=peer, channel=channel, ahead=(muxer.rest(), bytes(talk.ahead)))


def _seal(talk: _Talk, channel: NoiseChannel, plain: bytes) -> None:
    packet = memoryview(bytearray(len(plain) + OVERHEAD_BYTES))
    talk.put(packet[: channel.seal(plain, packet, 0)])


def _open(talk: _Talk, channel: NoiseChannel, take: Callable[[memoryview], bool]) -> None:
    """Decrypt the complete packets received so far."""
    packets = bytes(talk.ahead)
    try:
        read = channel.open(memoryview(packets), memoryview(bytearray(len(packets))), take)
    except PacketError as error:
        raise HandshakeError(str(error)) from error
    del talk.ahead[:read]
