"""Faults: what is lost, doubled, cut off or dead, and what the nodes make of it."""

from __future__ import annotations

import pytest

from bbnode.engine import Limits, steps
from bbnode.sim import LinkModel, Network, NodeIsDown, S
from tests.sim import programs
from tests.sim.programs import MS, component, number
from tests.sim.test_network import asked, notes


def write(net, writer, *numbers: float) -> None:
    for value in numbers:
        writer.invoke("writer", {"note": number(value)})
        net.run_until_idle()


def test_what_is_lost_is_missing_in_the_answer() -> None:
    net = Network()
    asker = net.add("asker", programs.ask(quorum=2), ["asker"])
    for i in range(3):
        net.add(f"worker-{i}", programs.ask(quorum=2), ["worker"])
    net.set_link("worker-1", "asker", LinkModel(loss=1.0))
    execution = asker.invoke("asker", {"x": number(1)})
    net.run_until_idle()
    answers = asker.outputs(execution)["answers"]
    assert answers.missing == (net["worker-1"].peer_id,)
    assert len(answers.responses) == 2
    assert net.now_ns == 2 * S  # the quorum is there at once, and counts at the deadline
    assert net.counters()["envelopes.lost"] == 1


def test_below_the_quorum_the_op_fails() -> None:
    net, asker = asked(link=LinkModel(loss=1.0))
    execution = asker.invoke("asker", {"x": number(1)})
    net.run_until_idle()
    assert [failed.kind for failed in asker.failures()] == ["QuorumNotReached"]
    assert asker.has_finished(execution)
    assert not asker.node.executions()


def test_what_arrives_twice_counts_once() -> None:
    net, writer, keeper = notes(link=LinkModel(duplication=1.0, jitter_ns=MS))
    write(net, writer, 1, 2, 3)
    assert component(keeper, "notes").seen == [1.0, 2.0, 3.0]
    assert net.counters()["envelopes.duplicated"] == 3
    assert net.counters()["envelopes.delivered"] == 6


def test_what_is_overtaken_arrives_all_the_same() -> None:
    net, writer, keeper = notes(link=LinkModel(reorder=0.5, reorder_ns=20 * MS))
    for value in range(20):
        writer.invoke("writer", {"note": number(value)})
        net.run(until=net.now_ns + MS)
    net.run_until_idle()
    seen = component(keeper, "notes").seen
    assert sorted(seen) == list(range(20))
    assert seen != sorted(seen)


def test_a_cut_breaks_the_connection_and_what_is_under_way() -> None:
    net, writer, keeper = notes()
    writer.invoke("writer", {"note": number(1)})
    net.run(until=MS // 2)  # it is on the wire now
    net.cut(writer, keeper)
    net.heal(writer, keeper)  # a new connection does not deliver what the old one carried
    net.run_until_idle()
    assert component(keeper, "notes").seen == []
    assert net.counters()["envelopes.lost_with_connection"] == 1
    assert [step.reason for step in writer.seen(steps.PeerDown)] == ["the network was cut"]
    write(net, writer, 2)
    assert component(keeper, "notes").seen == [2.0]


def test_while_it_is_cut_nobody_is_in_the_view() -> None:
    net, writer, keeper = notes()
    net.cut("writer", "keeper")
    net.connect(writer, keeper)  # wanted, and not possible
    net.run_until_idle()
    assert list(writer.node.connected_peers("keeper")) == []
    net.heal("writer", "keeper")
    net.run_until_idle()
    assert list(writer.node.connected_peers("keeper")) == [keeper.peer_id]


def test_a_partition_cuts_across_groups_only() -> None:
    net, asker = asked(workers=4)
    net.partition([asker, "worker-0"], ["worker-1", "worker-2"], ["worker-3"])
    net.run_until_idle()
    seen = {n.name: len(n.node.connected_peers()) for n in net.nodes}
    assert seen == {"asker": 1, "worker-0": 1, "worker-1": 1, "worker-2": 1, "worker-3": 0}
    net.heal_all()
    net.run_until_idle()
    assert {len(node.node.connected_peers()) for node in net.nodes} == {4}


def test_disconnected_on_purpose_stays_so() -> None:
    net, asker = asked(workers=2)
    net.disconnect("asker", "worker-0")
    net.cut("asker", "worker-0")
    net.heal("asker", "worker-0")
    net.run_until_idle()
    assert list(asker.node.connected_peers()) == [net["worker-1"].peer_id]


def test_a_send_without_a_connection_fails_as_a_transport_would_say() -> None:
    """The question arrives, and the connection breaks before its answer is on the way."""
    net, asker = asked(workers=1)
    asker.invoke("asker", {"x": number(1)})
    net.run(until=0)
    net.run_until(lambda: net.counters().get("envelopes.delivered") == 1)
    net.cut("asker", "worker-0")
    net.run_until_idle()
    assert net.counters()["envelopes.not_connected"] == 1
    assert net["worker-0"].node.counters()["send.failed"] == 1
    assert [failed.kind for failed in asker.failures()] == ["QuorumNotReached"]


def test_a_crashed_node_comes_back_from_its_checkpoint() -> None:
    net, writer, keeper = notes()
    write(net, writer, 1, 2)
    keeper.checkpoint()
    write(net, writer, 3)
    assert keeper.values("kept") == [1, 2, 3]
    net.crash(keeper)
    net.crash(keeper)  # dead is dead
    write(net, writer, 4)
    assert [step.reason for step in writer.seen(steps.PeerDown)] == ["the connection was reset"]
    with pytest.raises(NodeIsDown, match="restart"):
        keeper.invoke("keeper", {})
    net.restart("keeper")
    net.restart("keeper")  # and alive is alive
    assert component(keeper, "notes").seen == [1.0, 2.0]
    assert keeper.node.incarnation == 2
    write(net, writer, 5)
    assert component(keeper, "notes").seen == [1.0, 2.0, 5.0]
    assert keeper.values("kept") == [1, 2, 3, 3]  # what it said before is still known


def test_without_a_checkpoint_a_node_begins_anew() -> None:
    net, writer, keeper = notes()
    write(net, writer, 1)
    net.crash(keeper)
    net.restart(keeper)
    write(net, writer, 2)
    assert component(keeper, "notes").seen == [2.0]
    net.crash(keeper)
    net.restart(keeper)
    assert keeper.node.incarnation == 3


def test_the_work_of_a_dead_node_is_dead_with_it() -> None:
    net, writer, keeper = notes(task_ns=S)
    writer.invoke("writer", {"note": number(1)})
    net.run(until=500 * MS)
    assert len(keeper.node.waiting()) == 1
    dead = component(keeper, "notes")
    net.crash(keeper)
    net.restart(keeper)
    net.run_until_idle()
    assert dead.seen == component(keeper, "notes").seen == []
    assert keeper.node.waiting() == []
    assert "completion.unknown" not in keeper.node.counters()


def test_a_node_may_crash_in_the_middle_of_its_steps() -> None:
    def fall(_at: int, node, step: steps.Step) -> None:
        if isinstance(step, steps.SendEnvelope):
            net.crash(node)

    net, asker = asked(observe=fall)
    asker.invoke("asker", {"x": number(1)})
    net.run_until_idle()
    assert not asker.is_up
    assert net.counters()["envelopes.sent"] == 1  # of three
    assert net.counters()["envelopes.lost_with_connection"] == 1


def test_faults_can_be_planned_and_are_part_of_the_trace() -> None:
    def run() -> Network:
        net, writer, _ = notes(seed=3, link=LinkModel(jitter_ns=MS))
        net.at(20 * MS, lambda: net.crash("keeper"))
        net.at(40 * MS, lambda: net.restart("keeper"))
        for value in range(30):
            net.at(
                (2 * value + 1) * MS,
                lambda value=value: writer.invoke("writer", {"note": number(value)}),
            )
        net.run_until_idle()
        return net

    first, second = run(), run()
    assert first.trace.digest == second.trace.digest
    assert [line.split()[0] for line in first.trace.lines() if "crash" in line] == ["20000000"]
    seen = component(first["keeper"], "notes").seen
    assert seen[0] >= 19  # what it knew is gone
    assert seen[-1] == 29.0


def cohort(**more: object) -> tuple[Network, object]:
    """An asker and three workers of a program that is content with two answers, at 2 s."""
    net = Network()
    made = programs.ask(quorum=2)
    asker = net.add("asker", made, ["asker"], limits=Limits(lost_peer_grace_ms=500), **more)
    for i in range(3):
        net.add(f"worker-{i}", made, ["worker"])
    net.run_until_idle()
    return net, asker


def test_who_dies_is_missing_after_the_grace_and_not_at_the_deadline() -> None:
    net, asker = cohort()
    net.set_link("worker-1", "asker", LinkModel(latency_ns=S))
    execution = asker.invoke("asker", {"x": number(1)})
    net.run(until=net.now_ns + 50 * MS)
    net.crash("worker-1")
    net.run_until(lambda: asker.has_finished(execution))
    answers = asker.outputs(execution)["answers"]
    ((peer, why),) = answers.reasons
    assert (peer, why.kind) == (net["worker-1"].peer_id, "ConnectionLost")
    assert "the connection was reset" in why.detail
    assert net.now_ns < S
    assert asker.node.waiting() == []


def test_who_is_back_within_the_grace_is_waited_for() -> None:
    net, asker = cohort()
    net.set_link("worker-1", "asker", LinkModel(latency_ns=S))
    execution = asker.invoke("asker", {"x": number(1)})
    net.run(until=net.now_ns + 50 * MS)
    net.cut("worker-1", "asker")
    net.run(until=net.now_ns + 100 * MS)
    net.heal("worker-1", "asker")
    net.run_until_idle()
    # What was under way is lost with the connection: it is missing at the deadline, and only late.
    answers = asker.outputs(execution)["answers"]
    assert (len(answers.responses), answers.reasons) == (2, ())
    assert net.now_ns >= 2 * S


def test_everybody_who_says_no_ends_a_request_in_a_round_trip() -> None:
    net, asker = cohort()
    for i in range(3):
        net[f"worker-{i}"].node.leave()
    asker.invoke("asker", {"x": number(1)})
    net.run_until_idle()
    (failed,) = asker.failures()
    assert failed.kind == "QuorumNotReached"
    assert failed.detail.count("ShuttingDown: this node is being stopped") >= 2
    assert net.now_ns < 100 * MS
