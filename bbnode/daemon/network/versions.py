"""Connected peers that run another version of the program or another model, and where they differ.

Rule: versions work together where their crossings agree. A disagreement is named in the log once,
in `status` and in the metrics for as long as the peer is connected; it ends no connection. Two
nodes of one version disagree where one has another model of its own.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bbnode import transport as seam
from bbnode.engine import Node
from bbnode.ir.crossing import decode_crossings, disagreements
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Hello, PeerInfo

logger = logging.getLogger(__name__)

# A version is named by the first digits of its artifact's digest.
VERSION_DIGITS: Final = 8
# What is listed of one peer; a program of another name disagrees everywhere.
_SHOWN: Final = 16
# Peers whose version was logged and is remembered.
_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherVersion:
    """A peer that runs another artifact, or this one with a model of another size.

    `differs` is empty where all crossings agree.

    `tells` is False for a peer of an earlier release, which does not say what it sends and takes.
    """

    peer: PeerId
    version: str
    differs: tuple[str, ...]
    tells: bool


def version_of(artifact_sha256: str) -> str:
    """Return the short name of a version; "" for a peer without an artifact."""
    return artifact_sha256[:VERSION_DIGITS]


def other_versions(node: Node, sha256: str, peers: Iterable[PeerInfo]) -> list[OtherVersion]:
    """Return the connected peers that run another version than this node's, or another model."""
    found = (_compared(node, sha256, p.peer, p.hello) for p in peers)
    return [each for each in found if each is not None]


def _compared(node: Node, sha256: str, peer: PeerId, hello: Hello) -> OtherVersion | None:
    """Return the other version that a peer runs; None where it runs the same, or no program."""
    if not hello.artifact_sha256:
        return None
    theirs = decode_crossings(hello.crossings)
    found = disagreements(node.crossings, node.classes, theirs, hello.classes)
    if hello.artifact_sha256 == sha256:
        found = tuple(each for each in found if each.sized)
        if not found:
            return None
    # Several crossings may say the same of one model.
    every = list(dict.fromkeys(map(str, found)))
    lines = every[:_SHOWN]
    if len(every) > _SHOWN:
        lines.append(f"and {len(every) - _SHOWN} more")
    return OtherVersion(
        peer=peer,
        version=version_of(hello.artifact_sha256),
        differs=tuple(lines),
        tells=theirs is not None,
    )


class VersionWatch:
    """Logs and publishes each disagreement once per peer and version."""

    def __init__(
        self, node: Node, sha256: str, publish: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Watch the peers of one node, whose artifact has this digest."""
        self._node = node
        self._sha256 = sha256
        self._publish = publish
        self._told: OrderedDict[PeerId, str] = OrderedDict()

    def heard(self, event: seam.TransportEvent) -> None:
        """Handle an event of the transport."""
        if not isinstance(event, seam.ConnectionOpened):
            return
        found = _compared(self._node, self._sha256, event.peer, event.hello)
        if found is None or not found.differs or self._told.get(event.peer) == found.version:
            return
        if found.version == version_of(self._sha256):
            return  # for its model alone, which the engine's "peer.not_ready" tells
        self._told[event.peer] = found.version
        self._told.move_to_end(event.peer)
        if len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)
        said = {"peer": str(found.peer), "version": found.version, "differs": list(found.differs)}
        logger.warning("peer runs a version that disagrees", extra=said)
        self._publish({"type": "peer_version_differs", **said})
