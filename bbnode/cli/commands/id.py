"""`bbnode id`: the PeerId of a node.

Rule: it reads the key and never makes one, so that a wrong path is an error and not a new
identity.
"""

from __future__ import annotations

from bbnode.cli.common import LocalNode


def command(
    node: LocalNode = LocalNode(),
) -> None:
    """Print the PeerId of this node."""
    from bbnode.daemon import paths
    from bbnode.ir.errors import DeploymentError
    from bbnode.transport.identity import load_identity

    key = paths.identity_file(node.directory)
    if not key.exists():
        raise DeploymentError(
            f"{key}: this node has no identity yet; `bbnode init` or its first `bbnode run` makes "
            "one"
        )
    peer_id = str(load_identity(key).peer_id)
    node.show({"peer_id": peer_id, "identity_file": str(key)}, peer_id)
