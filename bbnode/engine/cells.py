"""One component and who may use it.

Rule: no two ops run on one component at the same time. While an op of it is under way in a
worker thread, or has opened a completion, other ops wait here in the order in which they came.
While a bootstrap runs that touches the component, only ops of that bootstrap are let in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bbnode.components.contracts import Component
from bbnode.ir.slots import Binding

if TYPE_CHECKING:
    from bbnode.engine.frame import Frame


class ComponentCell:
    """A slot's component, its lock, and the tokens of the ops that wait for it."""

    __slots__ = ("binding", "busy", "component", "gate", "holder", "line", "slot")

    def __init__(self, slot: str, binding: Binding, component: Component) -> None:
        self.slot = slot
        self.binding = binding
        self.component: Any = component  # ops find their contract method by name
        self.busy = False
        self.holder = ""  # the op that holds it, for messages
        self.line: dict[int, None] = {}  # tokens of the ops that wait, in order
        self.gate: object | None = None  # the running bootstrap that has the component

    def refuses(self, frame: Frame) -> bool:
        """Whether an op of this execution has to wait."""
        return self.busy or (self.gate is not None and self.gate is not frame.bootstrap)

    def __repr__(self) -> str:
        return f"ComponentCell({self.slot!r}, {type(self.component).__name__})"
