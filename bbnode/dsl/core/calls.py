"""Recording functions, which take the Graph first: a clear error if it is missing.

Rule: without it the other arguments move up, so that Python's own error would name a wrong one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from bbnode.dsl.core.graph import Graph, Output
from bbnode.dsl.errors import BadArgument

_GRAPH = "g"
_NOTHING = object()


def takes_graph(function: Callable[..., Any], owner: str = "") -> Callable[..., Any]:
    """Return a function that raises BadArgument if its Graph, or another argument, is missing.

    `owner` is the prefix of its name in a program; for a method it is the slot's name.
    """
    names = list(inspect.signature(function).parameters)
    at = names.index(_GRAPH)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        graph = kwargs.get(_GRAPH, args[at] if len(args) > at else _NOTHING)
        if not isinstance(graph, Graph):
            raise BadArgument(f"the first argument is the Graph, got {_text(graph)}; {_way(args)}")
        try:
            return function(*args, **kwargs)
        except TypeError:
            try:
                inspect.signature(function).bind(*args, **kwargs)
            except TypeError as misfit:
                raise BadArgument(f"{misfit}; {_way(args)}") from None
            raise

    def _way(args: tuple[Any, ...]) -> str:
        of = owner or getattr(args[0], "name", type(args[0]).__name__)
        return f"write {of}.{function.__name__}({', '.join(_shown(function)[at:])})"

    return call


def wants_graph(function: object) -> bool:
    """Return True for a public function or method whose own first argument is the Graph."""
    if not isinstance(function, FunctionType) or function.__name__.startswith("_"):
        return False
    names = list(inspect.signature(function).parameters)
    return _GRAPH in names[:2] and names[: names.index(_GRAPH)] in ([], ["self"])


def _shown(function: Callable[..., Any]) -> list[str]:
    """Return the required arguments, as an author writes them."""
    shown = []
    for name, each in inspect.signature(function).parameters.items():
        if each.kind is each.VAR_POSITIONAL:
            shown.append("…")
        elif each.default is each.empty and each.kind is not each.VAR_KEYWORD:
            shown.append(f"{name}=…" if each.kind is each.KEYWORD_ONLY else name)
    return shown


def _text(given: object) -> str:
    if given is _NOTHING:
        return "nothing"
    return f"the value {given.name!r}" if isinstance(given, Output) else f"{given!r:.60}"
