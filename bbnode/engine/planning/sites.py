"""The sites of installed Recvs, where fills arrive, as the artifact describes them.

Rule: a site defines, before a payload is decoded, its type and its senders: this node, and peers of
a class that sends there in the program. A fill without a payload is accepted only if every op
behind the site uses the payload as a trigger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bbnode.engine.frame import EntryPlan
from bbnode.engine.ops.build import OpBuild
from bbnode.ir import keys, types
from bbnode.ir.envelope import CorrelationKind
from bbnode.ir.flatten import FlatFunction
from bbnode.ir.graph import Function, ValueType, is_wire
from bbnode.ir.opset import lookup_op
from bbnode.ir.shapes import Dim
from bbnode.ir.types import TypeNode

# Ops that pass their payload on; what counts are the ops behind them.
_TRANSPARENT = keys.GATE_OPS | {keys.OP_DEADLINE_CHECK, "PassThrough"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecvSite:
    """The site of a Recv or RecvReq. Seeds are payload, sender and, of a RecvReq, req_id."""

    site: int
    name: str
    senders: frozenset[str]  # a peer that sends here has to play one of these classes
    plan: EntryPlan
    is_request: bool
    kind: CorrelationKind  # of an envelope with a fill for it
    declared: TypeNode | None  # what the payload is, or descends from; None: anything
    shape: tuple[Dim, ...] | None  # of a tensor; None: any
    type_hash: int | None  # what the fill has to say; None: any leaf of `declared`
    node: TypeNode | None  # the leaf with that hash, if `declared` allows it
    trigger_only: bool  # a fill without a payload will do
    slot: int | None  # of the component that the payload is for


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSite:
    """The site of a RecvRespBatched."""

    site: int
    name: str
    senders: frozenset[str]  # classes that are asked
    # The types (or ancestors of them) with which the program's ops answer; empty for anything, if
    # the artifact does not say.
    answers: tuple[TypeNode, ...] = ()


def answers_with(site: ResponseSite, type_hash: int, *, trigger_only: bool) -> TypeNode | str:
    """Return the type to decode, or the kind of refusal: TypeMismatch or UnknownTypeHash."""
    node = types.TRIGGER if trigger_only else types.type_by_hash(type_hash)
    if node is None or not node.is_leaf:
        return "UnknownTypeHash"
    if site.answers and not any(node.is_a(declared) for declared in site.answers):
        return "TypeMismatch"
    return node


def accepts(site: RecvSite, type_hash: int) -> TypeNode | str:
    """Return the type to decode, or the kind of refusal: TypeMismatch or UnknownTypeHash."""
    if site.type_hash is not None:
        if type_hash != site.type_hash:
            return "TypeMismatch"
        if site.node is not None:
            return site.node
    node = types.type_by_hash(type_hash)
    if node is None or not node.is_leaf:
        return "UnknownTypeHash"
    if site.declared is not None and not node.is_a(site.declared):
        return "TypeMismatch"
    return node


def recv_site(
    build: OpBuild, flat: FlatFunction, plan: EntryPlan, slots: Mapping[str, int]
) -> RecvSite:
    """Return the site of a Recv or RecvReq; raises InvalidArtifact."""
    is_request = build.flat.op_type == keys.OP_RECV_REQ
    if len(build.flat.outputs) != (3 if is_request else 2) or not all(build.flat.outputs):
        raise build.wrong(f"has {len(build.flat.outputs)} outputs")
    payload = build.flat.outputs[0]
    declared = _declared(build, flat.types.get(payload))
    type_hash = None
    if keys.TYPE_HASH_KEY in build.node.metadata:
        type_hash = build.meta_int(keys.TYPE_HASH_KEY)
        if types.type_by_hash(type_hash) is None:
            raise build.wrong(f"expects a payload of unknown type {type_hash:#018x}")
    elif declared is not None and declared.is_leaf:
        type_hash = declared.wire_hash
    node = None if type_hash is None else types.type_by_hash(type_hash)
    if node is not None and not (node.is_leaf and (declared is None or node.is_a(declared))):
        node = None
    return RecvSite(
        site=build.meta_int(keys.SITE_ID_KEY),
        name=build.where,
        senders=sender_classes(build),
        plan=plan,
        is_request=is_request,
        kind=CorrelationKind.REQUEST if is_request else CorrelationKind.NONE,
        declared=declared,
        shape=_shape(build),
        type_hash=type_hash,
        node=node,
        trigger_only=_only_triggers(build, flat, payload),
        slot=_slot_of(build, flat, slots),
    )


def answer_types(functions: Iterable[Function]) -> dict[bytes, tuple[TypeNode, ...]]:
    """Return the types with which a program answers, by suffix of the site where answers come in.

    They are on the answering ops, in the targets of other classes. A site that accepts any answer
    is left out.
    """
    found: dict[bytes, dict[TypeNode, None]] = {}
    for function in functions:
        for node in function.nodes:
            if not is_wire(node, keys.OP_SEND_RESP) or not node.inputs:
                continue
            answer = function.kind_of(node.inputs[0]) or types.ANY
            if node.metadata.get(keys.WIRE_TRANSPORT_KEY) == keys.TRANSPORT_TRIGGER_ONLY:
                answer = types.TRIGGER
            for name in node.attributes:
                if name.startswith(keys.DEST_SUFFIX_PREFIX):
                    found.setdefault(node.attr(name), {})[answer] = None
    return {suffix: tuple(kinds) for suffix, kinds in found.items() if types.ANY not in kinds}


def sender_classes(build: OpBuild) -> frozenset[str]:
    """Return the classes that send to a receiver; raises InvalidArtifact where it names none."""
    text = build.node.metadata.get(keys.SENDER_CLASS_KEY) or ""
    classes = frozenset(name for name in text.split(",") if name)
    if not classes:
        # Accepting anybody instead would let strangers run what only the server may.
        raise build.wrong(
            f"has no {keys.SENDER_CLASS_KEY}, so that nobody may send to it; compile the program "
            "with this version of bbnode"
        )
    return classes


def _declared(build: OpBuild, known: TypeNode | None) -> TypeNode | None:
    declared = build.node.attr(keys.ATTR_PAYLOAD_TYPE)
    if declared is None:
        return known
    if not isinstance(declared, ValueType) or declared.kind is None:
        raise build.wrong("declares a payload of a type that is not known here")
    return declared.kind


def _shape(build: OpBuild) -> tuple[Dim, ...] | None:
    declared = build.node.attr(keys.ATTR_PAYLOAD_TYPE)
    return declared.shape if isinstance(declared, ValueType) else None


def _only_triggers(build: OpBuild, flat: FlatFunction, payload: str) -> bool:
    """Return True if nothing reads the payload as more than a trigger."""
    if build.node.metadata.get(keys.WIRE_TRANSPORT_KEY) == keys.TRANSPORT_TRIGGER_ONLY:
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
    """Return the slot whose component the payload is for, by the id that the compiler stamped."""
    wanted = build.node.metadata.get(keys.RECV_SLOT_ID_KEY)
    if wanted is None:
        return None
    metadata = (op.node.metadata for op in flat.ops)
    users = (entries for entries in metadata if entries.get(keys.SLOT_ID_KEY) == wanted)
    return slots.get(next(users, {}).get(keys.SLOT_KEY, ""))
