"""`bbnode check`, and the dry run of `compile`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bbnode.cli.main import main

PROGRAM = """
from bbnode.programs import FederatedTraining
class Good(FederatedTraining):
    model = [4, 3]
class Baked(FederatedTraining):
    model = "baked.onnx"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tensors = {"s": np.array([1, 4]), "w": np.ones((4, 2), np.float32)}
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "s"], ["r"]),
         helper.make_node("MatMul", ["r", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )  # fmt: skip
    opset = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), "baked.onnx")
    Path("prog.py").write_text(PROGRAM)
    return tmp_path


def test_check_shows_a_table_that_fits_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "prog.py:Good"]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert max(map(len, (line.rstrip() for line in lines))) <= 80
    for step in ("forward", "loss", "gradient", "train", "export", "import", "accuracy"):
        assert any(step in line for line in lines)
    assert "no fault in 16 steps" in told.err


def test_check_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.ones((5, 4), np.float32), np.arange(5) % 3
    np.savez("d.npz", x=x, y=y)
    assert main(["check", "prog.py:Good", "--json", "--data", "d.npz"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["schema"] == "bbnode/check/1"
    assert made["examples"] == "given"
    assert made["steps"][0] == {
        "where": "client/local", "step": "forward", "examples": 2, "result": "float32[2, 3]",
    }  # fmt: skip
    assert main(["check", "prog.py:Good", "--data", "data.path=none.npz"]) != 0
    assert "none.npz" in capsys.readouterr().err


def test_a_baked_batch_is_refused_before_anything_is_written(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = "client/local: bbnode.OnnxModel, tried on made-up examples: it computes a batch of 1"
    for command in (["check"], ["compile", "-o", "a.onnx"], ["up", "--out", "out"]):
        assert main([*command, "prog.py:Baked"]) != 0
        (line,) = capfd.readouterr().err.splitlines()
        assert wanted in line
        assert "node 'r' (Reshape)" in line
    assert not Path("a.onnx").exists()
    assert not Path("out").exists()
    assert main(["compile", "--no-check", "-o", "a.onnx", "prog.py:Baked"]) == 0
    assert main(["check", "a.onnx"]) != 0


def test_the_bytes_of_an_artifact_do_not_depend_on_the_dry_run(folder: Path) -> None:
    assert main(["compile", "prog.py:Good", "-o", "a.onnx"]) == 0
    assert main(["compile", "prog.py:Good", "-o", "b.onnx", "--no-check"]) == 0
    assert Path("a.onnx").read_bytes() == Path("b.onnx").read_bytes()
