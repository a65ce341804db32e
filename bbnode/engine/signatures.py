"""The check that components have the methods that will be called, with fitting parameters.

Rule: what an op, a peer or a timer would call is tried on the signature at install, so that a
mistake in a component is told before anything runs, and not in the middle of a round.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from types import MethodType
from typing import Any, Final

from bbnode.components.contracts import inbound_ops
from bbnode.engine.cells import ComponentCell
from bbnode.engine.ops.build import MethodUse
from bbnode.engine.ops.role import BOOTSTRAP_METHOD

# What the engine calls by itself, if it is there.
_HOOKS: Final = {
    "on_timer": ("key",),
    "on_answer": ("tag", "payload"),
    "on_no_answer": ("tag", "peer"),
    "on_message": ("topic", "payload"),
    "on_peer_down": ("peer",),
    BOOTSTRAP_METHOD: (),
}
_CHECKED_SIGNATURES = 4096  # methods of all component classes of a process, with room to spare


def misfits(uses: Iterable[tuple[MethodUse, ComponentCell]]) -> Iterator[str]:
    """Yield a line for each method of an op whose parameters do not fit it."""
    for use, cell in uses:
        what = _misfit(cell, use.method, use.inputs, use.attributes)
        if what:
            yield f"{use.where}: slot {use.slot!r}: {what}"


def hook_misfits(cells: Iterable[ComponentCell]) -> Iterator[str]:
    """Yield a line for each hook or inbound op whose parameters do not fit."""
    for cell in cells:
        inbound = inbound_ops(type(cell.component)).values()
        called = {**_HOOKS, **dict.fromkeys(inbound, ("payload",))}
        for method, inputs in called.items():
            what = _misfit(cell, method, inputs, ())
            if what:
                yield f"slot {cell.slot!r}: {what}"


def _misfit(
    cell: ComponentCell, method: str, inputs: Sequence[str], attributes: Sequence[str]
) -> str:
    found = getattr(cell.component, method, None)
    if not callable(found):
        return ""  # told as a method that is missing, where it is needed
    function = getattr(found, "__func__", found)
    if inspect.iscoroutinefunction(function):
        return (
            f"{cell.component.TYPE_NAME}.{method} is an `async def`, which nothing awaits; "
            "expected a plain `def`: with `@offload` if it is slow, or with "
            "`ctx.open_completion()` and PENDING if it ends later"
        )
    own = _signature(function, is_bound=function is not found)
    if own is None:
        return ""
    arguments = [None] * (1 + len(inputs))
    try:
        own.bind(*arguments, **dict.fromkeys(attributes))
    except TypeError as error:
        name = f"{cell.component.TYPE_NAME}.{method}"
        wanted = ", ".join(["self", "ctx", *inputs, *_by_name(attributes)])
        return (
            f"{name}{own} does not take what it is called with ({error}); expected "
            f"def {method}({wanted})"
        )
    return ""


def _by_name(attributes: Sequence[str]) -> list[str]:
    return ["*", *attributes] if attributes else []


@lru_cache(maxsize=_CHECKED_SIGNATURES)
def _signature(function: Callable[..., Any], *, is_bound: bool) -> inspect.Signature | None:
    """Return the signature without `self`; None where Python has none (methods in C)."""
    try:
        return inspect.signature(MethodType(function, object()) if is_bound else function)
    except (TypeError, ValueError):
        return None
