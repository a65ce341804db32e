"""Custom ops: functions of other packages, beside the backend.

Rule: they belong to no component, so that nothing waits for them and they wait for nothing. One
that is declared `offload` runs in a worker thread of the host.
"""

from __future__ import annotations

from typing import Any

from bbnode.engine import steps
from bbnode.engine.errors import WrongResultType
from bbnode.engine.frame import Frame, Task
from bbnode.engine.ops.build import Fire, OpBuild
from bbnode.engine.services import Services
from bbnode.ir import types
from bbnode.ir.errors import AuthorError
from bbnode.ir.types import TypeNode
from bbnode.ops.custom import CustomOp


def bind_custom_op(build: OpBuild, custom: CustomOp) -> Fire:
    """Return the `fire` of a custom op; raises InvalidArtifact."""
    op, inputs = build.op, build.inputs
    ports = len(custom.spec.outputs)
    if len(build.outputs) > ports:
        raise build.wrong(f"has {len(build.outputs)} outputs; its schema has {ports}")
    try:
        attributes = {name: build.node.attr(name) for name in build.node.attributes}
        run = custom.bound(attributes, build.flat.name)
    except AuthorError as error:
        raise build.wrong(f"does not fit its schema: {error}") from error
    is_one = len(build.outputs) == 1
    used = len(build.outputs)
    # What the program knows of an output beyond the schema, which is checked in any case.
    known = []
    for at, port in enumerate(custom.spec.outputs[:used]):
        table = port.type if isinstance(port.type, TypeNode) else types.TENSOR
        declared = build.declared(at, table)
        if declared.shape is not None or declared.kind is not table:
            known.append((at, port.name, declared))

    def finish(_frame: Frame, made: Any) -> Any:
        for at, port, declared in known:
            misfit = declared.misfit(made[at])
            if misfit:
                raise WrongResultType(
                    f"{build.flat.name} ({custom.spec.domain}::{custom.spec.op_type} of the "
                    f"package {custom.spec.package}): output {port!r}: {misfit}"
                )
        return made[0] if is_one else made[:used]

    def fire(frame: Frame) -> Any:
        values = frame.values
        return finish(frame, run([values[i] for i in inputs]))

    def hand_out(parked: Task) -> steps.RunTask:
        arguments = parked.arguments or ()
        return steps.RunTask(token=parked.token, fn=lambda: run(arguments), op=op.name)

    def fire_elsewhere(frame: Frame) -> Any:
        rt: Services = frame.rt
        return rt.suspensions.hand_out(
            frame,
            op,
            None,
            tuple([frame.values[i] for i in inputs]),
            whom=op.name,
        )

    if not custom.offload:
        return fire
    op.finish, op.hand_out = finish, hand_out
    return fire_elsewhere
