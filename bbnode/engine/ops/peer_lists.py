"""`ai.onnx` ops on lists of peers and of addresses, which no backend knows.

Rule: a list is a 1-d array of its elements, an element a scalar, and an op means what ONNX says it
means on such an array: negative indices count from the end, `Slice` clamps and may step backwards,
an index out of range is a failure. Where the compiler knows the type of the data, it decides;
else it is the missing slot: an op that a backend runs has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from multiaddr import Multiaddr

from bbnode.engine.errors import InvalidOperand
from bbnode.engine.frame import Frame
from bbnode.engine.ops.build import Fire, OpBuild
from bbnode.ir import keys, peer_list_ops
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TENSOR
from bbnode.ir.values import AddressVec, PeerIdVec, Value

_List = PeerIdVec | AddressVec
_Run = Callable[[Sequence[Value]], Value]


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
    run = _BINDERS[build.flat.op_type](build)
    inputs = build.inputs

    def fire(frame: Frame) -> Any:
        values = frame.values
        return run([values[i] for i in inputs])

    return fire


def _identity(build: OpBuild) -> _Run:
    name = build.flat.name
    _ports(build, 1, 1)

    def run(given: Sequence[Value]) -> Value:
        if isinstance(given[0], PeerId | Multiaddr):
            return given[0]
        return _list(name, given[0])

    return run


def _slice(build: OpBuild) -> _Run:
    name = build.flat.name
    # Up to opset 9 the bounds are attributes.
    fixed = build.node.attr("starts"), build.node.attr("ends")
    axes = build.node.attr("axes")
    if fixed[0] is None:
        _ports(build, 3, 5)
    else:
        _ports(build, 1, 1)

    def run(given: Sequence[Value]) -> Value:
        data = _list(name, given[0])
        if fixed[0] is not None:
            starts, ends = _indices(name, "starts", fixed[0]), _indices(name, "ends", fixed[1])
            chosen, steps = _indices(name, "axes", axes), None
        else:
            starts, ends = _indices(name, "starts", given[1]), _indices(name, "ends", given[2])
            chosen = _indices(name, "axes", given[3] if len(given) > 3 else None)
            steps = _indices(name, "steps", given[4] if len(given) > 4 else None)
        if starts is None or ends is None or len(starts) != 1 or len(ends) != 1:
            raise InvalidOperand(f"{name}: a list has one axis; give one start and one end")
        _check_axes(name, chosen)
        step = 1 if steps is None else steps[0] if len(steps) == 1 else 0
        if step == 0:
            raise InvalidOperand(f"{name}: the step has to be one number, and not 0")
        return type(data)(tuple(data)[_bounds(len(data), starts[0], ends[0], step)])

    return run


def _bounds(size: int, start: int, end: int, step: int) -> slice:
    """ONNX's clamping (Slice-13), as a slice of Python's."""
    start, end = (start + size if start < 0 else start), (end + size if end < 0 else end)
    if step > 0:
        return slice(min(max(start, 0), size), min(max(end, 0), size), step)
    start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
    return slice(start, None if end < 0 else end, step) if size else slice(0, 0)


def _gather(build: OpBuild) -> _Run:
    name = build.flat.name
    _ports(build, 2, 2)
    _check_axis(build)

    def run(given: Sequence[Value]) -> Value:
        data = _list(name, given[0])
        if isinstance(given[1], np.ndarray) and given[1].ndim != 1:
            raise InvalidOperand(
                f"{name}: an index of {given[1].ndim} dimensions; give a 1-d one, and let Squeeze "
                "take the element out of a list of one"
            )
        picked = _indices(name, "indices", given[1]) or []
        for index in picked:
            if not -len(data) <= index < len(data):
                raise InvalidOperand(f"{name}: index {index} into a list of {len(data)}")
        items = tuple(data)
        return type(data)(items[index] for index in picked)

    return run


def _concat(build: OpBuild) -> _Run:
    name = build.flat.name
    if not build.inputs:
        raise build.wrong("has no input")
    _check_axis(build)

    def run(given: Sequence[Value]) -> Value:
        lists = [_list(name, value) for value in given]
        kind = type(lists[0])
        if any(type(other) is not kind for other in lists):
            raise InvalidOperand(f"{name}: a list of peers and one of addresses can't be joined")
        return kind(item for each in lists for item in each)

    return run


def _squeeze(build: OpBuild) -> _Run:
    name = build.flat.name
    _ports(build, 1, 2)
    fixed = build.node.attr("axes")

    def run(given: Sequence[Value]) -> Value:
        data = _list(name, given[0])
        _check_axes(name, _indices(name, "axes", given[1] if len(given) > 1 else fixed))
        if len(data) != 1:
            raise InvalidOperand(f"{name}: a list of {len(data)}; only one of 1 has an element")
        return data[0]

    return run


def _unsqueeze(build: OpBuild) -> _Run:
    name = build.flat.name
    _ports(build, 1, 2)
    fixed = build.node.attr("axes")

    def run(given: Sequence[Value]) -> Value:
        axes = _indices(name, "axes", given[1] if len(given) > 1 else fixed)
        if axes is None or len(axes) != 1:
            raise InvalidOperand(f"{name}: an element gets one axis; give axes [0]")
        _check_axes(name, axes)
        if isinstance(given[0], PeerId):
            return PeerIdVec((given[0],))
        if isinstance(given[0], Multiaddr):
            return AddressVec((given[0],))
        raise InvalidOperand(f"{name}: {type(given[0]).__name__} is no peer and no address")

    return run


_BINDERS: dict[str, Callable[[OpBuild], _Run]] = {
    peer_list_ops.IDENTITY: _identity,
    peer_list_ops.SLICE: _slice,
    peer_list_ops.GATHER: _gather,
    peer_list_ops.CONCAT: _concat,
    peer_list_ops.SQUEEZE: _squeeze,
    peer_list_ops.UNSQUEEZE: _unsqueeze,
}


def _ports(build: OpBuild, low: int, high: int) -> None:
    if not low <= len(build.inputs) <= high:
        raise build.wrong(f"has {len(build.inputs)} inputs; it takes {low} to {high}")


def _list(name: str, value: Value) -> _List:
    if not isinstance(value, PeerIdVec | AddressVec):
        raise InvalidOperand(f"{name}: {type(value).__name__} is no list of peers or addresses")
    return value


def _indices(name: str, what: str, value: Any) -> list[int] | None:
    """Whole numbers of an attribute, or of a tensor of at most one dimension; None if absent."""
    if value is None:
        return None
    array = np.asarray(value)
    if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidOperand(f"{name}: {what} has to be a list of whole numbers")
    return [int(number) for number in array.reshape(-1)]


def _check_axis(build: OpBuild) -> None:
    axis = build.node.attr("axis", 0)
    if axis not in (0, -1):
        raise build.wrong(f"names axis {axis!r:.40}; a list has axis 0 alone")


def _check_axes(name: str, axes: list[int] | None) -> None:
    if axes is not None and axes not in ([0], [-1]):
        raise InvalidOperand(f"{name}: axes {axes}; a list has axis 0 alone")
