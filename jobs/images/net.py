"""A convolutional network with BatchNorm for pictures of 32 x 32 in colour."""

from __future__ import annotations

import torch
from torch import nn


def _block(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class Pictures(nn.Module):
    """Scores [N, 10] of pictures [N, 3, 32, 32]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            _block(3, width), _block(width, 2 * width), _block(2 * width, 4 * width)
        )
        self.scores = nn.Linear(4 * width * 16, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        seen = self.blocks(pictures).flatten(1)
        scores: torch.Tensor = self.scores(seen)
        return scores
