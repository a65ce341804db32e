"""Conditional sends and ops: `g.when` and `g.unless`, from the source to the network."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.compiler import Compiler
from bbnode.compiler.errors import CrossClassDataflow
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, PeerSelectorSlot, RecordingError, syscalls, types
from bbnode.engine import steps
from bbnode.sim import Network
from tests.dsl.programs import build


class Alarm(Module):
    """Tells the neighbours of a value, but only of a large one."""

    home = "sensor"

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        compute = BackendSlot("compute")
        is_large = compute.greater(g, x, g.constant(10.0))
        guards = PeerSelectorSlot("guards", peer_class="guard").current_view(g)
        heard = g.net_out("alarm", guards, x, after=g.when(is_large))
        syscalls.app_emit(g, heard, name="heard")
        g.output("calm", x, after=g.unless(is_large))
        g.output("loud", x, after=g.when(is_large))
        g.output("seen", x)


def network(module: Module, classes: dict[str, str]) -> Network:
    model = (
        Compiler()
        .bind_backend("compute", OrtBackend)
        .bind_peer_selector("guards", ConnectedView)
        .compile(module.build())
    )
    made = Network(seed=1)
    for name, peer_class in classes.items():
        made.add(name, model, [peer_class])
    names = list(classes)
    for at, name in enumerate(names):
        for other in names[at + 1 :]:
            made.connect(name, other)
    made.run_until_idle()
    return made


def test_a_send_waits_for_its_condition() -> None:
    net = network(Alarm(), {"sensor": "sensor", "guard": "guard"})
    sensor, guard = net["sensor"], net["guard"]
    for value, heard in ((3.0, 0), (30.0, 1), (4.0, 1)):
        execution = sensor.invoke("sensor", {"x": np.array(value, np.float32)})
        net.run_until_idle()
        assert len(guard.values("heard")) == heard
        (missing,) = sensor.skipped(execution)
        assert missing == ("calm" if value > 10 else "loud")
        assert sensor.outputs(execution).keys() == {"seen", "calm" if value < 10 else "loud"}
        assert sensor.has_finished(execution)
    assert sensor.failures() == []
    (reason, *_) = {step.reason for step in sensor.seen(steps.OutputSkipped)}
    assert "test_when.py" in reason


def test_a_condition_has_to_be_a_bool() -> None:
    def body(g: Graph) -> None:
        g.output("y", g.input("x"), after=g.when(g.input("c", types.TENSOR_FLOAT)))

    with pytest.raises(RecordingError, match=r"where one bool is needed.*greater"):
        build(body)


def test_a_condition_of_another_class_is_refused() -> None:
    class Elsewhere(Module):
        home = "a"

        def body(self, g: Graph) -> None:
            x = g.input("x", types.TENSOR_FLOAT)
            condition = g.input("c", types.TENSOR_BOOL)
            there = g.net_out("there", g.peer_ids([], peer_class="b"), x)
            g.net_out("back", there.sender, there, after=g.when(condition))

    with pytest.raises(CrossClassDataflow, match=r"g\.net_out"):
        Compiler().compile(Elsewhere().build())


class Choosy(Module):
    """Asks the guards; one answers only if the question is large enough."""

    home = "sensor"

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        guards = PeerSelectorSlot("guards", peer_class="guard").current_view(g)
        asked = g.request("ask", guards, x, deadline=30.0)
        is_large = BackendSlot("compute").greater(g, asked.received, g.constant(10.0))
        asked.respond(asked.received, after=g.when(is_large))
        g.output("answers", asked.responses)


def test_a_skipped_answer_is_told_at_once() -> None:
    net = network(Choosy(), {"sensor": "sensor", "guard": "guard"})
    sensor = net["sensor"]
    execution = sensor.invoke("sensor", {"x": np.array(30, np.float32)})
    net.run_until_idle()
    assert len(sensor.outputs(execution)["answers"].responses) == 1
    sensor.invoke("sensor", {"x": np.array(3, np.float32)})
    net.run(net.now_ns + 1_000_000_000)  # far from the deadline
    (failed,) = sensor.failures()
    assert failed.kind == "QuorumNotReached"
    assert "Skipped: the condition of" in failed.detail
    assert net["guard"].failures() == []


class Survey(Module):
    home = "sensor"

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        guards = g.peer_ids(map(Network.peer_id, ("one", "two")), peer_class="guard")
        asked = g.request("ask", guards, x, quorum=1, deadline=30.0)
        asked.respond(asked.received)
        g.output("answers", asked.responses)


def test_a_denied_peer_of_a_request_is_missing_at_once_with_the_reason() -> None:
    net = network(Survey(), {"sensor": "sensor", "one": "guard", "two": "guard"})
    sensor, denied = net["sensor"], Network.peer_id("two")
    sensor.node.block_peer(denied)
    execution = sensor.invoke("sensor", {"x": np.array(3, np.float32)})
    net.run(net.now_ns + 1_000_000_000)
    batch = sensor.outputs(execution)["answers"]
    assert [peer for peer, _ in batch.responses] == [Network.peer_id("one")]
    assert batch.missing == (denied,)
    ((peer, why),) = batch.reasons
    assert (peer, why.kind, why.detail) == (denied, "NotSent", "blocklisted")


class Fused(Module):
    """Ops of one backend, of which some are conditional: they do not take the others along."""

    home = "sensor"

    def body(self, g: Graph) -> None:
        x, go = g.input("x", types.TENSOR_FLOAT), g.input("go", types.TENSOR_BOOL)
        compute = BackendSlot("compute")
        one = compute.add(g, x, g.constant(1.0))
        two = compute.mul(g, one, g.constant(2.0), after=g.when(go))
        g.output("one", one)
        g.output("three", compute.add(g, one, two))
        g.output("four", compute.neg(g, one))


@pytest.mark.parametrize("go", [True, False])
def test_a_condition_parts_fused_graphs(go: bool) -> None:
    net = network(Fused(), {"sensor": "sensor"})
    sensor = net["sensor"]
    execution = sensor.invoke("sensor", {"x": np.array(3, np.float32), "go": np.array(go)})
    net.run_until_idle()
    outputs = {name: float(v) for name, v in sensor.outputs(execution).items()}
    assert outputs == {"one": 4.0, "four": -4.0} | ({"three": 12.0} if go else {})
