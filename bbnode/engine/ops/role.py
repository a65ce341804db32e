"""Ops of components: contract methods called through their slot.

Rule: `op(ctx, *inputs, **attributes)`, by the op table. The component decides whether it
returns, raises, runs in a worker thread or completes later; its result is checked against
the table before it becomes a value. A component that is busy lets the op wait in line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bbnode.components.contracts import PENDING, is_offloaded, lets_others_run, only_reads
from bbnode.engine import steps
from bbnode.engine.cells import ComponentCell
from bbnode.engine.errors import UnexpectedException, WrongResultType, describe
from bbnode.engine.frame import EntryPlan, Frame, Op, Task
from bbnode.engine.ops.build import Fire, MethodUse, OpBuild
from bbnode.engine.ops.context import CallContext
from bbnode.engine.ops.declared import Declared
from bbnode.engine.services import Services
from bbnode.engine.suspensions import WaitReason
from bbnode.ir import keys, types
from bbnode.ir.envelope import CorrelationKind, WireCorrelation
from bbnode.ir.interrupts import let_stop
from bbnode.ir.opset import REQUIRED, OpSpec
from bbnode.ir.shapes import Dim
from bbnode.ir.values import TRIGGER, CommandId, Composite, ResponseBatch, Value, type_of

# A component that prepares itself has it; it is called with an OpContext, by the rules of ops.
BOOTSTRAP_METHOD = "bootstrap"


class _Said(NamedTuple):
    """Declarations of the program: the peers a selector chooses from, and the only output."""

    peer_class: str | None = None
    include_self: bool = False
    shape: Sequence[Dim] | None = None


def bind_role_op(build: OpBuild, spec: OpSpec) -> Fire:
    """Return the `fire` of a role or protocol op."""
    slot, cell_at = build.slot()
    build.op.cell = cell_at
    build.op.breaks = None if spec.changes else spec.feeds
    method_name = spec.method
    fixed = len(spec.inputs)
    if len(build.inputs) > fixed and not (spec.inputs and spec.inputs[-1].variadic):
        raise build.wrong(f"has {len(build.inputs)} inputs; the op table has {fixed}")
    for port, name in zip(spec.inputs, build.flat.inputs, strict=False):
        if not name and not port.optional:
            raise build.wrong(f"lacks its input {port.name!r}")
    lacking = [p for p in spec.inputs[len(build.inputs) :] if not p.optional and not p.variadic]
    if lacking:
        raise build.wrong(f"lacks its input {lacking[0].name!r}")
    # Optional inputs that the node leaves out are None to the method.
    absent = (None,) * (fixed - len(build.inputs))
    attributes = _attributes(build, spec)
    ports = [port.name for port in spec.inputs]
    ports += [f"{ports[-1]}_{n}" for n in range(2, len(build.inputs) - fixed + 2)]
    build.linker.require_method(
        MethodUse(
            slot=slot,
            method=method_name,
            where=build.where,
            inputs=tuple(ports),
            attributes=tuple(attributes),
        )
    )
    return _call(
        build.op,
        cell_at,
        method_name,
        build.inputs,
        absent,
        attributes,
        _Said(
            build.node.metadata.get(keys.PEER_CLASS_KEY),
            build.node.metadata.get(keys.INCLUDE_SELF_KEY) == "true",
            build.shapes.get(build.flat.outputs[0]) if len(build.flat.outputs) == 1 else None,
        ),
        _counted(build, spec, slot, _output_maker(build, spec)),
    )


def component_bootstrap(cell_at: int, cell: ComponentCell) -> EntryPlan | None:
    """Return the plan of a component's own `bootstrap(ctx)`; None when it has none."""
    if not callable(getattr(cell.component, BOOTSTRAP_METHOD, None)):
        return None
    op = Op(0, f"{cell.slot}.{BOOTSTRAP_METHOD}", BOOTSTRAP_METHOD, 0)
    op.fire = _call(
        op, cell_at, BOOTSTRAP_METHOD, (), (), {}, _Said(), lambda _frame, _result: TRIGGER
    )
    return EntryPlan.of_op(op, BOOTSTRAP_METHOD, cell.slot)


def bind_method(
    op: Op,
    cell_at: int,
    method_name: str,
    inputs: tuple[int, ...],
    finish: Callable[[Frame, Any], Any],
    *,
    correlation: CorrelationKind | None,
    reason_at: int | None = None,
) -> Fire:
    """Return the `fire` of something that came for a component, by the rules of its ops.

    `reason_at` is the index of the value that the method gets as `ctx.reason`.
    """
    return _call(op, cell_at, method_name, inputs, (), {}, _Said(), finish, correlation, reason_at)


def _call(
    op: Op,
    cell_at: int,
    method_name: str,
    inputs: tuple[int, ...],
    absent: tuple[None, ...],
    attributes: dict[str, Any],
    said: _Said,
    make_outputs: Callable[[Frame, Any], Any],
    correlation: CorrelationKind | None = None,
    reason_at: int | None = None,
) -> Fire:
    """Return the `fire` that calls a method of a component."""

    def context(frame: Frame, now_ns: int, *, offloaded: bool) -> CallContext:
        wire = None
        if correlation is not None:
            wire = WireCorrelation(kind=correlation, wire_req_id=frame.wire_req_id)
        return CallContext(
            frame.rt,
            cell_at,
            now_ns=now_ns,
            source_peer=frame.source_peer,
            peer_class=said.peer_class,
            include_self=said.include_self,
            declared_shape=said.shape,
            execution=frame.execution,
            op=op.name,
            offloaded=offloaded,
            correlation=wire,
            reason="" if reason_at is None else frame.values[reason_at],
        )

    def hand_out(parked: Task) -> steps.RunTask:
        frame = parked.frame
        method = getattr(frame.rt.cells[cell_at].component, method_name)
        ctx = context(frame, parked.since_ns, offloaded=True)
        task = _task(method, ctx, parked.arguments or (), attributes)
        return steps.RunTask(token=parked.token, fn=task, op=op.name)

    def fire(frame: Frame) -> Any:
        rt: Services = frame.rt
        cell = rt.cells[cell_at]
        if cell.refuses(frame):
            return rt.suspensions.wait_for_component(cell, frame, op)
        values = frame.values
        arguments = (*[values[i] for i in inputs], *absent)
        method = getattr(cell.component, method_name)
        if is_offloaded(method, arguments):
            return rt.suspensions.hand_out(
                frame,
                op,
                cell,
                arguments,
                whom=cell.slot,
                moves=not only_reads(method),
            )
        ctx = context(frame, rt.clock.now_ns, offloaded=False)
        try:
            result = method(ctx, *arguments, **attributes)
        finally:
            asked = ctx.close()
        if result is PENDING:
            if ctx.completion is None:
                raise WrongResultType(f"{_called(cell, op.name)} is pending without a completion")
            rt.carry_out(cell_at, frame, op, asked)
            return rt.suspensions.park(
                frame,
                op,
                WaitReason.COMPLETION,
                cell.slot,
                cell=None if lets_others_run(method) else cell,
                token=ctx.completion.token,
            )
        made = make_outputs(frame, result)
        if asked:
            rt.carry_out(cell_at, frame, op, asked)
        return made

    op.finish = make_outputs
    op.hand_out = hand_out
    return fire


def _task(
    method: Callable[..., Any],
    ctx: CallContext,
    arguments: Sequence[Value],
    attributes: dict[str, Any],
) -> Callable[[], Value]:
    def run() -> Value:
        try:
            return method(ctx, *arguments, **attributes)
        except Exception:
            raise
        except BaseException as error:  # a host's thread should not end with it
            let_stop(error)
            raise UnexpectedException(describe(error)[1]) from error

    return run


def _called(cell: ComponentCell, op: str) -> str:
    return f"slot {cell.slot!r} ({cell.binding.type_name}), op {op}"


def _attributes(build: OpBuild, spec: OpSpec) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, default in spec.attributes.items():
        value = build.node.attr(name, default)
        if value is REQUIRED:
            raise build.wrong(f"lacks its attribute {name!r}")
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError as error:
                raise build.wrong(f"has an attribute {name!r} that is not text") from error
        if default is not REQUIRED and type(value) is not type(default):
            raise build.wrong(
                f"has {type(value).__name__} as attribute {name!r}; expected "
                f"{type(default).__name__}"
            )
        found[name] = value
    return found


def _misfit_of_batch(value: Value) -> str:
    """Return what is wrong with a value as a batch, "" if it is one."""
    parts = value if type(value) is Composite else (value,)
    for part in parts:
        kind = type_of(part)
        if not kind.is_a(types.TENSOR):
            return f"expected a tensor or a composite of tensors, got {kind.name}"
    return ""


# Ops of codecs: what is reported of a call, and the place of the code in (input, output).
_CODED = {"Encode": ("encoded", 1), "Decode": ("decoded", 0), "DecodeAll": ("decoded", 0)}


def _counted(
    build: OpBuild, spec: OpSpec, slot: str, make_outputs: Callable[[Frame, Any], Any]
) -> Callable[[Frame, Any], Any]:
    """Return `make_outputs`, which of a codec's ops also reports bytes of tensors and of codes."""
    if spec.role != "Codec" or spec.op_type not in _CODED:
        return make_outputs
    (source,) = build.inputs
    what, code_at = _CODED[spec.op_type]

    def counted(frame: Frame, result: Any) -> Any:
        made = make_outputs(frame, result)
        sizes = (_bytes_of(frame.values[source]), _bytes_of(made))
        rt: Services = frame.rt
        rt.reports.coded(
            what, slot, frame.execution, code_bytes=sizes[code_at], raw_bytes=sizes[1 - code_at]
        )
        return made

    return counted


def _bytes_of(value: Value) -> int:
    """Return the bytes of the numbers in a value."""
    if isinstance(value, ResponseBatch):
        return sum(_bytes_of(answer) for _, answer in value.responses)
    if isinstance(value, Composite):
        return sum(map(_bytes_of, value))
    return value.nbytes if isinstance(value, np.ndarray) else 0


def _output_maker(build: OpBuild, spec: OpSpec) -> Callable[[Frame, Any], Any]:
    """Return a function from what the method returns to what `fire` returns."""
    ports = spec.outputs
    if len(build.outputs) > len(ports):
        raise build.wrong(f"has {len(build.outputs)} outputs; the op table has {len(ports)}")
    name = f"{build.flat.name} ({spec.op_type})"
    _, cell_at = build.slot()
    declared = [
        build.declared(at, port.type if isinstance(port.type, types.TypeNode) else types.ANY)
        for at, port in enumerate(ports)
    ]

    batches = frozenset(port.name for port in ports if port.batch)

    def wrong(frame: Frame, what: str) -> WrongResultType:
        cell = frame.rt.cells[cell_at]
        return WrongResultType(f"{_called(cell, name)}: {what}")

    def one(frame: Frame, value: Any, wanted: Declared, port: str) -> Value:
        if type(value) is np.ndarray and value.dtype is wanted.dtype:
            return value
        if value is None and wanted.kind is types.COMMAND_ID:
            return CommandId(frame.rt.executor.next_command())
        if value is None and wanted.kind is types.TRIGGER:
            return TRIGGER
        misfit = wanted.misfit(value)
        if not misfit and wanted.kind is types.ANY and port in batches:
            misfit = _misfit_of_batch(value)
        if misfit and not one_of_several(frame, value, wanted, port):
            raise wrong(frame, f"output {port!r}: {misfit}")
        return value

    def one_of_several(frame: Frame, value: Any, wanted: Declared, port: str) -> bool:
        # Where a component has several types and the program says none, the declared one is but
        # the first; what needs that very type (a send, a graph) checks it.
        storage = frame.rt.cells[cell_at].component.storage
        several = storage.get(f"{spec.op_type}.{port}", storage.get("*"))
        return isinstance(several, tuple) and any(
            not Declared(kind, wanted.shape).misfit(value) for kind in several
        )

    if len(ports) <= 1:
        only = declared[0] if ports else Declared(types.TRIGGER)
        port = ports[0].name if ports else "trigger"
        return lambda frame, result: one(frame, result, only, port)

    build.op.outs = build.outputs
    used = len(build.outputs)

    def several(frame: Frame, result: Any) -> Any:
        if not isinstance(result, tuple) or len(result) != len(ports):
            got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise wrong(frame, f"returned {got}; expected a tuple of {len(ports)}")
        made = zip(result, declared, ports, strict=True)
        return [one(frame, value, node, port.name) for value, node, port in made][:used]

    return several
