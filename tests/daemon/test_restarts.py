"""Who was restarted is asked for our requests; what it lost is told, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from multiaddr import Multiaddr

from bbnode.daemon.network import restarts
from bbnode.daemon.network.restarts import Restarts
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    Capability,
    ConnectionOpened,
    DeliveryFailed,
    Direction,
    Hello,
    Unsent,
)
from bbnode.transport.errors import StreamBrokenError

A, B = PeerId.from_seed("a"), PeerId.from_seed("b")
OLD, NEW = "0" * 15 + "1", "0" * 15 + "2"


class Room:
    """A node and a transport, as far as they are asked, and a peer that has `has`."""

    capabilities = frozenset(Capability)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Of A: request id -> tag.
        self.requests = {100: 1, 200: 2, 300: 3}
        self.unsent_tags: list[int] = []
        self.kept_tags: frozenset[int] = frozenset()
        self.has: set[int] = set()
        self.error: Exception | None = None
        self.asked: list[tuple[PeerId, tuple[int, ...]]] = []
        self.lost: list[tuple[PeerId, int]] = []
        self.failed: list[tuple[PeerId, int, bool]] = []
        monkeypatch.setattr(restarts.pending_exchange, "lost", self._lost)
        self.made = self.restarts()

    def restarts(self) -> Restarts:
        return Restarts(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            kept=lambda _peer: self.kept_tags,
            take_received=lambda: self.lost.append((B, 0)),
        )

    async def _lost(self, _transport: Any, peer: PeerId, ids: Sequence[int]) -> frozenset[int]:
        self.asked.append((peer, tuple(ids)))
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        return frozenset(ids) - self.has

    def register_protocol(self, protocol: str, handler: Any) -> None:
        assert protocol.startswith("/bbnode/pending/")

    def unsent(self) -> list[Unsent]:
        return [Unsent(peer=A, tag=tag, parts=()) for tag in self.unsent_tags]

    def awaited(self, peer: PeerId) -> dict[int, int]:
        return dict(self.requests) if peer == A else {}

    def request_lost(self, peer: PeerId, tag: int) -> None:
        self.lost.append((peer, tag))

    def send_failed(self, peer: PeerId, _reason: str, *, tag: int, blames_peer: bool) -> None:
        self.failed.append((peer, tag, blames_peer))

    def connects(self, session: str, peer: PeerId = A) -> None:
        self.made.heard(
            ConnectionOpened(
                peer=peer,
                address=Multiaddr("/memory/1"),
                direction=Direction.INBOUND,
                hello=Hello(session_id=session),
            )
        )

    def doubts(self, tag: int, peer: PeerId = A) -> bool:
        return self.made.doubt(DeliveryFailed(peer=peer, tag=tag, reason="x", in_doubt=True))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.made.run)
            yield
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    return Room(monkeypatch)


async def test_a_new_process_is_asked_and_what_it_lost_is_told(room: Room) -> None:
    room.requests, room.has = {}, {200}
    async with room.running():
        room.connects(OLD)
        room.requests = {100: 1, 200: 2, 300: 3}
        room.connects(OLD)  # the line was cut, no more
        await trio.testing.wait_all_tasks_blocked()
        assert room.asked == []
        room.connects(NEW)
    assert room.asked == [(A, (100, 200, 300))]
    # An answer that came meanwhile is taken before its request is given up.
    assert room.lost == [(B, 0), (A, 1), (A, 3)]


async def test_after_our_own_restart_every_peer_that_owes_an_answer_is_asked(room: Room) -> None:
    async with room.running():
        room.connects(OLD, peer=B)
        room.connects(OLD)
    assert [peer for peer, _ in room.asked] == [A]


async def test_what_has_not_gone_out_yet_goes_to_the_new_process(room: Room) -> None:
    room.unsent_tags, room.kept_tags = [2], frozenset({3})
    async with room.running():
        room.connects(NEW)
    assert room.asked == [(A, (100,))]
    assert room.lost == [(B, 0), (A, 1)]


async def test_what_was_under_way_is_asked_for(room: Room) -> None:
    room.has = {100, 300}
    async with room.running():
        assert room.doubts(1)
        assert room.doubts(2)
        room.connects(NEW)
        # No request of ours: a send that nobody waits for fails as ever.
        assert not room.doubts(77)
        assert not room.doubts(1, peer=B)
    assert room.asked == [(A, (100, 200, 300))]
    assert room.lost == [(B, 0), (A, 2)]
    assert room.failed == []


async def test_of_who_does_not_say_only_what_was_under_way_is_given_up(room: Room) -> None:
    room.error = StreamBrokenError("it does not speak it")
    async with room.running():
        assert room.doubts(2)
        room.connects(NEW)
    assert room.lost == []
    assert room.failed == [(A, 2, True)]


async def test_a_transport_without_streams_leaves_all_as_it_was(room: Room) -> None:
    room.capabilities = frozenset()
    made = room.restarts()
    assert not made.doubt(DeliveryFailed(peer=A, tag=1, reason="x", in_doubt=True))
