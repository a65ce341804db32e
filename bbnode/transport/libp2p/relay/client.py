"""The client side of relays: reservations, by which others reach us, and circuits that we dial.

Rule: a node that nobody can dial holds a reservation with each relay among the peers it has
dialled, up to `MAX_RELAYS`, and renews it in time. A circuit becomes a connection like any other:
Noise and Yamux run from end to end, so the relay reads nothing, and hello, authorizer, streams
and resume are the same. The side that dialled replaces a circuit before the relay cuts it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import trio
from multiaddr import Multiaddr

from bbnode.ir.address import CIRCUIT, is_relayed
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Direction
from bbnode.transport.errors import DialError, RelayRefusedError, StreamBrokenError
from bbnode.transport.libp2p.connection import Connection
from bbnode.transport.libp2p.host import Libp2pHost
from bbnode.transport.libp2p.protocols import LinkedStream, Protocols
from bbnode.transport.libp2p.relay.messages import (
    REASONS,
    RELAY_PROTOCOL,
    RELAYED_PROTOCOL,
    RelayAnswer,
    RelayCommand,
    RelayRequest,
    RelayStatus,
    read_answer,
    write_answer,
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
# The relay asks the other peer before it answers, for which it gives it 5 s.
ANSWER_S: Final = 8.0
# A reservation is renewed, and a circuit replaced, when this fraction of it is used up.
USED_UP: Final = 0.75
# A relay that is full or does not answer is asked again after this.
ASK_AGAIN_S: Final = 60.0


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
    ) -> None:
        """`own_addresses` returns what we listen on; `on_change` is called when routes change."""
        self._host = host
        self._own = own
        self._protocols = protocols
        self._own_addresses = own_addresses
        self._on_change = on_change
        # The relays that we hold a reservation with, and the address each was dialled at.
        self._reserved: dict[PeerId, Multiaddr] = {}
        self._places = trio.Semaphore(MAX_RELAYS)
        protocols.register(RELAYED_PROTOCOL, self._serve)

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
        """Hold a reservation with the peer of a link, if it is a relay and we need one."""
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
            while link.state is LinkState.UP:
                wait_s = await self._reserve(link)
                if wait_s is None:
                    return
                await trio.sleep(wait_s)

    async def _reserve(self, link: Link) -> float | None:
        """Ask for a reservation; return the seconds until the next request, None for never."""
        try:
            with trio.fail_after(ANSWER_S):
                async with self._protocols.open(link, link.peer, RELAY_PROTOCOL) as stream:
                    await write_request(stream, RelayRequest(ask=RelayCommand.RESERVE))
                    answer = await read_answer(stream)
        except StreamBrokenError as error:
            # It does not speak the protocol; or the connection is gone.
            log.debug("%s is not a relay: %s", link.peer, error)
            return None
        except (BbnodeError, trio.TooSlowError) as error:
            log.info("no reservation with %s: %s", link.peer, error)
            return ASK_AGAIN_S
        taken = answer.status is RelayStatus.OK
        if not taken:
            log.info("no reservation with %s: %s", link.peer, REASONS[answer.status])
        self._note(link, held=taken)
        return answer.seconds * USED_UP if taken else ASK_AGAIN_S

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
        if stream.peer not in self._reserved:
            await write_answer(stream, RelayAnswer(status=RelayStatus.NO_RESERVATION))
            return
        await write_answer(stream, RelayAnswer(status=RelayStatus.OK))
        await self._host.serve_circuit(CircuitWire(CircuitPipe(stream)), _way(stream.link))

    async def dial(self, relay: Link, peer: PeerId) -> Connection:
        """Return a connection with `peer` through the relay at the other end of a link.

        Raises RelayRefusedError with the relay's reason, and DialError.
        """
        report, result = trio.open_memory_channel[Connection | DialError](1)
        try:
            relay.start_soon(partial(self._hold, relay, peer, report))
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
        self, relay: Link, peer: PeerId, report: trio.MemorySendChannel[Connection | DialError]
    ) -> None:
        """Open a circuit, report its connection or a DialError, and keep it until it is closed."""
        try:
            async with self._protocols.open(relay, relay.peer, RELAY_PROTOCOL) as stream:
                with trio.fail_after(ANSWER_S):
                    await write_request(stream, RelayRequest(ask=RelayCommand.CONNECT, peer=peer))
                    answer = await read_answer(stream)
                if answer.status is not RelayStatus.OK:
                    raise RelayRefusedError(
                        answer.status,
                        f"no circuit through {relay.peer} to {peer}: {REASONS[answer.status]}",
                    )
                pipe = CircuitPipe(stream, wear_bytes=answer.bytes * USED_UP)
                report.send_nowait(await self._host.dial_over(CircuitWire(pipe), _way(relay), peer))
                report.close()
                with trio.move_on_after(answer.seconds * USED_UP):
                    await pipe.worn.wait()
                if not pipe.closed.is_set():
                    await self._replace(relay, peer)
                await pipe.closed.wait()
        except (BbnodeError, trio.TooSlowError, trio.BrokenResourceError) as error:
            failure = error if isinstance(error, DialError) else None
            if isinstance(error, trio.TooSlowError):
                failure = DialError(f"the relay {relay.peer} was silent for {ANSWER_S:g} s")
            elif failure is None:
                failure = DialError(f"no circuit through {relay.peer} to {peer}: {error}")
            if failure is not error:
                failure.__cause__ = error
            with contextlib.suppress(trio.ClosedResourceError, trio.BrokenResourceError):
                report.send_nowait(failure)
        finally:
            report.close()

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
