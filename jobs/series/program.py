"""Three stations with a series each forecast by one model."""

from __future__ import annotations

from bbnode.programs import FederatedTraining


class Series(FederatedTraining):
    """The model of the file, by Adam, on windows of each station's own series."""

    model = "model.onnx"
    loss = "mse"
    optimizer = "adam"
    learning_rate = 0.003
    batch = 32
    keep_optimizer_state = True
    clients = 3
    deadline_s = 600.0
