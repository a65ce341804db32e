"""Timers of components: set, replaced, cancelled, late, and bounded."""

from __future__ import annotations

import pytest

from bbnode.engine import Limits, steps
from bbnode.engine.messaging.messenger import RETRY_NS
from bbnode.engine.messaging.pending import ComponentTimers
from bbnode.engine.scheduler import Scheduler
from bbnode.ir.values import TRIGGER
from tests.engine.protocols import chatting
from tests.engine.support import S, component, of, peer
from tests.engine.test_messenger import REQUEST, message


def beating(**more):
    node = chatting(0, **more)
    node.invoke("beater", {"go": TRIGGER})
    node.poll(0)
    return node, component(node, "chat")


def test_a_timer_calls_its_component_when_it_is_due() -> None:
    node, chat = beating()
    assert node.next_deadline() == S
    node.poll(S - 1)
    assert chat.heard == []
    node.poll(S)
    node.poll(2 * S + 5)
    assert chat.heard == [("timer", "beat", S), ("timer", "beat", 2 * S + 5)]
    assert node.next_deadline() == 3 * S + 5
    assert node.counters()["timers.components"] == 1


def test_setting_a_timer_again_replaces_it() -> None:
    node, chat = beating()
    node.invoke("beater", {"go": TRIGGER})
    node.poll(S // 2)
    assert node.counters()["timers.components"] == 1
    assert node.next_deadline() == S + S // 2
    node.poll(S)
    assert chat.beats == 0


def test_a_timer_that_is_due_while_its_component_works_comes_after() -> None:
    node, chat = beating()
    node.deliver_inbound(peer(1), message("Later", kind=REQUEST))
    node.poll(0)
    node.poll(S)
    assert chat.beats == 0
    assert node.next_deadline() == S + RETRY_NS
    chat.completion.complete(b"")
    node.poll(S + 1)
    node.poll(S + RETRY_NS)
    assert chat.beats == 1


def test_a_timer_that_finds_no_room_for_an_execution_comes_after() -> None:
    node, chat = beating(limits=Limits(frames=1))
    node.deliver_inbound(peer(1), message("Slow", kind=REQUEST))
    (task,) = of(steps.RunTask, node.poll(0))
    made = node.poll(S)
    assert not of(steps.OpFailed, made)
    node.complete(task.token, b"")
    node.poll(S + 1)
    node.poll(S + RETRY_NS)
    assert chat.beats == 1


def test_an_on_timer_that_raises_is_a_step() -> None:
    node, chat = beating()
    chat.period_ns = -1
    (failed,) = of(steps.OpFailed, node.poll(S))
    assert failed.op == "chat.on_timer"
    assert "0 or more" in failed.detail
    assert node.counters()["timers.components"] == 0


def test_timers_are_bounded(monkeypatch) -> None:
    from bbnode.engine.ops import context

    monkeypatch.setattr(context, "MAX_TIMERS", 0)
    node, _ = beating()
    node.invoke("beater", {"go": TRIGGER})
    (failed,) = of(steps.OpFailed, node.poll(1))
    assert "timers are armed" in failed.detail


def test_a_cancelled_timer_is_disarmed() -> None:
    scheduler = Scheduler()
    timers = ComponentTimers(scheduler)
    timers.set(0, "a", 10)
    timers.set(1, "a", 20)
    timers.cancel(0, "a")
    timers.cancel(0, "a")
    assert (len(timers), scheduler.next_deadline()) == (1, 20)
    (timer,) = scheduler.matured(20)
    assert timers.take(timer.key) == (1, "a")
    assert len(timers) == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_timer_goes_on_after_a_restore(again) -> None:
    node, _ = beating()
    node.poll(S // 4)
    other = chatting(0)
    other.restore(node.snapshot())
    if again:
        third = chatting(0)
        third.restore(other.snapshot())
        other = third
    # Time that it was not there does not pass for it: its clock goes on where it stopped.
    base = 1000 * S
    other.poll(base)
    due = other.next_deadline()
    assert due is not None
    assert S // 2 <= due - base <= S
    other.poll(due)
    assert component(other, "chat").beats == 1
