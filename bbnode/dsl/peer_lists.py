"""Ops on lists of peers and of addresses: slices, concatenation, filters, queries.

Rule: each helper is the `ai.onnx` op of its docstring on a 1-d list, or an op of the framework. The
engine runs it, so no backend is needed; a PeerIdVec gives a PeerIdVec, an AddressVec an
AddressVec. Peers keep their class: a slice is a valid destination like the whole list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bbnode.dsl import syscalls
from bbnode.dsl.backend.catalogue import is_int64, record_onnx
from bbnode.dsl.core.calls import takes_graph, wants_graph
from bbnode.dsl.core.graph import After, Graph, Output, as_graph
from bbnode.dsl.errors import BadArgument
from bbnode.ir import peer_list_ops, types

# "To the end" in ONNX: an end beyond the edge is the edge.
_NO_END = int(np.iinfo(np.int64).max)


def slice_list(
    g: Graph, peers: Output, start: int | Output = 0, stop: int | Output | None = None,
    step: int = 1, *, after: After = None,
) -> Output:  # fmt: skip
    """`peers[start:stop:step]`, as Python's, for a step of 1 or more. ONNX `Slice`-13.

    The bounds are integers, or values that the program computes: one int64 each. Bounds beyond
    the list are clamped to its ends.

    Raises BadArgument for a smaller step, or a bound that is neither.
    """
    if not is_int64(step) or step < 1:
        _graph(g)
        raise BadArgument(f"step={step!r:.20} has to be 1 or more")
    bounds = (start, _NO_END if stop is None else stop, 0, step)
    values = [_bound(g, bound) for bound in bounds]
    return _record(g, peer_list_ops.SLICE, (peers, *values), after)


def gather_list(
    g: Graph, peers: Output, indices: Output | Sequence[int], *, after: After = None
) -> Output:
    """The peers at `indices`: integers, or an int64 value [N]. ONNX `Gather`-13.

    A negative index counts from the end; one beyond the list fails the op.
    """
    at = _int64(g, indices) if isinstance(indices, Output) else _indices(g, indices)
    return _record(g, peer_list_ops.GATHER, (peers, at), after)


def concat_lists(g: Graph, *lists: Output, after: After = None) -> Output:
    """The peers of all lists, one list after the other. ONNX `Concat`-13."""
    return _record(g, peer_list_ops.CONCAT, lists, after, {"axis": 0})


def only_one(g: Graph, peers: Output, *, after: After = None) -> Output:
    """The one peer of a list of one; any other list fails the op. ONNX `Squeeze`-21."""
    return _record(g, peer_list_ops.SQUEEZE, (peers,), after)


def list_of_one(g: Graph, peer: Output, *, after: After = None) -> Output:
    """The list that holds one peer, or one address. ONNX `Unsqueeze`-21."""
    return _record(g, peer_list_ops.UNSQUEEZE, (peer, _indices(g, (0,))), after)


def filter_list(g: Graph, peers: Output, mask: Output, *, after: After = None) -> Output:
    """The peers at whose position `mask` is true: a bool [N] for a list of N peers.

    A mask of another length fails the op. A send to an empty result reaches nobody.
    """
    return syscalls.peers_filter(g, peers, mask, after=after)


def where(
    g: Graph, condition: Output, peers: Output, otherwise: Output, *, after: After = None
) -> Output:
    """`peers` if the condition, one bool, is true, else `otherwise`; both of one class."""
    return syscalls.choose(g, condition, peers, otherwise, after=after)


def without(g: Graph, peers: Output, peer: Output, *, after: After = None) -> Output:
    """The peers of a list except one, which need not be in it."""
    return syscalls.peers_without(g, peers, peer, after=after)


def length(g: Graph, peers: Output, *, after: After = None) -> Output:
    """The number of peers in a list: an int64 scalar."""
    return syscalls.peers_count(g, peers, after=after)


def contains(g: Graph, peers: Output, peer: Output, *, after: After = None) -> Output:
    """True if a list has the peer: a bool scalar, as `g.when` takes it."""
    return syscalls.peers_contains(g, peers, peer, after=after)


def _bound(g: Graph, bound: int | Output) -> Output:
    return _int64(g, bound) if isinstance(bound, Output) else _indices(g, (bound,))


def _int64(g: Graph, value: Output) -> Output:
    if types.meet(value.type, types.TENSOR_INT64) is None:
        _graph(g)
        raise BadArgument(
            f"{value.name!r} is {value.type.name} where whole numbers (int64) are needed; a "
            "BackendSlot casts: cast(g, value, types.TENSOR_INT64)"
        )
    return value


def _graph(g: object) -> Graph:
    return as_graph(g, "peer_lists.slice_list(g, peers, …)")


def _indices(g: Graph, numbers: Sequence[int]) -> Output:
    graph = _graph(g)
    if not isinstance(numbers, list | tuple) or not all(map(is_int64, numbers)):
        raise BadArgument(f"{numbers!r:.60} is not a list of whole numbers")
    return graph.constant(np.array(numbers, np.int64))


def _record(
    g: Graph, op_type: str, inputs: Sequence[Output], after: After,
    attributes: Mapping[str, Any] | None = None,
) -> Output:  # fmt: skip
    graph = _graph(g)
    for value in inputs:
        graph.value_name(value)
    kinds_in = [value.type for value in inputs]
    kinds = None
    if not peer_list_ops.is_peer_list_op(op_type, kinds_in):
        # An input without a type is assumed to be peers; one of another type is refused.
        assumed = types.PEER_ID if op_type == peer_list_ops.UNSQUEEZE else types.PEER_ID_VEC
        for index in peer_list_ops.data_inputs(op_type, len(kinds_in)):
            kind = kinds_in[index]
            if kind is not types.ANY:
                raise BadArgument(
                    f"{op_type} of a list of peers takes {peer_list_ops.accepted(op_type)}, got "
                    f"{kind.name}; a BackendSlot has it for tensors"
                )
        kinds = [peer_list_ops.RESULT_TYPES[op_type][assumed]]
    return record_onnx(graph, op_type, inputs, attributes or {}, after, kinds=kinds)[0]


for _name, _function in list(globals().items()):
    if wants_graph(_function) and _function.__module__ == __name__:
        globals()[_name] = takes_graph(_function, "peer_lists")
