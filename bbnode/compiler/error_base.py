"""What all errors of the compiler share: place, message, mending.

Rule: an error's fields are set once. Its message says what is wrong, where in the author's
source, and how to mend it, each by a method of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from bbnode.ir import keys
from bbnode.ir.errors import AuthorError, BbnodeError
from bbnode.ir.plain import Node

MAX_LISTED = 8  # names listed in one message; the rest is counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where in the author's program: node, Module path and `<file>:<line>`, as far as known."""

    node_name: str = ""
    module: str = ""
    source_line: str = ""

    @classmethod
    def of(cls, node: Node) -> Where:
        """The place that recorded `node`."""
        return cls(
            node_name=node.name,
            module=node.metadata.get(keys.MODULE_INSTANCE_KEY) or "",
            source_line=node.metadata.get(keys.SOURCE_LINE_KEY) or "",
        )

    def __str__(self) -> str:
        parts = []
        if self.module:
            parts.append(f"in Module {self.module}")
        if self.source_line:
            parts.append(f"at {self.source_line}")
        return f" ({', '.join(parts)})" if parts else ""


NOWHERE = Where()


def listed(names: tuple[str, ...]) -> str:
    """Names for a message, cut after `MAX_LISTED`."""
    shown = ", ".join(repr(name) for name in names[:MAX_LISTED])
    more = len(names) - MAX_LISTED
    return f"{shown} and {more} more" if more > 0 else shown


@dataclass(kw_only=True, eq=False)
class CompileError(BbnodeError):
    """Base of all errors of the compiler. `where` is the author's source, if it is known."""

    where: Where = NOWHERE

    def __post_init__(self) -> None:
        Exception.__init__(self, f"{self.message()}{self.where}. {self.mend()}")
        # Not a frozen dataclass: contextlib and trio assign `__traceback__` and friends.
        self._sealed = frozenset(f.name for f in fields(self))

    def __setattr__(self, name: str, value: object) -> None:
        if name in getattr(self, "_sealed", ()):
            raise AttributeError(f"{type(self).__name__}.{name} is fixed")
        super().__setattr__(name, value)

    # The dataclass would print its fields; the message is what people read.
    __str__ = BbnodeError.__str__

    def message(self) -> str:
        """What is wrong, as a sentence without its full stop."""
        return type(self).__name__

    def mend(self) -> str:
        """What to do about it, as a sentence."""
        return "Compile the program again"

    @property
    def module(self) -> str:
        """Path of the Module that recorded the op, or ""."""
        return self.where.module

    @property
    def source_line(self) -> str:
        """`<file>:<line>` that recorded the op, or ""."""
        return self.where.source_line


@dataclass(kw_only=True, eq=False)
class ValidationError(CompileError, AuthorError):
    """The recorded program is malformed."""
