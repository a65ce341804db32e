"""Who may talk: the hook is asked at every place, and what it refuses goes no further."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import trio

from bbnode.access.decision import Standing
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    ConnectionClosed,
    ConnectionOpened,
    DeliveryFailed,
    Direction,
    EnvelopeReceived,
    Hello,
    HelloRefused,
    turned_away,
)
from bbnode.transport.errors import DeniedPeerError, NotAllowedError, NotConnectedError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.transport import Libp2pTransport
from tests.patience import PATIENCE_S
from tests.transport.test_libp2p_backend import CALM, LOOPBACK, next_event

# Over both transports.
pytestmark = pytest.mark.usefixtures("each_transport")


@dataclass
class Answer:
    allowed: bool = True
    reason: str = ""
    wait_s: float = 0.0
    standing: Standing = Standing.STRANGER


@dataclass
class Rules:
    """An authorizer that a test can change."""

    blocked: set[PeerId] = field(default_factory=set)
    credentials: bytes | None = None
    largest_in: int = 2**40
    largest_out: int = 2**40

    def connection(self, peer: PeerId, direction: Direction) -> Answer:
        return Answer(False, "blocked") if peer in self.blocked else Answer()

    def hello(self, peer: PeerId, direction: Direction, hello: Hello) -> Answer:
        if self.credentials is not None and hello.credentials != self.credentials:
            return Answer(False, "no_member")
        return Answer()

    def envelope(self, peer: PeerId, direction: Direction, size: int) -> Answer:
        largest = self.largest_in if direction is Direction.INBOUND else self.largest_out
        return Answer(size <= largest, "" if size <= largest else "budget")

    def is_known(self, peer: PeerId) -> bool:
        return True


def make(name: str, rules: Rules | None = None, credentials: bytes = b"") -> Libp2pTransport:
    return Libp2pTransport(
        Identity.from_seed(name.encode() * 32),
        listen=[LOOPBACK],
        hello=Hello(credentials=credentials),
        authorizer=rules,
        limits=CALM,
    )


async def start(nursery: trio.Nursery, *backends: Libp2pTransport) -> None:
    for backend in backends:
        await nursery.start(backend.run)


async def test_a_blocked_peer_gets_no_link_and_others_do(nursery):
    rules = Rules()
    a, b, c = make("a", rules), make("b"), make("c")
    rules.blocked.add(b.peer_id)
    await start(nursery, a, b, c)
    for other in (b, c):
        other.keep_connected(a.peer_id, a.listen_addresses())
    assert (await next_event(a, ConnectionOpened)).peer == c.peer_id
    with trio.fail_after(PATIENCE_S):
        while not a.metrics().denied.get("blocked"):
            await trio.lowlevel.checkpoint()
    assert [info.peer for info in a.peers()] == [c.peer_id]
    assert a.counters()["access.denied"] >= 1


async def test_credentials_decide_with_the_hello(nursery):
    rules = Rules(credentials=b"statement")
    a, b, c = make("a", rules), make("b", credentials=b"forged"), make("c", None, b"statement")
    await start(nursery, a, b, c)
    b.keep_connected(a.peer_id, a.listen_addresses())
    refused = await next_event(a, HelloRefused)
    assert (refused.peer, refused.reason) == (b.peer_id, "not allowed: no_member")
    b.forget(a.peer_id)
    c.keep_connected(a.peer_id, a.listen_addresses())
    assert (await next_event(a, ConnectionOpened)).hello.credentials == b"statement"


@pytest.mark.parametrize("size", [100, 200_000])
async def test_envelopes_over_a_budget_are_dropped_and_acknowledged(nursery, size):
    rules = Rules(largest_in=size - 1)
    a, b = make("a", rules), make("b")
    await start(nursery, a, b)
    b.keep_connected(a.peer_id, a.listen_addresses())
    await next_event(b, ConnectionOpened)
    b.send(a.peer_id, bytes(size), tag=1)
    b.send(a.peer_id, b"small", tag=2)
    assert (await next_event(a, EnvelopeReceived)).data == b"small"
    with trio.fail_after(PATIENCE_S):
        while b.peers()[0].queued_envelopes:
            await trio.lowlevel.checkpoint()
    assert a.metrics().denied == {"budget": 1}
    assert a.metrics().partial_bytes == 0
    assert a.counters()["inbound.envelopes"] == 1


async def test_nothing_is_sent_that_is_not_allowed(nursery):
    rules = Rules(largest_out=10)
    a, b = make("a", rules), make("b")
    await start(nursery, a, b)
    b.keep_connected(a.peer_id, a.listen_addresses())
    await next_event(a, ConnectionOpened)
    with pytest.raises(NotAllowedError, match="budget"):
        a.send(b.peer_id, [b"x" * 6, b"x" * 5], tag=1)
    a.send(b.peer_id, b"x" * 10, tag=2)
    assert (await next_event(b, EnvelopeReceived)).data == b"x" * 10


async def test_a_list_that_changes_closes_what_is_open(nursery):
    rules = Rules()
    a, b = make("a", rules), make("b")
    await start(nursery, a, b)
    b.keep_connected(a.peer_id, a.listen_addresses())
    await next_event(a, ConnectionOpened)
    a.reauthorize()
    assert a.peers()
    rules.blocked.add(b.peer_id)
    a.reauthorize()
    gone = await next_event(a, ConnectionClosed)
    assert gone.reason == "not allowed any more: blocked"


async def test_who_is_refused_waits_longer_each_time(nursery):
    """Each dial succeeds and ends with the hello: that is no reason to dial again at once."""
    a, b = make("a", Rules(credentials=b"statement")), make("b", credentials=b"forged")
    await start(nursery, a, b)
    b.keep_connected(a.peer_id, a.listen_addresses())
    times = []
    for _ in range(4):
        await next_event(a, HelloRefused)
        times.append(trio.current_time())
    # Waits of 0.2, 0.4 and 0.8 s, each 20 % shorter at most.
    assert times[-1] - times[0] >= 0.8 * (0.2 + 0.4 + 0.8)


async def test_who_is_not_admitted_is_told_why(nursery):
    a, b = make("a", Rules(credentials=b"statement")), make("b", credentials=b"forged")
    await start(nursery, a, b)
    b.keep_connected(a.peer_id, a.listen_addresses())
    gone = await next_event(b, ConnectionClosed)
    assert gone.goodbye
    assert turned_away(gone.reason) == "no_member"
    assert a.peers() == []


async def test_who_is_not_let_stay_is_told_why(nursery):
    rules = Rules()
    a, b = make("a", rules), make("b", credentials=b"statement")
    await start(nursery, a, b)
    b.keep_connected(a.peer_id, a.listen_addresses())
    await next_event(b, ConnectionOpened)
    await next_event(a, ConnectionOpened)
    rules.credentials = b"another"
    a.reauthorize()
    assert turned_away((await next_event(b, ConnectionClosed)).reason) == "no_member"
    assert turned_away("the peer said goodbye: it stops") == ""
    assert turned_away("not allowed any more: blocked") == ""  # by us


async def failed(backend: Libp2pTransport) -> DeliveryFailed:
    return await next_event(backend, DeliveryFailed)


async def test_a_peer_that_we_deny_is_not_blamed(nursery):
    """What our own rules keep from a peer that is dialled fails, and says nothing of the peer."""
    rules = Rules(credentials=b"statement")
    a, b = make("a", rules), make("b")
    await start(nursery, a, b)
    a.keep_connected(b.peer_id, b.listen_addresses())
    a.send(b.peer_id, b"hello", tag=1)
    told = await failed(a)
    assert (told.tag, told.blames_peer) == (1, False)
    with pytest.raises(DeniedPeerError) as refused:
        a.send(b.peer_id, b"hello", tag=2)
    # Whoever asks may have it dialled, and need not blame it either.
    assert isinstance(refused.value, NotConnectedError)
    assert isinstance(refused.value, NotAllowedError)


async def test_a_peer_that_cannot_be_reached_is_blamed(nursery):
    rules = Rules()
    a, b = make("a", rules), make("b")
    await start(nursery, a, b)
    addresses = b.listen_addresses()
    await b.stop(0)
    a.keep_connected(b.peer_id, addresses)
    a.send(b.peer_id, b"hello", tag=1)
    assert (await failed(a)).blames_peer


async def test_a_peer_that_is_allowed_again_comes_back_by_itself(nursery):
    rules = Rules()
    a, b = make("a", rules), make("b")
    await start(nursery, a, b)
    a.keep_connected(b.peer_id, b.listen_addresses())
    assert (await next_event(a, ConnectionOpened)).peer == b.peer_id
    rules.credentials = b"statement"
    a.reauthorize()
    await next_event(a, ConnectionClosed)
    with trio.fail_after(PATIENCE_S):
        while not a.metrics().denied.get("no_member", 0) >= 2:
            await trio.lowlevel.checkpoint()
    rules.credentials = None
    assert (await next_event(a, ConnectionOpened)).peer == b.peer_id
