"""ONNX's own tools, and ONNX Runtime, open what bbnode makes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import AttributeProto, ModelProto, TensorProto, helper

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.compiler import Compiler
from bbnode.components import OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, types
from bbnode.engine import install
from bbnode.engine.steps import AppEvent
from bbnode.examples import gossip_averaging
from bbnode.ir import keys
from bbnode.ir.bounds import OutOfBounds
from bbnode.ir.graph import Attribute
from bbnode.ir.onnx_file import attribute_of, attribute_proto, program_of
from bbnode.ir.parts import NoSuchPart, extract_part, part_names
from bbnode.ir.peer import PeerId
from tests.daemon.views import federated


class Scores(Module):
    """An affine map, then a norm: one fused graph."""

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        compute = BackendSlot("compute")
        weight = compute.constant(g, np.array([[2, 0], [1, 3]], np.float32))
        g.output("y", compute.relu(g, compute.gemm(g, x, weight)))


def scores() -> ModelProto:
    return Compiler().bind_backend("compute", OrtBackend).compile(Scores().build())


ARTIFACTS = {
    "federated": lambda: federated()[0],
    "scores": scores,
    "gossip": gossip_averaging.compile_program,
}


@pytest.mark.parametrize("name", ARTIFACTS)
def test_tools_open_artifacts(name: str) -> None:
    model = ARTIFACTS[name]()
    assert model.functions[0].name in onnx.printer.to_text(model)
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, strict_mode=True)
    assert onnx.load_from_string(model.SerializeToString()) == model
    for function in model.functions:
        onnx.printer.to_text(function)
        for node in function.node:
            assert helper.printable_node(node)
            assert [helper.get_attribute_value(attribute) for attribute in node.attribute] or 1


@given(st.binary(max_size=40))
def test_bytes_come_back_as_they_were(data: bytes) -> None:
    proto = attribute_proto("a", Attribute.of(data))
    onnx.printer.to_text(helper.make_node("Op", [], [], domain="mine"))
    node = onnx.NodeProto(op_type="Op", domain="mine")
    node.attribute.append(proto)
    onnx.printer.to_text(node)
    assert attribute_of(AttributeProto.FromString(proto.SerializeToString())) == Attribute.of(data)


def test_the_former_form_of_bytes_is_read() -> None:
    proto = AttributeProto(name="peer", type=AttributeProto.STRING, s=b"\xe2\x01")
    assert attribute_of(proto).value == b"\xe2\x01"


def test_a_tensor_that_poses_as_bytes_is_refused() -> None:
    name = keys.PREFIX + "bytes"
    for tensor in (
        helper.make_tensor(name, TensorProto.INT64, [1], [7]),
        helper.make_tensor(name, TensorProto.UINT8, [1, 1], [7]),
    ):
        with pytest.raises(OutOfBounds, match="no row of bytes"):
            attribute_of(helper.make_attribute("a", tensor))
    outside = helper.make_tensor(name, TensorProto.UINT8, [1], [7])
    outside.external_data.add(key="location", value="/etc/passwd")
    model = scores()
    model.functions[0].attribute_proto.append(helper.make_attribute("slot", outside))
    with pytest.raises(OutOfBounds):
        program_of(model)
    numbers = helper.make_tensor(name, TensorProto.UINT8, [2], [7, 255])
    assert attribute_of(helper.make_attribute("a", numbers)).value == b"\x07\xff"


def test_a_session_on_a_part_gives_what_the_node_gives() -> None:
    artifact = scores()
    (name,) = part_names(program_of(artifact))
    part = extract_part(artifact, name)
    session = onnxruntime.InferenceSession(part.SerializeToString())
    x = np.array([[1, -2], [0.5, 4]], np.float32)
    (alone,) = session.run(None, {session.get_inputs()[0].name: x})

    node = install(artifact, ["@self"], peer_id=PeerId.from_seed(1))
    node.invoke("@self", {"x": x})
    steps = node.poll(0)
    (event,) = [step for step in steps if isinstance(step, AppEvent)]
    np.testing.assert_array_equal(alone, event.value)
    assert part.graph.input[0].doc_string.startswith("x")
    (call,) = [
        node.name for f in artifact.functions for node in f.node
        if node.domain == keys.BACKEND_SUBGRAPH_DOMAIN
    ]  # fmt: skip
    assert extract_part(artifact, call) == part


@pytest.mark.parametrize("name", ["nothing", "@self"])
def test_what_does_not_run_alone_is_refused(name: str) -> None:
    artifact = scores()
    wanted = artifact.functions[0].name if name == "@self" else name
    with pytest.raises(NoSuchPart, match="what runs alone: subgraph_"):
        extract_part(artifact, wanted)


def test_every_part_of_a_federated_round_opens() -> None:
    artifact = federated()[0]
    names = part_names(program_of(artifact))
    assert names
    for name in names:
        onnxruntime.InferenceSession(extract_part(artifact, name).SerializeToString())


def test_the_command_writes_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "a.onnx", tmp_path / "part.onnx"
    artifact = scores()
    file.write_bytes(artifact.SerializeToString(deterministic=True))
    (name,) = part_names(program_of(artifact))
    asked = ["inspect", str(file), "--extract", name, "-o", str(out)]
    assert main(asked) == exits.OK
    assert capsys.readouterr().out == f"{out}\n"
    assert onnx.load(out) == extract_part(artifact, name)
    assert main([*asked, "--json"]) == exits.OK
    assert json.loads(capsys.readouterr().out)["function"] == name
    assert main(["inspect", str(file), "--extract", name]) == exits.USAGE
    assert main(["inspect", str(file), "--extract", "x", "-o", str(out)]) not in (0, exits.USAGE)
    assert name in capsys.readouterr().err
