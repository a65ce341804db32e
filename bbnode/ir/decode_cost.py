"""About how long it takes to decode a payload, by its type and size.

Rule: the estimate is the same on every machine, and is made without decoding anything: of a
composite, no more is looked at than what tells that it is too long.
"""

from __future__ import annotations

from bbnode.ir import types
from bbnode.ir.caps import MAX_CHILDREN, MAX_COMPOSITE_DEPTH
from bbnode.ir.codec import CHILD, COUNT, Buffer
from bbnode.ir.types import TypeKind, TypeNode

# Microseconds for each byte of a payload, about: 36 bytes are a PeerId, and an address is parsed
# by code that is slow. A Bytes is copied. Of types that third parties add nothing is known.
_COST_PER_BYTE: dict[str, float] = {
    types.TRIGGER.id: 0,
    types.PEER_ID.id: 1 / 32,
    types.BYTES.id: 1 / 512,
    types.PEER_ID_VEC.id: 1 / 16,
    types.MULTIADDRESS.id: 5,
    types.ADDRESS_VEC.id: 5,
    types.METADATA.id: 1 / 4,
    types.SEARCH_RESULTS.id: 1 / 4,
}
_COST_PER_BYTE_OF_OTHERS = 1 / 8
_COST_OF_CHILD = 3


def cost_of(node: TypeNode, payload: Buffer, most: int, depth: int = 0) -> int:
    """About how many microseconds `decode_value` will take; not looked at closely beyond `most`."""
    if node.kind is TypeKind.TENSOR:
        # A view; but each byte of a bool is looked at.
        return 1 if node is not types.TENSOR_BOOL else 1 + (len(payload) >> 10)
    if node is types.COMPOSITE or node is types.RESPONSE_BATCH:
        return _cost_of_children(memoryview(payload), most, depth)
    return 1 + int(len(payload) * _COST_PER_BYTE.get(node.id, _COST_PER_BYTE_OF_OTHERS))


def _cost_of_children(view: memoryview, most: int, depth: int) -> int:
    if len(view) < COUNT.size or depth > MAX_COMPOSITE_DEPTH:
        return 1
    (count,) = COUNT.unpack_from(view)
    offset = COUNT.size + count * CHILD.size
    if count > MAX_CHILDREN + 1 or len(view) < offset:
        return 1  # it is refused at a glance
    cost: int = 1 + _COST_OF_CHILD * count
    for index in range(count):
        if cost > most:
            break
        type_hash, size = CHILD.unpack_from(view, COUNT.size + index * CHILD.size)
        node = types.type_by_hash(type_hash)
        if node is None or size > len(view) - offset:
            break
        cost += cost_of(node, view[offset : offset + size], most - cost, depth + 1)
        offset += size
    return cost
