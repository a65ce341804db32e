"""Gradient rules, one function per op; importing this package fills the table."""

from __future__ import annotations

from bbnode.components.autodiff.rules import (
    attention,
    convolution,
    elementwise,
    layers,
    likelihood,
    moving,
    pooling,
    products,
    sampling,
    spatial,
)

__all__ = [
    "attention",
    "convolution",
    "elementwise",
    "layers",
    "likelihood",
    "moving",
    "pooling",
    "products",
    "sampling",
    "spatial",
]
