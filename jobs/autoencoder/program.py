"""Five owners of pictures teach one autoencoder; no picture leaves its owner."""

from __future__ import annotations

from bbnode.programs import FederatedTraining


class Pictures(FederatedTraining):
    """The model of the file, by Adam, on the squared error of each point."""

    model = "model.onnx"
    loss = "mse"
    optimizer = "adam"
    learning_rate = 0.002
    epochs = 4
    batch = 32
    keep_optimizer_state = True
    clients = 5
    deadline_s = 1800.0
