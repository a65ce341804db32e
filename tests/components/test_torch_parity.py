"""Training of exported models against training in torch: twenty steps, weights and statistics.

Both see the same batches. Torch has its own modules, losses and optimizers; ours are ONNX graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from onnx import numpy_helper  # noqa: E402
from torch.nn import functional  # noqa: E402

from bbnode.components.data.base import MemoryDataSource  # noqa: E402
from bbnode.components.models.onnx_model import OnnxModelConfig  # noqa: E402
from bbnode.ir.values import Composite  # noqa: E402
from bbnode.torch import export  # noqa: E402
from tests.components.fakes import CTX, onnx_model  # noqa: E402
from tests.components.torch_nets import CASES, Case  # noqa: E402

torch.set_num_threads(1)

STEPS = 20
OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": (
        {"optimizer": "sgd", "learning_rate": 0.01, "momentum": 0.9},
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    ),
    "adam": (
        {"optimizer": "adam", "learning_rate": 0.001, "eps": 1e-4},
        # A gradient that is 0 but for rounding is blown up to a whole step with an eps of 1e-8.
        lambda parameters: torch.optim.Adam(parameters, lr=0.001, eps=1e-4),
    ),
}
QUICK = {("mlp", "adam"), ("lstm", "sgd")}


class Batches(MemoryDataSource):
    """Batches that are there already; one epoch has them all."""

    def __init__(self, batches: list[tuple[Any, Any]]) -> None:
        self.batches = batches

    @property
    def num_samples(self) -> int:
        return sum(len(labels) for _, labels in self.batches)

    def epoch_batches(self, batch_size: int) -> Iterable[tuple[Any, Any]]:
        return iter(self.batches)

    def load(self) -> Any:
        raise AssertionError("its batches are there already")


def torch_loss(case: Case, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if case.loss == "mse":
        return functional.mse_loss(output, target)
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def torch_trained(case: Case, net: Any, theirs: Any, drawn: list[Any]) -> tuple[Any, list[float]]:
    """Return the state and the losses of a copy of the net, after all steps, in its precision."""
    kind = next(net.parameters()).dtype
    net = copy.deepcopy(net).train()
    trained = theirs([each for each in net.parameters() if each.requires_grad])
    losses = []
    for batch, labels in drawn:
        inputs = [each.to(kind) if each.is_floating_point() else each for each in batch]
        target = labels.to(kind) if labels.is_floating_point() else labels
        trained.zero_grad()
        loss = torch_loss(case, net(*inputs), target)
        loss.backward()
        trained.step()
        losses.append(loss.item())
    return net.state_dict(), losses


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param(name, optimizer, marks=[] if (name, optimizer) in QUICK else pytest.mark.slow)
        for name in CASES
        for optimizer in OPTIMIZERS
    ],
)
def test_twenty_steps_equal_torch(name: str, optimizer: str) -> None:
    case = CASES[name]
    ours, theirs = OPTIMIZERS[optimizer]
    torch.manual_seed(0)
    net = case.build()
    drawn = [(case.inputs(), case.targets()) for _ in range(STEPS)]
    exported = export(net, drawn[0][0])
    state, losses = torch_trained(case, net, theirs, drawn)
    exact, _ = torch_trained(case, copy.deepcopy(net).double(), theirs, drawn)
    # Where a rounding error turns a ReLU, torch itself is farther from its float64 than 1e-4.
    noise = max(float((state[key].double() - exact[key].double()).abs().max()) for key in state)
    tolerance = max(1e-4, 3 * noise)

    batches = [
        (arrays[0] if len(arrays) == 1 else Composite(arrays), target.numpy())
        for arrays, target in ((tuple(i.numpy() for i in inputs), t) for inputs, t in drawn)
    ]
    config = OnnxModelConfig(
        model=exported.SerializeToString(), loss=case.loss, mode="train", **ours
    )
    model = onnx_model(config, Batches(batches))
    told = model.train(CTX, epochs=1, batch=6)
    assert told["steps"] == STEPS
    assert told["loss"] == pytest.approx(np.mean(losses), rel=tolerance)
    for tensor in model.export().graph.initializer:
        np.testing.assert_allclose(
            numpy_helper.to_array(tensor), state[tensor.name].numpy(), rtol=1e-4, atol=tolerance,
            err_msg=tensor.name,
        )  # fmt: skip
