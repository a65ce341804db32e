"""The check of a vector that a peer sent, for components that keep one of a known size.

Rule: what is wrong is said, never repaired.
"""

from __future__ import annotations

import math

import numpy as np

from bbnode.ir.values import Value


def vector_problem(tensor: Value, size: int, max_abs: float) -> str | None:
    """Return why a value is no float32 [size] of finite numbers up to `max_abs`, or None."""
    if not isinstance(tensor, np.ndarray) or tensor.dtype != np.float32:
        return "its tensor is not float32"
    if tensor.shape != (size,):
        return f"its tensor has the shape {list(tensor.shape)}, not {[size]}"
    low, high = float(tensor.min()), float(tensor.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        return "its tensor holds NaN or infinity"
    if max(-low, high) > max_abs:
        return f"its tensor holds a value beyond {max_abs:g} (max_abs)"
    return None
