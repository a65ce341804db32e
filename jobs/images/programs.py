"""Ten owners of pictures train one network with BatchNorm, in three ways."""

from __future__ import annotations

from bbnode.programs import FedBN, FederatedTraining, Scaffold


class ByFedAvg(FederatedTraining):
    """The mean of all, running statistics too."""

    model = "model.onnx"
    mode = "train"
    learning_rate = 0.05
    batch = 50
    clients = 10
    deadline_s = 3600.0


class ByScaffold(Scaffold):
    """The same with control variates against the drift of owners that have few classes each."""

    model = "model.onnx"
    mode = "train"
    learning_rate = 0.05
    batch = 50
    clients = 10
    deadline_s = 3600.0


class ByFedBN(FedBN):
    """Each owner keeps its normalisation: owners whose cameras differ."""

    model = "model.onnx"
    mode = "train"
    learning_rate = 0.05
    batch = 50
    clients = 10
    deadline_s = 3600.0
