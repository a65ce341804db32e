"""Code and commands of docs/training.md run, from top to bottom."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.compiler import Compiler
from bbnode.components import ArrayDataSource, OnnxModel, OrtBackend

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
BLOCK = re.compile(r"^(?:`(\S+)`:\n\n)?```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)  # dataclasses look a class's module up
    names = vars(page)
    for file, kind, code in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "sh":
            for line in code.splitlines():
                assert main(line.split()[1:]) == exits.OK
            continue
        if file:
            Path(file).write_text(code, encoding="utf-8")
        if "import torch" not in code:
            exec(code, names)
    shown = capsys.readouterr().out
    assert "4 of 4 float tensors trained" in shown
    assert shown.splitlines()[-2:] == ["330 576", "328"]
    assert names["settings"].optimizer == "adamw"
    made = names["Steps"]()
    Compiler().bind_all(made.bindings()).compile(made.build())
    chain = Compiler().bind_backend("compute", OrtBackend)
    chain.compile(names["Scored"]().build())
    chain = chain.bind("DataSource", "data", ArrayDataSource)
    chain.bind_model("model", OnnxModel).compile(names["SignSteps"]().build())


def test_the_module_of_the_page_is_exported() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    text = PAGE.read_text(encoding="utf-8")
    (code,) = [block for _, _, block in BLOCK.findall(text) if "import torch" in block]
    names: dict[str, Any] = {"__name__": "page"}
    exec(code, names)
    weights = {tensor.name for tensor in names["exported"].graph.initializer}
    assert weights == {name for name, _ in names["module"].named_parameters()}
