"""The access protocol on a node's connections: redeeming tickets, passing on revocations.

Rule: the side that dialled a member offers its newest revocation list and gets the other's. A newer
list is published on a topic of the network, and each node that learns of it passes it on to those
of its peers that do not subscribe to that topic. Files are read and written in a worker thread, one
request after the other; the policy is updated on the trio thread. A use of a ticket is on disk
before its answer is created. A refusal is an answer too.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import trio

from bbnode.access.conduct import Offence
from bbnode.access.errors import AccessRefused, GrantError, Refusal, TicketRefused
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
from bbnode.access.keys import SigningKey
from bbnode.access.revocation import RevocationList, open_revocations
from bbnode.access.ticket import Ledger, ticket_from_bytes
from bbnode.access.ticket import redeem as redeem_ticket
from bbnode.daemon.access import files as access_files
from bbnode.daemon.access.control import AccessControl
from bbnode.ir.caps import ACCESS_STALL_S, MAX_LISTS_WAITING, MAX_TOPIC_BYTES
from bbnode.ir.errors import BbnodeError, PeerError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Direction, ProtocolStream, Transport
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.topics import Topics

logger = logging.getLogger(__name__)

# The period of checks for members whose statement has expired. Until then they stay connected, but
# their envelopes are refused.
DATES_EVERY_S = 60.0


# No program can give a topic this name.
REVOKED: Final = "~revoked"


class AccessSilent(PeerError):
    """A peer did not answer over the access protocol."""


class AccessService:
    """One node's side of the protocol. Only one task uses it, so it has no lock."""

    def __init__(
        self,
        state_dir: Path,
        key: SigningKey,
        *,
        unix_s: Callable[[], float],
        serial: Callable[[], int],
        on_revocations: Callable[[RevocationList], None],
        on_redeemed: Callable[[Ledger], None],
    ) -> None:
        """Serve from `state_dir`; `key` is the node's own, `serial` draws 64 random bits.

        `on_revocations` is called with each newer list, once it is stored, and `on_redeemed` with
        the ledger after each use of a ticket.
        """
        self._state_dir = state_dir
        self._key = key
        self._unix_s = unix_s
        self._serial = serial
        self._on_revocations = on_revocations
        self._on_redeemed = on_redeemed

    def answer(self, peer: PeerId, request: bytes) -> bytes:
        """Return the answer to a request of `peer`, whose identity its connection has proved.

        Raises StorageError if the disk denies it; then nothing was granted.
        """
        try:
            message = decode_message(request)
            return encode_message(self._answer(peer, message))
        except AccessRefused as error:
            return encode_message(Refused(reason=error.reason, detail=str(error)))
        except GrantError as error:
            return encode_message(Refused(reason=Refusal.NOT_GRANTED, detail=str(error)))

    def offer(self) -> bytes:
        """Return the request that offers this node's newest list to another member."""
        return encode_message(Revocations(revocations=_raw(self._load().revocations)))

    def take(self, raw: bytes) -> None:
        """Store a list that another member sent, if it is newer; raises AccessRefused."""
        own = self._load()
        if not raw or own.network is None:
            return
        offered, kept = open_revocations(raw, own.network), own.revocations
        # A member with an older list gets ours in the answer, which is not an error.
        if kept is not None and offered.sequence <= kept.sequence:
            return
        if access_files.save_revocations(self._state_dir, offered):
            self._on_revocations(offered)

    def _answer(self, peer: PeerId, message: Message) -> Message:
        match message:
            case Redeem():
                return self._redeem(peer, message.ticket)
            case Revocations():
                self.take(message.revocations)
                return Revocations(revocations=_raw(self._load().revocations))
            case _:
                return Refused(reason=Refusal.MALFORMED, detail="that is an answer, no request")

    def _redeem(self, peer: PeerId, raw: bytes) -> Member:
        access = self._load()
        before = access_files.load_ledger(self._state_dir)
        membership, ledger = redeem_ticket(
            ticket_from_bytes(raw),
            peer,
            key=self._key,
            ledger=before,
            unix_s=self._unix_s(),
            serial=self._serial(),
            granter=access.membership,
            revoked=access.revocations,
        )
        if ledger is not before:
            access_files.save_ledger(self._state_dir, ledger)
            self._on_redeemed(ledger)
            logger.info(
                "ticket redeemed",
                extra={"peer": str(peer), "serial": membership.own.serial_text},
            )
        return Member(membership=membership.raw, revocations=_raw(access.revocations))

    def _load(self) -> access_files.NodeAccess:
        return access_files.load_node(self._state_dir, self._key.peer_id)


class AccessProtocol:
    """The access protocol of one node."""

    def __init__(
        self,
        control: AccessControl,
        backend: Transport,
        state_dir: Path,
        key: SigningKey,
        *,
        unix_s: Callable[[], float] = time.time,
        topics: Topics | None = None,
    ) -> None:
        """Answer requests on all connections of `backend`, which must not run yet.

        Without `topics`, lists only go from peer to peer.
        """
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
        self._last_heard = b""
        self._heard, self._hearing = trio.open_memory_channel[tuple[PeerId, bytes]](
            MAX_LISTS_WAITING
        )
        self._topics = topics if control.network is not None else None
        if self._topics is not None:
            self._topics.follow(REVOKED, self._published)
        control.on_list = self._spread
        backend.register_protocol(ACCESS_PROTOCOL, self._answer)

    def peer_up(self, peer: PeerId) -> None:
        """Handle a new connection with a peer."""
        if self._control.network is not None and self._dialled(peer):
            self._queue(peer)

    async def run(self) -> None:
        """Exchange revocation lists with newly connected peers, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_dates)
            nursery.start_soon(self._take_published)
            await self._exchange_all()

    async def _watch_dates(self) -> None:
        """Close connections whose statement has expired; a renewed one comes with the next."""
        while True:
            await trio.sleep(DATES_EVERY_S)
            self._control.dates_passed()

    async def _exchange_all(self) -> None:
        async for peer in self._asked:
            try:
                await self._exchange(peer)
            except BbnodeError as error:
                # The list comes with the next connection, or from another member.
                logger.info("no revocation list", extra={"peer": str(peer), "reason": str(error)})

    async def _exchange(self, peer: PeerId) -> None:
        offer = await self._in_thread(self._service.offer)
        answer = await ask(self._backend, peer, offer)
        if isinstance(answer, Revocations):
            await self._in_thread(self._service.take, answer.revocations)

    async def _answer(self, stream: ProtocolStream) -> None:
        request = await _read_all(stream)
        await stream.write(await self._in_thread(self._service.answer, stream.peer, request))
        # The peer may have read everything and disconnected.
        with contextlib.suppress(StreamBrokenError):
            await stream.end()

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        async with self._lock:
            return await trio.to_thread.run_sync(function, *args)

    def _took(self, listed: RevocationList) -> None:
        logger.info("newer revocation list", extra={"sequence": listed.sequence})
        self._control.took(listed)

    def _spread(self, listed: RevocationList) -> None:
        """Pass on a list that is newer than the stored one."""
        reached: frozenset[PeerId] = frozenset()
        if self._topics is not None and len(listed.raw) <= MAX_TOPIC_BYTES:
            try:
                if listed.raw != self._last_heard:  # otherwise it already spreads on the topic
                    self._topics.publish(REVOKED, listed.raw)
                reached = self._topics.followers(REVOKED)
            except BbnodeError as error:
                logger.warning("revocation list not published", extra={"reason": str(error)})
        for info in self._backend.peers():
            if info.peer not in reached:
                self._queue(info.peer)

    def _published(self, peer: PeerId, raw: bytes) -> None:
        try:
            self._heard.send_nowait((peer, raw))
        except trio.WouldBlock:
            logger.info("no revocation list", extra={"peer": str(peer), "reason": "too many"})

    async def _take_published(self) -> None:
        async for peer, raw in self._hearing:
            self._last_heard = raw
            try:
                await self._in_thread(self._service.take, raw)
            except AccessRefused as error:
                extra = {"peer": str(peer), "reason": str(error)}
                logger.warning("published revocation list refused", extra=extra)
                self._control.offence(peer, Offence.FORGED)
            except BbnodeError as error:
                logger.error("revocation list not stored", extra={"reason": str(error)})  # noqa: TRY400

    def _queue(self, peer: PeerId) -> None:
        try:
            self._ask.send_nowait(peer)
        except trio.WouldBlock:
            logger.info("no revocation list", extra={"peer": str(peer), "reason": "too many"})

    def _dialled(self, peer: PeerId) -> bool:
        """Return True if we dialled it: that side begins, and one exchange serves both."""
        info = self._backend.peer_info(peer)
        return info is not None and info.direction is Direction.OUTBOUND


async def ask(backend: Transport, peer: PeerId, request: bytes) -> Message:
    """Send one request to a connected peer and return the answer.

    Raises AccessSilent, AccessRefused for a malformed answer, and the errors of `open_stream`.
    """
    with trio.move_on_after(ACCESS_STALL_S):
        async with backend.open_stream(peer, ACCESS_PROTOCOL) as stream:
            await stream.write(request)
            await stream.end()
            return decode_message(await _read_all(stream))
    raise AccessSilent(f"{peer} did not answer within {ACCESS_STALL_S:g} s; try again")


async def redeem(backend: Transport, peer: PeerId, ticket: bytes) -> Member:
    """Redeem a ticket: return the membership that the inviter sent, which still has to be checked.

    Raises TicketRefused with the inviter's reason, and the errors of `ask`.
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


def _raw(revocations: RevocationList | None) -> bytes:
    return b"" if revocations is None else revocations.raw
