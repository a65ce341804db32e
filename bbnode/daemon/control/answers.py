"""The types of the control plane's answers, as its OpenAPI document shows them.

Rule: a type lists the fields of an answer and costs nothing at run time: the values are plain
dictionaries. The parts that other layers make (a round, a finding of discovery) are any object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# On Python 3.11 pydantic accepts only this one.
from typing_extensions import TypedDict

Json = Mapping[str, Any]


class PeerView(TypedDict):
    """A connected peer; what it claims about itself is only shown."""

    peer: str
    classes: list[str]
    via: str
    direction: str
    address: str
    agent: str
    version: str
    bytes_in: int
    bytes_out: int
    queued: int
    queued_bytes: int
    rtt_ms: float | None
    connected_s: float
    not_ready: str
    pending: bool


class VersionView(TypedDict):
    """A peer with another version; `differs` says which crossings it and this node disagree on."""

    peer: str
    version: str
    tells: bool
    differs: list[str]


class WantedView(TypedDict):
    """A peer that is dialled whenever it is not connected."""

    peer: str
    connected: bool
    failed_dials: int
    last_error: str


class PeerList(TypedDict):
    """All connections, and those that are wanted."""

    peers: list[PeerView]
    wanted: list[WantedView]


class RuleView(TypedDict):
    """A rule that decides about a peer: its outcome is `pass` or `fail`."""

    rule: str
    outcome: str
    detail: str


class PeerDetail(TypedDict):
    """One peer, and every rule that decides about it."""

    peer: str
    connected: PeerView | None
    addresses: list[str]
    health: str
    usable: bool
    why: list[RuleView]


class PeerConnecting(TypedDict):
    """A peer that is dialled from now on."""

    peer: str
    addresses: list[str]
    connected: bool


class PeerDropped(TypedDict):
    """A peer that is no longer dialled."""

    peer: str
    was_connected: bool


class PeerAddresses(TypedDict):
    """A peer with its addresses in the book."""

    peer: str
    addresses: list[str]


class AddressBookView(TypedDict):
    """The address book, in the order in which entries give way to new ones."""

    peers: list[PeerAddresses]


class AddressDropped(PeerAddresses):
    """The addresses that are left; `was_known` is false where the book did not have it."""

    was_known: bool


class PeerForgotten(TypedDict):
    """A peer that the book has no longer; `was_known` is false where it did not have it."""

    peer: str
    was_known: bool


class PeerBlocked(PeerDropped):
    """A peer that is denied."""

    blocked: bool


class PeerAllowed(TypedDict):
    """A peer that is no longer denied by hand, and what else decides about it."""

    peer: str
    blocked: bool
    why: list[RuleView]


class AccessReloaded(TypedDict):
    """`taken` is false where the node has to start again to use what it found."""

    taken: bool


class Pong(TypedDict):
    """One round trip."""

    peer: str
    rtt_ms: float


class DialledBack(TypedDict):
    """A peer's report of dialling our addresses."""

    peer: str
    seen_at: str
    addresses: list[Json]


class PeerFound(TypedDict):
    """Where a peer is said to be, and what came of trying each address.

    `signed`: the peer itself has signed the addresses; else each says who gave it.
    """

    peer: str
    connected: bool
    signed: bool
    addresses: list[Json]


class ExecutionResult(TypedDict):
    """An execution, and what came of its messages: `ok` is null until all outputs are there.

    `outputs` are summaries; with `exact`, `values` says all of each (`bbnode.daemon.invoke.exact`).
    `more`: further values of an output, of several peers. `skipped`: outputs that have no value
    this time, and why. `failures`: `peer` is where, "" for this node. `refused`: peers that did not
    answer it, and why. `missing`: outputs that may still come. `left_out` counts what was not kept.
    `coded`: `raw_bytes` of tensors that went through codecs in it, and `code_bytes` of their codes.
    """

    execution: int
    ok: bool | None
    outputs: Json
    more: dict[str, list[Json]]
    skipped: dict[str, str]
    failures: list[dict[str, str]]
    refused: dict[str, str]
    missing: list[str]
    left_out: int
    coded: dict[str, int]
    values: Json | None


class Emitted(TypedDict):
    """An event that is on the bus."""

    kind: int


class SnapshotWritten(TypedDict):
    """A checkpoint that is on disk."""

    state_dir: str
    bytes: int


class Reloaded(TypedDict):
    """The keys of the configuration that took effect, and those that need a restart."""

    changed: list[str]
    needs_restart: list[str]


class Stopping(TypedDict):
    """The daemon has begun to stop."""

    stopping: bool


class Restarting(TypedDict):
    """The daemon stops and begins anew as soon as no execution is under way."""

    restarting: bool


class OfferView(TypedDict):
    """A program that a connected peer runs, offered in the place of this node's."""

    peer: str
    version: str
    artifact_sha256: str


class UpgradeFetch(TypedDict):
    """The progress of a fetch, in bytes; `failure` says why it ended without the artifact.

    `release` is a line of text where the network's owner has signed the artifact, else empty.
    """

    have: int
    size: int
    done: bool
    failure: str
    release: str


class ExecutionView(TypedDict):
    """An execution under way."""

    execution: int
    target: str
    entry: str
    source_peer: str | None
    running_s: float
    remaining_s: float | None


class ExecutionsView(TypedDict):
    """Executions under way, oldest first, and what they wait for."""

    executions: list[ExecutionView]
    waiting: list[Json]


class RoundsAnswer(TypedDict):
    """Rounds that have ended, and how far each `[[invoke]]` entry is.

    `trouble` says why those of before could not be read, or how many had no room.
    """

    rounds: list[dict[str, Any]]
    invoke: list[dict[str, Any]]
    trouble: str


class RoundsStarted(TypedDict):
    """Rounds that begin: number `done_before` + 1 is the first, `run` tells them from others."""

    target: str
    run: int
    done_before: int


class RoundsStopping(TypedDict):
    """Rounds that end after the one that runs; `stopping` is False where none were made."""

    target: str
    stopping: bool


class TraceView(TypedDict):
    """The traced steps of some executions."""

    peer_id: str
    tracing: bool
    executions: list[int]
    running: list[ExecutionView]
    waiting: list[Json]
    steps: list[Json]


class Tracing(TypedDict):
    """`tracing` says if ops are traced now."""

    tracing: bool


class Traced(Tracing):
    """The executions of which something is kept."""

    executions: list[int]


class LogLevel(TypedDict):
    """The least severe level that is logged."""

    level: str


class LogLevelChanged(LogLevel):
    """The new level and the one before."""

    before: str


class ConfigView(TypedDict):
    """The configuration in force, and where each given key came from."""

    file: str | None
    state_dir: str
    config: Json
    origins: dict[str, str]


class Check(TypedDict):
    """A check of the node itself; `ok` false means that somebody should look."""

    check: str
    ok: bool
    detail: str


class ModelView(TypedDict):
    """A slot with a model."""

    slot: str
    type_name: str


class ModelList(TypedDict):
    """The slots with a model."""

    models: list[ModelView]


class TargetView(TypedDict):
    """An installed target; `inputs` are its inputs by name, each with its type, if it has one."""

    target: str
    inputs: dict[str, str | None]


class TargetList(TypedDict):
    """The installed targets."""

    targets: list[TargetView]


class UpgradeView(TypedDict):
    """The states that a node took over of a checkpoint which it could not resume.

    `version` made it; `kept` is its file. `taken` and `left` are slots, `left` with the reason;
    `parameters` has the same of the weights of each slot that tells.
    """

    version: str
    kept: str
    taken: list[str]
    left: dict[str, str]
    parameters: dict[str, Json]


class Status(TypedDict):
    """Everything about the node at one moment."""

    name: str
    peer_id: str
    version: str
    build: str
    pid: int
    phase: str
    uptime_s: float
    artifact_sha256: str
    artifact_targets: list[str]
    targets: list[str]
    listen: list[str]
    health: list[Check]
    peers: list[PeerView]
    guests: int
    wanted: list[WantedView]
    versions: list[VersionView]
    offers: list[OfferView]
    upgrade: UpgradeView | None
    discovery: Json
    routing: Json
    reachability: Json
    data: Json
    invoke: list[Json]
    executions: int
    waiting: list[Json]
    components: list[Json]
    tasks_running: int
    tracing: bool
    counters: dict[str, int]


class NotReadyReason(TypedDict):
    """A reason why the node is not ready, and for how long it has held."""

    what: str
    detail: str
    for_s: float | None


class Readiness(TypedDict):
    """Readiness, with the reasons against it, and what rounds wait for, which is not one."""

    ready: bool
    phase: str
    reasons: list[NotReadyReason]
    waiting: list[Json]


class ProblemBody(TypedDict):
    """A refusal (RFC 9457): `code` is for programs, `detail` for people."""

    schema: str
    type: str
    title: str
    status: int
    code: str
    detail: str
