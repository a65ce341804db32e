"""`bbnode demo`: a server and its clients, each a daemon of its own, train one model.

Rule: the demo does what a user would do by hand: compile, write configurations, start
daemons, ask them over their control sockets, stop them. Every wait has a deadline, and its message
says which daemons are missing.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import trio
from rich.console import Console

from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import parse_artifact, serialize
from bbnode.daemon.control.async_client import AsyncControlClient
from bbnode.daemon.control.errors import ControlError, ControlTimeout, NotRunning
from bbnode.daemon.demo.nodes import DemoNode, choose_port, make_folder, make_nodes
from bbnode.daemon.demo.report import draw_accuracy, round_row, write_report
from bbnode.daemon.demo.view import DemoView, summary_table
from bbnode.ir.errors import DeploymentError, EnvironmentFault

PROGRAM = "bbnode.examples.federated_digits:FederatedRound"

# A cohort's deadline. A local training takes well under a second, but the first round also
# imports scikit-learn in every client at once: 2 to 4 s on two cores, more on a busy machine.
# A killed client costs one round this long and no more.
ROUND_DEADLINE_S = 10.0
# How long the server waits for all clients at the start.
JOIN_TIMEOUT_S = 20.0
# From start to an answering control socket: imports of five processes on two cores.
START_TIMEOUT_S = 30.0
# A server that was killed may be started again by hand within this.
SERVER_GONE_TIMEOUT_S = 60.0
# Beyond the rounds' own deadlines: evaluation, checkpoints, a busy machine.
SLACK_PER_ROUND_S = 5.0
# A daemon stops within node.stop_grace_s (5 s), if need be by its own last resort; the rest is for
# a machine with more daemons than cores.
STOP_TIMEOUT_S = 30.0
ASK_TO_STOP_S = 1.0
ASK_EVERY_S = 0.1
CATCH_UP_EVERY_S = 1.0


class DemoFailed(EnvironmentFault):
    """The demo could not do all its rounds; the message says why."""


class DemoExtraMissing(DeploymentError):
    """The demo needs packages of the `demo` extra."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of the command line."""

    clients: int = 4
    rounds: int = 20
    split: str = "iid"
    seed: int = 0
    out: Path = Path("demo-out")
    port: int = 0
    as_json: bool = False


def run_demo(options: DemoOptions) -> int:
    """Run the demo; 0 when all rounds were made. Raises DemoFailed and the like otherwise."""
    missing = [name for name in ("sklearn", "matplotlib") if find_spec(name) is None]
    if missing:
        raise DemoExtraMissing(
            f"the demo needs {' and '.join(missing)}; install them with: pip install 'bbnode[demo]'"
        )
    return trio.run(Demo(options).run)


class Demo:
    """One run of the demo."""

    def __init__(self, options: DemoOptions) -> None:
        """Prepare a run; nothing is written or started yet."""
        self._options = options
        self._out = options.out.absolute()
        self._console = Console(stderr=options.as_json)
        self._quorum = max(1, -(-3 * options.clients // 4))  # three quarters, rounded up
        self._rows: dict[int, dict[str, Any]] = {}
        self._complete = trio.Event()
        self._absent: list[str] | None = None
        self._server: DemoNode
        self._clients: list[DemoNode]
        self._view: DemoView

    async def run(self) -> int:
        """Compile, start, watch, stop, report."""
        started = time.monotonic()
        port = choose_port(self._options.port)
        nodes = make_folder(self._out)
        artifact, digest = self._compile(nodes)
        self._server, self._clients = make_nodes(
            nodes,
            artifact=artifact,
            artifact_sha256=digest,
            clients=self._options.clients,
            port=port,
            rounds=self._options.rounds,
            quorum=self._quorum,
            wait_s=JOIN_TIMEOUT_S,
            data={
                "dataset": "digits",
                "partition": self._options.split,
                "seed": self._options.seed,
            },
        )
        self._view = DemoView(
            self._console, rounds=self._options.rounds, names={n.peer: n.name for n in self._all}
        )
        failure: str | None = None
        try:
            with self._view:
                failure = await self._start_and_watch()
        finally:
            with trio.CancelScope(shield=True):
                await self._stop_all()
        self._report(digest, time.monotonic() - started)
        if failure is not None:
            raise DemoFailed(failure)
        return 0

    @property
    def _all(self) -> list[DemoNode]:
        return [self._server, *self._clients]

    def _compile(self, nodes: Path) -> tuple[Path, str]:
        from bbnode.daemon.artifacts.build import compile_module

        args = {
            "clients": self._options.clients,
            "quorum": self._quorum,
            "deadline_s": ROUND_DEADLINE_S,
            "seed": self._options.seed,
        }
        data = serialize(compile_module(PROGRAM, args))
        path = nodes / "artifact.onnx"
        paths.write_atomically(path, data, mode=0o644)
        artifact = parse_artifact(data, str(path))
        self._console.print(f"compiled {PROGRAM} ({artifact.size} bytes)")
        return path, artifact.sha256

    # -- watching --------------------------------------------------------------------------

    async def _start_and_watch(self) -> str | None:
        """Start all daemons and follow the rounds; returns why it failed, or None."""
        for node in self._all:
            node.start()
            pid = node.process.pid if node.process is not None else 0
            self._view.note(f"started {node.name:<9} pid {pid:<7} {node.peer}")
        per_round = ROUND_DEADLINE_S + SLACK_PER_ROUND_S
        deadline = START_TIMEOUT_S + JOIN_TIMEOUT_S + self._options.rounds * per_round
        failure = ""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_processes)
            nursery.start_soon(self._watch_signals, nursery.cancel_scope)
            with trio.move_on_after(deadline) as limit:
                failure = await self._follow_server()
            if limit.cancelled_caught:
                failure = f"not all rounds were made within {deadline:.0f} s"
            nursery.cancel_scope.cancel()
        if nursery.cancel_scope.cancelled_caught and not self._complete.is_set() and not failure:
            return "interrupted"
        made = [row for row in self._rows.values() if row["ok"]]
        if failure:
            return failure
        if not self._complete.is_set():
            return f"stopped after {len(made)} of {self._options.rounds} rounds"
        if len(made) < self._options.rounds:
            bad = self._options.rounds - len(made)
            return f"{bad} of {self._options.rounds} rounds failed; see report.json"
        return None

    async def _follow_server(self) -> str:
        """Follow the server's rounds over restarts of it; returns why it ended early, or ""."""
        heard = trio.current_time()
        patience = START_TIMEOUT_S
        while not self._complete.is_set():
            try:
                async with AsyncControlClient(
                    paths.control_socket(self._server.state_dir)
                ) as client:
                    await self._catch_up(client)
                    await self._stream(client)
                heard, patience = trio.current_time(), SERVER_GONE_TIMEOUT_S
            except (NotRunning, ControlTimeout, ControlError):
                pass
            if (code := _exit_code(self._server)) is not None and code > 0:
                return f"the server gave up (exit code {code}): {_last_line(self._server.log)}"
            if trio.current_time() - heard > patience:
                return (
                    f"the server did not answer for {patience:.0f} s; its log is "
                    f"{self._server.log}: {_last_line(self._server.log)}"
                )
            await trio.sleep(ASK_EVERY_S)
        return ""

    async def _stream(self, client: AsyncControlClient) -> None:
        """Handle events until the server ends or all rounds are made."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._catch_up_often, nursery.cancel_scope)
            async for line in await client.stream("/v1/events"):
                self._take(line["event"])
                if self._complete.is_set():
                    break
            nursery.cancel_scope.cancel()

    async def _catch_up_often(self, stream: trio.CancelScope) -> None:
        """Ask for finished rounds on a second connection, in case an event is lost."""
        while not self._complete.is_set():
            await trio.sleep(CATCH_UP_EVERY_S)
            try:
                async with AsyncControlClient(
                    paths.control_socket(self._server.state_dir)
                ) as client:
                    await self._catch_up(client)
            except (NotRunning, ControlTimeout, ControlError):
                return  # the stream of events ends as well, and is opened anew
        stream.cancel()

    async def _catch_up(self, client: AsyncControlClient) -> None:
        answer = await client.get("/v1/rounds")
        for record in answer["rounds"]:
            self._take({"type": "round_finished", **record})
        if answer["invoke"] and answer["invoke"][0]["complete"]:
            self._complete.set()
        elif answer["invoke"] and answer["invoke"][0]["waiting_for"]:
            await self._say_who_is_missing(client)

    async def _say_who_is_missing(self, client: AsyncControlClient) -> None:
        status = await client.get("/v1/status")
        connected = {peer["peer"] for peer in status["peers"]}
        absent = [n.name for n in self._clients if n.peer not in connected]
        if absent != self._absent and absent:
            self._view.note(f"waiting for {', '.join(absent)}")
        self._absent = absent

    def _take(self, event: Mapping[str, Any]) -> None:
        match event["type"]:
            case "round_started":
                self._view.round_started(event["round"])
            case "request.response":
                self._view.answered(event["peer"])
            case "round_finished":
                row = round_row(event)
                if row["round"] not in self._rows:
                    self._rows[row["round"]] = row
                    self._view.round_finished(row)
            case "rounds_complete":
                self._complete.set()
            case "peer_up" | "peer_down":
                name = next((n.name for n in self._all if n.peer == event.get("peer")), "a peer")
                self._view.note(f"{name} {'is up' if event['type'] == 'peer_up' else 'is down'}")

    async def _watch_processes(self) -> None:
        """Report a daemon that died, and how to start it again."""
        while True:
            for node in self._all:
                code = _exit_code(node)
                if code is not None and not node.exit_reported:
                    node.exit_reported = True
                    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    self._view.note(
                        f"{node.name} ended ({how}); start it again with: {node.start_command}"
                    )
            await trio.sleep(ASK_EVERY_S)

    async def _watch_signals(self, scope: trio.CancelScope) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                scope.cancel()

    # -- the end ---------------------------------------------------------------------------

    async def _stop_all(self) -> None:
        """Ask every daemon to stop, started by us or by hand; kill ours that do not."""
        async with trio.open_nursery() as nursery:
            for node in self._all:
                nursery.start_soon(_ask_to_stop, node)
        with trio.move_on_after(STOP_TIMEOUT_S):
            for node in self._all:
                if node.process is not None:
                    await trio.to_thread.run_sync(node.process.wait, abandon_on_cancel=True)
        for node in self._all:
            if node.process is not None and node.process.poll() is None:
                self._console.print(f"{node.name} did not stop in time: killed")
                node.process.kill()
                node.process.wait()

    def _report(self, digest: str, seconds: float) -> None:
        rows = [self._rows[number] for number in sorted(self._rows)]
        options = {**asdict(self._options), "out": str(self._options.out)}
        report = write_report(
            self._out,
            options=options,
            rounds=rows,
            peers=[
                {
                    "name": node.name,
                    "class": "server" if node is self._server else "client",
                    "peer": node.peer,
                    "pid": node.process.pid if node.process is not None else None,
                }
                for node in self._all
            ],
            artifact_sha256=digest,
            seconds=seconds,
        )
        names = {node.peer: node.name for node in self._all}
        if self._options.as_json:
            sys.stdout.write(report.read_text("utf-8"))
        else:
            self._console.print(summary_table(rows, names))
        if any(row["ok"] for row in rows):
            picture = draw_accuracy(self._out, rows)
            self._console.print(f"picture  {picture}", soft_wrap=True)
        self._console.print(f"report   {report}", soft_wrap=True)
        self._console.print(f"{seconds:.1f} s in all")


async def _ask_to_stop(node: DemoNode) -> None:
    """Stop a daemon over its socket, or by a signal if it does not answer there."""
    try:
        async with AsyncControlClient(
            paths.control_socket(node.state_dir), timeout_s=ASK_TO_STOP_S
        ) as client:
            await client.post("/v1/stop")
    except (NotRunning, ControlTimeout, ControlError):
        if node.process is not None and node.process.poll() is None:
            node.process.terminate()


def _exit_code(node: DemoNode) -> int | None:
    """Return the exit code of our process, negative for a signal; None while it runs."""
    return node.process.poll() if node.process is not None else None


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text("utf-8", "replace").strip().splitlines()
    except OSError:
        return "it can't be read"
    return lines[-1] if lines else "it is empty"
