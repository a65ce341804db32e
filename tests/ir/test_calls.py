"""Functions that call each other: counted before they are inlined, wherever they come from."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import FunctionProto, ModelProto, NodeProto, numpy_helper
from onnx import helper as h

from bbnode.compiler import Compiler
from bbnode.components import OnnxModel, OnnxModelConfig, OrtBackend, SklearnDataSource, concrete
from bbnode.components.backends.ort import OrtBackendConfig
from bbnode.components.errors import BackendError
from bbnode.daemon.artifacts.inspect import describe
from bbnode.dsl import Graph, ModelSlot, Module, types
from bbnode.ir import caps
from bbnode.ir.calls import InliningRefused, check_calls
from bbnode.ir.expansion import without_functions
from bbnode.ir.flatten import MalformedFlow, flatten
from bbnode.ir.graph import Function, FunctionKey, OpNode
from bbnode.ir.intake import ModelRefused, brought_up

OPSETS = [h.make_opsetid("", 21), h.make_opsetid("d", 1)]


def function(name: str, nodes: list[NodeProto]) -> FunctionProto:
    return h.make_function("d", name, ["a"], ["b"], nodes, OPSETS)


def called(name: str, source: str, to: str) -> NodeProto:
    return h.make_node(name, [source], [to], domain="d")


def model(functions: list[FunctionProto], top: str) -> ModelProto:
    weights = h.make_tensor("w", 1, [4], [1.0] * 4)
    graph = h.make_graph(
        [called(top, "x", "z"), h.make_node("Mul", ["z", "w"], ["y"])],
        "g",
        [h.make_tensor_value_info("x", 1, ["n", 4])],
        [h.make_tensor_value_info("y", 1, ["n", 4])],
        [weights],
    )
    return h.make_model(graph, functions=functions, opset_imports=OPSETS, ir_version=10)


def doubling(depth: int, base: NodeProto | None = None) -> ModelProto:
    """Return a model of `depth` functions, each of which calls the one before it twice."""
    made = [function("f0", [base or h.make_node("Relu", ["a"], ["b"])])]
    for k in range(1, depth):
        inner = f"f{k - 1}"
        made.append(function(f"f{k}", [called(inner, "a", "t"), called(inner, "t", "b")]))
    return model(made, f"f{depth - 1}")


def branching(depth: int) -> ModelProto:
    """Return the same with one of the calls in a branch, and the other in a loop's body."""
    made = [function("f0", [h.make_node("Relu", ["a"], ["b"])])]
    for k in range(1, depth):
        inner = f"f{k - 1}"
        branches = {
            name: h.make_graph(
                [called(inner, "a", "q")], name, [], [h.make_empty_tensor_value_info("q")]
            )
            for name in ("then_branch", "else_branch")
        }
        yes = h.make_tensor("t", onnx.TensorProto.BOOL, [], [True])
        nodes = [
            h.make_node("Constant", [], ["yes"], value=yes),
            h.make_node("If", ["yes"], ["b"], **branches),
        ]
        made.append(function(f"f{k}", nodes))
    return model(made, f"f{depth - 1}")


def ring() -> ModelProto:
    ends = [function("f", [called("g", "a", "b")]), function("g", [called("f", "a", "b")])]
    return model(ends, "f")


def deep() -> ModelProto:
    made = [function("f0", [h.make_node("Relu", ["a"], ["b"])])]
    made += [function(f"f{k}", [called(f"f{k - 1}", "a", "b")]) for k in range(1, 100)]
    return model(made, "f99")


def heavy() -> ModelProto:
    """Return a model whose one constant of 64 KiB stands for 128 MiB."""
    value = numpy_helper.from_array(np.ones((1 << 14,), np.float32))
    return doubling(12, h.make_node("Constant", [], ["b"], value=value))


REFUSED = {
    "ops": (lambda: doubling(40), "more than 32768 ops"),
    "branches": (lambda: branching(40), "more than 32768 ops"),
    "ring": (ring, "in a ring"),
    "depth": (deep, "deeper than 64"),
    "bytes": (heavy, "more than 67108864 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_functions_stand_for_is_bounded(case: str) -> None:
    made, what = REFUSED[case]
    for read in (check_calls, without_functions):
        with pytest.raises(InliningRefused, match=what):
            read(made())
    if case == "ring":  # which ONNX itself refuses
        with pytest.raises(ModelRefused, match="recursive"):
            brought_up(made())
        return
    with pytest.raises(InliningRefused, match=what):
        brought_up(made())
    with pytest.raises(BackendError, match=what):
        OrtBackend(OrtBackendConfig()).prepare(made())
    with pytest.raises(InliningRefused, match=what):
        OnnxModel(OnnxModelConfig(model=made().SerializeToString()))


def test_functions_within_the_bounds_are_inlined() -> None:
    for made in (doubling(6), branching(4)):
        inlined = brought_up(made)
        assert not inlined.functions
    assert len(brought_up(doubling(6)).graph.node) == 33


def test_a_large_model_may_stand_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bbnode.ir.calls.MAX_INLINED_OPS", 1)
    long = [h.make_node("Relu", ["a"], ["v0"])]
    long += [h.make_node("Relu", [f"v{i}"], [f"v{i + 1}"]) for i in range(50)]
    long.append(h.make_node("Relu", ["v50"], ["b"]))
    twice = [called("f0", "a", "t"), called("f0", "t", "b")]
    check_calls(model([function("f0", long), function("f1", twice)], "f1"))
    with pytest.raises(InliningRefused):
        check_calls(doubling(8))


class Trained(Module):
    home = "client"

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data

    def body(self, g: Graph) -> None:
        held = ModelSlot("model", concrete=concrete(OnnxModel, OnnxModelConfig(model=self.data)))
        g.output("params", held.params(g, after=g.input("tick", types.TRIGGER)))


def test_inspect_says_why_a_model_can_not_be_taken() -> None:
    compiler = Compiler().bind_backend("compute", OrtBackend)
    compiler = compiler.bind_data_source("data", SklearnDataSource)
    artifact = compiler.compile(Trained(doubling(40).SerializeToString()).build())
    assert "stand for more than" in describe(artifact)["models"]["model"]


def library(depth: int, name: str = "n") -> tuple[Function, dict[FunctionKey, Function]]:
    """Return Modules that call each other twice, as the engine and the compiler have them."""
    made = [Function(name="f0", domain="d", inputs=["a"], outputs=["b"])]
    made[0].append(OpNode("Relu", "", "op", ("a",), ("b",)))
    for k in range(1, depth):
        each = Function(name=f"f{k}", domain="d", inputs=["a"], outputs=["b"])
        each.append(OpNode(f"f{k - 1}", "d", f"{name}1", ("a",), ("t",)))
        each.append(OpNode(f"f{k - 1}", "d", f"{name}2", ("t",), ("b",)))
        made.append(each)
    return made[-1], {each.key: each for each in made}


@pytest.mark.parametrize(
    ("depth", "name", "what"),
    [
        (40, "n", f"over {caps.MAX_FLAT_OPS} ops"),
        (70, "n", "deeper than 64"),
        (16, "n" * 1000, f"over {caps.MAX_FLAT_CHARS} characters"),
    ],
)
def test_a_programs_own_functions_are_counted_too(depth: int, name: str, what: str) -> None:
    with pytest.raises(MalformedFlow, match=what):
        flatten(*library(depth, name))


def test_a_programs_functions_within_the_bounds_are_flattened() -> None:
    flat = flatten(*library(5))
    assert sum(op.op_type == "Relu" for op in flat.ops) == 16
