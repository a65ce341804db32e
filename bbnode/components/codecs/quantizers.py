"""Quantisers of vectors: codebooks that are trained, or that travel with the code.

Rule: a trained quantiser sends the fingerprint of its codebook, and decodes only codes of that one:
train all sides on the same examples. An untrained one trains on each tensor, and its codes carry
the codebook.
"""

from __future__ import annotations

import hashlib
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
from bbnode.components.contracts import OpContext, offload
from bbnode.components.errors import NotEncodable
from bbnode.components.registry import register_component
from bbnode.ir.values import Value

_FLOAT_BYTES = 4
_MAX_PART = 1 << 16
_MAX_WORDS = 256  # a code is one byte
_MAX_DIMENSIONS = 1 << 20
_MAX_SEED = (1 << 63) - 1
_SAMPLE = 16_384  # parts of vectors that a codebook is trained on at most; FAISS takes 256 a word
_MANY_ROWS = 4096
_ROWS_AT_ONCE = 1 << 15  # 32 MiB of distances


@dataclass(frozen=True, kw_only=True)
class ScalarQuantizerConfig(CodecConfig):
    """Settings of `ScalarQuantizer`: those of every codec."""


@dataclass(frozen=True, kw_only=True)
class ProductQuantizerConfig(CodecConfig):
    """Settings of `ProductQuantizer`; those of every codec, and:

    Attributes:
        part: values of a vector that become one byte; it divides the length of vectors.
        words: of each codebook, 1 to 256.
        iterations: of k-means.
        seed: of the words that k-means begins with, 0 or more.
    """

    part: int = 4
    words: int = 256
    iterations: int = 10
    seed: int = 0


class VectorQuantizer(FloatCodec):
    """A codec with a codebook, float32 of two or three axes."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._book: Floats | None = None
        self._id = 0

    @abstractmethod
    def fit(self, vectors: Floats) -> Floats:
        """Return the codebook of vectors [N, D], N > 0."""

    @abstractmethod
    def book_shape(self, header: Header) -> tuple[int, ...]:
        """Return the shape of the codebook that a header tells of; CodeRefused if it can't be."""

    @abstractmethod
    def code_bytes(self, header: Header) -> int:
        """Return the bytes of the codes of all vectors."""

    @abstractmethod
    def codes(self, vectors: Floats, book: Floats) -> npt.NDArray[np.uint8]:
        """Return the codes of vectors [N, D]."""

    @abstractmethod
    def vectors(self, codes: Body, book: Floats, n: int) -> Floats:
        """Return the n values that codes stand for."""

    @abstractmethod
    def rows(self, flat: Floats, shape: tuple[int, ...]) -> Floats:
        """Return a tensor as vectors [N, D]."""

    @property
    def is_trained(self) -> bool:
        """Return True if it has a codebook of its own."""
        return self._book is not None

    @offload
    def train(self, ctx: OpContext, training: Value) -> None:
        """Fit the codebook to examples [N, D], float32; NotEncodable for anything else."""
        if not isinstance(training, np.ndarray) or training.dtype != np.float32:
            raise NotEncodable(f"{self.TYPE_NAME} trains on float32 [N, D]")
        if training.ndim != 2 or not training.size:
            raise NotEncodable(f"{self.TYPE_NAME} trains on [N, D], not {list(training.shape)}")
        self._check_range(training)
        book = self.fit_examples(training)
        self._check_book(book)
        self._take(book)

    def fit_examples(self, examples: Floats) -> Floats:
        """Return the codebook of examples [N, D], the same one on every machine."""
        return self.fit(examples)

    def compress(
        self, flat: Floats, shape: tuple[int, ...], stream: Stream
    ) -> tuple[Settings, list[npt.NDArray[Any]], Mapping[str, Floats]]:
        """Return the codebook's shape and fingerprint, the codes, and a codebook of their own."""
        rows = self.rows(flat, shape)
        book = self._book
        if book is None:
            made = self.fit(rows)
            self._check_book(made)
            return (0, *made.shape), [made.astype("<f4", copy=False), self.codes(rows, made)], {}
        self._check_fit(rows, book)
        return (self._id, *book.shape), [self.codes(rows, book)], {}

    def body_bytes(self, header: Header) -> int:
        """Return the bytes of the codebook, if it comes along, and of the codes."""
        own = self.setting(header, 0, 0, _MAX_SEED)
        size = int(np.prod(self.book_shape(header), dtype=object))
        if own and own != self._id:
            whose = "another codebook" if self.is_trained else "a codebook that is not here"
            raise self.refused(f"it is of {whose}; train all sides on the same examples")
        return (0 if own else _FLOAT_BYTES * size) + self.code_bytes(header)

    def expand(self, header: Header, body: Body) -> Floats:
        """Return what the codes stand for."""
        book, begin = self._book, 0
        if not header.settings[0]:
            shape = self.book_shape(header)
            size = int(np.prod(shape))
            book, begin = part(body, 0, size, "<f4").reshape(shape), _FLOAT_BYTES * size
        if book is None:
            raise self.refused("it is of a codebook that is not here")
        return self.vectors(body[begin:], book, header.size)

    def held(self) -> Mapping[str, Floats]:
        """Return the codebook."""
        return {} if self._book is None else {"codebook": self._book}

    def hold(self, held: Mapping[str, Floats]) -> None:
        """Take a saved codebook."""
        self._book, self._id = None, 0
        if held:
            self._take(held["codebook"])

    def _take(self, book: Floats) -> None:
        self._book = np.ascontiguousarray(book)
        told = f"{book.shape}".encode() + self._book.astype("<f4").tobytes()
        # 62 bits, and never 0, which stands for no codebook.
        self._id = (int.from_bytes(hashlib.sha256(told).digest()[:8], "big") >> 2) | 1

    def _check_book(self, book: Floats) -> None:
        if max(book.shape) > _MAX_DIMENSIONS:
            raise NotEncodable(
                f"{self.TYPE_NAME}: a codebook of {max(book.shape)} dimensions or parts, and a "
                f"code tells of up to {_MAX_DIMENSIONS}; reshape the vectors to shorter ones"
            )

    def _check_fit(self, rows: Floats, book: Floats) -> None:
        width = self.width(book)
        if rows.shape[1] != width:
            raise NotEncodable(
                f"{self.TYPE_NAME} is trained for vectors of {width} values and got "
                f"{rows.shape[1]}; train it on such vectors"
            )

    @abstractmethod
    def width(self, book: Floats) -> int:
        """Return the length of the vectors that a codebook is for."""


@register_component
class ScalarQuantizer(VectorQuantizer):
    """One byte a value, between the least and the largest value of its dimension.

    Dimensions are those of the last axis of [..., D]; a tensor of one axis has one dimension if it
    is untrained. |error| at most (largest - least) / 510, for values within these bounds; others
    are cut to them.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.ScalarQuantizer"
    Config: ClassVar[type] = ScalarQuantizerConfig

    def fit(self, vectors: Floats) -> Floats:
        """Return least value and step of each dimension, [2, D]."""
        low = vectors.min(axis=0)
        high = vectors.max(axis=0)
        return np.stack([low, high / np.float32(255) - low / np.float32(255)])

    def rows(self, flat: Floats, shape: tuple[int, ...]) -> Floats:
        """Return [N, D] of the last axis."""
        if len(shape) < 2:
            width = flat.size if self._book is not None and self.width(self._book) > 1 else 1
            return flat.reshape(-1, width)
        return flat.reshape(-1, shape[-1])

    def width(self, book: Floats) -> int:
        """Return D."""
        return int(book.shape[1])

    def book_shape(self, header: Header) -> tuple[int, ...]:
        """Return [2, D]."""
        self.setting(header, 1, 2, 2)
        width = self.setting(header, 2, 1, _MAX_DIMENSIONS)
        if header.size % width:
            raise self.refused(f"its tensor of {header.size} values has no vectors of {width}")
        return (2, width)

    def code_bytes(self, header: Header) -> int:
        """Return a byte a value."""
        return header.size

    def codes(self, vectors: Floats, book: Floats) -> npt.NDArray[np.uint8]:
        """Return the number of the step that is nearest to each value."""
        low, step = book
        with np.errstate(over="ignore", under="ignore"):
            unit = (vectors - low) / np.where(step > 0, step, np.float32(1))
        found: npt.NDArray[np.uint8] = np.rint(np.clip(unit, 0, 255)).astype(np.uint8)
        return found

    def vectors(self, codes: Body, book: Floats, n: int) -> Floats:
        """Return least value plus steps."""
        low, step = book
        made: Floats = low + codes.reshape(-1, book.shape[1]) * step
        return made.reshape(-1)


@register_component
class ProductQuantizer(VectorQuantizer):
    """One byte for each part of a vector: the number of the nearest word of that part's codebook.

    Jegou, Douze and Schmid, 2011 (doi:10.1109/TPAMI.2010.57). Vectors [..., D] have D / `part`
    codebooks, trained by k-means. An untrained one takes a tensor of any shape as one sequence of
    parts, with one codebook.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.ProductQuantizer"
    Config: ClassVar[type] = ProductQuantizerConfig
    config: ProductQuantizerConfig

    def __init__(self, config: ProductQuantizerConfig) -> None:
        super().__init__(config)
        self.require(1 <= config.part <= _MAX_PART, f"part is {config.part}, not 1 to {_MAX_PART}")
        self.require(
            1 <= config.words <= _MAX_WORDS, f"words is {config.words}, not 1 to {_MAX_WORDS}"
        )
        self.require(config.iterations >= 1, f"iterations is {config.iterations}, below 1")
        self.require(0 <= config.seed <= _MAX_SEED, f"seed is {config.seed}, not 0 to 2^63 - 1")

    @offload
    def train(self, ctx: OpContext, training: Value) -> None:
        """Fit one codebook to each part of examples [N, D]."""
        if isinstance(training, np.ndarray) and training.ndim == 2:
            width = training.shape[1]
            if width % self.config.part:
                raise NotEncodable(
                    f"{self.TYPE_NAME}: vectors of {width} values have no parts of "
                    f"{self.config.part}; set part to a divisor of {width}"
                )
        VectorQuantizer.train(self, ctx, training)

    def fit_examples(self, examples: Floats) -> Floats:
        """Return words that all sides find alike, [codebooks, words, part].

        Sums in float32 differ between processors and libraries of linear algebra in a bit here and
        there; in float64 hardly ever so much that a part is nearest to another word.
        """
        wide: Any = examples.astype(np.float64)
        return self.fit(wide).astype(np.float32)

    def fit(self, vectors: Floats) -> Floats:
        """Return the words, [codebooks, words, part]."""
        width = self.config.part
        columns = [vectors[:, i : i + width] for i in range(0, vectors.shape[1], width)]
        return np.stack([self._words(each, number) for number, each in enumerate(columns)])

    def rows(self, flat: Floats, shape: tuple[int, ...]) -> Floats:
        """Return [N, D] of the last axis, or [N, part] of an untrained one."""
        if self._book is None:
            short = -flat.size % self.config.part
            if short:
                flat = np.concatenate([flat, np.zeros(short, np.float32)])
            return flat.reshape(-1, self.config.part)
        return flat.reshape(-1, shape[-1] if shape else 1)

    def width(self, book: Floats) -> int:
        """Return codebooks times the length of a part."""
        return int(book.shape[0] * book.shape[2])

    def book_shape(self, header: Header) -> tuple[int, ...]:
        """Return [codebooks, words, part]."""
        books = self.setting(header, 1, 1, _MAX_DIMENSIONS)
        words = self.setting(header, 2, 1, _MAX_WORDS)
        width = self.setting(header, 3, 1, _MAX_PART)
        if books > 1 and header.size % (books * width):
            raise self.refused(f"its tensor of {header.size} values has no such parts")
        return (books, words, width)

    def code_bytes(self, header: Header) -> int:
        """Return a byte a part."""
        return -(-header.size // header.settings[3])

    def codes(self, vectors: Floats, book: Floats) -> npt.NDArray[np.uint8]:
        """Return the number of the nearest word of each part, [N, codebooks]."""
        width = book.shape[2]
        return np.stack(
            [
                _nearest(vectors[:, i * width : (i + 1) * width], each)
                for i, each in enumerate(book)
            ],
            axis=1,
        )

    def vectors(self, codes: Body, book: Floats, n: int) -> Floats:
        """Return the words; CodeRefused for one that is not there."""
        if codes.max() >= book.shape[1]:
            raise self.refused(f"it names a word beyond {book.shape[1]}")
        numbers = codes.reshape(-1, book.shape[0])
        return book[np.arange(book.shape[0]), numbers].reshape(-1)[:n]

    def _words(self, parts: Floats, number: int) -> Floats:
        """Return the words of k-means (Lloyd, 1982); a word without parts stays where it is."""
        bits = np.random.PCG64(np.random.SeedSequence((self.config.seed, number)))
        if len(parts) > _SAMPLE:
            parts = parts[np.sort(np.argsort(bits.random_raw(len(parts)), kind="stable")[:_SAMPLE])]
        count = min(self.config.words, len(parts))
        words = parts[np.argsort(bits.random_raw(len(parts)), kind="stable")[:count]].copy()
        for _ in range(self.config.iterations):
            near = _nearest(parts, words)
            members = np.bincount(near, minlength=count)
            sums = np.stack(
                [np.bincount(near, column, minlength=count) for column in parts.T], axis=1
            )
            moved = members > 0
            words[moved] = (sums[moved] / members[moved, None]).astype(np.float32)
        return words


def _nearest(parts: Floats, words: Floats) -> npt.NDArray[np.uint8]:
    """Return the number of the word that is nearest to each part; of equals the first."""
    # |x - w|^2 without |x|^2. Scaled, so that squares neither overflow nor vanish.
    unit = max(np.abs(words).max(), np.abs(parts).max(initial=0)) or np.float32(1)
    scaled = words / unit
    lengths = np.einsum("ij,ij->i", scaled, scaled)
    found = np.empty(len(parts), np.uint8)
    for begin in range(0, len(parts), _ROWS_AT_ONCE):
        rows = parts[begin : begin + _ROWS_AT_ONCE] / unit
        # Threads of a BLAS cost more than they bring where there are few rows.
        many = len(rows) >= _MANY_ROWS
        products = rows @ scaled.T if many else np.einsum("ij,kj->ik", rows, scaled)
        found[begin : begin + len(rows)] = (lengths - 2 * products).argmin(axis=1)
    return found
