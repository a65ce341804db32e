"""`expand_ops`: explicit values for all defaults.

Rule: a table of expanders by op; each completes a node in place and is idempotent. Every op of
our op table gets its attribute defaults; `ai.onnx` ops do not, since ONNX's own schemas define
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bbnode.compiler.analysis.order import split_names
from bbnode.compiler.analysis.signatures import import_used, versions_of, write_canonical_domains
from bbnode.compiler.errors import ExpansionFailed, Where
from bbnode.compiler.rewriting.inlining import references, resolve_defaults
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import codec, keys, opset, types
from bbnode.ir.errors import DecodeError
from bbnode.ir.flatten import join_fault
from bbnode.ir.graph import Attribute, AttributeKind, Function, OpNode, is_onnx_op, is_wire
from bbnode.ir.opset import REQUIRED, OpSpec
from bbnode.ir.peer import PeerId
from bbnode.ir.values import PeerIdVec

# Attributes that any op may carry beside those in its row of the op table.
_COMMON_ATTRIBUTES = frozenset({keys.ATTR_PEER, keys.ATTR_DEADLINE_NS, keys.ATTR_PAYLOAD_TYPE})

_KIND_OF: dict[type, frozenset[AttributeKind]] = {
    int: frozenset({AttributeKind.INT}),
    str: frozenset({AttributeKind.STRING}),
    float: frozenset({AttributeKind.FLOAT, AttributeKind.INT}),
}

Expander = Callable[[OpNode], int]


class ExpandOps(Pass):
    """Completes the attributes of every op of our op table.

    1. A reference to a defaulted attribute of the function becomes that default (`Constant` of
       a sub-Module). Calls that give another value were inlined; one that is left without a
       value is ExpansionFailed.
    2. A missing attribute takes its default; a missing required one, one of the wrong kind, one
       without its value, and one that the op does not have are ExpansionFailed.
    3. `Bundle` counts its parts, `Unbundle` its outputs; `Tee` has to fit its
       outputs; the numbers of a `Threshold` and a `Collect` fit each other.
    4. A request says how many peers it asks at most, as far as the program says it
       (`cohort_size`, 0 where nothing does), and its `variant`: `one_shot` for a single peer,
       else `cohort`. Its quorum is not larger than that.
    5. A Send to one constant peer carries that `peer`: it is peer-routed, and gets TX gates.
    6. Upstream ONNX is written "", and a function imports the opsets that its ops use.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        expanded = 0
        for function in unit.bodies():
            write_canonical_domains(function.nodes)
            import_used(function, versions_of(function, unit.program))
            expanded += resolve_defaults(function)
            for node in function.nodes:
                if node.attributes:
                    _check_attributes(function, node)
                spec = opset.lookup_op(node.domain, node.op_type)
                if spec is None:
                    continue
                if node.attributes or spec.attributes:
                    expanded += _fill_defaults(node, spec)
                expander = EXPANDERS.get((node.domain, node.op_type))
                if expander is not None:
                    expanded += expander(node)
                elif is_wire(node):
                    expanded += expand_wire(function, node)
        return {"expansion_count": expanded}


def _check_attributes(function: Function, node: OpNode) -> None:
    for name, attribute in node.attributes.items():
        if attribute.kind is AttributeKind.UNDEFINED:
            raise expansion_failed(node, f"attribute {name!r} holds no value of its kind")
    for name in references(node):
        raise expansion_failed(
            node,
            f"an attribute stands for {name!r} of {function.name!r}, which has no value: no call "
            "gives one, and there is no default",
        )


def _fill_defaults(node: OpNode, spec: OpSpec) -> int:
    attributes = node.attributes
    is_open = node.domain in (keys.WIRE_DOMAIN, keys.COMPOSITE_DOMAIN)
    for name in attributes:
        known = name in spec.attributes or name in _COMMON_ATTRIBUTES
        if not known and not name.startswith(keys.PREFIX) and not is_open:
            raise expansion_failed(node, f"it has no attribute {name!r}")
    filled: dict[str, Attribute] = {}
    for name, default in spec.attributes.items():
        attribute = attributes.get(name)
        if attribute is None:
            if default is REQUIRED:
                raise expansion_failed(node, f"it needs the attribute {name!r}")
            filled[name] = Attribute.of(default)
        elif default is not REQUIRED and not attribute.reference:
            _check_kind(node, name, attribute, default)
    if filled:
        node.attributes = {**attributes, **filled}
    return len(filled)


def _check_kind(node: OpNode, name: str, attribute: Attribute, default: Any) -> None:
    wanted = _KIND_OF.get(type(default))
    if wanted is not None and attribute.kind not in wanted:
        raise expansion_failed(
            node,
            f"attribute {name!r} is {attribute.kind.name}, it has to be {type(default).__name__}",
        )


def _expand_bundle(node: OpNode) -> int:
    return _count_parts(node, len(node.inputs))


def _expand_unbundle(node: OpNode) -> int:
    return _count_parts(node, len(node.outputs))


def _count_parts(node: OpNode, count: int) -> int:
    stated = node.attr("child_count", 0)
    if stated not in (0, count):
        raise expansion_failed(node, f"child_count is {stated}, but it has {count} parts")
    listed = split_names(_text(node.attr("child_types", "")))
    if listed and len(listed) != count:
        raise expansion_failed(node, f"child_types lists {len(listed)} types for {count} parts")
    for type_id in listed:
        if types.type_by_id(type_id) is None:
            raise expansion_failed(node, f"child_types names the unknown type {type_id!r}")
    if stated == count:
        return 0
    node.set_attr("child_count", count)
    return 1


def _expand_tee(node: OpNode) -> int:
    fanout = node.attr("fanout")
    if fanout != len(node.outputs):
        raise expansion_failed(node, f"fanout is {fanout}, but it has {len(node.outputs)} outputs")
    return 0


def _check_join(node: OpNode) -> int:
    fault = join_fault(node)
    if fault is not None:
        raise expansion_failed(node, fault)
    return 0


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


EXPANDERS: dict[tuple[str, str], Expander] = {
    (keys.COMPOSITE_DOMAIN, keys.OP_BUNDLE): _expand_bundle,
    (keys.COMPOSITE_DOMAIN, keys.OP_UNBUNDLE): _expand_unbundle,
    (keys.RESPONSES_DOMAIN, keys.OP_UNBUNDLE): _expand_unbundle,
    (keys.SYSCALL_DOMAIN, "Tee"): _expand_tee,
    (keys.SYSCALL_DOMAIN, keys.OP_THRESHOLD): _check_join,
    (keys.SYSCALL_DOMAIN, keys.OP_COLLECT): _check_join,
}


# --- facts about a wire op from its peers: their count, and a fixed peer ------------------
# Rule: only what the program itself proves counts. A selector may find fewer peers than
# requested, so a count of peers is an upper bound.
#

PEERS_INPUT = 1  # input of Send and SendReqBatched
UNKNOWN_SIZE = 0  # the `cohort_size` of an unknown number of peers
_SELECTOR_DOMAIN = keys.role_domain("PeerSelector")

# Ops that hand all their peers on.
_SAME_PEERS = frozenset({"PassThrough", "Gate", "GateDispatch", "GateManyDispatch", "Tee"})


def expand_wire(function: Function, node: OpNode) -> int:
    """Complete a Send or a SendReqBatched in place; return the number of attributes written.

    Args:
        function: the body that holds the node.
        node: any wire op.

    Raises:
        ExpansionFailed: the quorum does not fit the peers.
    """
    if len(node.inputs) <= PEERS_INPUT:
        return 0
    if node.op_type == keys.OP_SEND:
        return _expand_send(function, node)
    if node.op_type == keys.OP_SEND_REQ_BATCHED:
        return _expand_request(function, node)
    return 0


def _expand_send(function: Function, node: OpNode) -> int:
    peers = fixed_peers(function, node.inputs[PEERS_INPUT])
    if peers is None or len(peers) != 1:
        return 0
    return _write(node, keys.ATTR_PEER, peers[0].to_bytes())


def _expand_request(function: Function, node: OpNode) -> int:
    size = cohort_size(function, node.inputs[PEERS_INPUT])
    quorum = node.attr(keys.ATTR_QUORUM, 0)
    if quorum < 0:
        raise expansion_failed(node, f"quorum is {quorum}, it has to be 0 (all) or more")
    if size is not None and quorum > size:
        raise expansion_failed(
            node,
            f"quorum is {quorum}, but only {size} peers are asked",
            f"Ask more peers, or give a `quorum=` of {size} at most",
        )
    variant = keys.VARIANT_ONE_SHOT if size == 1 else keys.VARIANT_COHORT
    written = _write(node, keys.ATTR_COHORT_SIZE, UNKNOWN_SIZE if size is None else size)
    return written + _write(node, keys.ATTR_VARIANT, variant)


def _write(node: OpNode, name: str, value: bytes | int | str) -> int:
    stored = value.encode() if isinstance(value, str) else value
    if node.attr(name) == stored:
        return 0
    node.set_attr(name, value)
    return 1


def cohort_size(function: Function, peers: str) -> int | None:
    """Return an upper bound on the peers in a value; None if the program does not give one.

    It is known for `Sample`, `Select` with n, constants, a `sender`, and every PeerId.
    """
    fixed = fixed_peers(function, peers)
    if fixed is not None:
        return len(fixed)
    node = _maker(function, peers)
    if (
        node is not None
        and node.domain == _SELECTOR_DOMAIN
        and node.op_type in ("Sample", "Select")
    ):
        count = node.attr("n", 0)
        return count if isinstance(count, int) and count > 0 else None
    if node is not None and is_wire(node) and peers in node.outputs[1:]:
        return 1
    return 1 if _is_one_peer(function, peers) else None


def fixed_peers(function: Function, peers: str) -> tuple[PeerId, ...] | None:
    """Return the peers in a constant, each once; None if the value is no constant of peers."""
    node = _maker(function, peers)
    if node is None or node.domain != keys.SYSCALL_DOMAIN or node.op_type != "Constant":
        return None
    raw = node.attr("value")
    if not isinstance(raw, bytes):
        return None
    type_id, _, payload = raw.partition(b"\0")
    kind = types.type_by_id(type_id.decode(errors="replace"))
    if kind not in (types.PEER_ID, types.PEER_ID_VEC):
        return None
    try:
        value = codec.decode_value(kind, payload)
    except DecodeError as error:
        raise expansion_failed(node, f"its value is no {kind.name}: {error}") from error
    if isinstance(value, PeerIdVec):
        return tuple(dict.fromkeys(value))
    return (value,) if isinstance(value, PeerId) else None


def _maker(function: Function, value: str) -> OpNode | None:
    """Return the node that makes a value, skipping ops that hand it on unchanged."""
    seen: set[str] = set()
    while value not in seen and (node := function.producers.get(value)) is not None:
        seen.add(value)
        hands_on = node.domain == keys.SYSCALL_DOMAIN and node.op_type in _SAME_PEERS
        is_identity = is_onnx_op(node) and node.op_type == "Identity"
        if not ((hands_on or is_identity) and node.inputs):
            return node
        value = node.inputs[0]
    return None


def _is_one_peer(function: Function, value: str) -> bool:
    return function.kind_of(value) is types.PEER_ID


def expansion_failed(node: OpNode, reason: str, remedy: str = "") -> ExpansionFailed:
    """Return the error for an op that can't be completed."""
    return ExpansionFailed(
        op_type=node.op_type,
        domain=node.domain,
        reason=reason,
        remedy=remedy,
        node_name=node.name,
        where=Where.of(node),
    )
