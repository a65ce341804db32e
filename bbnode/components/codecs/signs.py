"""A codec of one bit a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bbnode.components.codecs.base import Body, FeedbackConfig, Floats
from bbnode.components.codecs.integers import BlockCodec
from bbnode.components.registry import register_component


@dataclass(frozen=True, kw_only=True)
class SignCodecConfig(FeedbackConfig):
    """Settings of `SignCodec`; those of every codec, and:

    Attributes:
        block: values that share a scale of four bytes, as a layer of a model might.
    """

    block: int = 4096


@register_component
class SignCodec(BlockCodec):
    """The signs, eight a byte, and the mean magnitude of each block: C(v) = |v|_1 / n sign(v).

    signSGD (Bernstein et al., 2018, arXiv:1802.04434) with the scale that error feedback wants
    (Karimireddy et al., 2019, arXiv:1901.09847, section 4). Zero counts as positive.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.SignCodec"
    Config: ClassVar[type] = SignCodecConfig
    of_deltas: ClassVar[bool] = True

    def quantize(self, flat: Floats, block: int) -> tuple[npt.NDArray[Any], Floats]:
        """Return True where a value is not negative, and the mean magnitude of each block."""
        begins = np.arange(0, flat.size, block)
        sums = np.add.reduceat(np.abs(flat), begins, dtype=np.float64)
        counts = np.diff(np.append(begins, flat.size))
        return flat >= 0, (sums / counts).astype(np.float32)

    def pack(self, levels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return eight a byte."""
        return np.packbits(levels)

    def dequantize(self, levels: npt.NDArray[Any], scales: Floats) -> Floats:
        """Return the scale or its negative."""
        return np.where(levels > 0, scales, -scales)

    def unpack(self, packed: Body, n: int) -> npt.NDArray[Any]:
        """Return 0 or 1 for each value."""
        return np.unpackbits(packed, count=n)

    def packed_bytes(self, n: int) -> int:
        """Return a bit a value."""
        return (n + 7) // 8
