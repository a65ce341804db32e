"""Three owners of reviews teach a sentence encoder, by adapters, what each says in the end."""

from __future__ import annotations

from bbnode.components import Lora
from bbnode.programs import FederatedTraining


class Reviews(FederatedTraining):
    """MiniLM with adapters at queries and values, and a layer of two classes on top."""

    model = "model.onnx"
    data = "bbnode.TextDataSource"
    lora = Lora(targets=("*.self.query.weight", "*.self.value.weight"), rank=8, alpha=16.0)
    trainable = ("head.weight", "head.bias")
    optimizer = "adam"
    learning_rate = 0.002
    metrics = ("accuracy",)
    batch = 16
    clients = 3
    deadline_s = 3600.0
