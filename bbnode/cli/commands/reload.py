"""`bbnode reload`: have a running node read its configuration again.

Rule: the daemon's answer decides. A configuration that it refuses changes nothing, and the command
fails with the code of a wrong configuration.
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

# A node that computes answers late; a supervisor gives a reload 60 s (TimeoutStartSec).
DEFAULT_TIMEOUT_S = 45.0


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    state_dir: StateDirOption = None,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Have a running node read its configuration again."""
    with daemon(config, state_dir, timeout_s) as client:
        told = client.post("/v1/reload")
    if as_json:
        output.json_object(told)
        return
    output.data(f"changed: {', '.join(told['changed']) or 'nothing'}")
    if told["needs_restart"]:
        output.note(f"needs a restart: {', '.join(told['needs_restart'])}")
