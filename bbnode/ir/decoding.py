"""The boundary of all decoders of untrusted bytes: typed errors, bounds, and msgpack.

Rule: every exception of a decoder leaves it as a typed error with a short message. Data of a peer
is displayed with `shown`, never with `repr` or `str`, which recurse without a bound. msgpack is
read only here: a scan of its bytes counts values and depth before objects are created, since
msgpack's own limits apply to each array separately, but not to their sum or depth (one MiB of empty
arrays becomes 60 MiB of lists).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import msgpack

from bbnode.ir.caps import MAX_PAYLOAD_ADDRESS_BYTES, MAX_VALUES
from bbnode.ir.errors import AllocationFailed, DecodeError

Buffer = bytes | memoryview


_MAX_SHOWN_CHARS = 80  # of a text in a message: a line of a log
_MAX_SHOWN_BYTES = 16
_MAX_REASON_CHARS = 400


# --- showing -------------------------------------------------------------------------


def clip(text: str, chars: int = _MAX_SHOWN_CHARS) -> str:
    """Return the beginning of a text, with dots for unprintable characters."""
    cut = text[:chars]
    if not cut.isprintable():
        cut = "".join(c if c.isprintable() else "·" for c in cut)
    return cut if len(text) <= chars else f"{cut}…"


def shown(value: object) -> str:
    """Return a short text for an untrusted value: type, size and beginning."""
    if value is None or type(value) in (bool, float):
        return str(value)
    if type(value) is int:
        return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bit"
    if type(value) is str:
        return f"'{clip(value)}'"
    if isinstance(value, bytes | bytearray | memoryview):
        head = bytes(value[:_MAX_SHOWN_BYTES]).hex()
        return f"{len(value)} bytes {head}{'…' if len(value) > _MAX_SHOWN_BYTES else ''}"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return clip(type(value).__name__)


def reason(error: BaseException) -> str:
    """Return the reason of a decoder's failure, without the data."""
    if isinstance(error, DecodeError):
        return clip(str(error), _MAX_REASON_CHARS)
    if isinstance(error, MemoryError):
        return "there is no memory for it"
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    name = type(error).__name__
    message = error.args[0] if len(error.args) == 1 else None
    return f"{name}: {clip(message)}" if type(message) is str and message else name


# --- the boundary --------------------------------------------------------------------


def refused(
    what: str, error: Exception, make: Callable[[str], Exception] = DecodeError
) -> Exception:
    """Return the error to raise for `error` in a decoder; `what` begins its text."""
    text = f"{what}: {reason(error)}"
    if isinstance(error, MemoryError) and make is DecodeError:
        return AllocationFailed(text)
    return make(text)


class Boundary(ContextDecorator):
    """A decorator or context that turns exceptions in a decoder into the decoder's error.

    `what` begins the message, from which `make` creates the error. Exceptions of the class
    `passes`, by default the class that `make` creates, are raised unchanged.
    """

    __slots__ = ("_make", "_passes", "_what")

    def __init__(
        self,
        what: str,
        make: Callable[[str], Exception] = DecodeError,
        passes: type[Exception] | None = None,
    ) -> None:
        self._what = what
        self._make = make
        if passes is None:
            passes = make if isinstance(make, type) else DecodeError
        self._passes = passes

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        if isinstance(error, Exception) and not isinstance(error, self._passes):
            raise refused(self._what, error, self._make) from error
        return False


# --- budgets -------------------------------------------------------------------------


@dataclass(slots=True)
class Budget:
    """The bounds of one payload, including everything nested in it; None: no bound."""

    values: int | None = MAX_VALUES
    address_bytes: int | None = MAX_PAYLOAD_ADDRESS_BYTES

    def take(self, count: int) -> None:
        """Count values before they are created; raises DecodeError."""
        if self.values is not None:
            self.values -= count
            if self.values < 0:
                raise DecodeError(f"a payload of more than {MAX_VALUES} values")

    def take_addresses(self, size: int) -> None:
        """Count bytes of addresses before they are parsed; raises DecodeError."""
        if self.address_bytes is not None:
            self.address_bytes -= size
            if self.address_bytes < 0:
                raise DecodeError(
                    f"a payload with more than {MAX_PAYLOAD_ADDRESS_BYTES} bytes of addresses"
                )


def unbounded() -> Budget:
    """Return the budget for this node's own data: its snapshots and records."""
    return Budget(None, None)


# --- msgpack -------------------------------------------------------------------------

# The size of a value in bytes by its first byte; 0 if a length follows.
_SIZES = [0] * 256
for _tag in (*range(0x80), *range(0xE0, 0x100)):
    _SIZES[_tag] = 1  # small integers
for _tag in range(0xA0, 0xC0):
    _SIZES[_tag] = 1 + (_tag & 0x1F)  # short text
_SIZES[0xC0] = _SIZES[0xC2] = _SIZES[0xC3] = 1  # nil, false, true
_SIZES[0xCA], _SIZES[0xCB] = 5, 9  # floats
for _tag, _width in zip(range(0xCC, 0xD4), (1, 2, 4, 8) * 2, strict=True):
    _SIZES[_tag] = 1 + _width  # integers
# First byte -> size of the length field after it: for bytes and text, for lists, for maps.
_LONG = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


def count_values(data: Buffer, *, max_depth: int, max_values: int) -> int:
    """Return the number of values in the msgpack of `data`, nested ones included, by scanning.

    Raises DecodeError for more than `max_values`, for lists and maps that nest deeper than
    `max_depth`, for ext types, and for bytes that are cut short or left over.
    """
    at, values, left = 0, 1, 1
    above: list[int] = []  # values that are still to come, of each list around this one
    size = len(data)
    while True:
        while left:
            left -= 1
            if at >= size:
                raise DecodeError(f"msgpack that is cut short after {size} bytes")
            tag = data[at]
            step = _SIZES[tag]
            if step:
                at += step
                continue
            if tag in _LONG:
                start = at + 1 + _LONG[tag]
                at = start + int.from_bytes(data[at + 1 : start], "big")
                continue
            if 0x80 <= tag <= 0x9F:
                count, at = tag & 0xF, at + 1
                is_map = tag < 0x90
            elif tag in _LISTS or tag in _MAPS:
                is_map = tag in _MAPS
                start = at + 1 + (_MAPS if is_map else _LISTS)[tag]
                count, at = int.from_bytes(data[at + 1 : start], "big"), start
            else:
                raise DecodeError(f"msgpack of a kind that is not used (0x{tag:02x})")
            if is_map:
                count *= 2
            values += count
            if values > max_values or count > size - at:
                raise DecodeError(f"msgpack of {size} bytes with more than {max_values} values")
            if len(above) >= max_depth:
                raise DecodeError(f"msgpack that nests deeper than {max_depth}")
            above.append(left)
            left = count
        if not above:
            break
        left = above.pop()
    if at != size:
        left_over = "is cut short" if at > size else f"continues after byte {at}"
        raise DecodeError(f"msgpack of {size} bytes that {left_over}")
    return values


def unpack(data: Buffer, *, max_bytes: int, max_values: int, max_depth: int) -> Any:
    """Return the one msgpack value in `data`: scalars, lists and maps; raises DecodeError."""
    if len(data) > max_bytes:
        raise DecodeError(f"msgpack of {len(data)} bytes; at most {max_bytes} are taken")
    most = 0
    try:
        if max_depth:
            most = count_values(data, max_depth=max_depth, max_values=max_values)
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_ext_len=0,
            max_array_len=most,
            max_map_len=most,
        )
    except DecodeError:
        raise
    except Exception as error:
        raise refused(f"{len(data)} bytes of msgpack", error) from error


def unpack_scalar(data: Buffer, *, max_bytes: int) -> Any:
    """Return the one msgpack scalar in `data` (or an empty list or map); raises DecodeError."""
    return unpack(data, max_bytes=max_bytes, max_values=0, max_depth=0)
