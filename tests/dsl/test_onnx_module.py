"""OnnxModule: exported models give what ONNX Runtime gives, whatever exporter they are from."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bbnode.dsl import BackendSlot, Graph, Module, OnnxModule, types
from bbnode.ir import keys
from bbnode.ir.bounds import check_bounds
from tests import protos
from tests.dsl.onnx_models import (
    FLOAT,
    Weights,
    assert_same,
    cnn,
    compiled,
    mlp,
    model_of,
    ort,
    port,
    run,
    transformer,
    x_of,
)

MODELS = {
    "mlp": (mlp(), {"input_1": x_of(5, 8)}),
    "cnn": (cnn(), {"x": x_of(2, 1, 8, 8)}),
    "transformer": (transformer(), {"x": x_of(2, 5, 8)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_gives_what_onnx_runtime_gives(name) -> None:
    model, feeds = MODELS[name]
    assert_same(run(OnnxModule(model), **feeds), ort(model, **feeds))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_one_graph_with_its_weights_inside(name) -> None:
    """A weight outside of the backend's graph would be handed to it with every call."""
    made = compiled(OnnxModule(MODELS[name][0]))
    (main,) = [f for f in made.functions if protos.get_meta(f, keys.TARGET_KEY)]
    assert [n.domain for n in main.node] == [keys.BACKEND_SUBGRAPH_DOMAIN, keys.SYSCALL_DOMAIN]


def test_a_file_is_read_and_names_its_module(tmp_path) -> None:
    path = tmp_path / "my model-1.onnx"
    onnx.save(mlp(), path)
    for source in (path, str(path)):
        module = OnnxModule(source)
        assert module.name == "my_model-1"
        assert module.input_ports == {"input.1": "input_1"}
        assert module.output_ports == {"probs": "probs"}
        assert module.weight_bytes == 4 * (8 * 16 + 16 + 16 * 16 + 16 + 16 * 4 + 4)
        assert module.build().functions[0].name == "my_model-1"


def test_building_twice_gives_equal_bytes_and_the_checker_takes_them() -> None:
    built = OnnxModule(transformer()).build()
    onnx.checker.check_model(built)
    again = OnnxModule(transformer()).build()
    for model in (built, again):
        for node in model.functions[0].node:
            protos.del_meta(node, keys.SOURCE_LINE_KEY)
    assert built.SerializeToString(deterministic=True) == again.SerializeToString(
        deterministic=True
    )


def test_the_callers_model_is_not_changed() -> None:
    model = mlp(opset=11)
    before = model.SerializeToString(deterministic=True)
    OnnxModule(model).build()
    assert model.SerializeToString(deterministic=True) == before


def test_a_module_is_called_from_another_one_on_the_slot_that_it_names() -> None:
    inner = OnnxModule(mlp(), name="Digits", slot=BackendSlot("npu"))

    class Outer(Module):
        home = "edge"

        def body(self, g: Graph) -> None:
            x = g.input("x", types.TENSOR_FLOAT)
            g.output("probs", inner.call().input("input_1", x).build(g).output("probs"))

    root, body = Outer().build().functions
    assert body.name == "Digits"
    ops = [n for n in body.node if n.domain == ""]
    assert {protos.get_meta(n, keys.SLOT_KEY) for n in ops} == {"npu"}
    assert [n.op_type for n in root.node] == ["Digits", "PassThrough"]
    assert [n.name for n in ops if n.op_type == "Gemm"] == [
        "fc0/Gemm_0",
        "fc1/Gemm_0",
        "fc2/Gemm_0",
    ]


def test_one_model_called_twice_is_one_function() -> None:
    inner = OnnxModule(mlp(), name="Digits")

    class Twice(Module):
        def body(self, g: Graph) -> None:
            x = g.input("x", types.TENSOR_FLOAT)
            for name in ("a", "b"):
                g.output(name, inner.call().input("input_1", x).build(g).output("probs"))

    assert len(Twice().build().functions) == 2
    x = x_of(3, 8)
    wanted = ort(mlp(), input_1=x)["probs"]
    assert_same(run(Twice(), x=x), {"a": wanted, "b": wanted})


def test_initializers_that_are_also_inputs_are_weights() -> None:
    model = mlp(opset=8)
    model.ir_version = 3  # in which every initializer had to be an input
    model.graph.input.extend(port(t.name, list(t.dims)) for t in model.graph.initializer)
    module = OnnxModule(model)
    assert list(module.input_ports) == ["input.1"]
    x = x_of(2, 8)
    named = mlp(opset=8)
    assert_same(run(module, input_1=x), ort(named, input_1=x))


def test_names_that_are_none_become_names_and_stay_apart() -> None:
    names = ["a.b", "a_b", "a/b", "1st", "…", "-", "x" * 200, "x" * 201]
    nodes = [helper.make_node("Sum", names, ["a.b.c"]), helper.make_node("Neg", ["a.b"], ["a-b"])]
    outputs = [port(name, [1]) for name in ("a.b.c", "a-b", "a.b")]
    module = OnnxModule(model_of(nodes, [port(name, [1]) for name in names], outputs))
    assert list(module.input_ports.values()) == [
        "a_b", "a_b_2", "a_b_3", "_1st", "value", "value_2", "x" * 128, "x" * 126 + "_2",
    ]  # fmt: skip
    assert list(module.output_ports.values()) == ["a_b_c", "a-b", "a_b_4"]
    feeds = {p: np.array([2.0**i], np.float32) for i, p in enumerate(module.input_ports.values())}
    got = run(module, **feeds)
    assert {k: float(v[0]) for k, v in got.items()} == {"a_b_c": 255.0, "a-b": -1.0, "a_b_4": 1.0}


def test_optional_inputs_and_outputs_may_be_left_out() -> None:
    w = Weights()
    nodes = [
        helper.make_node("Constant", [], ["six"], value_float=0.6),
        helper.make_node("Clip", ["x", "", "six"], ["clipped"]),
        helper.make_node("Dropout", ["clipped"], ["dropped", ""]),
        helper.make_node(
            "LSTM",
            ["dropped", w.random("w", 1, 8, 3), w.random("r", 1, 8, 2), "", "", "h0"],
            ["", "h"],
            hidden_size=2,
        ),
    ]
    inputs = [port("x", [4, 1, 3]), port("h0", [1, 1, 2])]
    model = model_of(nodes, inputs, [port("h", [1, 1, 2])], w.tensors)
    feeds = {"x": x_of(4, 1, 3), "h0": x_of(1, 1, 2)}
    assert_same(run(OnnxModule(model), **feeds), ort(model, **feeds))


def test_only_the_outputs_asked_for_and_what_they_need_are_kept() -> None:
    model = cnn()
    model.graph.output.append(port("pool", ["n", 4, 4, 4]))
    module = OnnxModule(model, outputs=["pool"])
    assert list(module.output_ports) == ["pool"]
    assert "Gemm" not in {n.op_type for n in module.build().functions[0].node}
    x = x_of(1, 1, 8, 8)
    assert_same(run(module, x=x), {"pool": ort(model, x=x)["pool"]})


def control_flow() -> onnx.ModelProto:
    """If inside of a Loop, both reading values, weights and each other's values from outside."""
    n = helper.make_node
    big = helper.make_graph([n("Mul", ["acc", "w"], ["t"])], "then", [], [port("t", None)])
    small = helper.make_graph(
        [n("Add", ["acc", "own"], ["t2"]), n("Sub", ["t2", "x"], ["e"])], "else", [],
        [port("e", None)], [numpy_helper.from_array(np.array([0.5], np.float32), "own")],
    )  # fmt: skip
    body = helper.make_graph(
        [
            n("ReduceSum", ["acc"], ["total"], keepdims=0),
            n("Greater", ["total", "limit"], ["is_big"]),
            n("If", ["is_big"], ["next"], then_branch=big, else_branch=small),
            n("Identity", ["go"], ["go_on"]),
        ],
        "body",
        [port("i", [], TensorProto.INT64), port("go", [], TensorProto.BOOL), port("acc", None)],
        [port("go_on", [], TensorProto.BOOL), port("next", None)],
    )
    w = [
        numpy_helper.from_array(np.array([0.25], np.float32), "w"),
        numpy_helper.from_array(np.array(4.0, np.float32), "limit"),
    ]
    nodes = [n("Abs", ["x0"], ["x"]), n("Loop", ["n", "", "x"], ["y"], body=body)]
    ins = [port("x0", [3]), port("n", [], TensorProto.INT64)]
    return model_of(nodes, ins, [port("y", None)], w)


def test_graphs_of_if_and_loop_keep_what_they_capture() -> None:
    model = control_flow()
    module = OnnxModule(model)
    for rounds in (0, 1, 4):
        feeds = {"x0": np.array([1, -2, 3], np.float32), "n": np.array(rounds, np.int64)}
        assert_same(run(module, **feeds), ort(model, **feeds))


def test_local_functions_are_inlined() -> None:
    n = helper.make_node
    square = helper.make_function(
        "my.own", "Square", ["a"], ["b"], [n("Mul", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 21)],
    )  # fmt: skip
    norm = helper.make_function(
        "my.own", "Scaled", ["a"], ["b"],
        [n("Square", ["a"], ["s"], domain="my.own"),
         onnx.parser.parse_node("b = LeakyRelu <alpha: float = @slope> (s)")],
        [helper.make_opsetid("", 21), helper.make_opsetid("my.own", 1)], ["slope"],
    )  # fmt: skip
    model = model_of(
        [n("Scaled", ["x"], ["y"], domain="my.own", slope=0.5)], [port("x", [3])],
        [port("y", [3])], my_own=1,
    )  # fmt: skip
    model.functions.extend([norm, square])
    x = np.array([1, -2, 3], np.float32)
    assert_same(run(OnnxModule(model), x=x), ort(model, x=x))


def test_weights_in_other_files_are_read_from_beside_the_model(tmp_path) -> None:
    path = tmp_path / "big.onnx"
    (tmp_path / "data").mkdir()
    onnx.save(mlp(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    module = OnnxModule(path)
    assert module.weight_bytes == OnnxModule(mlp()).weight_bytes
    x = x_of(2, 8)
    assert_same(run(module, input_1=x), ort(mlp(), input_1=x))


def test_what_is_recorded_of_a_model_names_no_file(tmp_path) -> None:
    model = mlp()
    # As tools leave it that read the weights in.
    model.graph.initializer[0].external_data.add(key="location", value="weights.bin")
    check_bounds(OnnxModule(model).build())


def test_an_op_that_draws_draws_in_every_call() -> None:
    nodes = [
        helper.make_node("RandomUniform", [], ["noise"], shape=[3]),
        helper.make_node("Add", ["x", "noise"], ["y"]),
    ]
    module = OnnxModule(model_of(nodes, [port("x", [3])], [port("y", [3])]))
    got = run(module, x=np.full(3, 5, np.float32))["y"]
    assert ((got >= 5) & (got < 6)).all()
    assert len(set(got.tolist())) == 3


def test_an_output_that_is_a_weight_comes_out_with_the_others() -> None:
    w = numpy_helper.from_array(np.array([1, 2], np.float32), "w")
    nodes = [
        helper.make_node("Neg", ["w"], ["minus"]),
        helper.make_node("Add", ["x", "minus"], ["y"]),
    ]
    outputs = [port("y", [2]), port("minus", [2]), port("w", [2])]
    model = model_of(nodes, [port("x", [2])], outputs, [w])
    x = np.array([5, 5], np.float32)
    assert_same(run(OnnxModule(model), x=x), ort(model, x=x))


@pytest.mark.parametrize("elem", [FLOAT, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.BOOL])
def test_ports_have_the_types_of_the_model(elem) -> None:
    model = model_of(
        [helper.make_node("Identity", ["x"], ["y"])], [port("x", [1], elem)], [port("y", [1], elem)]
    )
    function = OnnxModule(model).build().functions[0]
    known = protos.value_types(function)
    assert known["x"] is known["y"] is types.TENSOR_BY_ELEM[elem]


def linear_classifier() -> onnx.ModelProto:
    """As scikit-learn's exporter writes a LogisticRegression with zipmap."""
    n = helper.make_node
    nodes = [
        n("LinearClassifier", ["X"], ["label", "raw"], domain="ai.onnx.ml",
          coefficients=[0.5, -1.0, 2.0, 0.1, 0.2, 0.3], intercepts=[0.1, -0.2, 0.0],
          classlabels_ints=[0, 1, 2], multi_class=1, post_transform="SOFTMAX"),
        n("Normalizer", ["raw"], ["probabilities"], domain="ai.onnx.ml", norm="L1"),
        n("ZipMap", ["probabilities"], ["output_probability"], domain="ai.onnx.ml",
          classlabels_int64s=[0, 1, 2]),
    ]  # fmt: skip
    zipped = onnx.ValueInfoProto(name="output_probability")
    zipped.type.sequence_type.elem_type.map_type.key_type = TensorProto.INT64
    zipped.type.sequence_type.elem_type.map_type.value_type.tensor_type.elem_type = FLOAT
    return model_of(
        nodes, [port("X", [None, 2])],
        [port("label", [None], TensorProto.INT64), port("probabilities", [None, 3]), zipped],
        opset=15, ai_onnx_ml=1,
    )  # fmt: skip


def test_classical_models_are_recorded_with_their_own_domain() -> None:
    module = OnnxModule(linear_classifier(), outputs=["label", "probabilities"])
    function = module.build().functions[0]
    assert [n.op_type for n in function.node if n.domain == "ai.onnx.ml"] == [
        "LinearClassifier", "Normalizer",
    ]  # fmt: skip
    assert {(o.domain, o.version) for o in function.opset_import} >= {("ai.onnx.ml", 4)}
    made = compiled(module)
    (graph,) = [f for f in made.functions if f.domain == keys.BACKEND_SUBGRAPH_DOMAIN]
    assert {(o.domain, o.version) for o in graph.opset_import} == {("ai.onnx.ml", 4)}
