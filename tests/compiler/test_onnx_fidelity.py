"""What an ONNX model says beside its ops: devices, quantization, training; kept or refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import (
    BackendSlot,
    CompiledModule,
    Graph,
    Module,
    OnnxModule,
    PeerSelectorSlot,
    types,
)
from bbnode.dsl.errors import BrokenModel, UnconvertibleModel
from bbnode.ir import keys
from bbnode.ir.bounds import OutOfBounds
from bbnode.ir.errors import AuthorError
from bbnode.ir.graph import annotations_on
from bbnode.ir.onnx_file import (
    ConflictingConfiguration,
    annotations_of,
    model_of,
    parse_model,
    program_of,
)


def described_model(opset: int = 21, op: str = "Mul") -> ModelProto:
    """Two ops with a weight, whose values are annotated, sharded and trained."""
    graph = helper.make_graph(
        [
            helper.make_node(op, ["x", "w"], ["h"], name="scale"),
            helper.make_node("Add", ["h", "b"], ["y"], name="shift"),
        ],
        "described",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        [
            helper.make_tensor("w", TensorProto.FLOAT, [2], [2, 3]),
            helper.make_tensor("b", TensorProto.FLOAT, [2], [1, 1]),
            helper.make_tensor("h_scale", TensorProto.FLOAT, [], [0.5]),
            helper.make_tensor("h_zero", TensorProto.INT8, [], [0]),
        ],
    )
    annotate(graph, "h", SCALE_TENSOR="h_scale", ZERO_POINT_TENSOR="h_zero")
    annotate(graph, "x", SCALE_TENSOR="h_scale")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)
    model.configuration.add(name="two", num_devices=2, device=["left", "right"])
    device = model.graph.node[1].device_configurations.add(configuration_id="two")
    device.sharding_spec.add(tensor_name="h", device=[0, 1])
    device.sharding_spec.add(tensor_name="y", device=[0, 1])
    training = model.training_info.add()
    training.algorithm.name = "sgd"
    training.update_binding.add(key="w", value="w_new")
    return model


def annotate(graph: onnx.GraphProto, value: str, **parameters: str) -> None:
    held = graph.quantization_annotation.add(tensor_name=value).quant_parameter_tensor_names
    for key, name in parameters.items():
        held.add(key=key, value=name)


class Wrapped(Module):
    """The model, called by a program with an op of its own before it."""

    def __init__(self, *models: ModelProto) -> None:
        self._models = [OnnxModule(m, name=f"m{i}") for i, m in enumerate(models)]

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        for inner in self._models:
            x = inner.call().input("x", x).build(g).output("y")
        g.output("z", x)


def compiled(module: Module) -> ModelProto:
    return Compiler().bind_backend("compute", OrtBackend).compile(module.build())


def subgraphs(model: ModelProto) -> list[onnx.FunctionProto]:
    return [f for f in model.functions if f.domain == keys.BACKEND_SUBGRAPH_DOMAIN]


def test_a_model_goes_through_the_graph_as_it_is() -> None:
    model = described_model()
    again = model_of(program_of(parse_model(model.SerializeToString())))
    assert again == model


def test_devices_quantization_and_training_stay_through_a_compile() -> None:
    artifact = compiled(Wrapped(described_model()))
    onnx.checker.check_model(artifact, full_check=True)
    assert artifact.ir_version == keys.FRAMEWORK_IR_VERSION
    assert artifact.configuration == described_model().configuration
    assert artifact.training_info == described_model().training_info
    (function,) = subgraphs(artifact)
    (shift,) = [node for node in function.node if node.device_configurations]
    specs = shift.device_configurations[0].sharding_spec
    assert [spec.tensor_name for spec in specs] == [shift.input[0], shift.output[0]]
    held = {
        value: parameters
        for node in program_of(artifact).functions[-1].nodes
        for value, parameters in annotations_on(node).items()
    }
    made = {name: node for node in function.node for name in node.output}
    assert {len(parameters) for parameters in held.values()} == {1, 2}
    for parameters in held.values():
        scale = onnx.numpy_helper.to_array(made[parameters["SCALE_TENSOR"]].attribute[0].t)
        assert scale == np.float32(0.5)
    assert compiled(Wrapped(described_model())).SerializeToString() == artifact.SerializeToString()


def test_they_stay_when_the_artifact_is_opened_and_compiled_again() -> None:
    artifact = compiled(Wrapped(described_model()))
    again = Compiler().bind_backend("compute", OrtBackend).compile(artifact)
    assert again.SerializeToString(deterministic=True) == artifact.SerializeToString(
        deterministic=True
    )
    replayed = compiled(CompiledModule(artifact))
    assert replayed.configuration == artifact.configuration
    assert replayed.training_info == artifact.training_info
    (before,), (after,) = subgraphs(artifact), subgraphs(replayed)
    assert before.name == after.name


def test_two_models_share_a_configuration_and_may_not_contradict_each_other() -> None:
    artifact = compiled(Wrapped(described_model(), described_model(op="Sub")))
    assert len(artifact.configuration) == 1
    other = described_model(op="Sub")
    other.configuration[0].num_devices = 4
    with pytest.raises(ConflictingConfiguration, match="'two' differently; give one of them"):
        Wrapped(described_model(), other).build()


def test_a_conversion_of_the_opset_loses_none_of_it() -> None:
    model = described_model(opset=12)
    axes = model.graph.node.add(op_type="Squeeze", input=["y"], output=["s"])  # another form at 13
    axes.attribute.add(name="axes", type=onnx.AttributeProto.INTS).ints.append(0)
    model.graph.initializer[1].dims[:] = [1, 2]
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("s", TensorProto.FLOAT, [2]))
    recorded = program_of(OnnxModule(model, name="old").build())
    nodes = recorded.functions[0].nodes
    assert len(annotations_on(nodes[[n.op_type for n in nodes].index("Mul")])) == 2
    assert [bool(n.extras) for n in nodes if n.op_type == "Add"] == [True]
    model.graph.quantization_annotation[0].tensor_name = "nowhere"
    with pytest.raises(UnconvertibleModel, match="annotation of 'nowhere'"):
        OnnxModule(model, name="old")


def _strange_sharding(model: ModelProto) -> None:
    model.graph.node[1].device_configurations[0].sharding_spec[0].tensor_name = "x"


def _unknown_field(model: ModelProto) -> None:
    model.graph.node[0].MergeFromString(b"\xfa\x3e\x01\x00")  # field 1007, of no version of today


@pytest.mark.parametrize(
    ("change", "says"),
    [(_strange_sharding, "neither reads nor makes"), (_unknown_field, "install a newer onnx")],
)
def test_what_cannot_be_kept_is_refused(change: Callable[[ModelProto], None], says: str) -> None:
    model = described_model()
    change(model)
    with pytest.raises(BrokenModel, match=says):
        OnnxModule(model)


def test_hostile_descriptions_are_refused() -> None:
    model = described_model()
    model.configuration[0].device.extend("d" for _ in range(100_000))
    with pytest.raises(OutOfBounds, match="devices"):
        program_of(model)
    artifact = program_of(compiled(Wrapped(described_model())))
    node = next(
        n for f in artifact.functions for n in f.nodes if keys.QUANTIZATION_KEY in n.metadata
    )
    for text in ("[", "{}x", "7", '{"a": {"SCALE_TENSOR": 7}}', "[" * 4000):
        node.metadata[keys.QUANTIZATION_KEY] = text
        with pytest.raises(AuthorError, match="no quantization annotation"):
            node.rename({})


def test_nested_graphs_keep_theirs_under_new_names() -> None:
    branch = helper.make_graph(
        [helper.make_node("Mul", ["x", "scale"], ["t"])],
        "then",
        [],
        [helper.make_tensor_value_info("t", TensorProto.FLOAT, [2])],
        [helper.make_tensor("scale", TensorProto.FLOAT, [2], [2, 2])],
    )
    annotate(branch, "t", SCALE_TENSOR="scale")
    other = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["e"])],
        "else",
        [],
        [helper.make_tensor_value_info("e", TensorProto.FLOAT, [2])],
    )
    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=other)],
        "nested",
        [
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    artifact = program_of(compiled(OnnxModule(model)))
    (inner,) = [
        graph
        for function in artifact.functions
        for node in function.nodes
        for graph in node.graphs
        if graph.name == "then"
    ]
    (name,) = inner.initializers
    assert annotations_of(inner) == {inner.outputs[0]: {"SCALE_TENSOR": name}}


class Sends(Module):
    """A send, two ops and a component."""

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        peers = PeerSelectorSlot("to", peer_class="client").current_view(g)
        compute = BackendSlot("compute")
        g.net_out("w", peers, compute.add(g, compute.mul(g, x, x), x))


def test_made_ops_say_which_op_they_come_from() -> None:
    compiler = Compiler().bind_backend("compute", OrtBackend)
    artifact = program_of(compiler.bind_peer_selector("to", ConnectedView).compile(Sends().build()))
    said = {
        node.name: node.metadata.get(keys.ORIGINAL_OP_KEY)
        for function in artifact.functions
        for node in function.nodes
    }
    view = f"{keys.ROLE_DOMAIN_PREFIX}peer_selector::CurrentView"
    assert said["CurrentView_0"] == view
    assert said["CurrentView_0#deadline"] == view
    assert said["Send_0"] is None
    assert said["Send_0/Recv"] == said["Send_0#deadline"] == f"{keys.WIRE_DOMAIN}::Send"
    assert said["Add_0#subgraph"] == "ai.onnx::Mul,ai.onnx::Add"
    gates = {
        node.metadata.get(keys.ORIGINAL_OP_KEY)
        for function in artifact.functions
        for node in function.nodes
        if node.op_type in keys.GATE_OPS
    }
    assert gates == {f"{keys.WIRE_DOMAIN}::Send"}


def test_annotations_are_json_with_sorted_keys() -> None:
    recorded = program_of(OnnxModule(described_model()).build())
    texts = [
        node.metadata[keys.QUANTIZATION_KEY]
        for node in recorded.functions[0].nodes
        if keys.QUANTIZATION_KEY in node.metadata
    ]
    assert texts
    assert all(
        text == json.dumps(json.loads(text), separators=(",", ":"), sort_keys=True)
        for text in texts
    )
