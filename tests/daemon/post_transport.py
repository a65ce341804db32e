"""A transport as another package would bring it: what is sent is put into the other's events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import trio
from multiaddr import Multiaddr

from bbnode.transport import (
    COUNTERS,
    Buffer,
    ConnectionClosed,
    ConnectionOpened,
    Direction,
    EnvelopeReceived,
    EventStream,
    NotConnectedError,
    PeerId,
    PeerInfo,
    Transport,
    TransportMetrics,
    TransportSetup,
    Unsent,
    WantedPeer,
)

RUNNING: dict[PeerId, PostTransport] = {}
SETTINGS: list[dict[str, Any]] = []


class PostTransport(Transport):
    def __init__(self, setup: TransportSetup) -> None:
        SETTINGS.append(dict(setup.settings))
        self.setup, self.hello = setup, setup.hello
        self._put, self._events = trio.open_memory_channel[Any](math.inf)
        self._up: dict[PeerId, PeerInfo] = {}
        self._wanted: dict[PeerId, tuple[Multiaddr, ...]] = {}
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._stop = trio.Event()

    @property
    def peer_id(self) -> PeerId:
        return self.setup.identity.peer_id

    @property
    def events(self) -> EventStream:
        return self._events

    def listen_addresses(self) -> list[Multiaddr]:
        return [Multiaddr(f"/memory/1/p2p/{self.peer_id}")]

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        RUNNING[self.peer_id] = self
        for each in list(RUNNING.values()):
            each._dial()
        task_status.started()
        await self._stop.wait()
        del RUNNING[self.peer_id]
        for peer in list(self._up):
            self.disconnect(peer)
        self._put.close()

    async def stop(self, grace_s: float) -> None:
        await trio.lowlevel.checkpoint()
        self._stop.set()

    def _dial(self) -> None:
        for peer in self._wanted:
            if peer not in self._up and (other := RUNNING.get(peer)):
                self._open(other, Direction.OUTBOUND)
                other._open(self, Direction.INBOUND)

    def _open(self, other: PostTransport, direction: Direction) -> None:
        policy, peer, (address,) = self.setup.authorizer, other.peer_id, other.listen_addresses()
        assert policy is None or policy.hello(peer, direction, other.hello).allowed
        up = {"peer": peer, "direction": direction, "address": address, "hello": other.hello}
        self._up[peer] = PeerInfo(**up)
        self._put.send_nowait(ConnectionOpened(**up))

    def send(self, peer: PeerId, data: Buffer | Sequence[Buffer], *, tag: int) -> None:
        if peer not in self._up:
            raise NotConnectedError(f"{peer} is not connected")
        parts = [data] if isinstance(data, Buffer) else data
        (address,) = self.listen_addresses()
        whole = b"".join(map(bytes, parts))
        RUNNING[peer]._put.send_nowait(
            EnvelopeReceived(peer=self.peer_id, data=whole, observed_address=address)
        )
        self._counters["outbound.envelopes"] += 1

    def keep_connected(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        self._wanted[peer] = tuple(addresses)
        self._dial()

    def forget(self, peer: PeerId) -> None:
        self._wanted.pop(peer, None)

    def disconnect(self, peer: PeerId) -> None:
        for one, other in ((self, peer), (RUNNING.get(peer), self.peer_id)):
            if one is not None and one._up.pop(other, None):
                gone = ConnectionClosed(peer=other, reason="goodbye", goodbye=True)
                one._put.send_nowait(gone)

    def unsent(self) -> list[Unsent]:
        return []

    def peers(self) -> list[PeerInfo]:
        return [self._up[peer] for peer in sorted(self._up)]

    def wanted(self) -> list[WantedPeer]:
        return [
            WantedPeer(peer=p, addresses=a, connected=p in self._up, failed_dials=0, last_error="")
            for p, a in sorted(self._wanted.items())
        ]

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def metrics(self) -> TransportMetrics:
        return TransportMetrics(connections=len(self._up), counters=self.counters())

    def set_credentials(self, credentials: bytes) -> None:
        self.hello = replace(self.hello, credentials=credentials)

    def reauthorize(self) -> None:
        pass


def raises(setup: TransportSetup) -> Transport:
    raise ZeroDivisionError(f"no stamps for {len(setup.settings)} settings")
