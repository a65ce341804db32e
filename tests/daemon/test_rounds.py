"""Unattended rounds on a virtual clock, with a node that does what the test says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from bbnode.daemon.config import InvokeSection, TextInput
from bbnode.daemon.history.tracking import metrics_of
from bbnode.daemon.invoke.rounds import (
    RETRY_PAUSE_S,
    SETTLE_S,
    Rounds,
    TooFewPeers,
    Traffic,
    to_value,
)
from bbnode.daemon.observing.round_table import answered_text, notes_text
from bbnode.engine import steps
from bbnode.engine.readiness import NotReadyPeer
from bbnode.ir import types
from bbnode.ir.errors import DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TypeNode
from bbnode.ir.values import TRIGGER

A, B, C = sorted(PeerId.from_seed(i) for i in range(3))


class FakeNode:
    """What `Rounds` uses of a node."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self.peers: list[PeerId] = []
        self.invoked: list[int] = []
        self.at: list[float] = []
        self.deadlines: list[int | None] = []
        self.more = trio.Event()
        self.unready: dict[PeerId, NotReadyPeer] = {}

    def peers_not_ready(self) -> dict[PeerId, NotReadyPeer]:
        return self.unready

    def connected_peers(self, peer_class: str) -> list[PeerId]:
        assert peer_class == "client"
        return self.peers

    def executions(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(execution=execution) for execution in self.running]

    def inputs(self, target: str) -> dict[str, TypeNode]:
        return {"tick": types.TRIGGER}

    def invoke(self, target: str, inputs: dict[str, Any], *, deadline_ns: int | None = None) -> int:
        self.deadlines.append(deadline_ns)
        assert (target, inputs) == ("server", {"tick": TRIGGER})
        self.invoked.append(len(self.invoked) + 1)
        self.at.append(trio.current_time())
        self.more.set()
        return self.invoked[-1]

    async def until_invoked(self, times: int) -> float:
        """When the node was invoked for the `times`-th time."""
        while len(self.invoked) < times:
            self.more = trio.Event()
            await self.more.wait()
        return self.at[times - 1]


class Bench:
    """Rounds with everything around them in the test's hands."""

    def __init__(self, entry: dict[str, Any], done: int = 0, running: int | None = None) -> None:
        self.node = FakeNode()
        self.events: list[dict[str, Any]] = []
        self.saved: list[int] = []
        # The disk does not write while this is a list: of what is to be told then.
        self.unwritten: list[Callable[[], None]] | None = None
        self.bytes = 0
        section = {"target": "server", "inputs": {"tick": "trigger"}, **entry}
        self.rounds = Rounds(
            InvokeSection.model_validate(section),
            self.node,  # type: ignore[arg-type]
            wake=lambda: None,
            traffic=lambda: Traffic(bytes_in=self.bytes),
            publish=self.events.append,
            done=done,
            running=running,
        )

    async def save(self, written: Callable[[], None]) -> None:
        self.saved.append(self.rounds.done)
        if self.unwritten is None:
            written()
        else:
            self.unwritten.append(written)

    def finish(self, *, ok: bool = True) -> None:
        execution = self.node.invoked[-1]
        self.bytes += 1000
        value = np.float32(0.5)
        for step in (
            steps.AppEvent(target="s", topic="accuracy", value=value, execution=execution),
            steps.AppEvent(target="s", topic="other", value=value, execution=execution + 99),
            steps.Telemetry(
                name="request.closed",
                attributes={
                    "execution": execution,
                    "responded": (A,),
                    "missing": (B, C),
                    "reasons": {str(B): "DataMissing: no shard [train]"},
                },
            ),
            *(
                steps.Telemetry(
                    name="contribution.refused",
                    attributes={"execution": number, "peer": A, "reason": "too large"},
                )
                for number in (execution, execution + 99)[: 1 + ok]
            ),
            steps.ExecutionFinished(execution=execution, target="s", ok=ok, failures=0),
        ):
            self.rounds.observe(step)

    def peers(self, *peers: PeerId) -> None:
        self.node.peers = list(peers)
        self.rounds.observe(steps.PeerUp(peer=A, classes=("client",)))

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_rounds_follow_each_other_and_are_told(nursery: trio.Nursery) -> None:
    bench = Bench({"times": 2})
    nursery.start_soon(bench.rounds.run, bench.save)
    for number in (1, 2):
        await settle()
        assert bench.node.invoked[-1] == number
        bench.finish()
    await settle()
    assert len(bench.node.invoked) == 2
    assert bench.rounds.complete
    assert bench.saved == [1, 2]
    first = bench.told("round_finished")[0]
    assert first["outputs"] == {"accuracy": 0.5}
    assert (first["responded"], first["missing"]) == ([str(A)], [str(B), str(C)])
    why = {str(B): "DataMissing: no shard [train]", str(C): "no answer by the deadline"}
    assert first["missing_why"] == why
    last = bench.rounds.as_json()["last"]
    assert last == {"round": 2, "ok": True, "missing": why, "failures": []}
    assert first["refused"] == {str(A): "too large"}
    assert (first["ok"], first["bytes"], first["round"]) == (True, 1000, 1)
    assert bench.told("rounds_complete")


async def test_the_log_names_who_was_not_counted(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bench = Bench({"times": 1})
    nursery.start_soon(bench.rounds.run, bench.save)
    await settle()
    bench.finish()
    await settle()
    (line,) = [each for each in caplog.records if each.message == "round finished"]
    assert vars(line)["refused"] == {str(A): "too large"}


CLIENTS = sorted(PeerId.from_seed(i) for i in range(10, 18))


def closed(responded: list[PeerId], missing: dict[PeerId, str]) -> steps.Telemetry:
    return steps.Telemetry(
        name="request.closed",
        attributes={
            "execution": 1,
            "responded": tuple(responded),
            "missing": tuple(missing),
            "reasons": {str(each): why for each, why in missing.items() if why},
        },
    )


async def test_a_peer_that_answers_one_step_and_not_the_next_is_lost_and_not_counted_twice(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    """As clients of secure aggregation that die between its steps."""
    caplog.set_level("INFO")
    bench = Bench({"times": 1})
    nursery.start_soon(bench.rounds.run, bench.save)
    await settle()
    *rest, one, other = CLIENTS
    bench.rounds.observe(closed(CLIENTS, {}))
    bench.rounds.observe(closed([*rest, one], {other: "PeerLost: gone"}))
    bench.rounds.observe(closed(rest, {one: ""}))
    bench.rounds.observe(steps.ExecutionFinished(execution=1, target="s", ok=True, failures=0))
    await settle()
    (row,) = bench.told("round_finished")
    assert row["responded"] == [str(each) for each in rest]
    assert row["missing"] == row["lost"] == [str(other), str(one)]
    late = "no answer by the deadline"
    assert row["missing_why"] == {str(other): "PeerLost: gone", str(one): late}
    (line,) = [vars(each) for each in caplog.records if each.message == "round finished"]
    assert (line["responded"], line["asked"], line["lost"]) == (6, 8, 2)
    assert answered_text(row) == "6/8"
    assert notes_text(row, {}).startswith("2 lost on the way; ")
    assert metrics_of(row)["round/answered"] == 6


async def test_who_missed_the_first_request_and_answered_a_later_one_is_missing(
    nursery: trio.Nursery,
) -> None:
    bench = Bench({"times": 1})
    nursery.start_soon(bench.rounds.run, bench.save)
    await settle()
    bench.rounds.observe(closed([A], {B: "slow"}))
    bench.rounds.observe(closed([A, B], {}))
    bench.rounds.observe(steps.ExecutionFinished(execution=1, target="s", ok=True, failures=0))
    await settle()
    (row,) = bench.told("round_finished")
    assert (row["responded"], row["missing"], row["lost"]) == ([str(A)], [str(B)], [])
    assert (answered_text(row), notes_text(row, {})) == ("1/2", f"{str(B)[-6:]} (slow)")


def test_rounds_of_earlier_releases_count_nobody_twice() -> None:
    old = {"responded": ["A", "B", "C"], "missing": ["C"], "missing_why": {"C": "gone"}}
    row = {**old, "ok": True, "refused": {}}
    assert answered_text(row) == "2/3"
    assert notes_text(row, {}) == "1 lost on the way; C (gone)"


async def test_a_round_that_fails_is_one_line_of_the_log(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bench = Bench({"times": 1})
    nursery.start_soon(bench.rounds.run, bench.save)
    await settle()
    bench.finish(ok=False)
    await settle()
    (line,) = [each for each in caplog.records if each.message.startswith("round ")]
    assert (line.message, line.levelname) == ("round failed", "WARNING")
    assert vars(line)["missing"][str(C)] == "no answer by the deadline"


async def test_a_failure_that_each_round_would_meet_ends_them(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench({"times": 0})
    nursery.start_soon(bench.rounds.run, bench.save)
    for number, is_final in ((1, False), (2, True)):
        await bench.node.until_invoked(number)
        bench.rounds.observe(
            steps.OpFailed(
                execution=number, target="s", op="Begin", kind="K", detail="spent",
                is_final=is_final,
            )
        )  # fmt: skip
        bench.finish(ok=False)
    await trio.sleep(60)
    assert len(bench.node.invoked) == 2
    assert (bench.rounds.complete, bench.rounds.stopped) == (True, "spent")
    assert bench.told("rounds_complete")[0]["stopped"] == "spent"


async def test_a_round_says_what_its_codecs_saved(nursery: trio.Nursery) -> None:
    bench = Bench({"times": 1})
    nursery.start_soon(bench.rounds.run, bench.save)
    await settle()
    for name, execution in (("codec.encoded", 1), ("codec.decoded", 1), ("codec.decoded", 99)):
        said = {"execution": execution, "slot": "c", "raw_bytes": 400, "code_bytes": 101}
        bench.rounds.observe(steps.Telemetry(name=name, attributes=said))
    bench.finish()
    await settle()
    metrics = bench.told("round_finished")[0]["metrics"]
    assert metrics == {"accuracy": 0.5, "codec.raw_bytes": 800, "codec.code_bytes": 202}


async def test_rounds_made_before_a_restart_count(nursery: trio.Nursery) -> None:
    bench = Bench({"times": 5}, done=4)
    nursery.start_soon(bench.rounds.run, bench.save)
    await settle()
    bench.finish()
    await settle()
    assert bench.told("round_finished")[0]["round"] == 5
    assert bench.rounds.complete


async def test_every_s_is_from_start_to_start(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench({"times": 3, "every_s": 10.0})
    nursery.start_soon(bench.rounds.run, bench.save)
    for number in (1, 2, 3):
        await bench.node.until_invoked(number)
        bench.finish()
    assert np.diff(bench.node.at).tolist() == pytest.approx([10, 10])


async def test_it_is_told_for_how_long_no_round_has_ended(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench({"times": 2, "every_s": 10.0})
    assert bench.rounds.age_s is None
    began = trio.current_time()
    nursery.start_soon(bench.rounds.run, bench.save)
    await bench.node.until_invoked(1)
    autojump_clock.jump(7.0)
    # Before the first one the start counts.
    assert bench.rounds.age_s == pytest.approx(trio.current_time() - began)
    assert bench.rounds.age_s >= 7.0
    bench.finish()
    await settle()
    autojump_clock.jump(1.5)
    assert bench.rounds.age_s == pytest.approx(1.5)
    assert bench.rounds.period_s == 10.0
    await bench.node.until_invoked(2)
    bench.finish()
    await settle()
    autojump_clock.jump(10.0)
    await settle()
    # All are made: nothing is late.
    assert bench.rounds.complete
    assert bench.rounds.age_s is None


async def test_a_failed_round_counts_and_is_followed_by_a_pause(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench({"times": 2})
    nursery.start_soon(bench.rounds.run, bench.save)
    failed = await bench.node.until_invoked(1)
    bench.finish(ok=False)
    assert await bench.node.until_invoked(2) == pytest.approx(failed + RETRY_PAUSE_S)
    assert bench.told("round_finished")[0]["ok"] is False


@pytest.mark.parametrize(("given", "expected"), [({}, None), ({"deadline_s": 1.5}, 1_500_000_000)])
async def test_a_round_has_the_time_that_its_entry_gives(
    nursery: trio.Nursery,
    autojump_clock: trio.testing.MockClock,
    given: dict[str, float],
    expected: int | None,
) -> None:
    bench = Bench({"times": 1, **given})
    nursery.start_soon(bench.rounds.run, bench.save)
    await bench.node.until_invoked(1)
    assert bench.node.deadlines == [expected]


WAIT = {"class": "client", "peers": 3, "min_peers": 2, "timeout_s": 20.0}


async def test_the_first_round_waits_for_all_peers(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench({"wait_for": WAIT})
    nursery.start_soon(bench.rounds.run, bench.save)
    await settle()
    bench.peers(A, B)
    await settle()
    assert not bench.node.invoked
    assert "2 connected" in bench.rounds.waiting_for
    assert bench.told("waiting_for_peers")[-1]["have"] == 2
    bench.peers(A, B, C)
    came_s = trio.current_time()
    assert await bench.node.until_invoked(1) == pytest.approx(came_s + SETTLE_S)
    assert bench.rounds.waiting_for == ""


async def test_who_is_not_ready_is_waited_for_and_named_with_the_reason(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench({"wait_for": {**WAIT, "min_peers": 3}})
    nursery.start_soon(bench.rounds.run, bench.save)
    await settle()
    bench.peers(A, B, C)
    await trio.sleep(SETTLE_S / 2)
    # What it says comes after the connection.
    bench.node.unready = {
        C: NotReadyPeer(classes=("client",), reason="slot data: no file"),
        PeerId.from_seed(9): NotReadyPeer(classes=("store",), reason="another class"),
    }
    bench.peers(A, B)
    bench.rounds.observe(steps.Telemetry(name="peer.not_ready", attributes={"peer": C}))
    await trio.sleep(30)
    assert not bench.node.invoked
    text = f"2 connected and ready; not ready: …{str(C)[-6:]}: slot data: no file"
    assert bench.rounds.waiting_for == f"3 peers of class 'client', {text}"
    assert bench.told("waiting_for_peers")[-1]["not_ready"] == {str(C): "slot data: no file"}
    bench.node.unready = {}
    bench.peers(A, B, C)
    bench.rounds.observe(steps.Telemetry(name="peer.ready", attributes={"peer": C}))
    await bench.node.until_invoked(1)


async def test_who_says_late_that_it_is_not_ready_is_still_waited_for_as_the_first_round_waits(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench({"wait_for": WAIT})
    nursery.start_soon(bench.rounds.run, bench.save)
    await settle()
    bench.peers(A, B, C)
    await trio.sleep(SETTLE_S / 2)
    bench.peers(A, B)  # two are enough for a later round
    came_s = trio.current_time() + WAIT["timeout_s"] / 2  # type: ignore[operator]
    await trio.sleep_until(came_s)
    assert not bench.node.invoked
    bench.peers(A, B, C)
    assert await bench.node.until_invoked(1) == pytest.approx(came_s + SETTLE_S)


@pytest.mark.parametrize("in_time", [True, False])
async def test_the_first_round_waits_for_other_classes_too_but_not_for_ever(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, in_time: bool
) -> None:
    bench = Bench({"times": 2, "wait_for": {**WAIT, "also": {"store": 1}}})
    stores: list[PeerId] = []
    clients = [A, B, C]
    bench.node.connected_peers = lambda of: {"client": clients, "store": stores}[of]  # type: ignore[method-assign]
    nursery.start_soon(bench.rounds.run, bench.save)
    await trio.sleep(5)
    assert "class 'store'" in bench.rounds.waiting_for
    if in_time:
        stores.append(A)
    assert await bench.node.until_invoked(1) == pytest.approx(6 if in_time else 20, abs=1)
    stores.clear()
    bench.finish()
    await settle()
    assert len(bench.node.invoked) == 2


async def test_after_the_time_enough_peers_are_enough(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench({"wait_for": WAIT})
    bench.node.peers = [A, B]
    nursery.start_soon(bench.rounds.run, bench.save)
    assert await bench.node.until_invoked(1) == pytest.approx(20)


async def test_later_rounds_wait_for_no_more_than_enough(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench({"times": 3, "wait_for": WAIT})
    bench.node.peers = [A, B, C]
    nursery.start_soon(bench.rounds.run, bench.save)
    await settle()
    bench.peers(A, B)
    bench.finish()
    await settle()
    assert len(bench.node.invoked) == 2
    bench.peers(A)
    bench.finish()
    await settle()
    assert len(bench.node.invoked) == 2
    bench.peers(A, C)
    await bench.node.until_invoked(3)


async def test_a_round_is_told_when_it_is_on_disk_and_the_next_one_does_not_wait_for_that(
    nursery: trio.Nursery,
) -> None:
    bench = Bench({"times": 2})
    bench.unwritten = []
    nursery.start_soon(bench.rounds.run, bench.save)
    await bench.node.until_invoked(1)
    bench.finish()
    await bench.node.until_invoked(2)
    assert bench.told("round_finished") == []
    bench.unwritten.pop()()
    assert [made["round"] for made in bench.told("round_finished")] == [1]
    bench.finish()
    await settle()
    assert not bench.rounds.complete
    assert bench.told("rounds_complete") == []
    bench.unwritten.pop()()
    await settle()
    assert [event["type"] for event in bench.events[-2:]] == ["round_finished", "rounds_complete"]


async def test_with_on_timeout_fail_too_few_peers_are_a_typed_error(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bench = Bench({"wait_for": {**WAIT, "on_timeout": "fail"}})
    bench.node.peers = [A]
    with pytest.raises(TooFewPeers, match=r"1 of 2 peers of class 'client'.*20 s"):
        await bench.rounds.run(bench.save)
    assert not bench.node.invoked


def test_configured_inputs_are_of_the_declared_type() -> None:
    made = to_value("x", [1, 2], types.TENSOR_FLOAT)
    assert (str(made.dtype), made.tolist()) == ("float32", [1.0, 2.0])
    assert to_value("x", TextInput(text="trigger"), None) == b"trigger"
    text = to_value("x", TextInput(text="a\0"), types.TENSOR_STRING)
    assert (text.shape, text.item()) == ((), "a\0")
    assert to_value("x", ["a\0", "bcd"], types.TENSOR_STRING).tolist() == ["a\0", "bcd"]
    with pytest.raises(DeploymentError, match="give texts, in lists of one length"):
        to_value("x", [["a"], ["b", "c"]], types.TENSOR_STRING)
    with pytest.raises(DeploymentError, match=r"input 'x' is 300: .*uint8"):
        to_value("x", 300, types.TENSOR_BY_ELEM[2])


def _ended(execution: int) -> steps.ExecutionFinished:
    return steps.ExecutionFinished(target="server", execution=execution, ok=True, failures=0)


async def test_a_round_that_a_restart_cut_goes_on(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    bench = Bench({"times": 5}, done=3, running=77)
    bench.node.running = [77]
    assert bench.rounds.running == 77
    nursery.start_soon(bench.rounds.run, bench.save)
    await trio.testing.wait_all_tasks_blocked()
    assert bench.node.invoked == []
    bench.rounds.observe(_ended(77))
    await bench.node.until_invoked(1)
    assert (bench.saved, bench.rounds.done) == ([4], 4)
    assert [made["round"] for made in bench.rounds.finished()] == [4]


async def test_one_that_ended_before_anybody_looked_counts(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    bench = Bench({"times": 4}, done=3, running=77)
    bench.rounds.observe(_ended(77))
    await bench.rounds.run(bench.save)
    assert (bench.node.invoked, bench.rounds.done) == ([], 4)


async def test_one_that_the_node_did_not_take_up_is_made_anew(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    bench = Bench({"times": 4}, done=3, running=77)
    nursery.start_soon(bench.rounds.run, bench.save)
    await bench.node.until_invoked(1)
    assert bench.rounds.running == 1
    assert [made.number for made in bench.rounds.history] == [4]
