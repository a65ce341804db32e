"""Splits: every stage on a node of its own gives what the whole model gives."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from bbnode.dsl import Graph, Module, OnnxModule, types
from bbnode.dsl.errors import BadCut, TooManyStages, UnknownValue
from bbnode.ir import keys
from tests import protos
from tests.dsl.onnx_models import (
    Weights,
    assert_same,
    cnn,
    compiled,
    mlp,
    model_of,
    ort,
    port,
    run,
    run_compiled,
    transformer,
    x_of,
)

MODELS = {
    "mlp": (mlp((8, 16, 16, 16, 4)), {"input_1": x_of(5, 8)}),
    "cnn": (cnn(), {"x": x_of(2, 1, 8, 8)}),
    "transformer": (transformer(), {"x": x_of(2, 5, 8)}),
}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_split_model_gives_what_onnx_runtime_gives(name, stages) -> None:
    model, feeds = MODELS[name]
    pipeline = OnnxModule(model).split(stages=stages)
    assert pipeline.classes == tuple(f"stage{i}" for i in range(stages))
    assert_same(run(pipeline, **feeds), ort(model, **feeds))


def test_stages_have_about_equal_weights_and_the_fewest_values_cross() -> None:
    pipeline = OnnxModule(mlp((8, 16, 16, 16, 16, 4))).split(stages=3)
    weights = [4 * (8 * 16 + 16), *[4 * (16 * 16 + 16)] * 3, 4 * (16 * 4 + 4)]
    assert [stage.weight_bytes for stage in pipeline.stages] == [
        weights[0] + weights[1], weights[2], weights[3] + weights[4],
    ]  # fmt: skip
    # Each activation stays with its layer, and only its result travels.
    assert pipeline.crossing == (
        ("input.1",), ("/act1/Relu_output_0",), ("/act2/Relu_output_0",), ("probs",),
    )  # fmt: skip
    # Between attention and the feed-forward net there is one value, within them there are more.
    assert OnnxModule(transformer()).split(stages=2).crossing[1] in (("res1",), ("res1", "ln2"))


def test_a_weight_is_only_on_the_stages_that_read_it() -> None:
    made = compiled(OnnxModule(mlp()).split(stages=3), "stage0", "stage1", "stage2")
    sizes = {f.name: f.ByteSize() for f in made.functions}
    for main in made.functions:
        home = protos.get_meta(main, keys.HOME_KEY)
        if protos.get_meta(main, keys.TARGET_KEY):
            calls = [n for n in main.node if n.domain == keys.BACKEND_SUBGRAPH_DOMAIN]
            assert len(calls) == (home != "@self")
            assert "Constant" not in {n.op_type for n in main.node}
            assert not calls or sizes[calls[0].op_type] > 4 * 64


def skipping() -> onnx.ModelProto:
    """y is ready early, x and the skip value are needed late, w is read by two stages."""
    w = Weights()
    n = helper.make_node
    nodes = [
        n("MatMul", ["x", w.random("w", 4, 4)], ["a"]),
        n("Tanh", ["a"], ["early"]),
        n("MatMul", ["a", w.random("v", 4, 4)], ["b"]),
        n("Sigmoid", ["b"], ["c"]),
        n("MatMul", ["c", "w"], ["d"]),
        n("Sum", ["d", "x", "a", "z"], ["late"]),
    ]
    inputs = [port("x", [3, 4]), port("z", [3, 4])]
    return model_of(nodes, inputs, [port("early", [3, 4]), port("late", [3, 4])], w.tensors)


def test_exactly_what_later_stages_need_crosses_a_cut() -> None:
    model = skipping()
    pipeline = OnnxModule(model).split(at=["early", "c"])
    assert pipeline.crossing == (
        ("x", "z"), ("x", "z", "a", "early"), ("x", "z", "a", "early", "c"), ("early", "late"),
    )  # fmt: skip
    assert [tuple(stage.input_ports) for stage in pipeline.stages] == [
        ("x",), ("a",), ("x", "z", "a", "c"),
    ]  # fmt: skip
    feeds = {"x": x_of(3, 4), "z": x_of(3, 4, seed=8)}
    assert_same(run(pipeline, **feeds), ort(model, **feeds))


def test_a_cut_may_be_at_several_values_together() -> None:
    model = skipping()
    pipeline = OnnxModule(model).split(at=[["early", "b"]])
    assert pipeline.crossing[1] == ("x", "z", "a", "early", "b")
    feeds = {"x": x_of(3, 4), "z": x_of(3, 4, seed=8)}
    assert_same(run(pipeline, **feeds), ort(model, **feeds))


def test_the_transformer_at_named_values() -> None:
    model, feeds = MODELS["transformer"]
    pipeline = OnnxModule(model, name="block").split(at=["context", "res1"])
    assert pipeline.crossing[2] == ("res1",)
    assert_same(run(pipeline, **feeds), ort(model, **feeds))


def test_classes_home_and_name_are_the_users() -> None:
    model, feeds = MODELS["mlp"]
    pipeline = OnnxModule(model, name="digits").split(
        stages=3, classes=["gpu", "cpu", "gpu"], home="client", name="Ring"
    )
    made = compiled(pipeline, "gpu", "cpu")
    homes = [protos.get_meta(f, keys.HOME_KEY) for f in made.functions]
    assert [h for h in homes if h] == ["client", "cpu", "gpu"] or set(filter(None, homes)) == {
        "client", "cpu", "gpu",
    }  # fmt: skip
    assert made.graph.name == "Ring"
    assert_same(run_compiled(made, "client", **feeds), ort(model, **feeds))


def test_the_result_goes_to_the_class_that_asked() -> None:
    """A pipeline that is called where a value lives comes back there, whatever the home."""
    model, feeds = MODELS["mlp"]
    inner = OnnxModule(model).split(stages=2)

    class Outer(Module):
        name = "Outer"
        home = "edge"

        def body(self, g: Graph) -> None:
            x = g.input("x", types.TENSOR_FLOAT)
            made = inner.call().input("input_1", x).build(g)
            g.output("probs", made.output("probs"))

    made = compiled(Outer(), "stage0", "stage1")
    homes = {protos.get_meta(f, keys.HOME_KEY) for f in made.functions}
    assert homes >= {"edge", "stage0", "stage1"}
    assert "@self" not in homes
    assert_same(run_compiled(made, "edge", x=feeds["input_1"]), ort(model, **feeds))


def test_stages_are_modules_of_their_own() -> None:
    model, feeds = MODELS["cnn"]
    first, second = OnnxModule(model, name="cnn").split(stages=2).stages
    assert (first.name, second.name) == ("cnn_stage0", "cnn_stage1")
    middle = run(first, **feeds)
    ports = {first.output_ports[n]: p for n, p in second.input_ports.items()}
    got = run(second, **{ports[port]: value for port, value in middle.items()})
    assert_same(got, ort(model, **feeds))


def test_a_stage_that_draws_draws_on_its_own_peer() -> None:
    n = helper.make_node
    nodes = [
        n("Neg", ["x"], ["a"]),
        n("RandomUniform", [], ["noise"], shape=[3]),
        n("Add", ["a", "noise"], ["y"]),
    ]
    model = model_of(nodes, [port("x", [3])], [port("y", [3])])
    got = run(OnnxModule(model).split(at=["a"]), x=np.full(3, 5, np.float32))["y"]
    assert ((got >= -5) & (got < -4)).all()


def test_outputs_made_of_weights_alone_come_with_the_result() -> None:
    w = numpy_helper.from_array(np.array([1, 2, 3], np.float32), "w")
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("Exp", ["w"], ["table"]),
        helper.make_node("Add", ["a", "w"], ["y"]),
    ]
    model = model_of(nodes, [port("x", [3])], [port("y", [3]), port("table", [3])], [w])
    x = x_of(3)
    assert_same(run(OnnxModule(model).split(at=["a"]), x=x), ort(model, x=x))


def test_what_cannot_be_cut_is_told_with_its_mend() -> None:
    module = OnnxModule(mlp(), name="digits")
    with pytest.raises(TooManyStages, match=r"5 places.* 6 stages, not 7; ask for fewer"):
        module.split(stages=7)
    assert len(module.split(stages=6).stages) == 6
    with pytest.raises(UnknownValue, match="no value 'prob'; did you mean 'probs'") as error:
        module.split(at=["prob"])
    assert error.value.module == "digits"
    assert error.value.source.startswith("test_onnx_split.py:")
    with pytest.raises(BadCut, match="no op is left behind the last cut, 'probs'"):
        module.split(at=["probs"])
    with pytest.raises(BadCut, match="it is an input or a weight"):
        module.split(at=["input.1"])
    with pytest.raises(BadCut, match="in the order in which the model computes them"):
        module.split(at=["/fc1/Gemm_output_0", "/fc0/Gemm_output_0"])
    for stages in (0, -1, 65, True, 2.0, "3"):
        with pytest.raises(BadCut, match="has to be a number from 1 to 64"):
            module.split(stages=stages)
    for at in ((), "probs", {"probs"}):
        with pytest.raises(BadCut, match="has to be a list of names"):
            module.split(at=at)


def test_values_that_cannot_travel_are_not_cut() -> None:
    n = helper.make_node
    nodes = [
        n("Neg", ["x"], ["a"]),
        n("Cast", ["a"], ["many"], to=TensorProto.FLOAT8E8M0),
        n("Cast", ["many"], ["one"], to=TensorProto.FLOAT),
        n("Abs", ["one"], ["y"]),
    ]
    model = model_of(nodes, [port("x", [3])], [port("y", [3])])
    module = OnnxModule(model)
    with pytest.raises(BadCut, match="'many' crosses the cut at 'many'"):
        module.split(at=["many"])
    with pytest.raises(TooManyStages, match="has 2 places"):
        module.split(stages=4)
    x = x_of(3)
    assert_same(run(module.split(stages=3), x=x), ort(model, x=x))


def test_sequences_travel_across_a_cut() -> None:
    n = helper.make_node
    nodes = [
        n("SequenceConstruct", ["x", "x"], ["many"]),
        n("ConcatFromSequence", ["many"], ["y"], axis=0),
    ]
    model = model_of(nodes, [port("x", [3])], [port("y", [6])])
    x = x_of(3)
    assert_same(run(OnnxModule(model).split(at=["many"]), x=x), ort(model, x=x))


@st.composite
def dags(draw: st.DrawFn) -> tuple[onnx.ModelProto, int]:
    """Random graphs of elementwise ops with weights, several inputs and outputs."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    values = [f"in{i}" for i in range(draw(st.integers(1, 3)))]
    inputs = [port(name, [4]) for name in values]
    nodes, weights = [], []
    for i in range(draw(st.integers(1, 12))):
        op = draw(st.sampled_from(["Add", "Mul", "Tanh", "Neg", "Sum", "Weighted"]))
        read = [
            draw(st.sampled_from(values)) for _ in range({"Sum": 3, "Add": 2, "Mul": 2}.get(op, 1))
        ]
        if op == "Weighted":
            op = "Mul"
            read.append(f"w{i}")
            size = draw(st.sampled_from([1, 4]))
            weights.append(
                numpy_helper.from_array(rng.normal(size=size).astype(np.float32), f"w{i}")
            )
        nodes.append(helper.make_node(op, read, [f"v{i}"]))
        values.append(f"v{i}")
    made = [v for v in values if v.startswith("v")]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    model = model_of(nodes, inputs, [port(name, [4]) for name in outputs], weights)
    return model, draw(st.integers(1, 5))


@given(dags())
@settings(max_examples=40)
def test_any_graph_in_any_number_of_stages_means_the_same(case) -> None:
    model, stages = case
    module = OnnxModule(model)
    try:
        pipeline = module.split(stages=stages)
    except TooManyStages:
        return
    assert len(pipeline.stages) == stages
    for index, stage in enumerate(pipeline.stages):
        assert set(stage.input_ports) <= set(pipeline.crossing[index])
        later = {n for other in pipeline.stages[index:] for n in other.input_ports}
        # Nothing travels that nobody behind the cut needs.
        assert set(pipeline.crossing[index]) <= later | set(pipeline.output_ports)
    feeds = {name: x_of(4, seed=i) for i, name in enumerate(module.input_ports)}
    assert_same(run(pipeline, **feeds), ort(model, **feeds))
