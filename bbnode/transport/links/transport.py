"""A transport built from links: peers, dialer tasks, start and stop.

Rule: everything that a transport does besides opening connections is here; a subclass listens and
dials (`_serve`, `_dial`), and hands each new connection to `_attach`. All tasks are children of
`run`.
"""

from __future__ import annotations

import contextlib
import math
import random
import secrets
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Final

import trio
from multiaddr import Multiaddr

from bbnode.ir.address import is_relayed
from bbnode.ir.caps import MAX_CLAIMED_ADDRESSES
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    Authorizer,
    Buffer,
    Counters,
    Hello,
    PeerInfo,
    Transport,
    TransportMetrics,
    Unsent,
    WantedPeer,
    check_can_be_dialled,
)
from bbnode.transport.errors import DialError
from bbnode.transport.hints import dialable
from bbnode.transport.inbox import Inbox
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.admission import Place
from bbnode.transport.links.hello import encode_hello
from bbnode.transport.links.link import Carrier, Link, LinkState
from bbnode.transport.links.peers import PeerSession, PeerTable
from bbnode.transport.signals import Signal

# Happy eyeballs (RFC 8305, section 5): the next address is tried after this delay, or as soon as
# the previous one has failed.
_STAGGER_S: Final = 0.25
# A connection that lasted this long was a success; one that ends sooner makes the next wait longer.
STEADY_S: Final = 10.0
_JITTER: Final = 0.2


class LinkTransport(Transport):
    """The part of a Transport that is independent of the way connections are opened."""

    def __init__(
        self,
        own: PeerId,
        *,
        hello: Hello,
        limits: TransportLimits | None = None,
        rng: random.Random | None = None,
        authorizer: Authorizer | None = None,
    ) -> None:
        self._own = own
        self._limits = limits or TransportLimits()
        self._counters = Counters()
        self._inbox = Inbox(self._limits)
        self._table = PeerTable(
            own,
            limits=self._limits,
            inbox=self._inbox,
            counters=self._counters,
            authorizer=authorizer,
        )
        self._lost = Signal()
        self._table.on_lost = self._lost.set
        self._hello = replace(hello, session_id=secrets.token_hex(8))
        # For the jitter of redials, so it need not be secure.
        self._random = rng or random.Random()
        self._links_made = 0
        self._nursery: trio.Nursery | None = None
        self._dialers: dict[PeerId, trio.CancelScope] = {}
        self._stopping = trio.Event()
        self._stopped = trio.Event()
        self._grace_s = 0.0

    # -- for subclasses --------------------------------------------------------------------

    @abstractmethod
    def _serve(self) -> AbstractAsyncContextManager[None]:
        """Listen while the context is open; raises ListenError on entry."""

    @abstractmethod
    async def _close_listeners(self) -> None:
        """Stop accepting connections; open ones stay."""

    @abstractmethod
    async def _dial(self, address: Multiaddr, peer: PeerId) -> Link:
        """Connect and `_attach`; raises DialError. Has its own time-outs and is never cancelled."""

    @abstractmethod
    async def _maintain(self) -> None:
        """Do periodic upkeep, until cancelled."""

    def _relay_routes(self, peer: PeerId) -> Sequence[Multiaddr]:  # noqa: ARG002
        """Return further addresses of a peer, to try after its own."""
        return ()

    def _circuits(self) -> int:
        """Return the number of circuits between other peers that go through us."""
        return 0

    # -- Transport -------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        return self._own

    @property
    def events(self) -> Inbox:
        return self._inbox

    def send(self, peer: PeerId, data: Buffer | Sequence[Buffer], *, tag: int) -> None:
        self._table.send(peer, data, tag)

    def peers(self) -> list[PeerInfo]:
        return self._table.infos()

    def peer_info(self, peer: PeerId) -> PeerInfo | None:
        session = self._table.known(peer)
        return None if session is None else session.info()

    def moved(self) -> dict[PeerId, tuple[int, int]]:
        return self._table.moved()

    def wanted(self) -> list[WantedPeer]:
        return self._table.wanted()

    def counters(self) -> dict[str, int]:
        return self._counters.snapshot()

    def metrics(self) -> TransportMetrics:
        table, inbox = self._table, self._inbox
        links, sessions = table.links(), table.sessions()
        queues = [session.queue for session in sessions]
        receivers = [session.receiver for session in sessions if session.receiver is not None]
        own_tasks = 0 if self._nursery is None else len(self._nursery.child_tasks)
        up = sum(link.hello is not None for link in links)
        opening = sum(link.hello is None and not link.is_foreign for link in links)
        return TransportMetrics(
            connections=up,
            connections_opening=opening + table.admission.sockets,
            connection_slots=self._limits.max_connections,
            streams=sum(link.carrier.stream_count() for link in links),
            tasks=own_tasks + sum(link.tasks for link in links),
            unread_bytes=sum(link.carrier.unread_bytes() for link in links),
            held_bytes=sum(receiver.held_bytes for receiver in receivers),
            inbox_bytes=inbox.envelope_bytes,
            partial_bytes=inbox.partial_bytes,
            queued_bytes=sum(queue.bytes for queue in queues),
            unacknowledged_bytes=sum(queue.unacknowledged_bytes for queue in queues),
            inbox_envelopes=inbox.envelopes,
            inbox_notices=inbox.notices,
            queued_envelopes=sum(queue.envelopes for queue in queues),
            circuits=self._circuits(),
            foreign=table.admission.foreign,
            sessions=len(sessions),
            denied=dict(table.gate.denied),
            counters=self._counters.snapshot(),
            peers=tuple(table.infos()),
        )

    def set_credentials(self, credentials: bytes) -> None:
        """Send these credentials from now on; raises HelloError if they do not fit into a hello."""
        hello = replace(self._hello, credentials=credentials)
        encode_hello(hello)
        self._hello = hello

    def reauthorize(self) -> None:
        self._table.reauthorize()

    def keep_connected(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        check_can_be_dialled(self._own, peer, addresses)
        session = self._table.session(peer)
        session.wanted = tuple(dict.fromkeys(addresses))[:MAX_CLAIMED_ADDRESSES]
        if self._nursery is not None and peer not in self._dialers:
            self._start_dialer(session)

    def unsent(self) -> list[Unsent]:
        return self._table.unsent()

    def forget(self, peer: PeerId) -> None:
        session = self._table.known(peer)
        if session is None or session.wanted is None:
            return
        session.wanted = None
        scope = self._dialers.pop(peer, None)
        if scope is not None:
            scope.cancel()
        self._table.not_reached(session, "it is no longer dialled")
        self._table.drop_if_unused(session)

    def disconnect(self, peer: PeerId) -> None:
        session = self._table.known(peer)
        for link in list(session.links) if session is not None else ():
            link.close("disconnected on purpose")

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with self._serve(), trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._expire, name="forget lost peers")
                nursery.start_soon(self._table.looks.run, name="look after links")
                nursery.start_soon(self._maintain, name="maintain connections")
                for session in self._table.sessions():
                    if session.wanted is not None:
                        self._start_dialer(session)
                task_status.started()
                await self._stopping.wait()
                await self._say_goodbye()
                self._nursery = None
                nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self._inbox.close()
            self._stopped.set()

    async def stop(self, grace_s: float) -> None:
        """Stop within `grace_s`; a second call does not extend the first."""
        if not self._stopping.is_set():
            self._table.stopping = True
            self._grace_s = grace_s
            self._stopping.set()
        await self._stopped.wait()

    # -- links -----------------------------------------------------------------------------

    def _attach(self, carrier: Carrier, place: Place | None = None) -> Link | None:
        """Run a link on a new connection; return None at a bound, or while we are stopping.

        `place` is the one that its socket got when it was accepted.
        """
        if self._nursery is None or self._stopping.is_set() or carrier.peer == self._own:
            self._counters.add("links.refused")
            return None
        if not self._table.admits(carrier.peer, carrier.direction):
            return None
        self._links_made += 1
        session = self._table.session(carrier.peer)
        hello = replace(
            self._hello,
            link=self._links_made,
            exchange=session.exchange,
            listen_addresses=tuple(self.listen_addresses()[:MAX_CLAIMED_ADDRESSES]),
        )
        link = Link(
            carrier,
            self._table,
            queue=session.queue,
            hello=encode_hello(hello),
            number=self._links_made,
            limits=self._limits,
            counters=self._counters,
        )
        # The same PeerId object in all tables, so that look-ups compare by identity.
        link.peer = session.peer
        if not self._table.add(link, place):
            self._counters.add("links.refused")
            return None
        self._nursery.start_soon(link.run, name=f"link with {carrier.peer.short}")
        return link

    async def _expire(self) -> None:
        """Drop the state of lost peers after its expiry."""
        while True:
            with trio.move_on_at(self._table.expire(trio.current_time())):
                await self._lost.wait()

    async def _say_goodbye(self) -> None:
        """Wait until the queues are acknowledged, then say goodbye, within the grace of `stop`."""
        for scope in self._dialers.values():
            scope.cancel()
        await self._close_listeners()
        deadline = trio.current_time() + self._grace_s
        # Half of the grace is for queued messages, the rest for the closing handshakes.
        with trio.move_on_at(deadline - self._grace_s / 2):
            for session in self._table.sessions():
                if session.primary is not None:
                    await session.queue.wait_idle()
        # Relayed links first: they need the connection with their relay to close.
        relayed = [link for link in self._table.links() if is_relayed(link.carrier.address)]
        half = (trio.current_time() + deadline) / 2
        for links, until in ((relayed, half), (self._table.links(), deadline)):
            for link in links:
                link.close("the node stops")
            with trio.move_on_at(until):
                for link in links:
                    await link.closed.wait()
        for link in self._table.links():
            link.abort("the node stops")
        self._table.expire(math.inf)
        for link in self._table.links():
            # hard_close does not hang.
            await link.closed.wait()

    # -- dialling --------------------------------------------------------------------------

    def _start_dialer(self, session: PeerSession) -> None:
        if self._nursery is None or self._stopping.is_set():
            return
        self._table.expect(session)
        scope = self._dialers[session.peer] = trio.CancelScope()
        self._nursery.start_soon(self._keep, session, scope, name=f"dialer {session.peer.short}")

    async def _keep(self, session: PeerSession, scope: trio.CancelScope) -> None:
        """Keep one peer connected. Only its waits are ever cancelled, never a dial."""
        redial = DialBackoff(self._limits, self._random)
        up_since = math.inf
        with scope:
            while session.wanted is not None:
                if session.up.is_set():
                    up_since = min(up_since, trio.current_time())
                    await self._hold(session)
                    continue
                # A peer that accepts and closes at once (it may refuse us) is no success.
                if up_since < math.inf:
                    if trio.current_time() - up_since >= STEADY_S:
                        redial.reset()
                    up_since = math.inf
                    with trio.move_on_after(redial.next_delay_s(denied=session.denied)):
                        await session.up.wait()
                        continue
                # Direct addresses first.
                ways = dict.fromkeys([*session.wanted, *self._relay_routes(session.peer)])
                await self._dial_round(session, sorted(ways, key=is_relayed))
                if session.up.is_set():
                    continue
                self._table.not_reached(session, session.last_error)
                with trio.move_on_after(redial.next_delay_s(denied=session.denied)):
                    # An inbound connection ends the wait as well.
                    await session.up.wait()

    async def _hold(self, session: PeerSession) -> None:
        """Wait until the connection is lost, or try to replace a relayed one."""
        with trio.move_on_after(self._limits.direct_retry_s):
            await session.down.wait()
            return
        link = session.primary
        if link is None or link.hello is None or not is_relayed(link.carrier.address):
            return
        claimed = dialable(link.hello.listen_addresses, seen=link.carrier.address, good=True)
        ways = dict.fromkeys([*(session.wanted or ()), *claimed])
        direct = [way for way in ways if not is_relayed(way)]
        if direct:
            await self._dial_round(session, direct[:MAX_CLAIMED_ADDRESSES])

    async def _dial_round(self, session: PeerSession, addresses: Sequence[Multiaddr]) -> None:
        """Try the addresses, each a little after the one before, until one leads to a hello.

        Connections of late ones are duplicates, of which both sides keep the same.
        """
        nursery = self._nursery
        if nursery is None:
            return
        send, receive = trio.open_memory_channel[bool](len(addresses))
        pending = 0
        for address in addresses:
            nursery.start_soon(self._dial_one, session, address, send.clone())
            pending += 1
            with trio.move_on_after(_STAGGER_S):
                if await receive.receive():
                    return
                pending -= 1
        send.close()
        while pending:
            if await receive.receive():
                return
            pending -= 1

    async def _dial_one(
        self, session: PeerSession, address: Multiaddr, result: trio.MemorySendChannel[bool]
    ) -> None:
        self._counters.add("dial.attempts")
        reason = ""
        try:
            link = await self._dial(address, session.peer)
            await link.settled.wait()
            if link.state is LinkState.CLOSED:
                reason = f"{address}: {link.reason}"
        except DialError as error:
            self._counters.add("dial.failed")
            reason = str(error)
        if reason and not session.up.is_set():
            session.failed_dials += 1
            session.last_error = reason
        # The dialer may have been stopped.
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            result.send_nowait(not reason)
        result.close()


class DialBackoff:
    """The waits of one dialer task: exponential, with jitter.

    The first failure waits `redial_min_s`, each further one twice as long, up to `redial_max_s`;
    the jitter keeps the peers of a restarted server from reconnecting in step.
    """

    __slots__ = ("_limits", "_random", "failures")

    def __init__(self, limits: TransportLimits, rng: random.Random) -> None:
        self._limits = limits
        self._random = rng
        self.failures = 0

    def reset(self) -> None:
        """Record a success: the next failure waits the minimum again."""
        self.failures = 0

    def next_delay_s(self, *, denied: bool = False) -> float:
        """Count a failure and return the seconds to wait after it.

        `denied`: our own authorizer refused the connection, and may soon decide otherwise.
        """
        limits = self._limits
        # The bound keeps the float finite: 2 ** 32 times any minimum exceeds every maximum.
        base = limits.redial_min_s * 2.0 ** min(self.failures, 32)
        self.failures += 1
        spread = min(base, limits.redial_max_s) * self._random.uniform(1 - _JITTER, 1 + _JITTER)
        most_s = min(limits.redial_max_s, limits.redial_denied_s) if denied else limits.redial_max_s
        return min(max(spread, limits.redial_min_s), most_s)
