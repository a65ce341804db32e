"""A classifier of which a second and a third version come while three clients train it."""

from __future__ import annotations

from bbnode.programs import FederatedTraining


class Training(FederatedTraining):
    """The first version; `--arg learning_rate=` and `--arg model=` make the others."""

    model = "model.onnx"
    metrics = ("accuracy",)
    learning_rate = 0.02
    batch = 32
    clients = 3
    deadline_s = 600.0
