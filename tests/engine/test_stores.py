"""Semaphores, queues and held values: what outlives an execution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.engine import Limits, errors, steps
from bbnode.engine.stores import detached
from bbnode.ir import keys, types
from bbnode.ir.caps import MAX_QUEUED
from bbnode.ir.values import TRIGGER, U64, Composite, ResponseBatch
from tests.engine.builder import Partition, model
from tests.engine.envelopes import envelope
from tests.engine.support import S, bring_up, of, peer


def events(made):
    return [(step.topic, step.value) for step in of(steps.AppEvent, made)]


def kinds(made):
    return [step.kind for step in of(steps.OpFailed, made)]


def semaphore(units: int = 1, *, release: bool = True, **more):
    """`enter` takes a unit and keeps it for 5 s; `leave` gives one back."""
    p = Partition("server", inputs=["enter", "leave"])
    p.sys("Limit.Acquire", ["enter"], "got", name="door", n=units, stamp_ns=20 * S)
    p.sys("AppNotify", ["got"], name="in")
    if release:
        p.sys("After", ["got"], "done", delay_ns=5 * S)
        p.sys("Limit.Release", ["done"], "", name="door", called="inner")
    p.sys("Limit.Release", ["leave"], "", name="door", called="outer")
    return bring_up(model(p), "server", **more)


def test_a_semaphore_lets_as_many_in_as_it_has_units_and_the_rest_in_turn() -> None:
    node = semaphore(2)
    entered = [node.deliver_event("server", "enter", TRIGGER) for _ in range(5)]
    made = node.poll(0)
    assert [e.execution for e in of(steps.AppEvent, made)] == entered[:2]
    waiting = node.waiting()
    assert [w.why for w in waiting].count("semaphore") == 3
    assert {w.whom for w in waiting if w.why == "semaphore"} == {"door"}
    assert node.counters()["semaphores.taken"] == 2
    # Both are released at 5 s; their units go to the next two, in order.
    assert [e.execution for e in of(steps.AppEvent, node.poll(5 * S))] == entered[2:4]
    assert [e.execution for e in of(steps.AppEvent, node.poll(10 * S))] == entered[4:]
    node.poll(15 * S)
    assert node.counters()["semaphores.taken"] == 0
    assert node.executions() == []


def test_a_unit_may_be_released_by_another_execution() -> None:
    node = semaphore(1, release=False)
    first, second = (node.deliver_event("server", "enter", TRIGGER) for _ in range(2))
    assert [e.execution for e in of(steps.AppEvent, node.poll(0))] == [first]
    node.deliver_event("server", "leave", TRIGGER)
    assert [e.execution for e in of(steps.AppEvent, node.poll(1))] == [second]
    assert node.counters()["semaphores.taken"] == 1


def test_who_waits_too_long_for_a_unit_fails_and_leaves_the_line() -> None:
    node = semaphore(1, release=False)
    node.deliver_event("server", "enter", TRIGGER)
    node.poll(0)
    late = node.deliver_event("server", "enter", TRIGGER)
    node.poll(1 * S)
    assert kinds(node.poll(21 * S)) == ["DeadlineExceeded"]
    patient = node.deliver_event("server", "enter", TRIGGER)
    node.poll(22 * S)
    node.deliver_event("server", "leave", TRIGGER)
    assert [e.execution for e in of(steps.AppEvent, node.poll(23 * S))] == [patient]
    assert late not in [info.execution for info in node.executions()]


def test_releasing_what_nobody_took_fails() -> None:
    node = semaphore(1)
    node.deliver_event("server", "leave", TRIGGER)
    made = node.poll(0)
    assert kinds(made) == ["LimitNotTaken"]
    assert node.counters()["semaphores.taken"] == 0


def test_an_execution_that_fails_gives_its_unit_back() -> None:
    p = Partition("server", inputs=["x"])
    p.sys("Limit.Acquire", ["x"], "got", name="door", n=1)
    p.op(keys.COMPOSITE_DOMAIN, "Unbundle", ["x"], ["a"], after=["got"], child_count=1)
    p.sys("Limit.Release", ["a"], "", name="door")
    node = bring_up(model(p), "server")
    for _ in range(2):
        node.invoke("server", {"x": TRIGGER})  # no Composite: Unbundle fails
    made = node.poll(0)
    assert kinds(made) == ["CompositeMismatch"] * 2
    assert node.counters()["limit.reclaimed"] == 2
    assert node.counters()["semaphores.taken"] == 0


def test_ops_that_disagree_on_the_units_are_refused_at_install() -> None:
    p = Partition("server", inputs=["x"])
    p.sys("Limit.Acquire", ["x"], "a", name="door", n=1)
    p.sys("Limit.Acquire", ["a"], "b", name="door", n=2)
    with pytest.raises(errors.InvalidArtifact, match="'door' 2 units"):
        bring_up(model(p), "server")


@given(st.lists(st.sampled_from(["enter", "leave"]), max_size=40), st.integers(1, 3))
def test_never_more_inside_than_units(moves, units) -> None:
    node = semaphore(units, release=False)
    inside, line, failed = 0, 0, 0
    for now, move in enumerate(moves):
        node.deliver_event("server", move, TRIGGER)
        made = node.poll(now)
        if move == "enter" and inside < units:
            inside += 1
        elif move == "enter":
            line += 1
        elif line:
            line -= 1
        elif inside:
            inside -= 1
        else:
            failed += 1
            assert kinds(made) == ["LimitNotTaken"]
        assert node.counters()["semaphores.taken"] == inside
        assert len(node.waiting()) == line


def queue(**more):
    p = Partition("server", inputs=["put", "get"])
    p.sys("Serialize.Enqueue", ["put"], "done", queue="q")
    p.sys("AppNotify", ["done"], name="stored")
    p.sys("Serialize.Dequeue", ["get"], "value", queue="q", stamp_ns=20 * S)
    p.sys("AppEmit", ["value"], name="got")
    return bring_up(model(p), "server", **more)


@given(st.lists(st.sampled_from(["put", "get"]), max_size=40))
def test_a_queue_gives_every_value_once_and_in_order(moves) -> None:
    node = queue()
    got = []
    for now, move in enumerate(moves):
        node.deliver_event("server", move, U64(now) if move == "put" else TRIGGER)
        got += [value for topic, value in events(node.poll(now)) if topic == "got"]
    put = [U64(now) for now, move in enumerate(moves) if move == "put"]
    takers = moves.count("get")
    assert got == put[:takers]
    assert node.counters()["queues.values"] == max(len(put) - takers, 0)
    assert len(node.waiting()) == max(takers - len(put), 0)
    kept = node.counters()["queues.values"]
    assert (node.counters()["ingress.bytes"] > 0) == bool(kept or node.executions())


def test_who_waits_too_long_for_a_value_fails_and_takes_none() -> None:
    node = queue()
    node.deliver_event("server", "get", TRIGGER)
    node.poll(0)
    assert [w.why for w in node.waiting()] == ["value of a queue"]
    assert kinds(node.poll(20 * S)) == ["DeadlineExceeded"]
    node.deliver_event("server", "put", U64(1))
    assert events(node.poll(21 * S)) == [("stored", TRIGGER)]
    assert node.counters()["queues.values"] == 1


def test_a_full_queue_and_a_spent_budget_refuse() -> None:
    node = queue()
    for n in range(MAX_QUEUED + 1):
        node.deliver_event("server", "put", U64(n))
    assert kinds(node.poll(0)) == ["QueueFull"]
    assert node.counters()["queues.values"] == MAX_QUEUED
    small = queue(limits=Limits(ingress_bytes=2500))
    for _ in range(2):
        small.deliver_event("server", "put", np.zeros(1000, np.uint8))
        made = small.poll(0)
    assert kinds(made) == ["BudgetExceeded"]
    assert small.counters()["ingress.bytes"] == 1000
    small.deliver_event("server", "get", TRIGGER)
    small.poll(1)
    assert small.counters()["ingress.bytes"] == 0


def hold():
    p = Partition("server", inputs=["put", "get"])
    p.sys("Hold.Stash", ["put"], "", named={"slot": "h"})
    p.sys("Hold.Flush", ["get"], "value", named={"slot": "h"})
    p.sys("AppEmit", ["value"], name="got")
    return bring_up(model(p), "server")


def test_a_hold_keeps_the_newest_value_and_gives_it_once() -> None:
    node = hold()
    for n in (1, 2):
        node.deliver_event("server", "put", U64(n))
        node.poll(n)
    assert node.counters()["holds.values"] == 1
    for _ in range(2):
        node.deliver_event("server", "get", TRIGGER)
    made = node.poll(3)
    assert events(made) == [("got", U64(2))]
    assert kinds(made) == ["NothingHeld"]
    assert node.counters()["ingress.bytes"] == 0


def test_what_is_kept_does_not_keep_the_envelope() -> None:
    p = Partition("server", inputs=["get"])
    p.recv("x", node=types.TENSOR_FLOAT)
    p.sys("Hold.Stash", ["x"], "", named={"slot": "h"})
    p.sys("Hold.Flush", ["get"], "value", named={"slot": "h"})
    p.sys("AppEmit", ["value"], name="got")
    node = bring_up(model(p), "server")
    node.peer_connected(peer(1), ["client"])
    node.deliver_inbound(peer(1), envelope(peer(1), p.site("x"), np.ones(4, np.float32)))
    node.poll(0)
    assert node.counters()["ingress.bytes"] == 16
    node.invoke("server", {"get": TRIGGER})
    ((_, value),) = events(node.poll(1))
    assert value.base is None
    assert not value.flags.writeable
    assert value.tolist() == [1, 1, 1, 1]


def test_detached_copies_views_inside_of_composites_and_nothing_else() -> None:
    whole = np.arange(8)
    view = whole[2:4]
    assert detached(whole) is whole
    batch = ResponseBatch(responses=((peer(1), view),), missing=(peer(2),))
    made = detached(Composite((view, batch, TRIGGER)))
    assert made[0].base is None
    assert made[1].responses[0][1].base is None
    assert made[1].missing == (peer(2),)
    assert made[0].tolist() == [2, 3]
    assert made[2] is TRIGGER


def test_a_semaphore_with_two_numbers_of_units_is_told_to_have_one() -> None:
    p = Partition("server", inputs=["enter"])
    p.sys("Limit.Acquire", ["enter"], "one", name="door", n=1, stamp_ns=S)
    p.sys("Limit.Acquire", ["enter"], "two", name="door", n=2, stamp_ns=S)
    with pytest.raises(errors.InvalidArtifact, match="write one `n` for one name"):
        bring_up(model(p), "server")
