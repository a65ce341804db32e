"""The requests that a daemon answers: one table, filled by the functions below.

Rule: the table is the API. A path has a version; within a version, fields are added and never
change their meaning. Each JSON object has a `schema`. A GET changes nothing and answers from
memory; earlier rounds come from the node's file. Any other request is done when its answer arrives,
or the answer says that it is still running.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import trio
from multiaddr import Multiaddr
from pydantic import Field, ValidationError

from bbnode.daemon.config import InvokeSection, TrackerSection
from bbnode.daemon.control import answers, views
from bbnode.daemon.control.asgi import Response, StreamedResponse
from bbnode.daemon.control.client import FILE
from bbnode.daemon.control.errors import Problem
from bbnode.daemon.control.host import Host, NotOffered, RestartRefused, RoundsRefused
from bbnode.daemon.control.http import (
    LINES,
    TEXT,
    Blob,
    Endpoints,
    Lines,
    Query,
    RequestBody,
    json_response,
    known_peer,
    openapi,
    text_response,
)
from bbnode.daemon.control.inputs import nanoseconds, to_value
from bbnode.daemon.history.store import newest
from bbnode.daemon.invoke.exact import Encoder
from bbnode.daemon.network.routing import Found
from bbnode.daemon.observing import logs
from bbnode.daemon.observing.events import summarize
from bbnode.daemon.paths import StorageError
from bbnode.daemon.state import weights
from bbnode.engine.errors import AddressBookFull
from bbnode.ir import types
from bbnode.ir.address import parse_address
from bbnode.ir.caps import (
    KEPT_ITEMS,
    MAX_ADDRESSES_PER_PEER,
    MAX_ARTIFACT_BYTES,
    MAX_DEADLINE_S,
    MAX_WAIT_S,
)
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId

logger = logging.getLogger(__name__)

MAX_ROUNDS = 100_000
# Bytes of the rounds in one answer; a client reads 16 MiB.
MAX_ROUNDS_BYTES = 12 << 20
PING_TIMEOUT_S = 10.0

Level = Literal["debug", "info", "warning", "error"]

ENDPOINTS = Endpoints()


@ENDPOINTS.add("GET", "/openapi.json", answer=dict[str, Any])
async def describe() -> Response:
    """Describe every request in the form of OpenAPI 3.1."""
    return json_response(openapi(ENDPOINTS))


# -- health ------------------------------------------------------------------------------------


@ENDPOINTS.add("GET", "/healthz", media=TEXT)
async def healthz(host: Host) -> Response:
    """Answer 200 while the daemon's loop runs and polls its node, whatever else is stuck."""
    dead = [each for each in host.stalled() if each.what == "poll"]
    detail = dead[0].detail if dead else f"alive, {host.phase}"
    return text_response(f"{detail}\n", 503 if dead else 200)


@ENDPOINTS.add("GET", "/readyz", "ready", answer=answers.Readiness)
async def readyz(host: Host) -> Response:
    """Answer 200 when the node is ready, else 503; in both cases with the reasons."""
    readiness = views.readiness(host)
    return json_response(
        {"schema": "bbnode/ready/1", **readiness}, 200 if readiness["ready"] else 503
    )


@ENDPOINTS.add("GET", "/metrics", media="text/plain")
async def metrics(host: Host) -> Response:
    """Show all metrics, for Prometheus."""
    # Imported late: only a daemon that is scraped needs the package.
    from bbnode.daemon.observing.metrics import CONTENT_TYPE, render

    return text_response(render(host), media=CONTENT_TYPE)


# -- state -------------------------------------------------------------------------------------


@ENDPOINTS.add("GET", "/v1/status", "status")
async def status(host: Host) -> answers.Status:
    """Show everything about the node at one moment."""
    return views.status(host)


@ENDPOINTS.add("GET", "/v1/config", "config")
async def config(host: Host) -> answers.ConfigView:
    """Show the configuration as it is in force, and where each given key came from."""
    resolved = host.resolved
    return {
        "file": None if resolved.file is None else str(resolved.file),
        "state_dir": str(resolved.state_dir),
        "config": resolved.config.model_dump(mode="json", by_alias=True),
        "origins": dict(resolved.origins),
    }


@ENDPOINTS.add("GET", "/v1/executions", "executions")
async def executions(host: Host) -> answers.ExecutionsView:
    """List what runs, and what it waits for."""
    return views.executions(host)


class RoundsQuery(Query):
    """The number of rounds of each target, and the round after which they begin."""

    last: int = Field(1440, ge=1, le=MAX_ROUNDS)
    since: int = Field(0, ge=0)


@ENDPOINTS.add("GET", "/v1/rounds", "rounds")
async def rounds(host: Host, query: RoundsQuery) -> answers.RoundsAnswer:
    """List the rounds that the node made by itself, over restarts, oldest first."""
    listed: list[dict[str, Any]] = []
    trouble = ""
    if host.history is not None:
        read = partial(
            host.history.read, last=query.last, since=query.since, max_bytes=MAX_ROUNDS_BYTES
        )
        try:
            kept = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
            listed += kept
            if kept.left_out:
                trouble = (
                    f"{kept.left_out} older rounds are left out: an answer holds "
                    f"{MAX_ROUNDS_BYTES >> 20} MiB; ask for fewer (--last), or read rounds.sqlite "
                    "in the state directory"
                )
        except StorageError as error:
            trouble = str(error)
    known = {(row["target"], row["execution"], row["started_at"]) for row in listed}
    for each in host.rounds:
        # The rounds that are not on disk, for example since it is full.
        fresh = [
            row
            for row in each.finished()[-query.last :]
            if row["round"] > query.since
            and (row["target"], row["execution"], row["started_at"]) not in known
        ]
        listed += fresh
    return {
        "rounds": newest(listed, query.last),
        "invoke": [r.as_json() for r in host.rounds],
        "trouble": trouble,
    }


class StartRoundsBody(RequestBody):
    """An entry as `[[invoke]]` has it, without a target where one needs nothing but triggers.

    `times` counts from now on. `trackers` get the rounds, by default those of the configuration.
    """

    invoke: dict[str, Any] = Field(default_factory=dict)
    trackers: list[dict[str, Any]] | None = None


@ENDPOINTS.add("POST", "/v1/rounds", "rounds-start")
async def start_rounds(host: Host, body: StartRoundsBody) -> answers.RoundsStarted:
    """Have the node make rounds of a target, from now on and until it stops."""
    try:
        entry = InvokeSection.model_validate({"target": _startable(host), **body.invoke})
        trackers = (
            None
            if body.trackers is None
            else [TrackerSection.model_validate(each) for each in body.trackers]
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Problem(422, "InvalidRounds", f"{where or 'invoke'}: {first['msg']}") from error
    declared = host.node.inputs(entry.target)
    triggers = {
        name: "trigger"
        for name, kind in declared.items()
        if kind is types.TRIGGER and name not in entry.inputs
    }
    entry = entry.model_copy(update={"inputs": {**triggers, **entry.inputs}})
    unknown = next((name for name in entry.inputs if name not in declared), None)
    missing = [name for name in declared if name not in entry.inputs]
    if unknown is not None or missing:
        what = f"there is no input {unknown!r}" if unknown else f"give {', '.join(missing)}"
        raise Problem(422, "InvalidRounds", f"{entry.target}: {what}")
    try:
        return host.start_rounds(entry, trackers)
    except RoundsRefused as error:
        raise Problem(409, "RoundsRefused", str(error)) from error


def _startable(host: Host) -> str:
    """Return the one target that needs nothing but triggers; "" if there is none, or several."""
    able = [
        target
        for target in host.node.targets
        if (declared := host.node.inputs(target))
        and all(kind is types.TRIGGER for kind in declared.values())
    ]
    return able[0].partition("#")[0] if len(able) == 1 else ""


class StopRoundsBody(RequestBody):
    """The target whose rounds are to end; without one, those of all targets."""

    target: str | None = None


@ENDPOINTS.add("POST", "/v1/rounds/stop", "rounds-stop")
async def stop_rounds(host: Host, body: StopRoundsBody) -> answers.RoundsStopping:
    """End rounds after the one that runs."""
    ended = [
        each
        for each in host.rounds
        if not each.complete and body.target in (None, each.entry.target)
    ]
    for each in ended:
        each.stop()
    return {"target": body.target or "", "stopping": bool(ended)}


@ENDPOINTS.add("POST", "/v1/snapshot", "snapshot")
async def snapshot(host: Host) -> answers.SnapshotWritten:
    """Write the node's state to its state directory now."""
    size = await host.save()
    return {"state_dir": str(host.resolved.state_dir), "bytes": size}


@ENDPOINTS.add("GET", "/v1/models", "models")
async def models(host: Host) -> answers.ModelList:
    """List the slots with a model."""
    held = weights.models_of(host.node)
    return {"models": [{"slot": each.slot, "type_name": each.type_name} for each in held]}


@ENDPOINTS.add("GET", "/v1/models/{slot}", media=FILE)
async def model(host: Host, slot: str) -> StreamedResponse:
    """Send the model of a slot, with its weights as of no op under way, as an ONNX file.

    One is made at a time; another request is refused meanwhile (503).
    """
    held = [each.slot for each in weights.models_of(host.node)]
    try:
        name = weights.chosen(held, slot, where="this node")
    except weights.NoSuchModel as error:
        raise Problem(404, "NoSuchModel", str(error)) from error
    if not host.exporting.available_tokens:
        text = "another model is being exported; ask again when it is done"
        raise Problem(503, "Busy", text, headers={"Retry-After": "1"})
    # A copy: a component changes only by ops of the program.
    make, initial = host.node.copy_of(name), partial(host.initial, name)
    ended = [row for each in host.rounds for row in each.finished()[-1:]]
    if not ended and host.history is not None:
        with contextlib.suppress(StorageError):
            # Rounds from before the start.
            read = partial(host.history.read, last=1)
            ended = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
    export = partial(
        weights.exported,
        name,
        make,
        initial,
        weights.WeightsOrigin.of_rounds(host.artifact_sha256, ended),
        partial(host.meaning, name),
    )
    data = await trio.to_thread.run_sync(export, abandon_on_cancel=True, limiter=host.exporting)
    return Blob(data)


@ENDPOINTS.add("GET", "/v1/targets", "targets")
async def installed(host: Host) -> answers.TargetList:
    """List the installed targets with their inputs, which `invoke` and `emit` take."""
    return {
        "targets": [
            {
                "target": target,
                "inputs": {
                    name: None if node is None else node.name
                    for name, node in host.node.inputs(target).items()
                },
            }
            for target in host.node.targets
        ]
    }


@ENDPOINTS.add("POST", "/v1/reload", "reload")
async def reload(host: Host) -> answers.Reloaded:
    """Read the configuration again; a refused one changes nothing, and the answer says why."""
    if host.phase != "ready":
        raise Problem(409, "NotReady", f"the node is {host.phase}; reload it once it is ready")
    changes = host.reload()
    return {"changed": list(changes.applied), "needs_restart": list(changes.needs_restart)}


@ENDPOINTS.add("POST", "/v1/stop", "stop")
async def stop(host: Host) -> answers.Stopping:
    """Stop the daemon in order; the answer comes before it is done."""
    logger.info("stop asked for", extra={"by": "control"})
    host.stop()
    return {"stopping": True}


@ENDPOINTS.add("POST", "/v1/restart", "restart")
async def restart(host: Host) -> answers.Restarting:
    """Stop and begin anew, with the files as they are then, once no execution is under way."""
    try:
        host.restart()
    except RestartRefused as error:
        raise Problem(409, "RestartRefused", str(error)) from error
    logger.info("restart asked for", extra={"by": "control"})
    return {"restarting": True}


class FetchUpgradeBody(RequestBody):
    """An artifact that a connected peer offers, and the bytes that it may have."""

    artifact_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    max_bytes: int | None = Field(None, ge=1, le=MAX_ARTIFACT_BYTES)


@ENDPOINTS.add("POST", "/v1/upgrade/fetch", "upgrade-fetch")
async def fetch_upgrade(host: Host, body: FetchUpgradeBody) -> answers.UpgradeFetch:
    """Begin to fetch what a peer offers to the cache, or tell how far that is; nothing runs."""
    try:
        progress = host.fetch_upgrade(body.artifact_sha256, body.max_bytes)
    except NotOffered as error:
        raise Problem(409, "NotOffered", str(error)) from error
    return progress  # type: ignore[return-value]


# -- peers -------------------------------------------------------------------------------------


@ENDPOINTS.add("GET", "/v1/peers", "peers")
async def peers(host: Host) -> answers.PeerList:
    """List connected peers, and those that are dialled."""
    return {
        "peers": views.peers(host),
        "wanted": [views.wanted(w) for w in host.backend.wanted()],
    }


@ENDPOINTS.add("GET", "/v1/peers/{peer}", "peer")
async def show_peer(host: Host, peer: PeerId) -> answers.PeerDetail:
    """Show one peer, and every rule that decides about it."""
    standing = host.node.peer_standing(peer)
    return {
        "peer": str(peer),
        "connected": next((p for p in views.peers(host) if p["peer"] == str(peer)), None),
        "addresses": [str(address) for address in standing.addresses],
        "health": standing.health.value,
        "usable": standing.usable,
        "why": views.why(host, peer),
    }


class ConnectBody(RequestBody):
    """The addresses to dial; without any, those that the node knows."""

    addresses: list[str] = Field(default_factory=list)


@ENDPOINTS.add("POST", "/v1/peers/{peer}/connect", "peers-connect")
async def connect(host: Host, peer: PeerId, body: ConnectBody) -> answers.PeerConnecting:
    """Dial a peer, and again whenever it is gone."""
    requested = [_address(text) for text in body.addresses]
    addresses = requested or list(host.node.peer_standing(peer).addresses)
    if not addresses and host.routing():
        addresses = list((await _found(host, peer)).addresses)
    if not addresses:
        raise Problem(409, "NoAddress", f"no address of {peer} is known; give one")
    host.backend.keep_connected(peer, addresses)
    logger.info("peer wanted", extra={"peer": str(peer), "by": "control"})
    return {
        "peer": str(peer),
        "addresses": [str(a) for a in addresses],
        "connected": _is_up(host, peer),
    }


@ENDPOINTS.add("POST", "/v1/peers/{peer}/find", "peers-find")
async def find_peer(host: Host, peer: PeerId) -> answers.PeerFound:
    """Find a peer by asking others, and try the addresses; it is not connected."""
    return (await _found(host, peer)).as_json()  # type: ignore[return-value]


async def _found(host: Host, peer: PeerId) -> Found:
    if peer == host.node.peer_id:
        raise Problem(400, "WrongArgument", f"{peer} is this node itself")
    return await host.find_peer(peer)


@ENDPOINTS.add("GET", "/v1/addresses", "addresses")
async def address_book(host: Host) -> answers.AddressBookView:
    """Show the address book: all peers that the node knows, with their addresses."""
    return {
        "peers": [
            {"peer": str(peer), "addresses": [str(address) for address in addresses]}
            for peer, addresses in host.node.address_book().items()
        ]
    }


class AddressesBody(RequestBody):
    """Addresses to put into the book."""

    addresses: list[str] = Field(min_length=1, max_length=MAX_ADDRESSES_PER_PEER)


@ENDPOINTS.add("POST", "/v1/peers/{peer}/addresses/add", "peers-add")
async def add_addresses(host: Host, peer: PeerId, body: AddressesBody) -> answers.PeerAddresses:
    """Add addresses of a peer to the book; they stay there, also over a restart."""
    addresses = [_address(text) for text in body.addresses]
    try:
        host.node.add_addresses(peer, addresses)
    except AddressBookFull as error:
        raise Problem(409, "AddressBookFull", str(error)) from error
    logger.info("addresses added", extra={"peer": str(peer), "by": "control"})
    return _in_book(host, peer)


class AddressBody(RequestBody):
    """One address in the book."""

    address: str


@ENDPOINTS.add("POST", "/v1/peers/{peer}/addresses/drop", "peers-drop")
async def drop_address(host: Host, peer: PeerId, body: AddressBody) -> answers.AddressDropped:
    """Drop one address of a peer from the book, and dial it there no more."""
    address = _address(body.address)
    was_known = host.node.drop_address(peer, address)
    for wanted in host.backend.wanted():
        if wanted.peer == peer and address in wanted.addresses:
            left = [each for each in wanted.addresses if each != address]
            if left:
                host.backend.keep_connected(peer, left)
            else:
                host.backend.forget(peer)
    logger.info("address dropped", extra={"peer": str(peer), "by": "control"})
    return {**_in_book(host, peer), "was_known": was_known}


@ENDPOINTS.add("POST", "/v1/peers/{peer}/forget", "peers-forget")
async def forget(host: Host, peer: PeerId) -> answers.PeerForgotten:
    """Drop all addresses of a peer and dial it no more; a connection stays."""
    was_known = host.node.forget_peer(peer)
    host.backend.forget(peer)
    logger.info("peer forgotten", extra={"peer": str(peer), "by": "control"})
    return {"peer": str(peer), "was_known": was_known}


def _in_book(host: Host, peer: PeerId) -> answers.PeerAddresses:
    return {
        "peer": str(peer),
        "addresses": [str(address) for address in host.node.peer_standing(peer).addresses],
    }


def _address(text: str) -> Multiaddr:
    try:
        return parse_address(text)
    except BbnodeError as error:
        raise Problem(400, "InvalidAddress", str(error)) from error


@ENDPOINTS.add("POST", "/v1/peers/{peer}/disconnect", "peers-disconnect")
async def disconnect(host: Host, peer: PeerId) -> answers.PeerDropped:
    """Close the connection with a peer and dial it no more; it may still dial us."""
    was_connected = _is_up(host, peer)
    host.backend.forget(peer)
    host.backend.disconnect(peer)
    logger.info("peer disconnected", extra={"peer": str(peer), "by": "control"})
    return {"peer": str(peer), "was_connected": was_connected}


@ENDPOINTS.add("POST", "/v1/peers/{peer}/block", "peers-block")
async def block(host: Host, peer: PeerId) -> answers.PeerBlocked:
    """Deny a peer in both directions, also after a restart, and close the connection with it."""
    if peer == host.node.peer_id:
        raise Problem(409, "OwnPeer", "a node can't block itself")
    was_connected = _is_up(host, peer)
    host.access.block(peer)
    host.backend.forget(peer)
    host.backend.disconnect(peer)
    logger.warning("peer blocked", extra={"peer": str(peer), "by": "control"})
    return {"peer": str(peer), "blocked": True, "was_connected": was_connected}


@ENDPOINTS.add("POST", "/v1/peers/{peer}/allow", "peers-allow")
async def allow(host: Host, peer: PeerId) -> answers.PeerAllowed:
    """Deny a peer no more; it, or `connect`, has to dial again."""
    host.access.allow(peer)
    logger.info("peer allowed", extra={"peer": str(peer), "by": "control"})
    return {"peer": str(peer), "blocked": False, "why": views.why(host, peer)}


@ENDPOINTS.add("POST", "/v1/access/reload", "access-reload")
async def reload_access(host: Host) -> answers.AccessReloaded:
    """Use a membership or a revocation list that was put into the state directory."""
    return {"taken": host.access.reload_files()}


class PingBody(RequestBody):
    """The peer, and how long to wait for it."""

    peer: str
    timeout_s: float = Field(PING_TIMEOUT_S, ge=0, le=MAX_WAIT_S)


@ENDPOINTS.add("POST", "/v1/ping", "ping")
async def ping(host: Host, body: PingBody) -> answers.Pong:
    """Measure one round trip to a connected peer."""
    peer = _connected(host, body.peer)
    with trio.move_on_after(body.timeout_s):
        rtt_s = await host.ping(peer)
        return {"peer": str(peer), "rtt_ms": round(rtt_s * 1000, 3)}
    raise Problem(504, "Timeout", f"{peer} did not answer a ping within {body.timeout_s:g} s")


class DialBackBody(RequestBody):
    """The peer that is to dial; without one, any."""

    peer: str | None = None


@ENDPOINTS.add("POST", "/v1/dial-back", "dial-back")
async def dial_back(host: Host, body: DialBackBody) -> answers.DialledBack:
    """Have a peer dial this node's addresses."""
    peer = None if body.peer is None else _connected(host, body.peer)
    return (await host.dial_back(peer)).as_json()  # type: ignore[return-value]


# -- executions --------------------------------------------------------------------------------


class InvokeBody(RequestBody):
    """A target and its inputs by name; with `wait_s`, the answer has the outcome.

    `deadline_s` is the time of the execution itself; without, its ops and requests have their own.
    """

    target: str
    inputs: dict[str, Any] = Field(default_factory=dict)
    wait_s: float = Field(0.0, ge=0, le=MAX_WAIT_S)
    deadline_s: float | None = Field(None, ge=1e-9, le=MAX_DEADLINE_S)
    exact: bool = False


@ENDPOINTS.add("POST", "/v1/invoke", "invoke")
async def invoke(host: Host, body: InvokeBody) -> answers.ExecutionResult:
    """Start one execution of a target."""
    declared = host.node.inputs(body.target)
    inputs = {name: to_value(name, v, declared.get(name)) for name, v in body.inputs.items()}
    later = host.later(body.target, None)
    deadline_ns = nanoseconds(body.deadline_s)
    execution = host.node.invoke(body.target, inputs, deadline_ns=deadline_ns)
    return await _finish(host, execution, later, body)


class EmitBody(RequestBody):
    """Either an input of a target with its value, or the kind of a bus event."""

    target: str | None = None
    input: str | None = None
    value: Any = None
    wait_s: float = Field(0.0, ge=0, le=MAX_WAIT_S)
    deadline_s: float | None = Field(None, ge=1e-9, le=MAX_DEADLINE_S)
    exact: bool = False
    kind: int | None = None


@ENDPOINTS.add("POST", "/v1/emit", "emit")
async def emit(host: Host, body: EmitBody) -> answers.ExecutionResult | answers.Emitted:
    """Send a target one input, or put an event of the program's on the bus."""
    if body.kind is not None:
        if body.model_fields_set != {"kind"}:
            raise Problem(400, "InvalidField", "'kind' stands alone: a bus event has no value")
        host.node.publish_event(body.kind)
        host.driver.wake()
        return {"kind": body.kind}
    if body.target is None or body.input is None or body.value is None:
        raise Problem(400, "MissingField", "the body has to have 'target', 'input' and 'value'")
    value = to_value(body.input, body.value, host.node.inputs(body.target).get(body.input))
    later = host.later(body.target, body.input)
    deadline_ns = nanoseconds(body.deadline_s)
    execution = host.node.deliver_event(body.target, body.input, value, deadline_ns=deadline_ns)
    return await _finish(host, execution, later, body)


async def _finish(
    host: Host, execution: int, later: frozenset[str], body: InvokeBody | EmitBody
) -> answers.ExecutionResult:
    """Return the state of an execution, after waiting at most `wait_s` until it is over."""
    with host.outcomes.collect(execution, later) as outcome:
        host.driver.wake()
        await outcome.wait(body.wait_s)
    exact = Encoder()
    answer = outcome.as_json(summarize)
    answer["values"] = {n: exact(v) for n, v in outcome.outputs.items()} if body.exact else None
    return answer  # type: ignore[return-value]


# -- traces, events and logs -------------------------------------------------------------------


@ENDPOINTS.add("GET", "/v1/trace", "tracing")
async def traced(host: Host) -> answers.Traced:
    """Show if ops are traced, and of which executions something is kept."""
    return {"tracing": host.trace.on, "executions": host.trace.executions()}


class TraceBody(RequestBody):
    """Tracing, on or off."""

    on: bool


@ENDPOINTS.add("PUT", "/v1/trace", "tracing")
async def set_tracing(host: Host, body: TraceBody) -> answers.Tracing:
    """Switch tracing of ops on or off."""
    host.trace.switch(on=body.on)
    logger.info("tracing", extra={"on": body.on})
    return {"tracing": body.on}


class TraceQuery(Query):
    """The peer whose request number `id` is asked for; without, `id` is an execution."""

    peer: str | None = None


@ENDPOINTS.add("GET", "/v1/trace/{id}", "trace")
async def trace(host: Host, id: int, query: TraceQuery) -> answers.TraceView:  # noqa: A002
    """Show the steps of one execution, or of those that a peer's request started."""
    executions = [id]
    if query.peer is not None:
        executions = host.trace.started_by(str(known_peer(host, query.peer)), id)
    steps: list[answers.Json] = [
        event for execution in executions for event in host.trace.of_execution(execution)
    ]
    now = views.executions(host)
    running = [e for e in now["executions"] if e["execution"] in executions]
    waits = [w for w in now["waiting"] if w["execution"] in executions]
    if not (steps or running or waits) and query.peer is None:
        why = (
            "it is over and forgotten, or never was"
            if host.trace.on
            else "tracing is off: switch it on (`bbnode trace --on`) before it starts"
        )
        raise Problem(404, "UnknownExecution", f"nothing is known of execution {id}; {why}")
    return {
        "peer_id": str(host.node.peer_id),
        "tracing": host.trace.on,
        "executions": executions,
        "running": running,
        "waiting": waits,
        "steps": steps,
    }


class EventsQuery(Query):
    """The number of kept events to begin with, types of events, and if new ones follow."""

    last: int = Field(0, ge=0, le=KEPT_ITEMS)
    type: list[str] = Field(default_factory=list)
    follow: bool = True


@ENDPOINTS.add("GET", "/v1/events", "event", media=LINES)
async def events(host: Host, query: EventsQuery) -> Lines:
    """Stream events, one JSON object per line."""
    types = frozenset(query.type)

    def wanted(event: Mapping[str, Any]) -> bool:
        return not types or event.get("type") in types

    return Lines(host.events.subscribe(last=query.last, wanted=wanted), follow=query.follow)


class LogsQuery(Query):
    """The number of kept lines to begin with, the least severe level, and if new ones follow."""

    last: int = Field(100, ge=0, le=KEPT_ITEMS)
    level: Level = "debug"
    follow: bool = True


@ENDPOINTS.add("GET", "/v1/logs", "log", media=LINES)
async def log_lines(host: Host, query: LogsQuery) -> Lines:
    """Stream lines of the log, one JSON object per line."""
    levels = logging.getLevelNamesMapping()
    least = levels[query.level.upper()]

    def wanted(line: Mapping[str, Any]) -> bool:
        return levels.get(str(line.get("level", "")).upper(), 0) >= least

    return Lines(host.logs.subscribe(last=query.last, wanted=wanted), follow=query.follow)


@ENDPOINTS.add("GET", "/v1/log-level", "log-level")
async def log_level(host: Host) -> answers.LogLevel:
    """Show the least severe level that is logged now."""
    return {"level": _level(host)}


def _level(host: Host) -> str:
    level = logging.getLogger(host.logger_name).getEffectiveLevel()
    return str(logging.getLevelName(level)).lower()


class LogLevelBody(RequestBody):
    """The least severe level to log."""

    level: Level


@ENDPOINTS.add("PUT", "/v1/log-level", "log-level")
async def set_log_level(host: Host, body: LogLevelBody) -> answers.LogLevelChanged:
    """Change what is logged."""
    before = _level(host)
    logs.set_level(body.level, host.logger_name)
    logged = {"level": body.level, "before": before, "by": "control"}
    logger.warning("log level changed", extra=logged)
    return {"level": body.level, "before": before}


def _is_up(host: Host, peer: PeerId) -> bool:
    return host.backend.peer_info(peer) is not None


def _connected(host: Host, text: str) -> PeerId:
    peer = known_peer(host, text)
    if not _is_up(host, peer):
        raise Problem(409, "NotConnected", f"{peer} is not connected; see `bbnode peers --why`")
    return peer
