"""Tracing: what it tells, that it costs nothing while off, and changes nothing while on."""

from __future__ import annotations

import numpy as np

from bbnode.engine import steps
from bbnode.ir.address import site_suffix
from bbnode.ir.values import TRIGGER, PeerIdVec
from tests.engine.builder import Partition, model
from tests.engine.protocols import chatting
from tests.engine.support import Pump, S, bring_up, of, peer
from tests.engine.test_round_trips import asker_and_answerer

TRACED = (steps.ExecutionStarted, steps.OpCompleted, steps.FillSent, steps.ExecutionEnded)


def sleeper(**more):
    p = Partition("server", inputs=["x"])
    p.sys("Sleep", ["x"], "later", called="nap", duration_ns=S)
    p.sys("OnTrigger", ["later"], "out", called="go")
    return bring_up(model(p), "server", **more)


def untraced(made):
    return [step for step in made if not isinstance(step, TRACED)]


def test_nothing_is_told_while_it_is_off() -> None:
    node = sleeper()
    assert not node.tracing
    node.invoke("server", {"x": TRIGGER})
    made = node.poll(0) + node.poll(S)
    assert made == untraced(made)
    assert (
        node._rt.executor.run == node._rt.executor._run
    )  # the very loop, without a question per op


def test_executions_and_ops_are_told_with_their_times() -> None:
    node = sleeper(trace=True)
    execution = node.invoke("server", {"x": TRIGGER})
    (started,) = of(steps.ExecutionStarted, node.poll(5))
    assert started == steps.ExecutionStarted(
        execution=execution,
        target=node.targets[0],
        entry="invoke",
        at_ns=5,
        source_peer=None,
        wire_req_id=0,
        site=0,
    )
    made = node.poll(S + 5)
    assert [(s.op, s.op_type, s.started_ns, s.ended_ns) for s in of(steps.OpCompleted, made)] == [
        ("nap", "Sleep", 5, S + 5),
        ("go", "OnTrigger", S + 5, S + 5),
    ]
    (ended,) = of(steps.ExecutionEnded, made)
    assert (ended.execution, ended.started_ns, ended.ended_ns, ended.failures) == (
        execution,
        5,
        S + 5,
        0,
    )


def test_it_can_be_switched_while_the_node_runs() -> None:
    node = sleeper()
    node.invoke("server", {"x": TRIGGER})
    node.poll(0)
    node.set_tracing(True)
    assert node.tracing
    assert [s.op for s in of(steps.OpCompleted, node.poll(S))] == ["nap", "go"]
    node.set_tracing(False)
    node.invoke("server", {"x": TRIGGER})
    made = node.poll(S) + node.poll(2 * S)
    assert made == untraced(made)


def test_a_message_is_followed_from_peer_to_peer() -> None:
    parts = asker_and_answerer()[:2]
    made = model(*parts)
    server, client = (bring_up(made, p.name, me=n, trace=True) for n, p in enumerate(parts))
    pump = Pump(server, client)
    execution = server.invoke(
        "server", {"x": np.ones(1, np.float32), "peers": PeerIdVec([peer(1)])}
    )
    pump.settle()
    (asked,) = pump.of(server, steps.FillSent)
    assert (asked.execution, asked.peer, asked.correlation) == (execution, peer(1), "REQUEST")
    assert asked.suffix == site_suffix(parts[1].site("q"))
    (there,) = pump.of(client, steps.ExecutionStarted)
    assert (there.source_peer, there.wire_req_id) == (peer(0), asked.wire_req_id)
    assert there.site == parts[1].site("q")
    (answered,) = pump.of(client, steps.FillSent)
    assert (answered.execution, answered.correlation) == (there.execution, "RESPONSE")
    assert answered.wire_req_id == asked.wire_req_id
    waited = [s for s in pump.of(server, steps.OpCompleted) if s.op_type == "RecvRespBatched"]
    assert [s.execution for s in waited] == [execution]


def test_the_control_plane_is_traced_too() -> None:
    node, other = chatting(0, trace=True), chatting(1, trace=True)
    pump = Pump(node, other)
    node.invoke("talker", {"peers": PeerIdVec([peer(1)])})
    pump.settle()
    (asked,) = pump.of(node, steps.FillSent)
    (there,) = pump.of(other, steps.ExecutionStarted)
    assert (there.target, there.entry) == ("chat", "op Echo (request)")
    assert (there.source_peer, there.wire_req_id) == (peer(0), asked.wire_req_id)
    assert [s.entry for s in pump.of(node, steps.ExecutionStarted)] == ["invoke", "on_answer"]


def test_tracing_changes_no_other_step() -> None:
    def run(trace: bool):
        parts = asker_and_answerer(middle_asks=2)
        made = model(*parts)
        nodes = [bring_up(made, p.name, me=n, trace=trace) for n, p in enumerate(parts)]
        pump = Pump(*nodes)
        for _ in range(3):
            nodes[0].invoke("server", {"x": np.ones(1, np.float32), "peers": PeerIdVec([peer(1)])})
        pump.settle()
        pump.advance(60 * S)
        return [
            [
                (type(s).__name__, s.peer, b"".join(s.parts))
                if isinstance(s, steps.SendEnvelope)
                else repr(s)
                for s in untraced(pump.steps[node.peer_id])
            ]
            for node in nodes
        ]

    assert run(False) == run(True)


def test_a_budget_of_ops_holds_while_tracing() -> None:
    from bbnode.engine import Limits

    p = Partition("server", inputs=["x"])
    head = "x"
    for n in range(5):
        p.sys("OnTrigger", [head], f"t{n}")
        head = f"t{n}"
    node = bring_up(model(p), "server", trace=True, limits=Limits(cycle_ops=2))
    node.invoke("server", {"x": TRIGGER})
    made = node.poll(0)
    assert len(of(steps.OpCompleted, made)) == 2
    assert of(steps.CycleBudgetExceeded, made)
