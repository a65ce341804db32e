"""The trained model of a node, by any of its faces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import bbnode
from bbnode.programs import FederatedTraining
from tests.patience import PATIENCE_S


def test_the_model_of_a_slot_is_an_onnx_file(tmp_path: Path) -> None:
    data = tmp_path / "test.npz"
    np.savez(data, x=np.ones((4, 2), np.float32), y=np.ones((4, 1), np.float32))
    program = FederatedTraining(model=[2, 1], loss="mse", clients=1)
    with bbnode.open(
        program, targets="server", transport="memory", slots={"test": {"path": data}}
    ) as node:
        there = bbnode.connect(node.socket, timeout_s=PATIENCE_S)
        for each in (node, there):
            assert [model["slot"] for model in each.models()["models"]] == ["global"]
            onnx.checker.check_model(onnx.load_from_string(each.model("global")))
            with pytest.raises(bbnode.ControlError, match="globl") as refused:
                each.model("globl")
            assert refused.value.kind == "NoSuchModel"


def test_data_that_are_missing_are_told_at_once(tmp_path: Path) -> None:
    program = FederatedTraining(model=[2, 1], loss="mse", clients=1)
    with pytest.raises(bbnode.NodeNotReady, match=r"cannot open .*absent\.npz"):
        bbnode.open(
            program,
            targets="client",
            transport="memory",
            slots={"data": {"path": tmp_path / "absent.npz"}},
        )
