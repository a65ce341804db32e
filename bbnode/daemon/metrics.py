"""Metrics of a daemon in the text format of Prometheus.

Rule: names say what is counted and in which unit; a label has a bounded set of values. What the
layers count under a dotted name shows as `bbnode_<name>_total`, or without `_total` where it is
a gauge; the few names with labels of their own stand in the tables below.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from collections.abc import Iterable, Iterator

import trio
from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from bbnode import __version__
from bbnode.access.decision import Reason
from bbnode.daemon.control import views
from bbnode.daemon.control.host import Host
from bbnode.daemon.watch import THINGS
from bbnode.engine.cohorts import ResponseStatus
from bbnode.engine.ops.gates import REASON_DUPLICATE
from bbnode.engine.peers.governor import BlockReason
from bbnode.engine.steps import RECEIVE_FAILURES
from bbnode.ir.caps import MAX_PEER_SERIES
from bbnode.transport.backend import Direction, TransportMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """A counter with one label. Its known values are there from the start, at 0: a series that
    begins with its first event has no rate then, and an alert would miss it.
    """

    metric: str
    label: str
    text: str
    values: tuple[str, ...]


# Counters whose dotted name ends in a value, by the prefix before it.
LABELLED: dict[str, Labelled] = {
    "gate.denied.": Labelled(
        metric="gate_denials",
        label="reason",
        text="executions stopped by a gate",
        values=(REASON_DUPLICATE, *(reason.value for reason in BlockReason)),
    ),
    "receive.failed.": Labelled(
        metric="receive_failures",
        label="kind",
        text="fills and envelopes that were refused",
        values=tuple(RECEIVE_FAILURES),
    ),
    "response.": Labelled(
        metric="responses",
        label="verdict",
        text="answers to requests, by what became of them",
        # What was waited for is not counted.
        values=tuple(
            v.value
            for v in ResponseStatus
            if v not in (ResponseStatus.ACCEPTED, ResponseStatus.COMPLETE)
        ),
    ),
}
DENIAL_REASONS = tuple(reason.value for reason in Reason if reason is not Reason.ALLOWED)

# What can go down again; everything else that is counted only grows.
GAUGES: dict[str, str] = {
    "bus.waiting": "events of the bus that wait",
    "ingress.bytes": "payload bytes that wait or live in executions",
    "executions.live": "executions under way",
    "ops.parked": "ops that wait for something",
    "requests.open": "requests whose answers are waited for",
    "timers": "timers set",
    "timers.components": "timers that components have set",
    "calls.open": "calls of components that wait for an answer",
    "records": "values that programs recorded and that are kept",
    "round_trips": "edges whose round trip is known",
    "peers.connected": "peers the engine can use",
    "peers.known": "peers in the address book",
    "queues.values": "values in queues of programs",
    "holds.values": "values held for a flush",
    "semaphores.taken": "units of semaphores in use",
    "control.connections": "clients of the control plane",
    "control.subscribers": "clients that follow events or logs",
}


class NodeCollector(Collector):
    """Reads a `Host` whenever somebody scrapes."""

    def __init__(self, host: Host) -> None:
        """Nothing is kept between scrapes."""
        self._host = host

    def collect(self) -> Iterator[Metric]:
        """All metrics of the node."""
        host = self._host
        yield _info(host)
        yield GaugeMetricFamily(
            "bbnode_ready",
            "1 when the node does its work",
            value=float(views.readiness(host)["ready"]),
        )
        yield _stalled(host)
        yield GaugeMetricFamily(
            "bbnode_uptime_seconds",
            "time since the start",
            value=trio.current_time() - host.started_s,
        )
        yield GaugeMetricFamily(
            "bbnode_tasks_running", "ops in worker threads", value=float(host.driver.tasks_running)
        )
        if host.saved_s is not None:
            yield GaugeMetricFamily(
                "bbnode_snapshot_age_seconds",
                "time since the last snapshot of this run",
                value=trio.current_time() - host.saved_s,
            )
        yield GaugeMetricFamily(
            "bbnode_clock_seconds",
            "what the clock of this machine says, since 1970",
            value=time.time(),
        )
        yield from _disk_metrics(host)
        yield from _transport_metrics(host.backend.metrics())
        yield from _peer_metrics(host)
        yield from _round_metrics(host)
        yield from counter_metrics(host.all_counters())


def render(host: Host) -> bytes:
    """The whole page: the node's own metrics, and those of its process and Python."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(host))
    # These collectors register themselves with what they are given.
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return generate_latest(registry)


def counter_metrics(counters: dict[str, int]) -> Iterator[Metric]:
    """Counters and gauges by dotted name, as metrics in the order of their names."""
    labelled = {prefix: dict.fromkeys(each.values, 0) for prefix, each in LABELLED.items()}
    plain: dict[str, Metric] = {}
    for name, value in sorted(counters.items()):
        prefix = next((p for p in LABELLED if name.startswith(p)), None)
        if prefix is not None:
            labelled[prefix][name.removeprefix(prefix)] = value
            continue
        exposed = f"bbnode_{_identifier(name)}"
        if name in GAUGES:
            plain[exposed] = GaugeMetricFamily(exposed, GAUGES[name], value=float(value))
        else:
            plain[exposed] = CounterMetricFamily(exposed, f"{name} so far", value=float(value))
    for prefix, counts in labelled.items():
        each = LABELLED[prefix]
        family = CounterMetricFamily(f"bbnode_{each.metric}", each.text, labels=[each.label])
        for label, count in counts.items():
            family.add_metric([label], float(count))
        yield family
    yield from plain.values()


def _disk_metrics(host: Host) -> Iterator[Metric]:
    """Room where the node keeps its state; nothing where the file system does not answer."""
    try:
        usage = shutil.disk_usage(host.resolved.state_dir)
    except OSError:
        return
    for name, text, value in (
        ("free", "bytes that the node may still write where its state is", usage.free),
        ("size", "bytes of the file system where the node's state is", usage.total),
    ):
        yield GaugeMetricFamily(f"bbnode_state_dir_{name}_bytes", text, value=float(value))


def _transport_metrics(measured: TransportMetrics) -> Iterator[Metric]:
    """The gauges of the transport by their fields' names, and what its authorizer denied."""
    for field in dataclasses.fields(measured):
        value = getattr(measured, field.name)
        if isinstance(value, int):
            text = f"{field.name.replace('_', ' ')} now"
            yield GaugeMetricFamily(f"bbnode_transport_{field.name}", text, value=float(value))
    denied = CounterMetricFamily(
        "bbnode_access_denials", "what peers were not allowed", labels=["reason"]
    )
    for reason, count in (dict.fromkeys(DENIAL_REASONS, 0) | dict(measured.denied)).items():
        denied.add_metric([reason], float(count))
    yield denied


def _peer_metrics(host: Host) -> Iterable[Metric]:
    received = CounterMetricFamily(
        "bbnode_peer_received_bytes", "bytes from a connected peer", labels=["peer"]
    )
    sent = CounterMetricFamily(
        "bbnode_peer_sent_bytes", "bytes to a connected peer", labels=["peer"]
    )
    queued = GaugeMetricFamily(
        "bbnode_peer_queued_bytes", "bytes that wait to be sent", labels=["peer"]
    )
    rtt = GaugeMetricFamily(
        "bbnode_peer_round_trip_seconds", "the last ping of a peer", labels=["peer"]
    )
    peers = sorted(host.backend.peers(), key=lambda p: p.bytes_in + p.bytes_out, reverse=True)
    for p in peers[:MAX_PEER_SERIES]:
        label = [str(p.peer)]
        received.add_metric(label, float(p.bytes_in))
        sent.add_metric(label, float(p.bytes_out))
        queued.add_metric(label, float(p.queued_bytes))
        if p.rtt_s is not None:
            rtt.add_metric(label, p.rtt_s)
    others = peers[MAX_PEER_SERIES:]
    if others:
        received.add_metric(["other"], float(sum(p.bytes_in for p in others)))
        sent.add_metric(["other"], float(sum(p.bytes_out for p in others)))
        queued.add_metric(["other"], float(sum(p.queued_bytes for p in others)))
    by_direction = GaugeMetricFamily(
        "bbnode_peer_connections", "peers connected now", labels=["direction"]
    )
    for direction in Direction:
        count = sum(p.direction is direction for p in peers)
        by_direction.add_metric([direction.value], float(count))
    return (received, sent, queued, rtt, by_direction)


def _round_metrics(host: Host) -> Iterable[Metric]:
    """How many rounds the node made by itself, and what its last one was like, by target."""
    done = CounterMetricFamily(
        "bbnode_rounds", "rounds that ended, over restarts of the node", labels=["target"]
    )
    last = {
        name: GaugeMetricFamily(f"bbnode_last_round_{name}", text, labels=["target"])
        for name, text in (
            ("ok", "1 when the last round reached its end"),
            ("seconds", "duration of the last round"),
            ("bytes", "bytes that were moved during the last round"),
            ("responded", "peers whose answers the last round used"),
            ("missing", "peers that the last round asked in vain"),
        )
    }
    outputs = GaugeMetricFamily(
        "bbnode_last_round_output",
        "outputs of the last round that are single numbers",
        labels=["target", "name"],
    )
    period = GaugeMetricFamily(
        "bbnode_round_period_seconds",
        "time from round to round that is asked for",
        labels=["target"],
    )
    age = GaugeMetricFamily(
        "bbnode_round_age_seconds",
        "time since a round ended or, before the first, since the start, while more are to come",
        labels=["target"],
    )
    for rounds in host.rounds:
        target = rounds.as_json()["target"]
        if rounds.age_s is not None:
            period.add_metric([target], rounds.period_s)
            age.add_metric([target], rounds.age_s)
        done.add_metric([target], float(rounds.as_json()["done"]))
        ended = rounds.finished()
        if not ended:
            continue
        for name, family in last.items():
            found = ended[-1][name]
            family.add_metric([target], float(len(found) if isinstance(found, list) else found))
        for name, value in ended[-1]["outputs"].items():
            if isinstance(value, int | float):
                outputs.add_metric([target, name], float(value))
    return (done, period, age, *last.values(), outputs)


def _stalled(host: Host) -> Metric:
    family = GaugeMetricFamily(
        "bbnode_stalled", "1 for what has not gone on for longer than it may", labels=["what"]
    )
    found = {each.what for each in host.stalled()}
    for thing in THINGS:
        family.add_metric([thing.what], float(thing.what in found))
    return family


def _info(host: Host) -> Metric:
    info = GaugeMetricFamily(
        "bbnode_info", "who this is; always 1", labels=["version", "name", "peer_id"]
    )
    name = host.resolved.config.node.name
    info.add_metric([__version__, name, str(host.node.peer_id)], 1.0)
    return info


def _identifier(name: str) -> str:
    """A dotted name as a metric's: `outbound.bytes` is `outbound_bytes`."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return re.sub(r"[^a-zA-Z0-9]+", "_", spaced).strip("_").lower()
