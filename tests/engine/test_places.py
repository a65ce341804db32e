"""Failures name the author's line, the Module and the peer, from the artifact alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, OrtBackend, ReferenceBackend
from bbnode.components.errors import BackendError
from bbnode.dsl import BackendSlot, Graph, ModelSlot, Module, Output, PeerSelectorSlot, types
from bbnode.engine import errors, steps
from bbnode.engine.places import OpPlace, listed
from bbnode.ir import keys
from bbnode.ir.graph import OpNode
from bbnode.ir.values import TRIGGER
from tests.engine.builder import Partition, model
from tests.engine.support import (
    Boom,
    EvalBackend,
    Pump,
    ScriptModel,
    bring_up,
    component,
    of,
)

FILE = Path(__file__).name


def here(function: Callable[..., object], text: str) -> str:
    """`<file>:<line>` of the line of a function that holds a text."""
    code = function.__code__
    lines = Path(__file__).read_text().splitlines()
    found = next(n for n in range(code.co_firstlineno, len(lines)) if text in lines[n])
    return f"{FILE}:{found + 1}"


class Inner(Module):
    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        compute = BackendSlot("compute")
        product = compute.matmul(g, x, x)
        g.output("y", compute.add(g, product, x))


class Fused(Module):
    home = "server"

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        compute = BackendSlot("compute")
        made = Inner().call().input("x", compute.neg(g, x)).build(g).output("y")
        g.output("out", compute.relu(g, made))


@pytest.mark.parametrize("backend", [OrtBackend, ReferenceBackend])
def test_the_op_inside_of_a_fused_graph_is_named_whether_the_backend_names_it_or_not(
    backend: type,
) -> None:
    made = Compiler().bind_backend("compute", backend).compile(Fused().build())
    node = bring_up(made, "server")
    node.invoke("server", {"x": np.zeros((2, 3), np.float32)})
    (failed,) = of(steps.OpFailed, node.poll(0))
    assert failed.kind == "BackendError"
    assert (failed.line, failed.module) == (here(Inner.body, "matmul"), "Inner")
    assert failed.op == failed.inner == "Inner_0/MatMul_0"
    assert str(failed).startswith("Inner_0/MatMul_0: ")
    assert str(failed).endswith(f"({failed.line}, in Module Inner)")


class Trains(Module):
    home = "server"

    def body(self, g: Graph) -> None:
        peers = PeerSelectorSlot("peers", peer_class="client").current_view(
            g, after=g.input("tick", types.TRIGGER)
        )
        weights = g.net_out("weights", peers, ModelSlot("global").params(g, after=peers))
        self.use(g, weights)

    def use(self, g: Graph, weights: Output) -> None:
        ModelSlot("local").load_parameters(g, weights)


def network() -> Pump:
    made = (
        Compiler()
        .bind_model("global", ScriptModel)
        .bind_model("local", ScriptModel)
        .bind_peer_selector("peers", ConnectedView)
        .compile(Trains().build())
    )
    server, client = bring_up(made, "server", me=1), bring_up(made, "client", me=2)
    return Pump(server, client)


def test_a_failure_names_the_peer_that_asked_and_the_line_after_inlining_and_gates() -> None:
    pump = network()
    server, client = pump.nodes.values()
    component(client, "local").raises = Boom("no")
    server.invoke("server", {"tick": TRIGGER})
    pump.settle()
    (failed,) = pump.of(client, steps.OpFailed)
    assert failed.source_peer == server.peer_id
    assert failed.line == here(Trains.use, "load_parameters")
    assert failed.module == "Trains"
    assert f"for a message of {server.peer_id}" in str(failed)
    told = failed.as_json()
    assert (told["line"], told["source_peer"]) == (failed.line, str(server.peer_id))


def test_gates_and_deadlines_have_the_line_of_the_op_that_they_are_for() -> None:
    pump = network()
    _, client = pump.nodes.values()
    plans = client._rt.plans
    found = {op.op_type: plan.place_of(op).line for plan in plans for op in plan.ops if plan.places}
    sent = here(Trains.body, "net_out")
    assert found[keys.OP_DEDUP_GATE_RX] == sent
    assert found[keys.OP_BACKOFF_GATE_RX] == sent


def test_a_send_without_an_address_names_its_line() -> None:
    made = (
        Compiler()
        .bind_model("global", ScriptModel)
        .bind_model("local", ScriptModel)
        .bind_peer_selector("peers", ConnectedView)
        .compile(Trains().build())
    )
    server = bring_up(made, "server", me=1)
    stranger = bring_up(made, "client", me=2).peer_id
    component(server, "peers").candidates = lambda _ctx: [stranger]
    server.invoke("server", {"tick": TRIGGER})
    (left_out,) = of(steps.PeerResolveFailed, server.poll(0))
    assert left_out.line == here(Trains.body, "net_out")


def test_no_directory_of_the_author_is_in_an_artifact() -> None:
    made = Compiler().bind_backend("compute", OrtBackend).compile(Fused().build())
    assert str(Path(__file__).parent).encode() not in made.SerializeToString()
    assert FILE.encode() in made.SerializeToString()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"nodes": 7}', '{"nodes": [[1]]}', '{"nodes": [["a", "b", "", 7, []]]}',
     '{"metadata": 3, "nodes": [["a", "b", "", null, []]]}', "[" * 100_000],
)  # fmt: skip
def test_what_an_artifact_says_of_a_graph_may_be_anything(text: str) -> None:
    node = OpNode("subgraph_1", "x", "call", metadata={keys.MEMBERS_KEY: text})
    node.source_line = "a.py:3"
    assert OpPlace(node).of(errors.InvalidOperand("x")).line == "a.py:3"
    assert OpPlace(node).at("MatMul_7").inner == ""


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(["nodes", "metadata", "x"]), inner, max_size=3)
    ),
)


@given(
    st.fixed_dictionaries({}, optional={"nodes": _JSON, "metadata": _JSON}) | _JSON,
    st.text(max_size=12) | st.just("MatMul_0"),
)
def test_looking_a_place_up_raises_nothing(said: object, name: str) -> None:
    node = OpNode("subgraph_1", "x", "call", metadata={keys.MEMBERS_KEY: json.dumps(said)})
    place = OpPlace(node)
    assert isinstance(str(place.at(name)), str)
    assert isinstance(str(place.of(BackendError("x", node=name))), str)


class RudeError(BackendError):
    """Of a backend whose author did not call the base class."""

    def __init__(self, node: object) -> None:
        self.given = node
        if node is not None:
            self.__dict__["node"] = node

    @property
    def node(self) -> str:
        raise LookupError("no node")


@pytest.mark.parametrize("node", [None, 7, b"MatMul_0"])
def test_errors_of_other_backends_may_be_anything(node: object) -> None:
    call = OpNode("subgraph_1", "x", "call")
    call.source_line = "a.py:3"
    assert OpPlace(call).of(RudeError(node)).line == "a.py:3"


def test_names_that_a_backend_makes_up_are_looked_through() -> None:
    said = {"metadata": {}, "nodes": [[f"op{n}", f"a.py:{n}", "", None, []] for n in range(3)]}
    node = OpNode("subgraph_1", "x", "call", metadata={keys.MEMBERS_KEY: json.dumps(said)})
    place = OpPlace(node)
    assert place.at("fused Gemm_1").line == "a.py:1"
    assert place.at("MatMul_2/MatmulTransposeFusion/").line == "a.py:2"
    for unknown in ("", "Gemm_3", "bb_v_1_nchwc", "Gemm", "x_1", "Gemm_1x"):
        assert place.at(unknown).line == "a.py:0-2", unknown


def test_lines_of_many_files_are_cut() -> None:
    assert listed(["a.py:3", "a.py:1", "b.py:2", "", "nonsense"]) == "a.py:1-3, b.py:2"
    assert listed(f"{name}.py:1" for name in "abcdef").endswith("d.py:1, 2 files more")


def test_install_names_the_line_of_an_op_that_the_backend_lacks() -> None:
    class Sums(Module):
        home = "server"

        def body(self, g: Graph) -> None:
            x = g.input("x", types.TENSOR_FLOAT)
            compute = BackendSlot("compute")
            summed = compute.einsum(g, x, equation="i->")
            g.output("out", compute.neg(g, summed))

    made = Compiler().bind_backend("compute", EvalBackend).compile(Sums().build())
    with pytest.raises(errors.UnsupportedOps) as caught:
        bring_up(made, "server")
    assert f"Einsum_0, {here(Sums.body, 'einsum')}" in str(caught.value)


def test_an_artifact_without_lines_says_nothing() -> None:
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(keys.role_domain("Model"), "LoadParameters", ["x"], ["c1"], slot="m")
    node = bring_up(model(p), "server")
    component(node, "m").raises = Boom("no")
    node.invoke("server", {"x": np.array([4], np.float32)})
    (failed,) = of(steps.OpFailed, node.poll(0))
    assert (failed.line, failed.module, failed.inner, failed.source_peer) == ("", "", "", None)
    assert str(failed).startswith("LoadParameters_1: UnexpectedException: Boom: no (raised at ")


def test_the_peer_that_asked_is_told_the_line_of_the_peer_that_failed() -> None:
    class Asks(Module):
        home = "server"

        def body(self, g: Graph) -> None:
            tick = g.input("tick", types.TRIGGER)
            peers = PeerSelectorSlot("peers", peer_class="client").current_view(g, after=tick)
            weights = ModelSlot("global").params(g, after=peers)
            asked = g.request("round", peers, weights, deadline=5.0)
            local = ModelSlot("local")
            local.load_parameters(g, asked.received)
            asked.respond(local.params(g))
            g.output("answers", asked.responses)

    made = (
        Compiler()
        .bind_model("global", ScriptModel)
        .bind_model("local", ScriptModel)
        .bind_peer_selector("peers", ConnectedView)
        .compile(Asks().build())
    )
    server, client = bring_up(made, "server", me=1), bring_up(made, "client", me=2)
    pump = Pump(server, client)
    component(client, "local").raises = Boom("no")
    server.invoke("server", {"tick": TRIGGER})
    pump.settle()
    (failed,) = pump.of(server, steps.OpFailed)
    assert failed.kind == "QuorumNotReached"
    assert failed.line == here(Asks.body, "g.request")
    assert f"{client.peer_id} (UnexpectedException: Boom: no" in failed.detail
    assert f"({here(Asks.body, 'load_parameters')}, in Module Asks)" in failed.detail
