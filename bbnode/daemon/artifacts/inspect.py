"""The content of a compiled artifact, as plain data.

Rule: it reads only the artifact, whose components need not be installed; installed ones add which
parameters of a model are trained. It shows what the compiler wrote on the nodes (docs/ir.md), never
a guess.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from bbnode.components.contracts import Model, ParameterList
from bbnode.components.registry import build_config, component_class, known_types
from bbnode.daemon.artifacts.artifact import ArtifactRejected, as_graph, serialize
from bbnode.ir import keys
from bbnode.ir.address import site_suffix
from bbnode.ir.crossing import port_of
from bbnode.ir.errors import BbnodeError
from bbnode.ir.graph import Function, OpNode, Program, is_wire
from bbnode.ir.parts import part_names
from bbnode.ir.slots import Binding
from bbnode.ops.custom import custom_ops_of

MAX_SITE_ID = (1 << 64) - 1

_SOURCE_GATES = frozenset(keys.GATE_SOURCES[gate] for gate in keys.GATE_OPS)


def describe(model: onnx.ModelProto) -> dict[str, Any]:
    """Return passport, digest, targets with slots and bindings, wire edges with their gates."""
    program = as_graph(model)
    mains = mains_of(program)
    bindings = bindings_of(program)
    models = dict(_models(program))
    return {
        "passport": program.metadata.get(keys.COMPILED_KEY, ""),
        "program": program.name,
        "sha256": hashlib.sha256(serialize(model)).hexdigest(),
        "opsets": {entry.domain or "ai.onnx": entry.version for entry in program.opset_imports},
        "custom_ops": custom_ops_of(program),
        "targets": [
            {
                "name": main.name,
                "class": main.metadata.get(keys.HOME_KEY, ""),
                "ops": len(main.nodes),
                "inputs": list(main.inputs),
                "outputs": list(main.outputs),
                "slots": [
                    {"slot": b.slot, "role": b.role, "type_name": b.type_name, "slot_id": b.slot_id}
                    for b in bindings.get(main.name, [])
                ],
            }
            for main in mains
        ],
        "functions": [f.name for f in program.functions if f not in mains],
        "parts": part_names(program),
        "models": {slot: parameters for slot, (parameters, _) in models.items()},
        "parameters": {
            slot: [
                {"name": p.name, "shape": list(p.shape), "trained": p.trained, "why": p.why}
                for p in listed.parameters
            ]
            for slot, (_, listed) in models.items()
        },
        "model_warnings": {
            slot: list(listed.warnings) for slot, (_, listed) in models.items() if listed.warnings
        },
        "wire_edges": list(_described(mains)),
    }


def _models(program: Program) -> Iterator[tuple[str, tuple[str, ParameterList]]]:
    """Yield each slot with a model whose class is installed here, and its trained parameters."""
    for function in program.functions:
        for slot, stored in function.defaults.items():
            role = function.metadata.get(keys.SLOT_ROLE_PREFIX + slot, "")
            type_name = function.metadata.get(keys.CONCRETE_TYPE_SLOT_PREFIX + slot, "")
            if role.split("|")[0] != Model.ROLE or type_name not in known_types():
                continue
            try:
                cls = component_class(type_name)
                if issubclass(cls, Model):
                    config = build_config(cls, slot, stored.value, {})
                    parameters = cls.parameters_told(config)
                    if parameters:
                        yield slot, (parameters, cls.parameters_listed(config))
            except BbnodeError as error:
                yield slot, (str(error), ParameterList())


def mains_of(program: Program) -> list[Function]:
    """Return the partition mains, in the program's order."""
    return [f for f in program.functions if keys.TARGET_KEY in f.metadata]


def bindings_of(program: Program) -> dict[str, list[Binding]]:
    """Return the binding table, by target name. Raises DeploymentError for a malformed entry."""
    bindings: dict[str, list[Binding]] = {}
    names = {f.name for f in program.functions}
    for key, value in program.metadata.items():
        if key.startswith(keys.BINDING_PREFIX):
            rest = key.removeprefix(keys.BINDING_PREFIX)
            # A class name may hold dots, so the target is the longest prefix that exists.
            target = max((n for n in names if rest.startswith(n + ".")), key=len, default="")
            bindings.setdefault(target, []).append(
                Binding.decode(target, rest[len(target) + 1 :], value)
            )
    return bindings


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCrossing:
    """A receiving wire op and the sending one that feeds it.

    `source` and `send` are None when no target of the artifact sends to it.
    """

    source: Function | None
    send: OpNode | None
    to: Function
    recv: OpNode
    site_id: int


def wire_edges(mains: Sequence[Function]) -> Iterator[WireCrossing]:
    """Yield all wire edges between partition mains, found by the site that a Send addresses.

    Raises ArtifactRejected for a site id that is no 64-bit number.
    """
    senders: dict[Any, tuple[Function, OpNode]] = {}
    for main in mains:
        for node in main.nodes:
            if is_wire(node, *keys.SEND_OPS):
                for name, attribute in node.attributes.items():
                    if name.startswith(keys.DEST_SUFFIX_PREFIX):
                        senders[attribute.value] = (main, node)
    for main in mains:
        for node in main.nodes:
            site = node.metadata.get(keys.SITE_ID_KEY)
            if site is None or not is_wire(node, *keys.RECV_OPS):
                continue
            site_id = int(site) if _is_natural(site) else MAX_SITE_ID + 1
            if site_id > MAX_SITE_ID:
                raise ArtifactRejected(
                    f"op {node.name!r} has the site id {site:.40}, which is no 64-bit number; "
                    "compile the program again"
                )
            source, send = senders.get(site_suffix(site_id), (None, None))
            yield WireCrossing(source=source, send=send, to=main, recv=node, site_id=site_id)


def _described(mains: Sequence[Function]) -> Iterator[dict[str, Any]]:
    gates = {main.name: _gates(main) for main in mains}
    for edge in wire_edges(mains):
        source, send, recv = edge.source, edge.send, edge.recv
        sent = [] if source is None or send is None else gates[source.name].get(send.name, [])
        yield {
            "value": recv.outputs[0] if recv.outputs else "",
            "op": recv.op_type if send is None else f"{send.op_type} → {recv.op_type}",
            "port": None if send is None else port_of(send),
            "crosses": recv.metadata.get(keys.CROSSING_TYPE_KEY, ""),
            "from": "" if source is None else source.name,
            "to": edge.to.name,
            "transport": "" if send is None else send.metadata.get(keys.WIRE_TRANSPORT_KEY, ""),
            "site_id": str(edge.site_id),
            "gates": sent + gates[edge.to.name].get(recv.name, []),
            "deadline_ns": 0 if send is None else deadline_of(send),
            "deadline_from": "" if send is None else send.metadata.get(keys.DEADLINE_FROM_KEY, ""),
        }


def _gates(main: Function) -> Mapping[str, list[str]]:
    """Return gate op types by the wire node that they protect, in chain order."""
    gates: dict[str, list[str]] = {}
    for node in main.nodes:
        if node.op_type in keys.GATE_OPS:
            for key in _SOURCE_GATES & node.metadata.keys():
                gates.setdefault(node.metadata[key], []).append(node.op_type)
    return gates


def deadline_of(node: OpNode) -> int:
    """Return the deadline of an op in ns, or 0; raises ArtifactRejected if it is not a number."""
    attribute = node.attributes.get(keys.ATTR_DEADLINE_NS)
    if attribute is not None and type(attribute.value) is int:
        return attribute.value
    text = node.metadata.get(keys.DEADLINE_NS_KEY, "0")
    if attribute is not None or not _is_natural(text):
        raise ArtifactRejected(
            f"op {node.name!r:.80} has a deadline that is not a number; compile the program again"
        )
    return int(text)


def _is_natural(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20
