"""Codecs that send few of a tensor's values: the largest ones, or a drawn part.

Top-k: Aji and Heafield, 2017 (arXiv:1704.05021); random-k: Stich et al., 2018 (arXiv:1809.07599,
definition 2.1). What is not sent stays in the error memory, and is sent later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bbnode.components.codecs.base import (
    Body,
    FeedbackConfig,
    FloatCodec,
    Floats,
    Header,
    Settings,
    Stream,
    part,
)
from bbnode.components.codecs.graphs import top_k_model
from bbnode.components.registry import register_component

_VALUE_BYTES = 4
_NARROW = 1 << 16  # values of a tensor up to which an index takes two bytes
_MAX_SEED = (1 << 63) - 1
_COUNT_BITS = (1 << 62) - 1


@dataclass(frozen=True, kw_only=True)
class TopKCodecConfig(FeedbackConfig):
    """Settings of `TopKCodec`; those of every codec, and:

    Attributes:
        fraction: of the values that are sent, above 0 and up to 1; at least one value is.
    """

    fraction: float = 0.01


@dataclass(frozen=True, kw_only=True)
class RandomKCodecConfig(TopKCodecConfig):
    """Settings of `RandomKCodec`; those of `TopKCodec`, and:

    Attributes:
        seed: of the draws, 0 or more. The n-th tensor of each stream has the same draw on all peers
            of one seed.
    """

    seed: int = 0


class SparseCodec(FloatCodec):
    """A codec of a fraction of the values."""

    Config: ClassVar[type] = TopKCodecConfig
    of_deltas: ClassVar[bool] = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.require(
            0 < config.fraction <= 1, f"fraction is {config.fraction}, not above 0 and up to 1"
        )

    def count_of(self, n: int) -> int:
        """Return how many of n values are sent."""
        config: Any = self.config
        fraction: float = config.fraction
        return min(n, max(1, math.ceil(fraction * n)))


@register_component
class TopKCodec(SparseCodec):
    """The values of largest magnitude with their indices: 6 or 8 bytes each.

    The bound backend finds them with TopK; of equal magnitudes the first ones count.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.TopKCodec"
    depends: ClassVar[Mapping[str, str]] = {"backend": "compute"}

    def compress(
        self, flat: Floats, shape: tuple[int, ...], stream: Stream
    ) -> tuple[Settings, list[npt.NDArray[Any]], Mapping[str, Floats]]:
        """Return k, and indices in ascending order with their values."""
        k = self.count_of(flat.size)
        prepared = self.dependency("backend").prepare(top_k_model())
        (found,) = prepared.run([flat, np.array([k], np.int64)])
        at = np.sort(np.asarray(found))
        return (k,), [at.astype(_index_type(flat.size)), flat[at].astype("<f4", copy=False)], {}

    def body_bytes(self, header: Header) -> int:
        """Return the bytes of k indices and values."""
        k = self.setting(header, 0, 1, header.size)
        return k * (np.dtype(_index_type(header.size)).itemsize + _VALUE_BYTES)

    def expand(self, header: Header, body: Body) -> Floats:
        """Return zeros with the values at their places; CodeRefused for a wrong index."""
        k, n = header.settings[0], header.size
        kind = _index_type(n)
        at = part(body, 0, k, kind).astype(np.int64)
        if at[-1] >= n or (np.diff(at) <= 0).any():
            raise self.refused("its indices do not ascend within the tensor")
        made = np.zeros(n, np.float32)
        made[at] = part(body, k * np.dtype(kind).itemsize, k, "<f4")
        return made


@register_component
class RandomKCodec(SparseCodec):
    """Drawn values, 4 bytes each: their indices follow from seed and number, and are not sent.

    Without error feedback the values are sent as n/k times what they are: then the mean over draws
    is the tensor.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.RandomKCodec"
    Config: ClassVar[type] = RandomKCodecConfig
    counts: ClassVar[bool] = True
    config: RandomKCodecConfig

    def __init__(self, config: RandomKCodecConfig) -> None:
        super().__init__(config)
        self.require(0 <= config.seed <= _MAX_SEED, f"seed is {config.seed}, not 0 to 2^63 - 1")

    def compress(
        self, flat: Floats, shape: tuple[int, ...], stream: Stream
    ) -> tuple[Settings, list[npt.NDArray[Any]], Mapping[str, Floats]]:
        """Return k, the seed and the number of the draw, and the values."""
        k = self.count_of(flat.size)
        number = stream.count & _COUNT_BITS
        values = flat[drawn(flat.size, k, self.config.seed, number)]
        if not self.config.error_feedback:
            values = values * np.float32(flat.size / k)
        return (k, self.config.seed, number), [values.astype("<f4", copy=False)], {}

    def body_bytes(self, header: Header) -> int:
        """Return four bytes a value that is sent."""
        self.setting(header, 1, 0, _MAX_SEED)
        self.setting(header, 2, 0, _COUNT_BITS)
        return _VALUE_BYTES * self.setting(header, 0, 1, header.size)

    def expand(self, header: Header, body: Body) -> Floats:
        """Return zeros with the values at the places that were drawn."""
        k, seed, number = header.settings[:3]
        made = np.zeros(header.size, np.float32)
        made[drawn(header.size, k, seed, number)] = part(body, 0, k, "<f4")
        return made


def drawn(n: int, k: int, seed: int, number: int) -> npt.NDArray[np.int64]:
    """Return k of 0 .. n-1, ascending, by the k lowest of n raw PCG64 outputs.

    numpy keeps the streams of its bit generators for ever (NEP 19), so that peers with other
    versions draw the same.
    """
    bits = np.random.PCG64(np.random.SeedSequence((seed, number))).random_raw(n)
    bound = np.partition(bits, k - 1)[k - 1]
    return np.flatnonzero(bits <= bound)[:k]


def _index_type(n: int) -> str:
    return "<u2" if n <= _NARROW else "<u4" if n <= 1 << 32 else "<u8"
