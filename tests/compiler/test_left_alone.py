"""What a compile leaves alone: weights, rare fields, the caller's model."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from bbnode.compiler import Compiler
from bbnode.compiler.analysis import content_hash
from bbnode.compiler.driver import pipeline
from bbnode.compiler.driver.admission import admit
from bbnode.dsl import Graph, Module
from bbnode.ir import graph, types
from bbnode.ir.graph import Attribute, AttributeKind
from bbnode.ir.onnx_file import model_of, program_of
from bbnode.sim import Network
from tests.compiler import programs
from tests.compiler.back_units import unit_until
from tests.compiler.programs import Body
from tests.compiler.test_back_pipeline import ALL

WEIGHTS = np.ones((64, 64), np.float32)


def weighty() -> Body:
    """A program with three weights of 16 KiB each, two of them in a Module that is called twice."""
    child = Body("Child")
    x = child.input("x", types.TENSOR_FLOAT)
    child.onnx("Constant", [], ["w"], value=numpy_helper.from_array(WEIGHTS))
    child.onnx("MatMul", [x, "w"], ["y"])
    child.function.outputs.append("y")
    return child


def weights_of(functions: list[graph.Function]) -> list[Attribute]:
    return [
        attribute
        for function in functions
        for node in function.nodes
        for attribute in node.attributes.values()
        if attribute.kind is AttributeKind.TENSOR
    ]


def root() -> Body:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.onnx("Constant", [], ["w0"], value=numpy_helper.from_array(2 * WEIGHTS))
    body.onnx("MatMul", [x, "w0"], ["h"])
    body.call(weighty().function, ["h"], ["y"], kinds=[types.TENSOR_FLOAT])
    body.output("out", "y")
    return body


def test_no_pass_copies_weights_and_each_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    made = content_hash.AttributePrint

    def counted(attribute: Attribute, size: int, content: bytes) -> object:
        if size > WEIGHTS.nbytes:
            looked_at.append(id(attribute))
        return made(attribute, size, content)

    monkeypatch.setattr(content_hash, "AttributePrint", counted)
    unit = admit(programs.model_of(root(), weighty()), ALL)
    before = {id(attribute) for attribute in weights_of(unit.bodies())}
    for name in pipeline.all_pass_names():
        pipeline.load_pass(name).run(unit, ALL)
    left = weights_of(unit.bodies())
    assert len(before) == len(left) == 2
    assert {id(attribute) for attribute in left} == before
    assert sorted(looked_at) == sorted(before)


@pytest.mark.parametrize("name", sorted(programs.PROGRAMS))
def test_a_program_comes_back_as_it_was(name: str) -> None:
    model = programs.model_of(*programs.PROGRAMS[name]())
    again = model_of(program_of(model))
    assert again.SerializeToString(deterministic=True) == model.SerializeToString(
        deterministic=True
    )


def test_rare_fields_survive_a_compile() -> None:
    body = programs.local_program()
    model = programs.model_of(body)
    node = model.functions[0].node[0]
    node.doc_string = "what it is for"
    if "device_configurations" in onnx.NodeProto.DESCRIPTOR.fields_by_name:
        node.device_configurations.add(configuration_id="two devices")
    model.functions[0].doc_string = "a function"
    info = next(i for i in model.functions[0].value_info if i.name == "a")
    info.doc_string = "an input"
    info.metadata_props.add(key="unit", value="m/s")
    model.producer_version, model.doc_string = "7", "a model"
    assert model_of(program_of(model)) == model
    compiled = programs.bound(model).compile(model)
    assert (compiled.producer_version, compiled.doc_string) == ("7", "a model")
    (kept,) = (i for i in compiled.functions[0].value_info if i.name == "a")
    assert (kept.doc_string, kept.metadata_props[0].value) == ("an input", "m/s")


def test_graphs_inside_of_attributes_are_changed_on_copies() -> None:
    branch = helper.make_graph(
        [helper.make_node("Neg", ["h"], ["r"], domain="ai.onnx")],
        "b",
        [],
        [helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, None)],
    )
    body = Body("P", root=True)
    x, flag = body.input("x", types.TENSOR_FLOAT), body.input("flag", types.TENSOR_BOOL)
    body.onnx("Abs", [x], ["h"])
    body.onnx("If", [flag], ["y"], then_branch=branch, else_branch=branch,
              kinds=[types.TENSOR_FLOAT])  # fmt: skip
    body.output("out", "y")
    model = programs.model_of(body)
    before = model.SerializeToString(deterministic=True)
    compiled = programs.bound(model).compile(model)
    assert model.SerializeToString(deterministic=True) == before
    (choice,) = (n for f in program_of(compiled).functions for n in f.nodes if n.op_type == "If")
    inner = choice.graphs[0].nodes[0]
    assert (inner.domain, inner.inputs[0]) == ("", "bb_v_0")


# --- what a target is named after, and what it takes -----------------------------------------


def names_of(body: Body) -> list[str]:
    unit = unit_until("partition_by_wire_ops", body, options=ALL)
    return [main.name for main in unit.partitions.values()]


def test_a_target_is_named_after_the_types_of_its_values_too() -> None:
    def passing(kind: types.TypeNode) -> Body:
        body = Body("P", root=True)
        body.output("out", body.input("x", kind))
        return body

    assert names_of(passing(types.TENSOR_FLOAT)) == names_of(passing(types.TENSOR_FLOAT))
    assert names_of(passing(types.TENSOR_FLOAT)) != names_of(passing(types.TENSOR_DOUBLE))


def test_inputs_that_no_op_reads_stay_inputs_on_the_home_class() -> None:
    body = Body("P", home="a", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.input("spare", types.TENSOR_FLOAT)
    body.send(x, body.sample("b", "bs", slot="pick_b"), "there")
    body.syscall("Record", ["there"], [], name="Recorded")
    body.function.nodes[-1].set_attr("name", "seen")
    unit = unit_until("partition_by_wire_ops", body, options=ALL)
    assert list(unit.partitions["a"].inputs) == ["x", "spare"]
    assert unit.partitions["a"].kind_of("spare") is types.TENSOR_FLOAT
    assert not unit.partitions["b"].inputs


def test_a_model_of_any_kind_is_left_as_it_was() -> None:
    model = programs.model_of(*programs.nested_program())
    untouched = ModelProto()
    untouched.CopyFrom(model)
    unit = admit(model, ALL)
    for name in pipeline.all_pass_names()[:10]:
        pipeline.load_pass(name).run(unit, ALL)
    assert model == untouched


def test_a_node_takes_inputs_that_no_op_reads() -> None:
    class Spare(Module):
        def body(self, g: Graph) -> None:
            g.output("y", g.input("x", types.TENSOR_FLOAT))
            g.input("spare", types.TENSOR_FLOAT)

    network = Network(seed=0)
    node = network.add("node", Compiler().compile(Spare().build()), ["@self"])
    node.invoke("@self", {"x": np.array(8, np.float32), "spare": np.array(1, np.float32)})
    network.run_until_idle()
    assert float(node.values("y")[0]) == 8.0
