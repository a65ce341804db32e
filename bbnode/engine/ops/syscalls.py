"""Framework ops that finish at once.

Rule: one binder per op or family; semantics in one line each, as in the op table
(`ir/opset.py`). Ops that wait stand in `timing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np

from bbnode.engine import steps
from bbnode.engine.errors import CompositeMismatch, InvalidOperand, ReservedName
from bbnode.engine.frame import MISSING, Frame, Op
from bbnode.engine.ops.build import Fire, OpBuild, binds
from bbnode.engine.services import Services
from bbnode.ir import codec, keys, types
from bbnode.ir.errors import AuthorError, DecodeError
from bbnode.ir.flatten import ENGINE_DOMAIN, OP_ENTER, OP_RELAY, OP_START
from bbnode.ir.graph import OpNode, Tensor
from bbnode.ir.shapes import shape_fits, shape_text
from bbnode.ir.values import (
    TRIGGER,
    U64,
    Composite,
    CorrelationToken,
    Metadata,
    Timestamp,
    Value,
    type_of,
)

SYSCALL = keys.SYSCALL_DOMAIN
COMPOSITE = keys.COMPOSITE_DOMAIN

_RESERVED_TOPICS = ("bb.", keys.PREFIX)


def constant_value(build: OpBuild) -> Value:
    """Return the value that a Constant carries; tensors are read-only."""
    try:
        return carried_by(build.node)
    except (DecodeError, AuthorError, ValueError, TypeError) as error:
        raise build.wrong(f"holds a value that can't be read: {error}") from error


def carried_by(node: OpNode) -> Value:
    """Return the value in a Constant's attribute.

    Raises ValueError, TypeError, DecodeError or AuthorError where there is none.
    """
    value = node.attr("value")
    if isinstance(value, Tensor):
        array = np.array(value.numpy())
        array.flags.writeable = False
        type_of(array)  # refuses dtypes that are no values
        return array
    text = value if isinstance(value, bytes) else b""
    type_id, mark, payload = text.partition(b"\0")
    kind = types.type_by_id(type_id.decode("utf-8", "replace")) if mark else None
    if kind is None:
        raise ValueError("it is neither a tensor nor `<type id> 0 <payload>`")
    return codec.decode_value(kind, payload)


@binds(SYSCALL, "Constant")
def _constant(build: OpBuild) -> Fire:
    # Reached only by a Constant that waits for something; others are part of the frame's
    # template.
    value = constant_value(build)
    return lambda _frame: value


@binds(ENGINE_DOMAIN, OP_START)
def _start(build: OpBuild) -> Fire:
    """A Pulse in a bootstrap."""
    build.arity(0, 1)
    return lambda _frame: TRIGGER


@binds(ENGINE_DOMAIN, OP_ENTER)
def _enter(build: OpBuild) -> Fire:
    inputs = build.inputs
    build.op.outs = build.outputs
    tail = (TRIGGER,) if len(build.outputs) > len(inputs) else ()

    def fire(frame: Frame) -> Any:
        values = frame.values
        return (*[values[i] for i in inputs], *tail)

    return fire


@binds(ENGINE_DOMAIN, OP_RELAY)
def _relay(build: OpBuild) -> Fire:
    """One input of Any, Threshold or DeadlineMatch."""
    (source,) = build.inputs
    counter, skips, rivals = build.counter, build.skips, build.rivals
    threshold = 1
    passes_value = build.node.op_type == "Any"
    if build.node.op_type == "Threshold":
        threshold = build.attr_int("n", minimum=1)  # with more than its inputs it is a join
    latch, opens, op = build.latch, build.opens_round, build.op
    index = build.flat.position - build.flat.group
    group, out = build.group, build.outputs[0]
    reason = f"{build.where}: another execution was first"

    def fire(frame: Frame) -> Any:
        values = frame.values
        arrived = values[counter]
        arrived = 1 if arrived is MISSING else arrived + 1
        values[counter] = arrived
        rt: Services = frame.rt
        if arrived != threshold:
            return rt.executor.retire(frame)
        if latch is not None and not rt.latches.is_first(latch, frame, index, opens=opens):
            values[skips] = rivals - threshold  # it stands for all that come in this execution
            return rt.executor.skip(frame, op, reason)
        return values[source] if passes_value else TRIGGER

    def skip(frame: Frame, _reason: str) -> bool:
        """The op is skipped once too few of its inputs are left."""
        before = frame.values[skips]
        frame.values[skips] = skipped = 1 if before is MISSING else before + 1
        is_over: bool = skipped == rivals - threshold + 1
        if is_over and opens and latch is not None:
            frame.rt.latches.close(latch, frame.execution)
        if is_over and frame.lost is not None and _any_lost(group, frame.lost):
            frame.lost.add(out)  # a failure is why, so that no step says that it was skipped
        return is_over

    def lose(frame: Frame) -> bool:
        """Count as skipped; a round stays open, since the others' executions may bring more."""
        before = frame.values[skips]
        frame.values[skips] = gone = 1 if before is MISSING else before + 1
        is_over: bool = gone == rivals - threshold + 1
        return is_over

    build.op.skip = skip
    build.op.lose = lose
    return fire


def _any_lost(relays: Sequence[Op], lost: Set[int]) -> bool:
    return any(not lost.isdisjoint(relay.needs) for relay in relays)


def open_round(latch: int) -> Fire:
    """Return a `fire` that opens a round of a latch, before anything else of its execution."""

    def fire(frame: Frame) -> Any:
        frame.rt.latches.open(latch, frame.execution)
        return TRIGGER

    return fire


@binds(SYSCALL, "PassThrough", "GateDispatch")
def _pass_through(build: OpBuild) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs
    output = build.flat.outputs[0]
    declared = build.shapes.get(output)
    if declared is None:
        return lambda frame: frame.values[source]
    name = build.flat.name

    def checked(frame: Frame) -> Any:
        value = frame.values[source]
        shape = getattr(value, "shape", None)
        if type(shape) is tuple and not shape_fits(declared, shape, {}):
            raise InvalidOperand(
                f"{name}: {output!r} is declared {shape_text(declared)}, got {shape_text(shape)}"
            )
        return value

    return checked


@binds(SYSCALL, "Gate", "GateManyDispatch")
def _gate(build: OpBuild) -> Fire:
    """The value, once the triggers are there too."""
    if not build.inputs:
        raise build.wrong("has no value input")
    source = build.inputs[0]
    return lambda frame: frame.values[source]


@binds(SYSCALL, "OnTrigger")
def _on_trigger(build: OpBuild) -> Fire:
    build.arity(1, 1)
    return lambda _frame: TRIGGER


@binds(SYSCALL, "When")
def _when(build: OpBuild) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs
    expected = build.attr_int("expect", 1)
    if expected not in (0, 1):
        raise build.wrong("expects neither 0 nor 1")
    op, where = build.op, build.where
    reason = f"the condition of {where} is {'false' if expected else 'true'}"

    def fire(frame: Frame) -> Any:
        if one_bool(where, frame.values[source]) is bool(expected):
            return TRIGGER
        return frame.rt.executor.skip(frame, op, reason)

    return fire


@binds(SYSCALL, keys.OP_CHOOSE)
def _choose(build: OpBuild) -> Fire:
    build.arity(3, 1)
    condition, first, second = build.inputs
    where = build.where

    def fire(frame: Frame) -> Any:
        values = frame.values
        return values[first if one_bool(where, values[condition]) else second]

    return fire


def one_bool(where: str, value: Value) -> bool:
    """Return a condition; raises InvalidOperand for what is not one bool."""
    if not isinstance(value, np.ndarray) or value.dtype != np.bool_ or value.size != 1:
        raise InvalidOperand(f"{where}: the condition has to be one bool, not {told(value)}")
    return bool(value.reshape(()))


def told(value: Value) -> str:
    """Return what a value is, for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {list(value.shape)}"
    return type(value).__name__


@binds(SYSCALL, "Tee")
def _tee(build: OpBuild) -> Fire:
    fanout = build.attr_int("fanout", minimum=1)
    build.arity(1, fanout)
    (source,) = build.inputs
    count = len(build.outputs)
    build.op.outs = build.outputs
    return lambda frame: (frame.values[source],) * count


@binds(SYSCALL, "AppEmit")
def _app_emit(build: OpBuild) -> Fire:
    build.arity(1, 0)
    (source,) = build.inputs
    return surface(build.target, _topic(build), source)


@binds(SYSCALL, "AppNotify")
def _app_notify(build: OpBuild) -> Fire:
    build.arity(1, 0)
    return surface(build.target, _topic(build), None)


def _topic(build: OpBuild) -> str:
    name = build.attr_text("name")
    if name.startswith(_RESERVED_TOPICS):
        raise ReservedName(
            build.where, f"{build.flat.op_type} uses the name {name!r}, which is the framework's"
        )
    return name


def surface(target: str, topic: str, source: int | None) -> Fire:
    """Return a `fire` that shows a value to the application; without a source, a trigger."""

    def fire(frame: Frame) -> Any:
        value = TRIGGER if source is None else frame.values[source]
        frame.rt.reports.steps.append(
            steps.make_app_event(
                target, topic, value, frame.execution, frame.chain, frame.source_peer
            )
        )
        return TRIGGER

    return fire


def surface_nothing(target: str, name: str) -> Callable[[Frame, str], bool]:
    """Return a `skip` that tells the application why an output has no value."""

    def skip(frame: Frame, reason: str) -> bool:
        frame.rt.reports.steps.append(
            steps.OutputSkipped(
                execution=frame.execution,
                target=target,
                name=name,
                reason=reason,
                chain=frame.chain,
            )
        )
        return True

    return skip


@binds(SYSCALL, "Record")
def _record(build: OpBuild) -> Fire:
    build.arity(1, 0)
    (source,) = build.inputs
    name = build.attr_text("name")

    def fire(frame: Frame) -> Any:
        rt: Services = frame.rt
        rt.records.add(rt.clock.now_ns, frame.execution, name, frame.values[source])
        return TRIGGER

    return fire


@binds(SYSCALL, "IncrMetric")
def _incr_metric(build: OpBuild) -> Fire:
    build.arity(1, 0)
    name = f"metric.{build.attr_text('name')}"
    delta = build.node.attr("delta", 1)
    if type(delta) is not int:
        raise build.wrong("needs an integer attribute 'delta'")

    def fire(frame: Frame) -> Any:
        frame.rt.reports.counts[name] += delta
        return TRIGGER

    return fire


@binds(SYSCALL, "Clock")
def _clock(build: OpBuild) -> Fire:
    build.arity(1, 1)
    return lambda frame: Timestamp(frame.rt.clock.now_ns)


@binds(SYSCALL, "RngU64")
def _rng_u64(build: OpBuild) -> Fire:
    build.arity(1, 1)
    return lambda frame: U64(frame.rt.rng.next_u64())


@binds(SYSCALL, "Metadata.Number")
def _metadata_number(build: OpBuild) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs
    key, where = build.attr_text("key"), build.where

    def fire(frame: Frame) -> Any:
        given = frame.values[source]
        if not isinstance(given, Metadata):
            raise InvalidOperand(f"{where}: {told(given)} is no Metadata")
        number = given.get(key)
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise InvalidOperand(f"{where}: the entry {key!r} is {number!r:.40}, not a number")
        with np.errstate(over="ignore"):
            return np.array(number, np.float32)

    return fire


@binds(SYSCALL, "CorrelateTag", "MintDispatch")
def _correlate_tag(build: OpBuild) -> Fire:
    build.arity(1, 1)
    return lambda frame: CorrelationToken(frame.rt.wire_ids.next_u64())


@binds(COMPOSITE, keys.OP_BUNDLE)
def _bundle(build: OpBuild) -> Fire:
    inputs = build.inputs
    if build.attr_int("child_count", len(inputs)) != len(inputs) or not inputs:
        raise build.wrong(f"packs {len(inputs)} parts and announces another number")
    declared = build.child_types(len(inputs))
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        values = frame.values
        parts = Composite([values[i] for i in inputs])
        check_children(name, parts, declared)
        return parts

    return fire


@binds(COMPOSITE, keys.OP_UNBUNDLE)
def _unbundle(build: OpBuild) -> Fire:
    count = build.attr_int("child_count", len(build.outputs))
    if count != len(build.outputs) or not count or len(build.inputs) != 1:
        raise build.wrong(f"has {len(build.outputs)} outputs and announces {count} children")
    declared = build.child_types(count)
    (source,) = build.inputs
    name = build.flat.name
    build.op.outs = build.outputs

    def fire(frame: Frame) -> Any:
        parts = frame.values[source]
        if not isinstance(parts, Composite) or len(parts) != count:
            held = (
                f"{len(parts)} children" if isinstance(parts, Composite) else type(parts).__name__
            )
            raise CompositeMismatch(f"{name} expects {count} children and got {held}")
        check_children(name, parts, declared)
        return parts

    return fire


def check_children(name: str, parts: Composite, declared: tuple[types.TypeNode, ...]) -> None:
    """Raise CompositeMismatch when a child is of another type than declared."""
    for index, (part, node) in enumerate(zip(parts, declared, strict=False)):
        actual = type_of(part)
        if actual is not node and not actual.is_a(node):
            raise CompositeMismatch(
                f"{name}: child {index} is {actual.name} where the program says {node.name}"
            )
