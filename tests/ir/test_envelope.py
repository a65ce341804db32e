"""The hand-written envelope codec agrees with google.protobuf and survives garbage."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.ir import envelope as env
from bbnode.ir.caps import MAX_FILLS
from bbnode.ir.envelope import decode_envelope
from bbnode.ir.errors import DecodeError

_TYPES = {
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "uint64": descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
}
_SCHEMA = {
    "SlotFill": [(1, "dest_suffix", "bytes"), (2, "payload", "bytes"), (3, "trigger_only", "bool"),
                 (4, "type_hash", "uint64")],
    "WireCorrelation": [(1, "kind", "uint64"), (2, "wire_req_id", "uint64"),
                        (3, "chain", "uint64")],
    "EdgeRttReport": [(1, "site", "uint64"), (2, "srtt_ns", "uint64"), (3, "rttvar_ns", "uint64")],
    "WireEnvelope": [(1, "dest_peer_addresses", "bytes*"), (2, "fills", "SlotFill*"),
                     (3, "correlation", "WireCorrelation"), (4, "remaining_deadline_ns", "uint64"),
                     (5, "edge_rtt_reports", "EdgeRttReport*"), (6, "src_peer_bytes", "bytes"),
                     (7, "schema_version", "uint64"), (8, "src_peer_addresses", "bytes*")],
}  # fmt: skip


def _reference_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="bb_test.proto", package="bb", syntax="proto3")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for number, field_name, kind in fields:
            field = message.field.add(name=field_name, number=number)
            field.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            base = kind.rstrip("*")
            if base in _TYPES:
                field.type = _TYPES[base]
            else:
                field.type, field.type_name = field.TYPE_MESSAGE, f".bb.{base}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bb.WireEnvelope"))


REFERENCE = _reference_class()
U64 = st.integers(0, 2**64 - 1)
FILLS = st.builds(
    env.SlotFill,
    dest_suffix=st.binary(max_size=40),
    payload=st.binary(max_size=200),
    trigger_only=st.booleans(),
    type_hash=U64,
)
ENVELOPES = st.builds(
    env.WireEnvelope,
    dest_peer_addresses=st.lists(st.binary(max_size=20), max_size=3).map(tuple),
    fills=st.lists(FILLS, max_size=4).map(tuple),
    correlation=st.builds(
        env.WireCorrelation,
        kind=st.sampled_from(env.CorrelationKind),
        wire_req_id=U64,
        chain=st.just(0) | U64,
    ),
    remaining_deadline_ns=U64,
    edge_rtt_reports=st.lists(
        st.builds(env.EdgeRttReport, site=U64, srtt_ns=U64, rttvar_ns=U64), max_size=3
    ).map(tuple),
    src_peer_bytes=st.binary(max_size=40),
    src_peer_addresses=st.lists(st.binary(max_size=20), max_size=3).map(tuple),
)


def encode(envelope: env.WireEnvelope) -> bytes:
    return b"".join(env.encode_envelope(envelope))


@given(ENVELOPES)
def test_round_trip(envelope: env.WireEnvelope) -> None:
    assert decode_envelope(encode(envelope)) == envelope


ALIKE = st.builds(
    env.WireEnvelope,
    dest_peer_addresses=st.lists(st.binary(max_size=20), max_size=2).map(tuple),
    fills=FILLS.filter(lambda fill: fill.payload).map(lambda fill: (fill,)),
    correlation=st.builds(
        env.WireCorrelation,
        kind=st.sampled_from(env.CorrelationKind),
        wire_req_id=st.integers(1, 2**64 - 1),
        chain=st.just(0) | U64,
    ),
    remaining_deadline_ns=st.just(0) | U64,
    src_peer_bytes=st.binary(min_size=1, max_size=40),
    src_peer_addresses=st.lists(st.binary(max_size=20), max_size=2).map(tuple),
)


@given(ALIKE, ALIKE, st.data())
def test_a_layout_reads_what_differs_in_payload_and_correlation(one, other, data) -> None:
    learned: list[env.Layout] = []
    raw = encode(one)
    assert decode_envelope(raw, learn=lambda *parts: learned.append(env.Layout(*parts))) == one
    (layout,) = learned
    payload = (other.fills[0].payload * 200)[: one.fills[0].payload_size]
    following = replace(
        one,
        fills=(replace(one.fills[0], payload=payload),),
        correlation=other.correlation,
        remaining_deadline_ns=other.remaining_deadline_ns,
    )
    raw = encode(following)
    assert layout.decode(raw) == decode_envelope(raw) == following
    # What is anything else, it leaves alone, or reads it as the whole decoder does.
    at = data.draw(st.integers(0, len(raw) - 1))
    cut = data.draw(st.integers(0, 3))
    bent = raw[:at] + data.draw(st.binary(max_size=3)) + raw[at + cut :]
    found = layout.decode(bent)
    assert found is None or found == decode_envelope(bent)


@given(ALIKE, st.binary(max_size=300))
def test_a_layout_leaves_garbage_alone(one, garbage) -> None:
    learned: list[env.Layout] = []
    decode_envelope(encode(one), learn=lambda *parts: learned.append(env.Layout(*parts)))
    raw = encode(one)
    for bent in (garbage, raw + garbage, raw[: len(garbage)], raw[len(garbage) :]):
        found = learned[0].decode(bent)
        assert found is None or found == decode_envelope(bent)


def test_a_layout_keeps_no_more_of_a_stranger_than_a_number() -> None:
    correlation = env.WireCorrelation(wire_req_id=7)
    fill = env.SlotFill(dest_suffix=b"s", payload=b"p", type_hash=1)
    one = env.WireEnvelope(fills=(fill,), correlation=correlation, src_peer_bytes=b"peer")
    learned: list[env.Layout] = []
    decode_envelope(encode(one), learn=lambda *parts: learned.append(env.Layout(*parts)))
    timed = encode(replace(one, remaining_deadline_ns=5))
    after = encode(one)[encode(one).index(b"peer") - 2 :]  # from the field of the sender on
    assert timed.endswith(b"\x05" + after)
    env._deadline.cache_clear()
    stuffed = timed[: -len(after)] + bytes(1000) + after
    assert learned[0].decode(stuffed) is None
    assert env._deadline.cache_info().currsize == 0
    assert learned[0].decode(timed) == decode_envelope(timed)
    assert env._deadline.cache_info().currsize == 1


def read_by_protobuf(raw: bytes) -> env.WireEnvelope:
    """The same as `decode_envelope`, by google.protobuf alone and without bounds."""
    message = REFERENCE.FromString(raw)
    return env.WireEnvelope(
        dest_peer_addresses=tuple(message.dest_peer_addresses),
        fills=tuple(
            env.SlotFill(
                dest_suffix=fill.dest_suffix,
                payload=fill.payload,
                trigger_only=fill.trigger_only,
                type_hash=fill.type_hash,
            )
            for fill in message.fills
        ),
        correlation=env.WireCorrelation(
            kind=env.CorrelationKind(message.correlation.kind),
            wire_req_id=message.correlation.wire_req_id,
            chain=message.correlation.chain,
        ),
        remaining_deadline_ns=message.remaining_deadline_ns,
        edge_rtt_reports=tuple(
            env.EdgeRttReport(site=r.site, srtt_ns=r.srtt_ns, rttvar_ns=r.rttvar_ns)
            for r in message.edge_rtt_reports
        ),
        src_peer_bytes=message.src_peer_bytes,
        schema_version=message.schema_version,
        src_peer_addresses=tuple(message.src_peer_addresses),
    )


@given(ENVELOPES)
def test_protobuf_reads_what_we_write_and_we_read_what_it_writes(
    envelope: env.WireEnvelope,
) -> None:
    raw = encode(envelope)
    assert read_by_protobuf(raw) == envelope
    assert decode_envelope(REFERENCE.FromString(raw).SerializeToString()) == envelope


@given(st.binary(max_size=300))
@settings(max_examples=500)
def test_garbage_is_an_envelope_or_a_decode_error(raw: bytes) -> None:
    with contextlib.suppress(DecodeError):
        decode_envelope(raw)


@given(ENVELOPES, st.data())
def test_damaged_envelopes_never_raise_anything_else(envelope: Any, data: st.DataObject) -> None:
    raw = bytearray(encode(envelope))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError):
        decode_envelope(bytes(raw))


@given(ENVELOPES, st.data())
@settings(max_examples=500)
def test_what_we_take_of_a_damaged_envelope_is_what_protobuf_reads(
    envelope: env.WireEnvelope, data: st.DataObject
) -> None:
    raw = bytearray(encode(envelope))
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 3))
    whole = bytes(raw[: len(raw) - cut]) + data.draw(st.binary(max_size=4))
    with contextlib.suppress(DecodeError):
        assert decode_envelope(whole) == read_by_protobuf(whole)


@given(st.lists(ENVELOPES, min_size=2, max_size=2), st.randoms())
def test_fields_may_come_in_any_order_and_more_than_once(
    envelopes: list[env.WireEnvelope], random: Any
) -> None:
    # One message after the other is their union; fields of one in any order are that message.
    joined = b"".join(encode(each) for each in envelopes)
    assert decode_envelope(joined) == read_by_protobuf(joined)
    fields = [
        REFERENCE(**{field.name: value}).SerializeToString()
        for field, value in REFERENCE.FromString(encode(envelopes[0])).ListFields()
    ]
    random.shuffle(fields)
    assert decode_envelope(b"".join(fields)) == read_by_protobuf(b"".join(fields))


@given(
    st.permutations(
        [b"\x0a\x01s", b"\x12\x02ab", b"\x12\x01c", b"\x18\x01", b"\x20\x07", b"\x28\x09"]
    )
)
def test_fields_of_a_fill_may_come_in_any_order(parts: list[bytes]) -> None:
    body = b"".join(parts)
    raw = b"\x12" + bytes((len(body),)) + body + b"\x38\x01"
    assert decode_envelope(raw) == read_by_protobuf(raw)


def test_a_large_payload_in_the_wrong_place_is_refused_not_copied() -> None:
    payload = b"\x12" + env.varint(1 << 20) + bytes(1 << 20)
    for fill in (b"\x18\x01" + payload, b"\x28\x01" + payload):
        with pytest.raises(DecodeError, match="order of their numbers"):
            decode_envelope(b"\x12" + env.varint(len(fill)) + fill + b"\x38\x01")
    with pytest.raises(DecodeError, match="order of their numbers"):
        decode_envelope(b"\x38\x01" + b"\x12" + env.varint(len(payload)) + payload)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x0a" + b"\xff" * 1_000_000,  # a length without end
        b"\x0a\x00" * 500_000,  # addresses without end
        b"\x12" + b"\xff" * 1_000_000,
    ],
)
def test_what_goes_on_and_on_is_refused_early(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_envelope(raw)


def test_unknown_fields_are_skipped() -> None:
    raw = encode(env.WireEnvelope(src_peer_bytes=b"x"))
    extra = b"\xf8\x06\x05" + b"\xfa\x06\x02hi" + b"\xf9\x06" + bytes(8) + b"\xfd\x06" + bytes(4)
    assert decode_envelope(raw + extra) == decode_envelope(raw)


def test_payloads_are_not_copied_on_either_side() -> None:
    body = bytes(100_000)
    parts = env.encode_envelope(
        env.WireEnvelope(fills=(env.SlotFill(dest_suffix=b"s", payload_parts=(body, body)),))
    )
    assert sum(part is body for part in parts) == 2
    raw = b"".join(parts)
    payload = decode_envelope(raw).fills[0].payload
    assert isinstance(payload, memoryview)
    assert payload.obj is raw
    assert len(payload) == 200_000


@pytest.mark.parametrize(
    ("envelope", "what"),
    [
        (env.WireEnvelope(fills=(env.SlotFill(dest_suffix=b"s"),) * (MAX_FILLS + 1)), "fills"),
        (env.WireEnvelope(src_peer_addresses=(b"a",) * 9), "claimed addresses"),
        (env.WireEnvelope(src_peer_addresses=(b"a" * 257,)), "257 bytes"),
        (env.WireEnvelope(schema_version=2), "schema version 2"),
    ],
)
def test_caps_are_typed_errors(envelope: env.WireEnvelope, what: str) -> None:
    with pytest.raises(DecodeError, match=what):
        decode_envelope(encode(envelope))


def test_an_envelope_over_the_cap_is_refused_whole() -> None:
    with pytest.raises(DecodeError, match="at most 10"):
        decode_envelope(bytes(11), max_bytes=10)
