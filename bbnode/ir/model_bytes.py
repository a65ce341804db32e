"""Bytes of a file to a ModelProto.

Rule: whatever the protobuf runtime raises for bytes that are no ONNX model becomes one error.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError as ProtobufDecodeError
from onnx import ModelProto

from bbnode.ir.errors import DecodeError


def parse_model(data: bytes) -> ModelProto:
    """The model in `data`; DecodeError when it is none, or only a part of one."""
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except (ProtobufDecodeError, RecursionError) as error:
        raise DecodeError(f"{len(data)} bytes that are no ONNX model: {error}") from error
    return model
