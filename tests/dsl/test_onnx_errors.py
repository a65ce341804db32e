"""What is no model, or none that can be a Module: each a typed error that says how to mend it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from bbnode.dsl import BadArgument, BadName, OnnxModule, RecordingError
from bbnode.dsl import errors as errors
from bbnode.ir.errors import AuthorError
from tests.dsl.onnx_models import mlp, model_of, port
from tests.dsl.test_onnx_module import linear_classifier

N = helper.make_node


def refused(kind: type[Exception], source: object, text: str, **more: object) -> None:
    with pytest.raises(kind, match=text) as error:
        OnnxModule(source, **more)  # type: ignore[arg-type]
    assert isinstance(error.value, RecordingError)
    assert isinstance(error.value, AuthorError)
    assert error.value.source.startswith("test_onnx_errors.py:")
    assert error.value.module or kind is BadName  # what is no name names no Module


def one_op(*nodes: onnx.NodeProto, **more: int) -> onnx.ModelProto:
    return model_of(nodes, [port("x", [2])], [port("y", [2])], **more)


def test_files_that_are_none(tmp_path) -> None:
    refused(errors.BrokenModel, tmp_path / "gone.onnx", "cannot read 'gone.onnx': No such file")
    refused(errors.BrokenModel, tmp_path, "is not a file")
    text = tmp_path / "text.onnx"
    text.write_text("this is no model")
    refused(errors.BrokenModel, text, "no ONNX model")
    empty = tmp_path / "empty.onnx"
    empty.write_bytes(b"")
    refused(errors.BrokenModel, empty, "there is no graph in it")
    whole = mlp().SerializeToString()
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(whole[: len(whole) // 2])
    refused(errors.BrokenModel, cut, "'cut.onnx' is not an ONNX model, or only a part of one")
    refused(errors.BrokenModel, 7, "neither the path of an ONNX file nor an onnx.ModelProto")


def test_what_bbnode_recorded_is_no_onnx_model_to_import() -> None:
    refused(errors.BrokenModel, OnnxModule(mlp()).build(), "replayed by CompiledModule")


def test_models_that_the_checker_refuses() -> None:
    refused(errors.BrokenModel, one_op(N("Foo", ["x"], ["y"])), "No Op registered for Foo")
    twice = one_op(N("Neg", ["x"], ["y"]), N("Abs", ["x"], ["y"]))
    refused(errors.BrokenModel, twice, "ONNX refuses the model.*'y'")
    ring = one_op(N("Add", ["x", "b"], ["a"]), N("Neg", ["a"], ["b"]), N("Neg", ["b"], ["y"]))
    refused(errors.BrokenModel, ring, "ONNX refuses the model")
    dangling = one_op(N("Add", ["x", "nowhere"], ["y"]))
    refused(errors.BrokenModel, dangling, "ONNX refuses the model")
    model = mlp()
    model.graph.initializer[0].dims[0] = 1000
    refused(errors.BrokenModel, model, "ONNX refuses the model")


def test_ops_of_foreign_domains_are_named() -> None:
    model = one_op(N("FusedGelu", ["x"], ["y"], domain="acme.ops", name="/gelu"), acme_ops=1)
    refused(
        errors.UnsupportedDomain, model,
        r"op '/gelu' is acme.ops::FusedGelu.*with its functions",
    )  # fmt: skip


def test_a_foreign_op_inside_of_an_if_is_found() -> None:
    branch = helper.make_graph(
        [N("Gelu", ["x"], ["b"], domain="acme.ops")], "b", [], [port("b", [2])]
    )
    model = model_of(
        [N("If", ["c"], ["y"], then_branch=branch, else_branch=branch)],
        [port("x", [2]), port("c", [], TensorProto.BOOL)], [port("y", [2])], acme_ops=1,
    )  # fmt: skip
    refused(errors.UnsupportedDomain, model, "acme.ops::Gelu")


def test_external_data_that_is_missing_or_elsewhere(tmp_path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(mlp(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    bare = onnx.load(path, load_external_data=False)
    refused(errors.ExternalDataMissing, bare, "give the path of the model, or load it")
    data = (tmp_path / "w.bin").read_bytes()
    (tmp_path / "w.bin").unlink()
    refused(errors.ExternalDataMissing, path, r"'fc0.weight' \(in 'w.bin'\).*beside the model")
    (tmp_path / "w.bin").write_bytes(data[:10])
    with pytest.raises((errors.ExternalDataMissing, errors.BrokenModel)):
        OnnxModule(path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "w.bin").write_bytes(data)
    for outside in ("../w.bin", str(tmp_path / "w.bin")):
        for tensor in bare.graph.initializer:
            entry = next(e for e in tensor.external_data if e.key == "location")
            entry.value = outside
        (tmp_path / "sub" / "m.onnx").write_bytes(bare.SerializeToString())
        refused(errors.ExternalDataMissing, tmp_path / "sub" / "m.onnx", "cannot be read")


def nested(depth: int) -> onnx.ModelProto:
    inner = N("Neg", ["x"], ["t0"])
    for level in range(depth):
        name = inner.output[0]
        graph = helper.make_graph([inner], "g", [], [port(name, [2])])
        inner = N("If", ["c"], [f"t{level + 1}"], then_branch=graph, else_branch=graph)
    return model_of(
        [inner], [port("x", [2]), port("c", [], TensorProto.BOOL)], [port(inner.output[0], [2])]
    )


def deep(depth: int) -> onnx.ModelProto:
    """As `nested`, one graph per level, so that it does not double."""
    model = nested(1)
    node = model.graph.node[0]
    for _ in range(depth):
        node = node.attribute[0].g.node.add()
        node.CopyFrom(N("Loop", ["", ""], []))
        attribute = node.attribute.add(name="body", type=onnx.AttributeProto.GRAPH)
        attribute.g.node.add().CopyFrom(N("Neg", ["x"], ["z"]))
    return model


@pytest.mark.parametrize("depth", [30, 200, 2000])
def test_graphs_that_nest_too_deep(depth) -> None:
    refused(errors.NestingTooDeep, deep(depth), "more than 24 graphs of If, Loop or Scan")


def test_graphs_that_nest_less_are_taken() -> None:
    assert len(OnnxModule(nested(4)).build().functions) == 1


def test_functions_that_call_each_other_in_a_ring_or_without_end() -> None:
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]

    def function(name: str, *calls: str) -> onnx.FunctionProto:
        nodes = [
            N(call, ["a" if i == 0 else f"v{i}"], ["b" if i == len(calls) - 1 else f"v{i + 1}"],
              domain="" if call == "Neg" else "f")
            for i, call in enumerate(calls)
        ]  # fmt: skip
        return helper.make_function("f", name, ["a"], ["b"], nodes, opsets)

    ring = one_op(N("A", ["x"], ["y"], domain="f"), f=1)
    ring.functions.extend([function("A", "B"), function("B", "A")])
    refused(errors.NestingTooDeep, ring, "function '[AB]' of the model calls itself")
    bomb = one_op(N("F0", ["x"], ["y"], domain="f"), f=1)
    bomb.functions.extend(function(f"F{i}", f"F{i + 1}", f"F{i + 1}") for i in range(40))
    bomb.functions.append(function("F40", "Neg"))
    refused(errors.ModelTooLarge, bomb, r"has 1099511627776 ops")


def test_ports_that_are_no_tensors() -> None:
    maps = linear_classifier()  # whose maps an op behind them reads, so that they stay
    maps.graph.node.append(N("SequenceLength", ["output_probability"], ["length"]))
    maps.graph.output.append(port("length", [], TensorProto.INT64))
    refused(errors.UnsupportedPort, maps, "output 'output_probability' is a sequence.*zipmap=False")
    small = model_of(
        [N("Identity", ["x"], ["y"])], [port("x", [1], TensorProto.COMPLEX64)],
        [port("y", [1], TensorProto.COMPLEX64)],
    )  # fmt: skip
    refused(errors.UnsupportedPort, small, "input 'x' is a tensor of complex64")


def test_arguments_that_do_not_fit() -> None:
    refused(errors.UnknownValue, mlp(), "no output 'prob'; did you mean 'probs'", outputs=["prob"])
    refused(errors.UnknownValue, mlp(), "no output", outputs=[])
    refused(errors.UnknownValue, mlp(), "no output", outputs="probs!")
    refused(BadArgument, mlp(), "is neither a BackendSlot nor a name", slot=3)
    refused(BadName, mlp(), "is not a valid Module name", name="a/b")
    refused(BadName, mlp(), "is not a valid peer class", home="a/b")
    module = OnnxModule(mlp())
    for more in ({}, {"stages": 2, "at": ["probs"]}):
        with pytest.raises(BadArgument, match="either stages=<number> or at="):
            module.split(**more)
    for classes in (["a"], "ab", ["a", "b", "c"]):
        with pytest.raises(BadArgument, match="each of 2 stages"):
            module.split(stages=2, classes=classes)
    with pytest.raises(BadName, match="is not a valid peer class"):
        module.split(stages=2, classes=["a b", "c"])


def test_a_model_without_inputs_has_nothing_to_send() -> None:
    w = numpy_helper.from_array(np.ones(2, np.float32), "w")
    module = OnnxModule(model_of([N("Neg", ["w"], ["y"])], [], [port("y", [2])], [w]))
    with pytest.raises(errors.BadCut, match="use the model whole"):
        module.split(stages=1)


WHOLE = mlp((3, 2, 2)).SerializeToString()


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255), st.integers(0, 3))
@settings(max_examples=300)
def test_a_damaged_file_is_a_model_or_a_typed_error(tmp_path_factory, at, value, cut) -> None:
    damaged = bytearray(WHOLE)
    damaged[at] = value
    if cut == 0:
        del damaged[at:]
    path = tmp_path_factory.getbasetemp() / "damaged.onnx"
    path.write_bytes(bytes(damaged))
    try:
        OnnxModule(path).build()
    except RecordingError:
        return
