"""`bbnode reload`: have a running node read its configuration again.

Rule: the daemon's answer decides. A configuration that it refuses changes nothing, and the command
fails with the code of a wrong configuration.
"""

from __future__ import annotations

from bbnode.cli import output
from bbnode.cli.common import RunningNode


def command(
    node: RunningNode = RunningNode(timeout_s=45.0),
) -> None:
    """Have a running node read its configuration again."""
    with node.ask() as client:
        answer = client.post("/v1/reload")
    node.show(answer, f"changed: {', '.join(answer['changed']) or 'nothing'}")
    if answer["needs_restart"] and not node.as_json:
        output.note(f"needs a restart: {', '.join(answer['needs_restart'])}")
