"""Three clients that train for minutes before they answer."""

from __future__ import annotations

from bbnode.programs import FederatedTraining


class Digits(FederatedTraining):
    """A network of one hidden layer on pictures of 28 x 28."""

    model = (784, 256, 10)
    metrics = ("accuracy",)
    learning_rate = 0.05
    batch = 64
    clients = 3
    deadline_s = 3600.0
