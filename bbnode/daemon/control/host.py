"""The daemon, as its control plane sees it.

Rule: handlers see a `Host` and nothing else, so they can be tested without a daemon. Everything
here is used on the trio thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from bbnode.components.contracts import Component, SharedSchema
from bbnode.components.errors import NotExportable
from bbnode.daemon.access.control import AccessControl
from bbnode.daemon.config import InvokeSection, TrackerSection
from bbnode.daemon.config.reload import Changes
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.daemon.control import answers
from bbnode.daemon.control.feed import Feed
from bbnode.daemon.control.trace import TraceLog
from bbnode.daemon.history.history import RoundHistory
from bbnode.daemon.invoke.outcome import Outcomes
from bbnode.daemon.invoke.rounds import Rounds
from bbnode.daemon.network.dial_back import Ask
from bbnode.daemon.network.routing import Found
from bbnode.daemon.observing.watch import Stalled
from bbnode.daemon.predicting.meaning import Meaning
from bbnode.daemon.state.checkpoint import Upgrade
from bbnode.engine import Node
from bbnode.ir.errors import DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Transport
from bbnode.transport.driver import Driver
from bbnode.transport.errors import NotSupportedError


def unknown_initial(slot: str) -> Component:
    """Raise NotExportable: nothing is known of the slot before its training."""
    raise NotExportable(f"slot {slot!r}: its initial state is not known")


def unknown_meaning(_slot: str) -> Meaning:
    """Return that nothing is known of the examples of the model in a slot."""
    return Meaning()


def no_reference(_slot: str) -> SharedSchema | None:
    """Return that nothing was agreed about the examples of a slot."""
    return None


class RoundsRefused(DeploymentError):
    """Rounds can't be started: the target makes some, or the node does not run."""


def no_rounds(
    _entry: InvokeSection, _trackers: Sequence[TrackerSection] | None
) -> answers.RoundsStarted:
    """Raise RoundsRefused: nothing makes rounds here."""
    raise RoundsRefused("this node makes no rounds")


async def no_search(_peer: PeerId) -> Found:
    """Raise NotSupportedError: nobody is asked from here."""
    raise NotSupportedError("this node asks no DHT")


class NotOffered(DeploymentError):
    """No connected peer offers the program that was asked for."""


class RestartRefused(DeploymentError):
    """The process is not the node's own, or records its input."""


def no_offers(sha256: str, _max_bytes: int | None) -> dict[str, Any]:
    """Raise NotOffered: nobody offers anything here."""
    raise NotOffered(
        f"no connected peer offers the program {sha256}; `bbnode status` lists what is offered"
    )


def no_restart() -> None:
    """Raise RestartRefused: the process is another program's."""
    raise RestartRefused("this process can't start the node anew: stop it, and start it again")


@dataclass(slots=True, kw_only=True)
class Host:
    """One daemon, as its control plane sees it."""

    resolved: ResolvedConfig
    artifact_sha256: str
    # All targets of the artifact; the node's own are among them.
    artifact_targets: tuple[str, ...]
    node: Node
    backend: Transport
    driver: Driver
    events: Feed
    logs: Feed
    trace: TraceLog
    # Writes a checkpoint now; returns its size in bytes. Raises StorageError or ComponentError.
    save: Callable[[], Awaitable[int]]
    stop: Callable[[], None]
    # Reads the configuration again; raises the errors of an invalid configuration.
    reload: Callable[[], Changes]
    # Measures the seconds of a round trip to a connected peer; raises the errors of the transport.
    ping: Callable[[PeerId], Awaitable[float]]
    # Has a peer, or any connected one, dial our addresses; raises DialBackRefused.
    dial_back: Ask
    # Access control of the node; the engine's own lists are for its programs.
    access: AccessControl
    # The logger whose lines are shown and whose level can be changed; "" is the root.
    logger_name: str = ""
    outcomes: Outcomes = field(default_factory=Outcomes)
    # The outputs of a target that may come after an execution that started with all inputs, or with
    # one.
    later: Callable[[str, str | None], frozenset[str]] = lambda _target, _entry: frozenset()
    rounds: Sequence[Rounds] = ()
    # Starts rounds of a target, beside those of the configuration. Raises RoundsRefused, and the
    # errors of trackers.
    start_rounds: Callable[
        [InvokeSection, Sequence[TrackerSection] | None], answers.RoundsStarted
    ] = no_rounds
    # Creates the component of a slot as the program has it, before any training.
    initial: Callable[[str], Component] = unknown_initial
    # The meaning of inputs and outputs of the model in a slot; called in a worker thread.
    meaning: Callable[[str], Meaning] = unknown_meaning
    # The meaning of the data of this node and of its peers, as JSON; and in the federation, by
    # slot.
    data: Callable[[], Mapping[str, Any]] = dict
    reference: Callable[[str], SharedSchema | None] = no_reference
    # The rounds on disk; None if none are kept.
    history: RoundHistory | None = None
    # The state of discovery, as JSON.
    discovery: Callable[[], Mapping[str, Any]] = dict
    # Finds a peer by asking others; raises NotFound, and NotSupportedError if no peer can be asked.
    find_peer: Callable[[PeerId], Awaitable[Found]] = no_search
    # Reports of peers that were asked to dial this node, as JSON.
    reachability: Callable[[], Mapping[str, Any]] = dict
    # The state of the DHT, as JSON; empty if it is off.
    routing: Callable[[], Mapping[str, Any]] = dict
    # Programs that connected peers offer as replacements of this one.
    offers: Callable[[], list[dict[str, str]]] = list
    # Starts to fetch an offered program, or returns the progress. Raises NotOffered.
    fetch_upgrade: Callable[[str, int | None], dict[str, Any]] = no_offers
    # Stops and starts again at the next quiet moment. Raises RestartRefused.
    restart: Callable[[], None] = no_restart
    # Everything that has made no progress for too long.
    stalled: Callable[[], Sequence[Stalled]] = tuple
    # trio's time; the phase is "starting", "ready" or "stopping".
    started_s: float = 0.0
    phase: str = "starting"
    saved_s: float | None = None
    # The state that the node took over from a checkpoint that it could not resume.
    upgrade: Upgrade | None = None
    # One thread at a time exports a model: each holds several copies of it.
    exporting: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))
    # Counters of further parts of the daemon.
    counters: list[Callable[[], dict[str, int]]] = field(default_factory=list)

    @property
    def shown_phase(self) -> str:
        """The phase for people: "not ready" if the node runs and can't do its work."""
        unprepared = self.phase == "ready" and self.node.not_ready()
        return "not ready" if unprepared else self.phase

    def note_saved(self, now_s: float) -> None:
        """Record that a checkpoint was written at trio's time `now_s`."""
        self.saved_s = now_s

    def all_counters(self) -> dict[str, int]:
        """Return all counters by dotted name."""
        counts = {
            **self.node.counters(),
            **self.driver.counters(),
            **{f"transport.{k}": v for k, v in self.backend.counters().items()},
            "control.subscribers": self.events.subscribers + self.logs.subscribers,
            "control.events_dropped": self.events.dropped + self.logs.dropped,
        }
        for more in self.counters:
            counts.update(more())
        return counts
