"""Stages of a compilation as the command line names them: `--stage TEXT`.

    package.module:Class
    package.module:Class(a=1, names=["x", "y"])
    package.module:Class(a=1)@before:type_solver
    package.module:Class@after:validate
    name_of_an_installed_pass(a=1)

Rule: arguments are Python literals and nothing is evaluated; the module is imported as
`bbnode compile` imports the program's. Everything wrong with a text is a `StageRefused`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bbnode.ir.class_names import ClassNotLoaded, load_class
from bbnode.ir.errors import DeploymentError

if TYPE_CHECKING:
    from bbnode.compiler import Compiler

HELP = (
    "Run a pass of your own as well: 'package.module:Class(a=1)@before:PASS', or the name of one "
    "that an installed package brings (repeatable). Arguments are Python literals; without @before "
    "or @after it runs behind the compiler's own."
)
MAX_STAGE_CHARS = 10_000

_NAME = re.compile(r"(?:(?P<module>\w+(?:\.\w+)*):(?P<cls>\w+)|(?P<plugin>\w[\w.-]*))")
_STAGE = re.compile(
    _NAME.pattern + r"\s*"
    r"(?P<call>\(.*\))?\s*"
    r"(?:@(?P<where>before|after):(?P<anchor>[\w.-]+))?",
    re.DOTALL,
)


class StageRefused(DeploymentError):
    """A `--stage` that names no pass, or one that can't be created here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage as the user asked for it; at most one of `before` and `after` names a pass.

    Attributes:
        name: "package.module:Class", or the name of a pass of an installed package.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    before: str | None = None
    after: str | None = None

    def add_to(self, compiler: Compiler) -> Compiler:
        """Return the compiler with this pass in its place.

        Raises StageRefused, and the errors of `Compiler.with_pass`.
        """
        from bbnode.daemon.artifacts.build import argument_fault

        cls = self._class()
        fault = argument_fault(cls, self.arguments)
        if fault:
            raise StageRefused(f"stage {self.name}: {fault}")
        return compiler.with_pass(cls(**self.arguments), before=self.before, after=self.after)

    def _class(self) -> type[Any]:
        module, _, name = self.name.rpartition(":")
        if not module:
            from bbnode.compiler import pass_class

            return pass_class(name)
        try:
            return load_class(module, name, object)
        except ClassNotLoaded as error:
            raise StageRefused(f"stage {self.name}: {error}") from error


def parse_stage(text: str) -> StageSpec:
    """Read one stage; imports nothing. Raises StageRefused."""
    match = _STAGE.fullmatch(text.strip()) if len(text) <= MAX_STAGE_CHARS else None
    if match is None:
        raise StageRefused(
            f"{text[:80]!r} does not name a stage as package.module:Class, "
            "package.module:Class(argument=1), package.module:Class@before:PASS, or by the name "
            f"of an installed pass: {_fault(text.strip())}"
        )
    anchor = {} if match["where"] is None else {match["where"]: match["anchor"]}
    name = match["plugin"] or f"{match['module']}:{match['cls']}"
    return StageSpec(name=name, arguments=_arguments(match["call"] or "()", name), **anchor)


def _fault(text: str) -> str:
    """Return the part of an invalid text that is wrong."""
    if len(text) > MAX_STAGE_CHARS:
        return f"it has {len(text)} characters; at most {MAX_STAGE_CHARS} are read"
    named = _NAME.match(text)
    if named is None:
        return "it begins with no name"
    rest = text[named.end() :].lstrip()
    if rest.startswith("("):
        closed = rest.rfind(")")
        if closed < 0:
            return f"{rest[:40]!r} has no closing parenthesis"
        rest = rest[closed + 1 :].lstrip()
    if rest.startswith("@"):
        return f"{rest[:40]!r} is no place; write @before:PASS or @after:PASS, once"
    if rest.startswith(":"):
        return f"no class stands behind the colon of {text[:40]!r}"
    if rest.startswith("/") or named[0].endswith(".py"):
        return f"{text[:40]!r} begins with a file; name its module, as in package.module"
    return f"{rest[:40]!r} is too much"


def _arguments(call: str, stage: str) -> dict[str, Any]:
    try:
        parsed = ast.parse(f"_{call}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise StageRefused(
            f"stage {stage}: {call[:80]!r} cannot be read as arguments: {error}"
        ) from error
    # `()` behind the name is the call; anything else, as in `(1)(2)`, is no stage.
    if not isinstance(parsed, ast.Call) or not isinstance(parsed.func, ast.Name):
        raise StageRefused(f"stage {stage}: {call[:80]!r} cannot be read as arguments")
    if parsed.args or any(keyword.arg is None for keyword in parsed.keywords):
        raise StageRefused(f"stage {stage}: give each argument by its name, as in (a=1)")
    arguments: dict[str, Any] = {}
    for keyword in parsed.keywords:
        if keyword.arg in arguments:
            raise StageRefused(f"stage {stage}: argument {keyword.arg!r} is given twice")
        try:
            arguments[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            raise StageRefused(
                f"stage {stage}: argument {keyword.arg!r} has to be a literal, like 1, 'text' or "
                f"[1, 2], not {ast.unparse(keyword.value)[:80]!r}"
            ) from error
    return arguments
