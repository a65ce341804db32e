"""The libp2p backend: TCP, Noise, Yamux, and links on top.

Rule: only the files named libp2p_* know libp2p. Connections reach us in two ways, a notice
of the network and a stream that may come before it: both lead to the one link of that
connection. Dialling is `dial_addr` per address; our own table knows who is where, libp2p's
peerstore forgets after 120 s.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p.abc import INotifee
from libp2p.peer.id import ID
from multiaddr import Multiaddr
from multiaddr.utils import get_thin_waist_addresses

from bbnode.ir.peer import PeerId
from bbnode.transport.backend import Hello, TransportLimits
from bbnode.transport.errors import DialError, ListenError
from bbnode.transport.framing import Lane
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p_carrier import LANE_PROTOCOLS, Libp2pCarrier, Libp2pStream
from bbnode.transport.libp2p_tcp import BoundedTcp, listen_endpoint
from bbnode.transport.libp2p_workarounds import build_host, hard_close, running
from bbnode.transport.link import Link
from bbnode.transport.link_backend import LinkBackend


class Libp2pBackend(LinkBackend):
    """A Backend on py-libp2p 0.8.1."""

    def __init__(
        self,
        identity: Identity,
        *,
        listen: Sequence[Multiaddr],
        announce: Sequence[Multiaddr] = (),
        hello: Hello | None = None,
        limits: TransportLimits | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Raise ListenError for an address in `listen` that is not plain TCP.

        `listen` may be empty: the node then only dials. `announce` replaces the addresses
        that others are told.
        """
        super().__init__(identity.peer_id, hello=hello or Hello(), limits=limits, rng=rng)
        for address in listen:
            listen_endpoint(address)
        self._listen = tuple(dict.fromkeys(listen))
        self._announce = tuple(announce)
        self._tcp = BoundedTcp()
        self._host = build_host(
            identity,
            self._tcp,
            max_connections=self._limits.max_connections,
            max_per_peer=self._limits.max_connections_per_peer,
            on_fault=lambda: self._counters.add("streams.handler_errors"),
        )
        self._links: dict[Any, Link] = {}
        self._addresses: list[Multiaddr] = []
        for lane, protocol in LANE_PROTOCOLS.items():
            self._host.set_stream_handler(protocol, self._stream_handler(lane))
        self._host.get_network().register_notifee(_Notices(self))

    def listen_addresses(self) -> list[Multiaddr]:
        """Concrete addresses, known once `run` has started; wildcards are replaced by the
        addresses of the interfaces, or everything by what was to be announced.
        """
        return list(self._addresses)

    # -- LinkBackend -----------------------------------------------------------------------

    @asynccontextmanager
    async def _serve(self) -> AsyncIterator[None]:
        failure: ListenError | None = None
        async with running(self._host, self._listen):
            # Raised after the host has ended: from within, trio would wrap it in a group.
            failure = self._listen_failure()
            if failure is None:
                self._addresses = self._concrete_addresses()
                yield
        if failure is not None:
            raise failure

    async def _close_listeners(self) -> None:
        # Not `close`: it would cut the connections that came in, before they take leave.
        for listener in self._host.get_network().listeners.values():
            listener.stop_accepting()
        await trio.lowlevel.checkpoint()

    async def _dial(self, address: Multiaddr, peer: PeerId) -> Link:
        try:
            connection = await self._host.get_network().dial_addr(
                _without_peer(address), ID(peer.to_bytes())
            )
        except Exception as error:
            raise DialError(f"cannot dial {address}: {_root_text(error)}") from error
        link = self.link_of(connection)
        if link is None:
            await hard_close(self._host, connection)
            raise DialError(f"cannot use {address}: too many connections, or we are stopping")
        return link

    # -- connections -----------------------------------------------------------------------

    def link_of(self, connection: Any) -> Link | None:
        """The link of a connection, made on first sight; None when it is refused."""
        link = self._links.get(connection)
        if link is None:
            link = self._attach(Libp2pCarrier(self._host, connection, self._forget_connection))
            if link is not None:
                self._links[connection] = link
        return link

    def connection_closed(self, connection: Any) -> None:
        """The network says that a connection is gone."""
        link = self._links.get(connection)
        if link is not None:
            link.doom("the connection was closed")

    async def refuse(self, connection: Any) -> None:
        """Close a connection that got no link."""
        await hard_close(self._host, connection)

    def _forget_connection(self, connection: Any) -> None:
        self._links.pop(connection, None)

    def _stream_handler(self, lane: Lane) -> Any:
        async def handle(stream: Any) -> None:
            link = self.link_of(stream.swarm_conn)
            if link is None:
                await hard_close(self._host, stream.swarm_conn)
                return
            await link.serve_inbound(lane, Libp2pStream(stream))

        return handle

    # -- addresses -------------------------------------------------------------------------

    def _listen_failure(self) -> ListenError | None:
        listeners = self._host.get_network().listeners
        for address in self._listen:
            listener = listeners.get(str(address))
            if listener is None or not listener.get_addrs():
                return ListenError(
                    f"cannot listen on {address}: {self._tcp.failure_text(address)}; "
                    "stop the program that has the port, or listen on another "
                    "(port 0 takes any free one)"
                )
        return None

    def _concrete_addresses(self) -> list[Multiaddr]:
        found = list(self._announce)
        if not found:
            for listener in self._host.get_network().listeners.values():
                for bound in listener.get_addrs():
                    found.extend(get_thin_waist_addresses(bound))
        suffix = Multiaddr(f"/p2p/{self._own}")
        return list(dict.fromkeys(_without_peer(each).encapsulate(suffix) for each in found))


class _Notices(INotifee):
    """What the network tells us of connections. `connected` runs inside the dial."""

    def __init__(self, backend: Libp2pBackend) -> None:
        self._backend = backend

    async def connected(self, network: Any, conn: Any) -> None:  # noqa: ARG002
        if self._backend.link_of(conn) is None:
            await self._backend.refuse(conn)

    async def disconnected(self, network: Any, conn: Any) -> None:  # noqa: ARG002
        self._backend.connection_closed(conn)

    async def opened_stream(self, network: Any, stream: Any) -> None:
        pass

    async def closed_stream(self, network: Any, stream: Any) -> None:
        pass

    async def listen(self, network: Any, multiaddr: Any) -> None:
        pass

    async def listen_close(self, network: Any, multiaddr: Any) -> None:
        pass


def _without_peer(address: Multiaddr) -> Multiaddr:
    """The address up to its /p2p part: whom we expect there is said apart."""
    names = [protocol.name for protocol in address.protocols()]
    return address.decapsulate_code(0x01A5) if "p2p" in names else address


def _root_text(error: BaseException) -> str:
    """The innermost cause, on one line: libp2p wraps the reason several times."""
    seen: set[int] = set()
    while True:
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
        if inner is None or id(inner) in seen:
            return " ".join(str(error).split()) or type(error).__name__
        seen.add(id(inner))
        error = inner
