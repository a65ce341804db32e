"""What a compiled artifact holds, as plain data.

Rule: it reads the artifact alone; no component of it has to be installed. What is printed
is what the compiler left on the nodes (docs/ir.md), never a guess.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import FunctionProto, NodeProto

from bbnode.compiler.seams import is_natural
from bbnode.daemon.artifact import InvalidArtifact, serialize
from bbnode.ir import keys, protos
from bbnode.ir.address import site_suffix
from bbnode.ir.onnx_file import program_of
from bbnode.ir.slots import Binding
from bbnode.ops.custom import custom_ops_of

MAX_SITE_ID = (1 << 64) - 1

_SOURCE_GATES = {keys.GATE_SOURCES[gate]: gate for gate in sorted(keys.GATE_OPS)}


def describe(model: onnx.ModelProto) -> dict[str, Any]:
    """Passport, digest, targets with slots and bindings, wire edges with their gates."""
    mains = mains_of(model)
    bindings = bindings_of(model)
    return {
        "passport": protos.get_meta(model, keys.COMPILED_KEY) or "",
        "program": model.graph.name,
        "sha256": hashlib.sha256(serialize(model)).hexdigest(),
        "opsets": {entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        "custom_ops": custom_ops_of(program_of(model)),
        "targets": [_target(main, bindings) for main in mains],
        "functions": [f.name for f in model.functions if f not in mains],
        "wire_edges": list(_wire_edges(mains)),
    }


def mains_of(model: onnx.ModelProto) -> list[FunctionProto]:
    """The partition mains, in the model's order."""
    return [f for f in model.functions if protos.get_meta(f, keys.TARGET_KEY) is not None]


def bindings_of(model: onnx.ModelProto) -> dict[str, list[Binding]]:
    """The binding table, by target name. Raises DeploymentError for a malformed entry."""
    found: dict[str, list[Binding]] = {}
    mains = {f.name for f in model.functions}
    for entry in model.metadata_props:
        if entry.key.startswith(keys.BINDING_PREFIX):
            rest = entry.key.removeprefix(keys.BINDING_PREFIX)
            # A class name may hold dots, so the target is the longest prefix that exists.
            target = max((m for m in mains if rest.startswith(m + ".")), key=len, default="")
            slot = rest[len(target) + 1 :]
            found.setdefault(target, []).append(Binding.decode(target, slot, entry.value))
    return found


def _target(main: FunctionProto, bindings: Mapping[str, list[Binding]]) -> dict[str, Any]:
    return {
        "name": main.name,
        "class": protos.get_meta(main, keys.HOME_KEY) or "",
        "ops": len(main.node),
        "inputs": list(main.input),
        "outputs": list(main.output),
        "slots": [
            {"slot": b.slot, "role": b.role, "type_name": b.type_name, "slot_id": b.slot_id}
            for b in bindings.get(main.name, [])
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class WirePair:
    """A Recv-flavoured node and the Send-flavoured one that feeds it.

    `source` and `send` are None when no target of the artifact sends to it.
    """

    source: FunctionProto | None
    send: NodeProto | None
    to: FunctionProto
    recv: NodeProto
    site_id: int


def wire_pairs(mains: Sequence[FunctionProto]) -> Iterator[WirePair]:
    """All wire edges between partition mains, found by the site that a Send addresses.

    Raises InvalidArtifact for a site id that is no 64-bit number.
    """
    senders: dict[str, tuple[FunctionProto, NodeProto]] = {}
    for main in mains:
        for node in main.node:
            if protos.is_wire(node, *keys.SEND_OPS):
                for attribute in node.attribute:
                    if attribute.name.startswith(keys.DEST_SUFFIX_PREFIX):
                        senders[attribute.s.hex()] = (main, node)
    for main in mains:
        for node in main.node:
            site = protos.get_meta(node, keys.SITE_ID_KEY)
            if not protos.is_wire(node, *keys.RECV_OPS) or site is None:
                continue
            site_id = _site_id(site, node)
            source, send = senders.get(site_suffix(site_id).hex(), (None, None))
            yield WirePair(source=source, send=send, to=main, recv=node, site_id=site_id)


def _site_id(text: str, node: NodeProto) -> int:
    site_id = int(text) if is_natural(text) else MAX_SITE_ID + 1
    if site_id > MAX_SITE_ID:
        raise InvalidArtifact(
            f"op {node.name!r} has the site id {text:.40}, which is no 64-bit number; compile the "
            "program again"
        )
    return site_id


def _wire_edges(mains: Sequence[FunctionProto]) -> Iterator[dict[str, Any]]:
    gates = {main.name: _gates(main) for main in mains}
    for pair in wire_pairs(mains):
        send, recv = pair.send, pair.recv
        sent: list[str] = []
        if pair.source is not None and send is not None:
            sent = gates[pair.source.name].get(send.name, [])
        yield {
            "value": recv.output[0] if recv.output else "",
            "op": f"{send.op_type} → {recv.op_type}" if send is not None else recv.op_type,
            "port": protos.get_meta(send, keys.PORT_KEY) if send is not None else None,
            "from": pair.source.name if pair.source is not None else "",
            "to": pair.to.name,
            "transport": (protos.get_meta(send, keys.WIRE_TRANSPORT_KEY) or "")
            if send is not None
            else "",
            "site_id": str(pair.site_id),
            "gates": sent + gates[pair.to.name].get(recv.name, []),
            "deadline_ns": _deadline(send),
        }


def _gates(main: FunctionProto) -> dict[str, list[str]]:
    """Gate op types by the wire node that they protect, in chain order."""
    found: dict[str, list[str]] = {}
    for node in main.node:
        if node.op_type in keys.GATE_OPS:
            for entry in node.metadata_props:
                if entry.key in _SOURCE_GATES:
                    found.setdefault(entry.value, []).append(node.op_type)
    return found


def _deadline(send: NodeProto | None) -> int:
    return 0 if send is None else deadline_of(send)


def deadline_of(node: NodeProto) -> int:
    """The deadline that an op has, in ns, or 0. Raises InvalidArtifact for what is no number."""
    found = protos.get_attr(node, keys.ATTR_DEADLINE_NS)
    if type(found) is int:
        return found
    text = protos.get_meta(node, keys.DEADLINE_NS_KEY) or "0"
    if found is not None or not is_natural(text):
        raise InvalidArtifact(
            f"op {node.name!r:.80} has a deadline that is no number; compile the program again"
        )
    return int(text)
