"""The hello: its encoding, and the checks on one from a stranger.

Rule: one msgpack map with exactly the fields of its `protocol_version`, in any order, each of its
exact type and within its bound. Anything else is a HelloError, whatever a later version may add:
versions are told apart by `protocol_version` and by the protocol id of the stream. We send the
newest and take the older ones, whose missing fields have the defaults of `Hello`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

import msgpack
from multiaddr import Multiaddr

from bbnode.ir.address import address_from_bytes
from bbnode.ir.caps import (
    MAX_ADDRESS_BYTES,
    MAX_AGENT_BYTES,
    MAX_CLAIMED_ADDRESSES,
    MAX_CREDENTIALS_BYTES,
    MAX_HELLO_BYTES,
    MAX_MESSAGE_DEPTH,
    MAX_NAME_BYTES,
    MAX_NAMES,
)
from bbnode.ir.crossing import decode_crossings
from bbnode.ir.decoding import Boundary, shown, unpack
from bbnode.transport.base import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, Hello
from bbnode.transport.errors import HelloError

# Eleven names of fields with their values, and the items of the three lists among them.
_MAX_VALUES = 32 + 2 * MAX_NAMES + MAX_CLAIMED_ADDRESSES


def encode_hello(hello: Hello) -> bytes:
    """Encode a hello; raises HelloError if it is over a bound."""
    values = {each.name: getattr(hello, each.name) for each in fields(hello)}
    values["listen_addresses"] = [each.to_bytes() for each in hello.listen_addresses]
    raw: bytes = msgpack.packb(values)
    decode_hello(raw)
    return raw


def decode_hello(raw: bytes) -> Hello:
    """Decode a hello; raises HelloError for anything else."""
    with Boundary("the hello is malformed", HelloError):
        values = unpack(
            raw, max_bytes=MAX_HELLO_BYTES, max_values=_MAX_VALUES, max_depth=MAX_MESSAGE_DEPTH
        )
        if not isinstance(values, dict):
            raise HelloError("the hello is not a map")
        version = _version("protocol_version", values.get("protocol_version"))
        checks = {n: check for n, check in _FIELDS.items() if _SINCE.get(n, 0) <= version}
        if values.keys() != checks.keys():
            raise HelloError("the hello is not a map with exactly the fields of a hello")
        return Hello(**{name: check(name, values[name]) for name, check in checks.items()})


_Check = Callable[[str, Any], Any]


def _integer(name: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise HelloError(f"{name} in the hello is not a whole number")
    return value


def _version(name: str, value: Any) -> int:
    if not OLDEST_PROTOCOL_VERSION <= _integer(name, value) <= PROTOCOL_VERSION:
        raise HelloError(
            f"the peer speaks protocol version {value}, we speak {PROTOCOL_VERSION}; "
            "run the same release on both sides"
        )
    return int(value)


def _crossings(name: str, value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise HelloError(f"{name} in the hello is not bytes")
    with Boundary(f"{name} in the hello is malformed", HelloError):
        decode_crossings(value)
    return value


def _credentials(name: str, value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) > MAX_CREDENTIALS_BYTES:
        raise HelloError(
            f"{name} in the hello is not bytes, at most {MAX_CREDENTIALS_BYTES} of them"
        )
    return value


def _text(max_bytes: int, pattern: str = "") -> _Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value.encode("utf-8", "replace")) > max_bytes:
            raise HelloError(f"{name} in the hello is not text of at most {max_bytes} bytes")
        if not value.isprintable():
            # It is shown in logs and tables.
            raise HelloError(f"{name} in the hello holds control characters")
        if pattern and not re.fullmatch(pattern, value):
            raise HelloError(f"{name} in the hello is malformed")
        return value

    return check


def _address(_name: str, value: Any) -> Multiaddr:
    if not isinstance(value, bytes) or not value:
        raise HelloError(f"an address in the hello is not bytes but {shown(value)}")
    with Boundary(
        f"an address in the hello is malformed, or over {MAX_ADDRESS_BYTES} bytes", HelloError
    ):
        return address_from_bytes(value)


def _list(count: int, check: _Check) -> _Check:
    def check_all(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > count:
            raise HelloError(f"{name} in the hello is not a list of at most {count}")
        return tuple(check(name, item) for item in value)

    return check_all


_FIELDS: Final[dict[str, _Check]] = {
    "protocol_version": _version,
    "agent_version": _text(MAX_AGENT_BYTES),
    "artifact_sha256": _text(MAX_NAME_BYTES, "([0-9a-f]{64})?"),
    "classes": _list(MAX_NAMES, _text(MAX_NAME_BYTES)),
    "targets": _list(MAX_NAMES, _text(MAX_NAME_BYTES)),
    "listen_addresses": _list(MAX_CLAIMED_ADDRESSES, _address),
    "session_id": _text(MAX_NAME_BYTES, "[0-9a-f]{16}"),
    "link": _integer,
    "exchange": _integer,
    "credentials": _credentials,
    "crossings": _crossings,
}
# The protocol version that brought a field.
_SINCE: Final = {"crossings": 2}
