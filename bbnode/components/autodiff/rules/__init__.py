"""Gradient rules, one function per op; importing this package fills the table."""

from __future__ import annotations

from bbnode.components.autodiff.rules import (
    activations,
    control,
    convolution,
    elementwise,
    indexing,
    layers,
    moving,
    normalization,
    recurrent,
    reductions,
)

__all__ = [
    "activations",
    "control",
    "convolution",
    "elementwise",
    "indexing",
    "layers",
    "moving",
    "normalization",
    "recurrent",
    "reductions",
]
