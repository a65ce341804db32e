"""A server and clients that run `tests.chaos.program`, each a daemon of its own, to be broken.

Rule: every wait is for an event and ends at a deadline; nothing sleeps. What a process owns is
read from /proc.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import parse_artifact, serialize
from bbnode.daemon.artifacts.build import compile_module
from bbnode.daemon.config import NodeConfig, sources
from bbnode.daemon.control.client import ControlClient
from bbnode.daemon.state import checkpoint
from bbnode.daemon.testbed.nodes import choose_port
from bbnode.transport.identity import create_identity
from tests.chaos.gate import GATE_VARIABLE, NAME_VARIABLE, Gates
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.chaos.program:CountingRound"
# Far beyond what a round takes on a busy machine. Where somebody does not answer a round takes
# all of it: such a test gives less.
DEADLINE_S = 30.0
# Between the starts of two rounds: a test that looks sees each, and no event is dropped.
EVERY_S = 0.2
# Beyond its deadline, for a round on a machine that does much else.
SLACK_S = 30.0


@dataclass(slots=True)
class Owned:
    """What a process holds of the machine."""

    rss_mb: float
    files: int

    @classmethod
    def of(cls, pid: int) -> Owned:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(list(Path(f"/proc/{pid}/fd").iterdir()))
        )


@dataclass(slots=True)
class Daemon:
    """One daemon: its folder, and its process while it has one."""

    name: str
    folder: Path
    peer: str
    prefix: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    @property
    def config(self) -> Path:
        return self.folder / "node.toml"

    @property
    def log(self) -> str:
        return (self.folder / "daemon.log").read_text("utf-8", "replace")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def spawn(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start it, with its output in its log."""
        with (self.folder / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", "bbnode", "run", "-c", str(self.config)],
                cwd=ROOT,
                env={**environment, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self.process

    def kill(self) -> None:
        """SIGKILL, and its end."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(PATIENCE_S)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def lives_on_for(self, seconds: float) -> None:
        """Wait, watching that the process does not end meanwhile."""
        descriptor = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            assert not poll.poll(seconds * 1000), f"{self.name} ended: {self.log[-2000:]}"
        finally:
            os.close(descriptor)

    def wait_ended(self, seconds: float) -> int:
        """Its exit code; it has to end by itself in time."""
        assert self.process is not None
        return self.process.wait(seconds)

    @contextmanager
    def control(self) -> Iterator[ControlClient]:
        with ControlClient(paths.control_socket(self.state_dir), timeout_s=PATIENCE_S) as client:
            yield client

    def get(self, what: str) -> dict[str, Any]:
        with self.control() as client:
            return client.get(f"/v1/{what}")

    def owned(self) -> Owned:
        return Owned.of(self.pid)


class Cluster:
    """A server and its clients."""

    def __init__(
        self,
        folder: Path,
        *,
        clients: int = 3,
        size: int = 4,
        every_s: float = EVERY_S,
        deadline_s: float = DEADLINE_S,
        listen: list[str] | None = None,
        **sections: Any,
    ) -> None:
        """`listen`: an address of the server for each client; by default one on loopback."""
        folder.mkdir(parents=True)
        self.folder = folder
        self.deadline_s = deadline_s
        # Whether a round may miss its quorum; the numbers of those that did.
        self.may_fail = False
        self.failed: set[int] = set()
        self.gates = Gates(folder / "gate")
        args = {
            "clients": clients,
            "quorum": max(1, clients - 1),
            "deadline_s": deadline_s,
            "size": size,
        }
        data = serialize(compile_module(PROGRAM, args))
        self.artifact = folder / "artifact.onnx"
        self.artifact.write_bytes(data)
        self.sha256 = parse_artifact(data, "artifact").sha256
        listen = listen or [f"/ip4/127.0.0.1/tcp/{choose_port(0)}"]
        rounds = {
            "target": "server",
            "inputs": {"tick": "trigger"},
            "times": 0,
            "every_s": every_s,
            "wait_for": {
                "class": "client",
                "peers": clients,
                "min_peers": max(1, clients - 1),
                "timeout_s": 30.0,
            },
        }
        self.server = self._make(
            "server", "server", network={"listen": listen}, invoke=[rounds], **sections
        )
        self.clients = [
            self._make(
                f"client-{n}",
                "client",
                network={"bootstrap": [f"{listen[n % len(listen)]}/p2p/{self.server.peer}"]},
                **sections,
            )
            for n in range(clients)
        ]

    @property
    def all(self) -> list[Daemon]:
        return [self.server, *self.clients]

    def _make(self, name: str, target: str, **settings: Any) -> Daemon:
        folder = self.folder / name
        paths.make_state_dir(folder / "state")
        identity = create_identity(paths.identity_file(folder / "state"))
        node = {"name": name, "state_dir": str(folder / "state"), **settings.pop("node", {})}
        config = NodeConfig.model_validate(
            {
                "node": {**node, "components": ["tests.chaos.program"]},
                "artifact": {
                    "path": str(self.artifact),
                    "sha256": self.sha256,
                    "targets": [target],
                },
                **settings,
            }
        )
        sources.write(folder / "node.toml", config, comment=name)
        environment = {
            GATE_VARIABLE: str(self.folder / "gate"),
            NAME_VARIABLE: name,
            # What is held is measured, and not what the allocator keeps of weights for later.
            "MALLOC_MMAP_THRESHOLD_": "1000000",
        }
        return Daemon(name, folder, str(identity.peer_id), environment=environment)

    def start(self, *daemons: Daemon) -> None:
        """Start daemons at once, and return when each has said that it is ready."""
        with tempfile.TemporaryDirectory() as folder:
            address = str(Path(folder) / "notify")
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
                listener.settimeout(PATIENCE_S)
                listener.bind(address)
                for daemon in daemons:
                    daemon.spawn({**os.environ, "NOTIFY_SOCKET": address})
                left = len(daemons)
                while left:
                    left -= listener.recv(4096).startswith(b"READY=1")

    @contextmanager
    def events(self) -> Iterator[Rounds]:
        """What the server says, from now on."""
        with self.server.control() as client:
            yield Rounds(client, self)

    def check_files(self) -> None:
        """No file of any daemon is corrupt; to be called when they have ended."""
        for daemon in self.all:
            newest = checkpoint.checkpoint_file(daemon.state_dir)
            if newest.exists():
                assert next(checkpoint.usable(daemon.state_dir, self.sha256), None) is not None
            assert len(paths.identity_file(daemon.state_dir).read_bytes()) > 32

    def end(self) -> None:
        """End every process, whatever state it is in."""
        for daemon in self.all:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.signal(signal.SIGCONT)
                daemon.kill()
        self.gates.end()


class Rounds:
    """The server's events, read as rounds, each of which is checked."""

    # Not all: a flood of messages for nobody is a flood of events too, of which some are dropped.
    TYPES = ("round_started", "round_finished", "request.response", "peer_up", "peer_down")

    def __init__(self, client: ControlClient, cluster: Cluster) -> None:
        self._lines = client.stream("/v1/events", {"type": list(self.TYPES)})
        self._cluster = cluster

    def until(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The next event of a kind with these fields."""
        return self._until(
            lambda e: e["type"] == kind and all(e.get(k) == v for k, v in fields.items())
        )

    def _until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        seen: list[dict[str, Any]] = []
        # A server that says nothing any more is killed, which ends the stream.
        watchdog = threading.Timer(PATIENCE_S, self._cluster.server.kill)
        watchdog.start()
        try:
            for line in self._lines:
                event: dict[str, Any] = line["event"]
                seen = [*seen[-9:], event]
                if event["type"] == "round_finished":
                    self._check(event)
                if wanted(event):
                    return event
        finally:
            watchdog.cancel()
            watchdog.join()
        raise AssertionError(f"the server ended, or was silent; it said {seen}")

    def next(self) -> dict[str, Any]:
        """The next round that ends."""
        return self.until("round_finished")

    def with_all(self) -> dict[str, Any]:
        """The next round that everybody took part in."""
        number = len(self._cluster.clients)
        return self._until(
            lambda e: e["type"] == "round_finished" and len(e["responded"]) == number
        )

    def without(self, absent: Daemon) -> dict[str, Any]:
        """The next round that this one did not answer."""
        return self._until(
            lambda e: e["type"] == "round_finished" and absent.peer not in e["responded"]
        )

    def more(self, count: int) -> dict[str, Any]:
        """The last of so many rounds that all end after now, whatever was not read until now."""
        (made,) = self._cluster.server.get("rounds")["invoke"]
        return self._until(
            lambda e: e["type"] == "round_finished" and e["round"] >= made["done"] + count
        )

    def for_seconds(self, seconds: float) -> list[dict[str, Any]]:
        """The rounds that end in the next seconds, and the one after."""
        end, made = time.monotonic() + seconds, []
        while not made or time.monotonic() < end:
            made.append(self.next())
        return made

    def _check(self, event: dict[str, Any]) -> None:
        """Nothing counted twice, nothing beyond its deadline, no failure but those expected."""
        cluster = self._cluster
        assert event["seconds"] < cluster.deadline_s + SLACK_S, event
        assert len(set(event["responded"])) == len(event["responded"]), event
        if not event["ok"]:
            assert cluster.may_fail, event
            assert all("QuorumNotReached" in failure for failure in event["failures"]), event
            cluster.failed.add(event["round"])
            return
        # One for each round since the beginning, whatever happened in between.
        made = event["round"] - sum(number < event["round"] for number in cluster.failed)
        assert round(event["outputs"]["first"], 3) == made, event
        stats = event["outputs"]["stats"]
        taken = len(event["responded"]) - stats["refused"]
        assert stats["contributors"] == stats["num_samples"] == taken, event
