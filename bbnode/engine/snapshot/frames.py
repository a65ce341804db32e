"""Executions under way, as plain data.

Rule: a value that stands where the plan's template has it is not saved, and neither is the
scratch element; everything else of a frame is. What hangs on a frame but is another table's
(parked ops, bootstraps) is put back by that table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bbnode.engine.frame import Frame

if TYPE_CHECKING:
    from bbnode.engine.runtime import Runtime
    from bbnode.engine.snapshot.codec import LoadedNames, SavedNames


class FrameTable:
    """The frames of a node, oldest first."""

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt

    def state(self, names: SavedNames) -> Any:
        """All frames, by execution."""
        return [_save(frame, names) for frame in self._rt.frames.values()]

    def load(self, plain: Any, names: LoadedNames) -> None:
        """Take up what `state` gave."""
        for row in plain:
            frame = _load(self._rt, row, names)
            self._rt.frames[frame.execution] = frame
            names.add_frame(frame)


def _save(frame: Frame, names: SavedNames) -> list[Any]:
    template = frame.plan.template
    last = len(template) - 1  # scratch
    return [
        frame.execution,
        names.plan(frame.plan),
        frame.started_ns,
        [
            [index, names.value(value)]
            for index, value in enumerate(frame.values[:last])
            if value is not template[index]
        ],
        [
            [index, left]
            for index, left in enumerate(frame.pending)
            if left != frame.plan.pending[index]
        ],
        frame.live,
        frame.failures,
        frame.report,
        frame.from_bus,
        frame.deadline_ns,
        names.peer_or_none(frame.source_peer),
        frame.wire_req_id,
        frame.site,
        frame.wire_out_id,
        None if frame.charges is None else [names.charge(charge) for charge in frame.charges],
        None if frame.cohorts is None else list(frame.cohorts.items()),
        None if frame.units is None else list(frame.units),
    ]


def _load(rt: Runtime, plain: Any, names: LoadedNames) -> Frame:
    execution, plan, started_ns, values, pending, *rest = plain
    frame = Frame(rt, names.plan(plan), execution, started_ns)
    for index, number in values:
        frame.values[index] = names.value(number)
    if pending:
        frame.pending = frame.pending.copy()  # it may be the plan's own
    for index, left in pending:
        frame.pending[index] = left
    frame.live, frame.failures, frame.report, frame.from_bus, *rest = rest
    frame.deadline_ns, source, frame.wire_req_id, frame.site, frame.wire_out_id, *rest = rest
    charges, cohorts, units = rest
    frame.source_peer = names.peer_or_none(source)
    frame.charges = None if charges is None else [names.charge(number) for number in charges]
    frame.cohorts = None if cohorts is None else dict(cohorts)
    frame.units = units
    return frame
