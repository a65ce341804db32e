"""The host's address book on `Node`: add, drop, forget."""

from __future__ import annotations

import pytest
from multiaddr import Multiaddr

from bbnode.engine import Node
from bbnode.engine.errors import AddressBookFull, InvalidPeerAddress
from bbnode.ir.caps import MAX_ADDRESSES_PER_PEER
from tests.engine.support import address, bring_up, peer
from tests.engine.test_replay import Log, replay
from tests.engine.test_snapshot_everywhere import MADE


def node_of(**more: object) -> Node:
    return bring_up(MADE, "server", **more)


def addresses_of(node: Node, number: int) -> tuple[Multiaddr, ...]:
    return node.peer_standing(peer(number)).addresses


def test_addresses_are_added_dropped_and_forgotten() -> None:
    node = node_of()
    node.add_addresses(peer(7), [address(1), address(2)])
    node.add_addresses(peer(7), [address(2), address(3)])
    assert addresses_of(node, 7) == (address(1), address(2), address(3))
    assert node.drop_address(peer(7), address(2))
    assert not node.drop_address(peer(7), address(2))
    assert node.address_book()[peer(7)] == (address(1), address(3))
    assert node.forget_peer(peer(7))  # however often something was added
    assert not node.forget_peer(peer(7))
    assert peer(7) not in node.address_book()


def test_the_book_stays_over_a_restart() -> None:
    node = node_of()
    node.add_addresses(peer(7), [address(1)])
    again = node_of()
    again.restore(node.snapshot(0), 0)
    assert addresses_of(again, 7) == (address(1),)
    assert again.forget_peer(peer(7))


def test_a_replay_does_the_same() -> None:
    log = Log()
    node = node_of(record=log, seed=3)
    node.add_addresses(peer(7), [address(1), address(2)])
    node.add_addresses(peer(8), [address(1)])
    node.drop_address(peer(7), address(1))
    node.forget_peer(peer(8))
    node.poll(0)
    replayed, *_ = replay(log.data)
    assert replayed.node.address_book() == node.address_book()


def test_what_can_be_no_address_of_the_peer_is_refused_and_changes_nothing() -> None:
    node = node_of()
    own = node.address_book()
    elsewhere = Multiaddr(f"/ip4/10.0.0.1/tcp/1/p2p/{peer(9)}")
    for given in ([], [elsewhere], [address(1), elsewhere]):
        with pytest.raises(InvalidPeerAddress):
            node.add_addresses(peer(7), given)
    for refused in (
        lambda: node.add_addresses(node.peer_id, [address(1)]),
        lambda: node.drop_address(node.peer_id, address(1)),
        lambda: node.forget_peer(node.peer_id),
    ):
        with pytest.raises(InvalidPeerAddress, match="own addresses"):
            refused()
    with pytest.raises(AddressBookFull, match="forget one first"):
        node.add_addresses(peer(7), [address(i) for i in range(MAX_ADDRESSES_PER_PEER + 1)])
    assert node.address_book() == own
    node.add_addresses(peer(9), [elsewhere])
    assert addresses_of(node, 9) == (elsewhere,)
