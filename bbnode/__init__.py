"""bbnode: a node daemon that runs one ONNX program across many peers.

Rule of this file: importing `bbnode` is free. It pulls in nothing, so that the command
line starts quickly; authors import `bbnode.dsl`, `bbnode.compiler` and `bbnode.components`.
"""

from __future__ import annotations

import os

# A node talks to nobody but its peers. ONNX Runtime reads this while it is imported, and from
# 1.29 on sends usage data to its maker and keeps a device id in the home directory unless it is
# set by then; so it stands here, which runs before any module of bbnode can import it. Who sets
# the variable decides: "0" asks for that data to be sent. Set and empty is not set.
if not os.environ.get("ORT_DISABLE_TELEMETRY"):
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"

__all__ = ["__version__"]

__version__ = "0.1.0"
