"""The topics that a node's components follow.

Rule: a topic is a name; the host knows how its messages travel. It is told once when the first
component follows one, once when the last one leaves it, and of all after a restart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from bbnode.components.contracts import ComponentError
from bbnode.engine.empty import EMPTY
from bbnode.engine.reports import Reports
from bbnode.engine.snapshot.codec import SnapshotReader, SnapshotWriter
from bbnode.engine.steps import FollowTopic
from bbnode.ir.caps import MAX_TOPIC_CHARS, MAX_TOPICS

_NAME: Final = re.compile(rf"[A-Za-z0-9._/-]{{1,{MAX_TOPIC_CHARS}}}\Z")


def is_topic(name: object) -> bool:
    """Return True for what can be the name of a topic."""
    return isinstance(name, str) and _NAME.match(name) is not None


class FollowedTopics:
    """Which components of one node follow which topics."""

    __slots__ = ("_followers", "_reports")

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self._followers: dict[str, list[int]] = EMPTY  # topic -> components, in order

    def followers(self, topic: str) -> Sequence[int]:
        """Return the components that follow a topic."""
        return self._followers.get(topic, ())

    def set(self, cell_at: int, topic: str, *, on: bool) -> None:
        """Have a component follow a topic, or not; raises ComponentError beyond MAX_TOPICS."""
        known = self._followers.get(topic, [])
        if on == (cell_at in known):
            return
        if on:
            if not known and len(self._followers) >= MAX_TOPICS:
                raise ComponentError(
                    f"this node follows {MAX_TOPICS} topics (MAX_TOPICS); leave one before "
                    f"{topic!r}"
                )
            if self._followers is EMPTY:
                self._followers = {}
            self._followers[topic] = sorted([*known, cell_at])
        elif len(known) > 1:
            known.remove(cell_at)
        else:
            del self._followers[topic]
        if not known or (not on and topic not in self._followers):
            self._reports.steps.append(FollowTopic(topic=topic, on=on))

    def state(self, _writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: components by topic."""
        return [[topic, cells] for topic, cells in sorted(self._followers.items())]

    def load(self, plain: Any, _reader: SnapshotReader) -> None:
        """Load what `state` returned, and tell the host."""
        for topic, cells in plain:
            for cell_at in cells:
                self.set(int(cell_at), str(topic), on=True)
