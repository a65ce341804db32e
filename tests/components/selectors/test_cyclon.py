"""Cyclon: the overlay that it keeps, and the lies that it refuses."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.components.errors import (
    ComponentError,
    ExchangeRefused,
    InvalidComponentConfig,
    UnsupportedSelection,
)
from bbnode.components.selectors.cyclon import AgedRecord, Cyclon, CyclonConfig, Exchange
from bbnode.components.selectors.overlay import CALLS_OF_ALL, CALLS_OF_ONE, S
from bbnode.components.wire_records import UnusableMessage
from bbnode.engine import steps
from bbnode.ir.caps import MAX_EXCHANGED
from bbnode.ir.envelope import CorrelationKind
from bbnode.ir.values import TRIGGER
from tests.components.fakes import Peers
from tests.components.selectors.overlays import (
    Context,
    address,
    called,
    grown,
    in_degrees,
    largest,
    peer,
    views,
)


def cyclon(**config) -> Cyclon:
    return Cyclon(CyclonConfig(**config))


def aged(i: int, age: int = 0) -> AgedRecord:
    return AgedRecord(peer=peer(i), addresses=(address(i),), age=age)


def exchange(*peers: int) -> bytes:
    return Exchange(addresses=(address(1),), neighbours=tuple(map(aged, peers))).encode()


def holding(*peers: int, **config) -> Cyclon:
    made = cyclon(**config)
    made.view = {peer(i): aged(i, age=i) for i in peers}
    return made


# --- the overlay -----------------------------------------------------------------------------


def test_three_hundred_that_know_one_become_a_random_graph_and_heal() -> None:
    network = grown(Cyclon, 300, 10, view_size=10, shuffle_size=5)
    graph = views(network)
    assert largest(graph) == 300
    degrees = in_degrees(graph)
    assert all(len(view) == 10 for view in graph.values())
    # A random graph's in-degree is binomial: a deviation of sqrt(10 * (1 - 10/300)) = 3.1.
    assert statistics.pstdev(degrees) < 3.5
    assert min(degrees) >= 1
    assert max(degrees) <= 25
    for i in range(1, 300, 5):
        network.crash(f"peer-{i}")
        network.crash(f"peer-{i + 1}")
    network.run(until=230 * S)
    graph = views(network)
    assert largest(graph) == len(graph) == 180
    dead = sum(len(view - graph.keys()) for view in graph.values())
    assert dead < 0.05 * sum(map(len, graph.values()))
    assert not [f for node in network.nodes if node.is_up for f in node.failures()]


def test_a_program_reaches_peers_that_it_was_never_connected_with() -> None:
    network = grown(Cyclon, 12, 6, view_size=4, shuffle_size=3)
    for node in network.nodes:
        node.invoke("peer", {"tick": TRIGGER})
    network.run(until=network.now_ns + S)
    assert sum(len(node.values("greeted")) for node in network.nodes) == 12


def test_a_restored_node_goes_on_with_its_view() -> None:
    network = grown(Cyclon, 10, 5, view_size=4, shuffle_size=3)
    node = network["peer-3"]
    view = dict(node.component("cohort").view)
    node.checkpoint()
    network.crash(node)
    network.restart(node)
    assert node.component("cohort").view == view
    network.run(until=network.now_ns + 30 * S)
    assert len(views(network)[node.peer_id]) == 4
    assert not node.failures()


# --- one shuffle -------------------------------------------------------------------------------


def test_the_oldest_is_asked_and_left_out_and_ages_grow() -> None:
    one = holding(1, 2, 3, 9, view_size=4, shuffle_size=3)
    ctx = Context()
    one.on_timer(ctx, "period")
    (partner, op, payload), *more = ctx.requests
    assert (partner, op, more) == (peer(9), "Shuffle", [])
    said = Exchange.decode(payload)
    assert len(said.neighbours) == 2
    assert said.addresses == ctx.addresses
    assert {r.peer: r.age for r in one.view.values()} == {peer(i): i + 1 for i in (1, 2, 3)}
    one.on_no_answer(ctx, "", peer(9))
    assert peer(9) not in one.view
    # Of what the next one answers, the first fills the empty place, the second that of one sent.
    one.on_timer(ctx, "period")
    answer = exchange(20, 21, 22)
    one.on_answer(Context(source_peer=ctx.requests[1][0]), "", answer)
    assert {peer(20), peer(21), peer(22)} <= one.view.keys()
    assert len(one.view) == 4


def test_who_is_asked_answers_with_its_own_and_takes_the_caller() -> None:
    one = holding(1, 2, 3, 4, view_size=4, shuffle_size=2)
    ctx = called(7)
    said = Exchange.decode(one.shuffle(ctx, exchange(8)))
    assert len(said.neighbours) == 2
    assert {peer(7), peer(8)} <= one.view.keys()
    assert len(one.view) == 4
    assert ctx.learned == {peer(7): (address(1),), peer(8): (address(8),)}


def test_names_of_hosts_are_no_hints_and_who_has_no_address_is_not_passed_on() -> None:
    one = holding(1, view_size=4, shuffle_size=3)
    ctx = called(7)
    name = Multiaddr("/dns4/victim.example/tcp/443")
    said = Exchange(addresses=(), neighbours=(replace(aged(8), addresses=(name,)),))
    one.shuffle(ctx, said.encode())
    assert ctx.learned == {}
    said = Exchange.decode(one.shuffle(called(5), exchange()))
    assert peer(7) not in {record.peer for record in said.neighbours}


# --- the selector ------------------------------------------------------------------------------


def test_what_can_be_selected() -> None:
    one = holding(1, 2, 3)
    assert list(one.current_view(Context())) == sorted(map(peer, (1, 2, 3)))
    assert len(one.sample(Context(), n=2)) == 2
    assert len(one.select(Context(), None, mode="all", n=0)) == 3
    with pytest.raises(UnsupportedSelection, match="near_key"):
        one.select(Context(), None, mode="near_key", n=1)
    # Nodes with the same seed and neighbours draw apart.
    draws = {holding(1, 2, 3).sample(Context(self_peer=peer(i)), n=1)[0] for i in range(10, 30)}
    assert len(draws) == 3


def test_alone_it_takes_who_is_connected() -> None:
    one, ctx = cyclon(), Context(peers=Peers({"peer": [peer(1), peer(2)]}), peer_class="peer")
    assert list(one.current_view(ctx)) == sorted([peer(1), peer(2)])
    assert ctx.timers["period"] < S
    one.on_timer(ctx, "period")
    assert ctx.timers["period"] == S
    partner = ctx.requests[0][0]
    one.on_answer(Context(source_peer=partner), "", exchange(5))
    assert one.view.keys() == {partner, peer(5)}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"view_size": 1}, "view_size has to be in 2"),
        ({"shuffle_size": 21}, "shuffle_size has to be in 1 .. 20"),
        ({"view_size": 100, "shuffle_size": 33}, "1 .. 32"),
        ({"period_s": 0}, "period_s"),
        ({"period_s": 1}, "deadline_s"),
    ],
)
def test_settings_have_bounds(config, problem: str) -> None:
    with pytest.raises(InvalidComponentConfig, match=problem):
        cyclon(**config)


# --- lies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (exchange(*range(10, 13)), "3 peers in one exchange; 2 are taken"),
        (exchange(8, 8), "stands twice"),
        (exchange(7), "names itself"),
    ],
)
def test_lists_that_nobody_honest_sends_are_refused_with_the_name(payload, reason: str) -> None:
    one, ctx = holding(1, 2, view_size=4, shuffle_size=3), called(7)
    with pytest.raises(ExchangeRefused, match=reason):
        one.shuffle(ctx, payload)
    assert one.view.keys() == {peer(1), peer(2)}
    assert [who for who, _ in ctx.refused] == [peer(7)]


def test_a_liar_gets_no_more_than_its_share_of_a_view() -> None:
    one = holding(*range(1, 11), view_size=10, shuffle_size=3)
    for turn in range(20):
        try:
            one.shuffle(called(50), exchange(100 + 2 * turn, 101 + 2 * turn))
        except ExchangeRefused:
            continue
    # Four calls in a period, each of which replaces what was sent to it, at most.
    assert len(one.view.keys() & set(map(peer, range(100, 200)))) <= 3 * CALLS_OF_ONE
    assert sum(peer(100 + i) in one.view for i in range(8, 40)) == 0


def test_floods_are_refused_until_the_period_is_over() -> None:
    one = holding(1)
    for _ in range(CALLS_OF_ONE):
        one.shuffle(called(7), exchange())
    ctx = called(7)
    with pytest.raises(ExchangeRefused, match="over 4 calls in one period"):
        one.shuffle(ctx, exchange())
    assert ctx.refused[0][0] == peer(7)
    for i in range(CALLS_OF_ALL - 1):
        one.shuffle(called(1000 + i), exchange())
    with pytest.raises(ExchangeRefused, match="over 512 members"):
        one.shuffle(called(9), exchange())
    one.shuffle(called(9, now_ns=10 * S), exchange())


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(ExchangeRefused, match="asks for nothing"):
        holding(1).shuffle(called(7, CorrelationKind.NONE), exchange())


def test_peers_of_another_network_that_somebody_names_are_asked_once_and_gone() -> None:
    network = grown(Cyclon, 3, 3, view_size=2, shuffle_size=2)
    node = network["peer-1"]
    before = set(node.component("cohort").view)
    node.component("cohort").view = {peer(i): aged(i, age=50) for i in (70, 71)}
    network.run(until=network.now_ns + 35 * S)
    assert node.component("cohort").view.keys() == before
    assert not list(node.seen(steps.OpFailed))


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_with_the_one_error(payload: bytes) -> None:
    try:
        found = Exchange.decode(payload)
    except UnusableMessage:
        return
    assert Exchange.decode(found.encode()) == found


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=MAX_EXCHANGED))
def test_exchanges_come_back_as_they_were(rows) -> None:
    said = Exchange(addresses=(address(1),), neighbours=tuple(aged(i, age) for i, age in rows))
    assert Exchange.decode(said.encode()) == said


def test_an_exchange_has_an_end() -> None:
    with pytest.raises(UnusableMessage, match="up to 32"):
        Exchange.decode(exchange(*range(33)))
    ctx = called(7)
    with pytest.raises(UnusableMessage):
        cyclon().shuffle(ctx, b"\xc1")
    assert ctx.refused[0][0] == peer(7)


@pytest.mark.parametrize("data", [b"x", b"\x91\x01", b"\x92\x01\x91\x93\x01\x02\x03"])
def test_a_state_of_somebody_else_is_refused(data: bytes) -> None:
    with pytest.raises(ComponentError, match="not ours"):
        cyclon().restore(data)
