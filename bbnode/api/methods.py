"""The questions that a node answers, of this process or a running daemon: asyncio and trio.

Rule: a method for each endpoint of the control plane, under the same name and with the answer that
`bbnode.daemon.control.answers` describes; a test compares. `bbnode/api/blocking_methods.py` is made
of this file (`scripts/blocking-methods`), and a test compares that as well.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, Self, cast

from bbnode.api.errors import InputRefused, WaitTimeout
from bbnode.api.inputs import seconds
from bbnode.api.outcome import InvokeResult
from bbnode.api.training import TrainResult, result_of
from bbnode.daemon.control import answers
from bbnode.daemon.control.client import Query, parse_answer, target

# Seconds between two requests for the peers: short enough for a script.
LOOK_EVERY_S: Final = 0.05


class AsyncLines(Protocol):
    """A stream of JSON objects, which ends with the node; close it, or leave its `async with`."""

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]: ...

    async def __anext__(self) -> dict[str, Any]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def aclose(self) -> None:
        """End the stream."""
        ...


class AsyncMethods(ABC):
    """The methods of every node.

    They raise `ControlError` where the node refuses; its `kind` is the name of the error. A node of
    this process raises `NodeStopped` if it has stopped or dies meanwhile; a daemon that can't be
    reached is `NotRunning`.
    """

    @abstractmethod
    async def fetch(
        self, method: str, wanted: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """Send one request of the control plane; return the status and bytes of its answer."""

    @abstractmethod
    async def stream(self, path: str, query: Query) -> AsyncLines:
        """Subscribe to the lines of an endpoint, now."""

    @abstractmethod
    async def download(self, path: str) -> bytes:
        """Return the bytes of a file that an endpoint sends."""

    @abstractmethod
    async def invoke(
        self,
        target: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        deadline_s: float | None = None,
    ) -> InvokeResult:
        """Run one execution of a target, and return it with its outputs once it has ended.

        `inputs` by name: arrays of the declared dtype and shape, numbers and lists of them (which
        get the declared dtype), texts, bytes, or "trigger". Cancelling the wait leaves the
        execution running, and so does the timeout; 0 seconds start it and return at once.
        `deadline_s` is the time limit of the execution itself, including its requests to peers: it
        fails when that is over. Without it, its ops and requests have the time that the program
        sets, else that of the node's limit `wait_s`.

        Raises:
            ExecutionFailed: an op of it failed; `.result` has the reasons.
            InvokeTimeout: it continues; `.result` has its outputs so far.
            InputRefused: a value is of no type that a program takes.
            UnknownTarget: the node has no such target; nothing was started.
            EntryError: it does not take these inputs (`UnknownInput`, `MissingInput`,
                `InputTypeMismatch`, `InputShapeMismatch`, …), or is too busy; nothing was started.
            ControlError: a daemon raises this instead of the last two; `kind` names them.
        """

    @abstractmethod
    async def emit(
        self,
        target: str,
        input: str,  # noqa: A002 - as the endpoint calls it
        value: Any,
        *,
        timeout_s: float = 60.0,
        deadline_s: float | None = None,
    ) -> InvokeResult:
        """Send a target one input, which starts an execution; otherwise as `invoke`."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop the node cleanly and wait for it. Idempotent.

        Everything that must be kept is on disk then. It takes `node.stop_grace_s` (5 s) at most.
        """

    @abstractmethod
    async def _sleep(self, seconds: float) -> None:
        """Wait for this many seconds."""

    # -- state ---------------------------------------------------------------------------------

    async def status(self) -> answers.Status:
        """Return everything about the node at one moment."""
        return cast("answers.Status", await self._ask("GET", "/v1/status"))

    async def readyz(self) -> answers.Readiness:
        """Return whether the node is ready, and the reasons if not."""
        # A node that is not ready answers with 503, and the reasons.
        _, data = await self.fetch("GET", "/readyz")
        return cast("answers.Readiness", parse_answer(200, data))

    async def healthz(self) -> bool:
        """Return True while the node's loop runs and polls its engine."""
        status, _ = await self.fetch("GET", "/healthz")
        return status == 200

    async def metrics(self) -> str:
        """Return all metrics, as Prometheus reads them."""
        _, data = await self.fetch("GET", "/metrics")
        return data.decode("utf-8", "replace")

    async def describe(self) -> dict[str, Any]:
        """Return the OpenAPI document of the control plane."""
        return await self._ask("GET", "/openapi.json")

    async def config(self) -> answers.ConfigView:
        """Return the configuration in force, and the origin of each key that was set."""
        return cast("answers.ConfigView", await self._ask("GET", "/v1/config"))

    async def executions(self) -> answers.ExecutionsView:
        """Return the running executions, and what each waits for."""
        return cast("answers.ExecutionsView", await self._ask("GET", "/v1/executions"))

    async def rounds(self, last: int | None = None, *, since: int = 0) -> answers.RoundsAnswer:
        """Return the rounds that the node ran by itself, across restarts, oldest first.

        For each target the `last` rounds, by default as many as the node lists, after round
        `since`.
        """
        query = {"since": since, **({} if last is None else {"last": last})}
        return cast("answers.RoundsAnswer", await self._ask("GET", "/v1/rounds", query=query))

    async def start_rounds(
        self,
        invoke: Mapping[str, Any] | None = None,
        trackers: Sequence[Mapping[str, Any]] | None = None,
    ) -> answers.RoundsStarted:
        """Start rounds of a target on the node; returns when they have begun.

        `invoke` has the keys of an `[[invoke]]` entry; without a target it is the one that needs
        nothing but triggers. `times` counts from now on; 0 is for ever. `trackers` are entries as
        `[[trackers]]`, by default those of the configuration. Raises ControlError: `RoundsRefused`
        while the target makes rounds, `InvalidRounds`.
        """
        body = {
            "invoke": dict(invoke or {}),
            **({} if trackers is None else {"trackers": [dict(each) for each in trackers]}),
        }
        return cast("answers.RoundsStarted", await self._ask("POST", "/v1/rounds", body))

    async def stop_rounds(self, target: str | None = None) -> answers.RoundsStopping:
        """End the rounds of a target, or of all targets, after the current one."""
        body = {} if target is None else {"target": target}
        return cast("answers.RoundsStopping", await self._ask("POST", "/v1/rounds/stop", body))

    async def train(
        self,
        rounds: int = 1,
        *,
        target: str | None = None,
        inputs: Mapping[str, Any] | None = None,
        trackers: Sequence[Mapping[str, Any]] | None = None,
        **invoke: Any,
    ) -> TrainResult:
        """Run `rounds` rounds of a target, and return them once they have ended.

        The node runs them by itself, one after the other, keeps them (`rounds()`, `bbnode
        rounds`) and passes them to its trackers. Cancelling the wait leaves them running; end
        them with `stop_rounds`.

        Args:
            rounds: how many, at least 1.
            target: a class; by default the one that needs nothing but triggers.
            inputs: its inputs but triggers: numbers, lists of them, or texts as {"text": …}.
            trackers: entries as `[[trackers]]`, such as {"kind": "tensorboard"}.
            invoke: further keys of `[[invoke]]`: `best="loss"` keeps the weights of the best
                round, `patience=5` ends the rounds when five were not better, `until=0.95` when
                one is as good; `wait_for={"class": "client", "peers": 3}`, `every_s`.

        Raises:
            RoundsFailed: no round ended well; `.result` has the reasons.
            ControlError: `RoundsRefused` while the target makes rounds; `InvalidRounds`.
        """
        entry = {"times": rounds, "inputs": dict(inputs or {}), **invoke}
        if target is not None:
            entry["target"] = target
        if rounds < 1:
            raise InputRefused(f"rounds is {rounds}; give 1 or more")
        # Subscribed before the rounds begin, so that their end is not missed.
        async with await self.events(["rounds_complete"]) as ends:
            started = await self.start_rounds(entry, trackers)
            async for line in ends:
                if line["event"]["target"] == started["target"]:
                    break
        answer = await self.rounds(rounds, since=started["done_before"])
        rounds_of_target = [one for one in answer["rounds"] if one["target"] == started["target"]]
        return result_of(started, answer, rounds_of_target)

    async def snapshot(self) -> answers.SnapshotWritten:
        """Write the node's state to its state directory now."""
        return cast("answers.SnapshotWritten", await self._ask("POST", "/v1/snapshot"))

    async def models(self) -> answers.ModelList:
        """Return the slots with a model."""
        return cast("answers.ModelList", await self._ask("GET", "/v1/models"))

    async def installed(self) -> answers.TargetList:
        """Return the installed targets, each with its inputs and their types."""
        return cast("answers.TargetList", await self._ask("GET", "/v1/targets"))

    async def model(self, slot: str) -> bytes:
        """Return the model of a slot with its weights, as the bytes of an ONNX file.

        The weights are those before the op that is running.
        """
        return await self.download(f"/v1/models/{slot}")

    async def reload(self) -> answers.Reloaded:
        """Have the node read its configuration again; an invalid one changes nothing."""
        return cast("answers.Reloaded", await self._ask("POST", "/v1/reload"))

    async def restart(self) -> answers.Restarting:
        """Have the node stop and start again between executions, with the files as they are then.

        Raises ControlError (`RestartRefused`) if the process is another program's.
        """
        return cast("answers.Restarting", await self._ask("POST", "/v1/restart"))

    async def fetch_upgrade(
        self, artifact_sha256: str, max_bytes: int | None = None
    ) -> answers.UpgradeFetch:
        """Fetch the program that a connected peer offers to the cache, or return the progress.

        It is not run; `bbnode upgrade` shows it and asks. Raises ControlError (`NotOffered`).
        """
        body = {
            "artifact_sha256": artifact_sha256,
            **({} if max_bytes is None else {"max_bytes": max_bytes}),
        }
        return cast("answers.UpgradeFetch", await self._ask("POST", "/v1/upgrade/fetch", body))

    # -- peers ---------------------------------------------------------------------------------

    async def peers(self) -> answers.PeerList:
        """Return the connected peers, and those being dialled."""
        return cast("answers.PeerList", await self._ask("GET", "/v1/peers"))

    async def wait_for_peers(
        self, count: int = 1, peer_class: str | None = None, *, timeout_s: float = 30.0
    ) -> list[answers.PeerView]:
        """Return the connected peers once there are `count`, of one class if given.

        A peer whose data are still being compared does not count yet.

        Raises WaitTimeout, which says how many there are.
        """
        ends_s = time.monotonic() + seconds(timeout_s)
        while True:
            connected = [
                peer
                for peer in (await self.peers())["peers"]
                if (peer_class is None or peer_class in peer["classes"]) and not peer.get("pending")
            ]
            if len(connected) >= count:
                return connected
            if time.monotonic() >= ends_s:
                of = "" if peer_class is None else f" of class {peer_class!r}"
                raise WaitTimeout(
                    f"{len(connected)} of {count} peers{of} connected within {timeout_s:g} s; "
                    "start them, or wait longer (timeout_s)"
                )
            await self._sleep(LOOK_EVERY_S)

    async def show_peer(self, peer: str) -> answers.PeerDetail:
        """Return one peer, and every rule that decides about it."""
        return cast("answers.PeerDetail", await self._ask("GET", f"/v1/peers/{peer}"))

    async def connect(self, peer: str, addresses: Sequence[str] = ()) -> answers.PeerConnecting:
        """Dial a peer, and again whenever it is gone; by default at its known addresses."""
        body = {"addresses": list(addresses)}
        answer = await self._ask("POST", f"/v1/peers/{peer}/connect", body)
        return cast("answers.PeerConnecting", answer)

    async def disconnect(self, peer: str) -> answers.PeerDropped:
        """Close the connection with a peer and stop dialling it; it may still dial this node."""
        return cast("answers.PeerDropped", await self._ask("POST", f"/v1/peers/{peer}/disconnect"))

    async def block(self, peer: str) -> answers.PeerBlocked:
        """Deny a peer in both directions, also after a restart."""
        return cast("answers.PeerBlocked", await self._ask("POST", f"/v1/peers/{peer}/block"))

    async def allow(self, peer: str) -> answers.PeerAllowed:
        """Remove a peer from the block list."""
        return cast("answers.PeerAllowed", await self._ask("POST", f"/v1/peers/{peer}/allow"))

    async def address_book(self) -> answers.AddressBookView:
        """Return all peers that the node knows, with their addresses."""
        return cast("answers.AddressBookView", await self._ask("GET", "/v1/addresses"))

    async def add_addresses(self, peer: str, addresses: Sequence[str]) -> answers.PeerAddresses:
        """Add addresses of a peer to the book."""
        body = {"addresses": list(addresses)}
        answer = await self._ask("POST", f"/v1/peers/{peer}/addresses/add", body)
        return cast("answers.PeerAddresses", answer)

    async def drop_address(self, peer: str, address: str) -> answers.AddressDropped:
        """Drop one address of a peer from the book, and stop dialling it."""
        answer = await self._ask("POST", f"/v1/peers/{peer}/addresses/drop", {"address": address})
        return cast("answers.AddressDropped", answer)

    async def forget(self, peer: str) -> answers.PeerForgotten:
        """Drop all addresses of a peer and stop dialling it; a connection stays."""
        return cast("answers.PeerForgotten", await self._ask("POST", f"/v1/peers/{peer}/forget"))

    async def reload_access(self) -> answers.AccessReloaded:
        """Use a membership or a revocation list that was put into the state directory."""
        return cast("answers.AccessReloaded", await self._ask("POST", "/v1/access/reload"))

    async def ping(self, peer: str, *, timeout_s: float = 10.0) -> answers.Pong:
        """Measure one round trip to a connected peer."""
        body = {"peer": peer, "timeout_s": float(timeout_s)}
        return cast("answers.Pong", await self._ask("POST", "/v1/ping", body))

    async def dial_back(self, peer: str | None = None) -> answers.DialledBack:
        """Have a peer, by default any, dial this node's addresses."""
        body = {} if peer is None else {"peer": peer}
        return cast("answers.DialledBack", await self._ask("POST", "/v1/dial-back", body))

    async def find_peer(self, peer: str) -> answers.PeerFound:
        """Find a peer by asking others (`routing.dht`), and try the addresses that they return."""
        return cast("answers.PeerFound", await self._ask("POST", f"/v1/peers/{peer}/find"))

    # -- traces, events and logs ---------------------------------------------------------------

    async def publish_event(self, kind: int) -> answers.Emitted:
        """Put an event of the program on the bus of the node."""
        return cast("answers.Emitted", await self._ask("POST", "/v1/emit", {"kind": kind}))

    async def traced(self) -> answers.Traced:
        """Return whether ops are traced, and the executions of which a trace is kept."""
        return cast("answers.Traced", await self._ask("GET", "/v1/trace"))

    async def set_tracing(self, on: bool) -> answers.Tracing:
        """Switch tracing of ops on or off."""
        return cast("answers.Tracing", await self._ask("PUT", "/v1/trace", {"on": on}))

    async def trace(self, execution: int, *, peer: str | None = None) -> answers.TraceView:
        """Return the steps of an execution, or of those that request number N of a peer started."""
        query = {} if peer is None else {"peer": peer}
        answer = await self._ask("GET", f"/v1/trace/{execution}", query=query)
        return cast("answers.TraceView", answer)

    async def events(
        self, types: Sequence[str] = (), *, last: int = 0, follow: bool = True
    ) -> AsyncLines:
        """Subscribe to events, now: `last` kept ones first, then new ones unless `follow` is False.

        Each is an object with `seq`, `time_s`, `dropped` (events lost by a slow reader before this
        one) and `event`, which has a `type`; of the `types`, if given.
        """
        query: dict[str, Any] = {"last": last, "follow": str(follow).lower()}
        return await self.stream("/v1/events", {**query, **({"type": [*types]} if types else {})})

    async def finished_rounds(self) -> AsyncLines:
        """Subscribe to the rounds that the node runs by itself: an event at the end of each."""
        return await self.events(["round_finished"])

    async def log_lines(
        self,
        level: Literal["debug", "info", "warning", "error"] = "info",
        *,
        last: int = 100,
        follow: bool = True,
    ) -> AsyncLines:
        """Subscribe to the log: `last` kept lines first, then new ones; each has a `log`."""
        query: dict[str, Any] = {"last": last, "level": level, "follow": str(follow).lower()}
        return await self.stream("/v1/logs", query)

    async def log_level(self) -> answers.LogLevel:
        """Return the least severe level that is logged."""
        return cast("answers.LogLevel", await self._ask("GET", "/v1/log-level"))

    async def set_log_level(
        self, level: Literal["debug", "info", "warning", "error"]
    ) -> answers.LogLevelChanged:
        """Change the least severe level that is logged."""
        answer = await self._ask("PUT", "/v1/log-level", {"level": level})
        return cast("answers.LogLevelChanged", answer)

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Query | None = None,
    ) -> dict[str, Any]:
        sent = {} if body is None and method == "POST" else body
        return parse_answer(*await self.fetch(method, target(path, query), sent))
