"""Codecs of one byte or half a byte a value, with a scale for each block of values.

Int8 and int4: symmetric absmax quantisation (Dettmers et al., 2022, arXiv:2110.02861, section 2),
s = max|x| / L of a block, code round(x / s) in -L .. L; an ONNX graph on the bound backend. NF4:
NormalFloat of QLoRA (Dettmers et al., 2023, arXiv:2305.14314, section 3 and appendix E), the
nearest of sixteen quantiles of a normal distribution, times max|x| of a block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bbnode.components.codecs.base import (
    Body,
    CodecConfig,
    FloatCodec,
    Floats,
    Header,
    Settings,
    Stream,
    part,
)
from bbnode.components.codecs.graphs import dequantize_model, quantize_model
from bbnode.components.registry import register_component

_MAX_BLOCK = 1 << 24
_SCALE_BYTES = 4

# Appendix E of QLoRA.
NF4_VALUES = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
_NF4_BOUNDS = (NF4_VALUES[1:] + NF4_VALUES[:-1]) / 2


@dataclass(frozen=True, kw_only=True)
class Int8CodecConfig(CodecConfig):
    """Settings of `Int8Codec`; those of every codec, and:

    Attributes:
        block: values that share a scale of four bytes.
    """

    block: int = 2048


@dataclass(frozen=True, kw_only=True)
class Int4CodecConfig(CodecConfig):
    """Settings of codecs of half a byte; those of every codec, and:

    Attributes:
        block: values that share a scale of four bytes.
    """

    block: int = 64


class BlockCodec(FloatCodec):
    """A codec of integers, and one float32 scale for each block of values.

    A body has the scales, then the integers.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.require(
            1 <= config.block <= _MAX_BLOCK, f"block is {config.block}, not 1 to {_MAX_BLOCK}"
        )

    @abstractmethod
    def quantize(self, flat: Floats, block: int) -> tuple[npt.NDArray[Any], Floats]:
        """Return the levels, n or more, and the scales [B] of [n] in blocks."""

    @abstractmethod
    def dequantize(self, levels: npt.NDArray[Any], scales: Floats) -> Floats:
        """Return blocks [B, N] of levels [B, N] and scales [B, 1]."""

    def pack(self, levels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return levels [n] as bytes."""
        return levels

    def unpack(self, packed: Body, n: int) -> npt.NDArray[Any]:
        """Return levels [n] of bytes."""
        return packed.view(np.int8)

    def packed_bytes(self, n: int) -> int:
        """Return the bytes of n levels."""
        return n

    def compress(
        self, flat: Floats, shape: tuple[int, ...], stream: Stream
    ) -> tuple[Settings, list[npt.NDArray[Any]], Mapping[str, Floats]]:
        """Return the block length, and the scales and levels."""
        config: Any = self.config
        block = min(config.block, flat.size)
        levels, scales = self.quantize(flat, block)
        packed = self.pack(levels.reshape(-1)[: flat.size])
        return (block,), [scales.reshape(-1).astype("<f4", copy=False), packed], {}

    def body_bytes(self, header: Header) -> int:
        """Return the bytes of scales and levels."""
        block = self.setting(header, 0, 1, min(_MAX_BLOCK, header.size))
        return _SCALE_BYTES * -(-header.size // block) + self.packed_bytes(header.size)

    def expand(self, header: Header, body: Body) -> Floats:
        """Return scale times level of each value; CodeRefused for a scale that can't be."""
        block, n = header.settings[0], header.size
        count = -(-n // block)
        scales = part(body, 0, count, "<f4")
        if not (np.isfinite(scales).all() and scales.min() >= 0):
            raise self.refused("a scale is NaN, infinite or negative")
        levels = self.unpack(body[_SCALE_BYTES * count :], n)
        made = self.dequantize(_blocks(levels, block), scales.reshape(-1, 1))
        return made.reshape(-1)[:n]


def _blocks(flat: npt.NDArray[Any], block: int) -> npt.NDArray[Any]:
    """Return [n] as [B, block]; only where the last one is not full, with zeros at its end."""
    short = -flat.size % block
    padded = np.concatenate([flat, np.zeros(short, flat.dtype)]) if short else flat
    return padded.reshape(-1, block)


class _AbsmaxCodec(BlockCodec):
    """Symmetric absmax quantisation to -L .. L, on the bound backend."""

    depends: ClassVar[Mapping[str, str]] = {"backend": "compute"}
    LEVELS: ClassVar[int]

    def quantize(self, flat: Floats, block: int) -> tuple[npt.NDArray[Any], Floats]:
        prepared = self.dependency("backend").prepare(quantize_model(self.LEVELS))
        levels, scales = prepared.run([_blocks(flat, block)])
        return np.asarray(levels), np.asarray(scales)

    def dequantize(self, levels: npt.NDArray[Any], scales: Floats) -> Floats:
        (made,) = self.dependency("backend").prepare(dequantize_model()).run([levels, scales])
        return np.asarray(made)


@register_component
class Int8Codec(_AbsmaxCodec):
    """One byte a value, and a scale for each block: |error| of a value at most max|x| / 254."""

    TYPE_NAME: ClassVar[str] = "bbnode.Int8Codec"
    Config: ClassVar[type] = Int8CodecConfig
    LEVELS: ClassVar[int] = 127


@register_component
class Int4Codec(_AbsmaxCodec):
    """Half a byte a value, and a scale for each block: |error| of a value at most max|x| / 14."""

    TYPE_NAME: ClassVar[str] = "bbnode.Int4Codec"
    Config: ClassVar[type] = Int4CodecConfig
    LEVELS: ClassVar[int] = 7

    def pack(self, levels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return two levels a byte, the first in the lower half."""
        return _pack_halves((levels + np.int8(self.LEVELS)).view(np.uint8))

    def unpack(self, packed: Body, n: int) -> npt.NDArray[Any]:
        """Return the levels; CodeRefused for one beyond 7."""
        found = _unpack_halves(packed, n)
        if found.max() > 2 * self.LEVELS:
            raise self.refused(f"a level is beyond {self.LEVELS}")
        return found.view(np.int8) - np.int8(self.LEVELS)

    def packed_bytes(self, n: int) -> int:
        """Return half a byte a value."""
        return (n + 1) // 2


@register_component
class NF4Codec(BlockCodec):
    """Half a byte a value, for values that are about normal: |error| at most 0.152 max|x|."""

    TYPE_NAME: ClassVar[str] = "bbnode.NF4Codec"
    Config: ClassVar[type] = Int4CodecConfig

    def quantize(self, flat: Floats, block: int) -> tuple[npt.NDArray[Any], Floats]:
        """Return the number of the nearest value of the table, and max|x| of each block."""
        blocks = _blocks(flat, block)
        scales = np.abs(blocks).max(axis=1, keepdims=True)
        with np.errstate(under="ignore"):
            unit = blocks / np.where(scales > 0, scales, np.float32(1))
        return np.searchsorted(_NF4_BOUNDS, unit).astype(np.uint8), scales

    def dequantize(self, levels: npt.NDArray[Any], scales: Floats) -> Floats:
        """Return values of the table times the scales."""
        made: Floats = NF4_VALUES[levels] * scales
        return made

    def pack(self, levels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return two levels a byte, the first in the lower half."""
        return _pack_halves(levels)

    def unpack(self, packed: Body, n: int) -> npt.NDArray[Any]:
        """Return the levels."""
        return _unpack_halves(packed, n)

    def packed_bytes(self, n: int) -> int:
        """Return half a byte a value."""
        return (n + 1) // 2


def _pack_halves(halves: Body) -> Body:
    even = halves if halves.size % 2 == 0 else np.append(halves, np.uint8(0))
    return even[::2] | (even[1::2] << np.uint8(4))


def _unpack_halves(packed: Body, n: int) -> Body:
    made = np.empty(2 * packed.size, np.uint8)
    made[::2] = packed & np.uint8(15)
    made[1::2] = packed >> np.uint8(4)
    return made[:n]
