"""The packing of tensor elements that are smaller than a byte.

Rule: as in ONNX's `raw_data`, the first element has the lowest bits, and the last byte is filled
with zeros. In memory, numpy has one such element in each byte (dtypes of ml_dtypes).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def packed(array: npt.NDArray[Any], bits: int) -> Bytes:
    """Return the elements of an array, uint8 [ceil(size · bits / 8)], row-major.

    Args:
        array: array of a one-byte dtype, whose lowest bits are the element.
        bits: bits of one element, 2 or 4.
    """
    each = 8 // bits
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8) & ((1 << bits) - 1)
    padded = np.zeros(-(-flat.size // each) * each, np.uint8)
    padded[: flat.size] = flat
    rows = padded.reshape(-1, each)
    packed_bytes = rows[:, 0].copy()
    for place in range(1, each):
        packed_bytes |= rows[:, place] << (bits * place)
    return packed_bytes


def unpacked(data: Bytes, count: int, bits: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return `count` elements of a dtype of ml_dtypes, [count].

    Args:
        data: uint8 [ceil(count · bits / 8)].
        bits: of one element, 2 or 4.

    Raises ValueError if bits after the last element are set.
    """
    each = 8 // bits
    mask = (1 << bits) - 1
    rows = np.empty((data.size, each), np.uint8)
    for place in range(each):
        rows[:, place] = (data >> (bits * place)) & mask
    flat = rows.reshape(-1)
    if flat[count:].any():
        raise ValueError("bits behind the last element are set")
    flat = flat[:count]
    if dtype.name.startswith("int"):
        # ml_dtypes sign-extends negative integers to the whole byte.
        return ((flat.view(np.int8) << (8 - bits)) >> (8 - bits)).view(dtype)
    return flat.view(dtype)
