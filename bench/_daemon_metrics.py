"""Daemons: what a whole node takes, from `bbnode run` to a federated round.

Rule: real `bbnode run` processes on loopback. A round's time is the server's own, from the
invocation to the last output; of many the median. What is compared with bare streams is measured
in the same run: the same bytes, to as many processes at once, and back; or, where one ratio is
the point, in turn with them (`op_to_op`).
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import trio

from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import serialize
from bbnode.daemon.artifacts.build import compile_module
from bbnode.daemon.config import NodeConfig, sources
from bbnode.daemon.control.client import ControlClient
from bbnode.daemon.testbed.nodes import choose_port
from bbnode.transport.identity import create_identity

HERE = Path(__file__).parent
PROGRAM = "_daemon_program"
CLIENTS = 4
SMALL_WEIGHTS = 10_000  # 40 KB
LARGE_WEIGHTS = 10_000_000  # 40 MB
BULK_BYTES = 64 * 1024 * 1024
SMALL_ROUNDS, LARGE_ROUNDS = 100, 6
# Rounds in which connections and memory are warming up.
WARM_UP = 2
IDLE_S = 10.0
STARTS = 3
PATIENCE_S = 120.0
# Large weights are one envelope, and the cap that a node has by default is for small ones.
MEGA = 1e6


class Node:
    """One daemon in a folder of its own."""

    def __init__(
        self, folder: Path, artifact: Path, target: str, *, program: str = PROGRAM, **settings: Any
    ) -> None:
        paths.make_state_dir(folder / "state")
        self.peer = create_identity(paths.identity_file(folder / "state")).peer_id
        # Where it listens, with its id; "" if it only dials.
        self.address = ""
        self._config = folder / "node.toml"
        self.state_dir = folder / "state"
        node = {
            "name": folder.name,
            "state_dir": str(self.state_dir),
            "components": [program],
            "snapshot_every_s": 0.0,
        }
        config = NodeConfig.model_validate(
            {
                "node": node,
                "artifact": {"path": str(artifact), "targets": [target]},
                **settings,
            }
        )
        sources.write(self._config, config, comment="benchmark")

    @contextmanager
    def running(self) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
        """The daemon's process, and the seconds that it took until it was ready."""
        with (
            tempfile.TemporaryDirectory() as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
            (self.state_dir.parent / "log").open("ab") as log,
        ):
            address = str(Path(folder) / "notify")
            listener.bind(address)
            listener.settimeout(PATIENCE_S)
            started = perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-m", "bbnode", "run", "-c", str(self._config)],
                env={**os.environ, "NOTIFY_SOCKET": address, "PYTHONPATH": str(HERE)},
                stderr=log,
            )
            try:
                while not listener.recv(4096).startswith(b"READY=1"):
                    pass
                yield process, perf_counter() - started
            finally:
                process.terminate()
                process.wait()

    def finished_rounds(self) -> list[dict[str, Any]]:
        """Its rounds, when it has made all."""
        with ControlClient(paths.control_socket(self.state_dir), timeout_s=PATIENCE_S) as client:
            for _ in client.stream("/v1/events", {"type": "rounds_complete", "last": 100}):
                break
        with ControlClient(paths.control_socket(self.state_dir), timeout_s=PATIENCE_S) as client:
            rounds: list[dict[str, Any]] = client.get("/v1/rounds")["rounds"]
        return rounds


def make(
    folder: Path,
    module: str,
    clients: int,
    size: int,
    rounds: int,
    *,
    daemons: int | None = None,
    transport: str = "libp2p",
) -> list[Node]:
    """A server and its clients; without `rounds` the server waits to be told.

    `daemons` is how many of the clients are made, all of them if not given; all are on `transport`.
    """
    artifact = folder / "artifact.onnx"
    sys.path.insert(0, str(HERE))
    artifact.write_bytes(
        serialize(compile_module(f"{PROGRAM}:{module}", {"clients": clients, "size": size}))
    )
    listen = f"/ip4/127.0.0.1/tcp/{choose_port(0)}"
    wait = {"class": "client", "peers": clients, "timeout_s": PATIENCE_S}
    entry = {"target": "server", "inputs": {"tick": "trigger"}, "times": rounds, "wait_for": wait}
    server = Node(
        folder / "server",
        artifact,
        "server",
        network={"listen": [listen], "transport": transport},
        invoke=[entry] if rounds else [],
    )
    server.address = f"{listen}/p2p/{server.peer}"
    bootstrap = {"network": {"bootstrap": [server.address], "transport": transport}}
    made = range(clients if daemons is None else daemons)
    return [
        server,
        *(Node(folder / f"client-{n}", artifact, "client", **bootstrap) for n in made),
    ]


def round_s(module: str, clients: int, size: int, rounds: int) -> float:
    """The median seconds of a round."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server, *others = make(Path(folder), module, clients, size, rounds)
        for node in (*others, server):
            stack.enter_context(node.running())
        made = server.finished_rounds()
    failed = [each["failures"] for each in made if not each["ok"]]
    if failed:
        raise SystemExit(f"rounds failed: {failed[:3]}")
    return statistics.median(each["seconds"] for each in made[WARM_UP:])


def idle(transport: str) -> dict[str, float]:
    """ready_s, idle_rss_mb and idle_cpu_percent: a server with its clients and nothing to do."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server, *others = make(
            Path(folder), "IdleRound", CLIENTS, SMALL_WEIGHTS, 0, transport=transport
        )
        ready = []
        for _ in range(STARTS):
            with server.running() as (_, seconds):
                ready.append(seconds)
        process, _ = stack.enter_context(server.running())
        for node in others:
            stack.enter_context(node.running())
        time.sleep(2.0)  # what comes with connections is over
        cpu = cpu_s(process.pid)
        time.sleep(IDLE_S)
        cpu = cpu_s(process.pid) - cpu
        pages = int(Path(f"/proc/{process.pid}/statm").read_text("ascii").split()[1])
    return {
        "ready_s": min(ready),
        "idle_rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / MEGA,
        "idle_cpu_percent": 100 * cpu / IDLE_S,
    }


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def op_to_op() -> Iterator[Callable[[], float]]:
    """A server and a client that are connected. Each call moves a 64 MiB tensor from an op of the
    one to an op of the other, and gives the seconds until the answer is at the caller's.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server, client = make(Path(folder), "OneWay", 1, BULK_BYTES // 4, 0)
        for node in (client, server):
            stack.enter_context(node.running())
        socket_path = paths.control_socket(server.state_dir)
        with ControlClient(socket_path, timeout_s=PATIENCE_S) as control:
            for _ in control.stream("/v1/events", {"type": "peer_up", "last": 100}):
                break
        control = stack.enter_context(ControlClient(socket_path, timeout_s=PATIENCE_S))
        wanted = {"target": "server", "inputs": {"tick": "trigger"}, "wait_s": 60.0}

        def once() -> float:
            started = perf_counter()
            told = control.post("/v1/invoke", wanted)
            seconds = perf_counter() - started
            if not told["ok"] or not told["outputs"]["answers"]["responded"]:
                raise SystemExit(f"the tensor did not come: {told}")
            return seconds

        yield once


def measure(bare_there_and_back_s: float) -> dict[str, float]:
    """The metrics of daemons but `op_to_op`'s; `bare_there_and_back_s` is what 40 MB to each of
    four processes and back take on bare streams.
    """
    small_s = round_s("IdleRound", CLIENTS, SMALL_WEIGHTS, SMALL_ROUNDS)
    large_s = round_s("IdleRound", CLIENTS, LARGE_WEIGHTS, LARGE_ROUNDS)
    return {
        "round_overhead_ms_40kb": small_s * 1e3,
        "round_40mb_vs_bare": large_s / bare_there_and_back_s,
        "round_40mb_s": large_s,
        "bare_40mb_s": bare_there_and_back_s,
        **idle("libp2p"),
        **{f"lean_{name}": value for name, value in idle("lean").items()},
    }


# -- the same bytes on bare streams ----------------------------------------------------------


async def send_back(stream: Any, read_bytes: int, write_bytes: int) -> None:
    """The other side of `there_and_back_s`: take all of it, and give as much back."""
    size = LARGE_WEIGHTS * 4
    while await _read(stream, size, read_bytes):
        await _write(stream, size, write_bytes)


async def there_and_back_s(streams: list[Any], read_bytes: int, write_bytes: int) -> float:
    """Seconds for 40 MB on each of these streams at once, and back."""
    size = LARGE_WEIGHTS * 4

    async def one(stream: Any) -> None:
        await _write(stream, size, write_bytes)
        if not await _read(stream, size, read_bytes):
            raise SystemExit("the other process has gone")

    started = perf_counter()
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(one, stream)
    return perf_counter() - started


async def _write(stream: Any, size: int, at_once: int) -> None:
    data = bytes(at_once)
    while size > 0:
        await stream.write(data[: min(size, at_once)])
        size -= at_once


async def _read(stream: Any, size: int, at_once: int) -> bool:
    """Read so much; False when the stream ends before."""
    while size > 0:
        data = await stream.read(min(size, at_once))
        if not data:
            return False
        size -= len(data)
    return True
