"""Components say which libraries they can't do without, as pyproject.toml has them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import bbnode
from bbnode.components import libraries
from bbnode.components.libraries import OptionalLibrary
from bbnode.components.registry import component_class, known_types

ROOT = Path(bbnode.__file__).parents[1]
ALL = {name: each for name, each in vars(libraries).items() if isinstance(each, OptionalLibrary)}
SHIPPED = [name for name in known_types() if name.startswith("bbnode.")]


@pytest.mark.parametrize("library", ALL.values(), ids=ALL)
def test_each_is_in_the_extra_that_brings_it(library: OptionalLibrary) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extra = library.extra.removeprefix("bbnode[").removesuffix("]")
    assert library.requirement in project["optional-dependencies"][extra]


def test_what_is_not_there_is_named_with_extra_and_command() -> None:
    library = OptionalLibrary("no_such_thing", "no-such-thing>=2", "bbnode[things]")
    assert library.is_missing
    assert library.advice.startswith(
        "no_such_thing (extra bbnode[things]) is not installed here; run: "
    )
    assert "'no-such-thing>=2'" in library.advice
    assert not OptionalLibrary("numpy", "numpy").is_missing


@pytest.mark.parametrize("name", SHIPPED)
def test_who_says_it_needs_a_library_says_so_to_who_is_asked_to_run_it(name: str) -> None:
    cls = component_class(name)
    wanted = {each.requirement.partition(">")[0] for each in cls.libraries}
    for library in ("pyarrow", "zstandard", "faiss-cpu"):
        if f"eeds {library}" in (cls.__doc__ or "") or f"eeds `{library}`" in (cls.__doc__ or ""):
            assert library in wanted
