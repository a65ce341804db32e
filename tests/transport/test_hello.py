"""The hello: round trip, bounds, and strangers."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.ir.caps import (
    MAX_AGENT_BYTES,
    MAX_CLAIMED_ADDRESSES,
    MAX_CREDENTIALS_BYTES,
    MAX_CROSSINGS_BYTES,
    MAX_HELLO_BYTES,
    MAX_NAME_BYTES,
    MAX_NAMES,
)
from bbnode.ir.crossing import Crossing, encode_crossings
from bbnode.transport.base import PROTOCOL_VERSION, Hello
from bbnode.transport.errors import HelloError
from bbnode.transport.links.hello import decode_hello, encode_hello

_HELLO = Hello(
    agent_version="bbnode/0.1.0",
    artifact_sha256="ab" * 32,
    classes=("client",),
    targets=("client#0123456789abcdef",),
    listen_addresses=(Multiaddr("/ip4/127.0.0.1/tcp/4001"),),
    session_id="00ff" * 4,
    link=7,
    exchange=2**63 - 1,
    credentials=b"\x00signed",
    crossings=encode_crossings(
        [
            Crossing(
                site=7, sends=True, takes=False, kind="send", port="update",
                receiver="server", type="Tensor.FLOAT",
            )
        ]
    ),
)  # fmt: skip


def _fields() -> dict[str, object]:
    return msgpack.unpackb(encode_hello(_HELLO))


def test_round_trip():
    assert decode_hello(encode_hello(_HELLO)) == _HELLO


@given(
    st.lists(st.text(st.characters(categories=["L", "N"]), max_size=20), max_size=MAX_NAMES),
    st.integers(0, 2**63),
)
def test_round_trip_of_names(names, link):
    hello = Hello(classes=tuple(names), targets=tuple(names), link=link)
    assert decode_hello(encode_hello(hello)) == hello


def test_largest_hello_fits_its_frame():
    address = Multiaddr("/ip4/127.0.0.1/tcp/4001")
    hello = Hello(
        agent_version="a" * MAX_AGENT_BYTES,
        artifact_sha256="a" * 64,
        classes=("c" * MAX_NAME_BYTES,) * MAX_NAMES,
        targets=("t" * MAX_NAME_BYTES,) * MAX_NAMES,
        listen_addresses=(address,) * MAX_CLAIMED_ADDRESSES,
        link=2**64 - 1,
        exchange=2**64 - 1,
        credentials=b"c" * MAX_CREDENTIALS_BYTES,
    )
    # And as many crossings as may be told, in their largest form.
    assert MAX_CROSSINGS_BYTES + len(encode_hello(hello)) <= (
        MAX_HELLO_BYTES - MAX_CLAIMED_ADDRESSES * 256
    )


@given(st.binary(max_size=200))
def test_garbage_is_refused(raw):
    with pytest.raises(HelloError):
        decode_hello(raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol_version", 0),
        ("protocol_version", 1),
        ("protocol_version", PROTOCOL_VERSION + 1),
        ("protocol_version", True),
        ("protocol_version", "1"),
        ("agent_version", "x" * (MAX_AGENT_BYTES + 1)),
        ("agent_version", "a\x1b[31m"),
        ("agent_version", b"x"),
        ("artifact_sha256", "AB" * 32),
        ("artifact_sha256", "ab" * 32 + "\n"),
        ("classes", "client"),
        ("classes", [1]),
        ("classes", ["c"] * (MAX_NAMES + 1)),
        ("targets", ["t" * (MAX_NAME_BYTES + 1)]),
        ("listen_addresses", [b"\x04"]),
        ("listen_addresses", [b""]),
        ("listen_addresses", ["/ip4/127.0.0.1/tcp/1"]),
        ("listen_addresses", [b"\x04\x7f\x00\x00\x01"] * (MAX_CLAIMED_ADDRESSES + 1)),
        ("session_id", "xyz"),
        ("link", -1),
        ("exchange", -1),
        ("credentials", "text"),
        ("credentials", b"c" * (MAX_CREDENTIALS_BYTES + 1)),
        ("crossings", None),
        ("crossings", []),
        ("crossings", b"\xc0"),
        ("crossings", b"\x90" * (MAX_CROSSINGS_BYTES + 1)),
    ],
)
def test_each_field_is_checked(field, value):
    fields = _fields()
    fields[field] = value
    with pytest.raises(HelloError):
        decode_hello(msgpack.packb(fields))


def test_missing_unknown_and_oversize():
    fields = _fields()
    del fields["link"]
    with pytest.raises(HelloError, match="exactly"):
        decode_hello(msgpack.packb(fields))
    with pytest.raises(HelloError):
        decode_hello(msgpack.packb({**_fields(), "more": 1}))
    with pytest.raises(HelloError, match="at most"):
        decode_hello(b"\x00" * (MAX_HELLO_BYTES + 1))
    with pytest.raises(HelloError):
        encode_hello(Hello(classes=("c",) * (MAX_NAMES + 1)))


def test_a_hello_of_the_former_version_is_taken_as_one_that_does_not_tell():
    fields = _fields()
    fields["protocol_version"] = 1
    del fields["crossings"]
    assert decode_hello(msgpack.packb(fields)) == replace(_HELLO, protocol_version=1, crossings=b"")
    with pytest.raises(HelloError, match="exactly"):
        decode_hello(msgpack.packb({**fields, "protocol_version": 2}))
