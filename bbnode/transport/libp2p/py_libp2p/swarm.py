"""py-libp2p's Swarm, whose one transport is ours.

Rule: a transport with `provides_native_muxing` gives Swarm secured and muxed connections, which
Swarm adds as they are. Swarm's own connection management (dialling known peers, closing
connections above a limit) is off: connections are managed as for our own protocols.
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

# The module calls `logging.debug`, which adds a handler to a root logger without one: after that,
# `logging.basicConfig` of a program that embeds a node would do nothing.
_LOGGER: Final = logging.getLogger(swarm_connection.__name__)
swarm_connection.logging = _LOGGER  # type: ignore[attr-defined, assignment]
# Keeps its messages about remote peers from the terminal, if the user has set no handler.
logging.getLogger("libp2p").addHandler(logging.NullHandler())

# The code of /p2p in multiaddr's protocol table.
_P2P: Final = 0x01A5
# Disables Swarm's limits: Admission has the bounds.
_NEVER: Final = 2**31
_READ_BYTES: Final = 64 * 1024
# py-libp2p's own notifees take at most 5 s; one that hangs would delay each connection's end.
NOTIFEE_S: Final = 30.0
_IP: Final = ("ip4", "ip6", "dns", "dns4", "dns6")

# Dial an address for a peer, or secure a raw connection; raises DialError.
Dial = Callable[[Multiaddr, PeerId], Awaitable[IMuxedConn]]


class Plugin(ITransport):
    """Our TCP, Noise and Yamux as one transport of py-libp2p."""

    provides_native_muxing = True

    def __init__(self, dial: Dial, listening: Callable[[], tuple[Multiaddr, ...]]) -> None:
        """Create the plug-in; `dial` returns a secured, muxed and admitted connection."""
        self._dial = dial
        self._listening = listening

    # The return type is that of transports without a muxer of their own.
    async def dial(self, maddr: Multiaddr) -> IRawConnection:
        """Connect with the peer that an address names; raises OpenConnectionError.

        The peer at the other end is authenticated.
        """
        peer = peer_of(maddr)
        if peer is None:
            raise OpenConnectionError(f"{maddr} names no peer, and so anybody could be there")
        try:
            connection = await self._dial(without_peer(maddr), PeerId.from_bytes(peer.to_bytes()))
        except DialError as error:
            raise OpenConnectionError(str(error)) from error
        return cast("IRawConnection", connection)

    def create_listener(self, handler_function: THandler) -> IListener:  # noqa: ARG002
        """Return a listener that only reports addresses: our own host accepts the connections."""
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
        """Return the protocol that all its addresses contain."""
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
    """A raw connection of py-libp2p, such as one through a relay, as one of our circuits."""

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
        """End the connection at once."""
        if not self._cut:
            self._cut = True
            self._start(self._raw.close)

    def _check(self) -> None:
        if self._cut:
            raise StreamBrokenError("the raw connection was closed here")


class _Tasks:
    """A replacement of Swarm's manager, in which each task fails alone and starts cheaply."""

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
    """An auto-connector that neither dials nor remembers peers, whatever the watermarks."""

    async def run_background_task(self, nursery: trio.Nursery) -> None:
        """Start nothing."""

    async def maybe_connect(self) -> None:
        """Dial nobody."""

    def record_disconnect(self, peer_id: ID) -> None:
        """Remember nothing."""


class NodeSwarm(Swarm):
    """A Swarm whose tasks fail independently, and that uses our upgrade for raw connections."""

    def __init__(self, own: ID, peerstore: BoundedPeerStore, plugin: Plugin) -> None:
        """Create the Swarm; the functions below must be set before it runs."""
        self._manager: Any = None
        self.secure_dialled: Callable[[IRawConnection, ID], Awaitable[IMuxedConn]]
        self.secure_accepted: Callable[[IRawConnection, Multiaddr], Awaitable[IMuxedConn]]
        # Waits until no connection with a peer is waiting to be added.
        self.settled: Callable[[ID], Awaitable[None]]
        # No upgrader: connections already have our handshake and muxer.
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
        """Run a function of py-libp2p in the background; its exceptions end it alone."""
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
        """Notify all notifees; a time-out keeps one from delaying a connection for long."""
        with trio.move_on_after(NOTIFEE_S) as scope:
            await super()._notify(method, *args)
        if scope.cancelled_caught:
            log.warning("a notifee of py-libp2p took over %g s for %s", NOTIFEE_S, method)

    async def _dial_with_retry(
        self, addr: Multiaddr, peer_id: ID, source: tuple[str, int] | None = None
    ) -> INetConn:
        """Dial, unless the address names another peer than the requested one."""
        named = peer_of(addr)
        if named is not None and named != peer_id:
            raise SwarmException(f"Peer ID mismatch: {addr} is not an address of {peer_id}")
        return await super()._dial_with_retry(addr, peer_id, source)

    async def new_stream(self, peer_id: ID) -> INetStream:
        """Open a stream on an existing or a newly dialled connection; raises SwarmException.

        It first waits for our connections with the peer that are about to be added to Swarm.
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
    """Return an address without the PeerId at its end."""
    names = [each.name for each in address.protocols()]
    return address.decapsulate_code(_P2P) if names[-1:] == ["p2p"] else address
