"""Peers that came and went: what a node keeps of them, and gives back."""

from __future__ import annotations

import gc
import tracemalloc

from multiaddr import Multiaddr

from bbnode.access.conduct import FORGIVEN_AFTER_S, Offence
from bbnode.access.policy import Policy
from bbnode.daemon.network.passing import PassingPeers
from bbnode.ir.caps import FORGOTTEN_AFTER_S
from bbnode.ir.envelope import WireEnvelope, encode_envelope
from bbnode.ir.peer import PeerId
from bbnode.sim import Network
from tests.sim import programs

S = 1_000_000_000
AFTER_NS = int(FORGOTTEN_AFTER_S * S)


class Clock:
    now_ns = 10 * S

    def __call__(self) -> int:
        return self.now_ns


def node():
    return Network().add("asker", programs.ask(quorum=1), ["asker"]).node


def comes(made, policy: Policy, peer: PeerId, number: int, clock: Clock) -> None:
    """An identity connects, sends one envelope that claims an address, and goes."""
    raw = peer.to_bytes()
    claimed = Multiaddr(f"/ip4/9.{number >> 8 & 255}.{number & 255}.1/tcp/{1 + number % 9}")
    policy.decide_connection(
        peer, credentials=b"", classes=("worker",), now_ns=clock.now_ns, unix_s=1.0
    )
    made.peer_connected(peer, ("worker",))
    envelope = WireEnvelope(src_peer_bytes=raw, src_peer_addresses=(claimed.to_bytes(),))
    policy.decide_envelope(peer, 100, now_ns=clock.now_ns, unix_s=1.0)
    data = b"".join(encode_envelope(envelope))
    made.deliver_inbound(peer, data, Multiaddr(f"/ip4/8.8.8.8/tcp/{1024 + number}"))
    made.poll(clock.now_ns)


def test_memory_of_many_identities_is_given_back() -> None:
    made, policy, clock = node(), Policy(), Clock()
    passing = PassingPeers(made, policy, clock)
    friend = PeerId.from_seed("friend")
    made.add_addresses(friend, [Multiaddr("/ip4/10.0.0.1/tcp/1")])
    comes(made, policy, PeerId.from_seed("first"), 0, clock)
    made.peer_disconnected(PeerId.from_seed("first"), "gone")
    stays = PeerId.from_seed("stays")
    comes(made, policy, stays, 1, clock)
    peers = [PeerId.from_seed(f"p{i}") for i in range(2000)]
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number, peer in enumerate(peers):
            comes(made, policy, peer, number, clock)
            policy.conduct.note(peer, Offence.UNDECODABLE, clock.now_ns)
            made.peer_disconnected(peer, "gone")
            made.poll(clock.now_ns)
        full = tracemalloc.get_traced_memory()[0] - before
        assert passing.look() == 0  # they may come back
        assert len(made.address_book()) > 2000
        clock.now_ns += max(AFTER_NS, int(FORGIVEN_AFTER_S * S)) + S
        assert passing.look() >= 2000
        gc.collect()
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert set(made.address_book()) >= {friend, stays}
    assert not set(made.address_book()) & set(peers)
    assert not policy.conduct.records
    assert set(policy._admitted) <= {stays}
    assert left < full / 4


def test_who_spoke_a_while_ago_is_kept() -> None:
    made, policy, clock = node(), Policy(), Clock()
    passing = PassingPeers(made, policy, clock)
    early, late = PeerId.from_seed("early"), PeerId.from_seed("late")
    for peer in (early, late):
        comes(made, policy, peer, 1, clock)
        made.peer_disconnected(peer, "gone")
        made.poll(clock.now_ns)
    passing.look()
    clock.now_ns += AFTER_NS - 10 * S
    comes(made, policy, late, 1, clock)
    made.peer_disconnected(late, "gone")
    made.poll(clock.now_ns)
    clock.now_ns += 10 * S
    assert passing.look() == 1
    assert late in made.address_book()
    assert early not in made.address_book()
    assert policy.heard_ns(late)
    clock.now_ns += AFTER_NS
    passing.look()
    assert late not in made.address_book()
