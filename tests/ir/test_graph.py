"""The graph: nothing is lost on the way from and to a file, and the table follows every edit."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, helper

from bbnode.ir import graph, keys, onnx_file, types
from bbnode.ir.bounds import OutOfBounds
from bbnode.ir.errors import AuthorError
from bbnode.ir.graph import (
    Attribute,
    AttributeKind,
    Body,
    Function,
    OpNode,
    Subgraph,
    Tensor,
    ValueType,
)

WEIGHTS = onnx.numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "w")


def sparse() -> onnx.SparseTensorProto:
    values = onnx.numpy_helper.from_array(np.array([5.0], np.float32), "s")
    indices = onnx.numpy_helper.from_array(np.array([2], np.int64))
    return helper.make_sparse_tensor(values, indices, [3])


@pytest.mark.parametrize("fields", [
    {"data_type": 39, "dims": [2]},
    {"data_type": 1, "dims": [2], "raw_data": b"abc"},
    {"data_type": 1, "dims": [-1], "raw_data": b"abcd"},
    {"data_type": 1, "dims": [1 << 62, 4]},
    {"data_type": 0, "dims": [2]},
    {"data_type": 8, "dims": [1], "string_data": [b"\xff"]},
    {"data_type": 1, "dims": [2], "raw_data": b"12345678", "data_location": 1},
], ids=lambda fields: str(fields["data_type"]))  # fmt: skip
def test_values_that_no_array_can_be_made_of_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(AuthorError, match=r"tensor 'w' of element type .* can't be read"):
        Tensor(onnx.TensorProto(name="w", **fields)).numpy()
    made = sparse()
    made.dims[:] = fields["dims"]
    made.values.CopyFrom(onnx.TensorProto(name="w", **fields))
    with pytest.raises(AuthorError, match="can't be read"):
        Tensor(made).numpy()


def nested(depth: int) -> GraphProto:
    """A graph that reads `outer`, and nests others."""
    nodes = [helper.make_node("Add", ["inner", "outer"], [f"sum{depth}"], name=f"add{depth}")]
    if depth:
        nodes.append(
            helper.make_node(
                "If", ["flag"], [f"if{depth}"], then_branch=nested(depth - 1),
                else_branch=nested(depth - 1),
            )
        )  # fmt: skip
    made = helper.make_graph(
        nodes,
        f"level{depth}",
        [helper.make_tensor_value_info("inner", onnx.TensorProto.FLOAT, ["batch", 3, None])],
        [helper.make_tensor_value_info(f"sum{depth}", onnx.TensorProto.FLOAT, None)],
        [WEIGHTS],
        doc_string="a level",
        value_info=[helper.make_tensor_value_info("late", onnx.TensorProto.FLOAT, [])],
    )
    made.sparse_initializer.append(sparse())
    made.quantization_annotation.add(tensor_name="inner")
    made.metadata_props.add(key="k", value="v")
    return made


ATTRIBUTES = [
    *(helper.make_attribute("f", 0.1), helper.make_attribute("i", 0)),
    helper.make_attribute("s", ""),
    *(helper.make_attribute("t", WEIGHTS), helper.make_attribute("g", nested(2))),
    *(helper.make_attribute("fs", [0.5, 1.5]), helper.make_attribute("is", [1, 2])),
    *(helper.make_attribute("ss", ["a", b"\xff"]), helper.make_attribute("ts", [WEIGHTS, WEIGHTS])),
    helper.make_attribute("gs", [nested(0), nested(1)]),
    helper.make_attribute("tp", types.type_to_proto(types.PEER_ID_VEC)),
    helper.make_attribute("tps", [types.type_to_proto(k) for k in (types.ANY, types.TENSOR_FLOAT)]),
    *(helper.make_attribute("st", sparse()), helper.make_attribute("sts", [sparse()])),
    helper.make_attribute("doc", 7, doc_string="a number"),
    AttributeProto(name="empty", type=AttributeProto.INTS),
    AttributeProto(name="ref", type=AttributeProto.FLOAT, ref_attr_name="given"),
    AttributeProto(name="both", type=AttributeProto.INT, i=3, ref_attr_name="given"),
    AttributeProto(name="lies", type=AttributeProto.INT, s=b"no int"),
    AttributeProto(name="bare", type=AttributeProto.INT),
    AttributeProto(name="none"),
    AttributeProto(name="odd", type=AttributeProto.FLOAT, floats=[1.0], f=2.0),
]  # fmt: skip


def everything() -> ModelProto:
    model = ModelProto(ir_version=10, producer_name="p", producer_version="7", domain="d")
    model.doc_string, model.model_version = "a model", 3
    model.graph.CopyFrom(nested(3))
    model.graph.name = "main"
    model.opset_import.add(domain="", version=21)
    model.metadata_props.add(key="one", value="1")
    function = model.functions.add(
        name="F", domain="D", overload="o", doc_string="a function", input=["x"], output=["y"],
        attribute=["slot"],
    )  # fmt: skip
    function.attribute_proto.add(name="given", type=AttributeProto.FLOAT, f=0.5)
    function.opset_import.add(domain="D", version=1)
    function.metadata_props.add(key="two", value="2")
    node = function.node.add(
        name="n", op_type="Op", domain="D", overload="o", doc_string="an op", input=["x", ""],
        output=["y", "", "z"], attribute=ATTRIBUTES,
    )  # fmt: skip
    for key, value in (
        *(("any", "thing"), (keys.AFTER_KEY, "a,b"), (keys.SOURCE_LINE_KEY, "f.py:3")),
        (keys.MADE_BY_KEY, "some_pass"),
    ):
        node.metadata_props.add(key=key, value=value)
    if "device_configurations" in NodeProto.DESCRIPTOR.fields_by_name:
        node.device_configurations.add(configuration_id="two devices")
    info = function.value_info.add(name="x", doc_string="an input")
    info.type.CopyFrom(types.type_to_proto(types.PEER_ID_VEC))
    info.metadata_props.add(key="unit", value="m")
    function.value_info.add(name="untyped", doc_string="no type")
    return model


def test_nothing_is_lost_on_the_way_there_and_back() -> None:
    model = everything()
    before = model.SerializeToString(deterministic=True)
    program = onnx_file.program_of(model)
    assert onnx_file.model_of(program) == model
    assert onnx_file.model_of(program.copy()) == model
    assert model.SerializeToString(deterministic=True) == before
    assert onnx_file.function_proto(program.functions[0]) == model.functions[0]
    assert program.graph is not None
    assert onnx_file.graph_proto(program.graph) == model.graph
    for attribute in ATTRIBUTES:
        again = onnx_file.attribute_proto(attribute.name, onnx_file.attribute_of(attribute))
        assert again == attribute


def test_a_node_shows_its_fields() -> None:
    program = onnx_file.program_of(everything())
    (node,) = program.functions[0].nodes
    assert (node.after, node.source_line, node.made_by) == (("a", "b"), "f.py:3", "some_pass")
    assert node.metadata == {"any": "thing"}
    assert (node.attr("i"), node.attr("is"), node.attr("s"), node.attr("no", 5)) == (
        0,
        (1, 2),
        b"",
        5,
    )
    assert np.array_equal(node.attr("t").numpy(), np.arange(6).reshape(2, 3))
    assert np.array_equal(node.attr("st").numpy(), [0, 0, 5])
    assert node.attr("tp").kind is types.PEER_ID_VEC
    assert node.captured == ("outer", "flag")
    for name in ("ref", "lies", "bare", "none"):
        with pytest.raises(AuthorError, match=f"attribute '{name}' has no value"):
            node.attr(name)
    assert program.graph is not None
    assert program.graph.types["inner"].shape == ("batch", 3, None)
    assert program.graph.types["late"].shape == ()
    assert program.graph.types["sum3"].shape is None


def test_bounds_are_checked_within_nested_graphs() -> None:
    model = everything()
    graph_attribute = next(a for a in model.functions[0].node[0].attribute if a.name == "g")
    graph_attribute.g.node[0].name = "n" * 100_000
    with pytest.raises(OutOfBounds):
        onnx_file.program_of(model)


def test_weights_are_wrapped_and_copied_into_the_new_file_alone() -> None:
    model = everything()
    program = onnx_file.program_of(model)
    tensor = program.functions[0].nodes[0].attr("t")
    assert tensor.proto is model.functions[0].node[0].attribute[3].t
    assert program.copy().functions[0].nodes[0].attr("t") is tensor
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == ((2, 3), np.float32, WEIGHTS.ByteSize())


@pytest.mark.parametrize(
    ("value", "kind", "held"),
    [
        *((True, "INT", 1), (np.int64(3), "INT", 3), ("a", "STRING", b"a"), (b"a", "STRING", b"a")),
        *((0.1, "FLOAT", float(np.float32(0.1))), (1e300, "FLOAT", float("inf"))),
        *(([1, 2], "INTS", (1, 2)), ([1, 0.5], "FLOATS", (1.0, 0.5)), (("a",), "STRINGS", (b"a",))),
        (types.ANY, "TYPE_PROTO", ValueType.of(types.ANY)),
        (np.array([1, 2]), "INTS", (1, 2)),
    ],
)
def test_an_attribute_of_a_python_value(value: object, kind: str, held: object) -> None:
    made = Attribute.of(value)
    assert (made.kind.name, made.value) == (kind, held)
    assert onnx_file.attribute_of(onnx_file.attribute_proto("a", made)) == made


@pytest.mark.parametrize("value", [[], None, [1, "a"], object()])
def test_what_no_attribute_holds_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        Attribute.of(value)


def test_equal_numbers_texts_and_types_are_one_object() -> None:
    assert Attribute.of(5) is Attribute.of(5)
    assert Attribute.of("a") is Attribute.of(b"a")
    assert ValueType.of(types.ANY) is ValueType.of(types.ANY)
    read = onnx_file.program_of(everything()).functions[0].nodes[0].attributes["i"]
    assert read is Attribute.of(0)


def test_a_tensor_keeps_its_shape_when_its_kind_is_declared() -> None:
    body = Body(types={"x": ValueType.of(types.TENSOR, ("n", None, 3))})
    body.declare({"x": types.TENSOR_FLOAT, "y": types.PEER_ID})
    assert body.types["x"].shape == ("n", None, 3)
    assert (body.kind_of("x"), body.kind_of("y")) == (types.TENSOR_FLOAT, types.PEER_ID)
    body.declare_as([("z", "x"), ("u", "nowhere")])
    assert body.types["z"] is body.types["x"]
    assert body.kind_of("u") is types.ANY


def test_graphs_in_attributes_are_changed_on_copies() -> None:
    program = onnx_file.program_of(everything())
    node = program.functions[0].nodes[0]
    before = node.attributes["g"]
    node.rename({"outer": "new", "x": "x2"})
    assert node.inputs == ("x2", "")
    assert node.captured == ("new", "flag")
    assert before.value.free == ("outer", "flag")
    assert node.attributes["g"] is not before
    assert node.attributes["i"] is Attribute.of(0)
    assert all("outer" not in inner.inputs for g in node.graphs for inner in g.all_nodes())


# --- the table ----------------------------------------------------------------------------

NAMES = [f"v{index}" for index in range(5)]


def capturing(name: str) -> Attribute:
    """An attribute with a graph that reads a name from outside."""
    inner = Subgraph(name="g", outputs=["o"])
    inner.append(OpNode("Neg", inputs=[name], outputs=["o"]))
    return Attribute.of(inner)


def ports() -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(["", *NAMES]), max_size=3).map(tuple)


@st.composite
def op_nodes(draw: st.DrawFn) -> OpNode:
    attributes: dict[str, Any] = draw(
        st.sampled_from([{}, {"i": 1}, *({"g": capturing(n)} for n in NAMES)])
    )
    return OpNode("Op", "d", "n", draw(ports()), draw(ports()), attributes, after=draw(names()))


def names() -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(NAMES), max_size=2).map(tuple)


def check_table(body: Body) -> None:
    """Compare the table with one that is made from scratch."""
    for name in NAMES:
        made = [node for node in body.nodes if name in node.outputs]
        assert body.value(name).producer is (made[0] if made else None)
        readers = body.value(name).readers
        wanted = {
            node for node in body.nodes if name in (*node.inputs, *node.after, *node.captured)
        }
        assert set(readers) == wanted
        assert len(readers) == len(wanted)
        assert (body.producers.get(name) is not None) == bool(made)


@given(st.data())
def test_the_table_follows_every_edit(data: st.DataObject) -> None:
    body = Function(nodes_of := "f")
    assert body.name == nodes_of
    body.nodes = data.draw(st.lists(op_nodes(), max_size=4))
    check_table(body)
    for _ in range(data.draw(st.integers(1, 8))):
        size = len(body.nodes)
        edit = data.draw(
            st.sampled_from(["append", "insert", "assign", "change", "remove", "replace"])
        )
        if edit in ("append", "insert", "assign") or not size:
            fresh = data.draw(op_nodes())
            if edit == "assign":
                body.nodes = [fresh, *body.nodes][: data.draw(st.integers(0, size))]
            elif edit == "insert":
                body.insert(data.draw(st.integers(0, size)), fresh, fresh.copy())
            else:
                assert body.append(fresh) is fresh
        else:
            node = body.nodes[data.draw(st.integers(0, size - 1))]
            if edit == "remove":
                body.remove(node)
                node.inputs = node.outputs = ("v0",)  # nobody's node any more
            elif edit == "replace":
                body.replace(node, data.draw(op_nodes()), node)
            else:
                field = data.draw(
                    st.sampled_from(["inputs", "outputs", "after", "graph", "rename"])
                )
                if field == "graph":
                    node.set_attr("g", capturing(data.draw(st.sampled_from(NAMES))))
                elif field == "rename":
                    node.rename({"v0": "v1", "v1": "v2"})
                else:
                    setattr(node, field, data.draw(ports() if field != "after" else names()))
        if data.draw(st.booleans()):
            check_table(body)
    check_table(body)
    check_table(body.copy())


def test_a_body_and_its_nodes_form_no_ring() -> None:
    tensor = Tensor.of(np.zeros(3))
    gone = weakref.ref(tensor)
    body = Function("f")
    body.append(OpNode("Constant", outputs=["x"], attributes={"value": tensor}))
    assert body.value("x").readers == ()
    assert body.value("x").producer is body.nodes[0]
    gc.disable()
    try:
        del body, tensor
        assert gone() is None
    finally:
        gc.enable()


def test_a_node_is_in_one_body() -> None:
    one, two = Function("one"), Function("two")
    node = one.append(OpNode("Op", outputs=["x"]))
    assert one.value("x").producer is node
    assert two.value("x").producer is None
    with pytest.raises(ValueError, match="in a body already"):
        two.append(node)
    one.remove(node)
    with pytest.raises(ValueError, match="not all of"):
        one.remove(node)
    two.append(node)
    assert two.value("x").producer is node
    assert one.value("x").producer is None


def test_values_show_what_the_body_says() -> None:
    body = Function("f", inputs=["x"], outputs=["y"])
    node = body.append(OpNode("Abs", inputs=["x"], outputs=["y"]))
    body.declare({"x": types.TENSOR_FLOAT})
    x, y = body.values
    assert (x.name, x.is_input, x.is_output, x.readers) == ("x", True, False, (node,))
    assert (y.name, y.is_input, y.is_output, y.producer) == ("y", False, True, node)
    assert x.type is ValueType.of(types.TENSOR_FLOAT)
    assert y.type is None
    assert x == body.value("x")


def test_helpers_tell_ops_apart() -> None:
    send = OpNode(keys.OP_SEND, keys.WIRE_DOMAIN)
    assert graph.is_wire(send)
    assert graph.is_wire(send, keys.OP_SEND)
    assert not graph.is_wire(send, "X")
    assert graph.is_role(OpNode("Train", keys.role_domain("Model")))
    assert not graph.is_role(send)
    assert (
        graph.call_key(OpNode("F", "D", overload="o"))
        == Function("F", domain="D", overload="o").key
    )
    assert AttributeKind.GRAPH in {onnx_file.attribute_of(a).kind for a in ATTRIBUTES}
    assert onnx_file.function_of(FunctionProto(name="f")).name == "f"
    assert graph.sorted_opsets([("b", 1), ("a", 2), ("b", 1)]) == [("a", 2), ("b", 1)]
