"""Eight clinics that show their server a sum, and no update."""

from __future__ import annotations

from bbnode.programs import DPFedAvg, FederatedTraining, SecureTraining


class Plain(FederatedTraining):
    """Logistic regression of twenty columns, three classes."""

    model = (20, 3)
    metrics = ("accuracy",)
    learning_rate = 0.1
    clients = 8
    quorum = 5


class Secure(SecureTraining):
    """The same under masks; a step that somebody does not answer ends after five seconds."""

    model = (20, 3)
    metrics = ("accuracy",)
    learning_rate = 0.1
    clients = 8
    threshold = 6
    clip = 2.0
    deadline_s = 5.0


class Noisy(DPFedAvg):
    """The same with noise, by which nobody learns if a clinic took part."""

    model = (20, 3)
    metrics = ("accuracy",)
    learning_rate = 0.1
    clients = 8
    population = 8
    quorum = 5
    clip = 0.5
    noise = 1.0
    epsilon = 100.0
    delta = 1e-3
