"""Marks of methods that other peers may call, over the control plane of components.

Rule: the mark is on the function and says the op's name; the engine looks for it at install.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from bbnode.ir.errors import AuthorError

Method = TypeVar("Method", bound=Callable[..., Any])

_INBOUND_MARK = "__bbnode_inbound__"
_INBOUND_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")


def inbound(name: str) -> Callable[[Method], Method]:
    """Mark a method as an op that other peers may call: `method(ctx, payload) -> bytes | None`.

    It is reached at `/component/<ref of the slot>/op/<name>`. `ctx.source_peer` is who calls,
    `ctx.correlation` what the message is; the encoding of the payload is the component's own. What
    it returns answers a request; a one-way message has no answer. It may be `offload`ed.
    """

    def mark(marked: Method) -> Method:
        setattr(marked, _INBOUND_MARK, name)
        return marked

    return mark


def inbound_ops(cls: type[Any]) -> dict[str, str]:
    """Ops that peers may call on components of a class: op name to method name, sorted.

    Raises AuthorError for a name that is no op name, or is used twice.
    """
    found: dict[str, str] = {}
    for method in sorted({name for base in cls.__mro__ for name in vars(base)}):
        op = getattr(getattr(cls, method, None), _INBOUND_MARK, None)
        if op is None:
            continue
        if not isinstance(op, str) or not _INBOUND_NAME.match(op):
            raise AuthorError(
                f"{cls.__qualname__}.{method}: {op!r} is no name of an op; use up to 64 letters, "
                "digits and underscores"
            )
        if op in found:
            raise AuthorError(
                f"{cls.__qualname__}: {found[op]} and {method} are both the inbound op {op!r}"
            )
        found[op] = method
    return dict(sorted(found.items()))
