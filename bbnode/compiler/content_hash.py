"""Names made of content: of partitions and of backend subgraphs.

Rule: equal content gives an equal name on every machine. Where the author's source stood is
no content. 64 bits of SHA-256 are plenty: names are compared within one model, and a peer
checks the whole artifact's digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from onnx import FunctionProto, NodeProto

from bbnode.ir import keys

HEX_DIGITS = 16


def _node_bytes(node: NodeProto, scratch: NodeProto) -> bytes:
    for index, entry in enumerate(node.metadata_props):
        if entry.key == keys.SOURCE_LINE_KEY:
            scratch.CopyFrom(node)
            del scratch.metadata_props[index]
            return scratch.SerializeToString(deterministic=True)
    return node.SerializeToString(deterministic=True)


def _framed(data: bytes) -> bytes:
    """With its length before it, so that two pieces never read like two others."""
    return len(data).to_bytes(8, "big") + data


def function_digest(function: FunctionProto) -> bytes:
    """SHA-256 over a body: ports, slots with their configs, opsets, nodes; not its name."""
    digest = hashlib.sha256()
    opsets = sorted((entry.domain, entry.version) for entry in function.opset_import)
    digest.update(_framed(repr(opsets).encode()))
    for names in (function.input, function.output, function.attribute):
        digest.update(_framed("\0".join(names).encode()))
    for attribute in function.attribute_proto:
        digest.update(_framed(attribute.SerializeToString(deterministic=True)))
    scratch = NodeProto()
    for node in function.node:
        digest.update(_framed(_node_bytes(node, scratch)))
    return digest.digest()


def function_content(function: FunctionProto) -> str:
    """64 hex digits over a body and the types it declares."""
    digest = hashlib.sha256(function_digest(function))
    for info in function.value_info:
        digest.update(_framed(info.SerializeToString(deterministic=True)))
    return digest.hexdigest()


def content_name(
    function: FunctionProto, callees: Iterable[FunctionProto], known: Mapping[str, bytes]
) -> str:
    """16 hex digits over a body and the bodies that it calls.

    Args:
        function: the body.
        callees: all functions that it reaches, in the model's order.
        known: digests made before, by function name and domain (`digest_key`).
    """
    digest = hashlib.sha256(function_digest(function))
    for callee in callees:
        key = digest_key(callee)
        digest.update(_framed(key.encode()))
        digest.update(known[key] if key in known else function_digest(callee))
    return digest.hexdigest()[:HEX_DIGITS]


def digest_key(function: FunctionProto) -> str:
    """What `content_name` finds a known digest by."""
    return f"{function.domain}\0{function.name}\0{function.overload}"
