"""Requests that only look: status, peers, executions, traces, configuration, health, metrics.

Rule: a GET changes nothing, and answers from what is in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import trio

from bbnode.daemon.control import arguments, views
from bbnode.daemon.control.errors import Problem
from bbnode.daemon.control.host import Host
from bbnode.daemon.control.http import Request, Response
from bbnode.daemon.control.json_lines import encode

Params = Mapping[str, str]

MAX_ROUNDS = 1440


async def status(host: Host, _request: Request, _params: Params) -> Mapping[str, Any]:
    """Everything about the node at one moment."""
    return views.status(host)


async def peers(host: Host, _request: Request, _params: Params) -> Mapping[str, Any]:
    """Connected peers, and those that are dialled."""
    now_s = trio.current_time()
    return {
        "peers": [views.peer_info(p, now_s) for p in host.backend.peers()],
        "wanted": [views.wanted(w) for w in host.backend.wanted()],
    }


async def peer(host: Host, _request: Request, params: Params) -> Mapping[str, Any]:
    """One peer, and every rule that decides about it."""
    found = arguments.peer_id(host, params["peer"])
    standing = host.node.peer_standing(found)
    now_s = trio.current_time()
    connected = next((p for p in host.backend.peers() if p.peer == found), None)
    return {
        "peer": str(found),
        "connected": None if connected is None else views.peer_info(connected, now_s),
        "addresses": [str(address) for address in standing.addresses],
        "health": standing.health.value,
        "usable": standing.usable,
        "why": views.why(host, found),
    }


async def executions(host: Host, _request: Request, _params: Params) -> Mapping[str, Any]:
    """What runs, and what it waits for."""
    return views.executions(host)


async def rounds(host: Host, request: Request, _params: Params) -> Mapping[str, Any]:
    """Rounds that the node made by itself, oldest first; `?last=N` of each target."""
    last = arguments.number(request, "last", default=MAX_ROUNDS, lowest=1, highest=MAX_ROUNDS)
    return {
        "rounds": [made for r in host.rounds for made in r.finished()[-last:]],
        "invoke": [r.as_json() for r in host.rounds],
    }


async def trace(host: Host, request: Request, params: Params) -> Mapping[str, Any]:
    """What one execution did; or with `?peer=ID`, those that its request number ID started."""
    number = arguments.whole("id", params["id"])
    if "peer" in request.query:
        source = arguments.peer_id(host, request.query["peer"][-1])
        found = host.trace.started_by(str(source), number)
    else:
        found = [number]
    steps = [event for execution in found for event in host.trace.of_execution(execution)]
    running = [e for e in views.executions(host)["executions"] if e["execution"] in found]
    waits = [w for w in views.waiting(host) if w["execution"] in found]
    if not (steps or running or waits) and "peer" not in request.query:
        raise Problem(
            404,
            "UnknownExecution",
            f"nothing is known of execution {number}; "
            + (
                "it is over and forgotten, or never was"
                if host.trace.on
                else "tracing is off: switch it on (`bbnode trace --on`) before it starts"
            ),
        )
    return {
        "peer_id": str(host.node.peer_id),
        "tracing": host.trace.on,
        "executions": found,
        "running": running,
        "waiting": waits,
        "steps": steps,
    }


async def traced(host: Host, _request: Request, _params: Params) -> Mapping[str, Any]:
    """Whether ops are traced, and of which executions something is kept."""
    return {"tracing": host.trace.on, "executions": host.trace.executions()}


async def log_level(_host: Host, _request: Request, _params: Params) -> Mapping[str, Any]:
    """The least severe level that is logged now."""
    return {"level": logging.getLevelName(logging.getLogger().level).lower()}


async def config(host: Host, _request: Request, _params: Params) -> Mapping[str, Any]:
    """The configuration as it is in force, and where each given key came from."""
    return {
        "file": None if host.resolved.file is None else str(host.resolved.file),
        "state_dir": str(host.resolved.state_dir),
        "config": host.resolved.config.model_dump(mode="json", by_alias=True),
        "origins": dict(host.resolved.origins),
    }


async def healthz(host: Host, _request: Request, _params: Params) -> Response:
    """200 while the daemon's loop turns and polls its node, whatever else stands still."""
    dead = [each for each in host.stalled() if each.what == "poll"]
    return _plain(503 if dead else 200, dead[0].detail if dead else f"alive, {host.phase}")


async def readyz(host: Host, _request: Request, _params: Params) -> Response:
    """200 when the node does its work, else 503; in both cases with the reasons, as JSON."""
    told = views.readiness(host)
    return Response(
        status=200 if told["ready"] else 503,
        body=encode({"schema": "bbnode/ready/1", **told}),
        content_type="application/json",
    )


async def metrics(host: Host, _request: Request, _params: Params) -> Response:
    """Everything that is counted, for Prometheus."""
    # Here and not above: only a daemon that somebody scrapes needs the package.
    from bbnode.daemon.observing.metrics import CONTENT_TYPE, render

    return Response(body=render(host), content_type=CONTENT_TYPE)


def _plain(status_code: int, text: str) -> Response:
    return Response(
        status=status_code,
        body=text.encode("utf-8") + b"\n",
        content_type="text/plain; charset=utf-8",
    )
