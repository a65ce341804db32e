"""The facts about a node of this process that every face returns without asking its loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bbnode.api.on_trio import TrioNode


class Facts:
    """A node's name, identity and places; safe in any thread."""

    _node: TrioNode

    @property
    def name(self) -> str:
        """Its name in logs and status."""
        return self._node.name

    @property
    def peer_id(self) -> str:
        """Its PeerId."""
        return self._node.peer_id

    @property
    def targets(self) -> tuple[str, ...]:
        """The installed targets, each as `class#hash`."""
        return self._node.targets

    @property
    def addresses(self) -> tuple[str, ...]:
        """The multiaddrs at which other nodes reach it, for their `peers`."""
        return self._node.addresses

    @property
    def state_dir(self) -> Path:
        """Its state directory; commands find the node there, as in `bbnode status`."""
        return self._node.state_dir

    @property
    def socket(self) -> Path:
        """The path of its control socket, for `bbnode.connect`."""
        return self._node.socket

    @property
    def libp2p_host(self) -> Any:
        """Its host of py-libp2p, a `BasicHost`; call its methods by `with_libp2p`.

        Raises NotSupportedError where `network.transport` is not "libp2p".
        """
        return self._node.libp2p_host

    @property
    def running(self) -> bool:
        """True until it has stopped or died."""
        return self._node.running

    def __repr__(self) -> str:
        state = "running" if self.running else "stopped"
        return f"<{type(self).__name__} {self.name} {self.peer_id} {state}>"
