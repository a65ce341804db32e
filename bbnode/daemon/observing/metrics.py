"""Metrics of a daemon in the text format of Prometheus.

Rule: names have the counted thing and its unit; a label has a bounded set of values. A counter of a
layer with a dotted name is shown as `bbnode_<name>_total`, or without `_total` if it is a gauge;
the few names with labels of their own are in the tables below.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence

import trio
from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from bbnode import __version__
from bbnode.access.decision import Reason
from bbnode.daemon.build import build_id
from bbnode.daemon.control import views
from bbnode.daemon.control.host import Host
from bbnode.daemon.network.versions import other_versions
from bbnode.daemon.observing.watch import LIVENESS_CHECKS
from bbnode.engine.cohorts import ResponseStatus
from bbnode.engine.errors import REASON_DUPLICATE
from bbnode.engine.peers.governor import BlockReason
from bbnode.engine.steps import RECEIVE_FAILURES
from bbnode.ir.caps import MAX_PEER_SERIES
from bbnode.transport.base import Direction, TransportMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """A counter with one label.

    Its known values exist from the start, at 0: a series that begins with its first event has no
    rate at that moment, and an alert would miss it.
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
        # Expected answers are not counted.
        values=tuple(
            v.value
            for v in ResponseStatus
            if v not in (ResponseStatus.ACCEPTED, ResponseStatus.COMPLETE)
        ),
    ),
    "refusals.": Labelled(
        metric="refusals",
        label="verdict",
        text="refusals of peers, by what became of them, and those told to peers",
        values=(
            *("sent", "withheld", "malformed"),
            *(v.value for v in ResponseStatus if v is not ResponseStatus.COMPLETE),
        ),
    ),
}
_INFO_LABELS = ("version", "build", "name", "peer_id")
DENIAL_REASONS = tuple(reason.value for reason in Reason if reason is not Reason.ALLOWED)

# Values that can go down; all others only grow.
GAUGES: dict[str, str] = {
    "bus.waiting": "events of the bus that wait",
    "ingress.bytes": "payload bytes that wait or live in executions",
    "executions.live": "executions under way",
    "ops.parked": "ops that wait for something",
    "requests.open": "requests whose answers are waited for",
    "timers": "timers set",
    "timers.components": "timers that components have set",
    "joins.open": "joins that wait for deliveries",
    "calls.open": "calls of components that wait for an answer",
    "records": "values that programs recorded and that are kept",
    "round_trips": "edges whose round trip is known",
    "peers.connected": "peers the engine can use",
    "peers.known": "peers in the address book",
    "peers.not_ready": "connected peers that say they can't do their work",
    "slots.not_ready": "slots whose components could not be prepared",
    "queues.values": "values in queues of programs",
    "holds.values": "values held for a flush",
    "semaphores.taken": "units of semaphores in use",
    "control.connections": "clients of the control plane",
    "control.subscribers": "clients that follow events or logs",
}


class NodeCollector(Collector):
    """A collector that reads a `Host` on each scrape."""

    def __init__(self, host: Host) -> None:
        """Create a collector for one host; it keeps nothing between scrapes."""
        self._host = host

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the node."""
        host, now_s = self._host, trio.current_time()
        who = [__version__, build_id(), host.resolved.config.node.name, str(host.node.peer_id)]
        yield _gauge("info", "identity of the node; always 1", {tuple(who): 1.0}, *_INFO_LABELS)
        yield _gauge(
            "ready", "1 when the node does its work", float(views.readiness(host)["ready"])
        )
        stalled = {each.what for each in host.stalled()}
        yield _gauge(
            "stalled",
            "1 for what has not gone on for longer than it may",
            {check.what: float(check.what in stalled) for check in LIVENESS_CHECKS},
            "what",
        )
        yield _gauge("uptime_seconds", "time since the start", now_s - host.started_s)
        yield _gauge("tasks_running", "ops in worker threads", float(host.driver.tasks_running))
        if host.saved_s is not None:
            text = "time since the last snapshot of this run"
            yield _gauge("snapshot_age_seconds", text, now_s - host.saved_s)
        yield _gauge("clock_seconds", "time of this machine's clock, since 1970", time.time())
        yield from _disk_metrics(host)
        yield from _transport_metrics(host.backend.metrics())
        yield from _peer_metrics(host)
        yield from _round_metrics(host)
        yield from _component_metrics(host)
        yield from counter_metrics(host.all_counters())


def render(host: Host) -> bytes:
    """Return the whole page: the node's own metrics, and those of its process and Python."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(host))
    # These collectors add themselves to the registry.
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return generate_latest(registry)


def counter_metrics(counters: dict[str, int]) -> Iterator[Metric]:
    """Yield counters and gauges by dotted name as metrics, in the order of their names."""
    labelled = {prefix: dict.fromkeys(each.values, 0) for prefix, each in LABELLED.items()}
    plain: dict[str, Metric] = {}
    for name, value in sorted(counters.items()):
        prefix = next((p for p in LABELLED if name.startswith(p)), None)
        if prefix is not None:
            labelled[prefix][name.removeprefix(prefix)] = value
            continue
        exposed = _identifier(name)
        if name in GAUGES:
            plain[exposed] = _gauge(exposed, GAUGES[name], float(value))
        else:
            plain[exposed] = _counter(exposed, f"{name} so far", float(value))
    for prefix, counts in labelled.items():
        each = LABELLED[prefix]
        yield _counter(each.metric, each.text, counts, each.label)
    yield from plain.values()


# One value, or values by label, or by several labels.
Rows = float | Mapping[str, float] | Mapping[tuple[str, ...], float]


def _gauge(name: str, text: str, rows: Rows, *labels: str) -> Metric:
    return _family(GaugeMetricFamily, name, text, rows, labels)


def _counter(name: str, text: str, rows: Rows, *labels: str) -> Metric:
    return _family(CounterMetricFamily, name, text, rows, labels)


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    rows: Rows,
    labels: Sequence[str],
) -> Metric:
    """Return a metric of one value, or of a value by label."""
    if not isinstance(rows, Mapping):
        return kind(f"bbnode_{name}", text, value=rows)
    family = kind(f"bbnode_{name}", text, labels=labels)
    for label, value in rows.items():
        family.add_metric([label] if isinstance(label, str) else label, float(value))
    return family


def _disk_metrics(host: Host) -> Iterator[Metric]:
    """Yield the free space for the node's state; nothing if the file system does not answer."""
    try:
        usage = shutil.disk_usage(host.resolved.state_dir)
    except OSError:
        return
    text = "bytes that the node may still write where its state is"
    yield _gauge("state_dir_free_bytes", text, float(usage.free))
    text = "bytes of the file system where the node's state is"
    yield _gauge("state_dir_size_bytes", text, float(usage.total))


def _transport_metrics(measured: TransportMetrics) -> Iterator[Metric]:
    """Yield the gauges of the transport by field name, and the denials of its authorizer."""
    for field in dataclasses.fields(measured):
        value = getattr(measured, field.name)
        if isinstance(value, int):
            text = f"{field.name.replace('_', ' ')} now"
            yield _gauge(f"transport_{field.name}", text, float(value))
    denied = dict.fromkeys(DENIAL_REASONS, 0) | dict(measured.denied)
    yield _counter("access_denials", "what peers were not allowed", denied, "reason")


def _peer_metrics(host: Host) -> Iterator[Metric]:
    every = host.backend.peers()
    peers = sorted(every, key=lambda p: p.bytes_in + p.bytes_out, reverse=True)
    shown, rest = peers[:MAX_PEER_SERIES], peers[MAX_PEER_SERIES:]
    for family, name, text, field in (
        (_counter, "received_bytes", "bytes from a connected peer", "bytes_in"),
        (_counter, "sent_bytes", "bytes to a connected peer", "bytes_out"),
        (_gauge, "queued_bytes", "bytes that wait to be sent", "queued_bytes"),
    ):
        rows = {str(p.peer): float(getattr(p, field)) for p in shown}
        if rest:
            rows["other"] = float(sum(getattr(p, field) for p in rest))
        yield family(f"peer_{name}", text, rows, "peer")
    trips = {str(p.peer): p.rtt_s for p in shown if p.rtt_s is not None}
    yield _gauge("peer_round_trip_seconds", "the last ping of a peer", trips, "peer")
    by_direction = {d.value: float(sum(p.direction is d for p in every)) for d in Direction}
    yield _gauge("peer_connections", "peers connected now", by_direction, "direction")
    others = other_versions(host.node, host.artifact_sha256, every)
    agreeing = sum(not each.differs for each in others)
    by_verdict = {"agrees": float(agreeing), "differs": float(len(others) - agreeing)}
    text = "peers that run another version of the program, by whether its crossings agree"
    yield _gauge("peer_versions", text, by_verdict, "crossings")


# Fields of the last round's JSON, and their descriptions.
_LAST_ROUND = {
    "ok": "1 when the last round reached its end",
    "seconds": "duration of the last round",
    "bytes": "bytes that were moved during the last round",
    "responded": "peers that answered all that the last round asked them",
    "missing": "peers that left a request of the last round without an answer",
}


def _round_metrics(host: Host) -> Iterator[Metric]:
    """Yield counts of the rounds that the node ran, and values of the last one, by target."""
    by_target = {rounds.as_json()["target"]: rounds for rounds in host.rounds}
    done = {target: float(rounds.as_json()["done"]) for target, rounds in by_target.items()}
    yield _counter("rounds", "rounds that ended, over restarts of the node", done, "target")
    ages = {target: rounds.age_s for target, rounds in by_target.items()}
    periods = {t: by_target[t].period_s for t, age_s in ages.items() if age_s is not None}
    text = "time from round to round that is asked for"
    yield _gauge("round_period_seconds", text, periods, "target")
    text = "time since a round ended or, before the first, since the start, while more are to come"
    known = {target: age_s for target, age_s in ages.items() if age_s is not None}
    yield _gauge("round_age_seconds", text, known, "target")
    last = {t: ended[-1] for t, rounds in by_target.items() if (ended := rounds.finished())}
    for name, text in _LAST_ROUND.items():
        rows = {
            target: float(len(row[name]) if isinstance(row[name], list) else row[name])
            for target, row in last.items()
        }
        yield _gauge(f"last_round_{name}", text, rows, "target")
    outputs: dict[tuple[str, ...], float] = {
        (target, name): float(value)
        for target, row in last.items()
        for name, value in row["outputs"].items()
        if isinstance(value, int | float)
    }
    text = "outputs of the last round that are single numbers"
    yield _gauge("last_round_output", text, outputs, "target", "name")


def _component_metrics(host: Host) -> Iterator[Metric]:
    """Yield the numbers that components report, by slot."""
    rows: dict[tuple[str, ...], float] = {
        (slot, name): float(value)
        for slot, facts in host.node.facts().items()
        for name, value in facts.items()
        if isinstance(value, int | float)
    }
    yield _gauge("component", "what a component tells of itself", rows, "slot", "fact")


def _identifier(name: str) -> str:
    """Return the metric name of a dotted name: `outbound.bytes` is `outbound_bytes`."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return re.sub(r"[^a-zA-Z0-9]+", "_", spaced).strip("_").lower()
