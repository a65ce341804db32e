"""`stamp_compilation_metadata`: passport and binding tables.

Rule: the model's metadata holds everything that install needs from the compile; nothing else of
the compiler is handed over.
"""

from __future__ import annotations

from collections.abc import Mapping

from bbnode.compiler.analysis.slots import by_slot, slots_by_target, slots_of, with_dependencies
from bbnode.compiler.rewriting.gates import chain_head
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import keys
from bbnode.ir.caps import MAX_NAME_CHARS
from bbnode.ir.graph import Function, FunctionKey, OpNode, call_key, is_role, is_wire


class StampCompilationMetadata(Pass):
    """Stamps the model and its receivers.

    1. Model metadata `compiled` is the current version.
    2. `binding.<target>.<slot>` = `<Role>|<TYPE_NAME>|<slot_id>` for each slot that the target
       uses or that a component there depends on, directly or not; the id is -1 for a slot that
       no op of the program uses. Concrete slots stand in the table like bound ones.
    3. A receiver whose payload goes into a slot op (behind its gates and a `DeadlineCheck`)
       carries that slot's id as `recv_slot_id`; with several, the first in program order.
    4. `original_op` is `<domain>::<op type>` of an op of a role, and of what an op stands for that
       a pass made: of the send that a receiver belongs to, of the op that a gate or a
       `DeadlineCheck` guards, of the ops of a subgraph (each kind once, with commas between).
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        unit.program.metadata[keys.COMPILED_KEY] = keys.COMPILED_CURRENT_VERSION
        bound = by_slot(options.bindings)
        known = slots_of(unit.bodies())
        count = receivers = 0
        for home, used in slots_by_target(unit).items():
            main = unit.partitions[home]
            for slot in with_dependencies(used, known, bound).values():
                component = slot.component(bound)
                if component is not None:
                    value = keys.encode_binding_value(slot.role, component.TYPE_NAME, slot.slot_id)
                    unit.program.metadata[keys.binding_key(main.name, slot.name)] = value
                    count += 1
            receivers += _stamp_receivers(main)
        fused = {
            function.key: ",".join(dict.fromkeys(map(_called, function.nodes)))[:MAX_NAME_CHARS]
            for function in unit.program.functions
            if function.domain == keys.BACKEND_SUBGRAPH_DOMAIN
        }
        stamped = sum(_stamp_origins(function, fused) for function in unit.bodies())
        return {
            "bindings_stamped": count,
            "recv_slots_stamped": receivers,
            "original_ops_stamped": stamped,
        }


def _stamp_origins(function: Function, fused: Mapping[FunctionKey, str]) -> int:
    if function.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
        return 0
    by_name = {node.name: node for node in function.nodes}
    stamped = 0
    for node in function.nodes:
        origin = _origin(node, by_name, fused)
        if origin:
            node.metadata[keys.ORIGINAL_OP_KEY] = origin
            stamped += 1
    return stamped


def _origin(node: OpNode, by_name: Mapping[str, OpNode], fused: Mapping[FunctionKey, str]) -> str:
    """Return the `original_op` of a node; `fused` are the op kinds of each subgraph."""
    if is_role(node):
        return _called(node)
    if is_wire(node, *keys.RECV_OPS):
        sends = keys.OP_SEND if node.op_type == keys.OP_RECV else keys.OP_SEND_REQ_BATCHED
        return f"{keys.WIRE_DOMAIN}::{sends}"
    if node.domain == keys.BACKEND_SUBGRAPH_DOMAIN and call_key(node) in fused:
        return fused[call_key(node)]
    guards = _GUARDED_KEYS.get(node.op_type)
    guarded = by_name.get(node.metadata.get(guards, "")) if guards is not None else None
    if guarded is None:
        return ""
    return _origin(guarded, by_name, fused) or _called(guarded)


def _called(node: OpNode) -> str:
    return f"{node.domain or keys.ONNX_DOMAIN}::{node.op_type}"


# The metadata key in which a gate or a check names the node that it guards.
_GUARDED_KEYS = {**keys.GATE_SOURCES, keys.OP_DEADLINE_CHECK: keys.DEADLINE_CHECK_SOURCE_KEY}


def _stamp_receivers(main: Function) -> int:
    payloads = {
        chain_head(node): node
        for node in main.nodes
        if is_wire(node) and node.op_type in keys.INBOUND_OPS and node.outputs
    }
    if not payloads:
        return 0
    stamped: set[str] = set()
    for node in main.nodes:
        recv = next((payloads[name] for name in node.inputs if name in payloads), None)
        if recv is None:
            continue
        if _is_check(node):
            payloads[node.outputs[0]] = recv
            continue
        slot_id = node.metadata.get(keys.SLOT_ID_KEY)
        if slot_id is not None and recv.name not in stamped:
            recv.metadata[keys.RECV_SLOT_ID_KEY] = slot_id
            stamped.add(recv.name)
    return len(stamped)


def _is_check(node: OpNode) -> bool:
    return node.domain == keys.SYSCALL_DOMAIN and node.op_type == keys.OP_DEADLINE_CHECK
