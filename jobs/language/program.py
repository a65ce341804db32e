"""Three owners of text teach one model to go on with it."""

from __future__ import annotations

from bbnode.programs import FederatedTraining


class Language(FederatedTraining):
    """The model of the file, by Adam; the loss is of each next token."""

    model = "model.onnx"
    data = "bbnode.TextDataSource"
    optimizer = "adam"
    learning_rate = 0.003
    class_axis = -1
    batch = 32
    clients = 3
    deadline_s = 1800.0
