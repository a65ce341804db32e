"""Which initializers are trained: weights, and not masks, tables, statistics or other constants."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper
from onnx.helper import make_node as node

from bbnode.components.autodiff.errors import InvalidForwardModel
from bbnode.components.autodiff.parameters import choose_parameters
from tests.components.graphs import model_of

RNG = np.random.default_rng(0)
POSITIONS = np.arange(16)[:, np.newaxis]
TURNS = 100.0 ** (-np.arange(4) / 4)
X = np.ones((2, 16, 4))


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


def chosen(nodes, tensors, *patterns: str, x=X):
    return choose_parameters(model_of(nodes, tensors, inputs={"x": x}), patterns)


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (np.triu(np.full((4, 4), -np.inf), 1), "not finite"),
        (np.triu(np.full((4, 4), -1e9), 1), "a mask"),
        (np.triu(np.full((4, 4), np.finfo(np.float32).min), 1), "a mask"),
        (np.where(np.eye(4) > 0, 0.0, -100.0), "a mask"),
        (np.tril(np.ones((4, 4))), "a mask"),
        (np.sin(POSITIONS * TURNS), "a table of sinusoids"),
        (np.cos(POSITIONS * TURNS), "a table of sinusoids"),
        (np.stack([np.cos(POSITIONS * TURNS)] * 2), "a table of sinusoids"),
        (np.asarray(0.125), "a single number"),
        (np.asarray([8.0]), "a single number"),
        (normal(16, 4), None),  # a position embedding that is learned
        (np.zeros((16, 4)), None),  # such ones begin like this
        (np.ones(4), None),
        (np.eye(4) - 2, None),
    ],
)
def test_what_is_added_to_a_score_is_trained_if_it_is_a_weight(held, why) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Reshape", ["h", "shape"], ["s"]),
        node("Add", ["s", "held"], ["t"]),
        node("Softmax", ["t"], ["y"]),
    ]
    shape = np.asarray([-1, *held.shape[-2:]] if held.ndim > 1 else [-1, 4, 4])
    choice = chosen(nodes, {"w": normal(4, 4), "held": held, "shape": shape})
    assert choice.trained == (("w",) if why else ("w", "held"))
    assert why is None or why in choice.left["held"]


def test_the_bias_of_one_output_is_trained_and_a_scale_is_not() -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Add", ["h", "b"], ["z"]),
        node("Mul", ["z", "scale"], ["y"]),
    ]
    tensors = {"w": normal(4, 1), "b": np.zeros(1), "scale": np.asarray([0.5])}
    assert chosen(nodes, tensors).trained == ("w", "b")
    assert chosen(nodes, tensors, "w", "scale").trained == ("w", "scale")
    alone = [node("Mul", ["x", "scale"], ["y"])]
    assert chosen(alone, {"scale": np.asarray(0.5)}).trained == ("scale",)


def test_the_mean_and_deviation_of_an_input_stay() -> None:
    nodes = [
        node("Sub", ["x", "mean"], ["a"]),
        node("Mul", ["a", "inverse"], ["b"]),
        node("Mul", ["b", "gain"], ["c"]),
        node("MatMul", ["c", "w"], ["h"]),
        node("Sub", ["h", "shift"], ["y"]),
    ]
    tensors = {"mean": normal(4), "inverse": normal(4), "gain": normal(4), "w": normal(4, 4),
               "shift": normal(4)}  # fmt: skip
    choice = chosen(nodes, tensors)
    assert choice.trained == ("gain", "w", "shift")
    assert set(choice.left.values()) == {"it normalizes the input"}
    assert "3 of 5 float tensors trained; left are it normalizes the input: mean" in choice.told()


def test_what_no_gradient_reaches_stays() -> None:
    nodes = [
        node("Greater", ["x", "limit"], ["big"]),
        node("Where", ["big", "x", "other"], ["a"]),
        node("BatchNormalization", ["a", "s", "t", "mean", "var"], ["y"]),
    ]
    tensors = {"limit": normal(4), "other": normal(4), "s": np.ones(4), "t": np.zeros(4),
               "mean": np.zeros(4), "var": np.ones(4)}  # fmt: skip
    choice = chosen(nodes, tensors, x=np.ones((3, 4)))
    assert choice.trained == ("other", "s", "t")
    assert choice.left == {
        "limit": "no gradient reaches it",
        "mean": "running statistics",
        "var": "running statistics",
    }


def test_a_weight_behind_an_op_without_a_rule_is_not_left_without_a_word() -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Det", ["h"], ["y"])]
    assert chosen(nodes, {"w": normal(4, 4)}, x=np.ones((2, 4, 4))).trained == ("w",)


def test_the_exporter_has_the_first_word() -> None:
    model = model_of(
        [node("Mul", ["x", "gate"], ["a"]), node("Add", ["a", "mean"], ["y"])],
        {"gate": np.asarray([1.0]), "mean": normal(4)}, inputs={"x": X},
    )  # fmt: skip
    hints = {"gate": "PARAMETER", "mean": "BUFFER"}
    choice = choose_parameters(model, hints=hints)
    assert (choice.trained, choice.left) == (
        ("gate",),
        {"mean": "the exporter says that it is a buffer"},
    )
    for info in model.graph.initializer:
        kept = model.graph.value_info.add(name=info.name)
        kept.metadata_props.add(
            key="pkg.torch.export.graph_signature.InputSpec.kind", value=hints[info.name]
        )
    assert choose_parameters(model) == choice


LAYERS = [
    node("MatMul", ["x", "enc.w"], ["a"]),
    node("Add", ["a", "enc.b"], ["b"]),
    node("MatMul", ["b", "head.w"], ["c"]),
    node("Add", ["c", "head.b"], ["d"]),
    node("Mul", ["d", "scale"], ["y"]),
]
TENSORS = {
    "head.w": normal(4, 4), "head.b": normal(4), "enc.w": normal(4, 4), "enc.b": normal(4),
    "scale": np.asarray(2.0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        ((), ("head.w", "head.b", "enc.w", "enc.b")),
        (("*",), ("head.w", "head.b", "enc.w", "enc.b")),
        (("head.*",), ("head.w", "head.b")),
        (("*.b", "enc.w"), ("head.b", "enc.w", "enc.b")),
        (("!enc.*",), ("head.w", "head.b")),
        (("*", "!*.w", "head.w"), ("head.w", "head.b", "enc.b")),
        (("enc.?", "scale"), ("enc.w", "enc.b", "scale")),
    ],
)
def test_patterns_add_and_take_away_in_their_order(patterns, trained) -> None:
    assert chosen(LAYERS, TENSORS, *patterns).trained == trained


@pytest.mark.parametrize(
    ("patterns", "problem"),
    [
        (("haed.w",), r"no initializer 'haed.w' to train; did you mean 'head.w'"),
        (("decoder.*",), r"no initializer fits the pattern 'decoder.\*' of `trainable`; choose"),
        (("head.*", "!heads.*"), r"no initializer fits the pattern 'heads.\*'"),
        (("s*",), r"'s\*' fits, nothing is trained by default \('scale': a single number\)"),
        (("!*",), r"`trainable` \(!\*\) leaves nothing to train; take less away"),
    ],
)
def test_a_pattern_that_does_nothing_is_refused(patterns, problem: str) -> None:
    with pytest.raises(InvalidForwardModel, match=problem):
        chosen(LAYERS, TENSORS, *patterns)


def test_a_name_of_what_cannot_be_trained_is_refused() -> None:
    nodes = [node("Add", ["x", "m"], ["a"]), node("Mul", ["a", "w"], ["y"])]
    tensors = {"m": np.full(4, np.nan), "w": normal(4)}
    with pytest.raises(InvalidForwardModel, match="'m' holds NaN or infinity; leave it out"):
        chosen(nodes, tensors, "m", "w")
    half = [node("Cast", ["w"], ["v"], to=1), node("Mul", ["x", "v"], ["y"])]
    model = model_of(half, {"w": normal(4)}, inputs={"x": X}, dtype=np.float32)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones(4, np.float16), "w"))
    with pytest.raises(InvalidForwardModel, match="'w' is FLOAT16; weights are trained in float32"):
        choose_parameters(model)
