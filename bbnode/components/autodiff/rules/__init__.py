"""Gradient rules, one function per op; importing this package fills the table."""

from __future__ import annotations

from bbnode.components.autodiff.rules import (
    activations,
    convolution,
    elementwise,
    indexing,
    layers,
    moving,
    normalization,
    reductions,
)

__all__ = [
    "activations",
    "convolution",
    "elementwise",
    "indexing",
    "layers",
    "moving",
    "normalization",
    "reductions",
]
