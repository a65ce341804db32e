"""A forecaster: a GRU over the last values, and a line from its last state to the next one."""

from __future__ import annotations

import torch
from torch import nn


class Forecast(nn.Module):
    """The next value [N, 1] of the last ones [N, steps]."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.cells = nn.GRU(1, width, batch_first=True)
        self.line = nn.Linear(width, 1)

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        """Return what is added to the last value."""
        _, state = self.cells(past.unsqueeze(-1))
        step: torch.Tensor = self.line(state[0])
        return past[:, -1:] + step
