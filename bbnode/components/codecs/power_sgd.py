"""PowerSGD: matrices as products of two thin ones."""

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
from bbnode.components.registry import register_component

_MAX_RANK = 1 << 16
_MAX_MATRICES = 4000  # of one tensor: their sizes are in the header of each code
_FLOAT_BYTES = 4
_MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class PowerSGDCodecConfig(FeedbackConfig):
    """Settings of `PowerSGDCodec`; those of every codec, and:

    Attributes:
        rank: columns of both factors, r.
        matrices: (rows, columns) of the matrices that a flat tensor consists of, in order; what
            comes after them is sent as it is. Empty: the tensor is one matrix, [first axis, the
            others], or, if it has one axis, about a square one, with zeros at its end.
        seed: of the factors that a stream begins with, 0 or more.
    """

    rank: int = 4
    matrices: tuple[tuple[int, int], ...] = ()
    seed: int = 0


@register_component
class PowerSGDCodec(FloatCodec):
    """Rank-r approximation by one step of power iteration, P Q^T of each matrix.

    Vogels et al., 2019, arXiv:1905.13727, algorithm 1: with Q of the last tensor of the stream,
    P = orthogonalised M Q, then Q = M^T P; both factors are sent, r (rows + columns) values. A
    matrix that would get no smaller is sent as it is. The bound backend multiplies.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.PowerSGDCodec"
    Config: ClassVar[type] = PowerSGDCodecConfig
    of_deltas: ClassVar[bool] = True
    depends: ClassVar[Mapping[str, str]] = {"backend": "compute"}
    config: PowerSGDCodecConfig

    def __init__(self, config: PowerSGDCodecConfig) -> None:
        super().__init__(config)
        self.require(1 <= config.rank <= _MAX_RANK, f"rank is {config.rank}, not 1 to {_MAX_RANK}")
        self.require(0 <= config.seed <= _MAX_SEED, f"seed is {config.seed}, not 0 to 2^63 - 1")
        sizes = config.matrices
        self.require(len(sizes) <= _MAX_MATRICES, f"over {_MAX_MATRICES} matrices")
        fits = all(min(each) >= 1 for each in sizes)
        self.require(fits, f"matrices {sizes} are not pairs of 1 or more")

    def compress(
        self, flat: Floats, shape: tuple[int, ...], stream: Stream
    ) -> tuple[Settings, list[npt.NDArray[Any]], Mapping[str, Floats]]:
        """Return rank and sizes, the factors of each matrix, and the last Q of each."""
        sizes = self._sizes(shape, flat.size)
        parts: list[npt.NDArray[Any]] = []
        kept: dict[str, Floats] = {}
        begin = 0
        backend = self.dependency("backend")
        for number, (rows, columns) in enumerate(sizes):
            matrix = flat[begin : begin + rows * columns]
            begin += rows * columns
            whole = np.zeros((rows, columns), np.float32)
            whole.reshape(-1)[: matrix.size] = matrix
            rank = _rank(self.config.rank, rows, columns)
            if not rank:
                parts.append(whole)
                continue
            last = stream.kept.get(str(number))
            if last is None or last.shape != (columns, rank) or not last.any():
                last = _first(columns, rank, self.config.seed, number)
            left, _ = np.linalg.qr(np.asarray(backend.mat_mul(whole, last)))
            left = np.ascontiguousarray(left, np.float32)
            right = np.asarray(backend.mat_mul(np.ascontiguousarray(whole.T), left))
            kept[str(number)] = right
            parts += [left, right]
        parts.append(flat[begin:])
        settings = (self.config.rank, *(each for size in sizes for each in size))
        return settings, [p.astype("<f4", copy=False) for p in parts], kept

    def body_bytes(self, header: Header) -> int:
        """Return the bytes of the factors, and of what is sent as it is."""
        rank = self.setting(header, 0, 1, _MAX_RANK)
        sent = 0
        for rows, columns in self._pairs(header):
            thin = _rank(rank, rows, columns)
            sent += thin * (rows + columns) if thin else rows * columns
        return _FLOAT_BYTES * (sent + max(0, header.size - self._covered(header)))

    def expand(self, header: Header, body: Body) -> Floats:
        """Return the products of the factors."""
        rank, made, at = header.settings[0], [], 0
        backend = self.dependency("backend")
        for rows, columns in self._pairs(header):
            thin = _rank(rank, rows, columns)
            if not thin:
                made.append(part(body, at, rows * columns, "<f4"))
                at += _FLOAT_BYTES * rows * columns
                continue
            left = part(body, at, rows * thin, "<f4").reshape(rows, thin)
            at += left.nbytes
            right = part(body, at, columns * thin, "<f4").reshape(columns, thin)
            at += right.nbytes
            product = backend.mat_mul(left, np.ascontiguousarray(right.T))
            made.append(np.asarray(product).reshape(-1))
        made.append(part(body, at, max(0, header.size - self._covered(header)), "<f4"))
        return np.concatenate(made)[: header.size]

    def _sizes(self, shape: tuple[int, ...], n: int) -> tuple[tuple[int, int], ...]:
        if self.config.matrices:
            covered = sum(rows * columns for rows, columns in self.config.matrices)
            self.require(
                covered <= n, f"matrices have {covered} values, and a tensor only {n}; count again"
            )
            return self.config.matrices
        if len(shape) > 1:
            return ((shape[0], n // shape[0]),)
        rows = math.isqrt(n - 1) + 1
        return ((rows, -(-n // rows)),)

    def _pairs(self, header: Header) -> list[tuple[int, int]]:
        found = header.settings[1:]
        if len(found) % 2 or len(found) > 2 * _MAX_MATRICES or not all(found):
            raise self.refused("its sizes of matrices can't be")
        pairs = list(zip(found[::2], found[1::2], strict=True))
        # One matrix alone may be filled up with zeros, by less than a row of it.
        spare = pairs[0][1] - 1 if len(pairs) == 1 else 0
        if self._covered(header) > header.size + spare:
            raise self.refused("its matrices are larger than its tensor")
        return pairs

    def _covered(self, header: Header) -> int:
        sizes = header.settings[1:]
        return sum(a * b for a, b in zip(sizes[::2], sizes[1::2], strict=True))


def _rank(rank: int, rows: int, columns: int) -> int:
    """Return the columns of the factors of a matrix; 0 where they were no smaller than it."""
    rank = min(rank, rows, columns)
    return rank if rank * (rows + columns) < rows * columns else 0


def _first(columns: int, rank: int, seed: int, number: int) -> Floats:
    """Return the Q that a stream begins with: uniform numbers of -1 to 1."""
    raw = np.random.PCG64(np.random.SeedSequence((seed, number))).random_raw(columns * rank)
    unit = (raw >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
    return unit.reshape(columns, rank)
