"""A model's weights taken out, put in, and carried over to another version of it."""

from __future__ import annotations

import re
from dataclasses import replace

import msgpack
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from bbnode.components import errors
from bbnode.components.autodiff import InvalidForwardModel
from bbnode.components.contracts import Component, ComponentError, Model
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import OnnxModel, OnnxModelConfig
from bbnode.components.models.weights import SavedState, pack_state, unpack_state
from bbnode.ir import codec
from bbnode.ir.errors import DecodeError
from bbnode.ir.values import Composite
from tests.components.fakes import CTX, onnx_model

MLP = mlp_forward((4, 5, 3), seed=1)
CONFIG = OnnxModelConfig(model=MLP.SerializeToString())
NAMES = tuple(tensor.name for tensor in MLP.graph.initializer)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)


def trained(config: OnnxModelConfig = CONFIG) -> OnnxModel:
    model = onnx_model(config)
    size = model.size
    model.load_parameters(CTX, RNG.normal(size=size).astype(np.float32))
    return model


def weights_of(model: OnnxModel) -> dict[str, np.ndarray]:
    graph = model.export().graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def changed(*sizes: int, rename: dict[str, str] | None = None, **more: object) -> OnnxModelConfig:
    """Another version of the program's model."""
    forward = mlp_forward(sizes, seed=9)
    for old, new in (rename or {}).items():
        for tensor in forward.graph.initializer:
            tensor.name = new if tensor.name == old else tensor.name
        for node in forward.graph.node:
            node.input[:] = [new if name == old else name for name in node.input]
    return OnnxModelConfig(model=forward.SerializeToString(), **more)  # type: ignore[arg-type]


def run(model: onnx.ModelProto, x: np.ndarray = X) -> np.ndarray:
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x})[0])


# --- out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [None, 13])
def test_what_is_exported_is_the_nodes_forward_with_the_authors_names(opset: int | None) -> None:
    forward = onnx.ModelProto()
    forward.CopyFrom(MLP)
    if opset:
        forward.opset_import[0].version = opset
        forward.ir_version = 7
    forward.doc_string = "mine"
    forward.graph.initializer[0].doc_string = "the first"
    model = trained(OnnxModelConfig(model=forward.SerializeToString()))
    exported = model.export()
    np.testing.assert_allclose(run(exported), model.forward(CTX, X), atol=1e-6)
    for tensor in (*exported.graph.initializer, *forward.graph.initializer):
        tensor.ClearField("raw_data")
    assert exported == forward


def test_weights_that_are_not_trained_are_exported_as_they_are() -> None:
    model = trained(replace(CONFIG, trainable=("layer1.weight", "layer1.bias")))
    found = weights_of(model)
    first = numpy_helper.to_array(MLP.graph.initializer[0])
    np.testing.assert_array_equal(found["layer0.weight"], first)
    np.testing.assert_allclose(run(model.export()), model.forward(CTX, X), atol=1e-6)


def test_initializers_that_are_inputs_as_well_and_float_data() -> None:
    """As IR version 3 had it, and tensors that hold their values in a field of their type."""
    forward = onnx.ModelProto()
    forward.CopyFrom(MLP)
    for tensor in forward.graph.initializer:
        values = numpy_helper.to_array(tensor).reshape(-1)
        tensor.ClearField("raw_data")
        tensor.float_data.extend(values.tolist())
        info = helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.dims)
        forward.graph.input.append(info)
    model = trained(OnnxModelConfig(model=forward.SerializeToString()))
    np.testing.assert_allclose(run(model.export()), model.forward(CTX, X), atol=1e-6)


class Bare(Model):
    TYPE_NAME = "tests.Bare"

    def _unused(self, *_: object, **__: object) -> object:
        raise AssertionError

    forward = compute_loss = backward = step = apply_delta = _unused  # type: ignore[assignment]
    load_parameters = params = train = _unused  # type: ignore[assignment]


def test_a_model_that_does_not_export_says_so() -> None:
    for ask in (
        Bare(None).export,
        lambda: Bare.saved_weights(b""),
        lambda: Bare.initialized(None, {}),
    ):
        with pytest.raises(errors.NotExportable, match=r"tests\.Bare"):
            ask()


# --- states -----------------------------------------------------------------------------------


def old_state(params: np.ndarray) -> bytes:
    """As saved before states had names."""
    return codec.encode_value(Composite((params, Composite(()), Composite(()))))


def test_a_state_without_names_still_loads_and_fits_by_its_size() -> None:
    model, source = onnx_model(CONFIG), trained()
    state = old_state(source.params(CTX))
    model.restore(state)
    np.testing.assert_array_equal(model.params(CTX), source.params(CTX))
    again = onnx_model(changed(4, 5, 3))
    assert again.carry_over(state).taken == NAMES
    np.testing.assert_array_equal(again.params(CTX), source.params(CTX))
    with pytest.raises(errors.ParameterMismatch, match="have the shape"):
        onnx_model(changed(4, 6, 3)).carry_over(state)
    with pytest.raises(errors.NotExportable, match="without the names"):
        OnnxModel.saved_weights(state)


def test_the_weights_in_a_state_have_their_names() -> None:
    model = trained()
    found = OnnxModel.saved_weights(model.serialize())
    expected = weights_of(model)
    assert list(found) == list(NAMES)
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name])


def _packed(rest: object) -> bytes:
    layout = np.frombuffer(msgpack.packb(rest), np.uint8)
    empty = Composite(())
    return codec.encode_value(Composite((np.zeros(2, np.float32), empty, empty, layout)))


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        ({"version": 4, "parameters": [["a", [2]]]}, "version 4"),
        ({"version": 3, "parameters": [["a", [2]]]}, "IndexError"),
        ([], "version None"),
        ({"version": 2}, "KeyError"),
        ({"version": 2, "parameters": [["a", [2]], ["a", [0]]]}, "malformed"),
        ({"version": 2, "parameters": [["a", [-1]], ["b", [3]]]}, "malformed"),
        ({"version": 2, "parameters": [["a", [3]]]}, "not of 2 parameters"),
        ({"version": 2, "parameters": [["a", [1 << 40, 1 << 40]]]}, "not of 2 parameters"),
        ({"version": 2, "parameters": [[["a"], [2]]]}, "malformed"),
        ({"version": 2, "parameters": 7}, "TypeError"),
    ],
)
def test_a_state_with_malformed_names_is_refused(rest: object, says: str) -> None:
    with pytest.raises(ComponentError, match=re.escape(says)):
        OnnxModel.saved_weights(_packed(rest))
    model = onnx_model(CONFIG)
    for load in (model.restore, model.carry_over):
        with pytest.raises(ComponentError):
            load(_packed(rest))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 10_000))
def test_garbage_for_a_state_is_a_typed_refusal(noise: bytes, at: int) -> None:
    state = trained().serialize()
    at %= len(state)
    for data in (noise, state[:at], state[:at] + noise + state[at + len(noise) :]):
        if data == state:
            continue
        try:
            unpack_state(data)
        except DecodeError:
            continue


def test_what_is_saved_later_beside_the_names_is_no_obstacle() -> None:
    params = np.arange(2, dtype=np.float32)
    data = pack_state(SavedState(params=params, layout={"a": (2,)}))
    assert unpack_state(data).layout == {"a": (2,)}
    rest = {"version": 2, "parameters": [["a", [2]]], "optimizer": {"name": "adam"}}
    assert unpack_state(_packed(rest)).layout == {"a": (2,)}


# --- carried over -----------------------------------------------------------------------------


def test_a_changed_learning_rate_keeps_everything() -> None:
    source = trained()
    model = onnx_model(replace(CONFIG, learning_rate=0.001, loss="mse"))
    told = model.carry_over(source.serialize())
    assert (told.taken, told.left) == (NAMES, {})
    np.testing.assert_array_equal(model.params(CTX), source.params(CTX))


def test_parameters_that_agree_are_taken_and_the_others_begin_anew() -> None:
    source = trained()
    before = weights_of(source)
    config = changed(4, 5, 7, rename={"layer0.bias": "first.bias"})
    initial = weights_of(onnx_model(config))
    model = onnx_model(config)
    told = model.carry_over(source.serialize())
    assert told.taken == ("layer0.weight",)
    assert told.left == {
        "first.bias": "it is new here, and has its initial values",
        "layer1.weight": "its shape is [5, 3] there and [5, 7] here",
        "layer1.bias": "its shape is [3] there and [7] here",
        "layer0.bias": "there is no such parameter any more",
    }
    after = weights_of(model)
    np.testing.assert_array_equal(after.pop("layer0.weight"), before["layer0.weight"])
    for name, value in after.items():
        np.testing.assert_array_equal(value, initial[name])


def test_a_deeper_model_in_another_order_takes_what_it_has() -> None:
    source = trained()
    before = weights_of(source)
    forward = mlp_forward((4, 5, 3), seed=5)
    tensors = list(forward.graph.initializer)[::-1]
    del forward.graph.initializer[:]
    forward.graph.initializer.extend(tensors)
    model = onnx_model(OnnxModelConfig(model=forward.SerializeToString()))
    with pytest.raises(ComponentError, match="another order"):
        model.restore(source.serialize())
    told = model.carry_over(source.serialize())
    assert (set(told.taken), told.left) == (set(NAMES), {})
    for name, value in weights_of(model).items():
        np.testing.assert_array_equal(value, before[name])


def test_changed_lists_of_what_is_trained() -> None:
    head = ("layer1.weight", "layer1.bias")
    source = trained()
    frozen = onnx_model(replace(CONFIG, trainable=head))
    told = frozen.carry_over(source.serialize())
    assert told.taken == head
    assert set(told.left) == {"layer0.weight", "layer0.bias"}
    assert "not trained any more" in told.left["layer0.weight"]
    assert "--init-from" in told.left["layer0.weight"]
    first = numpy_helper.to_array(MLP.graph.initializer[0])
    np.testing.assert_array_equal(weights_of(frozen)["layer0.weight"], first)

    thawed = onnx_model(CONFIG)
    told = thawed.carry_over(frozen.serialize())
    assert told.taken == head
    assert "new here" in told.left["layer0.weight"]


def test_nothing_that_agrees_or_nan_leaves_the_model_as_it_is() -> None:
    model = onnx_model(CONFIG)
    initial = model.params(CTX)
    other = trained(changed(4, 9, 8, rename={"layer0.weight": "w"}))
    with pytest.raises(errors.ParameterMismatch, match="no parameter of the saved state agrees"):
        model.carry_over(other.serialize())
    for layout in ({"layer0.weight": (4, 5), "more": (1,)}, None):
        params = np.full(21 if layout else model.size, np.nan, np.float32)
        saved = SavedState(params=params, layout=layout)
        state = pack_state(saved) if layout else old_state(params)
        with pytest.raises(errors.ParameterMismatch, match="NaN or infinity"):
            model.carry_over(state)
    assert model.params(CTX) is initial
    assert model.carry_over(b"").taken == ()


def test_a_component_that_knows_no_parts_loads_all_or_nothing() -> None:
    told = Component.carry_over(Bare(None), b"")
    assert (told.taken, told.left) == ((), {})
    with pytest.raises(ComponentError, match="keeps no state"):
        Bare(None).carry_over(b"x")


# --- in ---------------------------------------------------------------------------------------


def test_initial_weights_are_taken_by_name_shape_and_dtype() -> None:
    source = trained()
    weights = {**weights_of(source), "extra": np.zeros(2, np.float32)}
    weights["layer1.bias"] = weights["layer1.bias"].astype(np.float64)
    config, told = OnnxModel.initialized(replace(CONFIG, learning_rate=0.25), weights)
    assert told.taken == NAMES[:3]
    assert told.left == {
        "layer1.bias": "its dtype is float64 there and float32 here",
        "extra": "the program has no such weight",
    }
    assert config.learning_rate == 0.25
    after = weights_of(onnx_model(config))
    for name in told.taken:
        np.testing.assert_array_equal(after[name], weights[name])
    assert OnnxModel.initialized(CONFIG, weights)[0].model == config.model


def test_initial_weights_reach_those_that_are_not_trained() -> None:
    source = trained()
    config = replace(CONFIG, trainable=("layer1.weight", "layer1.bias"))
    made, told = OnnxModel.initialized(config, weights_of(source))
    assert told.taken == NAMES
    np.testing.assert_allclose(onnx_model(made).forward(CTX, X), source.forward(CTX, X), atol=1e-6)


def test_initial_weights_that_do_not_fit_or_are_not_finite_are_refused() -> None:
    with pytest.raises(errors.ParameterMismatch, match="no weight agrees in name, shape and dtype"):
        OnnxModel.initialized(CONFIG, {"w": np.zeros(3, np.float32)})
    bad = weights_of(trained())
    bad["layer1.weight"] = np.full((5, 3), np.inf, np.float32)
    with pytest.raises(errors.ParameterMismatch, match=r"'layer1.weight' holds NaN or infinity"):
        OnnxModel.initialized(CONFIG, bad)
    with pytest.raises(InvalidForwardModel, match="no ModelProto"):
        OnnxModel.initialized(OnnxModelConfig(model=b"\xff"), bad)
