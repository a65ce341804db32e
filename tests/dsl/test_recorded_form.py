"""The recorded form, clause by clause of docs/ir.md, section 1."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from multiaddr import Multiaddr
from onnx import TensorProto, numpy_helper

from bbnode.dsl import (
    BackendSlot,
    ConcreteSpec,
    DataSourceSlot,
    Graph,
    ModelSlot,
    Module,
    PeerId,
    PeerSelectorSlot,
    types,
    values,
)
from bbnode.ir import codec
from bbnode.ir.onnx_file import model_of
from tests import protos
from tests.dsl.programs import build, meta, only, root

ALICE, BOB = PeerId.from_seed("alice"), PeerId.from_seed("bob")


def test_the_model_has_an_empty_graph_and_the_root_first() -> None:
    class Tiny(Module):
        home = "server"

        def body(self, g: Graph) -> None:
            g.output("y", g.input("x", types.TENSOR_FLOAT))

    model = Tiny().build()
    assert (model.ir_version, model.producer_name) == (13, "bbnode")
    assert (model.graph.name, len(model.graph.node)) == ("Tiny", 0)
    (function,) = model.functions
    assert (function.domain, function.name) == ("ai.bytesandbrains.module", "Tiny")
    assert meta(function, "root") == "true"
    assert meta(function, "home") == "server"
    onnx.checker.check_model(model, full_check=True)


def test_home_is_self_and_the_name_is_that_of_the_class_by_default() -> None:
    class Base(Module):
        name = "Renamed"

    class Derived(Base):
        def body(self, g: Graph) -> None:
            g.output("y", g.input("x"))

    function = Derived().build().functions[0]
    assert function.name == "Derived"
    assert meta(function, "home") == "@self"


def test_ports_are_inputs_and_pass_throughs() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.input("anything")
        g.output("y", x)

    function, node = only(body, "PassThrough")
    assert list(function.input) == ["x", "anything"]
    assert list(function.output) == ["y"]
    assert (list(node.input), list(node.output)) == (["x"], ["y"])
    assert protos.value_types(function) == {
        "x": types.TENSOR_FLOAT, "anything": types.ANY, "y": types.TENSOR_FLOAT,
    }  # fmt: skip


def test_names_are_counted_per_op_type_and_scope() -> None:
    compute = BackendSlot("compute")

    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        a = compute.relu(g, x)
        with g.with_module("head"), g.with_module("inner"):
            b = compute.relu(g, a)
        g.output("y", compute.relu(g, b))

    nodes = root(body).node
    assert [n.name for n in nodes] == ["Relu_0", "head/inner/Relu_0", "Relu_1", "PassThrough_0"]
    assert [n.output[0] for n in nodes[:2]] == ["Relu_0.Y", "head/inner/Relu_0.Y"]
    assert [meta(n, "module_instance") for n in nodes[:3]] == [
        "Program", "Program_head_inner", "Program",
    ]  # fmt: skip


def test_slots_are_listed_with_ids_by_first_use() -> None:
    config = ConcreteSpec(role="Model", type_name="my.Net", config=b"\x80")

    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR)
        student, teacher = (ModelSlot(n, concrete=config) for n in ("student", "teacher"))
        g.output("t", teacher.forward(g, x))
        g.output("s", student.forward(g, x))
        g.output("c", BackendSlot("compute").relu(g, x))
        teacher.params(g)
        ModelSlot("teacher", concrete=config).params(g)

    function = root(body)
    assert list(function.attribute) == ["compute"]
    assert [(a.name, a.type, protos.octets(a)) for a in function.attribute_proto] == [
        ("teacher", onnx.AttributeProto.TENSOR, b"\x80"),
        ("student", onnx.AttributeProto.TENSOR, b"\x80"),
    ]
    assert meta(function, "concrete_type.teacher") == "my.Net"
    assert [meta(function, f"slot_role.{n}") for n in ("teacher", "student", "compute")] == [
        "Model|0", "Model|1", "Backend|2",
    ]  # fmt: skip
    forward = [n for n in function.node if n.op_type == "Forward"]
    assert [meta(n, "instance") for n in forward] == ["0", "1"]
    assert [meta(n, "slot_id") for n in forward] == ["0", "1"]
    assert {meta(n, "required_trait") for n in forward} == {None}
    assert {meta(n, "slot_id") for n in function.node if n.op_type == "Params"} == {"0"}
    (relu,) = (n for n in function.node if n.op_type == "Relu")
    assert meta(relu, "required_trait") == "BackendRuntime"
    assert meta(relu, "slot") == "compute"
    assert meta(relu, "concrete_type") is None


def test_after_is_a_list_of_value_names_without_repeats() -> None:
    def body(g: Graph) -> None:
        tick, other = g.input("tick", types.TRIGGER), g.input("other")
        DataSourceSlot("data").next_batch(g, after=[tick, other, tick])

    _, node = only(body, "NextBatch")
    assert meta(node, "after") == "tick,other"
    assert list(node.input) == []


def test_a_send_names_what_lives_on_the_far_side() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_INT64)
        peers = PeerSelectorSlot("cohort", peer_class="client").sample(g, n=3)
        received = g.net_out("weights", peers, x, after=x)
        assert g.lookup_output("weights") is received
        g.net_out("back", received.sender, received)

    function = root(body)
    sample, send, back = function.node
    assert meta(sample, "peer_class") == "client"
    assert list(send.input) == ["x", "Sample_0.peers"]
    assert list(send.output) == ["Send_0.received", "Send_0.sender"]
    assert (meta(send, "port"), meta(send, "after")) == ("weights", "x")
    assert list(back.input) == ["Send_0.received", "Send_0.sender"]
    known = protos.value_types(function)
    assert known["Send_0.received"] is known["Send_1.received"] is types.TENSOR_INT64
    assert known["Send_0.sender"] is types.PEER_ID


def test_a_request_and_its_answer() -> None:
    def body(g: Graph) -> None:
        x, peers = g.input("x", types.TENSOR_FLOAT), g.input("client", types.PEER_ID_VEC)
        r = g.request("round", peers, x, quorum=3, deadline=2.5)
        g.respond(r, g.bundle([r.received, r.received.sender]))
        g.output("answers", r.responses)
        assert g.lookup_output("round") is r.received

    function = root(body)
    request, bundle, answer, _ = function.node
    assert [name.partition(".")[2] for name in request.output] == [
        "req_id", "responses", "received", "sender", "remote_req_id",
    ]  # fmt: skip
    assert protos.get_attr(request, "quorum") == 3
    assert protos.get_attr(request, "deadline_ns") == 2_500_000_000
    assert protos.get_attr(bundle, "child_count") == 2
    assert protos.get_attr(bundle, "child_types") == (
        b"ai.bytesandbrains.Tensor.FLOAT,ai.bytesandbrains.PeerId"
    )
    assert list(answer.input) == [
        "Bundle_0.composite", "SendReqBatched_0.sender", "SendReqBatched_0.remote_req_id",
    ]  # fmt: skip
    assert list(answer.output) == []
    assert protos.value_types(function)["answers"] is types.RESPONSE_BATCH


def test_unbundle_gives_typed_parts() -> None:
    def body(g: Graph) -> None:
        parts = g.unbundle(g.input("c", types.COMPOSITE), [types.TENSOR_FLOAT, types.METADATA])
        assert [p.type for p in parts] == [types.TENSOR_FLOAT, types.METADATA]
        for i, part in enumerate(parts):
            g.output(f"part{i}", part)

    _, node = only(body, "Unbundle")
    assert list(node.output) == ["Unbundle_0.parts_0", "Unbundle_0.parts_1"]
    assert protos.get_attr(node, "child_count") == 2


@pytest.mark.parametrize(
    ("value", "kind", "array"),
    [
        (5, types.TENSOR_INT64, np.array(5)),
        (0.5, types.TENSOR_FLOAT, np.array(0.5, np.float32)),
        (True, types.TENSOR_BOOL, np.array(True)),
        ([1.0, 2.0], types.TENSOR_FLOAT, np.array([1, 2], np.float32)),
        (np.eye(2), types.TENSOR_DOUBLE, np.eye(2)),
        (np.arange(3, dtype=">i4"), types.TENSOR_BY_ELEM[TensorProto.INT32], np.arange(3)),
        (np.zeros((0, 2), np.uint8), types.TENSOR_BY_ELEM[TensorProto.UINT8], np.zeros((0, 2))),
    ],
)
def test_tensor_constants(value, kind, array) -> None:
    function, node = only(lambda g: g.output("y", g.constant(value)), "Constant")
    assert (node.domain, len(node.input)) == ("ai.bytesandbrains.syscall", 0)
    assert protos.value_types(function)["Constant_0.value"] is kind
    recorded = numpy_helper.to_array(protos.get_attr(node, "value"))
    assert recorded.shape == array.shape
    np.testing.assert_array_equal(recorded, array)


ADDRESS = "/ip4/127.0.0.1/tcp/4001"


@pytest.mark.parametrize(
    ("record", "value", "kind"),
    [
        (lambda g: g.constant(ALICE), ALICE, types.PEER_ID),
        (lambda g: g.peer_id(str(ALICE)), ALICE, types.PEER_ID),
        (lambda g: g.constant([BOB, ALICE]), values.PeerIdVec((BOB, ALICE)), types.PEER_ID_VEC),
        (lambda g: g.peer_ids([str(BOB), ALICE]), values.PeerIdVec((BOB, ALICE)),
         types.PEER_ID_VEC),
        (lambda g: g.peer_ids([]), values.PeerIdVec(()), types.PEER_ID_VEC),
        (lambda g: g.address(ADDRESS), Multiaddr(ADDRESS), types.MULTIADDRESS),
        (lambda g: g.addresses([ADDRESS]), values.AddressVec((Multiaddr(ADDRESS),)),
         types.ADDRESS_VEC),
        (lambda g: g.constant(values.TRIGGER), values.TRIGGER, types.TRIGGER),
        (lambda g: g.constant(values.U64(7)), values.U64(7), types.U64),
        (lambda g: g.constant(values.Metadata(n=1)), values.Metadata(n=1), types.METADATA),
    ],
)  # fmt: skip
def test_carrier_constants(record, value, kind) -> None:
    function, node = only(lambda g: g.output("y", record(g)), "Constant")
    assert protos.value_types(function)["Constant_0.value"] is kind
    type_id, _, payload = protos.get_attr(node, "value").partition(b"\0")
    assert type_id == kind.id.encode()
    assert codec.decode_value(kind, payload) == value


def test_every_value_is_typed_and_every_domain_imported() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        h = BackendSlot("compute").gemm(g, x, x)
        g.output("y", ModelSlot("m").forward(g, h))

    model = build(body)
    (function,) = model.functions
    named = {*function.input, *(o for n in function.node for o in n.output)}
    assert {v.name for v in function.value_info} == named
    imported = {(o.domain, o.version) for o in function.opset_import}
    assert imported == {
        ("", 25), ("ai.bytesandbrains.role.model", 1), ("ai.bytesandbrains.syscall", 1),
    }  # fmt: skip
    assert imported <= {(o.domain, o.version) for o in model.opset_import}
    onnx.checker.check_model(model, full_check=True)


def test_nodes_say_their_line_without_directories() -> None:
    def body(g: Graph) -> None:
        g.input("x")
        ModelSlot("m").params(g)

    line = body.__code__.co_firstlineno + 2
    _, node = only(body, "Params")
    assert meta(node, "source_line") == f"test_recorded_form.py:{line}"


def test_bootstraps_follow_all_bodies_and_have_their_own_inputs() -> None:
    class Store(Module):
        def body(self, g: Graph) -> None:
            g.output("y", g.input("x"))

        def bootstrap(self, g: Graph) -> None:
            ModelSlot("m").load_parameters(g, g.input("corpus", types.TENSOR))

    class Outer(Module):
        home = "server"

        def body(self, g: Graph) -> None:
            g.output("y", Store().call().input("x", g.input("x")).build(g).output("y"))

        def bootstrap(self, g: Graph) -> None:
            g.input("seed")

    model = Outer().build()
    assert [f.name for f in model.functions] == [
        "Outer", "Store", "Outer__bootstrap", "Store__bootstrap",
    ]  # fmt: skip
    assert [meta(f, "module_phase") for f in model.functions] == [None, None, *["bootstrap"] * 2]
    assert [list(f.input) for f in model.functions[2:]] == [["seed"], ["corpus"]]
    assert [meta(f, "root") for f in model.functions] == ["true", None, None, None]


@pytest.mark.parametrize(
    ("value", "kind", "dtype"),
    [([1, 2], types.TENSOR_FLOAT, np.float32), (0.1, types.TENSOR_DOUBLE, np.float64),
     ([1, 0], types.TENSOR_BOOL, np.bool_), (np.arange(3), types.TENSOR_UINT64, np.uint64)],
)  # fmt: skip
def test_a_tensor_constant_of_a_given_type(value, kind, dtype) -> None:
    made = []
    (node,) = root(lambda g: made.append(g.tensor(value, kind))).node
    array = numpy_helper.to_array(protos.get_attr(node, "value"))
    assert made[0].type is kind
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, np.asarray(value, dtype))


def test_a_program_is_recorded_as_a_graph_and_built_as_its_file() -> None:
    class Twice(Module):
        def body(self, g: Graph) -> None:
            x = g.input("x", types.TENSOR_FLOAT)
            y = BackendSlot("compute").add(g, x, g.tensor([1.0, 2.0]))
            g.output("y", y, after=x)

    program = Twice().record()
    (root,) = program.functions
    (add,) = (node for node in root.nodes if node.op_type == "Add")
    (out,) = root.value(add.outputs[0]).readers
    assert (out.outputs, out.after) == (("y",), ("x",))
    assert root.kind_of(add.outputs[0]) is types.TENSOR_FLOAT
    assert add.source_line.startswith("test_recorded_form.py:")
    assert model_of(program) == Twice().build()
