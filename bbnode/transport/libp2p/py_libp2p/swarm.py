"""py-libp2p's Swarm, whose one transport is ours.

Rule: a transport that says `provides_native_muxing` gives Swarm connections that are secured and
muxed; Swarm adds them as they are. What Swarm would do by itself, dial whom it knows, close what it
thinks is too much, is off: who is connected is decided here as for our own protocols.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, cast

import trio
from libp2p.abc import IListener, IMuxedConn, INetConn, INetStream, IRawConnection, ITransport
from libp2p.custom_types import THandler
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection import swarm_connection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

from bbnode.ir.address import CIRCUIT, is_relayed, named_peer
from bbnode.ir.peer import PeerId
from bbnode.transport.errors import DialError, StreamBrokenError

if TYPE_CHECKING:
    from bbnode.transport.libp2p.py_libp2p.peerstore import BoundedPeerStore

log = logging.getLogger(__name__)

# It calls `logging.debug`, which gives the root logger of the process a handler where it has none:
# from then on the `logging.basicConfig` of whoever embeds a node does nothing.
_LOGGER: Final = logging.getLogger(swarm_connection.__name__)
swarm_connection.logging = _LOGGER  # type: ignore[attr-defined, assignment]
# Without a handler of the user's, what it logs of remote peers is not for the terminal.
logging.getLogger("libp2p").addHandler(logging.NullHandler())

# The code of /p2p in multiaddr's protocol table.
_P2P: Final = 0x01A5
# Admission has the bounds that count.
_NEVER: Final = 2**31
_READ_BYTES: Final = 64 * 1024
# py-libp2p's own wait for 5 s at most; one that does not return would keep each connection's end.
NOTIFEE_S: Final = 30.0
_IP: Final = ("ip4", "ip6", "dns", "dns4", "dns6")

# Dial an address for a peer, or secure a raw connection; raises DialError.
Dial = Callable[[Multiaddr, PeerId], Awaitable[IMuxedConn]]


class Plugin(ITransport):
    """Our TCP, Noise and Yamux as one transport of py-libp2p."""

    provides_native_muxing = True

    def __init__(self, dial: Dial, listening: Callable[[], tuple[Multiaddr, ...]]) -> None:
        """`dial` returns a connection that is secured, muxed and admitted."""
        self._dial = dial
        self._listening = listening

    # The interface is that of transports without a muxer of their own.
    async def dial(self, maddr: Multiaddr) -> IRawConnection:
        """Connect with the peer that an address names; raises OpenConnectionError.

        The peer at the other end has proved that it is this one.
        """
        peer = peer_of(maddr)
        if peer is None:
            raise OpenConnectionError(f"{maddr} names no peer, and so anybody could be there")
        try:
            made = await self._dial(without_peer(maddr), PeerId.from_bytes(peer.to_bytes()))
        except DialError as error:
            raise OpenConnectionError(str(error)) from error
        return cast("IRawConnection", made)

    def create_listener(self, handler_function: THandler) -> IListener:  # noqa: ARG002
        """Return where we listen; our own host has the sockets, and adds what it accepts."""
        return _Listening(self._listening)

    def can_dial(self, maddr: Multiaddr) -> bool:
        """Return True for addresses of TCP, and through relays there."""
        names = [each.name for each in maddr.protocols()]
        if names[:4] and names[3:] in ([CIRCUIT], [CIRCUIT, "p2p"]):
            names = names[:3]
        return names[:1] != [] and names[0] in _IP and names[1:] in (["tcp"], ["tcp", "p2p"])

    def can_listen(self, maddr: Multiaddr) -> bool:
        """Return True for addresses of TCP."""
        return not is_relayed(maddr) and self.can_dial(maddr)

    def protocols(self) -> list[str]:
        """Return the protocol that every one of its addresses has."""
        return ["tcp"]


class _Listening(IListener):
    """Addresses on which our own host listens."""

    def __init__(self, listening: Callable[[], tuple[Multiaddr, ...]]) -> None:
        self._all = listening
        self._mine: tuple[Multiaddr, ...] = ()

    async def listen(self, maddr: Multiaddr) -> None:
        if maddr not in self._all():
            raise OpenConnectionError(f"this node does not listen on {maddr}: see network.listen")
        self._mine = (maddr,)
        await trio.lowlevel.checkpoint()

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        return self._mine

    async def close(self) -> None:
        self._mine = ()
        await trio.lowlevel.checkpoint()


class RawCircuit:
    """A raw connection of py-libp2p, such as one through a relay, as a circuit of ours."""

    def __init__(self, raw: IRawConnection, start: Callable[..., None]) -> None:
        """`start` starts an asynchronous function in the background."""
        self._raw = raw
        self._start = start
        self._cut = False

    async def read(self) -> bytes:
        """Return at least one byte, b"" at the end; raises StreamBrokenError."""
        self._check()
        try:
            return await self._raw.read(_READ_BYTES)
        except Exception as error:  # the raw connection's own kinds
            raise StreamBrokenError(f"the raw connection has broken: {error!r}") from error

    async def write(self, data: bytes) -> None:
        """Write all of `data`; raises StreamBrokenError."""
        self._check()
        try:
            await self._raw.write(data)
        except Exception as error:  # the raw connection's own kinds
            raise StreamBrokenError(f"the raw connection has broken: {error!r}") from error

    def cut(self) -> None:
        """End it at once."""
        if not self._cut:
            self._cut = True
            self._start(self._raw.close)

    def _check(self) -> None:
        if self._cut:
            raise StreamBrokenError("the raw connection was closed here")


class _Tasks:
    """Swarm's manager, but for its tasks: each ends alone, and starting one costs no search."""

    def __init__(self, manager: Any, start: Callable[..., None]) -> None:
        self._manager = manager
        self._start = start

    def run_task(
        self,
        async_fn: Callable[..., Awaitable[Any]],
        *args: Any,
        daemon: bool = False,  # noqa: ARG002 - as TrioManager has it
        name: str | None = None,  # noqa: ARG002
    ) -> None:
        self._start(async_fn, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class _NoConnector(AutoConnector):
    """An auto-connector that dials nobody, and remembers nobody; whatever the watermarks are."""

    async def run_background_task(self, nursery: trio.Nursery) -> None:
        """Start nothing."""

    async def maybe_connect(self) -> None:
        """Dial nobody."""

    def record_disconnect(self, peer_id: ID) -> None:
        """Remember nothing."""


class NodeSwarm(Swarm):
    """A Swarm of which no task can end another, and that asks us for raw connections as well."""

    def __init__(self, own: ID, peerstore: BoundedPeerStore, plugin: Plugin) -> None:
        """Create it; the functions below are set before it runs."""
        self._manager: Any = None
        self.secure_dialled: Callable[[IRawConnection, ID], Awaitable[IMuxedConn]]
        self.secure_accepted: Callable[[IRawConnection, Multiaddr], Awaitable[IMuxedConn]]
        # Returns when no connection with a peer waits to be added.
        self.settled: Callable[[ID], Awaitable[None]]
        # Swarm's upgrader would add a handshake and a muxer; connections come with ours.
        super().__init__(
            own,
            peerstore,
            cast("Any", None),
            [plugin],
            retry_config=RetryConfig(max_retries=0),
            connection_config=ConnectionConfig(
                max_connections=_NEVER,
                high_watermark=_NEVER,
                low_watermark=0,
                min_connections=0,
                max_connections_per_peer=_NEVER,
            ),
        )
        self.auto_connector = _NoConnector(self)
        self.tasks: trio.Nursery | None = None

    @property
    def manager(self) -> Any:
        """The manager of its service."""
        return _Tasks(self._manager, self.start_soon)

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Run a function of py-libp2p in the background; what it raises ends it alone."""
        if self.tasks is not None:
            self.tasks.start_soon(self._guarded, function, *args)

    async def _guarded(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        try:
            await function(*args)
        except Exception:
            log.exception("a task of py-libp2p has failed")
            connection = getattr(function, "__self__", None)
            if isinstance(connection, SwarmConn):
                await connection.close()

    async def _notify(self, method: str, *args: Any) -> None:
        """Tell all notifees, of which none can hold a connection up for long."""
        with trio.move_on_after(NOTIFEE_S) as scope:
            await super()._notify(method, *args)
        if scope.cancelled_caught:
            log.warning("a notifee of py-libp2p took over %g s for %s", NOTIFEE_S, method)

    async def _dial_with_retry(
        self, addr: Multiaddr, peer_id: ID, source: tuple[str, int] | None = None
    ) -> INetConn:
        """Dial, if an address that names a peer names the one that is asked for."""
        named = peer_of(addr)
        if named is not None and named != peer_id:
            raise SwarmException(f"Peer ID mismatch: {addr} is not an address of {peer_id}")
        return await super()._dial_with_retry(addr, peer_id, source)

    async def new_stream(self, peer_id: ID) -> INetStream:
        """Open a stream, on a connection that is there or that is dialled; raises SwarmException.

        A connection that is there for us is for py-libp2p, too, a moment later.
        """
        if peer_id not in self.connections:
            await self.settled(peer_id)
        return await super().new_stream(peer_id)

    async def upgrade_outbound_raw_conn(
        self, raw_conn: IRawConnection, peer_id: ID, pre_scope: Any = None
    ) -> SwarmConn:
        """Secure a raw connection that we have dialled; raises SwarmException."""
        try:
            muxed = await self.secure_dialled(raw_conn, peer_id)
        except DialError as error:
            raise SwarmException(str(error)) from error
        finally:
            if pre_scope is not None:
                pre_scope.close()
        return await self.add_conn(muxed, direction="outbound")

    async def upgrade_inbound_raw_conn(
        self,
        raw_conn: IRawConnection,
        maddr: Multiaddr,
    ) -> IMuxedConn:
        """Secure a raw connection that a peer has dialled; raises SwarmException."""
        try:
            return await self.secure_accepted(raw_conn, maddr)
        except DialError as error:
            raise SwarmException(str(error)) from error


def peer_of(address: Multiaddr) -> ID | None:
    """Return the peer at the end of an address, None if it names none."""
    found = named_peer(address)
    return None if found is None else ID(found.to_bytes())


def without_peer(address: Multiaddr) -> Multiaddr:
    """Return an address without the PeerId behind it."""
    names = [each.name for each in address.protocols()]
    return address.decapsulate_code(_P2P) if names[-1:] == ["p2p"] else address
