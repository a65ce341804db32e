"""bbnode: a node daemon that runs one ONNX program across many peers.

Rule of this file: importing `bbnode` is free. It pulls in nothing, so that the command
line starts quickly; authors import `bbnode.dsl`, `bbnode.compiler` and `bbnode.components`.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
