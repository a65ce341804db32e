"""One federation of clients with PyTorch and clients with nothing but ONNX Runtime.

`bbnode compile program.py` is for the latter, and with `--arg by_torch=true` for the former. What
crosses between peers is the same, so that both work together.
"""

from __future__ import annotations

from dataclasses import asdict

from bbnode.components import TorchModel, TorchModelConfig, concrete
from bbnode.dsl import ModelSlot
from bbnode.programs import FederatedTraining


class Mixed(FederatedTraining):
    """The model of the file, trained by ONNX Runtime, or by PyTorch from a class of the node's."""

    by_torch: bool = False

    model = "model.onnx"
    metrics = ("accuracy",)
    learning_rate = 0.1
    batch = 50
    mode = "train"
    clients = 4

    @property
    def client_model(self) -> ModelSlot:
        """The slot of the model that a client trains."""
        if not self.by_torch:
            return super().client_model
        config = TorchModelConfig(**asdict(self._config))
        return ModelSlot("local", concrete=concrete(TorchModel, config))
