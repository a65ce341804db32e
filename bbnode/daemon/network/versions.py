"""Connected peers that run another version of the program or another model, and the differences.

Rule: versions work together if their crossings agree. A disagreement is named in the log once, and
in `status` and in the metrics as long as the peer is connected; it ends no connection. Two nodes of
one version disagree if one has another model of its own.
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
# Disagreements listed per peer; a program of another name disagrees everywhere.
_SHOWN: Final = 16
# Peers whose version was logged and is remembered.
_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherVersion:
    """A peer that runs another artifact, or this one with a model of another size.

    `differs` is empty if all crossings agree.

    `tells` is False for a peer of an earlier release, which does not state its crossings.
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
    compared = (_compared(node, sha256, p.peer, p.hello) for p in peers)
    return [each for each in compared if each is not None]


def _compared(node: Node, sha256: str, peer: PeerId, hello: Hello) -> OtherVersion | None:
    """Return the other version that a peer runs; None if it runs the same, or no program."""
    if not hello.artifact_sha256:
        return None
    theirs = decode_crossings(hello.crossings)
    conflicts = disagreements(node.crossings, node.classes, theirs, hello.classes)
    if hello.artifact_sha256 == sha256:
        conflicts = tuple(each for each in conflicts if each.sized)
        if not conflicts:
            return None
    # Several crossings may report the same disagreement of one model.
    every = list(dict.fromkeys(map(str, conflicts)))
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
        other = _compared(self._node, self._sha256, event.peer, event.hello)
        if other is None or not other.differs or self._told.get(event.peer) == other.version:
            return
        if other.version == version_of(self._sha256):
            return  # only its model differs, which the engine reports as "peer.not_ready"
        self._told[event.peer] = other.version
        self._told.move_to_end(event.peer)
        if len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)
        logged = {"peer": str(other.peer), "version": other.version, "differs": list(other.differs)}
        logger.warning("peer runs a version that disagrees", extra=logged)
        self._publish({"type": "peer_version_differs", **logged})
