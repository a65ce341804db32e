"""`analyze_wire_edges`: the payload and the destination of each wire edge.

Rule: a site id is a hash of the crossing, so that peers agree on it without negotiation, even with
another version of the program; all addresses of a program are stamped here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bbnode.compiler.analysis.crossings import Crossings
from bbnode.compiler.rewriting.gates import stamp_destination
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass, WireEdge
from bbnode.ir import keys, opset, types
from bbnode.ir.graph import Function, OpNode, ValueType, inherit, is_wire

MAX_SHOWN_TYPE_CHARS = (
    200  # cut in `crossing_type`, which is for people; the site id uses the full text
)


class AnalyzeWireEdges(Pass):
    """Stamps both ends of every wire edge.

    1. `wire_transport` of both ends is `trigger_only` when the payload is a Trigger, or when all
       that reads it wants a Trigger or just waits for it; else `data`. Responses are `data`.
       What arrives on a trigger-only edge is a Trigger, and is declared as one (value,
       `payload_type`, `type_hash`).
    2. `batch_group_id` of both ends is the same for all plain Sends of one class to one peers
       value; a request and a response are groups of their own.
    3. `site_id` of the receiver is a hash of what crosses: the program's name, the receiving
       class, the port (behind the calls of Modules that lead to it), one-way, request or response,
       and the type (`crossing_type`, on both ends), with those inside of a composite. Bodies and
       senders are not in it. The Send says where its data input lands: `dest_site_name.<input>`
       (the value) and the attribute `dest_suffix.<input>` (bytes of `/site/<id>`). Two receivers
       with one site are SiteCollision.
    4. `sender_class` of the receiver is the class that sends there, and with a fan-in all of
       them: the engine takes nothing from a peer that plays none of these.
    5. A receiver without a deadline takes that of its Send.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        wire_nodes = {
            home: {node.name: node for node in main.nodes if is_wire(node)}
            for home, main in unit.partitions.items()
        }
        transports = {home: _transports(main) for home, main in unit.partitions.items()}
        groups: dict[tuple[str, str], str] = {}
        counts = {keys.TRANSPORT_DATA: 0, keys.TRANSPORT_TRIGGER_ONLY: 0}
        feeds: dict[tuple[str, str], list[tuple[WireEdge, OpNode]]] = {}
        for edge in unit.wire_edges:
            send = wire_nodes[edge.producer_class][edge.send_node]
            recv = wire_nodes[edge.consumer_class][edge.recv_node]
            transport = transports[edge.consumer_class].get(recv.name, keys.TRANSPORT_DATA)
            counts[transport] += 1
            group = _group(edge, send, groups)
            for node in (send, recv):
                node.metadata[keys.WIRE_TRANSPORT_KEY] = transport
                node.metadata[keys.BATCH_GROUP_KEY] = group
            feeds.setdefault((edge.consumer_class, recv.name), []).append((edge, send))
            if recv.metadata.get(keys.DEADLINE_NS_KEY) is None:
                inherit(recv, send, (keys.DEADLINE_NS_KEY, keys.DEADLINE_FROM_KEY))
        crossings = Crossings(unit)
        for (home, name), fed_by in feeds.items():
            _stamp_site(crossings, wire_nodes[home][name], fed_by)
        for main in unit.partitions.values():
            _declare_triggers(main)
        return {
            "wire_edges_data": counts[keys.TRANSPORT_DATA],
            "wire_edges_trigger_only": counts[keys.TRANSPORT_TRIGGER_ONLY],
            "batch_groups": len(groups),
        }


def _stamp_site(
    crossings: Crossings, recv: OpNode, fed_by: Sequence[tuple[WireEdge, OpNode]]
) -> None:
    """Stamp a receiver and all its senders."""
    candidates = {crossings.crosses(edge, send, recv) for edge, send in fed_by}
    crosses = max(candidates, key=lambda text: (len(text), text))  # the most detailed one
    edge = fed_by[0][0]
    site = crossings.site(edge, recv, crosses)
    shown = (
        crosses if len(crosses) <= MAX_SHOWN_TYPE_CHARS else crosses[:MAX_SHOWN_TYPE_CHARS] + "…"
    )
    for node in (recv, *(send for _, send in fed_by)):
        node.metadata[keys.CROSSING_TYPE_KEY] = shown
    recv.metadata[keys.SITE_ID_KEY] = str(site)
    recv.metadata[keys.SENDER_CLASS_KEY] = ",".join(sorted({e.producer_class for e, _ in fed_by}))
    for edge, send in fed_by:
        stamp_destination(send, edge.value_name, site)


def _group(edge: WireEdge, send: OpNode, groups: dict[tuple[str, str], str]) -> str:
    alone = send.op_type != keys.OP_SEND
    peers = f"\0{send.name}" if alone else send.inputs[1]
    return groups.setdefault((edge.producer_class, peers), f"{edge.producer_class}/{len(groups)}")


def _transports(main: Function) -> dict[str, str]:
    """Return the `wire_transport` of each inbound receiver of a partition, by node name."""
    payloads = {node.outputs[0]: node for node in main.nodes if _is_inbound(node)}
    if not payloads:
        return {}
    needed = _needed(main, payloads)
    transports = {}
    for value, node in payloads.items():
        known = node.metadata.get(keys.WIRE_TRANSPORT_KEY)
        trigger_only = main.kind_of(value) is types.TRIGGER or value not in needed
        fresh = keys.TRANSPORT_TRIGGER_ONLY if trigger_only else keys.TRANSPORT_DATA
        # After the gates are inserted the readers can't be seen from here: keep the old stamp.
        transports[node.name] = known or fresh
    return transports


def _is_inbound(node: OpNode) -> bool:
    is_inbound = node.op_type in keys.INBOUND_OPS and node.domain == keys.WIRE_DOMAIN
    return is_inbound and bool(node.outputs)


def _needed(main: Function, payloads: Collection[str]) -> set[str]:
    """Return the payloads that some op reads as more than a trigger."""
    needed = {name for name in main.outputs if name in payloads}
    arrived = frozenset(payloads)
    for node in main.nodes:
        if not arrived.isdisjoint(node.computes_with):
            needed |= arrived.intersection(node.computes_with) - _trigger_inputs(node)
    return needed


def _trigger_inputs(node: OpNode) -> set[str]:
    """Return the values that a node reads through Trigger ports only."""
    spec = opset.lookup_op(node.domain, node.op_type)
    if spec is None or not spec.inputs:
        return set()
    triggers: set[str] = set()
    others: set[str] = set()
    for index, name in enumerate(node.inputs):
        port = spec.inputs[min(index, len(spec.inputs) - 1)]
        (triggers if port.type is types.TRIGGER else others).add(name)
    return triggers - others


def _declare_triggers(main: Function) -> None:
    triggers = {
        node.outputs[0]: node
        for node in main.nodes
        if _is_inbound(node)
        and node.metadata.get(keys.WIRE_TRANSPORT_KEY) == keys.TRANSPORT_TRIGGER_ONLY
    }
    if not triggers:
        return
    for node in triggers.values():
        if node.attr(keys.ATTR_PAYLOAD_TYPE) != ValueType.of(types.TRIGGER):
            node.set_attr(keys.ATTR_PAYLOAD_TYPE, types.TRIGGER)
        node.metadata[keys.TYPE_HASH_KEY] = str(types.TRIGGER.wire_hash)
    main.declare(dict.fromkeys(triggers, types.TRIGGER))
