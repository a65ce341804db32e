"""States that release 0.1.0 saved: parameters and their names, in the format's version 2.

`saved_by_0_1_0` holds the model, its state after two epochs and between a backward and its step,
and what that release then had: `params`, the `logits` of `x`, and the parameters after the step.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bbnode.components.errors import ParameterMismatch
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import OnnxModel, OnnxModelConfig
from bbnode.components.models.weights import unpack_state
from tests.components.fakes import CTX, onnx_model

SAVED = Path(__file__).with_name("saved_by_0_1_0")
STATES = ("trained", "between_backward_and_step")
TOLD = np.load(SAVED / "told.npz")


def model(**settings: object) -> OnnxModel:
    return onnx_model(OnnxModelConfig(model=SAVED / "mlp.onnx", **settings))  # type: ignore[arg-type]


def state(name: str) -> bytes:
    return (SAVED / f"{name}.state").read_bytes()


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("settings", [{}, {"optimizer": "adam"}, {"schedule": "cosine"}])
def test_a_state_is_loaded_with_whatever_training_it_goes_on(name, settings) -> None:
    if "schedule" in settings:
        settings = {**settings, "decay_steps": 10}
    loaded = model(**settings)
    loaded.restore(state(name))
    np.testing.assert_array_equal(loaded.params(CTX), TOLD["params"])
    assert loaded.progress == model().progress
    np.testing.assert_allclose(loaded.forward(CTX, TOLD["x"]), TOLD["logits"], atol=1e-6)
    again = model(**settings)
    again.restore(loaded.serialize())
    assert again.serialize() == loaded.serialize()
    carried = model(**settings)
    told = carried.carry_over(state(name))
    assert set(told.taken) == set(OnnxModel.saved_weights(state(name)))
    np.testing.assert_array_equal(carried.params(CTX), TOLD["params"])


def test_a_step_that_was_to_come_is_made() -> None:
    loaded = model()
    loaded.restore(state("between_backward_and_step"))
    np.testing.assert_array_equal(loaded.last_input, TOLD["x"])
    loaded.step(CTX, None)
    np.testing.assert_allclose(loaded.params(CTX), TOLD["stepped"], atol=1e-6)


def test_a_state_of_that_release_for_another_model_is_refused() -> None:
    assert unpack_state(state("trained")).layout is not None
    other = mlp_forward((4, 6, 3)).SerializeToString()
    with pytest.raises(ParameterMismatch, match="saved parameters are others"):
        onnx_model(OnnxModelConfig(model=other)).restore(state("trained"))
