"""A network in several processes: the same run, byte for byte, and what happens to one that dies.

Rule: what is compared is the digest of the whole trace, the counts, the time and what nodes say.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, register_component
from bbnode.engine import Limits, plan_program
from bbnode.engine.errors import UnknownInput, UnknownSlot
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.values import TRIGGER, Metadata
from bbnode.sim import (
    MS,
    Clock,
    LinkModel,
    NameTaken,
    Network,
    NodeIsDown,
    NodeIsElsewhere,
    NotReached,
    NotSplit,
    ProcessFailed,
    S,
    SplitNetwork,
    UnknownSimNode,
    draw_faults,
    invariants,
    plain,
)
from bbnode.sim.part import PartTrace
from tests.sim import gossip as averaging
from tests.sim import programs
from tests.sim.programs import number

NAMES = ["peer-0", "peer-1", "peer-2", "peer-3"]
UNTIL_NS = 1 * S


def gossip(net: Network, seed: int) -> None:
    """Peers that crash, also to old snapshots, are cut off, and have clocks of their own."""
    faults = draw_faults(seed, NAMES, until_ns=UNTIL_NS, outages=4)
    net.set_links(faults.link)
    for i, name in enumerate(NAMES):
        averaging.add_peer(net, i, (float(i), float(-i)), clock=faults.clocks[name])
    faults.schedule(net)
    net.run(until=UNTIL_NS)
    net.set_links(LinkModel())
    net.run(until=net.now_ns + 300 * MS)


def questions(net: Network, seed: int) -> None:
    """Requests with a quorum, over links that lose, while workers come and go."""
    asker = net.add("asker", programs.ask(quorum=2), ["asker"])
    for i in range(3):
        net.add(f"worker-{i}", programs.ask(quorum=2), ["worker"], task_ns=i * MS)
    net.set_links(LinkModel(latency_ns=MS, jitter_ns=seed % 7 * MS, loss=0.2, duplication=0.1))
    for i in range(10):
        net.at(i * 100 * MS, lambda: asker.invoke("asker", {"x": number(seed)}))
    net.at(350 * MS, lambda: net.crash("worker-1"))
    net.at(650 * MS, lambda: net.restart("worker-1"))
    net.run_until_idle()
    invariants.check_waits(net)
    invariants.check_at_rest(net)


def rounds(net: Network, seed: int) -> None:
    """Everything at once: no link takes any time, and work none either."""
    net.set_links(LinkModel(latency_ns=0))
    server = net.add("sërver\0", programs.rounds(), ["server"])
    for i in range(3):
        net.add(f"client-{i}", programs.rounds(), ["client"], clock=Clock(drift_ppm=seed % 100))
    for i in range(5):
        net.at(i * MS, lambda: server.invoke("server", {"tick": TRIGGER}))
    net.run_until_idle()


def memories(net: Network, seed: int) -> None:
    """Offloaded work, checkpoints, and what is told to some while others are cut off."""
    writer = net.add("writer", programs.notes(), ["writer"])
    for i in range(3):
        net.add(f"keeper-{i}", programs.notes(), ["keeper"], task_ns=5 * MS)
    for i in range(6):
        net.at(i * 10 * MS, lambda: writer.invoke("writer", {"note": number(seed)}))
    net.at(33 * MS, net["keeper-0"].checkpoint)
    net.at(35 * MS, lambda: net.partition(["writer", "keeper-0"], ["keeper-1", "keeper-2"]))
    net.at(48 * MS, lambda: net.crash("keeper-0"))
    net.at(52 * MS, net.heal_all)
    net.at(55 * MS, lambda: net.restart("keeper-0"))
    net.run_until_idle()


PROGRAMS: list[Callable[[Network, int], None]] = [gossip, questions, rounds, memories]


def outcome(net: Network) -> Any:
    return {
        "digest": net.trace.digest,
        "lines": net.trace.lines()[-50:],
        "counts": net.counters(),
        "now_ns": net.now_ns,
        "nodes": [(node.name, node.is_up, node.incarnation) for node in net.nodes],
        "steps": [[(at, type(step)) for at, step in node.history()] for node in net.nodes],
        "failed": [[str(failed) for failed in node.failures()] for node in net.nodes],
        "engines": [node.counters() for node in net.nodes if node.is_up],
    }


def check_same(program: Callable[[Network, int], None], seed: int, processes: int) -> None:
    whole = Network(seed)
    program(whole, seed)
    with SplitNetwork(seed, processes=processes) as split:
        program(split, seed)
        assert outcome(split) == outcome(whole)


@pytest.mark.parametrize("program", PROGRAMS)
def test_several_processes_give_the_trace_of_one(program) -> None:
    check_same(program, 7, 2)


@settings(max_examples=4, deadline=None)
@given(st.sampled_from(PROGRAMS), st.integers(0, 1 << 32), st.integers(1, 4))
def test_whatever_the_seed_and_the_number_of_processes(program, seed, processes) -> None:
    check_same(program, seed, processes)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PROGRAMS), st.integers(0, 1 << 32), st.integers(1, 4))
def test_whatever_the_seed_and_the_number_of_processes_at_length(program, seed, processes) -> None:
    check_same(program, seed, processes)


def asked(net: SplitNetwork, **more: Any):
    asker = net.add("asker", programs.ask(), ["asker"], **more)
    worker = net.add("worker", programs.ask(), ["worker"], **more)
    return asker, worker


def test_nodes_are_looked_at_from_here() -> None:
    with SplitNetwork(processes=2) as net:
        asker, worker = asked(net)
        execution = asker.invoke("asker", {"x": number(4)})
        net.run(until=MS)
        assert [info.execution for info in asker.executions()] == [execution]
        assert asker.waiting()[0].whom
        net.run_until_idle()
        answers = asker.outputs(execution)["answers"]
        assert [(peer, float(x[0])) for peer, x in answers.responses] == [(worker.peer_id, 8.0)]
        assert asker.has_finished(execution)
        assert asker.counters()["envelopes.out"] == 1
        assert asker.classes == ("asker",)


def test_what_a_node_refuses_is_raised_here() -> None:
    with SplitNetwork(processes=2) as net:
        asker, worker = asked(net)
        with pytest.raises(UnknownInput, match="'y'"):
            asker.invoke("asker", {"y": number(1)})
        with pytest.raises(UnknownSlot, match="no installed target uses"):
            net.add("third", programs.ask(), ["worker"], config={"nothing": {}})
        third = net.add("third", programs.ask(), ["worker"])  # its name is free
        with pytest.raises(NameTaken):
            net.add("third", programs.ask(), ["worker"])
        with pytest.raises(UnknownSimNode):
            net.cut("asker", "fourth")
        net.crash(worker)
        with pytest.raises(NodeIsDown, match="restart"):
            worker.deliver_event("worker", "x", number(1))
        with pytest.raises(NodeIsElsewhere):
            third.component("compute")
        with pytest.raises(NodeIsElsewhere):
            third.node  # noqa: B018
        asker.invoke("asker", {"x": number(1)})
        net.run_until_idle()
        assert len(asker.values("answers")) == 1


def test_what_never_rests_is_run_to_a_time() -> None:
    with SplitNetwork(processes=2) as net:
        clock = net.add("clock", programs.ticker(), ["clock"], process=1)
        net.run(until=100 * MS)
        assert clock.values("tick") == [at * 10 * MS for at in range(1, 11)]
        with pytest.raises(NotReached, match=r"run\(until=…\)"):
            net.run_until_idle(limit_ns=50 * MS)


def test_what_can_not_be_split_is_said() -> None:
    with pytest.raises(NotSplit, match="give 1 or more"):
        SplitNetwork(processes=0)
    with SplitNetwork(processes=1) as net:
        with pytest.raises(NotSplit, match="give the model"):
            net.add("asker", plan_program(programs.ask(), ["asker"]))
        with pytest.raises(NotSplit, match="no process 1"):
            net.add("asker", programs.ask(), ["asker"], process=1)
        with pytest.raises(NotSplit, match="after every event"):
            net.run_until(lambda: True)
        with pytest.raises(NotSplit, match="can't be sent"):
            net.add("asker", programs.ask(), ["asker"], config={"compute": {"x": object()}})


def test_a_component_of_the_script_itself_is_refused(monkeypatch) -> None:
    @register_component
    class Local(ConnectedView):
        TYPE_NAME: ClassVar[str] = "test.LocalView"

    monkeypatch.setattr(Local, "__module__", "__main__")
    model = Compiler().bind_peer_selector("clients", Local).compile(programs.Round().build())
    with SplitNetwork(processes=1) as net, pytest.raises(NotSplit, match="move it to a module"):
        net.add("server", model, ["server"])


@pytest.mark.parametrize("when", ["before it is asked", "while it works"])
def test_a_process_that_dies_ends_the_run(when) -> None:
    with SplitNetwork(processes=2) as net:
        asker, _ = asked(net)
        net.run_until_idle()
        started = net._processes._started
        if when == "while it works":
            started[1].send_signal(signal.SIGSTOP)
            net._processes.begin(1, net.now_ns, "next")
        started[1].kill()
        started[1].wait()
        ended = (lambda: net._processes.end(1)) if when == "while it works" else net.run_until_idle
        with pytest.raises(ProcessFailed, match="process 1 of the simulation has ended"):
            ended()
        with pytest.raises(ProcessFailed):
            asker.counters()
        assert all(process.poll() is not None for process in started)


def test_a_fault_of_the_process_itself_is_told_whole() -> None:
    net = SplitNetwork(processes=1, imports=["tests.sim.no_such_module"])
    with net, pytest.raises(ProcessFailed, match="no_such_module"):
        net.run(until=S)


def test_closing_ends_the_processes_and_so_does_leaving_the_network() -> None:
    net = SplitNetwork(processes=2)
    started = net._processes._started
    net.run(until=1)  # they have started
    net.close()
    net.close()
    assert [process.poll() for process in started] == [0, 0]
    net = SplitNetwork(processes=1)
    started = net._processes._started
    net.run(until=1)
    del net
    assert [process.poll() for process in started] == [0]


def test_processes_end_with_the_one_that_started_them() -> None:
    script = (
        "import os\n"
        "from bbnode.sim import SplitNetwork\n"
        "net = SplitNetwork(processes=1)\n"
        "print(net._processes._started[0].pid, flush=True)\n"
        "net.run(until=1)\n"
        "os._exit(3)\n"
    )
    made = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    # Its standard error is inherited: `run` returns when the process has closed it as well.
    assert (made.returncode, made.stderr) == (3, "")


@pytest.mark.parametrize(
    "item",
    [
        None,
        True,
        -5,
        1.5,
        "text",
        b"bytes",
        ("a", ("b", 1)),
        {"a": 1, "b": (2,)},
        PeerId.from_seed(1),
        Metadata({"n": 1}),
        Limits.edge(),
        Clock(drift_ppm=5),
        LinkModel(loss=0.5),
    ],
)
def test_what_is_sent_arrives(item) -> None:
    assert plain.unpack(plain.pack(item)) == item


def test_tensors_arrive_and_what_is_no_message_is_refused() -> None:
    assert plain.unpack(plain.pack([np.ones(3, np.float32)]))[0].tolist() == [1, 1, 1]
    with pytest.raises(NotSplit):
        plain.pack({"a": object()})
    with pytest.raises(DecodeError):
        plain.unpack(plain.msgpack.packb(["odd", 1]))


def test_lines_belong_to_events() -> None:
    net = Network()
    trace = PartTrace(net._agenda)
    trace.note(1, "a", "by the author")
    net._agenda.key = 8
    trace.note(1, "a", "one")
    trace.note(1, "a", "two")
    net._agenda.key = 12
    trace.note(1, "b", "three")
    assert trace.handed_over() == (
        np.array([1, 8, 1, 12, 15, 9], np.int64).tobytes(),
        b"1 a one\n1 a two1 b three",
    )
    assert trace.handed_over() == (b"", b"")
