"""DeadlineMatch, and Any with a group, over several executions: the first alone fires."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.engine import Node, steps
from bbnode.engine.frame import Frame
from bbnode.engine.latches import Latches, LatchPlan
from bbnode.engine.reports import Reports
from bbnode.ir import types
from bbnode.ir.values import TRIGGER
from tests.engine.builder import Partition, model
from tests.engine.envelopes import envelope
from tests.engine.support import MS, S, bring_up, of, peer

LIMIT = 5 * S


def asker(
    op_type: str = "DeadlineMatch",
    *,
    breaks: bool = False,
    digest_ns: int = 0,
    **attributes: object,
) -> tuple[Partition, int]:
    """Asks (in a manner of speaking) when invoked, and gives the reply LIMIT to come."""
    p = Partition("server", inputs=["ask"])
    p.recv("reply", node=types.TRIGGER)
    if breaks:
        p.sys("When", ["ask"], "begun")  # a trigger is no bool: it fails
    p.sys("After", ["begun" if breaks else "ask"], "timeout", delay_ns=LIMIT, stamp_ns=60 * S)
    if digest_ns:
        p.sys("Sleep", ["reply"], "there", duration_ns=digest_ns, stamp_ns=60 * S)
    else:
        p.sys("OnTrigger", ["reply"], "there")
    p.sys(op_type, ["there", "timeout"], "winner", **attributes)
    p.sys("AppNotify", ["winner"], name="won")
    p.output("out", "winner")
    return p, p.site("reply")


class Asking:
    def __init__(
        self, op_type: str = "DeadlineMatch", *, digest_ns: int = 0, **attributes: object
    ) -> None:
        p, self.site = asker(op_type, digest_ns=digest_ns, **attributes)
        self.model = model(p)
        self.node = self.bring_up()
        self.replies = 0

    def bring_up(self) -> Node:
        node = bring_up(self.model, "server")
        node.peer_connected(peer(3), ["client"])
        return node

    def ask(self, now_ns: int) -> list[steps.Step]:
        self.node.invoke("server", {"ask": TRIGGER})
        return self.node.poll(now_ns)

    def reply(self, now_ns: int) -> list[steps.Step]:
        self.replies += 1
        self.node.deliver_inbound(
            peer(3), envelope(peer(3), self.site, TRIGGER, wire_req_id=self.replies)
        )
        return self.node.poll(now_ns)

    def restart(self, now_ns: int) -> None:
        node = bring_up(self.model, "server")
        node.restore(self.node.snapshot(now_ns), now_ns, same_life=True)
        self.node = node


def won(made: list[steps.Step]) -> int:
    return sum(step.topic == "won" for step in of(steps.AppEvent, made))


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    ("op_type", "attributes"), [("DeadlineMatch", {}), ("Any", {"group": "first"})]
)
def test_the_timeout_does_not_fire_after_the_reply(
    op_type: str, attributes: dict[str, object], restarts: bool
) -> None:
    it = Asking(op_type, **attributes)
    assert won(it.ask(1)) == 0
    if restarts:
        it.restart(1)
    assert won(it.reply(2 * S)) == 1
    if restarts:
        it.restart(2 * S)
    late = it.node.poll(6 * S)
    assert won(late) == 0
    (told,) = of(steps.OutputSkipped, late)
    assert "another execution was first" in told.reason
    assert it.node.executions() == []
    assert it.node.counters()["latch.late"] == 1


def test_a_reply_after_the_timeout_is_late_and_one_that_nobody_waits_for_too() -> None:
    it = Asking()
    assert won(it.reply(1)) == 0
    it.ask(2)
    assert won(it.node.poll(6 * S)) == 1
    assert won(it.reply(7 * S)) == 0
    assert won(it.ask(8 * S)) == 0  # the next one starts anew
    assert won(it.reply(9 * S)) == 1
    assert won(it.node.poll(20 * S)) == 0


def test_a_lost_reply_does_not_take_that_of_the_next() -> None:
    it = Asking()
    it.ask(0)
    assert won(it.node.poll(6 * S)) == 1
    it.ask(7 * S)
    assert won(it.reply(8 * S)) == 1
    assert won(it.node.poll(20 * S)) == 0


@pytest.mark.parametrize(
    ("op_type", "attributes"), [("DeadlineMatch", {}), ("Any", {"group": "first"})]
)
def test_a_reply_that_is_slow_to_digest_opens_no_round(
    op_type: str, attributes: dict[str, object]
) -> None:
    it = Asking(op_type, digest_ns=S, **attributes)
    it.ask(1)
    it.reply(2 * S)
    assert won(it.node.poll(3 * S + 1)) == 1
    assert won(it.node.poll(20 * S)) == 0
    it.ask(21 * S)
    it.reply(25 * S + S // 2)  # it is there in time, and digested too late
    assert won(it.node.poll(26 * S + 1)) == 1
    assert won(it.node.poll(40 * S)) == 0


def test_an_any_without_a_group_fires_for_each_delivery() -> None:
    it = Asking("Any", group="")
    it.ask(0)
    assert won(it.reply(1)) + won(it.reply(2)) + won(it.node.poll(6 * S)) == 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["ask", "reply", "wait", "restart"]), max_size=25))
def test_each_question_is_over_once(events: list[str]) -> None:
    it = Asking()
    now, asked, came = 1, 0, 0
    for event in events:
        now += 500 * MS
        if event == "ask":
            asked += 1
            came += won(it.ask(now))
        elif event == "reply":
            came += won(it.reply(now))
        elif event == "wait":
            now += LIMIT
            came += won(it.node.poll(now))
        else:
            it.restart(now)
        assert came <= asked
    came += won(it.node.poll(now + 2 * LIMIT))
    assert came == asked
    assert it.node.executions() == []
    assert it.node._rt.latches.state(None) == [[[], []]]


def test_two_ports_that_race_fire_once_a_round() -> None:
    p = Partition("server")
    sites = []
    for name in ("left", "right"):
        p.recv(name, node=types.TRIGGER)
        p.sys("OnTrigger", [name], f"{name}_there")
        sites.append(p.site(name))
    p.sys("Any", ["left_there", "right_there"], "first", group="race")
    p.sys("AppNotify", ["first"], name="won")
    node = bring_up(model(p), "server")
    node.peer_connected(peer(3), ["client"])
    seen = []
    for count, side in enumerate([0, 1, 1, 0, 0, 0, 1]):
        node.deliver_inbound(
            peer(3), envelope(peer(3), sites[side], TRIGGER, wire_req_id=count + 1)
        )
        seen.append(won(node.poll(count)))
    assert seen == [1, 0, 1, 0, 1, 1, 0]


def test_what_will_not_time_out_closes_its_round() -> None:
    p, site = asker(breaks=True)
    node = bring_up(model(p), "server")
    node.peer_connected(peer(3), ["client"])
    node.invoke("server", {"ask": TRIGGER})
    assert of(steps.OpFailed, node.poll(1))
    node.deliver_inbound(peer(3), envelope(peer(3), site, TRIGGER, wire_req_id=1))
    assert won(node.poll(2)) == 0


def test_executions_that_failed_leave_nothing_that_grows() -> None:
    frames: dict[int, Frame] = dict.fromkeys(range(3), cast(Frame, None))
    latches = Latches([LatchPlan(inputs=2, timed=True)], frames, cast(Reports, None))
    for execution in (0, *range(10, 1_000), 1):  # all between failed before their timer
        latches.open(0, execution)
    ((opened, _),) = latches.state(None)
    assert len(opened) <= 2 * len(frames) + 1
    assert {0, 1} <= set(opened)
