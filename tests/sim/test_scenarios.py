"""The programs of the demo and of gossip averaging under faults from seeds, and their reports.

Rule: what holds for the seeds here is checked by `scenarios.py`; and each invariant is shown to
break when what it guards is broken on purpose.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bbnode.components import FedAvg
from bbnode.engine import Node
from bbnode.engine.wire.inbound import InboundDedup
from bbnode.sim import (
    MS,
    Crash,
    Cut,
    InvariantBroken,
    Network,
    S,
    Save,
    ScenarioFailed,
    Trace,
    check,
    draw_faults,
    invariants,
    replay,
    scenario,
)
from tests.sim import programs, scenarios
from tests.sim.gossip import PushSumWithBooks

ROOT = Path(__file__).parent.parent.parent
NAMES = ["a", "b", "c", "d"]


# --- the programs --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_federated_rounds_lose_and_double_nothing(seed: int) -> None:
    check(scenarios.federated, seed)


@pytest.mark.parametrize("seed", range(8))
def test_gossip_averaging_agrees_on_the_mean(seed: int) -> None:
    check(scenarios.gossip, seed)


@pytest.mark.parametrize("seed", range(6))
def test_rounds_under_way_outlive_a_server_that_stops(seed: int) -> None:
    check(scenarios.federated, seed, server_stops=3)


@pytest.mark.parametrize("seed", range(8))
def test_rounds_end_when_those_that_are_there_have_answered(seed: int) -> None:
    check(scenarios.unreachable, seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 100, 25))
def test_many_seeds(start: int) -> None:
    for seed in range(start, start + 25):
        check(scenarios.federated, seed)
        check(scenarios.federated, seed, server_stops=3)
        check(scenarios.gossip, seed)
        check(scenarios.unreachable, seed)


@pytest.mark.parametrize("run", [scenarios.federated, scenarios.gossip])
def test_the_same_seed_gives_the_same_bytes(run) -> None:
    first, again, other = (Trace(kept=100_000) for _ in range(3))
    run(3, first)
    run(3, again)
    run(4, other)
    assert first.lines() == again.lines()
    assert first.digest == again.digest != other.digest
    assert len(first.lines()) == len(first) > 300


# --- what they are worth -------------------------------------------------------------------


def broken_by(run, seeds: int = 4) -> str:
    """What the first broken invariant says."""

    def try_all() -> None:
        for seed in range(seeds):
            check(run, seed)

    with pytest.raises(ScenarioFailed) as caught:
        try_all()
    assert isinstance(caught.value.__cause__, InvariantBroken)
    return str(caught.value)


def test_a_contribution_that_counts_twice_is_found(monkeypatch) -> None:
    original = FedAvg.aggregate

    def aggregate(self, ctx):
        tensor, summary = original(self, ctx)
        return tensor, type(summary)({**summary, "num_samples": summary["num_samples"] + 1})

    monkeypatch.setattr(FedAvg, "aggregate", aggregate)
    assert re.search(r"round \d+ counted \d+ examples", broken_by(scenarios.federated))


def test_a_contribution_that_is_lost_is_found(monkeypatch) -> None:
    original = FedAvg.contribute_all

    def contribute_all(self, ctx, responses):
        fewer = type(responses)(responses=responses.responses[1:], missing=responses.missing)
        return original(self, ctx, fewer)

    monkeypatch.setattr(FedAvg, "contribute_all", contribute_all)
    assert re.search(r"round \d+ counted \d+ examples", broken_by(scenarios.federated))


def test_mass_that_is_made_from_nothing_is_found(monkeypatch) -> None:
    original = PushSumWithBooks.merge

    def merge(self, ctx, share):
        self.taken_over.clear()  # as if every share were all new
        return original(self, ctx, share)

    monkeypatch.setattr(PushSumWithBooks, "merge", merge)
    assert "the books of peer-" in broken_by(scenarios.gossip)


def test_mass_that_goes_missing_is_found(monkeypatch) -> None:
    monkeypatch.setattr(
        PushSumWithBooks, "imbalance", lambda _self: 0.0
    )  # nobody looks at the books
    original = PushSumWithBooks.merge

    def merge(self, ctx, share):
        before = self.held
        estimate = original(self, ctx, share)
        self.held = before + 0.9 * (self.held - before) * np.array([1.0] * len(estimate) + [0.5])
        return estimate

    monkeypatch.setattr(PushSumWithBooks, "merge", merge)
    assert "the worst estimate is off" in broken_by(scenarios.gossip, seeds=1)


def test_what_came_twice_and_is_let_in_twice_changes_no_result(monkeypatch) -> None:
    """Both programs count each peer once by themselves, without the gate's help."""
    monkeypatch.setattr(InboundDedup, "record", lambda *_name: False)
    check(scenarios.gossip, 1)
    check(scenarios.federated, 1)


def test_a_failed_send_that_nobody_hears_of_is_found(monkeypatch) -> None:
    original = Node.send_failed

    def send_failed(self, peer, reason, *, tag=None, blames_peer=True):
        original(self, peer, reason, blames_peer=blames_peer)

    monkeypatch.setattr(Node, "send_failed", send_failed)
    assert re.search(r"round \d+ took \d+ ns although all of", broken_by(scenarios.unreachable))


def asking() -> Network:
    """A question that nobody answers, of 2 s."""
    net = Network(seed=5)
    asker = net.add("asker", programs.ask(), ["asker"])
    net.add("worker", programs.ask(), ["worker"])
    net.run_until_idle()
    net.set_links(programs.LOST)
    asker.invoke("asker", {"x": programs.number(1)})
    return net


def test_what_waits_past_its_deadline_is_found() -> None:
    net = asking()
    net.run(until=S)
    invariants.check_waits(net)
    net.now_ns = 3 * S  # as if time had passed the node by
    with pytest.raises(InvariantBroken, match=r"asker at 3000000000 ns: .* waits for .* deadline"):
        invariants.check_waits(net)


def test_an_execution_that_waits_for_nothing_is_found(monkeypatch) -> None:
    net = asking()
    net.run(until=S)
    monkeypatch.setattr(Node, "waiting", lambda _self: [])
    with pytest.raises(InvariantBroken, match=r"execution 1 of asker#.* waits for nothing"):
        invariants.check_waits(net)


def test_what_is_left_behind_is_found() -> None:
    net = asking()
    net.run(until=S)
    with pytest.raises(InvariantBroken, match=r"'executions.live': 1.*'requests.open': 1"):
        invariants.check_at_rest(net)
    net.run_until_idle()
    invariants.check_at_rest(net)


def test_a_failure_that_no_fault_explains_is_found() -> None:
    net = asking()
    net.run_until_idle()
    invariants.check_failures(net, {"QuorumNotReached"})
    with pytest.raises(InvariantBroken, match=r": QuorumNotReached: .*only Other can"):
        invariants.check_failures(net, {"Other"})


def test_invariants_pass_over_nodes_that_are_down() -> None:
    net = asking()
    net.run(until=S)
    net.crash("asker")
    net.now_ns = 3 * S
    invariants.check_waits(net)
    invariants.check_at_rest(net)
    assert invariants.table_sizes(net)["peers.known"] == 2


# --- schedules -----------------------------------------------------------------------------


def test_faults_follow_from_the_seed_and_end_in_time() -> None:
    drawn = [draw_faults(seed, NAMES, until_ns=S, outages=10) for seed in range(50)]
    assert drawn == [draw_faults(seed, NAMES, until_ns=S, outages=10) for seed in range(50)]
    assert len({str(faults) for faults in drawn}) == 50
    kinds = {type(event) for faults in drawn for event in faults.events}
    assert kinds == {Save, Crash, Cut}
    for faults in drawn:
        assert set(faults.clocks) == set(NAMES)
        assert [e.at_ns for e in faults.events] == sorted(e.at_ns for e in faults.events)
        for event in faults.events:
            end_ns = {Crash: "back_ns", Cut: "heal_ns"}.get(type(event), "at_ns")
            assert 0 <= event.at_ns <= getattr(event, end_ns) <= S
            if isinstance(event, Cut):
                assert sorted(event.side + event.other) == NAMES
        assert len(faults.lines()) == 1 + len(faults.events)


def test_the_immortal_do_not_crash() -> None:
    for seed in range(20):
        faults = draw_faults(seed, NAMES, until_ns=S, outages=10, immortal=["a", "c"])
        assert {e.node for e in faults.events if isinstance(e, Crash)} <= {"b", "d"}
        faults = draw_faults(seed, NAMES, until_ns=S, outages=10, immortal=NAMES)
        assert {type(e) for e in faults.events} <= {Cut}


def test_a_schedule_is_carried_out_and_leaves_a_whole_network() -> None:
    for seed in range(5):
        faults = draw_faults(seed, NAMES, until_ns=S, outages=8)
        net = Network(seed, link=faults.link)
        for name in NAMES:
            net.add(name, programs.rounds(), ["client"], clock=faults.clocks[name])
        faults.schedule(net)
        net.run(until=S + 100 * MS)
        happened = [line.split()[2] for line in net.trace.lines()]
        crashes = sum(isinstance(event, Crash) for event in faults.events)
        assert 0 < happened.count("crash") == happened.count("restart") <= crashes or not crashes
        assert all(node.is_up for node in net.nodes)
        assert {len(node.node.connected_peers()) for node in net.nodes} == {3}


# --- reports -------------------------------------------------------------------------------


def test_a_failing_seed_names_the_command_that_fails_again() -> None:
    check(scenarios.broken, 6, limit=7)
    with pytest.raises(ScenarioFailed) as caught:
        check(scenarios.broken, 7, limit=7)
    line = str(caught.value).splitlines()[-1]
    words = shlex.split(line.removeprefix("To run it again: "))
    assert words[:3] == ["python", "-m", "bbnode.sim.replay"]
    made = subprocess.run(
        [sys.executable, *words[1:], "--trace", "5"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert made.returncode == 1, made.stderr
    assert made.stdout.splitlines() == [
        "0 nobody draws 7",
        "FAILED after 1 lines of trace",
        *str(caught.value).splitlines(),
    ]


def test_replay_tells_what_it_ran_and_stops_at_the_first_failure(capsys) -> None:
    name = "tests.sim.scenarios:broken"
    assert replay.main([name, "--seed", "1", "--seeds", "9"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("seed ")] == [
        f"seed {seed}: all invariants hold; 0 ns, " for seed in (1, 2)
    ]
    assert lines[1] == f"trace 1 lines {scenarios.broken(1, Trace()).trace.digest}"
    assert "seed 3 is not below 3" in lines[-2]
    assert lines[-1].endswith(scenario.command(scenarios.broken, 3, {}))
    assert replay.main([name, "--seed", "8", "--set", "limit=9"]) == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tests.sim.scenarios"], "not of the form MODULE:FUNCTION"),
        (["tests.sim.no_such:x"], "No module named"),
        (["tests.sim.scenarios:nothing"], "no function 'nothing'"),
        (["tests.sim.scenarios:broken", "--set", "limit=x"], "NAME=N"),
        (["tests.sim.scenarios:broken", "--set", "most=3"], "can't be called so"),
    ],
)
def test_replay_refuses_what_it_cannot_run(arguments, complaint, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        replay.main([*arguments, "--seed", "1"])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err
