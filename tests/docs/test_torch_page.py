"""The blocks of docs/torch.md, where PyTorch and skl2onnx are installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "torch.md"


def test_the_blocks_run_in_their_order(capsys) -> None:
    for name in ("torch", "onnxscript", "sklearn", "skl2onnx"):
        pytest.importorskip(name)
    found: dict[str, object] = {}
    for block in re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, found)
    assert "'0.weight', '0.bias', '1.weight'" in capsys.readouterr().out
    (inputs,) = found["model"].graph.input
    assert inputs.type.tensor_type.shape.dim[1].dim_value == 4
