"""A daemon as JSON: status, peers, executions, health.

Rule: a view only reads the `Host`; times are in seconds, and relative ones have it in their name. A
peer's claims about itself are shown as text and decide nothing.
"""

from __future__ import annotations

import os
import shutil

import trio

from bbnode import __version__
from bbnode.daemon.build import build_id
from bbnode.daemon.control import answers
from bbnode.daemon.control.host import Host
from bbnode.daemon.network.versions import other_versions, version_of
from bbnode.daemon.observing.watch import LIVENESS_CHECKS
from bbnode.engine.readiness import PENDING, reasons_text
from bbnode.ir.caps import MIN_FREE_BYTES
from bbnode.ir.peer import PeerId
from bbnode.ir.texts import listed
from bbnode.transport.base import PeerInfo, WantedPeer
from bbnode.transport.driver import trio_clock_ns

# The multiaddr protocol of an address that goes through a relay.
RELAYED = "/p2p-circuit"
# Peers whose reasons one line lists; there may be a thousand.
SHOWN_PEERS = 8


def status(host: Host) -> answers.Status:
    """Return the content of `bbnode status`."""
    now_s = trio.current_time()
    return {
        "name": host.resolved.config.node.name,
        "peer_id": str(host.node.peer_id),
        "version": __version__,
        "build": build_id(),
        "pid": os.getpid(),
        "phase": host.shown_phase,
        "uptime_s": round(now_s - host.started_s, 3),
        "artifact_sha256": host.artifact_sha256,
        "artifact_targets": list(host.artifact_targets),
        "targets": list(host.node.targets),
        "listen": [str(a) for a in host.backend.listen_addresses()],
        "health": health(host),
        "peers": peers(host),
        "guests": host.backend.metrics().foreign,
        "wanted": [wanted(w) for w in host.backend.wanted()],
        "versions": versions(host),
        "offers": host.offers(),  # type: ignore[typeddict-item]
        "upgrade": upgrade(host),
        "discovery": dict(host.discovery()),
        "routing": dict(host.routing()),
        "reachability": dict(host.reachability()),
        "data": dict(host.data()),
        "invoke": [r.as_json() for r in host.rounds],
        "executions": len(host.node.executions()),
        "waiting": waiting(host),
        "components": components(host),
        "tasks_running": host.driver.tasks_running,
        "tracing": host.trace.on,
        "counters": host.all_counters(),
    }


def peers(host: Host) -> list[answers.PeerView]:
    """Return the connected peers."""
    now_s = trio.current_time()
    unready_peers = host.node.peers_not_ready()
    unready = {peer: each.reason for peer, each in unready_peers.items()}
    return [peer_info(p, now_s, unready.get(p.peer, "")) for p in host.backend.peers()]


def peer_info(p: PeerInfo, now_s: float, not_ready: str) -> answers.PeerView:
    """Return a connected peer; `not_ready` is the reason why it does not work, or is not chosen."""
    return {
        "peer": str(p.peer),
        "classes": list(p.hello.classes),
        "via": "relay" if RELAYED in str(p.address) else "direct",
        "direction": p.direction.value,
        "address": str(p.address),
        "agent": p.hello.agent_version,
        "version": version_of(p.hello.artifact_sha256),
        "bytes_in": p.bytes_in,
        "bytes_out": p.bytes_out,
        "queued": p.queued_envelopes,
        "queued_bytes": p.queued_bytes,
        "rtt_ms": None if p.rtt_s is None else round(p.rtt_s * 1000, 3),
        "connected_s": round(now_s - p.since_s, 3),
        "not_ready": not_ready,
        "pending": not_ready.startswith(PENDING),
    }


def versions(host: Host) -> list[answers.VersionView]:
    """Return the connected peers with another version of the program or another model."""
    return [
        {
            "peer": str(each.peer),
            "version": each.version,
            "tells": each.tells,
            "differs": list(each.differs),
        }
        for each in other_versions(host.node, host.artifact_sha256, host.backend.peers())
    ]


def upgrade(host: Host) -> answers.UpgradeView | None:
    """Return the state that the node took over from a checkpoint that it could not resume."""
    if host.upgrade is None:
        return None
    return host.upgrade.as_json()  # type: ignore[return-value]


def wanted(w: WantedPeer) -> answers.WantedView:
    """Return a peer that is dialled whenever it is not connected."""
    return {
        "peer": str(w.peer),
        "connected": w.connected,
        "failed_dials": w.failed_dials,
        "last_error": w.last_error,
    }


def waiting(host: Host) -> list[answers.Json]:
    """Return everything that waits, with its reason and its deadline."""
    now_ns = trio_clock_ns()
    return [w.as_json(now_ns) for w in host.node.waiting()]


def components(host: Host) -> list[answers.Json]:
    """Return the facts that components report, such as the number of items of an index."""
    return [
        {"slot": slot, "type": host.node.binding(slot).type_name, **facts}
        for slot, facts in host.node.facts().items()
    ]


def executions(host: Host) -> answers.ExecutionsView:
    """Return running executions, oldest first, and what they wait for."""
    now_ns = trio_clock_ns()
    return {
        "executions": [
            {
                "execution": e.execution,
                "target": e.target,
                "entry": e.entry,
                "source_peer": None if e.source_peer is None else str(e.source_peer),
                "running_s": round((now_ns - e.started_ns) / 1e9, 3),
                "remaining_s": None
                if e.deadline_ns is None
                else round((e.deadline_ns - now_ns) / 1e9, 3),
            }
            for e in host.node.executions()
        ],
        "waiting": waiting(host),
    }


def health(host: Host) -> list[answers.Check]:
    """Return checks of the node itself; `ok` false means that somebody should look."""
    bootstrap = [p for p in host.discovery().get("peers", ()) if p["bootstrap"] is not None]
    connected = sum(p["connected"] for p in bootstrap)
    stalled = {each.what: each.detail for each in host.stalled()}
    checks = [
        ("phase", host.phase == "ready", host.phase),
        ("components", *_components(host)),
        ("listening", *_listening(host)),
        ("peers", *_peers_ready(host)),
        (
            "bootstrap",
            not bootstrap or connected > 0,
            f"{connected} of {len(bootstrap)} bootstrap peers connected",
        ),
        ("versions", *_versions(host)),
        ("disk", *_disk(host)),
        (
            "flooding",
            host.node.counters().get("ingress.dropped", 0) == 0,
            f"{host.node.counters().get('ingress.dropped', 0)} events dropped at the ingress",
        ),
    ]
    # A node that starts or stops is not expected to make progress.
    checks += [
        (thing.what, thing.what not in stalled, stalled.get(thing.what, "ok"))
        for thing in LIVENESS_CHECKS
    ]
    return [{"check": name, "ok": ok, "detail": detail} for name, ok, detail in checks]


def _components(host: Host) -> tuple[bool, str]:
    failed = host.node.not_ready()
    return not failed, reasons_text(failed) or "all that the program needs is prepared"


def _peers_ready(host: Host) -> tuple[bool, str]:
    unready_peers = host.node.peers_not_ready()
    if not unready_peers:
        return True, "all connected peers are ready"
    lines = [f"{peer.short}: {each.reason}" for peer, each in unready_peers.items()]
    return False, f"not ready: {listed(lines, SHOWN_PEERS)}"


def _versions(host: Host) -> tuple[bool, str]:
    others = other_versions(host.node, host.artifact_sha256, host.backend.peers())
    differing = [f"{e.peer.short}: {'; '.join(e.differs)}" for e in others if e.differs]
    if not others:
        return True, "all connected peers run this version of the program"
    count = f"peers with another version of the program or another model: {len(others)}"
    if not differing:
        return True, f"{count}; they agree with this one in all that crosses"
    return False, f"{count}; that disagree: {listed(differing, SHOWN_PEERS)}"


def _listening(host: Host) -> tuple[bool, str]:
    if not host.resolved.config.network.listen:
        return True, "it only dials"
    addresses = host.backend.listen_addresses()
    return bool(addresses), f"{len(addresses)} address{'' if len(addresses) == 1 else 'es'}"


def readiness(host: Host) -> answers.Readiness:
    """Return the readiness of the node, the reasons against it, and what its rounds wait for."""
    reasons: list[answers.NotReadyReason] = []
    if host.phase != "ready":
        reasons.append({"what": "phase", "detail": f"the node is {host.phase}", "for_s": None})
    else:
        listening, detail = _listening(host)
        if not listening:
            text = f"the node listens on no address: {detail}"
            reasons.append({"what": "listening", "detail": text, "for_s": None})
        failed = host.node.not_ready()
        if failed:
            reasons.append({"what": "components", "detail": reasons_text(failed), "for_s": None})
        reasons += [
            {"what": s.what, "detail": s.detail, "for_s": round(s.for_s, 1)}
            for s in host.stalled()
            if s.blocks
        ]
    return {
        "ready": not reasons,
        "phase": host.shown_phase,
        "reasons": reasons,
        "waiting": [
            {"target": r["target"], "for": r["waiting_for"], "for_s": r["waiting_s"]}
            for r in (rounds.as_json() for rounds in host.rounds)
            if r.get("waiting_for")
        ],
    }


def why(host: Host, peer: PeerId) -> list[answers.RuleView]:
    """Return each rule that decides about a peer, in order, with its outcome."""
    standing = host.node.peer_standing(peer)
    failing = next((w for w in host.backend.wanted() if w.peer == peer), None)
    unready = host.node.peers_not_ready().get(peer)
    rules = [
        *(
            (f"access: {d.rule}", "pass" if d.allowed else "fail", f"{d.reason.value}: {d.detail}")
            for d in host.access.explain(peer)
        ),
        (
            "lists of programs",
            "pass" if standing.denied is None else "fail",
            "not denied" if standing.denied is None else standing.denied.value,
        ),
        (
            "address",
            "pass" if standing.addresses or standing.connected else "fail",
            f"{len(standing.addresses)} known",
        ),
        (
            "connection",
            "pass" if standing.connected else "fail",
            "connected" if standing.connected else _not_connected(failing),
        ),
        (
            "health",
            "fail" if standing.health.value == "down" else "pass",
            f"{standing.health.value}, {standing.failures} failures in a row",
        ),
        (
            "cooldown",
            "fail" if standing.retry_in_ns else "pass",
            f"may be tried in {standing.retry_in_ns / 1e9:.3f} s"
            if standing.retry_in_ns
            else "none",
        ),
        (
            "ready",
            "pass" if unready is None else "fail",
            "it says no other"
            if unready is None
            else f"not for {', '.join(unready.classes)}, as it says: {unready.reason}",
        ),
        (
            "usable",
            "pass" if standing.usable else "fail",
            "selectors may choose it" if standing.usable else "selectors leave it out",
        ),
    ]
    return [{"rule": r, "outcome": outcome, "detail": detail} for r, outcome, detail in rules]


def _not_connected(failing: WantedPeer | None) -> str:
    if failing is None:
        return "not connected, and not wanted: nobody dials it from here"
    return f"{failing.failed_dials} dials failed; the last: {failing.last_error or 'under way'}"


def _disk(host: Host) -> tuple[bool, str]:
    try:
        free = shutil.disk_usage(host.resolved.state_dir).free
    except OSError as error:
        return False, f"{host.resolved.state_dir}: {error.strerror}"
    return free >= MIN_FREE_BYTES, f"{free // (1024 * 1024)} MiB free at the state directory"
