"""Framework ops that wait for time, and the deadline check.

Rule: an op that waits for a time that it states itself is bounded by that time and by the
deadline of its execution; nothing else cuts it short.
"""

from __future__ import annotations

from typing import Any

from bbnode.engine.deadlines import bound_of, seconds
from bbnode.engine.errors import DeadlineExceeded
from bbnode.engine.frame import Frame
from bbnode.engine.ops.build import Fire, OpBuild, binds
from bbnode.engine.scheduler import TimerKind
from bbnode.engine.services import Services
from bbnode.engine.suspensions import WaitReason
from bbnode.ir import keys
from bbnode.ir.values import TRIGGER


@binds(keys.SYSCALL_DOMAIN, "Sleep", "After")
def _sleep(build: OpBuild) -> Fire:
    build.arity(1, 1)
    duration_ns = build.attr_int("delay_ns" if build.flat.op_type == "After" else "duration_ns")
    op = build.op

    def fire(frame: Frame) -> Any:
        rt: Services = frame.rt
        until_ns = rt.clock.now_ns + duration_ns
        kind = TimerKind.PARKED_DONE
        if frame.deadline_ns is not None and frame.deadline_ns < until_ns:
            until_ns, kind = frame.deadline_ns, TimerKind.PARKED_DEADLINE
        return rt.suspensions.park(
            frame, op, WaitReason.TIMER, "clock", until_ns=until_ns, timer_kind=kind
        )

    return fire


@binds(keys.SYSCALL_DOMAIN, keys.OP_DEADLINE_CHECK)
def _deadline_check(build: OpBuild) -> Fire:
    """Fails when the deadline that came with the execution is over.

    The attribute `deadline_ns` is the budget of the op behind the check, counted from when
    that op parks; an execution that came without a deadline has none to check.
    """
    if len(build.inputs) > 1 or len(build.outputs) > 1:
        raise build.wrong("has at most one input and one output")
    build.attr_int("deadline_ns")
    source = build.inputs[0] if build.inputs else None
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        deadline_ns, now_ns = frame.deadline_ns, frame.rt.clock.now_ns
        if deadline_ns is not None and now_ns >= deadline_ns:
            late = seconds(now_ns - deadline_ns)
            raise DeadlineExceeded(
                f"{name}: the execution's deadline is over since {late}: {bound_of(frame)}"
            )
        return TRIGGER if source is None else frame.values[source]

    return fire
