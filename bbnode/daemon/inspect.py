"""What a compiled artifact holds, as plain data.

Rule: it reads the artifact alone; no component of it has to be installed. What is printed
is what the compiler left on the nodes (docs/ir.md), never a guess.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import onnx
from onnx import FunctionProto, NodeProto

from bbnode.daemon.artifact import serialize
from bbnode.ir import keys, protos
from bbnode.ir.address import site_suffix
from bbnode.ir.slots import Binding

_SOURCE_GATES = {keys.GATE_SOURCES[gate]: gate for gate in sorted(keys.GATE_OPS)}


def describe(model: onnx.ModelProto) -> dict[str, Any]:
    """Passport, digest, targets with slots and bindings, wire edges with their gates."""
    mains = [f for f in model.functions if protos.get_meta(f, keys.TARGET_KEY) is not None]
    bindings = _bindings(model)
    return {
        "passport": protos.get_meta(model, keys.COMPILED_KEY) or "",
        "program": model.graph.name,
        "sha256": hashlib.sha256(serialize(model)).hexdigest(),
        "opsets": {entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        "targets": [_target(main, bindings) for main in mains],
        "functions": [f.name for f in model.functions if f not in mains],
        "wire_edges": list(_wire_edges(mains)),
    }


def _bindings(model: onnx.ModelProto) -> dict[str, list[Binding]]:
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


def _wire_edges(mains: list[FunctionProto]) -> Iterator[dict[str, Any]]:
    senders: dict[str, tuple[FunctionProto, NodeProto]] = {}
    for main in mains:
        for node in main.node:
            if protos.is_wire(node, *keys.SEND_OPS):
                for attribute in node.attribute:
                    if attribute.name.startswith(keys.DEST_SUFFIX_PREFIX):
                        senders[attribute.s.hex()] = (main, node)
    for main in mains:
        gates = _gates(main)
        for node in main.node:
            site = protos.get_meta(node, keys.SITE_ID_KEY)
            if not protos.is_wire(node, *keys.RECV_OPS) or site is None:
                continue
            from_main, send = _sender(senders, int(site))
            yield {
                "value": node.output[0] if node.output else "",
                "op": f"{send.op_type} → {node.op_type}" if send is not None else node.op_type,
                "port": protos.get_meta(send, keys.PORT_KEY) if send is not None else None,
                "from": from_main.name if from_main is not None else "",
                "to": main.name,
                "transport": (protos.get_meta(send, keys.WIRE_TRANSPORT_KEY) or "")
                if send is not None
                else "",
                "site_id": site,
                "gates": (gates.get(send.name, []) if send is not None else [])
                + gates.get(node.name, []),
                "deadline_ns": _deadline(send),
            }


def _sender(
    senders: Mapping[str, tuple[FunctionProto, NodeProto]], site: int
) -> tuple[FunctionProto | None, NodeProto | None]:
    return senders.get(site_suffix(site).hex(), (None, None))


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
    if send is None:
        return 0
    return int(
        protos.get_attr(send, keys.ATTR_DEADLINE_NS)
        or protos.get_meta(send, keys.DEADLINE_NS_KEY)
        or 0
    )
