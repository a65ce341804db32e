"""The messages between the processes of a SplitNetwork, as msgpack.

Rule: numbers, texts, bytes and None are encoded as themselves; everything else is a list that
begins with its kind. Nothing is pickled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import msgpack

from bbnode.engine import Limits, steps
from bbnode.engine.node import ExecutionInfo
from bbnode.engine.suspensions import Waiting
from bbnode.ir import codec, decoding, types, values
from bbnode.ir.errors import BbnodeError, DecodeError
from bbnode.sim.errors import NotSplit
from bbnode.sim.models import Clock, LinkModel

_SCALARS: Final = (bool, int, float, str, bytes)
_ROWS: Final = {
    cls.__name__: cls
    for cls in (*vars(steps).values(), Waiting, ExecutionInfo, LinkModel, Clock, Limits)
    if isinstance(cls, type) and dataclasses.is_dataclass(cls)
}
# The other end is a process of the same simulation: the bounds only catch garbage.
_MAX_BYTES: Final = 1 << 40
_MAX_VALUES: Final = 1 << 30
_MAX_DEPTH: Final = 64


def pack(item: Any) -> bytes:
    """Encode a message. Raises NotSplit for an object that can't leave its process."""
    try:
        packed: bytes = msgpack.packb(_plain(item))
    except (TypeError, ValueError, OverflowError, BbnodeError) as error:
        raise NotSplit(f"it can't be sent to another process: {error}") from error
    return packed


def unpack(data: bytes) -> Any:
    """Decode a message; lists become tuples. Raises DecodeError."""
    return _whole(
        decoding.unpack(data, max_bytes=_MAX_BYTES, max_values=_MAX_VALUES, max_depth=_MAX_DEPTH)
    )


def _plain(item: Any) -> Any:
    cls = type(item)
    if item is None or cls in _SCALARS:
        return item
    if cls is list or cls is tuple:
        return ["list", *map(_plain, item)]
    if _ROWS.get(cls.__name__) is cls:
        return ["row", cls.__name__, *(_plain(getattr(item, name)) for name in _names(cls))]
    node = values.type_of_class(cls)
    if node is None and isinstance(item, Mapping):
        return ["map", *(_plain(each) for pair in item.items() for each in pair)]
    node = node or values.type_of(item)
    return ["value", node.wire_hash, codec.encode_value(item)]


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _whole(plain: Any) -> Any:
    if type(plain) is not list:
        return plain
    what, *rest = plain
    if what == "list":
        return tuple(map(_whole, rest))
    if what == "row":
        cls = _ROWS[rest[0]]
        return cls(**dict(zip(_names(cls), map(_whole, rest[1:]), strict=True)))
    if what == "map":
        each = map(_whole, rest)
        return dict(zip(each, each, strict=True))
    node = types.type_by_hash(rest[0])
    if what != "value" or node is None:
        raise DecodeError(f"a message of the simulator with a {what!r}")
    return codec.decode_value(node, rest[1], decoding.unbounded())
