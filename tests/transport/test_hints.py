"""Which of a peer's own addresses are dialled."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.ir.caps import MAX_HINTS
from bbnode.ir.peer import PeerId
from bbnode.transport.hints import MAY_CLAIM, Scope, dialable, ip_of, scope_of

PEER, RELAY = PeerId.from_seed("peer"), PeerId.from_seed("relay")


def at(host: str, port: int = 4001) -> Multiaddr:
    kind = "ip6" if ":" in host else "ip4"
    return Multiaddr(f"/{kind}/{host}/tcp/{port}/p2p/{PEER}")


def through(host: str) -> Multiaddr:
    return Multiaddr(f"/ip4/{host}/tcp/1/p2p/{RELAY}/p2p-circuit/p2p/{PEER}")


ips = st.one_of(st.ip_addresses(), st.sampled_from(
    [
        ipaddress.ip_address(text)
        for text in (
            "127.0.0.1", "127.8.8.8", "10.1.2.3", "192.168.0.9", "169.254.169.254", "8.8.8.8",
            "0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "fe80::1", "fd00::1",
            "2001:4860:4860::8888", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        )
    ]
))  # fmt: skip


@pytest.mark.parametrize(
    ("host", "scope"),
    [
        ("127.0.0.1", Scope.LOOPBACK),
        ("::1", Scope.LOOPBACK),
        ("::ffff:127.0.0.1", Scope.LOOPBACK),
        ("169.254.169.254", Scope.LINK),
        ("fe80::1", Scope.LINK),
        ("10.0.0.1", Scope.PRIVATE),
        ("172.16.9.9", Scope.PRIVATE),
        ("192.168.1.1", Scope.PRIVATE),
        ("fd12::1", Scope.PRIVATE),
        ("8.8.8.8", Scope.PUBLIC),
        ("2001:4860:4860::8888", Scope.PUBLIC),
        ("0.0.0.0", Scope.NOWHERE),
        ("239.1.1.1", Scope.NOWHERE),
    ],
)
def test_how_far_an_address_reaches(host: str, scope: Scope) -> None:
    ip = ip_of(at(host))
    assert ip is not None
    assert scope_of(ip) is scope


@given(claimed=st.lists(ips, max_size=12), seen=ips, good=st.booleans())
def test_nobody_is_nearer_to_us_than_it_came_from(claimed, seen, good) -> None:
    found = dialable([at(str(ip)) for ip in claimed], seen=at(str(seen), 50_000), good=good)
    own = ip_of(at(str(seen)))
    assert own is not None
    assert len(found) <= MAX_HINTS
    assert len(set(found)) == len(found)
    for address in found:
        ip = ip_of(address)
        assert ip is not None
        assert ip == own if not good else scope_of(ip) in MAY_CLAIM[scope_of(own)]
        if scope_of(own) is Scope.PUBLIC:
            assert scope_of(ip) is Scope.PUBLIC


@given(st.sampled_from(Scope), st.sampled_from(Scope))
def test_the_table_goes_outwards_only(seen: Scope, claimed: Scope) -> None:
    order = [Scope.LOOPBACK, Scope.LINK, Scope.PRIVATE, Scope.PUBLIC]
    if claimed in MAY_CLAIM[seen]:
        assert order.index(claimed) >= order.index(seen)
    assert Scope.NOWHERE not in MAY_CLAIM[seen]


def test_a_stranger_is_dialled_where_it_came_from() -> None:
    seen = at("203.0.113.7", 50_000)
    own = at("203.0.113.7")
    claimed = [at("203.0.113.8"), own, at("127.0.0.1"), through("203.0.113.7")]
    assert dialable(claimed, seen=seen, good=False) == (own,)


def test_names_and_those_never_seen_are_not_dialled() -> None:
    name = Multiaddr(f"/dns4/example.com/tcp/1/p2p/{PEER}")
    assert dialable([name], seen=at("8.8.8.8"), good=True) == ()
    assert dialable([at("8.8.8.8")], seen=None, good=True) == ()


def test_through_a_relay_a_good_peer_counts_and_a_stranger_does_not() -> None:
    seen = through("8.8.8.8")
    # Whoever is relayed shares the address with all others of that relay.
    assert dialable([at("8.8.8.8")], seen=seen, good=False) == ()
    assert dialable([at("9.9.9.9"), at("10.0.0.1")], seen=seen, good=True) == (at("9.9.9.9"),)
    assert dialable([seen], seen=seen, good=False) == (seen,)
