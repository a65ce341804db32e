"""What indexes are measured on: clustered Gaussians, and embeddings of a real text.

Rule: Gaussians of a seed are the same everywhere; the text is that of `_texts`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from _texts import embedded

CLUSTERS = 1000
DIMENSIONS = 128
QUERIES = 1000
PASSAGES, PASSAGE_QUERIES = 10_000, 500


@dataclass(frozen=True)
class Vectors:
    """Items [N, D] and queries [Q, D], float32, and what they are, in words."""

    items: np.ndarray
    queries: np.ndarray
    told: str


def gaussians(count: int, queries: int = QUERIES) -> Vectors:
    """Draw 1,000 centres from a normal distribution, and items around them with deviation 1."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((CLUSTERS, DIMENSIONS), dtype=np.float32)

    def around(number: int) -> np.ndarray:
        noise = rng.standard_normal((number, DIMENSIONS), dtype=np.float32)
        return centres[rng.integers(CLUSTERS, size=number)] + noise

    items = around(count)
    return Vectors(items, around(queries), f"clustered Gaussians, {count:,} x {DIMENSIONS}")


def embeddings() -> Vectors | None:
    """Return embeddings of real text; None where the encoder is not installed."""
    found = embedded(PASSAGES, PASSAGE_QUERIES)
    if found is None:
        return None
    items, queries = found
    return Vectors(items, queries, f"MiniLM of Python's manual, {len(items):,} x {items.shape[1]}")
