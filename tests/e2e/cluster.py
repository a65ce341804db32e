"""A cluster of real daemons on loopback, for the end-to-end tests."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bbnode.daemon import paths
from bbnode.daemon.control.client import ControlClient
from bbnode.daemon.testbed.demo import DemoOptions, demo_plan
from bbnode.daemon.testbed.nodes import ChildNode, held_folder, write_nodes
from tests.patience import PATIENCE_S


class Cluster:
    """A server and its clients."""

    def __init__(self, folder: Path, *, clients: int, rounds: int, deadline_s: float) -> None:
        options = DemoOptions(clients=clients, rounds=rounds)
        plan = demo_plan(options, quorum=clients - 1, deadline_s=deadline_s)
        with held_folder(folder) as nodes:
            self.artifact = nodes / "artifact.onnx"
            made = write_nodes(plan, nodes, port=0, wait_s=PATIENCE_S)
        self.server, self.clients = made[0], made[1:]

    @property
    def all(self) -> list[ChildNode]:
        return [self.server, *self.clients]

    def client_of(self, peer: str) -> ChildNode:
        return next(node for node in self.clients if node.peer == peer)

    @contextmanager
    def events(self, node: ChildNode) -> Iterator[Events]:
        """Events of a daemon, from now on."""
        with connected(node) as client:
            yield Events(client)

    def ask(self, node: ChildNode, command: str) -> dict[str, Any]:
        with connected(node) as client:
            return client.get(f"/v1/{command}")


def connected(node: ChildNode) -> ControlClient:
    """A client of a daemon's control plane."""
    return ControlClient(paths.control_socket(node.state_dir), timeout_s=PATIENCE_S)


class Events:
    """The event stream of a daemon, with bounded waits."""

    # Not all: whoever reads too slowly is cut off, and a test does other things meanwhile.
    TYPES = ("round_started", "round_finished", "peer_up", "peer_down", "stopping")

    def __init__(self, client: ControlClient, types: Sequence[str] = TYPES) -> None:
        self._stream = client.stream("/v1/events", {"type": list(types)})
        self._socket = client._http.sock
        self.seen: list[dict[str, Any]] = []

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next event that is wanted; neither silence nor other events last for ever."""
        watchdog = threading.Timer(PATIENCE_S, self._socket.shutdown, [socket.SHUT_RDWR])
        watchdog.start()
        try:
            for line in self._stream:
                assert not line["dropped"]
                self.seen.append(line["event"])
                if wanted(line["event"]):
                    return self.seen[-1]
        finally:
            watchdog.cancel()
            watchdog.join()
        raise AssertionError(f"silent, ended, or cut us off; the daemon said {self.seen[-5:]}")

    def round(self, number: int) -> dict[str, Any]:
        """The end of a round."""
        return self.until(lambda e: e["type"] == "round_finished" and e["round"] == number)


def start(*nodes: ChildNode) -> None:
    """Start daemons at once, and return when each has said that it is ready."""
    with (
        tempfile.TemporaryDirectory() as folder,
        wait_for_ready(Path(folder), len(nodes)) as environment,
    ):
        for node in nodes:
            node.start(notify_socket=Path(environment["NOTIFY_SOCKET"]))


@contextmanager
def wait_for_ready(folder: Path, count: int) -> Iterator[dict[str, str]]:
    """Give an environment to start `count` daemons with; leave when all have said READY=1."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(PATIENCE_S)
        address = folder / "notify"
        listener.bind(str(address))
        yield {**os.environ, "NOTIFY_SOCKET": str(address)}
        while count:
            count -= listener.recv(4096).startswith(b"READY=1")


def stop(node: ChildNode) -> None:
    """End a daemon that the test started, whatever state it is in."""
    if node.process is not None and node.process.poll() is None:
        node.process.send_signal(signal.SIGCONT)
        node.process.kill()
        node.process.wait()
