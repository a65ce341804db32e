"""What holds for the whole package: names, import circles, words, and the public faces.

Rule: a fault is found here with its place, so that whoever made it can mend it without asking.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.sources import PACKAGE, ROOT, modules, read, source_of

# Docstrings say what a thing does or is. Sentences that begin so have to be turned around first.
BAD_BEGINNING = re.compile(r"(Whether|What|Who|Whose|Whom|How|Gives?|Takes? up)\b")

# Documents that are not in the repository.
CITES_ELSEWHERE = re.compile(r"\bDESIGN\b|\bFACTS\b|\b[Ii]ssue \d+\b|\bseed `\d")


def where(path: Path, line: int = 1) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


# --- one name, one thing --------------------------------------------------------------------


def test_no_two_classes_have_one_name() -> None:
    classes: dict[str, list[str]] = defaultdict(list)
    for path in modules().values():
        for line, name in source_of(path).classes:
            classes[name].append(where(path, line))
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
        loads = () if name == "bbnode" else source_of(path).loads
        found = {full if (full := f"{m}.{n}") in known else m for m, n in loads}
        graph[name] = (found & known.keys()) - {name}
    return graph


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
        for line, text in source_of(path).docstrings:
            if BAD_BEGINNING.match(text):
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
        for line, module, names_follow in source_of(path).from_imports:
            is_face = module in FACES or module.startswith("bbnode.examples.")
            if module.startswith("bbnode") and not (names_follow and is_face):
                faults.append(f"{where(path, line)}: {module}")
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


def test_a_source_gives_its_imports_classes_and_docstrings() -> None:
    text = (
        '"""Head."""\nimport a\nfrom b import c\nif x:\n    from d import e\n'
        'class K:\n    """Kind."""\n    from f import g\n'
        "    def m(self):\n        import h\n        importlib.import_module('i')\n"
        "class L: pass\n"
    )
    found = read(text, PACKAGE / "ir" / "x.py")
    assert [name for _, name in found.imports] == ["a", "b.c", "d.e", "f.g", "h", "i"]
    assert set(found.loads) == {("a", ""), ("b", "c"), ("d", "e"), ("f", "g")}
    assert {(line, name) for line, name in found.classes} == {(6, "K"), (12, "L")}
    assert [text for _, text in found.docstrings] == ["Head.", "Kind."]
    assert (found.has_docstring, found.statements) == (True, 6)
    assert not read("x = 1", PACKAGE / "x.py").has_docstring
