"""Which large tensors ONNX's checker need not see, and which are taken away at all."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bbnode.ir.weightless import is_whole, without_weights


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
