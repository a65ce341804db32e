"""bbnode: a node daemon that runs one ONNX program across many peers.

Rule of this file: importing `bbnode` is free. It pulls in nothing, so that the command
line starts quickly; authors import `bbnode.dsl`, `bbnode.compiler` and `bbnode.components`.
"""

from __future__ import annotations

import os

# A node talks to nobody but its peers. From version 1.29 on, ONNX Runtime sends usage data to its
# maker and keeps a device id in the home directory, unless this variable is set before its import;
# this file runs before any module of bbnode can import it. A user may set it to "0" to send that
# data. An empty value counts as unset.
if not os.environ.get("ORT_DISABLE_TELEMETRY"):
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"

__all__ = ["__version__"]

__version__ = "0.1.0"
