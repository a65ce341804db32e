"""The hello: its bytes, and what is accepted of a stranger.

Rule: one msgpack map with exactly the fields of `Hello`, in any order, each of its exact type
and within its bound. Anything else is a HelloError, whatever a later version may add:
versions are told apart by `protocol_version` and by the protocol id of the stream.
"""

from __future__ import annotations

import re
from typing import Any

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
from bbnode.ir.decoding import Boundary, shown, unpack
from bbnode.transport.base import PROTOCOL_VERSION, Hello
from bbnode.transport.errors import HelloError

# Ten names of fields with their values, and what the three lists among them hold.
_MAX_VALUES = 32 + 2 * MAX_NAMES + MAX_CLAIMED_ADDRESSES

_SHA256 = re.compile(r"([0-9a-f]{64})?\Z")
_SESSION = re.compile(r"[0-9a-f]{16}\Z")
_FIELDS = frozenset(
    {
        "protocol_version",
        "agent_version",
        "artifact_sha256",
        "classes",
        "targets",
        "listen_addresses",
        "session_id",
        "link",
        "exchange",
        "credentials",
    }
)


def encode_hello(hello: Hello) -> bytes:
    """Encode a hello; raises HelloError when it is over a bound itself."""
    raw: bytes = msgpack.packb(
        {
            "protocol_version": hello.protocol_version,
            "agent_version": hello.agent_version,
            "artifact_sha256": hello.artifact_sha256,
            "classes": list(hello.classes),
            "targets": list(hello.targets),
            "listen_addresses": [a.to_bytes() for a in hello.listen_addresses],
            "session_id": hello.session_id,
            "link": hello.link,
            "exchange": hello.exchange,
            "credentials": hello.credentials,
        }
    )
    decode_hello(raw)
    return raw


def decode_hello(raw: bytes) -> Hello:
    """Decode a hello; raises HelloError for anything else."""
    with Boundary("the hello is malformed", HelloError):
        return _hello_of(
            unpack(
                raw,
                max_bytes=MAX_HELLO_BYTES,
                max_values=_MAX_VALUES,
                max_depth=MAX_MESSAGE_DEPTH,
            )
        )


def _hello_of(fields: Any) -> Hello:
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise HelloError("the hello is not a map with exactly the fields of a hello")
    version = _integer(fields, "protocol_version")
    if version != PROTOCOL_VERSION:
        raise HelloError(
            f"the peer speaks protocol version {version}, we speak {PROTOCOL_VERSION}; "
            "run the same release on both sides"
        )
    return Hello(
        protocol_version=version,
        agent_version=_text("agent_version", fields["agent_version"], MAX_AGENT_BYTES),
        artifact_sha256=_matching(fields, "artifact_sha256", _SHA256),
        classes=_names(fields, "classes"),
        targets=_names(fields, "targets"),
        listen_addresses=tuple(
            _address(item) for item in _items(fields, "listen_addresses", MAX_CLAIMED_ADDRESSES)
        ),
        session_id=_matching(fields, "session_id", _SESSION),
        link=_integer(fields, "link"),
        exchange=_integer(fields, "exchange"),
        credentials=_bytes(fields, "credentials", MAX_CREDENTIALS_BYTES),
    )


def _integer(fields: dict[str, Any], name: str) -> int:
    value = fields[name]
    if type(value) is not int or value < 0:
        raise HelloError(f"{name} in the hello is not a whole number")
    return value


def _bytes(fields: dict[str, Any], name: str, max_bytes: int) -> bytes:
    value = fields[name]
    if not isinstance(value, bytes) or len(value) > max_bytes:
        raise HelloError(f"{name} in the hello is not bytes, at most {max_bytes} of them")
    return value


def _text(name: str, value: object, max_bytes: int) -> str:
    if not isinstance(value, str) or len(value.encode("utf-8", "replace")) > max_bytes:
        raise HelloError(f"{name} in the hello is not text of at most {max_bytes} bytes")
    if not value.isprintable():
        # It ends up in logs and tables.
        raise HelloError(f"{name} in the hello holds control characters")
    return value


def _matching(fields: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    text = _text(name, fields[name], MAX_NAME_BYTES)
    if not pattern.match(text):
        raise HelloError(f"{name} in the hello is malformed")
    return text


def _items(fields: dict[str, Any], name: str, count: int) -> list[object]:
    value = fields[name]
    if not isinstance(value, list) or len(value) > count:
        raise HelloError(f"{name} in the hello is not a list of at most {count}")
    return value


def _names(fields: dict[str, Any], name: str) -> tuple[str, ...]:
    return tuple(_text(name, item, MAX_NAME_BYTES) for item in _items(fields, name, MAX_NAMES))


def _address(value: object) -> Multiaddr:
    if not isinstance(value, bytes) or not value:
        raise HelloError(f"an address in the hello is not bytes but {shown(value)}")
    with Boundary(
        f"an address in the hello is none, or is over {MAX_ADDRESS_BYTES} bytes", HelloError
    ):
        return address_from_bytes(value)
