"""What an artifact says about its sites: of a Recv node, and of the ops that answer a request.

Rule: read once, at plan time, from the node, and from what reads or makes its payload.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto

from bbnode.engine.frame import EntryPlan
from bbnode.engine.ops.build import OpBuild
from bbnode.engine.planning.flatten import FlatFunction
from bbnode.engine.planning.sites import RecvSite
from bbnode.ir import keys, protos, types
from bbnode.ir.opset import lookup_op
from bbnode.ir.types import TypeNode

# Ops that hand their payload through; what counts is who reads it behind them.
_TRANSPARENT = keys.GATE_OPS | {keys.OP_DEADLINE_CHECK, "PassThrough"}


def recv_site(
    build: OpBuild, flat: FlatFunction, plan: EntryPlan, slots: Mapping[str, int]
) -> RecvSite:
    """The site of a Recv or RecvReq; raises InvalidArtifact."""
    node = build.node
    is_request = build.flat.op_type == keys.OP_RECV_REQ
    if len(build.flat.outputs) != (3 if is_request else 2) or not all(build.flat.outputs):
        raise build.wrong(f"has {len(build.flat.outputs)} outputs")
    payload = build.flat.outputs[0]
    declared = _declared(build, flat.types.get(payload))
    type_hash = None
    if protos.get_meta(node, keys.TYPE_HASH_KEY) is not None:
        type_hash = build.meta_int(keys.TYPE_HASH_KEY)
        if types.type_by_hash(type_hash) is None:
            raise build.wrong(f"expects a payload of unknown type {type_hash:#018x}")
    elif declared is not None and declared.is_leaf:
        type_hash = declared.wire_hash
    return RecvSite(
        site=build.meta_int(keys.SITE_ID_KEY),
        name=f"{flat.name}: {build.flat.name}",
        senders=sender_classes(build),
        plan=plan,
        is_request=is_request,
        declared=declared,
        type_hash=type_hash,
        trigger_only=_only_triggers(build, flat, payload),
        slot=_slot_of(build, flat, slots),
    )


def answer_types(model: ModelProto) -> dict[bytes, tuple[TypeNode, ...]]:
    """By suffix of the site where answers come in: the types that the program answers with there.

    They stand with the ops that answer, in the targets of other classes. A site to which one
    answers with anything is left out.
    """
    found: dict[bytes, dict[TypeNode, None]] = {}
    for function in model.functions:
        known = None
        for node in function.node:
            if not protos.is_wire(node, keys.OP_SEND_RESP) or not node.input:
                continue
            if known is None:
                known = protos.value_types(function)
            answer = known.get(node.input[0], types.ANY)
            if protos.get_meta(node, keys.WIRE_TRANSPORT_KEY) == keys.TRANSPORT_TRIGGER_ONLY:
                answer = types.TRIGGER
            for attribute in node.attribute:
                if attribute.name.startswith(keys.DEST_SUFFIX_PREFIX):
                    found.setdefault(attribute.s, {})[answer] = None
    return {suffix: tuple(kinds) for suffix, kinds in found.items() if types.ANY not in kinds}


def sender_classes(build: OpBuild) -> frozenset[str]:
    """The classes that send to a receiver; raises InvalidArtifact where it names none."""
    text = protos.get_meta(build.node, keys.SENDER_CLASS_KEY) or ""
    classes = frozenset(name for name in text.split(",") if name)
    if not classes:
        # Taking from anybody instead would let a stranger run what only the server may.
        raise build.wrong(
            f"has no {keys.SENDER_CLASS_KEY}, so that nobody may send to it; compile the program "
            "with this version of bbnode"
        )
    return classes


def _declared(build: OpBuild, known: TypeNode | None) -> TypeNode | None:
    attribute = protos.get_attr_proto(build.node, keys.ATTR_PAYLOAD_TYPE)
    if attribute is not None:
        node = types.type_from_proto(attribute.tp)
        if node is None:
            raise build.wrong("declares a payload of a type that is not known here")
        return node
    return known


def _only_triggers(build: OpBuild, flat: FlatFunction, payload: str) -> bool:
    """Whether nothing reads the payload as more than a trigger."""
    if protos.get_meta(build.node, keys.WIRE_TRANSPORT_KEY) == keys.TRANSPORT_TRIGGER_ONLY:
        return True
    names = [payload]
    while names:
        name = names.pop()
        if name in flat.outputs:
            return False
        for op in flat.ops:
            for port, given in enumerate(op.inputs):
                if given != name:
                    continue
                if op.domain == keys.SYSCALL_DOMAIN and op.op_type in _TRANSPARENT:
                    names.extend(op.outputs)
                    continue
                spec = lookup_op(op.domain, op.op_type)
                if spec is None or port >= len(spec.inputs):
                    return False
                if spec.inputs[port].type is not types.TRIGGER:
                    return False
    return True


def _slot_of(build: OpBuild, flat: FlatFunction, slots: Mapping[str, int]) -> int | None:
    """The slot whose component the payload is for, by the slot id that the compiler stamped."""
    wanted = protos.get_meta(build.node, keys.RECV_SLOT_ID_KEY)
    if wanted is None:
        return None
    for op in flat.ops:
        if protos.get_meta(op.node, keys.SLOT_ID_KEY) == wanted:
            slot = protos.get_meta(op.node, keys.SLOT_KEY)
            return slots.get(slot) if slot is not None else None
    return None
