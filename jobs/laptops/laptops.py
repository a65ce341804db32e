"""Eight laptops that train when they are awake; nobody waits for one that sleeps."""

from __future__ import annotations

from bbnode.programs import FedBuff


class Laptops(FedBuff):
    """Logistic regression of twenty columns, three classes; four updates make a step."""

    model = (20, 3)
    metrics = ("accuracy",)
    learning_rate = 0.1
    epochs = 2
    buffer = 4
    deadline_s = 20.0
