"""bfloat16, and elements of 8, 4 and 2 bits: through a backend, between ops, and over the wire."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig
from bbnode.components.errors import BackendError
from bbnode.ir import codec, packing, types, values
from bbnode.ir.errors import DecodeError

SMALL = ("BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ",
         "INT4", "UINT4", "INT2", "UINT2")  # fmt: skip
PACKED = [node for elem, node in types.TENSOR_BY_ELEM.items() if elem in types.BITS_OF_ELEM]


def cast_model(source: int, to: int) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], name="narrow", to=to)],
        "cast",
        [helper.make_tensor_value_info("x", source, None)],
        [helper.make_tensor_value_info("y", to, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)


@pytest.mark.parametrize("shape", [(5,), (), (0, 3), (2, 3)])
@pytest.mark.parametrize("name", SMALL)
def test_small_elements_go_into_graphs_and_come_out(name, shape) -> None:
    elem = TensorProto.DataType.Value(name)
    backend = OrtBackend(OrtBackendConfig())
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(np.float32) % 2
    (small,) = backend.prepare(cast_model(TensorProto.FLOAT, elem)).run([numbers])
    assert values.type_of(small) is types.TENSOR_BY_ELEM[elem]
    (back,) = backend.prepare(cast_model(elem, TensorProto.FLOAT)).run([small])
    assert back.shape == shape
    np.testing.assert_array_equal(back, numbers)


def test_what_has_no_kernel_is_refused_when_it_is_prepared() -> None:
    model = cast_model(TensorProto.FLOAT, TensorProto.FLOAT4E2M1)
    with pytest.raises(BackendError, match=r"Cast.*'narrow'.*FLOAT4E2M1"):
        OrtBackend(OrtBackendConfig()).prepare(model)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("node", PACKED, ids=lambda node: node.name)
def test_packed_elements_are_those_of_onnx_and_travel(node, count) -> None:
    dtype, bits = values.dtype_of(node), types.BITS_OF_ELEM[node.elem_type]
    raw = np.random.default_rng(count).integers(0, 1 << bits, count).astype(np.uint8)
    tensor = packing.unpacked(packing.packed(raw, bits), count, bits, dtype)
    assert packing.packed(tensor, bits).tobytes() == numpy_helper.from_array(tensor).raw_data
    payload = codec.encode_value(tensor)
    assert len(payload) == 16 + -(-count * bits // 8)
    back = codec.decode_value(node, payload)
    assert back.tobytes() == tensor.tobytes()
    assert not back.flags.writeable


@pytest.mark.parametrize(
    "change",
    [
        lambda payload: payload + b"\0",
        lambda payload: payload[:-1],
        lambda payload: payload[:-1] + b"\xff",  # bits behind the last element
        lambda payload: payload[:8] + b"\xff" * 7 + b"\x7f" + payload[16:],
    ],
)
def test_a_packed_tensor_that_is_none_is_refused(change) -> None:
    node = types.TENSOR_BY_ELEM[TensorProto.INT4]
    payload = codec.encode_value(np.ones(3).astype(values.dtype_of(node)))
    with pytest.raises(DecodeError):
        codec.decode_value(node, change(payload))
