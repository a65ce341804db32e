"""A relay: it joins a stream of one peer with a stream to another, and counts what goes through.

Rule: only peers that may connect with us and are connected directly take part, and the peer to be
reached must hold a reservation, which expires. Hosts that speak no protocol of bbnode take part
where they are guests, and have a part of the room (`GUESTS_PART`). A relay passes ciphertext on and
buffers none of it: the window of a stream stops one end from sending what the other does not read.
A circuit ends with either of its streams, or at its bound of time or bytes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import trio
from multiaddr import Multiaddr

from bbnode.ir.address import is_relayed
from bbnode.ir.caps import MAX_OFFENDERS, RELAY_BURST, RELAY_PER_S, RELAY_REQUEST_S
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Counters
from bbnode.transport.errors import (
    NotConnectedError,
    RelayFault,
    StreamBrokenError,
    TooManyStreamsError,
)
from bbnode.transport.libp2p.protocols import LinkedStream, Protocols
from bbnode.transport.libp2p.relay.messages import (
    HOP_PROTOCOL,
    STOP_PROTOCOL,
    CircuitLimit,
    CircuitOffer,
    RelayAnswer,
    RelayMessageError,
    RelayRequest,
    RelayStatus,
    UnexpectedMessageError,
    read_acceptance,
    read_request,
    write_answer,
    write_offer,
)
from bbnode.transport.limits import RelaySettings
from bbnode.transport.links.link import Link
from bbnode.transport.links.shares import Bucket

log = logging.getLogger(__name__)

_READ_BYTES: Final = 64 * 1024
# One in so many reservations, and circuits, may be of hosts that speak no protocol of bbnode.
GUESTS_PART: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reservation:
    until_s: float  # in trio's time
    is_guest: bool


class RelayServer:
    """The relay of one node. Its reservations and circuits are gone with the process."""

    def __init__(
        self,
        settings: RelaySettings,
        protocols: Protocols,
        counters: Counters,
        link_of: Callable[[PeerId], Link | None],
        *,
        addresses: Callable[[], Sequence[Multiaddr]],
        blame: Callable[[PeerId, RelayFault, str], None],
    ) -> None:
        """`link_of` returns the direct connection with a peer that is admitted, guests included.

        `addresses` returns where this node is, with its PeerId; `blame` is called with what a peer
        did wrong.
        """
        self._settings = settings
        self._protocols = protocols
        self._counters = counters
        self._link_of = link_of
        self._addresses = addresses
        self._blame = blame
        self._reserved: dict[PeerId, _Reservation] = {}
        self._circuits = 0
        self._guests_circuits = 0
        self._circuits_of: Counter[PeerId] = Counter()
        # What each peer may still ask; of those that asked last.
        self._rates: OrderedDict[PeerId, Bucket] = OrderedDict()
        protocols.register(HOP_PROTOCOL, self.serve)

    @property
    def circuits(self) -> int:
        """The number of circuits, including those being set up."""
        return self._circuits

    async def serve(self, stream: LinkedStream) -> None:
        """Serve one request of a peer, and the circuit that it asks for."""
        try:
            if not self._may_ask(stream.peer):
                self._blame(stream.peer, RelayFault.FLOOD, "too many requests to relay")
                await self._refuse(stream, RelayStatus.RESOURCE_LIMIT_EXCEEDED)
                return
            with trio.move_on_after(RELAY_REQUEST_S) as scope:
                request = await self._request(stream)
            if scope.cancelled_caught:
                self._blame(stream.peer, RelayFault.SILENT, "no request to relay came")
                stream.abort("no request came")
            elif request is not None:
                await self._decide(stream, request)
        except StreamBrokenError as error:
            log.debug("the asker of a relay is gone: %s", error)

    def _may_ask(self, peer: PeerId) -> bool:
        rate = self._rates.pop(peer, None) or Bucket(RELAY_PER_S, RELAY_BURST)
        self._rates[peer] = rate
        if len(self._rates) > MAX_OFFENDERS:
            self._rates.popitem(last=False)
        now_s = trio.current_time()
        # What is refused costs nothing, so that whoever asks too often is served at the rate.
        return rate.take(0.0, now_s) >= 1.0 and rate.take(1.0, now_s) >= 0.0

    async def _request(self, stream: LinkedStream) -> RelayRequest | None:
        try:
            return await read_request(stream)
        except RelayMessageError as error:
            log.info("a request to relay is malformed: %s", error)
            self._blame(stream.peer, RelayFault.MALFORMED, str(error))
            unexpected = isinstance(error, UnexpectedMessageError)
            status = RelayStatus.UNEXPECTED_MESSAGE if unexpected else RelayStatus.MALFORMED_MESSAGE
            await self._refuse(stream, status)
            return None

    async def _decide(self, stream: LinkedStream, request: RelayRequest) -> None:
        if is_relayed(stream.link.carrier.address):
            await self._refuse(stream, RelayStatus.PERMISSION_DENIED)
        elif request.peer is None:
            await self._reserve(stream)
        else:
            await self._connect(stream, request.peer)

    async def _refuse(self, stream: LinkedStream, status: RelayStatus) -> None:
        self._counters.add("relay.refused")
        await write_answer(stream, RelayAnswer(status=status))

    @property
    def _limit(self) -> CircuitLimit:
        settings = self._settings
        return CircuitLimit(seconds=settings.circuit_s, bytes=settings.circuit_bytes)

    async def _reserve(self, stream: LinkedStream) -> None:
        settings = self._settings
        if not self._has_room(stream.peer, is_guest=stream.link.is_foreign):
            await self._refuse(stream, RelayStatus.RESERVATION_REFUSED)
            return
        self._reserved[stream.peer] = _Reservation(
            until_s=trio.current_time() + settings.reservation_s,
            is_guest=stream.link.is_foreign,
        )
        self._counters.add("relay.reserved")
        answer = RelayAnswer(
            status=RelayStatus.OK,
            # Whole seconds: the user's must not be over after ours.
            expires_s=int(time.time()) + settings.reservation_s,
            addresses=tuple(self._addresses()),
            limit=self._limit,
        )
        await write_answer(stream, answer)

    def _has_room(self, peer: PeerId, *, is_guest: bool) -> bool:
        """Return True if a peer may have a reservation; those that are of no use are forgotten."""
        for again in (False, True):
            if again:
                now_s = trio.current_time()
                self._reserved = {
                    each: held
                    for each, held in self._reserved.items()
                    if held.until_s > now_s and self._link_of(each) is not None
                }
            others = [held for each, held in self._reserved.items() if each != peer]
            guests = sum(held.is_guest for held in others)
            most = self._settings.reservations
            if len(others) < most and (not is_guest or guests < most // GUESTS_PART):
                return True
        return False

    # -- circuits --------------------------------------------------------------------------

    async def _connect(self, near: LinkedStream, target: PeerId) -> None:
        link, held = self._link_of(target), self._reserved.get(target)
        if link is None or held is None or held.until_s <= trio.current_time():
            await self._refuse(near, RelayStatus.NO_RESERVATION)
            return
        settings, most = self._settings, self._settings.circuits_per_peer
        has_guest = near.link.is_foreign or link.is_foreign
        if (
            self._circuits >= settings.circuits
            or (has_guest and self._guests_circuits >= settings.circuits // GUESTS_PART)
            or self._circuits_of[near.peer] >= most
            or self._circuits_of[target] >= most
        ):
            await self._refuse(near, RelayStatus.RESOURCE_LIMIT_EXCEEDED)
            return
        with self._counted(near.peer, target, has_guest=has_guest):
            joined = False
            with trio.move_on_after(RELAY_REQUEST_S) as scope:
                try:
                    async with self._protocols.open(link, target, STOP_PROTOCOL) as far:
                        await write_offer(far, CircuitOffer(source=near.peer, limit=self._limit))
                        status = await read_acceptance(far)
                        if status is RelayStatus.OK:
                            joined = True
                            scope.deadline = trio.current_time() + settings.circuit_s
                            await self._join(near, far)
                        else:
                            log.info("%s does not take a circuit: %s", target, status.name)
                except RelayMessageError as error:
                    self._blame(target, RelayFault.MALFORMED, str(error))
                except (NotConnectedError, StreamBrokenError, TooManyStreamsError) as error:
                    log.info("a circuit to %s ended: %s", target, error)
            if not joined:
                if scope.cancelled_caught:
                    self._blame(target, RelayFault.SILENT, "no answer to a circuit came")
                await self._refuse(near, RelayStatus.CONNECTION_FAILED)
                return
            if scope.cancelled_caught:
                self._counters.add("relay.circuits_cut")
            near.abort("the circuit is over")

    @contextmanager
    def _counted(self, *ends: PeerId, has_guest: bool) -> Iterator[None]:
        self._circuits += 1
        self._guests_circuits += has_guest
        self._circuits_of.update(ends)
        self._counters.add("relay.circuits_opened")
        try:
            yield
        finally:
            self._circuits -= 1
            self._guests_circuits -= has_guest
            self._circuits_of.subtract(ends)
            # Without those that are at zero.
            self._circuits_of = +self._circuits_of
            self._counters.add("relay.circuits_closed")

    async def _join(self, near: LinkedStream, far: LinkedStream) -> None:
        """Pass bytes between the two ends until one is gone, or the bound is reached."""
        await write_answer(near, RelayAnswer(status=RelayStatus.OK, limit=self._limit))
        left = self._settings.circuit_bytes
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
