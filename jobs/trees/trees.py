"""Three banks grow one forest: who will not pay back."""

from __future__ import annotations

from bbnode.programs import FederatedTrees


class Trees(FederatedTrees):
    """Boosted trees of twelve columns, two classes."""

    features = 12
    classes = 2
    clients = 3
    leaves = 15
    learning_rate = 0.3
    metrics = ("accuracy", "auc")
