"""The configuration of a node: every key of `node.toml`, with type, default and unit.

Rule: the models below are the one list of keys. The file stores only what differs from the
defaults, `resolve` (in `sources`) is the only place that decides precedence, and the references
(`reference`) are generated from these descriptions. A value that can be seen to be wrong is
refused when it is read, with the remedy. A limit left out follows its preset.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import multiaddr
import multiaddr.exceptions
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

from bbnode.ir.caps import MAX_DEADLINE_S, MAX_RESERVATION_S, MIN_CIRCUIT_BYTES
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.limits import RelaySettings


def _check_multiaddr(text: Any) -> Any:
    if isinstance(text, str):
        try:
            multiaddr.Multiaddr(text)
        except (ValueError, multiaddr.exceptions.Error) as error:
            raise ValueError(f"{text!r} is not a multiaddr (like /ip4/127.0.0.1/tcp/4001)") from (
                error
            )
    return text


def _check_peer_address(text: Any) -> Any:
    _check_multiaddr(text)
    if isinstance(text, str) and "/p2p/" not in text:
        raise ValueError(f"{text!r} names no peer: it has to end with /p2p/ID (`bbnode id`)")
    return text


def _check_peer(text: Any) -> Any:
    if isinstance(text, str):
        try:
            PeerId.parse(text)
        except DecodeError as error:
            raise ValueError(f"{error}; `bbnode id` prints one") from error
    return text


def _check_module_class(text: Any) -> Any:
    if isinstance(text, str) and not re.fullmatch(
        r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|[^\0:]+\.py(:[A-Za-z_]\w*)?", text
    ):
        raise ValueError(
            f"{text!r} does not name a class as package.module:Class or folder/file.py:Class"
        )
    return text


# Not strict, unlike all other keys, since TOML has no paths.
FilePath = Annotated[Path, Field(strict=False)]
Address = Annotated[
    str, BeforeValidator(_check_multiaddr), Field(json_schema_extra={"format": "multiaddr"})
]
PeerAddress = Annotated[
    str, BeforeValidator(_check_peer_address), Field(json_schema_extra={"format": "multiaddr"})
]
PeerText = Annotated[
    str, BeforeValidator(_check_peer), Field(json_schema_extra={"format": "peer id"})
]
ModuleClass = Annotated[str, BeforeValidator(_check_module_class)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Cap = Annotated[int, Field(ge=1)] | None
PositiveRate = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
# A rate with a default: 0 turns it off.
RateOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]


# The depth of nested lists in one input, as many as a tensor has axes.
_MAX_INPUT_DEPTH = 16


class Section(BaseModel):
    """Base of all tables: unknown keys are errors, values do not change once read."""

    # Strict: "3" is not 3, and true is not 1.
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, strict=True)


def _key(default: Any, description: str, *, unit: str = "", **extra: Any) -> Any:
    """One key of the file; `unit` is what its number counts.

    A list or table default is copied by pydantic for each instance.
    """
    return Field(
        default=default, description=description, json_schema_extra={"unit": unit}, **extra
    )


def _is_numbers(value: Any, depth: int = _MAX_INPUT_DEPTH) -> bool:
    if isinstance(value, list):
        return depth > 0 and all(_is_numbers(item, depth - 1) for item in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_input(value: Any) -> Any:
    plain = isinstance(value, bool | int | float) or value == "trigger"
    numbers = isinstance(value, list) and _is_numbers(value)
    text = isinstance(value, TextInput) or (
        isinstance(value, dict) and value.keys() == {"text"} and isinstance(value["text"], str)
    )
    if not (plain or numbers or text):
        raise ValueError(
            f'{value!r:.80} is not an input: write "trigger", a number, true or false, (nested) '
            'lists of numbers, or { text = "…" }'
        )
    return value


class NodeSection(Section):
    """The node itself: its name, its files, its log."""

    name: str = _key(
        "bbnode",
        "name of the node in logs, status and default paths",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
    )
    state_dir: FilePath | None = _key(
        None,
        "directory of identity, lock and control socket; relative to this file; "
        "unset: $XDG_STATE_HOME/bbnode/<name>, else ~/.local/state/bbnode/<name>; of a file in "
        "/etc/bbnode: /var/lib/bbnode/<name>",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _key(
        "info", "least severe message that is logged"
    )
    log_format: Literal["auto", "text", "color", "json", "journal"] = _key(
        "auto",
        "one line of text, one with colours, one JSON object each, or text with the levels of "
        "systemd's journal; auto: what suits stderr",
    )
    snapshot_every_s: Seconds = _key(
        60.0, "time between snapshots of the node's state; 0: only when it stops", unit="s"
    )
    stop_grace_s: PositiveSeconds = _key(
        5.0, "time a stop may take; what is not done then is left", unit="s", le=3600
    )
    keep_rounds: Annotated[int, Field(ge=1)] = _key(
        10_000, "rounds that are kept on disk, of all targets; the oldest go", unit="rounds"
    )
    components: list[str] = _key(
        [],
        "Python modules imported at start, for the component classes they register; installed, "
        "beside this file or in the current directory",
    )


class ArtifactSection(Section):
    """The program that this node runs: exactly one of `path` and `module`."""

    path: FilePath | None = _key(None, "compiled artifact (.onnx); relative to this file")
    sha256: str | None = _key(
        None,
        "hex digest that the artifact at `path` must have",
        pattern=r"^[0-9a-fA-F]{64}$",
    )
    module: ModuleClass | None = _key(
        None,
        "class to build and compile at start, as package.module:Class, whose module is installed, "
        "beside this file or in the current directory; or as folder/file.py:Class, relative to "
        "this file",
    )
    args: dict[str, Any] = _key({}, "keyword arguments of that class")
    targets: list[str] = _key(
        ..., "targets to install, each as class or class#hash; at least one", min_length=1
    )

    @model_validator(mode="after")
    def _one_source(self) -> ArtifactSection:
        if (self.path is None) == (self.module is None):
            raise ValueError("give exactly one of 'path' (a compiled file) and 'module'")
        if self.sha256 is not None and self.path is None:
            raise ValueError("'sha256' checks the file at 'path'; with 'module' leave it out")
        if self.args and self.module is None:
            raise ValueError("'args' are the arguments of 'module'; with 'path' leave them out")
        return self


class FormerArtifact(Section):
    """The program before the last upgrade, to which `bbnode upgrade --back` goes back."""

    path: FilePath = _key(..., "its compiled artifact; relative to this file")
    sha256: str = _key(..., "its hex digest", pattern=r"^[0-9a-fA-F]{64}$")
    targets: list[str] = _key(..., "its targets, as in artifact.targets", min_length=1)


class UpgradeSection(Section):
    """Programs that peers offer in the place of the one that this node runs."""

    auto: bool = _key(
        False,
        "take what the owner of this node's private network has signed (`bbnode network sign`) "
        "without asking, between two rounds",
    )
    previous: FormerArtifact | None = _key(
        None, "the program before the last upgrade; written by `bbnode upgrade`"
    )


class NetworkSection(Section):
    """The addresses that this node listens on, and the peers that it dials."""

    transport: str = _key(
        "libp2p",
        "what carries the envelopes: libp2p, lean (the same without py-libp2p and its services), "
        "memory (nodes of one process), or the name of a transport that an installed package "
        "brings",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
    )
    settings: dict[str, Any] = _key({}, "settings of the transport; its package says which")
    listen: list[Address] = _key(
        ["/ip4/127.0.0.1/tcp/0"],
        "addresses to listen on; port 0 takes a free one; none at all: it only dials; this default "
        "is of the transports libp2p and lean alone",
    )
    announce: list[Address] = _key(
        [], "addresses told to peers instead of those listened on (behind a NAT or 0.0.0.0)"
    )
    bootstrap: list[PeerAddress] = _key(
        [], "peers to stay connected with, each as /ip4/…/tcp/…/p2p/ID"
    )
    guests: bool | None = _key(
        None,
        "let hosts of libp2p stay connected that speak no protocol of bbnode, in places of their "
        "own, for ping, identify and libp2p's services; unset: yes, but not in a private network",
    )


class DiscoverySection(Section):
    """Finding peers, beside those that find this node."""

    min_peers: Count | None = _key(
        None,
        "bootstrap peers that are enough: the others are left alone while so many are connected, "
        "and tried when one goes; unset: all of them",
    )
    learn: bool = _key(
        True,
        "dial peers that the program sends to, or whose connection was lost, for a minute each, at "
        "the addresses that registries or the peers themselves gave",
    )
    introductions: bool = _key(
        True,
        "ask bootstrap peers for the peers that the program has this node talk with, and tell "
        "those that ask; each at addresses that this node would dial itself",
    )
    mdns: bool = _key(
        False,
        "announce this node on the local network, and dial nodes there that run the same program, "
        "in any version",
    )
    mdns_interfaces: list[str] = _key(
        [], "IP addresses of the interfaces for mDNS; none: all of them"
    )


class RoutingSection(Section):
    """Finding peers, and who has a program, by asking others: a DHT (docs/discovery.md)."""

    dht: Literal["off", "client", "server"] = _key(
        "off",
        "client: ask others; server: ask, and answer them; a private network has a DHT of its own, "
        'an open node is in libp2p\'s; needs network.transport = "libp2p"',
    )
    provide: bool = _key(
        True,
        "tell the DHT that this node has its program, by the digest of the artifact, where it "
        "answers others",
    )
    reachability: bool = _key(
        True,
        "ask up to three connected peers now and then to dial this node back, and show in status "
        "whether they can; a node that listens on this machine alone, or nowhere, asks nobody",
    )


class TopicsSection(Section):
    """Topics: messages for whoever follows a topic, passed on from peer to peer (GossipSub)."""

    enabled: bool = _key(
        True,
        "carry topics where the transport can: for programs that use some, and for a private "
        "network's revocation lists, which go from peer to peer otherwise",
    )


_RELAY = RelaySettings()
# The fields of a relay's answers have 32 bits for seconds and 64 bits for bytes.
RelayDuration = Annotated[int, Field(ge=1, le=2**32 - 1)]
RelayBytes = Annotated[int, Field(ge=MIN_CIRCUIT_BYTES, le=2**63 - 1)]
Reservation = Annotated[int, Field(ge=1, le=MAX_RESERVATION_S)]
# A node has 1,024 connections at most, and each circuit takes two streams.
Circuits = Annotated[int, Field(ge=1, le=1024)]


class RelaySection(Section):
    """Relaying for other peers, and being reached through relays."""

    serve: bool = _key(
        _RELAY.serve, "relay for peers that may connect with this node and that nobody can dial"
    )
    use: bool = _key(
        True,
        "dial through relays; and while this node has no public address, be reached through relays "
        "among the peers that it dials",
    )
    through: list[PeerAddress] = _key(
        [],
        "relays of libp2p that speak no protocol of bbnode, each as /ip4/…/tcp/…/p2p/ID, through "
        "which this node is reached while it has no public address; relays of bbnode are bootstrap "
        "peers instead",
    )
    reservations: Circuits = _key(
        _RELAY.reservations, "peers that may be reached through this node", unit="peers"
    )
    reservation_s: Reservation = _key(
        _RELAY.reservation_s, "time after which they have to ask again", unit="s"
    )
    circuits: Circuits = _key(
        _RELAY.circuits, "circuits through this node at a time", unit="circuits"
    )
    circuits_per_peer: Circuits = _key(
        _RELAY.circuits_per_peer,
        "of those, with one peer as an end; of a node that uses relays, through each of them",
        unit="circuits",
    )
    circuit_s: RelayDuration = _key(
        _RELAY.circuit_s,
        "time after which a circuit is cut; whoever dialled it takes another before that",
        unit="s",
    )
    circuit_bytes: RelayBytes = _key(
        _RELAY.circuit_bytes,
        "bytes of both directions after which a circuit is cut, likewise",
        unit="bytes",
    )

    def settings(self) -> RelaySettings:
        """Return the same for a transport."""
        given = self.model_dump()
        return RelaySettings(**given | {"through": tuple(map(multiaddr.Multiaddr, self.through))})


class AccessSection(Section):
    """Access to this node; rates are per peer, for what comes in from it."""

    network: PeerText | None = _key(
        None,
        "id of the private network this node belongs to; without a valid membership of it the node "
        "does not start; unset: the network of the membership in the state directory, or open to "
        "all",
    )
    allow: list[PeerText] = _key(
        [], "ids of the only peers that may connect; none: everybody who is not blocked"
    )
    block: list[PeerText] = _key(
        [],
        "ids of peers that may not connect; `bbnode peers block` adds others and stores them",
    )
    messages_per_s: RateOrZero = _key(
        2000.0,
        "sustained rate of envelopes; what exceeds it waits at the peer; 0: no limit",
        unit="1/s",
    )
    message_burst: PositiveRate = _key(
        None, "envelopes at once; unset: as many as in one second", unit="envelopes"
    )
    bytes_per_s: PositiveRate = _key(
        None,
        "sustained rate of bytes in envelopes; what exceeds it waits at the peer; unset: no limit",
        unit="bytes/s",
    )
    byte_burst: PositiveRate = _key(
        None, "bytes of envelopes at once; unset: as many as in one second", unit="bytes"
    )

    @model_validator(mode="after")
    def _burst_of_a_rate(self) -> AccessSection:
        for burst, rate in (("message_burst", "messages_per_s"), ("byte_burst", "bytes_per_s")):
            if getattr(self, burst) is not None and not getattr(self, rate):
                raise ValueError(f"'{burst}' belongs to a rate: give '{rate}' as well")
        return self


class TextInput(Section):
    """An input that is text: `{ text = "…" }`, so that no text is taken for "trigger"."""

    text: str = _key(..., "the text")


InputValue = Annotated[
    Literal["trigger"] | bool | int | float | list[Any] | TextInput,
    BeforeValidator(_check_input),
]


class WaitFor(Section):
    """Peers that have to be connected before the first round starts."""

    peer_class: str = _key(..., "class of peer to wait for", alias="class")
    peers: Count = _key(..., "peers of that class that make the start immediate")
    timeout_s: Seconds = _key(20.0, "how long to wait for all of them", unit="s")
    min_peers: Count | None = _key(
        None, "peers that are enough once timeout_s is over; unset: all of `peers`"
    )
    on_timeout: Literal["wait", "fail"] = _key(
        "wait", "with fewer than min_peers after timeout_s: wait on, or fail and stop the node"
    )
    also: dict[str, Count] = _key(
        {},
        "other classes of peer with the peers of each that the first round waits for as well, "
        "timeout_s at most",
    )

    @model_validator(mode="after")
    def _minimum_is_not_more(self) -> WaitFor:
        if self.min_peers is not None and self.min_peers > self.peers:
            raise ValueError(f"min_peers ({self.min_peers}) is more than peers ({self.peers})")
        return self

    @property
    def enough_peers(self) -> int:
        """Peers that are enough once the time is over."""
        return self.peers if self.min_peers is None else self.min_peers


class InvokeSection(Section):
    """One target that this node starts by itself, round after round."""

    target: str = _key(..., "target to invoke, as class or class#hash")
    inputs: dict[str, InputValue] = _key(
        {},
        'its inputs: "trigger", a number, true/false, (nested) lists of numbers, or { text = "…" }',
    )
    times: Count = _key(1, "how many rounds; 0: for ever", unit="rounds")
    every_s: Seconds = _key(
        0.0, "time from start to start; 0: the next starts when the last one ended", unit="s"
    )
    deadline_s: Seconds = _key(
        0.0,
        "time of one round, with all that it asks of peers; after it the round fails; 0: as the "
        "program says, else limits.wait_s",
        unit="s",
        le=MAX_DEADLINE_S,
    )
    wait_for: WaitFor | None = _key(None, "start condition; unset: start at once")
    best: str | None = _key(
        None,
        'metric by which the best round is found, as "accuracy" or "stats.loss" (entry loss of '
        "the Metadata output stats): the node's state after it is kept (`bbnode export --best`)",
        min_length=1,
    )
    mode: Literal["max", "min"] | None = _key(
        None, "which values of it are better; unset: the least of losses and errors, else the most"
    )
    min_delta: Seconds = _key(0.0, "by how much more a round has to be better")
    patience: Count = _key(
        0, "rounds without a better one after which the rounds end; 0: never", unit="rounds"
    )
    until: FiniteFloat | None = _key(
        None, "value of it that ends the rounds, once one is as good: 0.95 of an accuracy"
    )

    @model_validator(mode="after")
    def _better_in_what(self) -> InvokeSection:
        judges = self.mode or self.min_delta or self.patience or self.until is not None
        if self.best is None and judges:
            raise ValueError(
                "'mode', 'min_delta', 'patience' and 'until' belong to a metric: give 'best'"
            )
        return self


class TrackerSection(Section):
    """One tracker of experiments, which gets the metrics of all rounds."""

    kind: str = _key(
        ...,
        "tensorboard, mlflow, wandb, or the name of a tracker that an installed package brings",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
    )
    settings: dict[str, Any] = _key(
        {},
        "its settings: logdir (tensorboard), uri and experiment (mlflow), mode, project, entity "
        "and dir (wandb)",
    )


class ControlSection(Section):
    """Access to the control plane; its unix socket is always there."""

    group: str | None = _key(
        None, "group that may use the control socket as well (mode 0660); unset: the owner alone"
    )
    tcp: str | None = _key(
        None,
        'loopback address to listen on as well, as "127.0.0.1:PORT"; asks for the token',
    )
    metrics: str | None = _key(
        None,
        'address of any interface, as "0.0.0.0:PORT", that answers GET /metrics, /healthz and '
        "/readyz and nothing else; asks for the token unless it is loopback",
    )
    hosts: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,252})$")]] = _key(
        [],
        "names in the Host of a request on TCP that mean this node, beside IP addresses and "
        "localhost: a web page has no other way in",
    )
    token_file: FilePath | None = _key(
        None,
        "file with the token, mode 0600; relative to this file; unset: "
        "<state_dir>/control.token, made at the first start that needs it",
    )


class LimitsSection(Section):
    """Caps on what comes in and on what may be under way; beyond each is a typed failure."""

    preset: Literal["default", "edge"] = _key("default", "which defaults the keys below have")
    bus_events: Cap = _key(None, "events of the bus that wait; the oldest goes", unit="events")
    ingress_events: Cap = _key(
        None, "events that wait to enter; unset: four times bus_events", unit="events"
    )
    ingress_bytes: Cap = _key(None, "payload that waits or lives in executions", unit="bytes")
    app_event_bytes: Cap = _key(None, "size of one app event", unit="bytes")
    invoke_inputs: Cap = _key(None, "inputs of one invoke", unit="inputs")
    invoke_bytes: Cap = _key(None, "size of the inputs of one invoke", unit="bytes")
    completion_bytes: Cap = _key(None, "size of one completion's result", unit="bytes")
    failure_detail_bytes: Cap = _key(None, "text of a failure, cut beyond", unit="bytes")
    envelope_bytes: Cap = _key(
        None,
        "size of one whole envelope, a tensor in it included; over 64 KiB it travels in chunks, "
        "and room for it (of ingress_bytes as well) is taken before its memory",
        unit="bytes",
    )
    envelope_fills: Cap = _key(None, "fills of one envelope", unit="fills")
    sender_addresses: Cap = _key(None, "addresses a sender may claim", unit="addresses")
    sender_address_bytes: Cap = _key(None, "size of one claimed address", unit="bytes")
    cycle_ops: Cap = _key(None, "ops of one poll cycle", unit="ops")
    pending_async: Cap = _key(None, "ops that wait for a completion", unit="ops")
    frames: Cap = _key(None, "executions under way", unit="executions")
    frames_per_peer: Cap = _key(
        None,
        "the same, of those that one peer's messages started; more messages are refused",
        unit="executions",
    )
    outbound: Cap = _key(None, "envelopes that wait to be sent", unit="envelopes")
    lost_peer_grace_ms: Cap = _key(
        None,
        "how long a request waits for a peer whose connection was lost; then it counts as missing",
        unit="ms",
    )
    wait_s: Annotated[int, Field(ge=1, le=MAX_DEADLINE_S)] | None = _key(
        None,
        "time of what waits where neither the program (deadline=, until=) nor the call "
        "(invoke.deadline_s) says one: an op, each hop of a send or request, a join, a bootstrap "
        "for its turn",
        unit="s",
    )

    def effective(self) -> dict[str, int | None]:
        """Return every cap with its preset filled in; None is unbounded."""
        # Imported late: importing the engine takes longer than reading a configuration.
        from bbnode.engine import Limits

        preset = dataclasses.asdict(Limits.edge() if self.preset == "edge" else Limits())
        own = {name: getattr(self, name) for name in preset}
        caps = preset | {name: value for name, value in own.items() if value is not None}
        if self.ingress_events is None and caps["bus_events"] is not None:
            caps["ingress_events"] = 4 * caps["bus_events"]
        return caps


class NodeConfig(Section):
    """Everything that `node.toml` can say."""

    node: NodeSection = _key(NodeSection(), "its name, its files, its log")
    artifact: ArtifactSection = _key(..., "the program that it runs")
    upgrade: UpgradeSection = _key(
        UpgradeSection(), "programs that peers offer in the place of that one"
    )
    network: NetworkSection = _key(
        NetworkSection(), "the addresses that it listens on, and the peers that it dials"
    )
    discovery: DiscoverySection = _key(DiscoverySection(), "finding peers")
    routing: RoutingSection = _key(RoutingSection(), "finding them by asking others")
    topics: TopicsSection = _key(TopicsSection(), "messages that peers pass on to each other")
    relay: RelaySection = _key(
        RelaySection(), "relaying for other peers, and being reached through relays"
    )
    access: AccessSection = _key(AccessSection(), "access to this node")
    slots: dict[str, dict[str, Any]] = _key(
        {},
        "settings of the component bound to the slot NAME; its Config class says "
        "which there are, and checks them at install",
    )
    invoke: list[InvokeSection] = _key([], "[[invoke]]: targets that this node starts by itself")
    trackers: list[TrackerSection] = _key(
        [], "[[trackers]]: where metrics of rounds go besides the node's own history"
    )
    control: ControlSection = _key(ControlSection(), "access to the control plane")
    limits: LimitsSection = _key(LimitsSection(), "caps on what comes in and is under way")


def overrides(config: NodeConfig) -> dict[str, Any]:
    """Return the file's content for this configuration: the values that are no defaults."""
    return config.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def tables(
    model: type[Section] = NodeConfig, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[Section]]]:
    """Yield path and model of every table, depth first, in the order of the models.

    The items of a list of tables show as `name[]` in the path.
    """
    yield path, model
    for name, field in model.model_fields.items():
        table = table_of(field.annotation)
        if table is not None:
            mark = "[]" if getattr(field.annotation, "__origin__", None) is list else ""
            yield from tables(table, (*path, f"{field.alias or name}{mark}"))


def keys() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and pydantic field of every key; a free table such as `slots` is one key."""
    # Free tables, which are keys beside the sections, come last.
    for path, model in sorted(tables(), key=lambda table: not table[0]):
        for name, field in model.model_fields.items():
            if table_of(field.annotation) is None:
                yield (*path, field.alias or name), field


def table_of(annotation: Any) -> type[Section] | None:
    """Return the section that an annotation holds: itself, optional, or as a list of tables."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    arguments = [a for a in getattr(annotation, "__args__", ()) if a is not type(None)]
    return table_of(arguments[0]) if len(arguments) == 1 else None
