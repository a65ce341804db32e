"""The access protocol on a node's connections: redeeming tickets, handing on revocations.

Rule: whoever dialled a member gives it the newest revocation list and takes the other's; a node
that learns a newer one tells everybody it is connected with. Files are read and written in a
worker thread, one request after the other; the policy is told on the trio thread.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import trio

from bbnode.access.errors import TicketRefused
from bbnode.access.exchange import (
    ACCESS_PROTOCOL,
    MESSAGE,
    Member,
    Message,
    Redeem,
    Refused,
    Revocations,
    decode_message,
    encode_message,
)
from bbnode.access.revocation import RevocationList
from bbnode.access.signing import SigningKey
from bbnode.daemon.access.control import AccessControl
from bbnode.daemon.access.service import AccessService
from bbnode.ir.caps import ACCESS_STALL_S, MAX_LISTS_WAITING
from bbnode.ir.errors import BbnodeError, PeerError
from bbnode.ir.peer import PeerId
from bbnode.transport.backend import Backend, Direction, ProtocolHost, ProtocolStream
from bbnode.transport.errors import StreamBrokenError

logger = logging.getLogger(__name__)

# Between two looks at who is connected and no member any more: until then a member whose
# statement has ended is connected, and nothing of it is taken.
DATES_EVERY_S = 60.0


class AccessSilent(PeerError):
    """A peer did not answer over the access protocol."""


class AccessHost(Backend, ProtocolHost, Protocol):
    """A backend that carries the protocol as well."""


class AccessProtocol:
    """One node's part in it."""

    def __init__(
        self,
        control: AccessControl,
        backend: AccessHost,
        state_dir: Path,
        key: SigningKey,
        *,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """Answer requests on all connections of `backend`; before it runs."""
        self._control = control
        self._backend = backend
        self._lock = trio.Lock()
        self._service = AccessService(
            state_dir,
            key,
            unix_s=unix_s,
            serial=lambda: secrets.randbits(64),
            on_revocations=lambda listed: trio.from_thread.run_sync(self._took, listed),
            on_redeemed=lambda ledger: trio.from_thread.run_sync(control.redeemed, ledger),
        )
        self._ask, self._asked = trio.open_memory_channel[PeerId](MAX_LISTS_WAITING)
        control.on_list = self._offer_to_all
        backend.register_protocol(ACCESS_PROTOCOL, self._answer)

    def peer_up(self, peer: PeerId) -> None:
        """Handle a new connection with a peer."""
        if self._control.network is not None and self._dialled(peer):
            self._queue(peer)

    async def run(self) -> None:
        """Exchange revocation lists with the peers that came up, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_dates)
            await self._exchange_all()

    async def _watch_dates(self) -> None:
        """Close connections whose statement has ended: a renewed one comes with the next."""
        while True:
            await trio.sleep(DATES_EVERY_S)
            self._control.dates_passed()

    async def _exchange_all(self) -> None:
        async for peer in self._asked:
            try:
                await self._exchange(peer)
            except BbnodeError as error:
                # Its list comes with the next connection, or from another member.
                logger.info("no revocation list", extra={"peer": str(peer), "reason": str(error)})

    async def _exchange(self, peer: PeerId) -> None:
        offer = await self._in_thread(self._service.offer)
        answer = await ask(self._backend, peer, offer)
        if isinstance(answer, Revocations):
            await self._in_thread(self._service.take, answer.revocations)

    async def _answer(self, stream: ProtocolStream) -> None:
        request = await _read_all(stream)
        await stream.write(await self._in_thread(self._service.answer, stream.peer, request))
        # Who has read it all may be gone by now.
        with contextlib.suppress(StreamBrokenError):
            await stream.end()

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        async with self._lock:
            return await trio.to_thread.run_sync(function, *args)

    def _took(self, listed: RevocationList) -> None:
        logger.info("newer revocation list", extra={"sequence": listed.sequence})
        self._control.took(listed)

    def _offer_to_all(self) -> None:
        """Exchange lists with everybody who is connected."""
        for info in self._backend.peers():
            self._queue(info.peer)

    def _queue(self, peer: PeerId) -> None:
        try:
            self._ask.send_nowait(peer)
        except trio.WouldBlock:
            logger.info("no revocation list", extra={"peer": str(peer), "reason": "too many"})

    def _dialled(self, peer: PeerId) -> bool:
        """Return True if we dialled it: that side begins, and one exchange serves both."""
        return any(
            info.peer == peer and info.direction is Direction.OUTBOUND
            for info in self._backend.peers()
        )


async def ask(backend: ProtocolHost, peer: PeerId, request: bytes) -> Message:
    """Send one request to a connected peer and return the answer.

    Raises AccessSilent, AccessRefused for what is no answer, and as `open_stream`.
    """
    with trio.move_on_after(ACCESS_STALL_S):
        async with backend.open_stream(peer, ACCESS_PROTOCOL) as stream:
            await stream.write(request)
            await stream.end()
            return decode_message(await _read_all(stream))
    raise AccessSilent(f"{peer} did not answer within {ACCESS_STALL_S:g} s; try again")


async def redeem(backend: ProtocolHost, peer: PeerId, ticket: bytes) -> Member:
    """Redeem a ticket: return the membership as the inviter sent it, still to be checked.

    Raises TicketRefused with the inviter's reason, and as `ask`.
    """
    answer = await ask(backend, peer, encode_message(Redeem(ticket=ticket)))
    match answer:
        case Member():
            return answer
        case Refused():
            raise TicketRefused(answer.reason, f"{peer} refuses the ticket: {answer.detail}")
    raise AccessSilent(f"{peer} answered something else; run the same release on both sides")


async def _read_all(stream: ProtocolStream) -> bytes:
    """Return everything up to the stream's end; AccessSilent at a stall or beyond the bound."""
    parts: list[bytes] = []
    size = 0
    while True:
        with trio.move_on_after(ACCESS_STALL_S) as scope:
            part = await stream.read(64 * 1024)
        if scope.cancelled_caught:
            raise AccessSilent(f"{stream.peer} sent nothing for {ACCESS_STALL_S:g} s")
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > MESSAGE.max_bytes:
            raise AccessSilent(
                f"{stream.peer} sent over {MESSAGE.max_bytes} bytes, which no message has"
            )
