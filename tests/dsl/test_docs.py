"""The guide and the docstrings: their code runs, and nothing public is without a text."""

from __future__ import annotations

import inspect
import re
import types as python_types
from pathlib import Path

import pytest

from bbnode import dsl
from bbnode.compiler import Compiler, target_names
from bbnode.components import ArrayDataSource, ConnectedView, FedAvg, OnnxModel, OrtBackend
from bbnode.dsl import syscalls
from bbnode.dsl.backend.catalogue import catalogue, method_name
from bbnode.dsl.backend.slot import BackendSlot
from bbnode.examples.custom_index import BruteForceIndex

GUIDE = Path(__file__).parents[2] / "docs" / "dsl.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def guide() -> python_types.ModuleType:
    """All code of the guide, run from top to bottom; names that it defined."""
    text = GUIDE.read_text(encoding="utf-8")
    module = python_types.ModuleType("guide")  # lines of recorded ops belong to it, not to us
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) >= 10
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block.group(1), str(GUIDE), "exec", dont_inherit=True)
        exec(code, module.__dict__)
    return module


def programs(module: python_types.ModuleType) -> dict[str, type[dsl.Module]]:
    return {
        name: member
        for name, member in vars(module).items()
        if inspect.isclass(member)
        and issubclass(member, dsl.Module)
        and member.__module__ == "guide"
        and name
        not in (
            "Typo",
            "Compares",
            "Doubled",
            "Collected",
        )  # wrong on purpose; open without a caller
    }


def test_the_programs_of_the_guide_compile(guide: python_types.ModuleType) -> None:
    found = programs(guide)
    assert len(found) >= 10
    compiler = (
        Compiler()
        .bind_backend("compute", OrtBackend)
        .bind_aggregator("mean", FedAvg)
        .bind_data_source("data", ArrayDataSource)
        .bind_protocol("gossip", guide.Rumours)
        .bind_index("index", BruteForceIndex)
    )
    for selector in ("voters", "workers", "view", "neighbours", "cohort", "shards"):
        compiler = compiler.bind_peer_selector(selector, ConnectedView)
    for model in ("opinion", "student", "model", "global", "local"):
        compiler = compiler.bind_model(model, OnnxModel)
    for name, program in found.items():
        assert target_names(compiler.compile(program().build())), name


def test_the_guide_names_every_syscall_and_every_error() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for name, member in inspect.getmembers(syscalls, inspect.isfunction):
        if not name.startswith("_") and member.__module__ == syscalls.__name__:
            assert f"`{name}`" in text, name
    for name in dsl.__all__:
        member = getattr(dsl, name)
        if inspect.isclass(member) and issubclass(member, dsl.RecordingError):
            assert f"`{name}`" in text, name


def public_members(owner: type) -> list[tuple[str, object]]:
    return [
        (name, member)
        for name, member in vars(owner).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    ]


@pytest.mark.parametrize("name", dsl.__all__)
def test_every_public_name_has_a_text(name: str) -> None:
    member = getattr(dsl, name)
    if not (inspect.isclass(member) or inspect.ismodule(member)):
        return  # an alias of types
    assert member.__doc__, name
    if inspect.isclass(member) and member.__module__.startswith("bbnode.dsl"):
        assert not member.__doc__.startswith(f"{name}("), "made up by dataclass"
        for attribute, function in public_members(member):
            text = inspect.getdoc(function)
            assert text, f"{name}.{attribute}"
            assert text[0].isupper() or not text[0].isalpha() or text[:2].islower(), text


def test_named_methods_do_not_hide_the_catalogue() -> None:
    listed = dir(BackendSlot("compute"))
    assert all(method_name(op_type) in listed for op_type in catalogue())
