"""A node that plays both ends of an edge is one of its own peers, where the program says so."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx
import pytest

from bbnode.compiler import Compiler
from bbnode.components import (
    ConnectedView,
    ConstantView,
    ConstantViewConfig,
    DrawingConfig,
    GlobalRegistryClient,
    GlobalRegistryServer,
    GlobalRegistryView,
    OrtBackend,
)
from bbnode.dsl import BackendSlot, CompiledModule, Graph, Module, PeerSelectorSlot, types
from bbnode.dsl.errors import BadArgument
from bbnode.engine import steps
from bbnode.ir import keys
from bbnode.ir.values import PeerIdVec
from bbnode.sim import Network
from tests.components.fakes import PEERS, Context
from tests.engine.support import Pump, ScriptSelector, bring_up, of


class Spreads(Module):
    """The server sends to clients, and asks them: the answer is twice the question."""

    home = "server"
    include_self: ClassVar[bool] = True

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        slot = PeerSelectorSlot("peers", peer_class="client", include_self=self.include_self)
        peers = slot.sample(g, n=4, after=x)
        g.output("got", g.net_out("told", peers, x))
        asked = g.request("ask", peers, x, deadline=1.0)
        asked.respond(BackendSlot("compute").add(g, asked.received, asked.received))
        g.output("answers", asked.responses)


class Others(Spreads):
    include_self = False


def compiled(module: type[Module], selector: type = ConnectedView, **config: Any) -> Any:
    binds = Compiler().bind_peer_selector("peers", selector, **config)
    binds = binds.bind_backend("compute", OrtBackend)
    once = binds.compile(module().build())
    assert binds.compile(once) == once  # with all that the program says
    return once


def values(made: list[Any], topic: str) -> list[Any]:
    return [step.value for step in of(steps.AppEvent, made) if step.topic == topic]


@pytest.mark.parametrize("selector", [ConnectedView, ScriptSelector])
def test_it_sends_to_itself_and_answers_itself_without_a_transport(selector: type) -> None:
    made = compiled(Spreads, selector)
    both = bring_up(made, "server", "client", me=1)
    client = bring_up(made, "client", me=2)
    pump = Pump(both, client)
    both.invoke("server", {"x": np.ones(2, np.float32)})
    pump.settle()
    assert pump.of(both, steps.OpFailed) == []
    (answers,) = values(pump.steps[both.peer_id], "answers")
    assert answers.peers == PeerIdVec(sorted((both.peer_id, client.peer_id)))
    assert [value.tolist() for _, value in answers.responses] == [[2, 2], [2, 2]]
    for node in (both, client):
        assert [v.tolist() for v in values(pump.steps[node.peer_id], "got")] == [[1, 1]]
    sent_to = {step.peer for step in pump.of(both, steps.SendEnvelope)}
    assert sent_to == {client.peer_id}


def test_alone_it_is_all_the_peers_there_are() -> None:
    both = bring_up(compiled(Spreads), "server", "client", me=1)
    both.invoke("server", {"x": np.ones(2, np.float32)})
    made = [step for now in range(4) for step in both.poll(now)]
    assert of(steps.OpFailed, made) == []
    assert values(made, "answers")[0].peers == PeerIdVec((both.peer_id,))


def test_by_default_it_is_not_one_of_them() -> None:
    made = compiled(Others)
    both, client = bring_up(made, "server", "client", me=1), bring_up(made, "client", me=2)
    pump = Pump(both, client)
    both.invoke("server", {"x": np.ones(2, np.float32)})
    pump.settle()
    (answers,) = values(pump.steps[both.peer_id], "answers")
    assert answers.peers == PeerIdVec((client.peer_id,))
    assert values(pump.steps[both.peer_id], "got") == []


def test_a_node_that_does_not_play_the_class_is_not_one_of_them() -> None:
    made = compiled(Spreads)
    server, client = bring_up(made, "server", me=1), bring_up(made, "client", me=2)
    pump = Pump(server, client)
    server.invoke("server", {"x": np.ones(2, np.float32)})
    pump.settle()
    (answers,) = values(pump.steps[server.peer_id], "answers")
    assert answers.peers == PeerIdVec((client.peer_id,))


def test_in_the_simulator_and_after_a_snapshot() -> None:
    network = Network()
    made = compiled(Spreads)
    both = network.add("both", made, ["server", "client"])
    network.add("client", made, ["client"])
    both.invoke("server", {"x": np.ones(2, np.float32)})
    network.run_until_idle()
    assert len(both.values("answers")[0].responses) == 2
    assert both.failures() == []

    node = bring_up(made, "server", "client", me=1)
    node.invoke("server", {"x": np.ones(2, np.float32)})
    node.poll(0)  # what it sent itself waits in the ingress
    again = bring_up(made, "server", "client", me=1)
    again.restore(node.snapshot(0), 0, same_life=True)
    made_again = [step for now in range(4) for step in again.poll(now)]
    assert len(values(made_again, "answers")[0].responses) == 1


def test_the_program_keeps_it_when_it_is_compiled_or_called_again() -> None:
    class Outer(Module):
        home = "server"

        def body(self, g: Graph) -> None:
            x = g.input("x", types.TENSOR_FLOAT)
            made = CompiledModule(Spreads().build()).call().input("x", x).build(g)
            g.output("all", made.output("answers"))

    def told(model: onnx.ModelProto) -> set[str]:
        return {
            node.op_type
            for function in model.functions
            for node in function.node
            for entry in node.metadata_props
            if (entry.key, entry.value) == (keys.INCLUDE_SELF_KEY, "true")
        }

    assert told(Spreads().build()) == {"Sample"}
    assert told(compiled(Spreads)) == {"Sample"}
    assert told(compiled(Outer)) == {"Sample"}
    assert told(compiled(Others)) == set()


def test_anything_but_a_bool_is_refused() -> None:
    with pytest.raises(BadArgument, match="include_self"):
        PeerSelectorSlot("peers", peer_class="client", include_self="yes")  # type: ignore[arg-type]


def test_a_fixed_list_has_it_once() -> None:
    listed = tuple(map(str, PEERS[1:3]))
    view = ConstantView(ConstantViewConfig(peers=listed))
    ctx = Context(peer_class="client", include_self=True)
    assert view.current_view(ctx) == PeerIdVec(PEERS[:3])
    assert view.current_view(Context(peer_class="client")) == PeerIdVec(PEERS[1:3])
    own = ConstantView(ConstantViewConfig(peers=(str(PEERS[0]),)))
    assert own.current_view(ctx) == PeerIdVec(PEERS[:1])


def test_every_selector_that_ships_has_it() -> None:
    ctx = Context(peer_class="client", include_self=True)
    made = [
        ConnectedView(DrawingConfig()),
        ConstantView(ConstantViewConfig()),
        GlobalRegistryServer(GlobalRegistryServer.Config()),
        GlobalRegistryView(GlobalRegistryView.Config()),
    ]
    made[-1].bind({"protocol": GlobalRegistryClient(GlobalRegistryClient.Config())})
    for selector in made:
        assert selector.current_view(ctx) == PeerIdVec(PEERS[:1])
        assert selector.sample(ctx, n=3) == PeerIdVec(PEERS[:1])
        assert selector.current_view(Context(peer_class="client")) == PeerIdVec()
