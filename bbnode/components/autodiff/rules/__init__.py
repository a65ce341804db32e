"""Gradient rules, one function per op; importing this package fills the table."""

from __future__ import annotations

from bbnode.components.autodiff.rules import convolution, elementwise, layers, moving

__all__ = ["convolution", "elementwise", "layers", "moving"]
