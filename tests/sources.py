"""What the tests of the whole package look at in each module, from one parse and one walk of it.

Rule: a module's tree is not kept: those of all modules are some hundred megabytes, which every
collection of garbage would look through.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "bbnode"

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Facts of one module.

    Attributes:
        imports: line and absolute dotted name of everything that it imports, wherever it does.
        loads: what it imports when it is loaded, outside functions: (module, name) of `from module
            import name`, (module, "") of `import module`; nothing of relative imports.
        from_imports: line and module of each import statement, and whether names follow (`from`).
        classes: line and name of each class.
        docstrings: line and text of each docstring.
        has_docstring: the module itself has one.
        statements: how many it has at its top level, its docstring included.
    """

    imports: tuple[tuple[int, str], ...]
    loads: tuple[tuple[str, str], ...]
    from_imports: tuple[tuple[int, str, bool], ...]
    classes: tuple[tuple[int, str], ...]
    docstrings: tuple[tuple[int, str], ...]
    has_docstring: bool
    statements: int


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def source_of(path: Path) -> Source:
    return read(path.read_text(encoding="utf-8"), path)


def read(text: str, path: Path) -> Source:
    """The facts of a source that stands, or would stand, at a path of the package."""
    tree = ast.parse(text, str(path))
    package = ("bbnode", *path.relative_to(PACKAGE).parent.parts)
    imports: list[tuple[int, str]] = []
    from_imports: list[tuple[int, str, bool]] = []
    classes: list[tuple[int, str]] = []
    docstrings: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            imports += [(node.lineno, name) for name in _imported(node, package)]
        if isinstance(node, ast.Import):
            from_imports += [(node.lineno, alias.name, False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            from_imports.append((node.lineno, node.module or "", True))
        elif isinstance(node, _DOCUMENTED):
            if isinstance(node, ast.ClassDef):
                classes.append((node.lineno, node.name))
            if docstring := ast.get_docstring(node):
                docstrings.append((getattr(node, "lineno", 1), docstring))
    return Source(
        imports=tuple(imports),
        loads=tuple(_loaded(tree)),
        from_imports=tuple(from_imports),
        classes=tuple(classes),
        docstrings=tuple(docstrings),
        has_docstring=ast.get_docstring(tree) is not None,
        statements=len(tree.body),
    )


def _imported(
    node: ast.Import | ast.ImportFrom | ast.Call, package: tuple[str, ...]
) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package[: len(package) - node.level + 1]
            base = ".".join((*parents, *([node.module] if node.module else [])))
        # `from bbnode import ir` imports bbnode.ir: the names count as well.
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif _is_dynamic_import(node):
        argument = node.args[0] if node.args else None
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


def _is_dynamic_import(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"import_module", "__import__"}


def _loaded(tree: ast.Module) -> Iterator[tuple[str, str]]:
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        # Imports stand in statements; no expression but a lambda has any, and that not when loaded.
        waiting.extend(
            each
            for each in ast.iter_child_nodes(node)
            if not isinstance(each, _FUNCTIONS | ast.expr)
        )
