"""Five hospitals learn who stays longer, from tables that none of them shows to another."""

from __future__ import annotations

from bbnode.programs import FederatedTraining


class Hospitals(FederatedTraining):
    """Multinomial logistic regression of nine columns: the outcome of a stay, of three."""

    model = (9, 3)
    data = "bbnode.TableDataSource"
    metrics = ("accuracy",)
    learning_rate = 0.1
    batch = 64
    epochs = 1
    clients = 5
