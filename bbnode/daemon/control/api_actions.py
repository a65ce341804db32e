"""Requests that do something: peers, pings, invocations, events, snapshots, the log level.

Rule: what was asked is done when the answer comes, or the answer says what is under way. What
the engine or the transport refuses goes to the client with its own name.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import trio

from bbnode.daemon.control import arguments, views
from bbnode.daemon.control.errors import Problem
from bbnode.daemon.control.host import Host
from bbnode.daemon.control.http import Request
from bbnode.daemon.control.inputs import to_value, to_values
from bbnode.daemon.control.invocations import Invocations
from bbnode.daemon.observing import logs
from bbnode.ir.caps import MAX_WAIT_S

logger = logging.getLogger(__name__)

Params = Mapping[str, str]
LEVELS = ("debug", "info", "warning", "error")

PING_TIMEOUT_S = 10.0


async def connect(host: Host, request: Request, params: Params) -> Mapping[str, Any]:
    """Dial a peer, and again whenever it is gone; body: `{"addresses": ["/ip4/…"]}`.

    Without addresses those that the node knows of it are used.
    """
    peer = arguments.peer_id(host, params["peer"])
    given = arguments.body(request, addresses=list)
    found = arguments.addresses(given.get("addresses", []))
    found = found or list(host.node.peer_standing(peer).addresses)
    if not found:
        raise Problem(409, "NoAddress", f"no address of {peer} is known; give one")
    host.backend.keep_connected(peer, found)
    logger.info("peer wanted", extra={"peer": str(peer), "by": "control"})
    return {
        "peer": str(peer),
        "addresses": [str(a) for a in found],
        "connected": _is_up(host, peer),
    }


async def disconnect(host: Host, _request: Request, params: Params) -> Mapping[str, Any]:
    """Take leave of a peer and dial it no more; it may still dial us."""
    peer = arguments.peer_id(host, params["peer"])
    was_connected = _is_up(host, peer)
    host.backend.forget(peer)
    host.backend.disconnect(peer)
    logger.info("peer disconnected", extra={"peer": str(peer), "by": "control"})
    return {"peer": str(peer), "was_connected": was_connected}


async def block(host: Host, _request: Request, params: Params) -> Mapping[str, Any]:
    """Deny a peer in both directions, also after a restart, and take leave of it."""
    peer = arguments.peer_id(host, params["peer"])
    if peer == host.node.peer_id:
        raise Problem(409, "OwnPeer", "a node can't block itself")
    was_connected = _is_up(host, peer)
    host.access.block(peer)
    host.backend.forget(peer)
    host.backend.disconnect(peer)
    logger.warning("peer blocked", extra={"peer": str(peer), "by": "control"})
    return {"peer": str(peer), "blocked": True, "was_connected": was_connected}


async def allow(host: Host, _request: Request, params: Params) -> Mapping[str, Any]:
    """Deny a peer no more; it, or `connect`, has to dial again."""
    peer = arguments.peer_id(host, params["peer"])
    host.access.allow(peer)
    logger.info("peer allowed", extra={"peer": str(peer), "by": "control"})
    return {"peer": str(peer), "blocked": False, "why": views.why(host, peer)}


async def reload_access(host: Host, _request: Request, _params: Params) -> Mapping[str, Any]:
    """Take up a membership or a revocation list that was put into the state directory."""
    return {"taken": host.access.reload_files()}


async def ping(host: Host, request: Request, _params: Params) -> Mapping[str, Any]:
    """One round trip to a connected peer; body: `{"peer": "ID", "timeout_s": 10}`."""
    given = arguments.body(request, peer=str, timeout_s=(int, float))
    peer = arguments.peer_id(host, arguments.require(given, "peer"))
    timeout_s = _wait_s(given, "timeout_s", PING_TIMEOUT_S)
    if not _is_up(host, peer):
        raise Problem(409, "NotConnected", f"{peer} is not connected; see `bbnode peers --why`")
    with trio.move_on_after(timeout_s):
        rtt_s = await host.ping(peer)
        return {"peer": str(peer), "rtt_ms": round(rtt_s * 1000, 3)}
    raise Problem(504, "Timeout", f"{peer} did not answer a ping within {timeout_s:g} s")


async def dial_back(host: Host, request: Request, _params: Params) -> Mapping[str, Any]:
    """Have a peer dial this node's addresses; body: `{"peer": "ID"}`, or `{}` for any."""
    given = arguments.body(request, peer=str)
    peer = arguments.peer_id(host, given["peer"]) if "peer" in given else None
    if peer is not None and not _is_up(host, peer):
        raise Problem(409, "NotConnected", f"{peer} is not connected; see `bbnode peers --why`")
    return (await host.dial_back(peer)).as_json()


async def snapshot(host: Host, _request: Request, _params: Params) -> Mapping[str, Any]:
    """Write the node's state to its state directory now."""
    size = await host.save()
    return {"state_dir": str(host.resolved.state_dir), "bytes": size}


async def set_log_level(_host: Host, request: Request, _params: Params) -> Mapping[str, Any]:
    """Change what is logged; body: `{"level": "debug"}`."""
    level = arguments.require(arguments.body(request, level=str), "level")
    if level not in LEVELS:
        raise Problem(400, "InvalidField", f"'level' has to be one of {', '.join(LEVELS)}")
    before = logging.getLevelName(logging.getLogger().level).lower()
    logs.set_level(level)
    logger.warning("log level changed", extra={"level": level, "before": before})
    return {"level": level, "before": before}


async def set_tracing(host: Host, request: Request, _params: Params) -> Mapping[str, Any]:
    """Trace ops from now on, or no more; body: `{"on": true}`."""
    on = arguments.require(arguments.body(request, on=bool), "on")
    host.trace.switch(on=on)
    logger.info("tracing", extra={"on": on})
    return {"tracing": on}


async def reload(host: Host, _request: Request, _params: Params) -> Mapping[str, Any]:
    """Read the configuration again; a refused one changes nothing, and is the answer."""
    if host.phase != "ready":
        raise Problem(409, "NotReady", f"the node is {host.phase}; reload it once it is ready")
    changes = host.reload()
    return {"changed": list(changes.applied), "needs_restart": list(changes.needs_restart)}


async def stop(host: Host, _request: Request, _params: Params) -> Mapping[str, Any]:
    """Stop the daemon in order; the answer comes before it is done."""
    logger.info("stop asked for", extra={"by": "control"})
    host.stop()
    return {"stopping": True}


class Calls:
    """Invocations and events: what starts executions, and may wait for their end."""

    def __init__(self, invocations: Invocations) -> None:
        """`invocations` is told of every step of the node."""
        self._invocations = invocations

    async def invoke(self, host: Host, request: Request, _params: Params) -> Mapping[str, Any]:
        """Start one execution; body: `{"target": "…", "inputs": {…}, "wait_s": 30}`."""
        given = arguments.body(request, target=str, inputs=dict, wait_s=(int, float))
        wait_s = _wait_s(given, "wait_s", 0.0)
        target = arguments.require(given, "target")
        inputs = to_values(given.get("inputs", {}), host.node.inputs(target))
        execution = host.node.invoke(target, inputs)
        return await self._finish(host, execution, wait_s)

    async def emit(self, host: Host, request: Request, _params: Params) -> Mapping[str, Any]:
        """Give a target one input, or put an event of the program's on the bus.

        Body: `{"target": "…", "input": "…", "value": …, "wait_s": 0}` or `{"kind": 4096}`.
        """
        given = arguments.body(
            request,
            target=str,
            input=str,
            value=(bool, int, float, str, list, dict),
            kind=int,
            wait_s=(int, float),
        )
        if "kind" in given:
            if set(given) != {"kind"}:
                raise Problem(400, "InvalidField", "'kind' stands alone: a bus event has no value")
            host.node.publish_event(given["kind"])
            host.driver.wake()
            return {"kind": given["kind"]}
        name = arguments.require(given, "input")
        target = arguments.require(given, "target")
        declared = host.node.inputs(target).get(name)
        value = to_value(name, arguments.require(given, "value"), declared)
        wait_s = _wait_s(given, "wait_s", 0.0)
        execution = host.node.deliver_event(target, name, value)
        return await self._finish(host, execution, wait_s)

    async def _finish(self, host: Host, execution: int, wait_s: float) -> Mapping[str, Any]:
        """What is known of an execution after at most `wait_s`."""
        invocation = self._invocations.expect(execution)
        host.driver.wake()
        try:
            if wait_s:
                with trio.move_on_after(wait_s):
                    await invocation.finished.wait()
            return invocation.as_json()
        finally:
            self._invocations.forget(execution)


def _is_up(host: Host, peer: object) -> bool:
    return any(p.peer == peer for p in host.backend.peers())


def _wait_s(given: Mapping[str, Any], name: str, default: float) -> float:
    try:
        seconds = float(given.get(name, default))
    except OverflowError:  # JSON's whole numbers have no end
        seconds = math.inf
    if not 0 <= seconds <= MAX_WAIT_S:
        raise Problem(400, "InvalidField", f"{name!r} has to be from 0 to {MAX_WAIT_S:g} seconds")
    return seconds
