"""Trackers of experiments, which get the metrics of rounds besides the node's own history.

Rule: a tracker sees runs and rounds, and nothing of the node. Packages add others under the entry
point group `bbnode.trackers`, like those here: a name, and a function that creates one. Nothing is
imported and nothing uses a network unless the configuration asks for it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from bbnode.ir import plugins
from bbnode.ir.errors import DeploymentError, EnvironmentFault
from bbnode.ir.installation import install

GROUP: Final = "bbnode.trackers"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The rounds of one target of one node.

    Attributes:
        name: for people, as `<node>-<target>-<run>`.
        key: the same for all lives of the node that go on with the run, and unique.
        node: the node's name.
        peer_id: of the node.
        target: that is invoked.
        artifact: sha256 of the program's file.
        first_round: the number of the first round to come; above 1 in a run that goes on.
        state_dir: of the node; a tracker that writes files puts them there by default.
        settings: what the configuration says of these rounds.
    """

    name: str
    key: str
    node: str
    peer_id: str
    target: str
    artifact: str
    first_round: int
    state_dir: Path
    settings: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """One tracker of one run. All calls come from one thread, one after the other."""

    def start(self, run: RunInfo) -> None:
        """Begin or continue a run; called before anything else."""

    def log(self, number: int, metrics: Mapping[str, float], at: float) -> None:
        """Log the metrics of a round, which ended at `at` (seconds of the Unix epoch)."""

    def end(self) -> None:
        """End the run: the node stops, or all rounds are done."""


# Creates a tracker from its settings in the configuration; raises TrackerRefused.
TrackerFactory = Callable[[Mapping[str, Any]], Tracker]
_REGISTERED: dict[str, TrackerFactory] = {}


class UnknownTracker(DeploymentError):
    """No tracker has this name."""


class TrackerRefused(DeploymentError):
    """The settings of a tracker cannot be used."""


class TrackerLibraryMissing(EnvironmentFault):
    """The library of a tracker is not installed."""


def register_tracker(kind: str, factory: TrackerFactory) -> None:
    """Register a tracker for this process, beside those of installed packages."""
    _REGISTERED[kind] = factory


def make_tracker(kind: str, settings: Mapping[str, Any]) -> Tracker:
    """Return the tracker of a configuration.

    Raises UnknownTracker, TrackerRefused, TrackerLibraryMissing, and BrokenPlugin.
    """
    factory: Any = _REGISTERED.get(kind)
    if factory is None:
        try:
            factory = plugins.load(GROUP, kind)
        except plugins.UnknownPlugin as error:
            known = ", ".join(sorted({*plugins.names(GROUP), *_REGISTERED})) or "none"
            raise UnknownTracker(f"[[trackers]] kind {kind!r}: there is {known}") from error
    tracker: Tracker = factory(dict(settings))
    return tracker


def need(module: str, requirement: str) -> None:
    """Raise TrackerLibraryMissing unless a module can be imported; nothing is imported."""
    if importlib.util.find_spec(module) is None:
        raise TrackerLibraryMissing(f"this tracker needs {requirement}: {install(requirement)}")


def take_settings(
    kind: str, settings: Mapping[str, Any], known: Mapping[str, type]
) -> dict[str, Any]:
    """Return settings after checking their names and types. Raises TrackerRefused."""
    for name, value in settings.items():
        if name not in known:
            raise TrackerRefused(
                f"[[trackers]] {kind}: no setting {name!r}; there are {', '.join(known)}"
            )
        if type(value) is not known[name]:
            raise TrackerRefused(
                f"[[trackers]] {kind}: {name} is {value!r}, it has to be a {known[name].__name__}"
            )
    return dict(settings)
