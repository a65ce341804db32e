"""A convolutional autoencoder: eight numbers for each picture, and the picture from these."""

from __future__ import annotations

import torch
from torch import nn


class Autoencoder(nn.Module):
    """Pictures [N, 1, 24, 24] of pictures [N, 1, 24, 24], through a code of a few numbers."""

    def __init__(self, code: int = 8, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(2 * width * 36, code),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(code, 2 * width * 36), nn.ReLU(), nn.Unflatten(1, (2 * width, 6, 6)),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1), nn.ReLU(),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(width, 1, 3, padding=1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return the pictures as they come out again."""
        again: torch.Tensor = self.decoder(self.encoder(pictures))
        return again
