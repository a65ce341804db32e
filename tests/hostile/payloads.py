"""Payloads that are made to hurt who decodes them, each with the type that it claims.

Rule: each is within the caps of an envelope; what they have in common is that a decoder that is
not careful raises something odd on them, or takes very long.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache

import msgpack
import numpy as np

from bbnode.ir import codec, types, values
from bbnode.ir.address import parse_address
from bbnode.ir.caps import MAX_CHILDREN
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TypeNode

_ADDRESS = parse_address(f"/ip4/10.0.0.1/tcp/4001/p2p/{PeerId.from_seed(1)}").to_bytes()
_LONG_ADDRESS = parse_address("/ip4/10.0.0.1" * 40).to_bytes()


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes that transfer to be of a type; `refused`: no value is made of them."""

    name: str
    node: TypeNode
    data: bytes
    refused: bool = True


def composite(*children: tuple[TypeNode, bytes]) -> bytes:
    """A composite of children that nobody has looked at."""
    table = struct.pack("<I", len(children))
    rows = b"".join(struct.pack("<QQ", node.wire_hash, len(data)) for node, data in children)
    return table + rows + b"".join(data for _, data in children)


def nested_lists(depth: int) -> bytes:
    """msgpack lists, each but the last with one more in it."""
    return b"\x91" * depth + b"\x90"


def batch(peers: bytes, missing: bytes = b"\x90") -> bytes:
    """A ResponseBatch with this head and no answers."""
    return composite((types.METADATA, msgpack.packb({"peers": peers, "missing": missing})))


def _deep(depth: int) -> bytes:
    data = b"x"
    node = types.BYTES
    for _ in range(depth):
        data, node = composite((node, data)), types.COMPOSITE
    return data


@cache
def killers() -> tuple[Payload, ...]:
    """Small ones: what ended a poll, or could."""
    return (
        Payload("U64 of nested lists", types.U64, nested_lists(1000)),
        Payload("batch with a bad list of peers", types.RESPONSE_BATCH, batch(b"\x90\x90")),
        Payload("batch of nested lists", types.RESPONSE_BATCH, batch(nested_lists(1000))),
        Payload("batch with a head of another kind", types.RESPONSE_BATCH, composite()),
        Payload("metadata of nested lists", types.METADATA, b"\x81\xa1a" + nested_lists(1000)),
        Payload("metadata with a key that is bytes", types.METADATA, b"\x81\xc4\x01a\x01"),
        Payload("nested composites", types.COMPOSITE, _deep(500)),
        Payload("U64 in a composite", types.COMPOSITE, composite((types.U64, nested_lists(1000)))),
        Payload(
            "batch in a composite",
            types.COMPOSITE,
            composite((types.RESPONSE_BATCH, batch(b"\x90\x90"))),
        ),
        Payload("list that announces 2^32 items", types.PEER_ID_VEC, b"\xdd\xff\xff\xff\xff"),
        Payload("tensor of 2^80 elements", types.TENSOR_FLOAT, _tensor(1, 2**40, 2**40)),
        Payload("tensor without elements", types.TENSOR_FLOAT, _tensor(1, 2**63, 0)),
    )


def _tensor(elem: int, *dims: int) -> bytes:
    return struct.pack(f"<BB6x{len(dims)}Q", elem, len(dims), *dims)


@cache
def large() -> tuple[Payload, ...]:
    """Large ones: what held a poll, or could."""
    many = MAX_CHILDREN
    peers = values.PeerIdVec(PeerId.from_seed(n) for n in range(2000)) * 10
    return (
        Payload("10 MB of addresses", types.ADDRESS_VEC, msgpack.packb([_ADDRESS] * 220_000)),
        Payload("1 MiB of addresses", types.ADDRESS_VEC, msgpack.packb([_ADDRESS] * 22_000)),
        Payload("addresses", types.ADDRESS_VEC, msgpack.packb([_ADDRESS] * 1000), refused=False),
        Payload("long addresses", types.ADDRESS_VEC, msgpack.packb([_LONG_ADDRESS] * 400)),
        Payload("triggers", types.COMPOSITE, composite(*[(types.TRIGGER, b"")] * many), False),
        Payload(
            "addresses in a composite",
            types.COMPOSITE,
            composite(*[(types.MULTIADDRESS, _ADDRESS)] * many),
        ),
        Payload(
            "lists of addresses in a composite",
            types.COMPOSITE,
            composite(*[(types.ADDRESS_VEC, msgpack.packb([_ADDRESS] * 1000))] * 100),
        ),
        Payload(
            "composites of composites",
            types.COMPOSITE,
            composite(*[(types.COMPOSITE, composite(*[(types.TRIGGER, b"")] * 1000))] * 1000),
        ),
        Payload("empty lists", types.METADATA, b"\x81\xa1a\xdd\x00\x0f\x42\x40" + b"\x90" * 10**6),
        Payload(
            "search results",
            types.SEARCH_RESULTS,
            codec.encode_value(values.SearchResults.of_pairs([(1, 0.5)] * many)),
            False,
        ),
        Payload("peers", types.PEER_ID_VEC, msgpack.packb([p.to_bytes() for p in peers]), False),
        Payload(
            "bools",
            types.TENSOR_BOOL,
            codec.encode_value(np.zeros(16 << 20, np.bool_)),
            False,
        ),
    )
