"""`bbnode snapshot`: have a running node write its state to disk now.

Rule: when it returns, the state is on disk.
"""

from __future__ import annotations

from bbnode.cli.common import RunningNode


def command(
    node: RunningNode = RunningNode(timeout_s=60.0),
) -> None:
    """Write the state of a running node to its state directory."""
    with node.ask() as client:
        told = client.post("/v1/snapshot")
    node.show(told, f"{told['bytes']} bytes of state in {told['state_dir']}")
