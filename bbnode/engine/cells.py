"""The cell of a component: its lock, and the line of ops that wait for it.

Rule: no two ops run on one component at the same time. While one of its ops runs in a worker
thread, or has opened a completion, other ops wait here in the order of arrival. A thread may also
use the components that its own depends on, so a task holds these as well, except for backends,
which many use at once and which keep no state. While a bootstrap that uses the component runs, only
ops of that bootstrap are let in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from itertools import islice
from typing import Any, Final, TypeAlias

from bbnode.components.contracts import Component
from bbnode.engine.errors import NodeBusy, SnapshotFailed, describe
from bbnode.engine.frame import Frame
from bbnode.ir.caps import MAX_FACT_CHARS, MAX_FACTS
from bbnode.ir.interrupts import let_stop
from bbnode.ir.slots import Binding

Facts: TypeAlias = dict[str, int | float | str | bool]

_FACT_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class ComponentCell:
    """A slot's component, its lock, and the tokens of the ops that wait for it."""

    __slots__ = (
        "binding",
        "busy",
        "component",
        "gate",
        "holder",
        "is_needed",
        "kept",
        "lent",
        "line",
        "moves",
        "slot",
        "task",
        "used_by",
        "uses",
    )

    def __init__(self, slot: str, binding: Binding, component: Component) -> None:
        self.slot = slot
        self.binding = binding
        self.component: Any = component  # ops find their contract method by name
        self.uses: tuple[ComponentCell, ...] = ()  # what it depends on, directly or not
        self.used_by: tuple[ComponentCell, ...] = ()
        self.is_needed = True  # by some op of the program, through other components too
        self.busy = False
        self.lent = False  # a task of a component that depends on it may use it
        self.moves = False  # a thread may change it now
        # Its state before that began, as bytes when they are asked for.
        self.kept: Callable[[], bytes] | SnapshotFailed | None = None
        self.task = 0  # the token of the op that works elsewhere with it
        self.holder = ""  # that op, for messages
        self.line: dict[int, None] = {}  # tokens of the ops that wait, in order
        self.gate: object | None = None  # the running bootstrap that has the component

    def facts(self) -> Facts:
        """Return what the component tells of itself.

        What is no fact is left out, and so is everything where its method raises: that is
        somebody's code, and a node that can't show a number is well otherwise.
        """
        try:
            told = dict(islice(self.component.facts().items(), MAX_FACTS))
        except BaseException as error:  # noqa: BLE001 - the boundary to a component's author
            let_stop(error)
            return {}
        return {
            name: value[:MAX_FACT_CHARS] if isinstance(value, str) else value
            for name, value in told.items()
            if isinstance(name, str)
            and _FACT_NAME.fullmatch(name)
            and type(value) in (int, float, str, bool)
        }

    def stopped(self) -> str | None:
        """Tell the component that the node has stopped; returns what it raised."""
        try:
            self.component.on_stop()
        except BaseException as error:  # noqa: BLE001 - the boundary to a component's author
            let_stop(error)
            return ": ".join(describe(error))
        return None

    def refuses(self, frame: Frame) -> bool:
        """Return True if an op of this execution has to wait."""
        if self.busy or self.lent or (self.gate is not None and self.gate is not frame.bootstrap):
            return True
        for cell in self.uses:  # noqa: SIM110 - most have none, and `any` costs more
            if cell.busy or cell.lent:
                return True
        return False

    def held_by(self) -> str:
        """Return the name of the op or bootstrap that others wait for."""
        for cell in (self, *self.uses):
            if cell.busy or cell.lent:
                return cell.holder
        return str(self.gate)

    def take(self, token: int, holder: str, *, is_task: bool, moves: bool) -> None:
        """Mark the component as held by an op that runs elsewhere; `moves`: it may change state."""
        self.busy = True
        for cell in (self, *self.uses) if is_task else (self,):
            cell.lent = cell is not self
            cell.task, cell.holder, cell.moves = token, holder, moves

    def give_back(self, *, is_task: bool) -> list[ComponentCell]:
        """End that op's hold; return the components that others may have waited for."""
        freed = (self, *self.uses) if is_task else (self,)
        for cell in freed:
            cell.busy = cell.lent = cell.moves = False
            cell.task, cell.holder, cell.kept = 0, "", None
        return list(dict.fromkeys([*freed, *(user for cell in freed for user in cell.used_by)]))

    def keep_states(self) -> None:
        """Keep the state for snapshots that are taken while a thread may change it."""
        for cell in (self, *self.uses):
            try:
                cell.kept = cell._asked(cell.component.freeze)
            except SnapshotFailed as error:
                cell.kept = error  # raised only if a snapshot is taken

    def keep(self, data: bytes) -> None:
        """Keep the state from before an op that a restored node hands out again."""
        self.kept = lambda: data

    def state(self, done: Container[int]) -> bytes:
        """Return the component's state as of no op that is under way. Raises SnapshotFailed.

        `done`: tokens of tasks that have returned.
        """
        if self.task in done:
            return self.serialize()
        if isinstance(self.kept, SnapshotFailed):
            raise self.kept
        if self.kept is not None:
            return self._checked(self._asked(self.kept))
        if self.moves:
            raise NodeBusy(
                f"slot {self.slot!r} is held by {self.holder}; take the snapshot when it is done, "
                "or install with snapshots=True"
            )
        return self.serialize()

    def serialize(self) -> bytes:
        """Return the component's own state. Raises SnapshotFailed."""
        return self._checked(self._asked(self.component.serialize))

    def _asked(self, method: Callable[[], Any]) -> Any:
        try:
            return method()
        except BaseException as error:  # the boundary to a component's author
            let_stop(error)
            kind, text = describe(error)
            raise SnapshotFailed(f"slot {self.slot!r} can't be saved: {kind}: {text}") from error

    def _checked(self, data: Any) -> bytes:
        if not isinstance(data, bytes):
            raise SnapshotFailed(
                f"slot {self.slot!r} can't be saved: {self.binding.type_name}.serialize() gave "
                f"{type(data).__name__}; return bytes"
            )
        return data

    def __repr__(self) -> str:
        return f"ComponentCell({self.slot!r}, {type(self.component).__name__})"
