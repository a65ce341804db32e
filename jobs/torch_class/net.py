"""The network of all clients, as those that have PyTorch import it."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """Scores [N, classes] of numbers [N, features], by two layers with BatchNorm between."""

    def __init__(self, features: int = 16, hidden: int = 48, classes: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(features, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.second = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        scores: torch.Tensor = self.second(torch.tanh(self.norm(self.first(x))))
        return scores
