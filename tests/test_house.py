"""What holds for the whole package: names, import circles, words, and the public faces.

Rule: a fault is found here with its place, so that whoever made it can mend it without asking.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "bbnode"

# Docstrings say what a thing does or is. Sentences that begin so have to be turned around first.
BAD_BEGINNING = re.compile(r"(Whether|What|Who|Whose|Whom|How|Gives?|Takes? up)\b")

# Documents that are not in the repository.
CITES_ELSEWHERE = re.compile(r"\bDESIGN\b|\bFACTS\b|\b[Ii]ssue \d+\b|\bseed `\d")


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def where(path: Path, line: int = 1) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


# --- one name, one thing --------------------------------------------------------------------


def test_no_two_classes_have_one_name() -> None:
    classes: dict[str, list[str]] = defaultdict(list)
    for path in modules().values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(where(path, node.lineno))
    twice = {name: places for name, places in classes.items() if len(places) > 1}
    assert not twice, twice


# --- no circles -----------------------------------------------------------------------------


def imports() -> dict[str, set[str]]:
    """The modules of bbnode that each module imports when it is loaded, or for types.

    Imports inside functions do not count: they are there so that something loads late.
    """
    known = modules()
    graph = {}
    for name, path in known.items():
        # The package itself loads none of the names that it lists for type checkers.
        found = set() if name == "bbnode" else set(_imports_of(tree_of(path), known))
        graph[name] = found - {name}
    return graph


def _imports_of(tree: ast.Module, known: dict[str, Path]) -> Iterator[str]:
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from (m for m in (full if full in known else node.module,) if m in known)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        waiting.extend(ast.iter_child_nodes(node))


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected groups of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(imports()) == []


def test_a_circle_would_be_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


# --- words ----------------------------------------------------------------------------------


def test_docstrings_begin_with_what_a_thing_does_or_is() -> None:
    faults = []
    for path in modules().values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if BAD_BEGINNING.match(text):
                    line = getattr(node, "lineno", 1)
                    faults.append(f"{where(path, line)}: {text.splitlines()[0]}")
    assert not faults, "\n".join(faults)


def test_nothing_cites_what_is_not_in_the_repository() -> None:
    faults = []
    folders = (PACKAGE, ROOT / "tests", ROOT / "docs", ROOT / "bench", ROOT / "scripts")
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix not in {".py", ".md", ".sh"} or path == Path(__file__):
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if CITES_ELSEWHERE.search(line):
                    faults.append(f"{where(path, number)}: {line.strip()}")
    assert not faults, "\n".join(faults)


def test_every_page_that_a_docstring_or_comment_names_is_there() -> None:
    faults = []
    for path in modules().values():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            pages = re.findall(r"\bdocs/[\w-]+\.md\b", line)
            faults += [
                f"{where(path, number)}: {page}" for page in pages if not (ROOT / page).is_file()
            ]
    assert not faults, "\n".join(faults)


# --- the public faces -----------------------------------------------------------------------

FACES = ("bbnode.dsl", "bbnode.compiler", "bbnode.components", "bbnode.ops", "bbnode.sim")


def test_examples_use_the_public_faces_alone() -> None:
    faults = []
    for path in sorted((PACKAGE / "examples").glob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bbnode"):
                if node.module not in FACES and not node.module.startswith("bbnode.examples."):
                    faults.append(f"{where(path, node.lineno)}: {node.module}")
            elif isinstance(node, ast.Import):
                faults += [
                    f"{where(path, node.lineno)}: {alias.name}"
                    for alias in node.names
                    if alias.name.startswith("bbnode")
                ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("source", "bad"),
    [
        ("Whether a node is there.", True),
        ("What a pass sees.", True),
        ("Give the sum.", True),
        ("Return True if a node is there.", False),
        ("Whatever a peer sends is bounded here.", False),
        ("However long it takes.", False),
    ],
)
def test_beginnings(source: str, bad: bool) -> None:
    assert (BAD_BEGINNING.match(source) is not None) == bad
