"""What a wire op's peers say of it: how many they are, and which one.

Rule: only what the program itself proves counts. A selector may find fewer peers than it is
asked for, so a number of peers is the most there can be.
"""

from __future__ import annotations

from collections.abc import Mapping

from bbnode.compiler.analysis import order
from bbnode.compiler.errors import ExpansionFailed, Where
from bbnode.ir import codec, keys, plain, types
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.plain import Function, Node
from bbnode.ir.values import PeerIdVec

PEERS_INPUT = 1  # of Send and SendReqBatched
UNKNOWN_SIZE = 0  # of a cohort
_SELECTOR_DOMAIN = keys.role_domain("PeerSelector")

# Ops that hand their peers on whole.
_SAME_PEERS = frozenset({"PassThrough", "Gate", "GateDispatch", "GateManyDispatch", "Tee"})

Made = Mapping[str, int]


def expand_wire(function: Function, node: Node, made: Made) -> int:
    """Complete a Send or a SendReqBatched in place; gives how many attributes were written.

    Args:
        function: the body that holds the node.
        node: any wire op.
        made: index of the node that makes each value of the body.

    Raises:
        ExpansionFailed: the quorum does not fit the peers.
    """
    if len(node.input) <= PEERS_INPUT:
        return 0
    if node.op_type == keys.OP_SEND:
        return _expand_send(function, node, made)
    if node.op_type == keys.OP_SEND_REQ_BATCHED:
        return _expand_request(function, node, made)
    return 0


def _expand_send(function: Function, node: Node, made: Made) -> int:
    peers = fixed_peers(function, node.input[PEERS_INPUT], made)
    if peers is None or len(peers) != 1:
        return 0
    return _write(node, keys.ATTR_PEER, peers[0].to_bytes())


def _expand_request(function: Function, node: Node, made: Made) -> int:
    size = cohort_size(function, node.input[PEERS_INPUT], made)
    quorum = node.get_attr(keys.ATTR_QUORUM, 0)
    if quorum < 0:
        raise expansion_failed(node, f"quorum is {quorum}, it has to be 0 (all) or more")
    if size is not None and quorum > size:
        raise expansion_failed(node, f"quorum is {quorum}, but only {size} peers are asked")
    variant = keys.VARIANT_ONE_SHOT if size == 1 else keys.VARIANT_COHORT
    written = _write(node, keys.ATTR_COHORT_SIZE, UNKNOWN_SIZE if size is None else size)
    return written + _write(node, keys.ATTR_VARIANT, variant)


def _write(node: Node, name: str, value: bytes | int | str) -> int:
    stored = value.encode() if isinstance(value, str) else value
    if node.get_attr(name) == stored:
        return 0
    node.set_attr(name, value)
    return 1


def cohort_size(function: Function, peers: str, made: Made) -> int | None:
    """How many peers a value names at most, where the program says so.

    `Sample` and a `Select` with n, constants, a `sender`, and every value that is a PeerId.
    """
    fixed = fixed_peers(function, peers, made)
    if fixed is not None:
        return len(fixed)
    node = _maker(function, peers, made)
    if (
        node is not None
        and node.domain == _SELECTOR_DOMAIN
        and node.op_type in ("Sample", "Select")
    ):
        count = node.get_attr("n", 0)
        return count if isinstance(count, int) and count > 0 else None
    if node is not None and plain.is_wire(node) and peers in node.output[1:]:
        return 1
    return 1 if _is_one_peer(function, peers) else None


def fixed_peers(function: Function, peers: str, made: Made) -> tuple[PeerId, ...] | None:
    """The peers that a constant names, each once; None when it is no constant of peers."""
    node = _maker(function, peers, made)
    if node is None or node.domain != keys.SYSCALL_DOMAIN or node.op_type != "Constant":
        return None
    raw = node.get_attr("value")
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


def _maker(function: Function, value: str, made: Made) -> Node | None:
    """The node that makes a value, seen through ops that hand it on whole."""
    seen: set[str] = set()
    while value not in seen and (index := made.get(value)) is not None:
        seen.add(value)
        node = function.node[index]
        hands_on = node.domain == keys.SYSCALL_DOMAIN and node.op_type in _SAME_PEERS
        is_identity = order.is_graph_op(node) and node.op_type == "Identity"
        if not ((hands_on or is_identity) and node.input):
            return node
        value = node.input[0]
    return None


def _is_one_peer(function: Function, value: str) -> bool:
    return function.kind_of(value) is types.PEER_ID


def expansion_failed(node: Node, reason: str) -> ExpansionFailed:
    """The error of an op that can't be completed."""
    return ExpansionFailed(
        op_type=node.op_type,
        domain=node.domain,
        reason=reason,
        node_name=node.name,
        where=Where.of(node),
    )
