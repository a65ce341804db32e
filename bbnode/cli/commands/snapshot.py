"""`bbnode snapshot`: have a running node write its state to disk now.

Rule: when it returns, the state is on disk.
"""

from __future__ import annotations

from bbnode.cli import output
from bbnode.cli.common import (
    DEFAULT_CONFIG,
    ConfigOption,
    JsonOption,
    StateDirOption,
    TimeoutOption,
    daemon,
)

# A large model on a slow disk; status and the like answer from memory.
DEFAULT_TIMEOUT_S = 60.0


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    state_dir: StateDirOption = None,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Write the state of a running node to its state directory."""
    with daemon(config, state_dir, timeout_s) as client:
        told = client.post("/v1/snapshot")
    if as_json:
        output.json_object(told)
    else:
        output.data(f"{told['bytes']} bytes of state in {told['state_dir']}")
