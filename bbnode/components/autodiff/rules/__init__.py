"""Gradient rules, one function per op; importing this package fills the table."""

from __future__ import annotations

from bbnode.components.autodiff.rules import (
    activations,
    attention,
    control,
    convolution,
    elementwise,
    indexing,
    layers,
    likelihood,
    moving,
    normalization,
    pooling,
    products,
    recurrent,
    reductions,
    sampling,
    spatial,
)

__all__ = [
    "activations",
    "attention",
    "control",
    "convolution",
    "elementwise",
    "indexing",
    "layers",
    "likelihood",
    "moving",
    "normalization",
    "pooling",
    "products",
    "recurrent",
    "reductions",
    "sampling",
    "spatial",
]
