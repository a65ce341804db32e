"""`bbnode.components` as its users see it: names, types, and what importing it costs."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bbnode import components
from bbnode.components.contracts import CONTRACTS
from bbnode.components.errors import ComponentError
from bbnode.components.registry import ENTRY_POINT_GROUP, component_class
from bbnode.ir import plugins
from tests.patience import PATIENCE_S

EXAMPLES = Path(__file__).parents[2] / "bbnode" / "examples"


def run(code: str) -> str:
    made = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=PATIENCE_S, capture_output=True, text=True
    )
    return made.stdout.strip()


def test_every_name_is_there_and_is_listed() -> None:
    assert len(components.__all__) == len(set(components.__all__)) > 80
    assert set(components.__all__) <= set(dir(components))
    for name in components.__all__:
        assert getattr(components, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Aggregater'"):
        _ = components.Aggregater
    assert not hasattr(components, "__wrapped__")


def test_what_an_author_needs_is_there() -> None:
    public = {
        value for name in components.__all__ if isinstance(value := getattr(components, name), type)
    }
    assert set(CONTRACTS.values()) <= public
    errors = importlib.import_module("bbnode.components.errors")
    of_components = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, ComponentError)
    }
    assert of_components <= public
    for type_name in plugins.names(ENTRY_POINT_GROUP):
        cls = component_class(type_name)
        assert {cls, cls.Config} <= public, type_name


def test_every_setting_that_ships_is_documented() -> None:
    for type_name in plugins.names(ENTRY_POINT_GROUP):
        config = component_class(type_name).Config
        docs = [inspect.cleandoc(vars(each).get("__doc__") or "") for each in config.__mro__]
        listed = "\n".join(doc.partition("Attributes:\n")[2] for doc in docs)
        names = re.findall(r"^ {4}(\w[\w, ]*):", listed, re.MULTILINE)
        documented = {name for group in names for name in group.split(", ")}
        assert documented == {f.name for f in dataclasses.fields(config)}, type_name


def test_importing_it_imports_nothing_else_and_no_name_loads_a_runtime() -> None:
    modules = "sorted(m for m in sys.modules if m.startswith('bbnode.') or m == 'onnxruntime')"
    assert run(f"import sys, bbnode.components; print({modules})") == "['bbnode.components']"
    light = (
        "import sys; from bbnode.components import Aggregator, PENDING, inbound, FedAvg; "
        "print(sorted({'onnxruntime', 'sklearn'} & set(sys.modules)))"
    )
    assert run(light) == "[]"
    assert run("from bbnode.components import *; print(ConnectedView.TYPE_NAME)") == (
        "bbnode.ConnectedView"
    )


def test_type_checkers_see_the_names(tmp_path) -> None:
    """They read the imports under TYPE_CHECKING alone, which name each as itself."""
    pytest.importorskip("mypy")
    file = tmp_path / "author.py"
    names = ", ".join(components.__all__)
    file.write_text(
        f"from bbnode.components import {names}\n"
        "reveal_type(PENDING)\n"
        "reveal_type(FedAvgConfig().max_share)\n"
        "from bbnode.components import NoSuchName\n"
    )
    made = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", str(file)],
        cwd=EXAMPLES.parents[1],
        timeout=5 * PATIENCE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'Revealed type is "float"' in made.stdout.replace("builtins.", "")
    errors = [line for line in made.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1, made.stdout
    assert 'has no attribute "NoSuchName"' in errors[0]


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_examples_use_the_public_face_alone(file: Path) -> None:
    faces = {"bbnode.dsl", "bbnode.compiler", "bbnode.components", "bbnode.sim", "bbnode.ops"}
    used = {
        node.module
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bbnode")
    }
    assert {module for module in used if not module.startswith("bbnode.examples")} <= faces
