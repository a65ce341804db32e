"""One component and who may use it.

Rule: no two ops run on one component at the same time. While an op of it is under way in a
worker thread, or has opened a completion, other ops wait here in the order in which they came.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from bbnode.components.contracts import Component
from bbnode.ir.slots import Binding


class ComponentCell:
    """A slot's component, its lock, and the tokens of the ops that wait for it."""

    __slots__ = ("binding", "busy", "component", "holder", "slot", "waiting")

    def __init__(self, slot: str, binding: Binding, component: Component) -> None:
        self.slot = slot
        self.binding = binding
        self.component: Any = component  # ops find their contract method by name
        self.busy = False
        self.holder = ""  # the op that holds it, for messages
        self.waiting: deque[int] = deque()

    def __repr__(self) -> str:
        return f"ComponentCell({self.slot!r}, {type(self.component).__name__})"
