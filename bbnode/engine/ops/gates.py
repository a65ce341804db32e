"""The five gates around wire ops.

Rule: a gate passes its value or denies. A receive gate that denies ends the execution that the
delivery began; a send gate ends its Send, which is skipped, and reports the peer and the reason.
They ask the tables of the node; the labels of reasons are stable: `duplicate`, `blocklisted`,
`not_allowlisted`, `cooldown`. In an execution that no envelope started, a receive gate passes.
"""

from __future__ import annotations

from typing import Any

from bbnode.engine.errors import REASON_DUPLICATE, GateDenied
from bbnode.engine.frame import Frame, Op
from bbnode.engine.ops.build import Fire, OpBuild, binds
from bbnode.engine.peers.governor import BlockReason
from bbnode.engine.services import Services
from bbnode.ir import keys
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId


@binds(keys.SYSCALL_DOMAIN, keys.OP_DEDUP_GATE_RX)
def _dedup_rx(build: OpBuild) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs

    def fire(frame: Frame) -> Any:
        peer = frame.source_peer
        if peer is not None and frame.rt.dedup.record(peer, frame.wire_req_id, frame.site):
            raise GateDenied(keys.OP_DEDUP_GATE_RX, REASON_DUPLICATE, f"from {peer}")
        return frame.values[source]

    return fire


@binds(keys.SYSCALL_DOMAIN, keys.OP_PEER_HEALTH_GATE_RX)
def _peer_health_rx(build: OpBuild) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs

    def fire(frame: Frame) -> Any:
        peer = frame.source_peer
        governor = frame.rt.neighbours.governor
        if governor.denies and peer is not None:
            reason = governor.check_inbound(peer)
            if reason is not None:
                raise GateDenied(keys.OP_PEER_HEALTH_GATE_RX, reason.value, f"from {peer}")
        return frame.values[source]

    return fire


@binds(keys.SYSCALL_DOMAIN, keys.OP_BACKOFF_GATE_RX)
def _backoff_rx(build: OpBuild) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs

    def fire(frame: Frame) -> Any:
        peer = frame.source_peer
        rt: Services = frame.rt
        backoff = rt.neighbours.backoff
        if backoff.peers and peer is not None and not backoff.should_retry(peer, rt.clock.now_ns):
            raise GateDenied(keys.OP_BACKOFF_GATE_RX, BlockReason.COOLDOWN.value, f"from {peer}")
        return frame.values[source]

    return fire


@binds(keys.SYSCALL_DOMAIN, keys.OP_PEER_HEALTH_GATE_TX)
def _peer_health_tx(build: OpBuild) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs
    op, peer = build.op, _peer(build)

    def fire(frame: Frame) -> Any:
        rt: Services = frame.rt
        tables = rt.neighbours
        reason = tables.governor.check_outbound(peer, tables.backoff, rt.clock.now_ns)
        if reason is not None:
            return _deny(frame, op, peer, reason)
        return frame.values[source]

    return fire


@binds(keys.SYSCALL_DOMAIN, keys.OP_BACKOFF_GATE_TX)
def _backoff_tx(build: OpBuild) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs
    op, peer = build.op, _peer(build)

    def fire(frame: Frame) -> Any:
        rt: Services = frame.rt
        if not rt.neighbours.backoff.should_retry(peer, rt.clock.now_ns):
            return _deny(frame, op, peer, BlockReason.COOLDOWN)
        return frame.values[source]

    return fire


def _deny(frame: Frame, op: Op, peer: PeerId, reason: BlockReason) -> Any:
    """Report what is not sent, and skip the Send behind a gate."""
    rt: Services = frame.rt
    rt.reports.counts[f"gate.denied.{reason.value}"] += 1
    rt.outbound.left_out(frame, op, peer, reason.value)
    return rt.executor.skip(frame, op, f"{op.name}: nothing is sent to {peer}: {reason.value}")


def _peer(build: OpBuild) -> PeerId:
    raw = build.node.attr(keys.ATTR_PEER)
    try:
        return PeerId.from_bytes(raw if isinstance(raw, bytes) else b"")
    except DecodeError as error:
        raise build.wrong(f"needs the attribute {keys.ATTR_PEER!r}: {error}") from error
