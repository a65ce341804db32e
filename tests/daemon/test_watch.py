"""What stands still is known, and nothing else, on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
import trio.testing

from bbnode.daemon.invoke.rounds import FAILED_ROUNDS, ROUND_SLACK_S
from bbnode.daemon.observing import watch
from bbnode.daemon.observing.doctor import CheckResult, judge_progress
from bbnode.daemon.observing.watch import LIVENESS_CHECKS, LOOK_EVERY_S, Watch, WatchTargets
from bbnode.engine.suspensions import Waiting
from tests.daemon.test_rounds import A, B, Bench, C, settle


@dataclass
class FakeNode:
    """What the watch looks at of an engine."""

    due_s: float | None = None
    waits: list[Waiting] = field(default_factory=list)

    def next_deadline(self) -> int | None:
        return None if self.due_s is None else int(self.due_s * 1e9)

    def waiting(self) -> list[Waiting]:
        return self.waits


def waits(until_s: float, *, why: str = "responses", execution: int = 1) -> Waiting:
    return Waiting(
        what="ask",
        why=why,
        whom="somebody",
        execution=execution,
        target="server",
        since_ns=0,
        until_ns=int(until_s * 1e9),
    )


def what(made: Watch) -> list[str]:
    return [each.what for each in made.look()]


async def test_an_idle_node_is_well(autojump_clock: trio.testing.MockClock) -> None:
    made = Watch(watched=WatchTargets(node=FakeNode()))
    await trio.sleep(80_000)
    assert made.look() == []
    assert made.polls()


async def test_an_engine_that_is_not_polled(autojump_clock: trio.testing.MockClock) -> None:
    node = FakeNode(due_s=trio.current_time() + 5)
    made = Watch(watched=WatchTargets(node=node))
    await trio.sleep(5 + watch.POLL_SLACK_S)
    assert made.look() == []
    await trio.sleep(0.1)
    assert what(made) == ["poll"]
    assert not made.polls()
    assert made.look()[0].blocks


@pytest.mark.parametrize(
    ("why", "slack_s"),
    [
        ("responses", watch.DEADLINE_SLACK_S),
        ("worker thread (given up)", watch.GIVEN_UP_SLACK_S),
    ],
)
async def test_what_waits_beyond_its_deadline(
    autojump_clock: trio.testing.MockClock, why: str, slack_s: float
) -> None:
    node = FakeNode(waits=[waits(trio.current_time() + 3, why=why)])
    made = Watch(watched=WatchTargets(node=node))
    await trio.sleep(3 + slack_s)
    assert made.look() == []
    await trio.sleep(0.1)
    assert what(made) == ["requests"]


async def test_checkpoints_that_are_not_written(autojump_clock: trio.testing.MockClock) -> None:
    began_s = trio.current_time()
    every_s = 60.0
    made = Watch(
        watched=WatchTargets(node=FakeNode(), saved_s=lambda: began_s, save_every_s=lambda: every_s)
    )
    await trio.sleep(3 * every_s + watch.SNAPSHOT_SLACK_S)
    assert made.look() == []
    await trio.sleep(1)
    (stalled,) = made.look()
    # The node does its work without.
    assert (stalled.what, stalled.blocks) == ("snapshots", False)
    every_s = 0.0
    assert made.look() == []


async def test_nobody_is_connected(autojump_clock: trio.testing.MockClock) -> None:
    since_s: float | None = trio.current_time()
    made = Watch(watched=WatchTargets(node=FakeNode(), alone_since_s=lambda: since_s))
    await trio.sleep(watch.ALONE_S)
    assert made.look() == []
    await trio.sleep(1)
    assert what(made) == ["bootstrap"]
    since_s = None
    assert made.look() == []


async def test_an_own_membership_that_does_not_hold(
    autojump_clock: trio.testing.MockClock,
) -> None:
    reason = "it ended"
    made = Watch(watched=WatchTargets(node=FakeNode(), membership=lambda: reason))
    (stalled,) = made.look()
    assert (stalled.what, stalled.blocks) == ("membership", True)
    assert "it ended" in stalled.detail


def watching(bench: Bench) -> tuple[Watch, FakeNode]:
    node = FakeNode()
    return Watch(watched=WatchTargets(node=node, rounds=[bench.rounds])), node


async def test_a_round_that_does_not_end(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    bench = Bench({"times": 0})
    made, node = watching(bench)
    nursery.start_soon(bench.rounds.run, bench.save)
    await bench.node.until_invoked(1)
    # It waits for answers, for as long as its request allows.
    node.waits = [waits(trio.current_time() + 1000)]
    await trio.sleep(900)
    assert made.look() == []
    node.waits = []
    assert what(made) == ["rounds"]
    bench.finish()
    await bench.node.until_invoked(2)
    assert made.look() == []
    await trio.sleep(ROUND_SLACK_S)
    assert made.look() == []
    await trio.sleep(1)
    (stalled,) = made.look()
    assert "round 2 runs for 61 s" in stalled.detail


async def test_a_slow_training_here_is_work(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    bench = Bench({"times": 0})
    made, _ = watching(bench)
    made.watched.tasks_running = lambda: 1
    nursery.start_soon(bench.rounds.run, bench.save)
    await trio.sleep(10_000)
    assert made.look() == []


async def test_rounds_that_only_fail(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    bench = Bench({"times": 0, "every_s": 10.0})
    made, _ = watching(bench)
    nursery.start_soon(bench.rounds.run, bench.save)
    told = {}
    for number in range(1, 15):
        await bench.node.until_invoked(number)
        bench.finish(ok=False)
        await settle()
        told[number] = what(made)
    # Three in a row, and a minute beyond three periods.
    assert FAILED_ROUNDS == 3
    assert [number for number, found in told.items() if found == ["rounds"]] == [11, 12, 13, 14]
    await bench.node.until_invoked(15)
    bench.finish()
    await settle()
    assert made.look() == []


async def test_a_period_is_no_standstill(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    bench = Bench({"times": 2, "every_s": 86_400.0})
    made, _ = watching(bench)
    nursery.start_soon(bench.rounds.run, bench.save)
    for number in (1, 2):
        await bench.node.until_invoked(number)
        bench.finish()
        await trio.sleep(86_399)
        assert made.look() == []
    # All were made: nothing more is expected.
    await trio.sleep(80_000)
    assert made.look() == []


async def test_rounds_that_wait_for_peers_say_so_and_are_well(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    bench = Bench({"times": 0, "wait_for": {"class": "client", "peers": 2}})
    made, _ = watching(bench)
    nursery.start_soon(bench.rounds.run, bench.save)
    await trio.sleep(3600)
    assert made.look() == []
    told = bench.rounds.as_json()
    assert told["waiting_for"] == "2 peers of class 'client', 0 connected"
    assert told["waiting_s"] == 3600
    bench.peers(A, B)
    await bench.node.until_invoked(1)
    assert bench.rounds.as_json()["waiting_s"] is None
    assert made.look() == []


async def test_peers_that_can_be_used_again_are_seen_without_a_word(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    bench = Bench({"times": 0, "wait_for": {"class": "client", "peers": 3}})
    nursery.start_soon(bench.rounds.run, bench.save)
    await trio.sleep(100)
    # As when a cooldown is over: nothing is told.
    bench.node.peers = [A, B, C]
    with trio.fail_after(2):
        await bench.node.until_invoked(1)


async def test_what_begins_and_ends_is_told(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    events: list[dict[str, Any]] = []
    reason = ""
    made = Watch(
        watched=WatchTargets(node=FakeNode(), membership=lambda: reason),
        publish=lambda event: events.append(dict(event)),
    )
    nursery.start_soon(made.run)
    await trio.sleep(10.5)
    assert events == []
    reason = "early"
    await trio.sleep(5)
    assert [(e["type"], e["what"]) for e in events] == [("stalled", "membership")]
    assert made.look()[0].for_s == pytest.approx(4.5)
    reason = ""
    await trio.sleep(5)
    assert [e["type"] for e in events] == ["stalled", "goes_on"]
    assert events[1]["after_s"] == 5


async def test_a_wall_clock_that_is_set(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    events: list[dict[str, Any]] = []
    offset_s = 1e9
    made = Watch(
        watched=WatchTargets(node=FakeNode()),
        publish=lambda event: events.append(dict(event)),
        unix_s=lambda: trio.current_time() + offset_s,
    )
    nursery.start_soon(made.run)
    # Between two looks.
    await trio.sleep(3600 + LOOK_EVERY_S / 2)
    offset_s -= 8
    await trio.sleep(LOOK_EVERY_S)
    offset_s += 8
    await trio.sleep(3600)
    assert events == [{"type": "clock_set", "by_s": -8.0}, {"type": "clock_set", "by_s": 8.0}]
    assert made.counters() == {"clock.steps": 2}


def test_each_thing_is_named_once() -> None:
    names = [thing.what for thing in LIVENESS_CHECKS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("told", "verdict", "detail"),
    [
        ({"ready": True, "reasons": [], "waiting": []}, CheckResult.PASSED, "nothing is stalled"),
        (
            {
                "ready": True,
                "reasons": [],
                "waiting": [{"target": "server", "for": "2 peers", "for_s": 3.0}],
            },
            CheckResult.WARNING,
            "server waits for 2 peers",
        ),
        (
            {
                "ready": False,
                "reasons": [{"what": "rounds", "detail": "none", "for_s": 3.0}],
                "waiting": [],
            },
            CheckResult.FAILED,
            "rounds: none",
        ),
    ],
)
def test_a_doctor_sees_it(told: dict[str, Any], verdict: CheckResult, detail: str) -> None:
    found = judge_progress(told)
    assert (found.verdict, found.detail) == (verdict, detail)
