"""A lossless codec: zstd over the bytes of a tensor."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from onnx import TensorProto, helper

from bbnode.components.codecs.base import BYTES, BytesCodec, CodecConfig, Header, is_small
from bbnode.components.contracts import OpContext, offload
from bbnode.components.errors import BackendUnavailable, NotEncodable
from bbnode.components.libraries import ZSTANDARD, OptionalLibrary
from bbnode.components.registry import register_component
from bbnode.ir import types
from bbnode.ir.installation import install
from bbnode.ir.values import Value

_LEVELS = range(1, 23)

_TAKEN = (
    types.TENSOR_FLOAT,
    *(
        types.TENSOR_BY_ELEM[elem]
        for elem in (
            TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.INT32,
            TensorProto.INT16, TensorProto.INT8, TensorProto.UINT64, TensorProto.UINT32,
            TensorProto.UINT16, TensorProto.UINT8, TensorProto.BOOL,
        )
    ),
)  # fmt: skip
_DTYPES: Mapping[int, np.dtype[Any]] = {
    elem: np.dtype(helper.tensor_dtype_to_np_dtype(elem))
    for elem, node in types.TENSOR_BY_ELEM.items()
    if node in _TAKEN
}
_NUMBERS = {dtype: elem for elem, dtype in _DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class ZstdCodecConfig:
    """Settings of `ZstdCodec`.

    Attributes:
        max_values: of one tensor, in either direction; a code that stands for more is refused.
            Without: as many as the program declares for what is decoded, else 256 for each byte of
            the code (65,536 for a small one), and 2^26 at most.
        level: of zstd, 1 (fast) to 22 (small).
        shuffle: put the first bytes of all values first, then the second ones: exponents of floats
            compress, and their last bits do not.
    """

    max_values: int | None = CodecConfig.max_values
    level: int = 3
    shuffle: bool = True


@register_component
class ZstdCodec(BytesCodec):
    """Tensors of numbers, bit for bit, as zstd (RFC 8878) makes them smaller. Needs zstandard.

    Codes of other codecs too: `codec=[int8, zstd]`. Weights shrink by a tenth or so.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.ZstdCodec"
    libraries: ClassVar[tuple[OptionalLibrary, ...]] = (ZSTANDARD,)
    Config: ClassVar[type] = ZstdCodecConfig
    storage: ClassVar[Mapping[str, types.TypeNode | tuple[types.TypeNode, ...]]] = {
        "Encode.tensor": _TAKEN,
        "Decode.tensor": _TAKEN,
        "Encode.code": BYTES,
        "Decode.code": BYTES,
        "Train.training": types.TENSOR_FLOAT,
    }

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.require(config.level in _LEVELS, f"level is {config.level}, not 1 to {_LEVELS[-1]}")

    @offload(reads_only=True, unless=is_small)
    def encode(self, ctx: OpContext, tensor: Value) -> Value:
        """Return the code, uint8 [B]; NotEncodable for what holds no numbers, or too many."""
        number = _NUMBERS.get(tensor.dtype) if isinstance(tensor, np.ndarray) else None
        if number is None or not isinstance(tensor, np.ndarray):
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise NotEncodable(f"{self.TYPE_NAME} takes tensors of numbers and got {kind}")
        self.check_size(tensor)
        config: Any = self.config
        raw = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        if config.shuffle:
            raw = np.ascontiguousarray(raw.reshape(-1, tensor.dtype.itemsize).T)
        frame = self._library().ZstdCompressor(level=config.level).compress(raw.tobytes())
        header = Header(tensor.shape, (number, int(config.shuffle)))
        return self.join(header, [np.frombuffer(frame, np.uint8)])

    @offload(reads_only=True, unless=is_small)
    def decode(self, ctx: OpContext, code: Value) -> Value:
        """Return the tensor; CodeRefused where the frame has not exactly its bytes."""
        header, body = self.open(ctx, code)
        if len(header.settings) != 2 or header.settings[0] not in _DTYPES:
            raise self.refused("it names no type of numbers")
        dtype = _DTYPES[header.settings[0]]
        wanted = header.size * dtype.itemsize
        zstd = self._library()
        try:
            # The frame says how much it holds, and no more than that is taken for it: it is opened
            # in one piece, for which the window that it says is not kept.
            said = zstd.frame_content_size(body.tobytes())
            if said != wanted:
                raise self.refused(f"its frame says {said} bytes, and its header {wanted}")
            opened = zstd.ZstdDecompressor().decompress(
                body.tobytes(), max_output_size=max(wanted, 1), allow_extra_data=False
            )
        except zstd.ZstdError as error:
            raise self.refused(f"zstd: {error}") from error
        if len(opened) != wanted:
            raise self.refused(f"its frame holds {len(opened)} bytes, and its header says {wanted}")
        flat = np.frombuffer(opened, np.uint8)
        if header.settings[1]:
            flat = np.ascontiguousarray(flat.reshape(dtype.itemsize, -1).T).reshape(-1)
        if dtype == np.bool_ and flat.size and flat.max() > 1:
            raise self.refused("a bool of it is neither 0 nor 1")
        made = flat.view(dtype).reshape(header.shape)
        made.flags.writeable = False
        return made

    def _library(self) -> Any:
        try:
            return importlib.import_module("zstandard")
        except ImportError as error:
            raise BackendUnavailable(
                f"{self.TYPE_NAME} needs zstandard: {install(ZSTANDARD.requirement)}"
            ) from error
