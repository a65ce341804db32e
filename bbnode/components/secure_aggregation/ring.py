"""Vectors of floats as integers modulo 2^16, 2^32 or 2^64, so that sums under masks are exact.

Rule: x is clipped to [-clip, clip] and stands for q = rint(x * levels / clip), to the nearest, ties
to even. A client of weight w contributes [w*q, w], and the ring is so wide that no sum of all
clients reaches half of it: |sum| <= clients * max_weight * levels < 2^(bits - 1). So a sum that
lies beyond what its weight allows is a lie of a client, and refused; none wraps around in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from bbnode.components.secure_aggregation.errors import (
    NotMaskable,
    RingTooNarrow,
    UnmaskingFailed,
)

Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

WORD_BITS: Final = (16, 32, 64)
# Steps from 0 to clip that are enough where the number is not said: as fine as a float32.
MOST_LEVELS: Final = (1 << 24) - 1
# With fewer steps in a word of 32 bits, longer words are taken.
_FEW_LEVELS: Final = 1 << 10
# Numbers quantised at once: they stay in the processor's cache.
_CHUNK: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring of words, and the scale of the vectors in it.

    Attributes:
        clip: the largest absolute value; larger ones count as this.
        levels: steps from 0 to `clip`.
        max_weight: the largest weight of one client.
        clients: of which at most so many are summed.
        margin: what each client may add to each number beyond that, in steps: its noise.
        bits: of a word.
    """

    clip: float
    levels: int
    max_weight: int
    clients: int
    margin: int
    bits: int

    @classmethod
    def fitting(
        cls, *, clip: float, levels: int, max_weight: int, clients: int, margin: int = 0
    ) -> Ring:
        """Return the narrowest ring for these; `levels` 0: as many as 32 bits leave, or 64.

        Raises RingTooNarrow.
        """
        if not levels:
            levels = min(MOST_LEVELS, ((1 << 31) - 1 - clients * margin) // (clients * max_weight))
            if levels < _FEW_LEVELS:
                levels = MOST_LEVELS
        largest = clients * (max_weight * levels + margin)
        for bits in WORD_BITS:
            if largest < 1 << (bits - 1):
                return cls(clip, levels, max_weight, clients, margin, bits)
        raise RingTooNarrow(
            f"a sum of {clients} clients, each of weight up to {max_weight} and {levels} levels, "
            f"needs {largest.bit_length() + 1} bits, and 64 are the most; lower the weight "
            "(max_samples) or the levels"
        )

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The type of a word, little-endian."""
        return np.dtype(f"<u{self.bits // 8}")

    def words(self, vector: npt.NDArray[Any], weight: int) -> Words:
        """Return what a client contributes: [w*q, w] of `vector` [P], [P + 1] words.

        Raises NotMaskable.
        """
        if vector.dtype.kind != "f" or vector.ndim != 1:
            raise NotMaskable("a vector to be masked has to be a tensor of floats of one dimension")
        if weight < 1:
            raise NotMaskable(f"a weight of {weight}; it has to be 1 or more")
        weight = min(weight, self.max_weight)
        found = np.empty(vector.size + 1, self.dtype)
        found[-1] = weight
        # The ring holds a product of weight and levels with its sign.
        signed = found.view(f"<i{self.bits // 8}")
        for at in range(0, vector.size, _CHUNK):
            part = vector[at : at + _CHUNK]
            if not np.isfinite(part).all():
                raise NotMaskable("a vector to be masked holds NaN or infinity")
            steps = np.multiply(part, self.levels / self.clip, dtype=np.float64)
            np.clip(steps, -self.levels, self.levels, out=steps)
            np.rint(steps, out=steps)
            signed[at : at + part.size] = steps.astype(np.int64) * weight if weight > 1 else steps
        return found

    def signed(self, words: Words) -> npt.NDArray[np.int64]:
        """Return the integers between -2^(bits-1) and 2^(bits-1) that words stand for."""
        return words.view(np.dtype(f"<i{self.bits // 8}")).astype(np.int64)

    def mean(self, words: Words, contributors: int) -> tuple[npt.NDArray[np.float32], int]:
        """Return the weighted mean [P] of a sum of contributions [P + 1], and the sum of weights.

        Raises UnmaskingFailed where no contributions have such a sum.
        """
        found = self.signed(words)
        total = int(found[-1])
        if not contributors <= total <= contributors * self.max_weight:
            raise UnmaskingFailed(
                f"the weights of {contributors} clients can't sum up to {total}; one of them lied"
            )
        sums = found[:-1]
        most = total * self.levels + contributors * self.margin
        if sums.size and max(-int(sums.min()), int(sums.max())) > most:
            raise UnmaskingFailed(
                f"a sum of {contributors} clients of weight {total} lies beyond {total} times clip "
                f"({self.clip:g}); one of them lied"
            )
        return (sums * (self.clip / self.levels / total)).astype(np.float32), total
