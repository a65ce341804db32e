"""Ports that several sends feed, several classes, sends to oneself: recorded, compiled, run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.compiler.errors import DanglingInput, IncompatibleStorageOnEdge
from bbnode.components import ConstantView, OrtBackend
from bbnode.dsl import (
    BackendSlot,
    CompiledModule,
    DuplicateName,
    Graph,
    Output,
    PeerSelectorSlot,
    types,
)
from bbnode.ir import address, graph, keys
from bbnode.ir.graph import Function, OpNode
from bbnode.ir.onnx_file import program_of
from bbnode.ir.peer import PeerId
from bbnode.sim import Network, SimNode
from tests.compiler import programs
from tests.compiler.test_full_chains import Written

COMPUTE = BackendSlot("compute")
SLOTS = ("to_a", "to_b", "to_c")


def peers(g: Graph, name: str, after: Output) -> Output:
    return PeerSelectorSlot(f"to_{name}", peer_class=name).current_view(g, after=after)


def compiled(body: Callable[[Graph], object]) -> dict[str, ModelProto]:
    made = Compiler().bind_backend("compute", OrtBackend)
    for slot in SLOTS:
        made = made.bind_peer_selector(slot, ConstantView)
    parts = made.compile_partitions(Written(body).build())
    return {name.partition("#")[0]: part for name, part in parts.items()}


def wire(part: ModelProto | Function, op_type: str) -> list[OpNode]:
    main = program_of(part).functions[0] if isinstance(part, ModelProto) else part
    return [node for node in main.nodes if graph.is_wire(node, op_type)]


def lands(send: OpNode) -> int:
    (suffix,) = (
        a.value for n, a in send.attributes.items() if n.startswith(keys.DEST_SUFFIX_PREFIX)
    )
    site = address.parse_site_suffix(suffix)
    assert site is not None
    return site


def site(recv: OpNode) -> int:
    return int(recv.metadata.get(keys.SITE_ID_KEY) or "")


# --- fan-in ---------------------------------------------------------------------------------


def collect(g: Graph) -> None:
    """a sends to c itself, and by way of b; c hands out whatever arrives at "in"."""
    x = g.input("x", types.TENSOR_FLOAT)
    g.net_out("in", peers(g, "c", x), x)
    at_b = g.net_out("over", peers(g, "b", x), x)
    g.net_out("in", peers(g, "c", after=at_b), COMPUTE.neg(g, at_b))
    arrived = g.lookup_output("in")
    g.output("seen", COMPUTE.add(g, arrived, arrived))


def test_sends_to_one_port_of_one_class_feed_one_receiver() -> None:
    parts = compiled(collect)
    (recv,) = wire(parts["c"], keys.OP_RECV)
    direct = next(s for s in wire(parts["a"], keys.OP_SEND) if lands(s) == site(recv))
    (relayed,) = wire(parts["b"], keys.OP_SEND)
    assert lands(relayed) == lands(direct) == site(recv)
    assert recv.metadata.get(keys.SYNTHESIZED_FROM_KEY) == "0"
    assert relayed.metadata.get(keys.SYNTHESIZED_FROM_KEY) == "0"
    assert len({s.outputs[0] for p in parts.values() for s in wire(p, keys.OP_SEND)}) == 3
    assert all(s.metadata.get(keys.FAN_IN_KEY) is None
               for p in parts.values() for s in wire(p, keys.OP_SEND))  # fmt: skip
    deadlines = [int(s.metadata.get(keys.DEADLINE_NS_KEY) or 0) for s in (direct, relayed)]
    assert int(recv.metadata.get(keys.DEADLINE_NS_KEY) or 0) == max(deadlines)
    assert recv.metadata.get(keys.SENDER_CLASS_KEY) == "a,b"
    (over,) = wire(parts["b"], keys.OP_RECV)
    assert over.metadata.get(keys.SENDER_CLASS_KEY) == "a"


def start(
    network: Network, parts: dict[str, ModelProto], name: str, plays: str, **views: str
) -> SimNode:
    config = {
        f"to_{home}": {"peers": [str(network.peer_id(other)) for other in names.split()]}
        for home, names in views.items()
    }
    return network.add(name, parts[plays], [plays], config=config)


def test_what_reads_a_port_fires_for_each_delivery() -> None:
    parts = compiled(collect)
    network = Network(seed=0)
    a = start(network, parts, "ann", "a", b="bob", c="cat")
    start(network, parts, "bob", "b", c="cat")
    cat = start(network, parts, "cat", "c")
    a.invoke("a", {"x": np.array([1, 2], np.float32)})
    network.run_until_idle()
    seen = sorted(np.asarray(value).tolist() for value in cat.values("seen"))
    assert seen == [[-2.0, -4.0], [2.0, 4.0]]
    assert not any(node.failures() for node in network.nodes)


@pytest.mark.parametrize("compiled_first", [False, True])
def test_a_replayed_program_joins_the_same_sends(compiled_first: bool) -> None:
    model = Written(collect).build()
    if compiled_first:
        made = Compiler().bind_backend("compute", OrtBackend)
        for slot in SLOTS:
            made = made.bind_peer_selector(slot, ConstantView)
        model = made.compile(model)

    def replay(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        made = CompiledModule(model).call().input("x", x).build(g)
        g.output("seen", made.output("seen"))

    parts = compiled(replay)
    (recv,) = wire(parts["c"], keys.OP_RECV)
    landing = [lands(send) for home in "ab" for send in wire(parts[home], keys.OP_SEND)]
    assert landing.count(site(recv)) == 2


def test_what_any_of_the_sends_gives_is_the_value_of_the_port() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.net_out("in", peers(g, "c", x), x)
        at_b = g.net_out("over", peers(g, "b", x), x)
        later = g.net_out("in", peers(g, "c", after=at_b), at_b)
        g.output("seen", COMPUTE.neg(g, later))
        g.net_out("thanks", later.sender, later, after=later)

    with pytest.raises(Exception, match="several classes: 'a', 'b'"):
        compiled(body)

    def silent(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.net_out("in", peers(g, "c", x), x)
        later = g.net_out("in", peers(g, "c", x), COMPUTE.neg(g, x))
        g.output("seen", later)
        g.net_out("thanks", later.sender, later)

    parts = compiled(silent)
    network = Network(seed=0)
    a = start(network, parts, "ann", "a", c="cat")
    cat = start(network, parts, "cat", "c")
    a.invoke("a", {"x": np.array([3], np.float32)})
    network.run_until_idle()
    assert sorted(float(v[0]) for v in cat.values("seen")) == [-3.0, 3.0]


def test_a_port_may_be_fed_from_its_own_receiver() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        here = g.net_out("turn", peers(g, "b", x), x)
        smaller = COMPUTE.relu(g, COMPUTE.sub(g, here, g.constant([1.0])))
        g.output("seen", here)
        g.net_out("turn", peers(g, "b", after=smaller), smaller)

    parts = compiled(body)
    (recv,) = wire(parts["b"], keys.OP_RECV)
    (again,) = wire(parts["b"], keys.OP_SEND)
    assert lands(again) == site(recv)


def test_ports_of_modules_that_are_called_twice_stay_apart() -> None:
    def relay(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.net_out("in", peers(g, "b", x), x)
        g.net_out("in", peers(g, "b", x), COMPUTE.neg(g, x))
        g.output("there", g.lookup_output("in"))

    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        for index in range(2):
            made = Written(relay, "Relay").call().input("x", x).build(g)
            g.output(f"seen_{index}", made.output("there"))

    parts = compiled(body)
    sites = [site(recv) for recv in wire(parts["b"], keys.OP_RECV)]
    assert len(set(sites)) == 2
    landing = [lands(send) for send in wire(parts["a"], keys.OP_SEND)]
    assert [landing.count(one) for one in sites] == [2, 2]


def test_sends_of_one_port_carry_one_type() -> None:
    def body(g: Graph) -> None:
        x, n = g.input("x", types.TENSOR_FLOAT), g.input("n", types.TENSOR_INT64)
        g.net_out("in", peers(g, "b", x), x)
        g.net_out("in", peers(g, "b", x), n)
        g.output("seen", g.lookup_output("in"))

    with pytest.raises(IncompatibleStorageOnEdge) as caught:
        compiled(body)
    assert caught.value.send_node == "Send_1"
    assert {caught.value.sent, caught.value.received} == {"Tensor.FLOAT", "Tensor.INT64"}


def test_a_type_that_one_send_shows_holds_for_the_others() -> None:
    def body(g: Graph) -> None:
        x, y = g.input("x", types.TENSOR_FLOAT), g.input("y")
        g.net_out("in", peers(g, "b", x), x)
        g.net_out("in", peers(g, "b", x), y)
        g.output("seen", g.lookup_output("in"))

    main = program_of(compiled(body)["a"]).functions[0]
    assert main.kinds()["y"] is types.TENSOR_FLOAT


def test_requests_have_ports_of_their_own() -> None:
    def send_first(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.net_out("p", peers(g, "b", x), x)
        g.request("p", peers(g, "b", x), x)

    def request_first(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.request("p", peers(g, "b", x), x)
        g.net_out("p", peers(g, "b", x), x)

    for body in (send_first, request_first):
        with pytest.raises(DuplicateName, match="'p' is sent to already"):
            Written(body).build()


def test_a_later_send_of_a_port_that_is_not_there_is_named() -> None:
    body = programs.ring_program()
    send = programs.node_making(body.function, "at_c")
    for wrong in ("value", "at_c.sender", "nowhere"):
        send.metadata[keys.FAN_IN_KEY] = wrong
        with pytest.raises(DanglingInput) as caught:
            programs.run(programs.unit_of(body), "validate")
        assert (caught.value.node_name, caught.value.input_name) == (send.name, wrong)


def test_a_joined_value_that_is_handed_out_directly_keeps_its_name() -> None:
    body = programs.Body("P", home="a", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.sample("b", "bs", slot="to_b")
    body.send(x, "bs", "one")
    body.send(x, "bs", "two", meta={keys.FAN_IN_KEY: "one"})
    body.function.outputs.extend(["one", "two"])
    unit = programs.unit_of(body)
    programs.run(unit, "infer_peer_classes", "synthesize_wire_recvs", "partition_by_wire_ops")
    main = unit.partitions["b"]
    assert sorted(main.outputs) == ["one", "two"]
    (recv,) = wire(main, keys.OP_RECV)
    passed = programs.node_making(main, "two")
    assert (passed.op_type, list(passed.inputs)) == ("PassThrough", [recv.outputs[0]])


# --- several classes, and oneself -----------------------------------------------------------


def announce(g: Graph) -> None:
    """a sends to one port of two classes; each hands out what it got."""
    x = g.input("x", types.TENSOR_FLOAT)
    at_b = g.net_out("news", peers(g, "b", x), x)
    at_c = g.net_out("news", peers(g, "c", x), x)
    g.output("at_b", COMPUTE.add(g, at_b, at_b))
    g.output("at_c", COMPUTE.neg(g, at_c))


def test_a_port_of_two_classes_has_a_receiver_on_each() -> None:
    parts = compiled(announce)
    sites = {site(recv) for home in "bc" for recv in wire(parts[home], keys.OP_RECV)}
    assert {lands(send) for send in wire(parts["a"], keys.OP_SEND)} == sites
    assert len(sites) == 2
    network = Network(seed=0)
    a = start(network, parts, "ann", "a", b="bob", c="cat")
    bob, cat = start(network, parts, "bob", "b"), start(network, parts, "cat", "c")
    a.invoke("a", {"x": np.array([4], np.float32)})
    network.run_until_idle()
    assert [float(v[0]) for v in bob.values("at_b")] == [8.0]
    assert [float(v[0]) for v in cat.values("at_c")] == [-4.0]


def test_a_class_sends_to_itself_and_a_node_to_itself() -> None:
    def gossip(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        got = g.net_out("gossip", peers(g, "a", x), x)
        back = g.net_out("echo", got.sender, COMPUTE.neg(g, got))
        g.output("echo", back)

    parts = compiled(gossip)
    assert list(parts) == ["a"]
    network = Network(seed=0)
    node = start(network, parts, "ann", "a", a="ann bob")
    start(network, parts, "bob", "a", a="ann")
    node.invoke("a", {"x": np.array([5], np.float32)})
    network.run_until_idle()
    assert [float(v[0]) for v in node.values("echo")] == [-5.0, -5.0]


def test_a_send_to_a_fixed_peer_passes_its_gates() -> None:
    network = Network(seed=0)

    def body(g: Graph) -> None:
        whom = g.peer_id(network.peer_id("bob"), peer_class="b")
        assert isinstance(network.peer_id("bob"), PeerId)
        g.output("seen", g.net_out("fixed", whom, g.input("x", types.TENSOR_FLOAT)))

    parts = compiled(body)
    gates = [
        n.op_type for n in program_of(parts["a"]).functions[0].nodes if n.op_type in keys.GATE_OPS
    ]
    assert gates == [keys.OP_PEER_HEALTH_GATE_TX, keys.OP_BACKOFF_GATE_TX]
    a, bob = start(network, parts, "ann", "a"), start(network, parts, "bob", "b")
    a.invoke("a", {"x": np.array([6], np.float32)})
    network.run_until_idle()
    assert [float(v[0]) for v in bob.values("seen")] == [6.0]
