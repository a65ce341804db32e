"""The base of codecs: the form of a code, what is taken and refused, and error feedback.

Rule: a code says all that its decoder needs (codec, shape, settings), and a decoder believes none
of it: the header is bounded, the shape has at most `max_values` values, and the body has exactly
the bytes that both say, before any memory is taken for the tensor. What a code stands for is
finite. So nodes whose settings differ understand each other, and a lying peer is refused by name.

Error feedback (Karimireddy et al., 2019, arXiv:1901.09847, algorithm 1): what a code lost of a
tensor x is added to the next one,

    v = x + e,   send C(v),   e' = v - C(v).

The memory e belongs to a stream of tensors: one Encode op of the program, for one peer that asked
(none where this node began the execution). So the uses of a slot never mix.
"""

from __future__ import annotations

import math
import struct
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt

from bbnode.components.contracts import CarriedOver, Codec, OpContext, offload
from bbnode.components.errors import CodeRefused, NotEncodable
from bbnode.ir import codec, types
from bbnode.ir.decoding import Boundary, shown, unpack
from bbnode.ir.errors import DecodeError
from bbnode.ir.values import Composite, Value

Floats: TypeAlias = npt.NDArray[np.float32]
Body: TypeAlias = npt.NDArray[np.uint8]
Settings: TypeAlias = tuple[int, ...]

BYTES = types.TENSOR_UINT8

_MAGIC = b"bc"
_PREFIX = struct.Struct("<2sH")  # magic, bytes of the header
_MAX_HEADER_BYTES = (1 << 16) - 1  # what the prefix can say
_MAX_HEADER_VALUES = 1 << 14
_MAX_RANK = 32
_MAX_SETTING = (1 << 63) - 1
# Larger numbers are refused: a scale times a level of one must not overflow.
LARGEST = 1e38
# Of a tensor whose size nobody says: 256 MiB of float32, and so many for each byte of its code, so
# that memory costs a sender something. A code that says more in fewer bytes is filled up.
_MAX_VALUES = 1 << 26
_VALUES_PER_BYTE = 256
_SMALL_VALUES = 1 << 16
# Below, a call takes less than handing it to a thread does.
_QUICK_VALUES = 16_384


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """Settings of every codec of floats.

    Attributes:
        max_values: of one tensor, in either direction; a code that stands for more is refused.
            Without: as many as the program declares for what is decoded, else 256 for each byte of
            the code (65,536 for a small one), and 2^26 at most.
        error_feedback: add what a code lost to the next tensor of its stream. Only for tensors of
            one shape that are summed up at the other end: gradients, deltas of weights.
        max_streams: error memories that are kept, each as large as a tensor; the one that was used
            longest ago goes, and its stream starts again at zero.
    """

    max_values: int | None = None
    error_feedback: bool = False
    max_streams: int = 8


@dataclass(frozen=True, kw_only=True)
class FeedbackConfig(CodecConfig):
    """Settings of a codec of deltas, which leaves out much of a tensor; see `CodecConfig`."""

    error_feedback: bool = True


@dataclass(frozen=True, slots=True)
class Stream:
    """State of one stream of tensors; its arrays are replaced, never changed.

    Attributes:
        count: tensors that were encoded.
        shape: of each.
        error: e, the shape flat; None without error feedback.
        kept: what else the codec keeps from one tensor to the next.
    """

    count: int = 0
    shape: tuple[int, ...] | None = None
    error: Floats | None = None
    kept: Mapping[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Header:
    """The head of a code: the shape of the tensor, and what its codec has to know."""

    shape: tuple[int, ...]
    settings: Settings

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


def is_small(_component: Codec, tensor: Value) -> bool:
    """Return True for a tensor or code that is worked on at once, without a thread."""
    return isinstance(tensor, np.ndarray) and tensor.nbytes <= 4 * _QUICK_VALUES


class BytesCodec(Codec):
    """A codec whose codes are uint8 [B]: a header, and a body."""

    Config: ClassVar[type] = CodecConfig
    config: CodecConfig

    def __init__(self, config: CodecConfig) -> None:
        super().__init__(config)
        most = config.max_values
        self.require(most is None or most >= 1, f"max_values is {most}, below 1")

    def train(self, ctx: OpContext, training: Value) -> None:
        """Fit nothing: this codec has no codebook."""

    def refused(self, reason: str) -> CodeRefused:
        """Return the error for a code that is none of this codec's."""
        return CodeRefused(component=self.TYPE_NAME, reason=reason)

    def check_size(self, tensor: npt.NDArray[Any]) -> None:
        """Raise NotEncodable for a tensor that no decoder of the same settings takes."""
        if tensor.ndim > _MAX_RANK:
            raise NotEncodable(
                f"{self.TYPE_NAME}: a tensor of {tensor.ndim} axes, over {_MAX_RANK}; reshape it"
            )
        most = self.config.max_values or _MAX_VALUES
        if tensor.size > most:
            raise NotEncodable(
                f"{self.TYPE_NAME}: a tensor of {tensor.size} values, over max_values {most}; set "
                "max_values where it is encoded, and where it is decoded"
            )

    def join(self, header: Header, parts: Sequence[npt.NDArray[Any]]) -> Body:
        """Return a code."""
        arrays = [np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in parts]
        head = self._head(header, 0)
        size = _PREFIX.size + len(head) + sum(map(len, arrays))
        if self.config.max_values is None and header.size > _values_of(size):
            fill = -(-header.size // _VALUES_PER_BYTE) - size
            head = self._head(header, fill)
            arrays.append(np.zeros(fill, np.uint8))
        begin = np.frombuffer(_PREFIX.pack(_MAGIC, len(head)) + head, np.uint8)
        made = np.concatenate([begin, *arrays])
        made.flags.writeable = False
        return made

    def _head(self, header: Header, fill: int) -> bytes:
        fields = [self.TYPE_NAME, list(header.shape), list(header.settings)]
        head: bytes = msgpack.packb([*fields, fill] if fill else fields)
        values = 1 + len(fields) + bool(fill) + len(header.shape) + len(header.settings)
        if len(head) > _MAX_HEADER_BYTES or values > _MAX_HEADER_VALUES:
            raise NotEncodable(
                f"{self.TYPE_NAME}: {len(header.settings)} settings of a code take {len(head)} "
                f"bytes, and a header has up to {_MAX_HEADER_VALUES} values in {_MAX_HEADER_BYTES} "
                "bytes; use fewer, larger parts"
            )
        return head

    def open(self, ctx: OpContext, code: Value) -> tuple[Header, Body]:
        """Return the header and the body of a code; CodeRefused for anything else."""
        if not isinstance(code, np.ndarray) or code.dtype != np.uint8 or code.ndim != 1:
            kind = f"{code.dtype} {list(code.shape)}" if isinstance(code, np.ndarray) else (
                type(code).__name__
            )  # fmt: skip
            raise self.refused(f"it is {kind}, and a code is uint8 [B]; encode it with this codec")
        flat = np.ascontiguousarray(code)
        if len(flat) < _PREFIX.size:
            raise self.refused(f"it has {len(flat)} bytes")
        magic, length = _PREFIX.unpack(flat[: _PREFIX.size].tobytes())
        body = flat[_PREFIX.size + length :]
        if magic != _MAGIC or len(flat) < _PREFIX.size + length:
            raise self.refused("it has no header")
        raw = flat[_PREFIX.size : _PREFIX.size + length].tobytes()
        what = f"{self.TYPE_NAME}: the header of the code"
        with Boundary(what, self.refused, passes=CodeRefused):
            head = unpack(
                raw, max_bytes=_MAX_HEADER_BYTES, max_values=_MAX_HEADER_VALUES, max_depth=2
            )
        match head:
            case [str(name), list(shape), list(settings), *fills] if len(fills) <= 1 and all(
                map(_is_count, (*shape, *settings, *fills))
            ):
                fill = sum(fills)
            case _:
                raise self.refused(f"its header is {shown(head)}")
        if name != self.TYPE_NAME:
            raise self.refused(
                f"it is a code of {shown(name)}; bind the same codec to this slot on all peers"
            )
        if len(shape) > _MAX_RANK:
            raise self.refused(f"its tensor has {len(shape)} axes, at most {_MAX_RANK} are taken")
        header = Header(tuple(shape), tuple(settings))
        most, why = self._most(ctx, len(flat))
        if header.size > most or max(shape, default=0) > most:
            raise self.refused(f"its tensor has {shown(header.size)} values, over {why}")
        if fill > len(body):
            raise self.refused(
                f"its body has {len(body)} bytes, and its header says {fill} fill it"
            )
        return header, body[: len(body) - fill]

    def _most(self, ctx: OpContext, code_bytes: int) -> tuple[int, str]:
        """Return how many values a code may stand for, and which bound that is."""
        most, declared = self.config.max_values, ctx.declared_shape
        if most is not None:
            return most, f"max_values {most}"
        if declared is not None and all(isinstance(dim, int) for dim in declared):
            most = math.prod(dim for dim in declared if isinstance(dim, int))
            return most, f"the {most} that the program declares"
        most = _values_of(code_bytes)
        return most, f"the {most} of a code of {code_bytes} bytes; set max_values if it may be"

    def check_body(self, body: Body, wanted: int) -> None:
        """Raise CodeRefused for a body of another length."""
        if len(body) != wanted:
            raise self.refused(f"its body has {len(body)} bytes, and its header says {wanted}")


def part(body: Body, begin: int, count: int, dtype: str) -> npt.NDArray[Any]:
    """Return `count` numbers of a body from a byte on, as an aligned array of their own."""
    kind = np.dtype(dtype)
    return np.frombuffer(body[begin : begin + count * kind.itemsize].tobytes(), kind)


def _values_of(code_bytes: int) -> int:
    """Return how many values a code of so many bytes may stand for, if nobody says."""
    return min(_MAX_VALUES, max(_SMALL_VALUES, _VALUES_PER_BYTE * code_bytes))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SETTING


class FloatCodec(BytesCodec):
    """A codec of float32 tensors of any shape; a subclass says how a flat vector is encoded.

    Others are refused: an op before the codec casts them. So are NaN, infinities and numbers
    beyond 1e38 (`NotEncodable`).
    """

    storage: ClassVar[Mapping[str, types.TypeNode]] = {
        "*": types.TENSOR_FLOAT,
        "Encode.code": BYTES,
        "Decode.code": BYTES,
    }

    def __init__(self, config: CodecConfig) -> None:
        super().__init__(config)
        self.require(config.max_streams >= 1, f"max_streams is {config.max_streams}, below 1")
        self._streams: dict[tuple[str, str], Stream] = {}  # used longest ago first

    @abstractmethod
    def compress(
        self, flat: Floats, shape: tuple[int, ...], stream: Stream
    ) -> tuple[Settings, list[npt.NDArray[Any]], Mapping[str, Floats]]:
        """Return settings and parts of the body of a code, and what the stream keeps.

        `flat` is [n], n > 0, of a tensor of `shape`. It must not be changed.
        """

    @abstractmethod
    def body_bytes(self, header: Header) -> int:
        """Return the bytes that a body has; CodeRefused where the settings can't be."""

    @abstractmethod
    def expand(self, header: Header, body: Body) -> Floats:
        """Return the flat vector [n], n > 0, of a code whose body has its length."""

    @offload(unless=is_small)
    def encode(self, ctx: OpContext, tensor: Value) -> Value:
        """Return the code of a float32 tensor, uint8 [B].

        Raises:
            NotEncodable: another dtype, NaN, infinity or beyond 1e38, too many values, or another
                shape than the tensor before it, with error feedback.
        """
        if not isinstance(tensor, np.ndarray) or tensor.dtype != np.float32:
            kind = tensor.dtype if isinstance(tensor, np.ndarray) else type(tensor).__name__
            raise NotEncodable(f"{self.TYPE_NAME} takes float32 and got {kind}; cast it before")
        self.check_size(tensor)
        flat = np.ascontiguousarray(tensor).reshape(-1)
        if not flat.size:
            return self.join(Header(tensor.shape, ()), [])
        key = (ctx.op, "" if ctx.source_peer is None else str(ctx.source_peer))
        before = self._streams.get(key, Stream())
        if self.config.error_feedback and before.error is not None:
            if before.shape != tensor.shape:
                raise NotEncodable(
                    f"{self.TYPE_NAME}, op {ctx.op}: a tensor {list(tensor.shape)} after one of "
                    f"{list(before.shape or ())}, so that what that code lost can't be added; set "
                    "error_feedback = false for tensors that do not continue each other"
                )
            flat = flat + before.error
        self._check_range(flat)
        settings, parts, kept = self.compress(flat, tensor.shape, before)
        header = Header(tensor.shape, settings)
        code = self.join(header, parts)
        if self.config.error_feedback or kept or self.counts:
            error = None
            if self.config.error_feedback:
                body = np.concatenate([np.ascontiguousarray(p).reshape(-1).view(np.uint8)
                                       for p in parts])  # fmt: skip
                error = flat - self._opened(header, body)
            self._streams.pop(key, None)
            self._streams[key] = Stream(before.count + 1, tensor.shape, error, kept)
            while len(self._streams) > self.config.max_streams:
                del self._streams[next(iter(self._streams))]
        return code

    @offload(reads_only=True, unless=is_small)
    def decode(self, ctx: OpContext, code: Value) -> Value:
        """Return the float32 tensor of a code.

        Raises:
            CodeRefused: it is no code of this codec, or stands for NaN, infinity or too much.
        """
        header, body = self.open(ctx, code)
        if not header.size:
            self.check_body(body, 0)
            return np.zeros(header.shape, np.float32)
        self.check_body(body, self.body_bytes(header))
        flat = self._opened(header, body)
        if not np.isfinite(flat).all():
            raise self.refused("it stands for NaN or infinity")
        made = flat.reshape(header.shape)
        made.flags.writeable = False
        return made

    # Set by codecs whose codes depend on the number of the tensor in its stream.
    counts: ClassVar[bool] = False

    def _opened(self, header: Header, body: Body) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused
            return np.asarray(self.expand(header, body), np.float32)

    def _check_range(self, flat: Floats) -> None:
        low, high = float(flat.min()), float(flat.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NotEncodable(f"{self.TYPE_NAME}: the tensor holds NaN or infinity")
        if max(-low, high) > LARGEST:
            raise NotEncodable(f"{self.TYPE_NAME}: the tensor holds a number beyond {LARGEST:g}")

    def setting(self, header: Header, at: int, low: int, high: int) -> int:
        """Return one of a code's settings; CodeRefused where it is missing or out of range."""
        found = header.settings[at] if at < len(header.settings) else None
        if found is None or not low <= found <= high:
            raise self.refused(f"its setting {at} is {shown(found)}, not {low} to {high}")
        return found

    # --- state ----------------------------------------------------------------------------

    def freeze(self) -> Callable[[], bytes]:
        """Capture the state; the arrays in it are never changed."""
        held, streams = self.held(), dict(self._streams)
        return lambda: _saved(held, streams)

    def serialize(self) -> bytes:
        """Return the streams and what else is held; empty when there is nothing."""
        return _saved(self.held(), self._streams)

    def restore(self, data: bytes) -> None:
        """Load a saved state; ComponentError for bytes of anything else."""
        if data:
            with self.restoring():
                held, self._streams = _loaded(data)
                self.hold(held)

    def carry_over(self, data: bytes) -> CarriedOver:
        """Load a codebook; error memories are of the other version's tensors, and are left."""
        self.restore(data)
        left = {" of ".join(filter(None, key)): "begins anew" for key in self._streams}
        self._streams = {}
        return CarriedOver(taken=tuple(self.held()), left=left)

    def held(self) -> Mapping[str, Floats]:
        """Return what is kept besides streams: a codebook."""
        return {}

    def hold(self, held: Mapping[str, Floats]) -> None:
        """Take what `held` returned; raises ValueError where it can't be."""
        if held:
            raise ValueError(f"{self.TYPE_NAME} keeps no {', '.join(held)}")


def _saved(held: Mapping[str, Floats], streams: Mapping[tuple[str, str], Stream]) -> bytes:
    if not held and not streams:
        return b""
    rows = []
    for (op, peer), stream in streams.items():
        shape = None if stream.shape is None else list(stream.shape)
        about = msgpack.packb([op, peer, stream.count, shape, list(stream.kept)])
        error = () if stream.error is None else (stream.error,)
        rows.append(Composite((about, Composite(error), Composite(stream.kept.values()))))
    return codec.encode_value(
        Composite((msgpack.packb(list(held)), Composite(held.values()), Composite(rows)))
    )


def _loaded(data: bytes) -> tuple[dict[str, Floats], dict[tuple[str, str], Stream]]:
    names, held, rows = codec.decode_value(types.COMPOSITE, data)
    streams = {}
    for about, errors, kept in rows:
        op, peer, count, dims, kept_names = msgpack.unpackb(about)
        shape = None if dims is None else tuple(map(int, dims))
        error = _floats(errors[0]) if errors else None
        if error is not None and error.shape != (math.prod(shape or ()),):
            raise DecodeError("an error memory is not of its tensor's size")
        arrays = dict(zip(kept_names, map(_floats, kept), strict=True))
        streams[(str(op), str(peer))] = Stream(int(count), shape, error, arrays)
    return dict(zip(msgpack.unpackb(names), map(_floats, held), strict=True)), streams


def _floats(value: Value) -> Floats:
    if not isinstance(value, np.ndarray) or value.dtype != np.float32:
        raise DecodeError("a saved array is not float32")
    return value
