"""Numeric ids that peers share, and the hash that derives them.

Rule: an id that two peers must agree on is a pure function of names in the artifact.
"""

from __future__ import annotations

# FNV-1a, 64 bit: offset basis and prime from draft-eastlake-fnv-17.
FNV1A_64_OFFSET = 0xCBF29CE484222325
FNV1A_64_PRIME = 0x100000001B3
_MASK_64 = (1 << 64) - 1


def fnv1a_64(data: bytes) -> int:
    """Return FNV-1a-64 of `data`. For names and keys: pure Python, about 0.1 µs a byte."""
    value = FNV1A_64_OFFSET
    for byte in data:
        value = ((value ^ byte) * FNV1A_64_PRIME) & _MASK_64
    return value


def wire_hash(name: str, opset_version: int = 1) -> int:
    """Return the identity of a type on the wire: FNV-1a-64 of `<name>@<opset version>`."""
    return fnv1a_64(f"{name}@{opset_version}".encode())


def site_id(program: str, receiver: str, port: str, kind: str, crosses: str) -> int:
    """Return the stable NodeSiteId of a Recv: a hash of the crossing alone.

    Args:
        program: name of the root Module.
        receiver: the receiving class.
        port: the author's name of the port, after the names of the calls that lead to it.
        kind: kind of the Recv: one-way, request or response.
        crosses: type of the crossing value.
    """
    # No part contains a NUL, so the joined text is unambiguous.
    return fnv1a_64("\0".join((program, receiver, port, kind, crosses)).encode())


def component_ref(slot: str) -> int:
    """Return the stable ComponentRef of a slot: FNV-1a-64 of `slot/<slot>`, folded to 32 bits.

    Like a site id it is the same on every peer, whatever targets are installed there.
    """
    value = fnv1a_64(f"slot/{slot}".encode())
    return (value >> 32) ^ (value & 0xFFFFFFFF)
