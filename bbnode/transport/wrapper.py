"""A transport around another one, to which it delegates whatever a subclass does not override."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    Buffer,
    EventStream,
    PeerInfo,
    ProtocolHandler,
    ProtocolStream,
    Transport,
    TransportMetrics,
    Unsent,
    WantedPeer,
)
from bbnode.transport.routing import Routing, RoutingSetup
from bbnode.transport.topics import Topics, TopicSetup

if TYPE_CHECKING:
    import trio


class TransportWrapper(Transport):
    """Delegates every call to `inner`, an installed transport created by `make_transport`."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities  # type: ignore[misc]  # as the inner one has them

    @property
    def peer_id(self) -> PeerId:
        return self.inner.peer_id

    @property
    def events(self) -> EventStream:
        return self.inner.events

    def listen_addresses(self) -> list[Multiaddr]:
        return self.inner.listen_addresses()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        await self.inner.run(task_status=task_status)

    async def stop(self, grace_s: float) -> None:
        await self.inner.stop(grace_s)

    def send(self, peer: PeerId, data: Buffer | Sequence[Buffer], *, tag: int) -> None:
        self.inner.send(peer, data, tag=tag)

    def unsent(self) -> list[Unsent]:
        return self.inner.unsent()

    def keep_connected(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        self.inner.keep_connected(peer, addresses)

    def forget(self, peer: PeerId) -> None:
        self.inner.forget(peer)

    def disconnect(self, peer: PeerId) -> None:
        self.inner.disconnect(peer)

    def peers(self) -> list[PeerInfo]:
        return self.inner.peers()

    def peer_info(self, peer: PeerId) -> PeerInfo | None:
        return self.inner.peer_info(peer)

    def moved(self) -> dict[PeerId, tuple[int, int]]:
        return self.inner.moved()

    def wanted(self) -> list[WantedPeer]:
        return self.inner.wanted()

    def counters(self) -> dict[str, int]:
        return self.inner.counters()

    def metrics(self) -> TransportMetrics:
        return self.inner.metrics()

    def set_credentials(self, credentials: bytes) -> None:
        self.inner.set_credentials(credentials)

    def reauthorize(self) -> None:
        self.inner.reauthorize()

    def register_protocol(self, protocol_id: str, handler: ProtocolHandler) -> None:
        self.inner.register_protocol(protocol_id, handler)

    def register_for_any(self, protocol_id: str, handler: ProtocolHandler) -> None:
        self.inner.register_for_any(protocol_id, handler)

    def open_stream(
        self, peer: PeerId, protocol_id: str
    ) -> AbstractAsyncContextManager[ProtocolStream]:
        return self.inner.open_stream(peer, protocol_id)

    @property
    def libp2p_host(self) -> Any:
        return self.inner.libp2p_host

    def routing(self, setup: RoutingSetup) -> Routing:
        return self.inner.routing(setup)

    def topics(self, setup: TopicSetup) -> Topics:
        return self.inner.topics(setup)

    async def probe(self, address: Multiaddr, peer: PeerId) -> None:
        await self.inner.probe(address, peer)
