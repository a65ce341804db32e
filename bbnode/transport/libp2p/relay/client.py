"""The client side of relays: reservations, by which others reach us, and circuits that we dial.

Rule: a node that nobody can dial holds a reservation with each relay among the peers it has
dialled, up to `MAX_RELAYS`, and renews it in time. A circuit becomes a connection like any other:
Noise and Yamux run from end to end, so the relay reads nothing, and hello, authorizer, streams
and resume are the same. The side that dialled replaces a circuit before the relay cuts it. What a
relay says of times, bounds and peers is checked; what it can't have counts against it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import trio
from multiaddr import Multiaddr

from bbnode.ir.address import CIRCUIT, is_relayed
from bbnode.ir.caps import (
    MAX_RESERVATION_S,
    MIN_CIRCUIT_BYTES,
    RELAY_ANSWER_S,
    RELAY_REQUEST_S,
)
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Direction
from bbnode.transport.errors import (
    DialError,
    OtherPeerError,
    RelayFault,
    RelayRefusedError,
    StreamBrokenError,
)
from bbnode.transport.libp2p.connection import Connection
from bbnode.transport.libp2p.host import Libp2pHost
from bbnode.transport.libp2p.protocols import LinkedStream, Protocols
from bbnode.transport.libp2p.relay.messages import (
    HOP_PROTOCOL,
    REASONS,
    STOP_PROTOCOL,
    CircuitLimit,
    CircuitOffer,
    RelayAnswer,
    RelayCommand,
    RelayMessageError,
    RelayRequest,
    RelayStatus,
    UnexpectedMessageError,
    read_answer,
    read_offer,
    write_acceptance,
    write_request,
)
from bbnode.transport.libp2p.wire import CircuitWire
from bbnode.transport.links.link import Link, LinkState

_READ_BYTES: Final = 64 * 1024


class CircuitPipe:
    """One end of a circuit."""

    def __init__(self, stream: LinkedStream, *, wear_bytes: float = math.inf) -> None:
        """Wrap a stream; `worn` is set after `wear_bytes` in both directions, or when closed."""
        self._stream = stream
        self._left = wear_bytes
        self.worn = trio.Event()
        self.closed = trio.Event()

    async def read(self) -> bytes:
        """Return at least one byte, b"" at the end; raises StreamBrokenError."""
        data = await self._stream.read(_READ_BYTES)
        self._count(len(data))
        return data

    async def write(self, data: bytes) -> None:
        """Write all of `data`; raises StreamBrokenError."""
        await self._stream.write(data)
        self._count(len(data))

    def cut(self) -> None:
        """End it at once: pending reads and writes raise."""
        self.closed.set()
        self.worn.set()
        self._stream.abort("the circuit was closed here")

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left <= 0:
            self.worn.set()


log = logging.getLogger(__name__)

# One relay may go away and another be busy; more than two would only cost.
MAX_RELAYS: Final = 3
# A reservation is renewed, and a circuit replaced, when this fraction of it is used up.
USED_UP: Final = 0.75
# A relay that is full or does not answer is asked again after this.
ASK_AGAIN_S: Final = 60.0
# However short a reservation is, it is not renewed more often.
_RENEW_S: Final = 1.0
# What a reservation without an end counts as: what libp2p's relays give.
_ENDLESS_S: Final = 3600.0


class RelayClient:
    """The reservations of one node, and its circuits through relays."""

    def __init__(
        self,
        host: Libp2pHost,
        own: PeerId,
        protocols: Protocols,
        *,
        own_addresses: Callable[[], Sequence[Multiaddr]],
        on_change: Callable[[], None],
        blame: Callable[[PeerId, RelayFault, str], None],
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """`own_addresses` returns what we listen on; `on_change` is called when routes change.

        `blame` is called with what a relay did wrong; `unix_s` returns the time.
        """
        self._host = host
        self._own = own
        self._protocols = protocols
        self._own_addresses = own_addresses
        self._on_change = on_change
        self._blame = blame
        self._unix_s = unix_s
        # The relays that we hold a reservation with, and the address each was dialled at.
        self._reserved: dict[PeerId, Multiaddr] = {}
        self._places = trio.Semaphore(MAX_RELAYS)
        # Circuits through relays that were dialled for that alone.
        self._visits: dict[Link, int] = {}
        protocols.register(STOP_PROTOCOL, self._serve)

    def addresses(self) -> list[Multiaddr]:
        """Return the addresses at which others reach us through relays."""
        return self.routes(self._own)

    def routes(self, peer: PeerId) -> list[Multiaddr]:
        """Return addresses of a peer through our relays; it may have no reservation there."""
        return [
            Multiaddr(f"{address}/{CIRCUIT}/p2p/{peer}")
            for relay, address in self._reserved.items()
            if relay != peer
        ]

    # -- reservations ----------------------------------------------------------------------

    async def hold_reservation(self, link: Link) -> None:
        """Hold a reservation with the peer of a link, if it is a relay and we need one.

        Return when the link has closed, or there is nothing to do.
        """
        if not link.is_foreign:
            await link.settled.wait()
        direct = not is_relayed(link.carrier.address)
        if (
            not direct
            or link.carrier.direction is not Direction.OUTBOUND
            or can_be_dialled(self._own_addresses(), link.carrier.address)
        ):
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_reserving, link)
            await link.closed.wait()
            nursery.cancel_scope.cancel()
        self._note(link, held=False)

    async def _keep_reserving(self, link: Link) -> None:
        """Renew a reservation until cancelled, or until the peer turns out to be no relay."""
        async with self._places:
            while link.state is LinkState.UP or link.is_foreign:
                wait_s = await self._reserve(link)
                if wait_s is None:
                    return
                await trio.sleep(wait_s)

    async def _reserve(self, link: Link) -> float | None:
        """Ask for a reservation; return the seconds until the next request, None for never."""
        held_s = 0.0
        try:
            with trio.fail_after(RELAY_ANSWER_S):
                async with self._protocols.open(link, link.peer, HOP_PROTOCOL) as stream:
                    await write_request(stream, RelayRequest(ask=RelayCommand.RESERVE))
                    held_s = self._held_s(link.peer, await read_answer(stream))
                    # Some relays wait for more, and don't end the stream.
                    stream.abort("the answer is here")
        except StreamBrokenError as error:
            # It does not speak the protocol; or the connection is gone.
            log.debug("%s is not a relay: %s", link.peer, error)
            return None
        except RelayMessageError as error:
            self._blame(link.peer, RelayFault.MALFORMED, str(error))
        except trio.TooSlowError:
            self._blame(link.peer, RelayFault.SILENT, "no answer to a request for a reservation")
        except BbnodeError as error:
            log.info("no reservation with %s: %s", link.peer, error)
        self._note(link, held=held_s > 0)
        return max(held_s * USED_UP, _RENEW_S) if held_s > 0 else ASK_AGAIN_S

    def _held_s(self, relay: PeerId, answer: RelayAnswer) -> float:
        """Return how long a reservation lasts, 0 for none."""
        if answer.status is not RelayStatus.OK:
            log.info("no reservation with %s: %s", relay, REASONS[answer.status])
            return 0.0
        lasts_s = answer.expires_s - self._unix_s()
        if lasts_s <= 0:
            reason = f"its reservation ended {-lasts_s:.0f} s ago, by the clock of this machine"
            self._blame(relay, RelayFault.EXPIRED, reason)
            return 0.0
        if lasts_s > MAX_RESERVATION_S:
            # Our clock may be behind: it is used, and renewed like any.
            reason = f"its reservation lasts {lasts_s:.0f} s, by the clock of this machine"
            self._blame(relay, RelayFault.ENDLESS, reason)
            return _ENDLESS_S
        return lasts_s

    def _note(self, link: Link, *, held: bool) -> None:
        address = link.carrier.address
        if held == (self._reserved.get(link.peer) == address):
            return
        if held:
            self._reserved[link.peer] = address
            log.info("reachable through the relay %s", link.peer)
        else:
            self._reserved.pop(link.peer, None)
            log.info("not reachable through %s any more", link.peer)
        self._on_change()

    # -- circuits --------------------------------------------------------------------------

    async def _serve(self, stream: LinkedStream) -> None:
        """Accept a connection that a relay brings, and hold it."""
        offer = None
        with trio.move_on_after(RELAY_REQUEST_S):
            offer = await self._offer(stream)
            if offer is not None:
                await write_acceptance(stream, RelayStatus.OK)
        if offer is None:
            return
        try:
            await self._host.serve_circuit(
                CircuitWire(CircuitPipe(stream)), _way(stream.link), source=offer.source
            )
        except OtherPeerError as error:
            self._blame(stream.peer, RelayFault.ANOTHER_PEER, str(error))

    async def _offer(self, stream: LinkedStream) -> CircuitOffer | None:
        """Return the circuit that a relay of ours offers, or refuse what is none."""
        status, fault = RelayStatus.PERMISSION_DENIED, RelayFault.UNINVITED
        reason = "it offers a circuit, and is no relay of ours"
        if stream.peer in self._reserved:
            try:
                return await read_offer(stream)
            except RelayMessageError as error:
                fault, reason = RelayFault.MALFORMED, str(error)
                status = RelayStatus.MALFORMED_MESSAGE
                if isinstance(error, UnexpectedMessageError):
                    status = RelayStatus.UNEXPECTED_MESSAGE
        self._blame(stream.peer, fault, reason)
        await write_acceptance(stream, status)
        return None

    def visits(self, relay: Link) -> None:
        """Close a link, which was made for one circuit, once no circuit goes through it."""
        self._visits.setdefault(relay, 0)

    async def dial(self, relay: Link, peer: PeerId, *, for_other: bool = False) -> Connection:
        """Return a connection with `peer` through the relay at the other end of a link.

        `for_other` is that of `Libp2pHost.dial`.

        Raises RelayRefusedError with the relay's reason, and DialError.
        """
        report, result = trio.open_memory_channel[Connection | DialError](1)
        try:
            relay.start_soon(partial(self._hold, relay, peer, report, for_other=for_other))
        except StreamBrokenError as error:
            raise DialError(f"no circuit through {relay.peer}: {error}") from error
        try:
            made = await result.receive()
        except trio.EndOfChannel:
            raise DialError(f"the connection with the relay {relay.peer} is gone") from None
        if isinstance(made, DialError):
            raise made
        return made

    async def _hold(
        self,
        relay: Link,
        peer: PeerId,
        report: trio.MemorySendChannel[Connection | DialError],
        *,
        for_other: bool,
    ) -> None:
        """Open a circuit, report its connection or a DialError, and keep it until it is closed."""
        if relay in self._visits:
            self._visits[relay] += 1
        try:
            async with self._protocols.open(relay, relay.peer, HOP_PROTOCOL) as stream:
                limit = await self._agree(stream, peer)
                wear_bytes = limit.bytes * USED_UP if limit.bytes else math.inf
                pipe = CircuitPipe(stream, wear_bytes=wear_bytes)
                made = await self._host.dial_over(
                    CircuitWire(pipe), _way(relay), peer, for_other=for_other
                )
                report.send_nowait(made)
                report.close()
                with trio.move_on_after(limit.seconds * USED_UP if limit.seconds else math.inf):
                    await pipe.worn.wait()
                # Streams of others' services can't go on upon another connection.
                if not pipe.closed.is_set() and not for_other:
                    await self._replace(relay, peer)
                # The old one stays until both sides have drained it.
                await pipe.closed.wait()
        except (BbnodeError, trio.BrokenResourceError) as error:
            if isinstance(error.__cause__, OtherPeerError):
                self._blame(relay.peer, RelayFault.ANOTHER_PEER, str(error))
            failure = error if isinstance(error, DialError) else None
            if failure is None:
                failure = DialError(f"no circuit through {relay.peer} to {peer}: {error}")
                failure.__cause__ = error
            with contextlib.suppress(trio.ClosedResourceError, trio.BrokenResourceError):
                report.send_nowait(failure)
        finally:
            report.close()
            self._left(relay)

    async def _agree(self, stream: LinkedStream, peer: PeerId) -> CircuitLimit:
        """Ask a relay for a circuit; return its bounds. Raises DialError, StreamBrokenError."""
        no_circuit = f"no circuit through {stream.peer} to {peer}"
        answer = None
        try:
            with trio.move_on_after(RELAY_ANSWER_S):
                await write_request(stream, RelayRequest(ask=RelayCommand.CONNECT, peer=peer))
                answer = await read_answer(stream)
        except RelayMessageError as error:
            self._blame(stream.peer, RelayFault.MALFORMED, str(error))
            raise DialError(f"{no_circuit}: {error}") from error
        if answer is None:
            self._blame(stream.peer, RelayFault.SILENT, "no answer to a request for a circuit")
            raise DialError(f"{no_circuit}: the relay was silent for {RELAY_ANSWER_S:g} s")
        if answer.status is not RelayStatus.OK:
            raise RelayRefusedError(answer.status, f"{no_circuit}: {REASONS[answer.status]}")
        if 0 < answer.limit.bytes < MIN_CIRCUIT_BYTES:
            reason = f"it lets {answer.limit.bytes} bytes through, less than a handshake and hellos"
            self._blame(stream.peer, RelayFault.USELESS, reason)
            raise DialError(f"{no_circuit}: {reason}")
        return answer.limit

    def _left(self, relay: Link) -> None:
        """Close the link of a relay that was dialled for circuits, behind the last of them."""
        if relay in self._visits:
            self._visits[relay] -= 1
            if not self._visits[relay]:
                del self._visits[relay]
                relay.close("no circuit goes through it any more")

    async def _replace(self, relay: Link, peer: PeerId) -> None:
        """Dial a new circuit, which both sides keep rather than the old one."""
        try:
            await self.dial(relay, peer)
        except DialError as error:
            # The old one is cut at its bound; the peer is dialled again then.
            log.info("a circuit was not replaced: %s", error)


def _way(relay: Link) -> Multiaddr:
    """Return the address of a circuit, but for the PeerId at its other end."""
    return Multiaddr(f"{relay.carrier.address}/{CIRCUIT}")


def can_be_dialled(own: Sequence[Multiaddr], by: Multiaddr) -> bool:
    """Return True if a peer at `by` can dial one of our addresses, as far as they tell.

    For a peer at a public address, we need a public one; on a private network a private one will
    do, and on this machine any.
    """
    return any(_reach(address) >= _reach(by) for address in own)


def _reach(address: Multiaddr) -> int:
    """Return the reach of an address: 0 this machine, 1 its network, 2 anywhere."""
    parts = str(address).split("/")
    if parts[1] not in ("ip4", "ip6"):
        return 2  # a name
    ip = ipaddress.ip_address(parts[2])
    return 0 if ip.is_loopback else 2 if ip.is_global else 1
