"""Random walks: evenly drawn peers whatever the graph, and the lies that are refused."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.components.errors import ComponentError, ExchangeRefused, InvalidComponentConfig
from bbnode.components.selectors import random_walk
from bbnode.components.selectors.overlay import S
from bbnode.components.selectors.random_walk import RandomWalk, RandomWalkConfig, WalkStep
from bbnode.components.wire_records import UnusableMessage
from bbnode.engine import All
from bbnode.ir.envelope import CorrelationKind
from bbnode.sim import MS, LinkModel, Network
from tests.components.fakes import Peers
from tests.components.selectors.overlays import Context, address, called, compiled, peer

NONE = CorrelationKind.NONE


def walker(**config) -> RandomWalk:
    return RandomWalk(RandomWalkConfig(**config))


def connected(*peers: int, **more) -> Context:
    return Context(peers=Peers({"peer": [peer(i) for i in peers]}), **more)


def walk(origin: int, *, hops: int = 5, degree: int = 3, number: int = 9) -> bytes:
    return WalkStep(
        peer=peer(origin), addresses=(address(origin),), number=number, hops=hops, degree=degree
    ).encode()


def stepped(one: RandomWalk, payload: bytes, *around: int) -> tuple[bool, Context]:
    ctx = called(1, peers=Peers({"peer": [peer(i) for i in around]}))
    return random_walk.StepAnswer.decode(one.step(ctx, payload)).taken, ctx


def lopsided(nodes: int, link: LinkModel, **config) -> Network:
    """A ring, and a hub that is connected with half of it; `config` is that of peer-7 alone."""
    network = Network(3, mesh=False, dials=True, kept_steps=64, link=link)
    model = compiled(RandomWalk)
    for i in range(nodes):
        quiet = {"walks": 1, "period_s": 3600.0, "hops": config["hops"]}
        network.add(f"peer-{i}", model, ["peer"], config={"cohort": config if i == 7 else quiet})
    for i in range(nodes):
        network.connect(f"peer-{i}", f"peer-{(i + 1) % nodes}")
    for i in range(2, nodes - 1, 2):
        network.connect("peer-0", f"peer-{i}")
    return network


def test_walks_end_evenly_however_many_neighbours_a_peer_has() -> None:
    network = lopsided(120, LinkModel(latency_ns=1 * MS), hops=16, walks=24, pool_size=24)
    node = network["peer-7"]
    ends: Counter = Counter()
    node.node.run_bootstrap(All())
    for period in range(1, 3):
        network.run(until=period * 10 * S)
        ends.update(node.component("cohort").pool.keys())
    total = sum(ends.values())
    assert total > 30
    hub = network["peer-0"].peer_id
    # A walk that does not heed degrees would end at the hub one time in four.
    assert ends[hub] <= 3
    assert len(ends) > 0.8 * 120 * (1 - (1 - 1 / 120) ** total)
    assert node.component("cohort").lost == 0


def test_walks_that_are_lost_are_begun_once_more() -> None:
    network = lopsided(30, LinkModel(latency_ns=1 * MS, loss=0.03), hops=8, walks=8)
    node = network["peer-7"]
    node.node.run_bootstrap(All())
    network.run(until=50 * S)
    one = node.component("cohort")
    assert one.lost > 0
    assert len(one.pool) > 8
    node.checkpoint()
    network.crash(node)
    network.restart(node)
    assert node.component("cohort").pool.keys() == one.pool.keys()


def test_a_walk_is_taken_over_with_the_probability_of_the_chain() -> None:
    taken = sum(stepped(walker(seed=i), walk(2, degree=2), *range(1, 9))[0] for i in range(400))
    assert 70 <= taken <= 130  # 2 / 8 of 400
    assert all(stepped(walker(seed=i), walk(2, degree=8), *range(1, 9))[0] for i in range(20))


def test_a_walk_goes_on_stays_and_ends() -> None:
    one = walker()
    taken, ctx = stepped(one, walk(2, hops=5), 4)
    ((who, op, payload),) = ctx.requests
    passed = WalkStep.decode(payload)
    assert (taken, who, op, passed.hops, passed.degree) == (True, peer(4), "Step", 4, 1)
    # It is not taken over there, so it stays here for that hop, and goes on.
    (tag,) = one._handed_on
    ctx = connected(5)
    one.on_answer(ctx, tag, random_walk.StepAnswer(taken=False).encode())
    assert WalkStep.decode(ctx.requests[0][2]).hops == 3
    # Nobody answers there, nor is there anybody else: it ends.
    (tag,) = one._handed_on
    ctx = connected(5)
    one.on_no_answer(ctx, tag, peer(5))
    ((who, op, payload),) = ctx.sent
    assert (who, op) == (peer(2), "Arrived")
    assert random_walk.WalkEnd.decode(payload).number == 9


def test_an_end_counts_once_and_from_who_it_is() -> None:
    one, ctx = walker(walks=1, pool_size=2), connected(1)
    one.on_timer(ctx, "period")
    number = WalkStep.decode(ctx.requests[0][2]).number
    end = random_walk.WalkEnd(number=number, addresses=(address(6),)).encode()
    one.arrived(called(6, NONE), end)
    assert list(one.pool) == [peer(6)]
    ctx = called(7, NONE)
    with pytest.raises(ExchangeRefused, match="not under way"):
        one.arrived(ctx, end)
    assert ctx.refused[0][0] == peer(7)
    one.on_peer_down(Context(), peer(6))
    assert not one.pool


@pytest.mark.parametrize("payload", [walk(2, hops=16), walk(2, degree=0)])
def test_walks_that_nobody_honest_hands_on_are_refused(payload: bytes) -> None:
    with pytest.raises(ExchangeRefused, match="hops here is 16"):
        stepped(walker(), payload, 4)


@pytest.mark.parametrize("config", [{"hops": 0}, {"walks": 65}, {"pool_size": 1025}])
def test_settings_have_bounds(config) -> None:
    with pytest.raises(InvalidComponentConfig, match=next(iter(config))):
        walker(**config)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_with_the_one_error(payload: bytes) -> None:
    for of in (WalkStep, random_walk.StepAnswer, random_walk.WalkEnd):
        try:
            found = of.decode(payload)
        except UnusableMessage:
            continue
        assert of.decode(found.encode()) == found


@pytest.mark.parametrize("data", [b"x", b"\x81\xa5draws\x01", b"\x91\x01"])
def test_a_state_of_somebody_else_is_refused(data: bytes) -> None:
    with pytest.raises(ComponentError, match="not ours"):
        walker().restore(data)
