"""The configuration of a node: every key of `node.toml`, with default and unit.

Rule: the models below are the one list of keys. The file stores only what differs from the
defaults, `resolve` (in `config_sources`) is the only place that decides precedence, and the
reference that `bbnode init --reference` prints is generated from these descriptions.

Byte counts, event counts and their reasons come from the design's table of caps; a limit
left out follows the preset.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, model_validator

from bbnode.daemon.config.values import (
    Address,
    Cap,
    Count,
    FilePath,
    ModuleClass,
    PeerAddress,
    PeerText,
    PositiveSeconds,
    Rate,
    RateOrZero,
    Seconds,
    Section,
)
from bbnode.daemon.config.values import key as _key
from bbnode.daemon.config_relay import RelaySection

KIB = 1024
MIB = 1024 * KIB

# Defaults of the caps: (normal machine, edge device). None means unbounded.
LIMIT_PRESETS: dict[str, dict[str, int | None]] = {
    "default": {
        "bus_events": 1024,
        "ingress_events": 4 * 1024,
        "ingress_bytes": 256 * MIB,
        "app_event_bytes": 1 * MIB,
        "invoke_inputs": 100,
        "invoke_bytes": 10 * MIB,
        "completion_bytes": 4 * MIB,
        "failure_detail_bytes": 4 * KIB,
        "envelope_bytes": 256 * MIB,
        "envelope_fills": 64,
        "sender_addresses": 8,
        "sender_address_bytes": 256,
        "cycle_ops": None,
        "pending_async": None,
        "frames": None,
        "frames_per_peer": 4 * 1024,
        "outbound": None,
    },
    "edge": {
        "ingress_bytes": 8 * MIB,
        "app_event_bytes": 64 * KIB,
        "invoke_inputs": 16,
        "invoke_bytes": 256 * KIB,
        "completion_bytes": 64 * KIB,
        "envelope_bytes": 256 * KIB,
        "frames_per_peer": 256,
    },
}


def _check_input(value: Any) -> Any:
    plain = isinstance(value, bool | int | float) or value == "trigger"
    numbers = isinstance(value, list) and all(
        isinstance(item, int | float) and not isinstance(item, bool) for item in value
    )
    text = isinstance(value, TextInput) or (
        isinstance(value, dict) and value.keys() == {"text"} and isinstance(value["text"], str)
    )
    if not (plain or numbers or text):
        raise ValueError(
            f'{value!r} is not an input: write "trigger", a number, true or false, a list of '
            'numbers, or { text = "…" }'
        )
    return value


class NodeSection(Section):
    """Who this node is and what it says."""

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
    components: list[str] = _key(
        [], "Python modules imported at start, for the component classes they register"
    )


class ArtifactSection(Section):
    """What this node runs: exactly one of `path` and `module`."""

    path: FilePath | None = _key(None, "compiled artifact (.onnx); relative to this file")
    sha256: str | None = _key(
        None,
        "hex digest that the artifact at `path` must have",
        pattern=r"^[0-9a-fA-F]{64}$",
    )
    module: ModuleClass | None = _key(
        None, "class to build and compile at start, as package.module:Class"
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


class NetworkSection(Section):
    """Where this node listens and whom it dials."""

    listen: list[Address] = _key(
        ["/ip4/127.0.0.1/tcp/0"],
        "addresses to listen on; port 0 takes a free one; none at all: it only dials",
    )
    announce: list[Address] = _key(
        [], "addresses told to peers instead of those listened on (behind a NAT or 0.0.0.0)"
    )
    bootstrap: list[PeerAddress] = _key(
        [], "peers to stay connected with, each as /ip4/…/tcp/…/p2p/ID"
    )


class DiscoverySection(Section):
    """How this node finds peers beside those that find it."""

    min_peers: Count | None = _key(
        None,
        "bootstrap peers that are enough: the others are left alone while so many are connected, "
        "and tried when one goes; unset: all of them",
    )
    learn: bool = _key(
        True,
        "dial peers that the program sends to, or that were lost, where they are said to be "
        "(by registries and by themselves), for a minute each",
    )
    mdns: bool = _key(
        False, "announce this node on the local network and dial those that run the same there"
    )
    mdns_interfaces: list[str] = _key(
        [], "IP addresses of the interfaces to do that on; none: all of them"
    )


class AccessSection(Section):
    """Who may talk to this node; rates are of each peer, for what comes in from it."""

    network: PeerText | None = _key(
        None,
        "id of the private network this node belongs to; without a membership of it that is good "
        "now, the node does not start; unset: that of the membership in the state directory, or "
        "open to all",
    )
    allow: list[PeerText] = _key(
        [], "ids of the only peers that may connect; none: everybody who is not blocked"
    )
    block: list[PeerText] = _key(
        [], "ids of peers that may not; `bbnode peers block` adds others and keeps them by itself"
    )
    messages_per_s: RateOrZero = _key(
        2000.0, "envelopes in the long run; what is over waits at the peer; 0: no limit", unit="1/s"
    )
    message_burst: Rate = _key(
        None, "envelopes at once; unset: those of one second", unit="envelopes"
    )
    bytes_per_s: Rate = _key(
        None,
        "bytes of envelopes in the long run; what is over waits at the peer; unset: no limit",
        unit="bytes/s",
    )
    byte_burst: Rate = _key(
        None, "bytes of envelopes at once; unset: those of one second", unit="bytes"
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
    Literal["trigger"] | bool | int | float | list[int] | list[float] | TextInput,
    BeforeValidator(_check_input),
]


class WaitFor(Section):
    """What has to be there before the first round starts."""

    peer_class: str = _key(..., "class of peer to wait for", alias="class")
    peers: Count = _key(..., "peers of that class that make the start immediate")
    timeout_s: Seconds = _key(20.0, "how long to wait for all of them", unit="s")
    min_peers: Count | None = _key(
        None, "peers that are enough once timeout_s is over; unset: all of `peers`"
    )
    on_timeout: Literal["wait", "fail"] = _key(
        "wait", "with fewer than min_peers after timeout_s: wait on, or fail and stop the node"
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
        'its inputs: "trigger", a number, true/false, a list of numbers, or { text = "…" }',
    )
    times: Count = _key(1, "how many rounds; 0: for ever", unit="rounds")
    every_s: Seconds = _key(
        0.0, "time from start to start; 0: the next starts when the last one ended", unit="s"
    )
    wait_for: WaitFor | None = _key(None, "start condition; unset: start at once")


class ControlSection(Section):
    """Who may ask this node, and where: its unix socket is always there."""

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

    def effective(self) -> dict[str, int | None]:
        """Every cap with its preset filled in; None is unbounded."""
        caps = {**LIMIT_PRESETS["default"], **LIMIT_PRESETS[self.preset]}
        given = {name: getattr(self, name) for name in caps}
        caps |= {name: value for name, value in given.items() if value is not None}
        if self.ingress_events is None and caps["bus_events"] is not None:
            caps["ingress_events"] = 4 * caps["bus_events"]
        return caps


class NodeConfig(Section):
    """Everything that `node.toml` can say."""

    node: NodeSection = _key(NodeSection(), "who this node is and what it says")
    artifact: ArtifactSection = _key(..., "what this node runs")
    network: NetworkSection = _key(NetworkSection(), "where it listens and whom it dials")
    discovery: DiscoverySection = _key(DiscoverySection(), "how it finds peers")
    relay: RelaySection = _key(
        RelaySection(), "whether it relays for others, and is reached through relays itself"
    )
    access: AccessSection = _key(AccessSection(), "who may talk to it")
    slots: dict[str, dict[str, Any]] = _key(
        {},
        "settings of the component bound to the slot NAME; its Config class says "
        "which there are, and checks them at install",
    )
    invoke: list[InvokeSection] = _key([], "[[invoke]]: targets that this node starts by itself")
    control: ControlSection = _key(ControlSection(), "who may ask this node, and where")
    limits: LimitsSection = _key(LimitsSection(), "caps on what comes in and is under way")


def overrides(config: NodeConfig) -> dict[str, Any]:
    """What a file has to say to give this configuration: only what differs from the defaults."""
    return config.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def keys(
    model: type[BaseModel] = NodeConfig, prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and pydantic field of every key, depth first, in the order of the models.

    A list of tables shows as `name[]` in the path, a free table as a leaf.
    """
    for name, field in model.model_fields.items():
        path = (*prefix, field.alias or name)
        table = table_of(field.annotation)
        if table is None:
            yield path, field
        elif _is_list(field.annotation):
            yield from keys(table, (*prefix, f"{path[-1]}[]"))
        else:
            yield from keys(table, path)


def table_of(annotation: Any) -> type[Section] | None:
    """The section that an annotation holds: itself, optional, or as a list of tables."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    arguments = [a for a in getattr(annotation, "__args__", ()) if a is not type(None)]
    if len(arguments) == 1:
        return table_of(arguments[0])
    return None


def _is_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is list
