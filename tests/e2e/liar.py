"""What a liar's node imports as a module of components: it spoils what the node sends.

It stands beside the liar's node.toml, whose folder says by its name how it lies (`LIES`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from bbnode.engine.ops import wire
from bbnode.ir import codec
from bbnode.ir.values import Composite, Metadata

LIES = {"client-2": "nan", "client-3": "size", "client-4": "samples"}


def spoilt(value: Any, lie: str) -> Any:
    """A value as a liar sends it: of the same type, with other content."""
    if isinstance(value, Composite):
        return Composite(spoilt(part, lie) for part in value)
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        if lie == "nan":
            return np.full_like(value, np.nan)
        return np.tile(value.reshape(-1), 2) if lie == "size" else value
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and lie != "samples":
        return np.tile(value, 2) if lie == "size" else value[::-1].copy()  # a code
    if isinstance(value, Metadata) and lie == "samples" and "num_samples" in value:
        return Metadata({**value, "num_samples": 1 << 60})
    return value


class Spoilt:
    """The codec of values, under the hands of a liar."""

    def __init__(self, lie: str) -> None:
        self.lie = lie

    def __getattr__(self, name: str) -> Any:
        return getattr(codec, name)

    def encode_parts(self, value: Any, node: Any) -> Any:
        return codec.encode_parts(spoilt(value, self.lie), node)


if "run" in sys.argv:
    vars(wire)["codec"] = Spoilt(LIES[Path(sys.argv[-1]).parent.name])
