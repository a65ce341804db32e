"""`ai.onnx` ops on lists of peers and of addresses, which no backend knows.

Rule: a list is a 1-d array of its elements, an element a scalar, and an op means what ONNX says it
means on such an array: negative indices count from the end, `Slice` clamps and may step backwards,
an index out of range is a failure. Where the compiler knows the type of the data, it decides;
else it is the missing slot: an op that a backend runs has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from multiaddr import Multiaddr

from bbnode.engine.errors import InvalidOperand
from bbnode.engine.frame import Frame
from bbnode.engine.ops.build import Fire, OpBuild, binds
from bbnode.engine.ops.syscalls import told
from bbnode.ir import keys, peer_list_ops
from bbnode.ir.caps import MAX_PORTS
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TENSOR
from bbnode.ir.values import AddressVec, PeerIdVec, Value

_List = PeerIdVec | AddressVec


def is_peer_list_op(build: OpBuild) -> bool:
    """Return True if the engine runs an `ai.onnx` op itself."""
    flat = build.flat
    if flat.op_type not in peer_list_ops.RESULT_TYPES or not flat.inputs:
        return False
    known = [build.types.get(name) for name in flat.inputs]
    if peer_list_ops.is_peer_list_op(flat.op_type, known):
        return True
    is_tensor = known[0] is not None and known[0].is_a(TENSOR)
    return not is_tensor and keys.SLOT_KEY not in build.node.metadata


def bind_peer_list_op(build: OpBuild) -> Fire:
    """Return the `fire` of such an op; raises InvalidArtifact."""
    if len(build.outputs) != 1:
        raise build.wrong(f"has {len(build.outputs)} outputs; expected 1")
    low, high, run = _OPS[build.flat.op_type]
    attributes = {name: build.node.attr(name) for name in build.node.attributes}
    if "starts" in attributes:
        low, high = 1, 1  # a Slice of opset 9 and before
    if not low <= len(build.inputs) <= high:
        raise build.wrong(f"has {len(build.inputs)} inputs; it takes {low} to {high}")
    if attributes.get("axis", 0) not in (0, -1):
        raise build.wrong(f"names axis {attributes['axis']!r:.40}; a list has axis 0 alone")
    inputs, name = build.inputs, build.flat.name

    def fire(frame: Frame) -> Any:
        values = frame.values
        try:
            return run([values[i] for i in inputs], attributes)
        except InvalidOperand as error:
            raise InvalidOperand(f"{name}: {error}") from None

    return fire


def _identity(given: Sequence[Value], _: Mapping[str, Any]) -> Value:
    return given[0] if isinstance(given[0], PeerId | Multiaddr) else _list(given[0])


def _slice(given: Sequence[Value], attributes: Mapping[str, Any]) -> Value:
    data = _list(given[0])
    starts, ends, axes, steps = (
        _indices(name, attributes.get(name, _at(given, index)))
        for index, name in enumerate(("starts", "ends", "axes", "steps"), 1)
    )
    if starts is None or ends is None or len(starts) != 1 or len(ends) != 1:
        raise InvalidOperand("a list has one axis; give one start and one end")
    _check_axes(axes)
    step = 1 if steps is None else steps[0] if len(steps) == 1 else 0
    if step == 0:
        raise InvalidOperand("the step has to be one number, and not 0")
    return type(data)(tuple(data)[_bounds(len(data), starts[0], ends[0], step)])


def _bounds(size: int, start: int, end: int, step: int) -> slice:
    """Return ONNX's clamping (Slice-13), as a slice of Python's."""
    start, end = (start + size if start < 0 else start), (end + size if end < 0 else end)
    if step > 0:
        return slice(min(max(start, 0), size), min(max(end, 0), size), step)
    start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
    return slice(start, None if end < 0 else end, step) if size else slice(0, 0)


def _gather(given: Sequence[Value], _: Mapping[str, Any]) -> Value:
    data = _list(given[0])
    if isinstance(given[1], np.ndarray) and given[1].ndim != 1:
        raise InvalidOperand(
            f"an index of {given[1].ndim} dimensions; give a 1-d one, and let Squeeze "
            "take the element out of a list of one"
        )
    picked = _indices("indices", given[1]) or []
    for index in picked:
        if not -len(data) <= index < len(data):
            raise InvalidOperand(f"index {index} into a list of {len(data)}")
    items = tuple(data)
    return type(data)(items[index] for index in picked)


def _concat(given: Sequence[Value], _: Mapping[str, Any]) -> Value:
    lists = [_list(value) for value in given]
    kind = type(lists[0])
    if any(type(other) is not kind for other in lists):
        raise InvalidOperand("a list of peers and one of addresses can't be joined")
    return kind(item for each in lists for item in each)


def _squeeze(given: Sequence[Value], attributes: Mapping[str, Any]) -> Value:
    data = _list(given[0])
    _check_axes(_indices("axes", attributes.get("axes", _at(given, 1))))
    if len(data) != 1:
        raise InvalidOperand(f"a list of {len(data)}; only one of 1 has an element")
    return data[0]


def _unsqueeze(given: Sequence[Value], attributes: Mapping[str, Any]) -> Value:
    axes = _indices("axes", attributes.get("axes", _at(given, 1)))
    if axes is None or len(axes) != 1:
        raise InvalidOperand("an element gets one axis; give axes [0]")
    _check_axes(axes)
    if isinstance(given[0], PeerId):
        return PeerIdVec((given[0],))
    if isinstance(given[0], Multiaddr):
        return AddressVec((given[0],))
    raise InvalidOperand(f"{type(given[0]).__name__} is no peer and no address")


# Op -> least and largest number of inputs, and what it does with inputs and attributes.
_Run = Callable[[Sequence[Value], Mapping[str, Any]], Value]
_OPS: dict[str, tuple[int, int, _Run]] = {
    peer_list_ops.IDENTITY: (1, 1, _identity),
    peer_list_ops.SLICE: (3, 5, _slice),
    peer_list_ops.GATHER: (2, 2, _gather),
    peer_list_ops.CONCAT: (1, MAX_PORTS, _concat),
    peer_list_ops.SQUEEZE: (1, 2, _squeeze),
    peer_list_ops.UNSQUEEZE: (1, 2, _unsqueeze),
}


# --- ops of the framework --------------------------------------------------------------


@binds(keys.SYSCALL_DOMAIN, keys.OP_PEERS_FILTER)
def _filter(build: OpBuild) -> Fire:
    def run(where: str, peers: PeerIdVec, mask: Value) -> Value:
        is_mask = isinstance(mask, np.ndarray) and mask.dtype == np.bool_
        if not is_mask or mask.shape != (len(peers),):
            raise InvalidOperand(
                f"{where}: the mask of a list of {len(peers)} has to be {len(peers)} bools, not "
                f"{told(mask)}"
            )
        return PeerIdVec(peer for peer, keep in zip(peers, mask.tolist(), strict=True) if keep)

    return _with_second(build, run)


@binds(keys.SYSCALL_DOMAIN, keys.OP_PEERS_WITHOUT)
def _without(build: OpBuild) -> Fire:
    def run(where: str, peers: PeerIdVec, peer: Value) -> Value:
        left_out = _peer(where, peer)
        return PeerIdVec(each for each in peers if each != left_out)

    return _with_second(build, run)


@binds(keys.SYSCALL_DOMAIN, "Peers.Contains")
def _contains(build: OpBuild) -> Fire:
    return _with_second(build, lambda where, peers, peer: np.array(_peer(where, peer) in peers))


@binds(keys.SYSCALL_DOMAIN, "Peers.Count")
def _count(build: OpBuild) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs
    where = build.where
    return lambda frame: np.array(len(_peers(where, frame.values[source])), np.int64)


def _with_second(build: OpBuild, run: Callable[[str, PeerIdVec, Value], Value]) -> Fire:
    """Return the `fire` of an op that takes a list of peers and one thing more."""
    build.arity(2, 1)
    first, second = build.inputs
    where = build.where

    def fire(frame: Frame) -> Any:
        values = frame.values
        return run(where, _peers(where, values[first]), values[second])

    return fire


def _peers(where: str, value: Value) -> PeerIdVec:
    if not isinstance(value, PeerIdVec):
        raise InvalidOperand(f"{where}: {told(value)} is no list of peers")
    return value


def _peer(where: str, value: Value) -> PeerId:
    if not isinstance(value, PeerId):
        raise InvalidOperand(f"{where}: {told(value)} is no peer")
    return value


def _at(given: Sequence[Value], index: int) -> Value:
    return given[index] if index < len(given) else None


def _list(value: Value) -> _List:
    if not isinstance(value, PeerIdVec | AddressVec):
        raise InvalidOperand(f"{type(value).__name__} is no list of peers or addresses")
    return value


def _indices(what: str, value: Any) -> list[int] | None:
    """Return the numbers of an attribute, or of a tensor of at most one axis; None if absent."""
    if value is None:
        return None
    array = np.asarray(value)
    if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidOperand(f"{what} has to be a list of whole numbers")
    return [int(number) for number in array.reshape(-1)]


def _check_axes(axes: list[int] | None) -> None:
    if axes is not None and axes not in ([0], [-1]):
        raise InvalidOperand(f"axes {axes}; a list has axis 0 alone")
