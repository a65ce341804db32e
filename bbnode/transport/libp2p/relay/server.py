"""A relay: it joins a stream of one peer with a stream to another, and counts what goes through.

Rule: only peers that may connect with us and are connected directly take part, and the peer to be
reached must hold a reservation, which expires. A relay passes ciphertext on and buffers none of it:
the window of a stream stops one end from sending what the other does not read. A circuit ends with
either of its streams, or at its bound of time or bytes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

from bbnode.ir.address import is_relayed
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Counters
from bbnode.transport.errors import NotConnectedError, StreamBrokenError, TooManyStreamsError
from bbnode.transport.libp2p.protocols import LinkedStream, Protocols
from bbnode.transport.libp2p.relay.messages import (
    RELAY_PROTOCOL,
    RELAYED_PROTOCOL,
    RelayAnswer,
    RelayCommand,
    RelayMessageError,
    RelayRequest,
    RelayStatus,
    read_answer,
    read_request,
    write_answer,
)
from bbnode.transport.limits import RelaySettings
from bbnode.transport.links.link import Link

log = logging.getLogger(__name__)

# Both peers are connected: a request or an answer takes a round trip.
ANSWER_S: Final = 5.0
_READ_BYTES: Final = 64 * 1024


class RelayServer:
    """The relay of one node. Its reservations and circuits are gone with the process."""

    def __init__(
        self,
        settings: RelaySettings,
        protocols: Protocols,
        counters: Counters,
        link_of: Callable[[PeerId], Link | None],
    ) -> None:
        """`link_of` returns the direct connection with a peer whose hello was accepted."""
        self._settings = settings
        self._protocols = protocols
        self._counters = counters
        self._link_of = link_of
        # When each reservation expires, in trio's time.
        self._reserved: dict[PeerId, float] = {}
        self._circuits = 0
        self._circuits_of: Counter[PeerId] = Counter()
        protocols.register(RELAY_PROTOCOL, self.serve)

    @property
    def circuits(self) -> int:
        """The number of circuits, including those being set up."""
        return self._circuits

    async def serve(self, stream: LinkedStream) -> None:
        """Serve one request of a peer, and the circuit that it asks for."""
        with trio.move_on_after(ANSWER_S) as scope:
            try:
                request = await read_request(stream)
            except RelayMessageError as error:
                log.info("a request to relay is malformed: %s", error)
                await self._refuse(stream, RelayStatus.MALFORMED)
                return
            except StreamBrokenError:
                return
        if scope.cancelled_caught:
            stream.abort("no request came")
            return
        try:
            await self._decide(stream, request)
        except StreamBrokenError as error:
            log.debug("the asker of a relay is gone: %s", error)

    async def _decide(self, stream: LinkedStream, request: RelayRequest) -> None:
        if is_relayed(stream.link.carrier.address):
            await self._refuse(stream, RelayStatus.RELAYED)
        elif request.ask is RelayCommand.RESERVE or request.peer is None:
            await self._reserve(stream)
        else:
            await self._connect(stream, request.peer)

    async def _refuse(self, stream: LinkedStream, status: RelayStatus) -> None:
        self._counters.add("relay.refused")
        await write_answer(stream, RelayAnswer(status=status))

    async def _reserve(self, stream: LinkedStream) -> None:
        settings, now = self._settings, trio.current_time()
        if stream.peer not in self._reserved and len(self._reserved) >= settings.reservations:
            self._reserved = {
                peer: until
                for peer, until in self._reserved.items()
                if until > now and self._link_of(peer) is not None
            }
            if len(self._reserved) >= settings.reservations:
                await self._refuse(stream, RelayStatus.TOO_MANY_RESERVATIONS)
                return
        self._reserved[stream.peer] = now + settings.reservation_s
        self._counters.add("relay.reserved")
        await write_answer(
            stream, RelayAnswer(status=RelayStatus.OK, seconds=settings.reservation_s)
        )

    # -- circuits --------------------------------------------------------------------------

    async def _connect(self, near: LinkedStream, target: PeerId) -> None:
        link = self._link_of(target)
        if link is None or self._reserved.get(target, 0.0) <= trio.current_time():
            await self._refuse(near, RelayStatus.NO_RESERVATION)
            return
        most = self._settings.circuits_per_peer
        if (
            self._circuits >= self._settings.circuits
            or self._circuits_of[near.peer] >= most
            or self._circuits_of[target] >= most
        ):
            await self._refuse(near, RelayStatus.TOO_MANY_CIRCUITS)
            return
        with self._counted(near.peer, target):
            joined = False
            with trio.move_on_after(ANSWER_S) as scope:
                try:
                    async with self._protocols.open(link, target, RELAYED_PROTOCOL) as far:
                        if (await read_answer(far)).status is RelayStatus.OK:
                            joined = True
                            scope.deadline = trio.current_time() + self._settings.circuit_s
                            await self._join(near, far)
                except (
                    NotConnectedError,
                    RelayMessageError,
                    StreamBrokenError,
                    TooManyStreamsError,
                ) as error:
                    log.info("a circuit to %s ended: %s", target, error)
            if not joined:
                await self._refuse(near, RelayStatus.NOT_TAKEN)
                return
            if scope.cancelled_caught:
                self._counters.add("relay.circuits_cut")
            near.abort("the circuit is over")

    @contextmanager
    def _counted(self, *ends: PeerId) -> Iterator[None]:
        self._circuits += 1
        self._circuits_of.update(ends)
        self._counters.add("relay.circuits_opened")
        try:
            yield
        finally:
            self._circuits -= 1
            self._circuits_of.subtract(ends)
            # Without those that are at zero.
            self._circuits_of = +self._circuits_of
            self._counters.add("relay.circuits_closed")

    async def _join(self, near: LinkedStream, far: LinkedStream) -> None:
        """Pass bytes between the two ends until one is gone, or the bound is reached."""
        settings = self._settings
        await write_answer(
            near,
            RelayAnswer(
                status=RelayStatus.OK, seconds=settings.circuit_s, bytes=settings.circuit_bytes
            ),
        )
        left = settings.circuit_bytes
        async with trio.open_nursery() as nursery:

            async def pass_on(source: LinkedStream, sink: LinkedStream) -> None:
                nonlocal left
                while True:
                    try:
                        part = await source.read(_READ_BYTES)
                    except StreamBrokenError:
                        # All that had come from there is written: the circuit is over.
                        nursery.cancel_scope.cancel()
                        return
                    left -= len(part)
                    if left < 0:
                        self._counters.add("relay.circuits_cut")
                        nursery.cancel_scope.cancel()
                        return
                    self._counters.add("relay.bytes", len(part))
                    try:
                        if not part:
                            await sink.end()
                            return
                        await sink.write(part)
                    except StreamBrokenError:
                        # The reader of that stream sees it as well, after the rest of it.
                        return

            nursery.start_soon(pass_on, near, far)
            nursery.start_soon(pass_on, far, near)
        far.abort("the circuit is over")
