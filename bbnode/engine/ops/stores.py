"""Ops on semaphores, queues and held values: Limit.*, Serialize.*, Hold.*.

Rule:
- `Limit.Acquire` takes a unit or waits in line; `Limit.Release` gives one back, to the first
  in line if there is one. A unit belongs to the execution that took it until somebody releases
  it; an execution that ends with a failure, or skips its Release, gives back what it still
  holds, since its own Release cannot come any more. More releases than units taken are a failure.
- `Serialize.Enqueue` puts a value, which goes to the first op in line if there is one;
  `Serialize.Dequeue` takes the oldest, or waits. A full queue refuses.
- `Hold.Stash` keeps the newest value under its name; `Hold.Flush` takes it out, and fails
  when there is none.
"""

from __future__ import annotations

from typing import Any

from bbnode.engine.errors import LimitNotTaken, NothingHeld, QueueFull
from bbnode.engine.frame import Frame
from bbnode.engine.ops.build import Fire, OpBuild, binds
from bbnode.engine.services import Services
from bbnode.engine.stores import StoredValue, Stores
from bbnode.engine.suspensions import WaitReason
from bbnode.ir import keys
from bbnode.ir.caps import MAX_QUEUED
from bbnode.ir.values import TRIGGER

SYSCALL = keys.SYSCALL_DOMAIN


@binds(SYSCALL, "Limit.Acquire")
def _acquire(build: OpBuild) -> Fire:
    build.arity(1, 1)
    at = build.linker.semaphore(build, build.attr_text("name"), build.attr_int("n", minimum=1))
    op = build.op

    def fire(frame: Frame) -> Any:
        rt: Services = frame.rt
        semaphore = rt.stores.semaphores[at]
        if semaphore.free:
            semaphore.free -= 1
            frame.take_unit(at)
            return TRIGGER
        return rt.suspensions.park(
            frame,
            op,
            WaitReason.SEMAPHORE,
            semaphore.name,
            line=semaphore.line,
        )

    return fire


@binds(SYSCALL, "Limit.Release")
def _release(build: OpBuild) -> Fire:
    build.arity(1, 0)
    at = build.linker.semaphore(build, build.attr_text("name"), None)
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        semaphore = frame.rt.stores.semaphores[at]
        if semaphore.free >= semaphore.units:
            raise LimitNotTaken(
                f"{name}: no unit of {semaphore.name!r} is taken; acquire before releasing"
            )
        frame.drop_unit(at)
        frame.rt.suspensions.give_unit(at)
        return TRIGGER

    def skip(frame: Frame, _reason: str) -> bool:
        """Return the unit that this very execution took."""
        if frame.units is not None and at in frame.units:
            frame.drop_unit(at)
            frame.rt.suspensions.give_unit(at)
        return True

    build.op.skip = skip

    return fire


@binds(SYSCALL, "Serialize.Enqueue")
def _enqueue(build: OpBuild) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs
    at = build.linker.queue(build.attr_text("queue"))
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        rt: Services = frame.rt
        queue = rt.stores.queues[at]
        if len(queue.values) >= MAX_QUEUED:
            raise QueueFull(f"{name}: queue {queue.name!r} holds {MAX_QUEUED} values; dequeue some")
        queue.values.append(rt.stores.keep(frame.values[source], name))
        if queue.line:
            rt.suspensions.give_next(queue.line, queue.values.popleft())
        return TRIGGER

    return fire


@binds(SYSCALL, "Serialize.Dequeue")
def _dequeue(build: OpBuild) -> Fire:
    build.arity(1, 1)
    at = build.linker.queue(build.attr_text("queue"))
    op = build.op

    def fire(frame: Frame) -> Any:
        rt: Services = frame.rt
        queue = rt.stores.queues[at]
        if queue.values:
            return take_over(frame, queue.values.popleft())
        return rt.suspensions.park(
            frame,
            op,
            WaitReason.QUEUE,
            queue.name,
            line=queue.line,
        )

    op.finish = take_over
    return fire


@binds(SYSCALL, "Hold.Stash")
def _stash(build: OpBuild) -> Fire:
    build.arity(1, 0)
    (source,) = build.inputs
    at = build.linker.hold(build.attr_text("slot"))
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        stores: Stores = frame.rt.stores
        kept = stores.keep(frame.values[source], name)
        before, stores.holds[at] = stores.holds[at], kept
        if before is not None:
            before.charge.release()
        return TRIGGER

    return fire


@binds(SYSCALL, "Hold.Flush")
def _flush(build: OpBuild) -> Fire:
    build.arity(1, 1)
    slot = build.attr_text("slot")
    at = build.linker.hold(slot)
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        stores: Stores = frame.rt.stores
        kept, stores.holds[at] = stores.holds[at], None
        if kept is None:
            raise NothingHeld(f"{name}: nothing is held under {slot!r}; stash a value before")
        return take_over(frame, kept)

    return fire


def take_over(frame: Frame, kept: StoredValue) -> Any:
    """Return a stored value; from now on its execution holds the charge."""
    frame.hold_charge(kept.charge)
    return kept.value
