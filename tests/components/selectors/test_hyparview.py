"""HyParView: a connected, symmetric overlay that mends itself, and the lies that it refuses."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.components.errors import ComponentError, ExchangeRefused, InvalidComponentConfig
from bbnode.components.selectors import hyparview
from bbnode.components.selectors.hyparview import HyParView, HyParViewConfig
from bbnode.components.selectors.overlay import S
from bbnode.components.selectors.records import PeerRecord
from bbnode.components.wire_records import UnusableMessage
from bbnode.ir.envelope import CorrelationKind
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

NONE = CorrelationKind.NONE


def record(i: int) -> PeerRecord:
    return PeerRecord(peer=peer(i), addresses=(address(i),))


def holding(active: tuple[int, ...], passive: tuple[int, ...] = (), **config) -> HyParView:
    made = HyParView(HyParViewConfig(**config))
    made.active = {peer(i): record(i) for i in active}
    made.passive = {peer(i): record(i) for i in passive}
    return made


def connected(*peers: int, **more) -> Context:
    return Context(peers=Peers({"peer": [peer(i) for i in peers]}), **more)


def shuffle(origin: int, *offered: int, hops: int = 6, number: int = 5) -> bytes:
    return hyparview.PassiveShuffle(
        peer=peer(origin),
        addresses=(address(origin),),
        hops=hops,
        number=number,
        offered=tuple(map(record, offered)),
    ).encode()


# --- the overlay -----------------------------------------------------------------------------


def test_three_hundred_are_connected_symmetric_and_mend_at_once() -> None:
    network = grown(HyParView, 300, 3)
    graph = views(network)
    assert largest(graph) == 300
    degrees = in_degrees(graph)
    assert statistics.mean(degrees) > 4.7
    assert max(degrees) <= 6
    mutual = sum(one in graph[other] for one, view in graph.items() for other in view)
    assert mutual > 0.99 * sum(degrees)
    for i in range(1, 300, 5):
        network.crash(f"peer-{i}")
        network.crash(f"peer-{i + 1}")
    network.run(until=40 * S)  # one period
    graph = views(network)
    assert largest(graph) == len(graph) == 180
    assert not any(view - graph.keys() for view in graph.values())
    assert statistics.mean(in_degrees(graph)) > 4.5


def test_a_restored_node_goes_on_with_its_views() -> None:
    network = grown(HyParView, 12, 3, active_size=3)
    node = network["peer-3"]
    kept = dict(node.component("cohort").active), dict(node.component("cohort").passive)
    node.checkpoint()
    network.crash(node)
    network.restart(node)
    risen = node.component("cohort")
    assert (risen.active, risen.passive) == kept
    network.run(until=network.now_ns + 30 * S)
    graph = views(network)
    assert graph[node.peer_id]
    assert all(node.peer_id in graph[other] for other in graph[node.peer_id])
    assert not node.failures()


# --- one node ----------------------------------------------------------------------------------


def test_a_newcomer_is_taken_by_a_full_node_and_walks_on() -> None:
    one, ctx = holding((1, 2), active_size=2), called(7)
    one.join(ctx, hyparview.Introduction(addresses=(address(7),)).encode())
    assert peer(7) in one.active
    (gone,) = one.passive
    assert sorted((who, op) for who, op, _ in ctx.sent) == sorted(
        [(gone, "Disconnect"), (({peer(1), peer(2)} - {gone}).pop(), "ForwardJoin")]
    )


def test_a_walk_goes_on_stands_by_half_way_and_ends_with_a_neighbour() -> None:
    def walking(one: HyParView, hops: int) -> Context:
        ctx = called(1, NONE)
        walk = hyparview.ForwardedJoin(peer=peer(7), addresses=(address(7),), hops=hops)
        one.forward_join(ctx, walk.encode())
        return ctx

    one = holding((1, 2))
    ((who, op, payload),) = walking(one, 6).sent
    assert (who, op, one.passive) == (peer(2), "ForwardJoin", {})
    assert hyparview.ForwardedJoin.decode(payload).hops == 5
    walking(one, 3)
    assert one.passive == {peer(7): record(7)}
    ((who, op, payload),) = walking(one, 0).requests
    assert (who, op) == (peer(7), "Neighbour")
    assert hyparview.NeighbourRequest.decode(payload).urgent
    with pytest.raises(ExchangeRefused, match="7 more hops; active_walk here is 6"):
        walking(one, 7)


def test_who_fails_is_replaced_by_the_first_that_answers() -> None:
    one, ctx = holding((1, 2), (3, 4), active_size=2), Context()
    one.on_peer_down(ctx, peer(1))
    ((asked, op, payload),) = ctx.requests
    assert op == "Neighbour"
    assert not hyparview.NeighbourRequest.decode(payload).urgent  # one is left
    one.on_no_answer(ctx, "Neighbour", asked)
    assert asked not in one.passive
    other = ctx.requests[1][0]
    answer = hyparview.NeighbourAnswer(addresses=(address(9),), accepted=True)
    one.on_answer(Context(source_peer=other), "Neighbour", answer.encode())
    assert one.active.keys() == {peer(2), other}
    assert one.passive == {}


def test_a_neighbour_request_is_turned_away_unless_it_is_urgent() -> None:
    one = holding((1, 2), active_size=2)
    for urgent, accepted in ((False, False), (True, True)):
        ask = hyparview.NeighbourRequest(addresses=(address(7),), urgent=urgent)
        said = hyparview.NeighbourAnswer.decode(one.neighbour(called(7), ask.encode()))
        assert said.accepted is accepted
    assert peer(7) in one.active
    assert len(one.active) == 2
    one.disconnect(called(7, NONE), b"")
    assert peer(7) in one.passive


def test_once_in_a_period_the_views_are_mended_and_shuffled() -> None:
    one, ctx = holding((1, 2, 3), (4, 5, 6), active_size=3), connected(1, 2)
    one.on_timer(ctx, "period")
    assert one.active.keys() == {peer(1), peer(2)}
    assert ctx.requests[0][1] == "Neighbour"
    ((_, op, payload),) = ctx.sent
    said = hyparview.PassiveShuffle.decode(payload)
    assert (op, said.peer, said.hops, len(said.offered)) == ("Shuffle", ctx.self_peer, 6, 4)
    reply = hyparview.ShuffleReply(number=said.number, offered=(record(8), record(9)))
    one.shuffle_reply(called(5, NONE), reply.encode())
    assert {peer(8), peer(9)} <= one.passive.keys()
    with pytest.raises(ExchangeRefused, match="nobody asked for"):
        one.shuffle_reply(called(5, NONE), reply.encode())
    alone, ctx = holding(()), connected(1)
    alone.on_timer(ctx, "period")
    assert [(who, op) for who, op, _ in ctx.requests] == [(peer(1), "Join")]


def test_a_shuffle_ends_with_an_answer_to_who_began_it() -> None:
    one, ctx = holding((1, 2), (4, 5)), called(1, NONE)
    one.shuffle(ctx, shuffle(7, 8, hops=0))
    ((who, op, payload),) = ctx.sent
    assert (who, op) == (peer(7), "ShuffleReply")
    assert len(hyparview.ShuffleReply.decode(payload).offered) == 2
    assert one.passive.keys() == {peer(i) for i in (4, 5, 7, 8)}
    # Who is no neighbour any more is told so, once it shows that it believes to be one.
    ctx = called(9, NONE)
    one.shuffle(ctx, shuffle(9, hops=6))
    assert (peer(9), "Disconnect", b"") in ctx.sent


# --- lies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (shuffle(7, *range(10, 19)), "9 peers in one exchange; 8 are taken"),
        (shuffle(7, 8, 8), "stands twice"),
        (shuffle(7, 7), "names itself"),
        (shuffle(7, 8, hops=9), "9 more hops"),
    ],
)
def test_shuffles_that_nobody_honest_sends_are_refused_with_the_name(payload, reason) -> None:
    one, ctx = holding((1, 2)), called(1, NONE)
    with pytest.raises(ExchangeRefused, match=reason):
        one.shuffle(ctx, payload)
    assert not one.passive
    assert not ctx.sent
    assert ctx.refused[0][0] == peer(1)


def test_a_flood_ends_with_the_members_share_of_a_period() -> None:
    one = holding((1, 2))
    for _ in range(HyParView.calls_of_one):
        one.disconnect(called(7, NONE), b"")
    with pytest.raises(ExchangeRefused, match="over 256 calls"):
        one.disconnect(called(7, NONE), b"")
    one.disconnect(called(8, NONE), b"")
    with pytest.raises(ExchangeRefused, match="a request"):
        one.disconnect(called(8), b"")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"active_size": 1}, "active_size has to be in 2 .. 64"),
        ({"passive_walk": 7}, "passive_walk has to be in 0 .. 6"),
        ({"shuffle_passive": 30}, "shuffle_passive has to be in 0 .. 29"),
    ],
)
def test_settings_have_bounds(config, problem: str) -> None:
    with pytest.raises(InvalidComponentConfig, match=problem):
        holding((), **config)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_with_the_one_error(payload: bytes) -> None:
    for of in (
        hyparview.Introduction,
        hyparview.NeighbourRequest,
        hyparview.NeighbourAnswer,
        hyparview.ForwardedJoin,
        hyparview.PassiveShuffle,
        hyparview.ShuffleReply,
    ):
        try:
            found = of.decode(payload)
        except UnusableMessage:
            continue
        assert of.decode(found.encode()) == found


@pytest.mark.parametrize("data", [b"x", b"\x81\xa5draws\x01", b"\x91\x01"])
def test_a_state_of_somebody_else_is_refused(data: bytes) -> None:
    with pytest.raises(ComponentError, match="not ours"):
        holding(()).restore(data)
