"""Ops that open batches of answers.

Rule: answers are peers' values, so that each is looked at before it is used, and a failure names
the peers whose answers do not fit. What is copied is charged to the node's byte budget until the
execution ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bbnode.engine.errors import AnswersDiffer, InvalidOperand, NoAnswer
from bbnode.engine.frame import Frame
from bbnode.engine.ops.build import Fire, OpBuild, binds
from bbnode.engine.services import Services
from bbnode.ir import keys, types
from bbnode.ir.peer import PeerId
from bbnode.ir.texts import listed
from bbnode.ir.types import TypeNode
from bbnode.ir.values import (
    Composite,
    Metadata,
    PeerIdVec,
    ResponseBatch,
    TensorSequence,
    Value,
    dtype_of,
    size_of,
    type_of,
)

RESPONSES = keys.RESPONSES_DOMAIN
MAX_NAMED = 4  # peers in the message of one failure; the rest is counted

Array = np.ndarray[Any, Any]


@binds(RESPONSES, "Peers")
def _peers(build: OpBuild) -> Fire:
    return _of_batch(build, lambda batch: batch.peers)


@binds(RESPONSES, "Missing")
def _missing(build: OpBuild) -> Fire:
    return _of_batch(build, lambda batch: PeerIdVec(batch.missing))


@binds(RESPONSES, "Count")
def _count(build: OpBuild) -> Fire:
    return _of_batch(build, lambda batch: np.array(len(batch.responses), np.int64))


@binds(RESPONSES, "Of")
def _of(build: OpBuild) -> Fire:
    build.arity(2, 1)
    source, peer_at = build.inputs
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        batch = _batch(name, frame.values[source])
        wanted = frame.values[peer_at]
        if not isinstance(wanted, PeerId):
            raise InvalidOperand(f"{name}: {type(wanted).__name__} is not a peer")
        for peer, answer in batch.responses:
            if peer == wanted:
                return answer
        asked = "has not answered" if wanted in batch.missing else "was not asked"
        raise NoAnswer(f"{name}: {wanted} {asked}")

    return fire


@binds(RESPONSES, keys.OP_UNBUNDLE)
def _unbundle(build: OpBuild) -> Fire:
    count = build.attr_int("child_count", len(build.outputs))
    if count != len(build.outputs) or not count or len(build.inputs) != 1:
        raise build.wrong(f"has {len(build.outputs)} outputs and announces {count} children")
    declared = build.child_types(count) or (types.ANY,) * count
    (source,) = build.inputs
    name = build.flat.name
    build.op.outs = build.outputs

    def fire(frame: Frame) -> Any:
        batch = _batch(name, frame.values[source])
        for peer, answer in batch.responses:
            if not isinstance(answer, Composite) or len(answer) != count:
                raise AnswersDiffer(f"{name}: the answer of {peer} is no composite of {count}")
            for index, (part, node) in enumerate(zip(answer, declared, strict=True)):
                if not type_of(part).is_a(node):
                    raise AnswersDiffer(
                        f"{name}: part {index} of the answer of {peer} is {type_of(part).name} "
                        f"where the program says {node.name}"
                    )
        return tuple(
            ResponseBatch(
                responses=tuple((peer, answer[index]) for peer, answer in batch.responses),
                missing=batch.missing,
                took_ns=batch.took_ns,
            )
            for index in range(count)
        )

    return fire


@binds(RESPONSES, "Stack")
def _stack(build: OpBuild) -> Fire:
    return _joined(build, lambda shape: shape, lambda arrays: np.stack(arrays), "shape")


@binds(RESPONSES, "Concat")
def _concat(build: OpBuild) -> Fire:
    axis = build.node.attr("axis", 0)
    if type(axis) is not int or axis < 0:
        raise build.wrong("needs an integer attribute 'axis' of 0 or more")

    def others(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:axis], -1, *shape[axis + 1 :]) if axis < len(shape) else ()

    return _joined(
        build, others, lambda arrays: np.concatenate(arrays, axis), f"shape beside axis {axis}"
    )


@binds(RESPONSES, "Values")
def _values(build: OpBuild) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs
    name = build.flat.name
    kind = build.types.get(build.flat.outputs[0], types.ANY) if build.flat.outputs else types.ANY
    element = kind.element
    if element is None or types.SEQUENCE_OF.get(element) is not kind:
        raise build.wrong(f"gives {kind.name}, which is no sequence of tensors of one type")

    def fire(frame: Frame) -> Any:
        batch = _batch(name, frame.values[source])
        arrays = [_tensor(name, peer, answer, element) for peer, answer in batch.responses]
        rt: Services = frame.rt
        frame.hold_charge(rt.stores.charge(sum(map(size_of, arrays)), name))
        return TensorSequence(arrays, element)

    return fire


@binds(RESPONSES, "Entry")
def _entry(build: OpBuild) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs
    entry = build.attr_text("name")
    node = build.attr_tensor_type("to")
    dtype = dtype_of(node)
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        batch = _batch(name, frame.values[source])
        made = np.zeros(len(batch.responses), dtype)
        for index, (peer, answer) in enumerate(batch.responses):
            value = answer.get(entry) if isinstance(answer, Metadata) else None
            if not isinstance(value, bool | int | float):
                held = "is missing" if value is None else f"is {type(value).__name__}"
                raise AnswersDiffer(
                    f"{name}: the entry {entry!r} of the answer of {peer} {held}; expected a number"
                )
            try:
                with np.errstate(over="ignore"):
                    made[index] = value
            except (OverflowError, ValueError) as error:
                raise AnswersDiffer(
                    f"{name}: the entry {entry!r} of the answer of {peer} is no {node.name}"
                ) from error
        made.flags.writeable = False
        return made

    return fire


# --- reading answers ----------------------------------------------------------------------


def _batch(name: str, value: Value) -> ResponseBatch:
    if not isinstance(value, ResponseBatch):
        raise InvalidOperand(f"{name}: {type(value).__name__} is no batch of answers")
    return value


def _of_batch(build: OpBuild, read: Callable[[ResponseBatch], Value]) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs
    name = build.flat.name
    return lambda frame: read(_batch(name, frame.values[source]))


def _joined(
    build: OpBuild,
    has_to_agree: Callable[[tuple[int, ...]], tuple[int, ...]],
    join: Callable[[Sequence[Array]], Array],
    what: str,
) -> Fire:
    """Return the `fire` of an op that puts all answers into one tensor.

    Args:
        has_to_agree: the part of a shape that is the same in all answers.
        join: makes the tensor.
        what: names that part.
    """
    build.arity(1, 1)
    (source,) = build.inputs
    name = build.flat.name
    declared = (
        build.types.get(build.flat.outputs[0], types.ANY) if build.flat.outputs else types.ANY
    )

    def fire(frame: Frame) -> Any:
        batch = _batch(name, frame.values[source])
        if not batch.responses:
            raise NoAnswer(f"{name}: nobody has answered; ask for a quorum of at least 1")
        arrays = [_tensor(name, peer, answer, declared) for peer, answer in batch.responses]
        kinds = [(array.dtype, has_to_agree(array.shape)) for array in arrays]
        if len(set(kinds)) > 1:
            raise _differ(name, what, batch, arrays, kinds)
        rt: Services = frame.rt
        frame.hold_charge(rt.stores.charge(sum(array.nbytes for array in arrays), name))
        try:
            made = join(arrays)
        except ValueError as error:
            raise AnswersDiffer(f"{name}: {error}") from error
        made.flags.writeable = False
        return made

    return fire


def _tensor(name: str, peer: PeerId, answer: Value, declared: TypeNode) -> Array:
    kind = type_of(answer)
    if not kind.is_a(types.TENSOR) or not kind.is_a(declared):
        wanted = declared.name if declared.is_a(types.TENSOR) else types.TENSOR.name
        raise AnswersDiffer(f"{name}: the answer of {peer} is {kind.name}, not {wanted}")
    return np.asarray(answer)


def _differ(
    name: str,
    what: str,
    batch: ResponseBatch,
    arrays: Sequence[Array],
    kinds: Sequence[tuple[Any, tuple[int, ...]]],
) -> AnswersDiffer:
    """Name the peers whose answers are not as most are; of ties, as the first is."""
    (usual, count), *_ = Counter(kinds).most_common(1)
    odd = [
        f"{peer} {array.dtype} {list(array.shape)}"
        for (peer, _), array, kind in zip(batch.responses, arrays, kinds, strict=True)
        if kind != usual
    ]
    first = arrays[kinds.index(usual)]
    return AnswersDiffer(
        f"{name}: the answers differ in type or {what}: {count} are {first.dtype} "
        f"{list(first.shape)}, but {listed(odd, MAX_NAMED)}"
    )
