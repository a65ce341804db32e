"""Methods by their papers' names: each is `FederatedTraining` with its parts.

Rule: a preset has no step of its own, so that two of them are their parts together, or a
contradiction that is refused by their names.
"""

from __future__ import annotations

from bbnode.components import Int8Codec
from bbnode.programs.federated import FederatedTraining
from bbnode.programs.parts import (
    SGD,
    Adagrad,
    Adam,
    Alternating,
    Asynchronous,
    Buffered,
    ClientPrivacy,
    Coded,
    ControlVariates,
    ExamplePrivacy,
    Fair,
    InnerSteps,
    InTurn,
    Layers,
    LocalTraining,
    Masks,
    Mixed,
    Momentum,
    Normalised,
    OwnModel,
    Proximal,
    Trusted,
    TwoLevels,
    Yogi,
)


class FedProx(FederatedTraining):
    """FedAvg with a proximal term, and partial work: `Proximal`."""

    client = Proximal()


class FedOpt(FederatedTraining):
    """FedAvg in which the server steps with an optimizer of its own: `SGD`."""

    server = SGD()


class FedAvgM(FedOpt):
    """FedAvg with momentum on the server: `Momentum`."""

    server = Momentum()


class FedAdagrad(FedOpt):
    """Adagrad on the server: `Adagrad`."""

    server = Adagrad()


class FedAdam(FedOpt):
    """Adam on the server: `Adam`."""

    server = Adam()


class FedYogi(FedAdam):
    """Yogi on the server: `Yogi`."""

    server = Yogi()


class Scaffold(FedOpt):
    """SCAFFOLD: control variates against drift: `ControlVariates`."""

    client = ControlVariates()


class FedNova(FedOpt):
    """FedNova: moves that are normalised by local work: `Normalised`."""

    client = Normalised()


class QFedAvg(FedOpt):
    """q-FedAvg: clients that fare worse count for more: `Fair`."""

    client = Fair()


class DiLoCo(FedAvgM):
    """Many steps on each client, and Nesterov's momentum between (Douillard et al., 2023,
    arXiv:2311.08105): `InnerSteps`.

    Each client makes `inner_steps` of AdamW, whose state it keeps from round to round, and answers
    how far it moved the weights, as int8. With D, the mean of the moves (each counts once, unless
    `weighted`): v <- 0.9 v + D; w <- w + 0.7 (D + 0.9 v).
    """

    client = InnerSteps()
    server = Momentum(0.7, server_momentum=0.9, server_nesterov=True)
    compress = Coded(Int8Codec)
    train = LocalTraining(
        optimizer="adamw", learning_rate=4e-4, weight_decay=0.1, keep_optimizer_state=True
    )


class FedPer(FederatedTraining):
    """Federated training with personal layers: `Layers`."""

    personal = Layers()


class FedRep(FedPer):
    """FedPer in which a client trains one part at a time: `Alternating`."""

    personal = Alternating()


class FedBN(FedPer):
    """FedBN: normalisation stays on each client: `Layers` with `normalisation`."""

    personal = Layers(normalisation=True)
    train = LocalTraining(mode="train")


class Ditto(FederatedTraining):
    """Ditto: each client has a model of its own beside the common one: `OwnModel`."""

    personal = OwnModel()


class CyclicTraining(FederatedTraining):
    """Weights that go from client to client: `InTurn`."""

    course = InTurn()


class HierarchicalTraining(FederatedTraining):
    """Training in two levels, with edges between clients and server: `TwoLevels`."""

    course = TwoLevels()


class AsynchronousTraining(FederatedTraining):
    """Base of training without rounds: `Asynchronous`."""

    course = Asynchronous()


class FedAsync(AsynchronousTraining):
    """Without rounds: each update is mixed in as it comes: `Mixed`."""

    course = Mixed()


class FedBuff(AsynchronousTraining, FedOpt):
    """Without rounds: a buffer of updates makes a step: `Buffered`."""

    course = Buffered()


class FLTrustTraining(FederatedTraining):
    """FLTrust: the server trusts clients by a training of its own: `Trusted`."""

    combine = Trusted()


class DPFedAvg(FederatedTraining):
    """FedAvg with differential privacy of clients: `ClientPrivacy`."""

    privacy = ClientPrivacy()


class DPSGDTraining(FederatedTraining):
    """FedAvg whose clients train by DP-SGD: `ExamplePrivacy`."""

    privacy = ExamplePrivacy()


class SecureTraining(FederatedTraining):
    """FedAvg by secure aggregation: `Masks`."""

    privacy = Masks()
