"""The history of a node: each round that has ended goes to disk and to all trackers.

Rule: a node without rounds has no file. Nothing here waits while the node runs; rounds that could
not be kept are counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bbnode.daemon.config import InvokeSection, NodeConfig, TrackerSection
from bbnode.daemon.history.recorder import RoundRecorder
from bbnode.daemon.history.store import FoundRounds, read_rounds, rounds_file
from bbnode.daemon.history.trackers import RunInfo, make_tracker
from bbnode.daemon.history.tracking import TrackerThread, join_all


def settings_digest(config: NodeConfig, entry: InvokeSection) -> str:
    """Return eight hex digits over the settings that decide what a round computes.

    These are the settings of the node's slots and the inputs of the target; not the number of
    rounds, or their end.
    """
    settings = {"slots": config.slots, "inputs": entry.inputs}
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


class RoundHistory:
    """The rounds of one node, on disk and in its trackers."""

    def __init__(
        self, state_dir: Path, config: NodeConfig, *, artifact_sha256: str, peer_id: str
    ) -> None:
        """Open nothing yet: `begin` opens the file of rounds.

        Raises the errors of `make_tracker`: a misspelled tracker is reported before the first
        round.
        """
        self._state_dir = state_dir
        self._config = config
        self._artifact_sha256 = artifact_sha256
        self._peer_id = peer_id
        self._trackers: dict[str, list[TrackerThread]] = {}
        for entry in config.trackers:
            make_tracker(entry.kind, entry.settings)
        self._recorder: RoundRecorder | None = None

    def begin(
        self,
        entry: InvokeSection,
        done: int,
        *,
        anew: bool = False,
        trackers: Sequence[TrackerSection] | None = None,
    ) -> int:
        """Begin or continue the rounds of a target, of which `done` were run.

        Returns the number of the run, which is another one with `anew`. `trackers` get its rounds,
        by default those of the configuration. Raises the errors of `make_tracker`; nothing has
        begun then.
        """
        wanted = self._config.trackers if trackers is None else trackers
        created = [(each.kind, make_tracker(each.kind, each.settings)) for each in wanted]
        if self._recorder is None:
            keep = self._config.node.keep_rounds
            self._recorder = RoundRecorder(self._state_dir, keep=keep)
        maker = {
            "artifact": self._artifact_sha256,
            "settings": settings_digest(self._config, entry),
        }
        run = self._recorder.begin(entry.target, done, maker, anew=anew)
        name = self._config.node.name
        info = RunInfo(
            name=f"{name}-{entry.target.partition('#')[0].lstrip('@')}-{run}",
            key=f"{self._peer_id}/{entry.target}/{run}",
            node=name,
            peer_id=self._peer_id,
            target=entry.target,
            artifact=self._artifact_sha256,
            first_round=done + 1,
            state_dir=self._state_dir,
            settings=entry.model_dump(
                mode="json", exclude_defaults=True, exclude={"target"}, by_alias=True
            ),
        )
        join_all(self._trackers.pop(entry.target, []))
        self._trackers[entry.target] = [TrackerThread(kind, one, info) for kind, one in created]
        return run

    def series(self, target: str, metric: str) -> list[tuple[int, bool, float | None]]:
        """Return number, outcome and metric of the rounds of a target's run, oldest first."""
        return [] if self._recorder is None else self._recorder.series(target, metric)

    def add(self, finished: Mapping[str, Any]) -> None:
        """Add a round in the form of `Round.as_json`; never waits."""
        if self._recorder is not None:
            self._recorder.add(finished)
        for thread in self._trackers.get(finished["target"], ()):
            thread.add(finished)

    def read(
        self, *, last: int | None = None, since: int = 0, max_bytes: int | None = None
    ) -> FoundRounds:
        """Return the rounds on disk, as `read_rounds`. Use a thread. Raises StorageError."""
        if self._recorder is None:
            file = rounds_file(self._state_dir)  # from before this start
            return read_rounds(file, last=last, since=since, max_bytes=max_bytes)
        return self._recorder.read(last=last, since=since, max_bytes=max_bytes)

    def close(self) -> None:
        """Write the rest and end the trackers, within a few seconds. Use a thread."""
        if self._recorder is not None:
            self._recorder.close()
        join_all([thread for threads in self._trackers.values() for thread in threads])

    def counters(self) -> dict[str, int]:
        """Return the counts of rounds that were not written, and that trackers did not take."""
        if self._recorder is None:
            return {}
        lost = sum(t.lost for threads in self._trackers.values() for t in threads)
        return {"rounds.lost": self._recorder.lost, "trackers.lost": lost}
