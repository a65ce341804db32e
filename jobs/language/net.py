"""A language model: a table of tokens, a GRU, and a row of scores for each next token."""

from __future__ import annotations

import torch
from torch import nn


class Language(nn.Module):
    """Scores [N, length, vocabulary] of ids [N, length]."""

    def __init__(self, vocabulary: int, width: int = 128) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.cells = nn.GRU(width, width, batch_first=True)
        self.scores = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next tokens."""
        scores: torch.Tensor = self.scores(self.cells(self.table(ids))[0])
        return scores
