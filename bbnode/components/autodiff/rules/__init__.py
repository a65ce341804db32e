"""Gradient rules, one function per op; importing this package fills the table."""

from __future__ import annotations

from bbnode.components.autodiff.rules import (
    control,
    convolution,
    elementwise,
    layers,
    moving,
    recurrent,
)

__all__ = ["control", "convolution", "elementwise", "layers", "moving", "recurrent"]
