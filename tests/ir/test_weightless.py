"""Which large tensors ONNX's checker need not see, and which are taken away at all."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from bbnode.ir.pieces import InMemory
from bbnode.ir.weightless import StoredTensor, is_whole, parted, without_weights


def _tensor() -> TensorProto:
    return numpy_helper.from_array(np.ones((3, 4), np.float32), "w")


def test_a_tensor_with_just_its_values_in_raw_data_is_whole() -> None:
    tensor = _tensor()
    assert is_whole(tensor)
    onnx.checker.check_tensor(tensor)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "raw_data", t.raw_data[:-1]),
        lambda t: setattr(t, "raw_data", t.raw_data + b"\0"),
        lambda t: t.float_data.append(1.0),
        lambda t: t.dims.append(2),
        lambda t: t.dims.extend([-1, -1]),
        lambda t: setattr(t, "data_type", TensorProto.STRING),
        lambda t: setattr(t, "data_type", 99),
        lambda t: setattr(t, "data_location", TensorProto.EXTERNAL),
        lambda t: t.external_data.add(key="location", value="elsewhere"),
        lambda t: t.segment.SetInParent(),
    ],
)
def test_whatever_is_odd_about_a_tensor_is_left_to_the_checker(change) -> None:  # type: ignore[no-untyped-def]
    tensor = _tensor()
    change(tensor)
    assert not is_whole(tensor)


def test_a_tensor_that_declares_little_and_holds_much_stays_for_the_checker() -> None:
    lying = numpy_helper.from_array(np.ones((1 << 15,), np.float32), "lying")
    del lying.dims[:]
    graph = helper.make_graph([], "g", [], [], [lying])
    light, large = without_weights(helper.make_model(graph))
    assert not large
    assert light.graph.initializer[0].name == "lying"


WEIGHT = np.arange(1 << 15, dtype=np.float32)  # twice as many bytes as are large


def _model(*tensors: TensorProto) -> onnx.ModelProto:
    ports = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None])]
    node = helper.make_node("Identity", ["x"], ["y"], doc_string="d" * 300)
    made = helper.make_graph([node], "g", ports, [], tensors)
    return helper.make_model(made, producer_name="someone", opset_imports=[])


def _together(model: onnx.ModelProto, apart: dict[str, StoredTensor]) -> onnx.ModelProto:
    for tensor in model.graph.initializer:
        if tensor.name in apart:
            assert not tensor.raw_data
            tensor.CopyFrom(apart[tensor.name].whole())
    return model


def test_a_model_in_parts_is_the_whole_one() -> None:
    noted = numpy_helper.from_array(WEIGHT.reshape(128, -1), "noted")
    noted.doc_string = "after its values"
    typed = helper.make_tensor("typed", TensorProto.FLOAT, WEIGHT.shape, WEIGHT)
    half = numpy_helper.from_array(WEIGHT.astype(np.float16), "half")
    model = _model(_tensor(), noted, typed, half)
    light, apart = parted(InMemory(model.SerializeToString()))
    assert list(apart) == ["noted", "half"]
    assert light.ByteSize() < model.ByteSize() - noted.ByteSize()
    assert [*light.graph.initializer[1].dims] == [128, 256]
    assert _together(light, apart) == model
    split, large = without_weights(parted(InMemory(model.SerializeToString()))[0], apart)
    whole, all_large = without_weights(model)
    assert split == whole
    assert list(large) == list(all_large)


def test_what_is_written_in_an_unusual_way_is_read_whole() -> None:
    large = numpy_helper.from_array(WEIGHT, "w")
    twice = _model(large, large)
    named_as_a_small_one = _model(large, numpy_helper.from_array(np.ones(3), "w"))
    content = _model(large).SerializeToString()
    merged = content + content  # protobuf reads one after the other into one model
    for odd in (*(m.SerializeToString() for m in (twice, named_as_a_small_one)), merged):
        light, apart = parted(InMemory(odd))
        assert not apart
        assert light == onnx.ModelProto.FromString(odd)


CONTENT = _model(_tensor(), numpy_helper.from_array(WEIGHT, "w")).SerializeToString()


@settings(max_examples=60, deadline=None)
@given(
    at=st.one_of(st.integers(0, 500), st.integers(len(CONTENT) - 200, len(CONTENT))),
    by=st.binary(max_size=12),
    cut=st.integers(0, 12),
    to=st.one_of(st.none(), st.integers(0, len(CONTENT))),
)
def test_damaged_bytes_are_read_and_refused_as_protobuf_does(
    at: int, by: bytes, cut: int, to: int | None
) -> None:
    content = (CONTENT[:at] + by + CONTENT[at + cut :])[:to]
    try:
        whole = onnx.ModelProto.FromString(content)
    except DecodeError:
        with pytest.raises(DecodeError):
            parted(InMemory(content))
        return
    assert _together(*parted(InMemory(content))).SerializeToString(deterministic=True) == (
        whole.SerializeToString(deterministic=True)
    )
