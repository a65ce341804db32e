"""Marks of methods that a host runs in a worker thread.

Rule: the mark is on the function; who calls the method looks at it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

Method = TypeVar("Method", bound=Callable[..., Any])

_OFFLOAD_MARK = "__bbnode_offload__"
_CHANGES, _READS = "changes", "reads"


@overload
def offload(method: Method, /) -> Method: ...


@overload
def offload(*, reads_only: bool = False) -> Callable[[Method], Method]: ...


def offload(method: Any = None, /, *, reads_only: bool = False) -> Any:
    """Mark a contract method as slow: the host runs it in a worker thread.

    `reads_only`: it changes nothing that `serialize` gives, here or in what it depends on. Then
    a node need not save the component's state each time before it hands the method out.
    """

    def mark(marked: Method) -> Method:
        setattr(marked, _OFFLOAD_MARK, _READS if reads_only else _CHANGES)
        return marked

    return mark if method is None else mark(method)


def is_offloaded(method: Callable[..., Any]) -> bool:
    """Whether `offload` marked the method."""
    return bool(getattr(method, _OFFLOAD_MARK, False))


def only_reads(method: Callable[..., Any]) -> bool:
    """Whether `offload` marked the method as one that leaves its component's state alone."""
    return getattr(method, _OFFLOAD_MARK, False) == _READS
