"""Direct connections for two peers that are connected through a relay: DCUtR of libp2p.

Rule: as the specification has it (relay/DCUtR.md of libp2p/specs). Who was dialled through the
relay first dials where the other says that it is; then both say where the relay sees them, and dial
each other at the same moment, each from the port that the relay saw: the one that had dialled is
the client of what comes of it. A peer is dialled at addresses of its own choice only as `hints`
allows it, and only if it is good. The circuit stays until a direct connection replaces it.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio
from multiaddr import Multiaddr

from bbnode.ir.address import address_from_bytes, is_relayed, split_circuit
from bbnode.ir.caps import MAX_PUNCH_ADDRESSES, MAX_PUNCHES, RELAY_REQUEST_S
from bbnode.ir.decoding import Boundary
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Counters, Direction, ProtocolStream
from bbnode.transport.errors import (
    NotConnectedError,
    OtherPeerError,
    RelayFault,
    StreamBrokenError,
    TooManyStreamsError,
)
from bbnode.transport.hints import dialable
from bbnode.transport.libp2p.connection import Connection
from bbnode.transport.libp2p.host import Libp2pHost
from bbnode.transport.libp2p.keys import decode_all_fields, encode_field
from bbnode.transport.libp2p.protocols import LinkedStream, Protocols
from bbnode.transport.libp2p.relay.messages import (
    RelayMessageError,
    UnexpectedMessageError,
    read_message,
    write_message,
)
from bbnode.transport.links.link import Link, LinkState

log = logging.getLogger(__name__)

PUNCH_PROTOCOL: Final = "/libp2p/dcutr"

_TYPE, _ADDRESSES = 1, 2


class PunchStep(enum.IntEnum):
    """The types of messages."""

    CONNECT = 100
    SYNC = 300


async def write_step(
    stream: ProtocolStream, step: PunchStep, addresses: Sequence[Multiaddr] = ()
) -> None:
    """Send a message; raises StreamBrokenError."""
    body = encode_field(_TYPE, step)
    body += b"".join(encode_field(_ADDRESSES, each.to_bytes()) for each in addresses)
    await write_message(stream, body)


async def read_step(stream: ProtocolStream, expected: PunchStep) -> tuple[Multiaddr, ...]:
    """Read a message, and return its addresses, of which those of other kinds are left out.

    Raises RelayMessageError and StreamBrokenError.
    """
    raw = await read_message(stream)
    with Boundary(f"{stream.peer} sends no message of hole punching", RelayMessageError):
        fields = decode_all_fields(raw)
        step = PunchStep(int(next((value for number, value in fields if number == _TYPE), 0)))
        given = [value for number, value in fields if number == _ADDRESSES]
        if len(given) > MAX_PUNCH_ADDRESSES:
            raise RelayMessageError(f"{stream.peer} names {len(given)} addresses of its own")
        addresses = tuple(address_from_bytes(each) for each in given if isinstance(each, bytes))
    if step is not expected:
        raise UnexpectedMessageError(f"{stream.peer} sends {step.name}; {expected.name} was due")
    return tuple(each for each in addresses if not is_relayed(each))


class HolePuncher:
    """Replaces the circuits of one node by direct connections, where that is possible."""

    def __init__(
        self,
        host: Libp2pHost,
        protocols: Protocols,
        counters: Counters,
        *,
        link_of: Callable[[PeerId], Link | None],
        is_good: Callable[[Link], bool],
        blame: Callable[[PeerId, RelayFault, str], None],
        retry_s: float,
    ) -> None:
        """`link_of` returns a direct connection with a peer; `is_good` as `hints` has it.

        `blame` is called with what a peer did wrong; `retry_s` seconds lie between two attempts.
        """
        self._host = host
        self._protocols = protocols
        self._counters = counters
        self._link_of = link_of
        self._is_good = is_good
        self._blame = blame
        self._retry_s = retry_s
        protocols.register(PUNCH_PROTOCOL, self.serve)

    async def upgrade(self, link: Link) -> None:
        """Replace a circuit, which the peer dialled, by a direct connection, if that can be."""
        await link.settled.wait()
        if link.carrier.direction is Direction.OUTBOUND or not is_relayed(link.carrier.address):
            return
        tries = 0
        while link.state is LinkState.UP and tries < MAX_PUNCHES:
            # It may become so with the first message that it acknowledges.
            if self._is_good(link) and self._link_of(link.peer) is None:
                tries += 1
                if await self._try(link):
                    return
            with trio.move_on_after(self._retry_s):
                await link.closed.wait()

    async def _try(self, link: Link) -> bool:
        """Dial the peer where it says that it is, then at the same moment as it dials us."""
        self._counters.add("punch.tried")
        claimed = () if link.hello is None else link.hello.listen_addresses
        made = await self._dial_all(
            link, claimed, lambda address: self._host.dial(address, link.peer)
        )
        if not made:
            try:
                made = await self._punch(link)
            except RelayMessageError as error:
                self._blame(link.peer, RelayFault.MALFORMED, str(error))
            except (NotConnectedError, StreamBrokenError, TooManyStreamsError) as error:
                log.debug("no direct connection with %s: %s", link.peer, error)
            except trio.TooSlowError:
                self._blame(link.peer, RelayFault.SILENT, "no answer to a hole punch")
        self._counters.add("punch.done" if made else "punch.failed")
        return made

    async def _punch(self, link: Link) -> bool:
        source, own = await self._own_end(link)
        async with self._protocols.open(link, link.peer, PUNCH_PROTOCOL) as stream:
            with trio.fail_after(RELAY_REQUEST_S):
                began_s = trio.current_time()
                await write_step(stream, PunchStep.CONNECT, own)
                theirs = await read_step(stream, PunchStep.CONNECT)
                rtt_s = trio.current_time() - began_s
                await write_step(stream, PunchStep.SYNC)
                await stream.end()
            # The word takes half of that to get there.
            await trio.sleep(rtt_s / 2)
            return await self._dial_all(
                link, theirs, lambda address: self._host.meet(address, link.peer, source=source)
            )

    async def serve(self, stream: LinkedStream) -> None:
        """Take part in a punch of a peer that we have dialled through a relay."""
        link = stream.link
        if link.carrier.direction is Direction.INBOUND or not is_relayed(link.carrier.address):
            # It is who was dialled that begins.
            self._blame(link.peer, RelayFault.UNINVITED, "a hole punch that is not its to begin")
            stream.abort("it is not yours to begin")
            return
        try:
            with trio.fail_after(RELAY_REQUEST_S):
                theirs = await read_step(stream, PunchStep.CONNECT)
                source, own = await self._own_end(link)
                await write_step(stream, PunchStep.CONNECT, own)
                await read_step(stream, PunchStep.SYNC)
        except RelayMessageError as error:
            self._blame(link.peer, RelayFault.MALFORMED, str(error))
            stream.abort("that is no hole punch")
            return
        except trio.TooSlowError:
            self._blame(link.peer, RelayFault.SILENT, "a hole punch that it has begun")
            stream.abort("no message came")
            return
        except StreamBrokenError as error:
            log.debug("a hole punch with %s broke: %s", link.peer, error)
            return
        for_other = link.is_foreign
        await self._dial_all(
            link,
            theirs,
            lambda address: self._host.dial(address, link.peer, for_other=for_other, source=source),
        )

    async def _own_end(self, link: Link) -> tuple[int, list[Multiaddr]]:
        """Return the port that the relay of a link sees, 0 for none, and where it sees us."""
        relay = self._link_of(split_circuit(link.carrier.address)[1])
        if relay is None or not isinstance(relay.carrier, Connection):
            return 0, list(self._host.announced[:MAX_PUNCH_ADDRESSES])
        seen = await self._host.observed(relay.carrier)
        found = [*([] if seen is None else [seen]), *self._host.announced]
        return relay.carrier.local_port, list(dict.fromkeys(found))[:MAX_PUNCH_ADDRESSES]

    async def _dial_all(
        self,
        link: Link,
        claimed: Sequence[Multiaddr],
        dial: Callable[[Multiaddr], Awaitable[Connection]],
    ) -> bool:
        """Dial where a peer says that it is; return True once it is there, at one of them."""
        ours = {*self._host.announced, *self._host.listening}
        made = False
        async with trio.open_nursery() as nursery:

            async def one(address: Multiaddr) -> None:
                nonlocal made
                try:
                    connection = await dial(address)
                except BbnodeError as error:
                    log.debug("%s is not at %s: %s", link.peer, address, error)
                    if isinstance(error.__cause__, OtherPeerError):
                        reason = f"another peer is at {address}, which it says is its own"
                        self._blame(link.peer, RelayFault.ADDRESSES, reason)
                    return
                if connection.link is not None:
                    made = True
                    nursery.cancel_scope.cancel()

            for address in dialable(claimed, seen=link.carrier.address, good=True):
                if not is_relayed(address) and address not in ours:
                    nursery.start_soon(one, address)
        return made
