"""The reference page of the API, docs/python-reference.md, made from signatures and docstrings.

Rule: the page adds nothing that is not part of a signature or docstring. `bbnode config reference
--api --markdown` prints the page, which a test compares.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import bbnode
from bbnode.api.blocking_methods import BlockingMethods
from bbnode.ir.errors import BbnodeError

_INTRODUCTION = """\
# Python API

The names of `import bbnode`, made by `bbnode config reference --api --markdown` from their
docstrings; [python.md](python.md) shows how they are used. The methods stand here as scripts call
them. Nodes of `bbnode.aio` and `bbnode.on_trio` have the same ones to `await`, streams are for
`async for`, and `open` and `connect` there are for `async with`, or for `await` in `bbnode.aio`."""


def api_markdown() -> str:
    """Return the page."""
    lines = [_INTRODUCTION, "", "## Opening and connecting"]
    for name in ("open", "connect"):
        lines += _entry(f"bbnode.{name}", getattr(bbnode, name))
    lines += ["", "## Every node", ""]
    lines += [*_text(BlockingMethods), ""]
    lines += ["Of a node of this process and of a daemon (`bbnode.BlockingMethods`):"]
    for name, method in _public(BlockingMethods):
        lines += _entry(name, method)
    lines += ["", "## Nodes of this process", "", *_text(bbnode.BlockingNode)]
    for name, member in _own(bbnode.BlockingNode):
        lines += _entry(name, member)
    lines += ["", "## Values"]
    for cls in (bbnode.InvokeResult, bbnode.OutputValue, bbnode.TrainResult):
        lines += ["", f"### `{cls.__name__}`", "", *_text(cls)]
    lines += ["", "## Errors", "", "| error | meaning |", "|---|---|"]
    for name in dir(bbnode):
        exported = getattr(bbnode, name)
        if isinstance(exported, type) and issubclass(exported, BbnodeError):
            meaning = (inspect.getdoc(exported) or "").partition("\n\n")[0].replace("\n", " ")
            lines.append(f"| `{name}` | {meaning} |")
    return "\n".join(lines).rstrip("\n") + "\n"


def _public(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public members of a class, in the order of its source."""
    yield from ((name, member) for name, member in vars(cls).items() if not name.startswith("_"))


def _own(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public members that only nodes of this process have."""
    for each in reversed(cls.__mro__[:-1]):
        if each is not BlockingMethods:
            yield from (m for m in _public(each) if not hasattr(BlockingMethods, m[0]))


def _entry(name: str, member: Any) -> list[str]:
    shown = name
    if isinstance(member, property):
        shown += f": {inspect.signature(member.fget).return_annotation}"  # type: ignore[arg-type]
    else:
        shown += _signature(member)
    return ["", f"### `{name}`", "", "```text", *_wrapped(shown), "```", "", *_text(member)]


def _signature(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    shown = []
    star = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            shown.append("*")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        shown.append(f"{parameter.name}: {parameter.annotation}{default}")
    return f"({', '.join(shown)}) -> {signature.return_annotation}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, subsequent_indent="    ", break_long_words=False)


def _text(thing: Any) -> list[str]:
    """Return a docstring as Markdown: the entries of its sections as a list."""
    lines: list[str] = []
    for block in (inspect.getdoc(thing) or "").split("\n\n"):
        head, _, rest = block.partition("\n")
        if head not in ("Args:", "Raises:", "Attributes:"):
            lines += [*block.splitlines(), ""]
            continue
        lines += [head.replace("Args", "Arguments"), ""]
        for entry in re.split(r"\n(?=\S)", textwrap.dedent(rest)):
            names, _, meaning = entry.partition(":")
            known = ", ".join(f"`{each}`" for each in re.split(r",\s+|\s+and\s+", names) if each)
            lines.append(f"- {known}: {' '.join(meaning.split())}")
        lines.append("")
    return lines[:-1]
