"""A model over several classes of peers gives what the whole model gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from bbnode.components import mlp_forward
from bbnode.dsl import BadArgument, BadName, OnnxImportError
from bbnode.programs import Pipeline
from bbnode.sim import Network
from tests.programs.files import compiled, linear

MODEL = mlp_forward((4, 8, 8, 3), seed=5)
BATCH = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)


class Split(Pipeline):
    model = MODEL


@pytest.mark.parametrize(
    ("given", "classes"),
    [
        ({}, ["stage0", "stage1"]),
        ({"stages": 3}, ["stage0", "stage1", "stage2"]),
        ({"cuts": ["layer0.active"], "classes": ["front", "back"]}, ["front", "back"]),
    ],
)
def test_a_batch_goes_through_the_stages_and_comes_back(
    given: dict[str, Any], classes: list[str]
) -> None:
    artifact, network = compiled(Split(**given)), Network(seed=2)
    asker = network.add("asker", artifact, ["asker"])
    for each in classes:
        network.add(each, artifact, [each])
    asker.invoke("asker", {"x": BATCH})
    network.run_until_idle()
    (logits,) = asker.values("logits")
    session = onnxruntime.InferenceSession(MODEL.SerializeToString())
    (whole,) = session.run(None, {"x": BATCH})
    assert np.allclose(logits, whole, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"model": None}, BadArgument, "model=None has to be the path"),
        ({"model": "no-such.onnx"}, OnnxImportError, "cannot read 'no-such.onnx'"),
        ({"stages": 0}, OnnxImportError, "stages=0"),
        ({"stages": 40}, OnnxImportError, "ask for fewer"),
        ({"cuts": ["nothing"]}, OnnxImportError, "nothing"),
        ({"cuts": "layer0.active"}, BadArgument, "cuts='layer0.active' has to be a list"),
        ({"classes": ["one"]}, BadArgument, "each of 2 stages"),
        ({"classes": ["asker", "asker"]}, BadArgument, "asker"),
        ({"classes": "ab"}, BadArgument, "classes='ab' has to be a list"),
        ({"classes": ["a b", "c"]}, BadName, "a b"),
    ],
)
def test_an_argument_that_is_wrong_is_named(
    given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Split(**given).build()


def test_a_model_with_two_inputs_and_a_fixed_batch_can_be_split(tmp_path: Path) -> None:
    """Inference takes any model: only training needs one input with an open batch."""
    onnx.save(linear(inputs=2, batch=1), tmp_path / "model.onnx")
    assert Split(model=tmp_path / "model.onnx").pipeline.classes == ("stage0", "stage1")
