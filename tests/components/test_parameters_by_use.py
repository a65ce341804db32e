"""What of a plain exporter's file is trained: by its use, told where it is not to be seen."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.components.autodiff import InvalidForwardModel
from bbnode.components.autodiff.forward import read_forward
from bbnode.components.models.onnx_model import OnnxModel, OnnxModelConfig
from bbnode.dsl.errors import BadArgument
from bbnode.programs import FederatedTraining
from tests.components.fakes import CTX
from tests.components.slopes import forward_of, model_with

RNG = np.random.default_rng(0)
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
X = [("x", ["b", 4])]
Y = [("y", ["b", 4])]
EVEN = 1e4 ** -(np.arange(0, 8, 2) / 8)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


def choice_of(nodes, tensors, *patterns: str, inputs=X, outputs=Y, kinds=None):
    model = forward_of(nodes, inputs, outputs, tensors)
    for name, kind in (kinds or {}).items():
        model.graph.value_info.add(name=name).metadata_props.add(key=KIND, value=kind)
    return read_forward(model, patterns or None).choice


GEMM = node("Gemm", ["x", "w", "b"], ["h"])
LAYER = {"w": normal(4, 4), "b": normal(4)}


@pytest.mark.parametrize("one", [np.asarray(1.0), np.asarray([1.0])])
def test_the_one_of_one_plus_logvar_is_left_and_told_of(one) -> None:
    choice = choice_of([GEMM, node("Add", ["one", "h"], ["y"])], {**LAYER, "one": one})
    assert choice.trained == ("w", "b")
    assert choice.left == {"one": "a single number"}
    assert choice.warned() == (
        "single numbers are not trained; name in `trainable` those that are parameters: one",
    )
    named = choice_of([GEMM, node("Add", ["one", "h"], ["y"])], {**LAYER, "one": one}, "*", "one")
    assert (named.trained, named.warned()) == (("w", "b", "one"), ())


def test_the_bias_of_one_output_is_of_a_layer_without_one() -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "one"], ["y"])]
    one = {"one": np.asarray([0.5])}
    assert choice_of(nodes, {"w": normal(4, 1), **one}).trained == ("w", "one")
    assert choice_of(nodes, {"w": normal(4, 3), **one}).trained == ("w",)
    assert choice_of(nodes, {"w": normal(4, 1), "one": np.asarray(0.5)}).trained == ("w",)


def positions(product: str, *functions: str) -> list:
    """Nodes that turn positions [t] into sines and cosines, and add these to x [b, t, 4]."""
    return [
        node("Shape", ["x"], ["t"], start=1, end=2),
        node("Squeeze", ["t"], ["n"]),
        node("Range", ["zero", "n", "one"], ["at"]),
        node("Cast", ["at"], ["p"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["p", "last"], ["column"]),
        node(product, ["column", "f"], ["angle"]),
        *(node(each, ["angle"], [each]) for each in functions),
        node("Concat", [*functions, *functions][:2], ["table"], axis=-1),
        node("Add", ["x", "table"], ["s"]),
        node("MatMul", ["s", "w"], ["y"]),
    ]


TIMES = {"zero": np.asarray(0), "one": np.asarray(1), "last": np.asarray([1])}
TIMED = {"inputs": [("x", ["b", "t", 8])], "outputs": [("y", ["b", "t", 2])]}


@pytest.mark.parametrize("values", [EVEN, normal(4)])
@pytest.mark.parametrize("product", ["Mul", "MatMul"])
@pytest.mark.parametrize("functions", [("Sin", "Cos"), ("Sin",)])
def test_frequencies_of_positions_are_left(values, product: str, functions) -> None:
    held = values.reshape(1, 4)
    tensors = {**TIMES, "f": held, "w": normal(8, 2)}
    choice = choice_of(positions(product, *functions), tensors, **TIMED)
    assert choice.trained == ("w",)
    assert "frequencies of sines or cosines" in choice.left["f"]


@pytest.mark.parametrize(
    ("function", "becomes"), [("Sin", "trained"), ("Cos", "undecided"), ("Tanh", "trained")]
)
def test_frequencies_of_the_input_may_be_learned(function: str, becomes: str) -> None:
    nodes = [node("MatMul", ["x", "f"], ["a"]), node(function, ["a"], ["c"]),
             node("MatMul", ["c", "w"], ["y"])]  # fmt: skip
    choice = choice_of(nodes, {"f": normal(4, 8), "w": normal(8, 4)})
    assert ("f" in choice.trained) == (becomes == "trained")
    assert ("f" in choice.undecided) == (becomes == "undecided")
    # Of values that weights made, it is a layer like others.
    deep = [node("MatMul", ["x", "v"], ["x2"]), node("MatMul", ["x2", "f"], ["a"]), *nodes[1:]]
    deeper = choice_of(deep, {"v": normal(4, 4), "f": normal(4, 8), "w": normal(8, 4)})
    assert deeper.trained == ("v", "f", "w")


def test_tables_that_are_looked_up_and_caches_of_rotary_embeddings_are_left() -> None:
    angles = np.outer(np.arange(16), EVEN)
    nodes = [node("Gather", ["sines", "ids"], ["a"]), node("Gather", ["e", "ids"], ["c"]),
             node("Add", ["a", "c"], ["y"])]  # fmt: skip
    ids = [("ids", ["b", 3], TensorProto.INT64)]
    tensors = {"sines": np.hstack([np.sin(angles), np.cos(angles)]), "e": normal(16, 8)}
    choice = choice_of(nodes, tensors, inputs=ids, outputs=[("y", ["b", 3, 8])])
    assert (choice.trained, choice.left) == (("e",), {"sines": "a table of sinusoids"})
    rotary = [node("RotaryEmbedding", ["x", "c", "s", "ids"], ["r"]),
              node("MatMul", ["r", "w"], ["y"])]  # fmt: skip
    made = forward_of(
        rotary, [("x", ["b", 2, 3, 8]), *ids], [("y", ["b", 2, 3, 8])],
        {"c": normal(16, 4), "s": normal(16, 4), "w": normal(8, 8)}, opset=23,
    )  # fmt: skip
    assert read_forward(made).choice.trained == ("w",)


def slopes(values, *patterns: str):
    """A table that is added to scores [b, 4, 4], behind a layer with a bias of its own."""
    nodes = [GEMM, node("Mul", ["h", "m"], ["y"])]
    return choice_of(nodes, {**LAYER, "m": values}, *patterns)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (2.0 ** -np.arange(1, 5), "evenly spaced"),  # slopes of ALiBi, which stay
        (np.arange(1.0, 5.0), "evenly spaced"),  # a state space model's A before any training
        (np.full(4, 1e-5), "the same"),  # a layer's scale before any training, or a constant
    ],
)
def test_a_coin_toss_is_refused_with_the_setting_that_decides(values, says: str) -> None:
    choice = slopes(values)
    assert choice.trained == ("w", "b")
    assert says in choice.undecided["m"]
    with pytest.raises(InvalidForwardModel) as caught:
        choice.check_decided()
    assert "'m' may be a weight or a constant" in str(caught.value)
    assert "`trainable`=('*', 'm') trains it" in str(caught.value)
    assert "`trainable`=('!m',) leaves it" in str(caught.value)
    for patterns, trained in (
        (("*", "m"), ("w", "b", "m")),
        (("!m",), ("w", "b")),
        (("w", "b"), ("w", "b")),
        (("*", "!m"), ("w", "b")),
    ):
        decided = slopes(values, *patterns)
        assert (decided.trained, decided.undecided) == (trained, {})
    for patterns in (("*",), ("!b",)):
        assert "m" in slopes(values, *patterns).undecided


def test_weights_that_are_trained_or_neutral_are_no_coin_toss() -> None:
    for values in (normal(4), np.ones(4)):
        assert slopes(values).trained == ("w", "b", "m")
    only = choice_of([node("Mul", ["x", "m"], ["y"])], {"m": np.full(4, 2.0)})
    assert (only.trained, only.why["m"]) == (("m",), "there is nothing else to train")


def test_what_an_exporter_computed_and_says_nothing_of() -> None:
    kinds = {"w": "PARAMETER", "b": "PARAMETER"}
    folded = choice_of([GEMM, node("MatMul", ["h", "val_1"], ["y"])],
                       {**LAYER, "val_1": normal(4, 4)}, kinds=kinds)  # fmt: skip
    assert folded.why["val_1"] == "a weight of MatMul that the exporter computed"
    nodes = [GEMM, node("Add", ["h", "slice_1"], ["y"])]
    choice = choice_of(nodes, {**LAYER, "slice_1": normal(4)}, kinds=kinds)
    assert "of a parameter or of a buffer" in choice.undecided["slice_1"]
    # Behind a normalization, and as the bias of a product without one, it can be nothing else.
    normed = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Add", ["h", "b2"], ["i"]),
        node("InstanceNormalization", ["i3", "ones", "zeros"], ["n3"]),
        node("Reshape", ["n3", "flat"], ["n"]),
        node("Mul", ["n", "gain"], ["g"]),
        node("Add", ["g", "shift"], ["y"]),
    ]
    normed.insert(2, node("Reshape", ["i", "groups"], ["i3"]))
    tensors = {"w": normal(4, 4), "b2": normal(4), "ones": np.ones(2), "zeros": np.zeros(2),
               "gain": normal(4), "shift": normal(4), "groups": np.asarray([-1, 2, 2]),
               "flat": np.asarray([-1, 4])}  # fmt: skip
    chosen = choice_of(normed, tensors, kinds={"w": "PARAMETER"})
    assert (chosen.trained, chosen.undecided) == (("w", "b2", "gain", "shift"), {})


def test_equal_layer_norms_that_are_one_tensor_are_warned_of() -> None:
    nodes = [
        GEMM,
        node("LayerNormalization", ["h", "s", "t"], ["n1"]),
        node("Gemm", ["n1", "v", "b"], ["h2"]),
        node("LayerNormalization", ["h2", "s", "t"], ["y"]),
    ]
    tensors = {**LAYER, "v": normal(4, 4), "s": np.ones(4), "t": np.zeros(4)}
    (line,) = choice_of(nodes, tensors).warned()
    assert "one tensor in several layers is trained as one" in line
    assert line.endswith("bbnode.torch.export: s, t")
    trained = {**tensors, "s": normal(4), "t": normal(4)}
    assert choice_of(nodes, trained).warned() == ()


@pytest.mark.parametrize("held", [np.full((4, 4), np.nan), np.where(np.eye(4) > 0, np.inf, 1)])
def test_a_weight_of_nan_is_refused_by_its_name(held) -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "b"], ["y"])]
    tensors = {"w": held, "b": normal(4)}
    with pytest.raises(InvalidForwardModel, match="weight 'w' holds NaN or infinity"):
        choice_of(nodes, tensors).check_decided()
    with pytest.raises(InvalidForwardModel, match="weight 'w' holds NaN or infinity"):
        choice_of([*nodes[:1], node("Identity", ["h"], ["y"])], {"w": held})
    assert choice_of(nodes, tensors, "!w").trained == ("b",)


def logvar(**more) -> bytes:
    nodes = [GEMM, node("Mul", ["h", "m"], ["y"])]
    return forward_of(nodes, X, Y, {**LAYER, "m": np.full(4, 0.5), **more}).SerializeToString()


def test_a_program_that_trains_is_refused_where_it_is_written() -> None:
    with pytest.raises(BadArgument, match=r"model can't be trained.*'m' may be a weight or a con"):
        FederatedTraining(model=logvar(), clients=1, loss="mse").build()
    assert FederatedTraining(model=logvar(), clients=1, loss="mse", trainable=("!m",)).size == 20
    held = OnnxModel(OnnxModelConfig(model=logvar(), loss="mse"))
    with pytest.raises(InvalidForwardModel, match="may be a weight"):
        held.check_trains()


def test_an_undecided_model_runs_and_does_not_train() -> None:
    model = model_with(forward_of([GEMM, node("Mul", ["h", "m"], ["y"])], X, Y,
                                  {**LAYER, "m": np.full(4, 0.5)}))  # fmt: skip
    x = np.ones((2, 4), np.float32)
    out = np.asarray(model.forward(CTX, x))
    np.testing.assert_allclose(out, (x @ LAYER["w"] + LAYER["b"]) / 2, rtol=1e-5)
    for call in (
        lambda: model.gradient(CTX, x, out),
        lambda: model.backward(CTX, out),
        lambda: model.gradient_with_input(CTX, x, out),
    ):
        with pytest.raises(InvalidForwardModel, match="'m' may be a weight or a constant"):
            call()


def test_trained_values_do_not_change_the_choice() -> None:
    """A gain of ones is a weight; with other values it might be a constant."""
    nodes = [GEMM, node("Mul", ["h", "m"], ["y"])]
    model = model_with(forward_of(nodes, X, Y, {**LAYER, "m": np.ones(4)}))
    assert model.trained == ("w", "b", "m")
    even = np.concatenate([normal(20), np.arange(1.0, 5.0)]).astype(np.float32)
    model.load_parameters(CTX, even)
    twin = model.twin()
    twin.check_trains()
    assert twin.trained == ("w", "b", "m")
    config = OnnxModelConfig(
        model=forward_of(nodes, X, Y, {**LAYER, "m": np.ones(4)}).SerializeToString(), loss="mse"
    )
    made, told = OnnxModel.initialized(config, {"m": np.arange(1, 5, dtype=np.float32)})
    assert told.taken == ("m",)
    assert OnnxModel(made).trained == ("w", "b", "m")


def test_warnings_are_logged_once_for_a_model_that_trains(caplog) -> None:
    nodes = [GEMM, node("Mul", ["h", "scale"], ["y"])]
    config = OnnxModelConfig(
        model=forward_of(nodes, X, Y, {**LAYER, "scale": np.asarray(0.5)}).SerializeToString(),
        loss="mse", mode="train",
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="bbnode"):
        OnnxModel(config)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].endswith("those that are parameters: scale")
    assert 'mode="train" found no BatchNormalization and no Dropout' in lines[1]
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="bbnode"):
        OnnxModel(replace(config, mode="as_written", trainable=("*", "!scale")))
    assert not caplog.records


def test_the_list_of_parameters_says_why() -> None:
    nodes = [GEMM, node("Mul", ["h", "scale"], ["g"]), node("Mul", ["g", "m"], ["y"])]
    tensors = {**LAYER, "scale": np.asarray(0.5), "m": 2.0 ** -np.arange(1, 5)}
    config = OnnxModelConfig(model=forward_of(nodes, X, Y, tensors).SerializeToString(), loss="mse")
    listed = OnnxModel.parameters_listed(config)
    rows = {row.name: (row.shape, row.trained, row.why) for row in listed.parameters}
    assert rows["w"] == ((4, 4), True, "a weight of Gemm")
    assert rows["scale"] == ((), False, "a single number")
    assert rows["m"][:2] == ((4,), False)
    assert rows["m"][2].startswith("undecided: its numbers are evenly spaced")
    assert len(listed.warnings) == 1
    named = OnnxModel.parameters_listed(replace(config, trainable=("w", "m")))
    rows = {row.name: (row.trained, row.why) for row in named.parameters}
    assert rows["m"] == (True, "`trainable` names it")
    assert rows["b"] == (False, "`trainable` leaves it out")


def test_scales_of_quantized_weights_and_caches_of_the_runtime_are_left() -> None:
    made = helper.make_model(
        helper.make_graph(
            [node("MatMulNBits", ["x", "q", "s"], ["h"], domain="com.microsoft", K=32, N=4, bits=4,
                  block_size=32),
             node("MatMul", ["h", "w"], ["y"])],
            "g", [helper.make_tensor_value_info("x", 1, ["b", 32])],
            [helper.make_tensor_value_info("y", 1, ["b", 2])],
            [numpy_helper.from_array(np.zeros((4, 1, 16), np.uint8), "q"),
             numpy_helper.from_array(np.ones(4, np.float32), "s"),
             numpy_helper.from_array(normal(4, 2).astype(np.float32), "w")],
        ),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )  # fmt: skip
    choice = read_forward(made).choice
    assert (choice.trained, choice.left) == (("w",), {"s": "the scale of a quantized weight"})
