"""Runs without faults: time, idleness, tasks, what nodes say, and the trace."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bbnode.engine import Limits, steps
from bbnode.engine.errors import OversizePayload
from bbnode.sim import (
    Clock,
    LinkModel,
    NameTaken,
    Network,
    NotReached,
    S,
    TimeStandsStill,
    UnknownSimNode,
    network,
)
from bbnode.sim.trace import Trace
from tests.sim import programs
from tests.sim.programs import MS, component, number


def asked(seed: int = 0, workers: int = 3, **more):
    net = Network(seed, **more)
    asker = net.add("asker", programs.ask(), ["asker"])
    for i in range(workers):
        net.add(f"worker-{i}", programs.ask(), ["worker"])
    return net, asker


def notes(task_ns: int = 0, **more):
    net = Network(**more)
    writer = net.add("writer", programs.notes(), ["writer"])
    keeper = net.add("keeper", programs.notes(), ["keeper"], task_ns=task_ns)
    return net, writer, keeper


def test_a_request_goes_there_and_back() -> None:
    net, asker = asked()
    execution = asker.invoke("asker", {"x": number(4)})
    net.run_until_idle()
    answers = asker.outputs(execution)["answers"]
    assert [float(value[0]) for _, value in answers.responses] == [8.0] * 3
    assert list(answers.peers) == sorted(node.peer_id for node in net.nodes[1:])
    assert net.now_ns == 2 * MS
    assert asker.has_finished(execution)
    assert not asker.failures()
    assert net.counters()["envelopes.delivered"] == 6


def test_nodes_hear_of_each_other_with_classes_and_addresses() -> None:
    net, asker = asked(workers=2)
    net.run_until_idle()
    up = {step.peer: step.classes for step in asker.seen(steps.PeerUp)}
    assert up == {net["worker-0"].peer_id: ("worker",), net["worker-1"].peer_id: ("worker",)}
    known = asker.node._rt.neighbours.book.lookup(net["worker-1"].peer_id)
    assert known == (net["worker-1"].address,)
    assert list(up) == [net.peer_id(f"worker-{i}") for i in range(2)]


def test_without_a_mesh_only_what_is_connected_is() -> None:
    net, asker = asked(mesh=False)
    net.connect("asker", "worker-1", LinkModel(latency_ns=7 * MS))
    execution = asker.invoke("asker", {"x": number(1)})
    net.run_until_idle()
    answers = asker.outputs(execution)["answers"]
    assert list(answers.peers) == [net["worker-1"].peer_id]
    assert net.now_ns == 14 * MS


def test_run_stops_at_its_time() -> None:
    net, asker = asked()
    asker.invoke("asker", {"x": number(1)})
    net.run(until=MS)
    assert net.now_ns == MS
    assert not asker.values("answers")
    net.run(until=5 * S)  # all happened long before; time goes on all the same
    assert (len(asker.values("answers")), net.now_ns) == (1, 5 * S)
    net.run_until_idle()
    assert net.now_ns == 5 * S


def test_a_timer_that_was_called_off_does_not_hold_up_the_end() -> None:
    """The request's deadline of 2 s is armed, and cancelled when all have answered."""
    net, asker = asked()
    for _ in range(200):
        asker.invoke("asker", {"x": number(1)})
        net.run_until_idle()
    assert net.now_ns == 400 * MS
    assert len(net._agenda) == 0


def test_a_program_that_never_rests_is_run_to_a_time() -> None:
    net = Network()
    clock = net.add("clock", programs.ticker(), ["clock"])
    net.run(until=100 * MS)
    assert clock.values("tick") == [at * 10 * MS for at in range(1, 11)]
    with pytest.raises(NotReached, match=r"run\(until=…\)"):
        net.run_until_idle(limit_ns=50 * MS)


def test_wakeups_that_nobody_heeds_do_not_pile_up() -> None:
    net, asker = asked(workers=1)
    net.at(1900 * MS, lambda: None)  # something real that stands before them in the agenda
    sizes = set()
    for at in range(1000):  # each request leaves the wakeup of its deadline, 2 s later
        asker.invoke("asker", {"x": number(1)})
        net.run(until=(at + 1) * 2 * MS)
        sizes.add(len(net._agenda))
    assert len(asker.values("answers")) == 1000
    assert max(sizes) < 100


def test_run_until_a_condition() -> None:
    net = Network()
    clock = net.add("clock", programs.ticker(), ["clock"])
    net.run_until(lambda: len(clock.values("tick")) == 3)
    assert net.now_ns == 30 * MS
    with pytest.raises(NotReached, match="are over"):
        net.run_until(lambda: False, limit_ns=S)
    quiet, asker = asked()
    asker.invoke("asker", {"x": number(1)})
    with pytest.raises(NotReached, match="nothing is left to happen"):
        quiet.run_until(lambda: False)


def test_an_error_says_who_waits_for_whom() -> None:
    net, asker = asked(link=LinkModel(loss=1.0), workers=1)
    asker.invoke("asker", {"x": number(1)})
    with pytest.raises(NotReached, match=f"asker: .*{net['worker-0'].peer_id}"):
        net.run_until_idle(limit_ns=S)


def test_offloaded_work_takes_its_time_and_does_not_stop_the_node() -> None:
    net, writer, keeper = notes(task_ns=50 * MS)
    for value in (1, 2):
        writer.invoke("writer", {"note": number(value)})
    net.run(until=40 * MS)
    assert keeper.values("kept") == []
    assert {entry.why for entry in keeper.node.waiting()} == {
        "worker thread",
        "another op of the same component",
    }
    net.run_until_idle()
    kept = [at for at, step in keeper.history() if isinstance(step, steps.AppEvent)]
    assert kept == [51 * MS, 101 * MS]  # one after the other: they share a component
    assert component(keeper, "notes").seen == [1.0, 2.0]


def test_a_task_that_raises_fails_its_op() -> None:
    net, writer, keeper = notes()
    writer.invoke("writer", {"note": number(-1)})
    net.run_until_idle()
    (failed,) = keeper.failures()
    assert failed.kind == "UnexpectedException"
    assert failed.detail.startswith("ValueError: no room (raised at programs.py:")


@pytest.mark.parametrize("threads", [False, True])
def test_tasks_run_in_threads_only_when_asked_for(threads: bool, monkeypatch) -> None:
    in_main: list[bool] = []
    original = programs.SlowNotes.add

    def add(self, ctx, vector, metadata=None, id=None):  # noqa: A002
        in_main.append(threading.current_thread() is threading.main_thread())
        return original(self, ctx, vector)

    add.__dict__.update(original.__dict__)  # the mark of `offload`
    monkeypatch.setattr(programs.SlowNotes, "add", add)
    net, writer, keeper = notes(threads=threads)
    writer.invoke("writer", {"note": number(1)})
    net.run_until_idle()
    assert keeper.values("kept") == [1]
    assert in_main == [not threads]


def noisy(seed: int, threads: bool = False) -> Trace:
    link = LinkModel(jitter_ns=3 * MS, loss=0.1, duplication=0.2, reorder=0.2)
    net = Network(seed, link=link, threads=threads)
    writer = net.add("writer", programs.notes(), ["writer"])
    for i in range(4):
        net.add(f"keeper-{i}", programs.notes(), ["keeper"], task_ns=2 * MS)
    for value in range(20):
        net.at(value * MS, lambda value=value: writer.invoke("writer", {"note": number(value)}))
    net.run_until_idle()
    return net.trace


def test_the_same_seed_gives_the_same_trace_and_another_one_another() -> None:
    first = noisy(7)
    assert first.lines() == noisy(7).lines()
    assert first.digest == noisy(7).digest == noisy(7, threads=True).digest
    assert first.digest != noisy(8).digest
    assert len(first) == len(first.lines()) > 300


def test_the_trace_is_the_same_in_another_process() -> None:
    """Python hashes strings and bytes differently in each process; no order may follow that."""
    script = "from tests.sim.test_network import noisy; print(noisy(7).digest)"
    made = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent.parent.parent,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert made.stdout.strip() == noisy(7).digest


def test_a_trace_keeps_the_newest_lines_and_the_digest_of_all() -> None:
    whole, short = Trace(), Trace(kept=2)
    for trace in (whole, short):
        for at in range(5):
            trace.note(at, "a", "poll")
    assert short.lines() == ["3 a poll", "4 a poll"]
    assert (len(short), short.digest) == (5, whole.digest)
    other = Trace()
    for at in range(5):
        other.note(at, "b", "poll")
    assert other.digest != whole.digest


def test_a_trace_keeps_its_lines_as_they_are() -> None:
    names = [f"node-{at}" if at % 3 else "a\nb" for at in range(1500)]
    for kept in (0, 1, 300, 10_000):
        trace = Trace(kept=kept)
        for at, name in enumerate(names):
            trace.note(at, name, "poll")
            if at == 700:
                trace.add(["x\ny", "z"])
        lines = [f"{at} {name} poll" for at, name in enumerate(names)]
        lines[701:701] = ["x\ny", "z"]
        assert trace.lines() == lines[max(len(lines) - kept, 0) :]
        assert len(trace) == len(lines)
        text = "\n".join(lines) + "\n"
        assert trace.digest == hashlib.sha256(text.encode()).hexdigest()


def test_a_drifting_clock_shifts_timers() -> None:
    net = Network()
    slow = net.add("slow", programs.ticker(), ["clock"], clock=Clock(drift_ppm=-100_000))
    ahead = Clock(offset_ns=S, drift_ppm=100_000)
    fast = net.add("fast", programs.ticker(), ["clock"], clock=ahead)
    net.run(until=99 * MS)
    at = {
        node.name: [t for t, step in node.history() if isinstance(step, steps.AppEvent)]
        for node in (slow, fast)
    }
    assert at["slow"][:2] == [11_111_112, 22_222_223]
    assert (len(at["slow"]), len(at["fast"])) == (8, 10)
    # The first whole nanosecond of true time at which it shows 10 ms or more.
    assert fast.values("tick")[0] == S + 10 * MS + 1


def test_observers_see_every_step_and_limits_hold() -> None:
    seen = []
    net = Network(observe=lambda _at, node, step: seen.append((node.name, type(step).__name__)))
    writer = net.add("writer", programs.notes(), ["writer"], limits=Limits(invoke_bytes=1000))
    net.add("keeper", programs.notes(), ["keeper"])
    writer.invoke("writer", {"note": number(1)})
    net.run_until_idle()
    assert {("writer", "SendEnvelope"), ("keeper", "RunTask"), ("keeper", "AppEvent")} <= set(seen)
    with pytest.raises(OversizePayload, match="invoke_bytes"):
        writer.invoke("writer", {"note": np.zeros(1000, np.float32)})


def test_time_that_stands_still_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(network, "MAX_EVENTS_AT_ONCE", 100)
    net = Network()
    for at in range(300):
        net.at(at, lambda: None)
    net.run(until=300)  # many events, but time goes on

    def again() -> None:
        net.at(0, again)

    again()
    with pytest.raises(TimeStandsStill, match="100 events happened at 300 ns"):
        net.run(until=S)


def test_names_are_unique_and_known() -> None:
    net, asker = asked()
    with pytest.raises(NameTaken, match="asker"):
        net.add("asker", programs.ask(), ["asker"])
    with pytest.raises(UnknownSimNode, match="there are: asker, worker-0"):
        net.crash("nobody")
    with pytest.raises(UnknownSimNode, match="itself"):
        net.connect("asker", asker)
    with pytest.raises(UnknownSimNode, match="another network"):
        Network().crash(asker)
