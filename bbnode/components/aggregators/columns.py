"""Arithmetic on many vectors at once, in blocks of columns that stay in a core's cache.

Rule: for the same vectors in the same order the bits are the same. All work on float32 vectors of
one shape, in the order in which they are given, and change none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Tensor: TypeAlias = npt.NDArray[np.float32]
Matrix: TypeAlias = npt.NDArray[np.float64]
# A comparator of a sorting network: the wires that get minimum and maximum, and which is needed.
Comparator: TypeAlias = tuple[int, int, bool, bool]

MAX_SQUARED = 1e15  # values up to here have squares that add up within float32, in a block

_BLOCK = 1 << 14  # columns of a block, for up to 128 vectors
_LEAST_BLOCK = 1 << 11  # below, calls take longer than their work
_BLOCK_VALUES = 1 << 21
_MATRIX_VALUES = 1 << 19  # of a block that is multiplied by itself
_SPANS = 4  # of blocks, each of which a thread multiplies

# Squared distances from the common centre, over those between vectors, up to which rounding of
# float32 sums does no harm.
_MOST_CANCELLED = 256.0
_CENTRES = 3  # that are tried


def slices(size: int, vectors: int = 1, values: int = _BLOCK_VALUES) -> Iterator[slice]:
    """Return the blocks of columns for so many vectors of `size` values."""
    step = max(_LEAST_BLOCK, min(_BLOCK, values // max(vectors, 1)))
    return (slice(at, min(at + step, size)) for at in range(0, size, step))


def short_slices(size: int) -> Iterator[slice]:
    """Return blocks of one vector whose inner products BLAS does not spread over threads."""
    return slices(size, _BLOCK_VALUES >> 13)


def flattened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor as a vector, without a copy where it stands in one piece."""
    return [tensor.reshape(-1) for tensor in tensors]


def weighted_mean(
    tensors: Sequence[Tensor], weights: Sequence[float], scales: Sequence[float] | None = None
) -> Tensor:
    """Return the mean of tensors, each times its scale, by weights of 0 or more, not all 0.

    It is a running mean, m + (x - m) w / (sum of w so far): what all agree on stays as it is, to
    the bit.
    """
    rows = [
        (row, weight, np.float32(1 if scales is None else scales[at]))
        for at, (row, weight) in enumerate(zip(flattened(tensors), weights, strict=True))
        if weight > 0
    ]
    parts, total = [], 0.0
    for row, weight, scale in rows:
        total += weight
        parts.append((row, np.float32(weight / total), scale))
    out = np.empty(tensors[0].size, np.float32)
    spare = np.empty(_BLOCK, np.float32)
    first, _, first_scale = parts[0]
    for block in slices(out.size):
        mean = out[block]
        step = spare[: mean.size]
        np.multiply(first[block], first_scale, out=mean)
        for row, weight32, scale in parts[1:]:
            values = row[block] if scale == 1 else np.multiply(row[block], scale, out=step)
            np.subtract(values, mean, out=step)
            np.multiply(step, weight32, out=step)
            np.add(mean, step, out=mean)
    return out.reshape(tensors[0].shape)


def dot(one: Tensor, other: Tensor) -> float:
    """Return the inner product; blocks are added in float64."""
    rows = flattened((one, other))
    return float(sum(float(rows[0][b] @ rows[1][b]) for b in short_slices(rows[0].size)))


def squared_distances(tensors: Sequence[Tensor]) -> Matrix:
    """Return the squared Euclidean distances of N tensors, float64 [N, N].

    By the Gram matrix of their differences from one of them. That one may lie far from all others,
    whose distances would then drown in its rounding: it is replaced by the one in their midst.
    """
    rows = flattened(tensors)
    centre = 0
    for _ in range(_CENTRES):
        gram = _gram(rows, rows[centre])
        norms = np.diag(gram)
        found = np.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0)
        np.fill_diagonal(found, 0)
        half = (len(rows) + 1) // 2
        near = np.sort(found, axis=1)[:, : half + 1]
        centre = int(near.sum(axis=1).argmin())
        if norms[centre] <= _MOST_CANCELLED * near[centre, -1]:
            break
    return found


def _gram(rows: Sequence[Tensor], centre: Tensor) -> Matrix:
    """Return the products of all pairs of `row - centre`; blocks are added in float64.

    Threads take spans of blocks, whose number is no machine's own, so that the bits are not either:
    while one fetches a block from memory, another has BLAS multiply one.
    """
    step = max(_LEAST_BLOCK, _MATRIX_VALUES // len(rows))
    blocks = range(-(-centre.size // step))

    def summed(number: int) -> Matrix:
        total = np.zeros((len(rows), len(rows)))
        buffer = np.empty((len(rows), min(step, centre.size)), np.float32)
        first, last = (len(blocks) * end // _SPANS for end in (number, number + 1))
        for at in blocks[first:last]:
            block = slice(at * step, min((at + 1) * step, centre.size))
            values = buffer[:, : block.stop - block.start]
            for row, into in zip(rows, values, strict=True):
                np.subtract(row[block], centre[block], out=into)
            total += values @ values.T
        return total

    with ThreadPoolExecutor(max_workers=min(_SPANS, os.cpu_count() or 1)) as threads:
        return sum(threads.map(summed, range(_SPANS)), np.zeros((len(rows), len(rows))))


def between(tensors: Sequence[Tensor], first: int, last: int) -> Tensor:
    """Return, of each column, the mean of the values of ranks `first` to `last`, from 0 on.

    By a sorting network of minima and maxima, of which only the needed part runs.
    """
    count = len(tensors)
    steps = network(count, first, last)
    ranks = range(first, last + 1)
    share = np.float32(1 / len(ranks))

    def combined(rows: list[Tensor], into: Tensor) -> None:
        _exchange(rows, steps)
        kept = [rows[rank] for rank in ranks]
        _scale(kept, share)
        into[:] = _sum(kept)

    return _by_columns(tensors, combined)


def near_median(tensors: Sequence[Tensor], count: int) -> Tensor:
    """Return, of each column, the mean of the `count` values that are nearest to its median."""
    size = len(tensors)
    steps = network(size, 0, size - 1, apart=True)
    share = np.float32(1 / count)
    half = np.float32(0.5)

    def combined(rows: list[Tensor], into: Tensor) -> None:
        _exchange(rows, steps)
        ordered = np.stack(rows[:size])
        middle = ordered[(size - 1) // 2] * half + ordered[size // 2] * half
        # Of a sorted column, the nearest are neighbours: the farther end goes, one by one.
        low = np.zeros(middle.size, np.intp)
        high = np.full(middle.size, size - 1)
        columns = np.arange(middle.size)
        for _ in range(size - count):
            below = middle - ordered[low, columns] > ordered[high, columns] - middle
            low += below
            high -= ~below
        into[:] = 0
        for rank, values in enumerate(ordered):
            inside = (low <= rank) & (rank <= high)
            into += np.where(inside, values * share, np.float32(0))

    return _by_columns(tensors, combined)


def _by_columns(
    tensors: Sequence[Tensor], combined: Callable[[list[Tensor], Tensor], None]
) -> Tensor:
    """Return what `combined` writes for each block, from copies of the rows and a spare one."""
    rows = flattened(tensors)
    out = np.empty(rows[0].size, np.float32)
    buffer: Tensor | None = None
    for block in slices(out.size, len(rows)):
        width = block.stop - block.start
        if buffer is None:
            buffer = np.empty((len(rows) + 1, width), np.float32)
        copies = [each[:width] for each in buffer]
        for row, copy in zip(rows, copies, strict=False):
            copy[:] = row[block]
        combined(copies, out[block])
    return out.reshape(tensors[0].shape)


def _exchange(rows: list[Tensor], steps: Sequence[Comparator]) -> None:
    """Run a network on rows in place; the last of them is spare."""
    spare = rows.pop()
    for low, high, least, most in steps:
        one, other = rows[low], rows[high]
        if least and most:
            np.minimum(one, other, out=spare)
            np.maximum(one, other, out=other)
            rows[low], spare = spare, one
        elif least:
            np.minimum(one, other, out=one)
        else:
            np.maximum(one, other, out=other)


def _scale(rows: Sequence[Tensor], by: np.float32) -> None:
    """Multiply before adding, so that sums of large values stay finite."""
    if by != 1:
        for row in rows:
            np.multiply(row, by, out=row)


def _sum(rows: list[Tensor]) -> Tensor:
    """Return the sum, by pairs, in the first row."""
    while len(rows) > 1:
        for one, other in zip(rows[::2], rows[1::2], strict=False):
            np.add(one, other, out=one)
        rows = rows[::2]
    return rows[0]


@lru_cache(maxsize=16)
def network(count: int, first: int, last: int, *, apart: bool = False) -> tuple[Comparator, ...]:
    """Return the comparators that bring the values of ranks `first` to `last` to these wires.

    Batcher's merge exchange (Knuth, The Art of Computer Programming 3, algorithm 5.2.2M), without
    the comparators that those wires don't need. Unless `apart`, they may stand there in any order.
    """
    wires = set(range(first, last + 1))
    exact = wires if apart or first == last else set()  # a wire that needs its own rank
    loose = wires - exact
    kept: list[Comparator] = []
    for low, high in reversed(list(_merge_exchange(count))):
        needs = [wire in loose or wire in exact for wire in (low, high)]
        if not any(needs) or {low, high} <= loose:
            continue  # nobody sees the effect, or any order is as good
        kept.append((low, high, needs[0], needs[1]))
        loose -= {low, high}
        exact |= {low, high}
    return tuple(reversed(kept))


def _merge_exchange(count: int) -> Iterator[tuple[int, int]]:
    if count < 2:
        return
    top = 1 << ((count - 1).bit_length() - 1)
    stride = top
    while stride:
        rest, skip, distance = 0, top, stride
        while distance:
            for wire in range(count - distance):
                if wire & stride == rest:
                    yield wire, wire + distance
            distance, skip, rest = skip - stride, skip >> 1, stride
        stride >>= 1
