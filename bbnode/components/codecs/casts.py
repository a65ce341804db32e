"""Codecs of half the bytes: float16 and bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from bbnode.components.codecs.base import Body, FloatCodec, Floats, Header, Settings, Stream, part
from bbnode.components.errors import NotEncodable
from bbnode.components.registry import register_component

_LARGEST_FLOAT16 = 65_504.0
_BYTES = 2


@register_component
class Float16Codec(FloatCodec):
    """float32 as IEEE 754 half precision, 2 bytes a value: 11 bits of precision, up to 65504.

    The bound backend casts. A larger number is refused; `BFloat16Codec` takes it.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.Float16Codec"
    depends: ClassVar[Mapping[str, str]] = {"backend": "compute"}

    def compress(
        self, flat: Floats, shape: tuple[int, ...], stream: Stream
    ) -> tuple[Settings, list[npt.NDArray[Any]], Mapping[str, Floats]]:
        """Return the code; NotEncodable for a number that would become infinity."""
        largest = max(-float(flat.min()), float(flat.max()))
        if largest > _LARGEST_FLOAT16:
            raise NotEncodable(
                f"{self.TYPE_NAME}: the tensor holds {largest:g}, beyond {_LARGEST_FLOAT16:g} of "
                "float16; bind bbnode.BFloat16Codec instead"
            )
        half = self.dependency("backend").cast(flat, to=TensorProto.FLOAT16)
        return (), [np.asarray(half)], {}

    def body_bytes(self, header: Header) -> int:
        """Return two bytes a value."""
        return _BYTES * header.size

    def expand(self, header: Header, body: Body) -> Floats:
        """Return the values as float32."""
        half = part(body, 0, header.size, "<f2")
        return np.asarray(self.dependency("backend").cast(half, to=TensorProto.FLOAT))


@register_component
class BFloat16Codec(FloatCodec):
    """float32 as bfloat16, 2 bytes a value: 8 bits of precision, the range of float32.

    Rounded to nearest, ties to even, by integer arithmetic: ONNX Runtime hands no bfloat16 out.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.BFloat16Codec"

    def compress(
        self, flat: Floats, shape: tuple[int, ...], stream: Stream
    ) -> tuple[Settings, list[npt.NDArray[Any]], Mapping[str, Floats]]:
        """Return the upper halves of the float32 bits, rounded."""
        bits = flat.view(np.uint32)
        rounded = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
        return (), [(rounded >> np.uint32(16)).astype("<u2")], {}

    def body_bytes(self, header: Header) -> int:
        """Return two bytes a value."""
        return _BYTES * header.size

    def expand(self, header: Header, body: Body) -> Floats:
        """Return the values as float32."""
        halves = part(body, 0, header.size, "<u2")
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
