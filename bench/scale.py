"""Many peers: one server daemon with a thousand clients, and what each of them costs it.

Rule: loopback. The server is a real `bbnode run`; the clients are real nodes over real libp2p
connections, as many to a process as it takes for a few processes (`_scale_clients.py`). All of them
share the machine with the server, so the times are those of both sides; what the server alone
spends is its processor time, as the system counts it. Of several rounds the median.

Metrics, N being the number of clients (`--clients`, 1,000):
    connect_N_s: from the command to connect to the moment when the server's engine has all.
    round_N_clients_40kb_s: a federated round: 40 KB of weights to each client and back, averaged.
    peer_ms_at_100, peer_ms_at_N: such a round's time per client, with 100 and with N of them.
    peer_cpu_ms_at_100, peer_cpu_ms_at_N: what of it is the server's processor time.
    lean_…: the same of a server on the transport lean; without it, of one on libp2p. The clients
        are on lean, as are thousands in a process.
    server_mib_per_peer: resident memory of the server after the rounds, less what it had before the
        first client came, per client.
    idle_cpu_percent_N: processor time of the server while nothing happens but pings.
    stop_32_daemons_s: from SIGTERM to 32 daemons, one of them the server of the others, to the end
        of the last process (`--daemons`).
    sim_10000_clients_round_s: a round of 10,000 clients below 100 edges below one server, in the
        simulator, in this process (`--sim-clients`, a hundred to an edge).
    sim_split_2_speedup, and others of a simulation in two processes: see `_sim_split.py`
        (`--splits`, steps of which the best counts).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import _daemon_metrics
import _scale_tree
import _sim_split

from bbnode.daemon import paths
from bbnode.daemon.control.client import ControlClient
from bbnode.daemon.lifecycle.process import raise_file_limit

HERE = Path(__file__).parent
CLIENTS, FEW_CLIENTS = 1000, 100
PER_PROCESS = 250
DAEMONS = 32
ROUNDS = 7
SPLITS = 40
IDLE_S = 20.0
# After the last round: what is given back with the next pings is given back.
SETTLE_S = 6.0
MEBI = 1024 * 1024
# What issue and design promise, for the default sizes.
MOST = {
    "round_1000_clients_40kb_s": 1.0,
    "lean_round_1000_clients_40kb_s": 1.0,
    "connect_1000_s": 6.0,
    "server_mib_per_peer": 0.15,
    "idle_cpu_percent_1000": 3.0,
    "stop_32_daemons_s": 5.0,
}


class Server:
    """A running server daemon, and its clients' processes."""

    def __init__(self, folder: Path, clients: int, transport: str) -> None:
        self.clients = clients
        self._folder = folder
        size = _daemon_metrics.SMALL_WEIGHTS
        self.node, *_ = _daemon_metrics.make(
            folder, "IdleRound", clients, size, 0, daemons=0, transport=transport
        )
        self.pid = 0
        self._processes: list[subprocess.Popen[str]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the server, with all clients installed and none connected."""
        with ExitStack() as stack:
            process, _ = stack.enter_context(self.node.running())
            self.pid = process.pid
            left = self.clients
            while left > 0:
                count = min(left, PER_PROCESS)
                self._processes.append(stack.enter_context(self._some(count)))
                left -= count
            self._wait_for("ready")
            yield

    @contextmanager
    def _some(self, count: int) -> Iterator[subprocess.Popen[str]]:
        words = [str(self._folder / "artifact.onnx"), self.node.address, str(count)]
        child = subprocess.Popen(
            [sys.executable, str(HERE / "_scale_clients.py"), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield child
        finally:
            if child.stdin is not None:
                child.stdin.close()
            child.wait()

    def _wait_for(self, word: str) -> None:
        for child in self._processes:
            line = "" if child.stdout is None else child.stdout.readline()
            if line.strip() != word:
                raise SystemExit(f"a process of clients has ended, before it was {word}")

    def connect_s(self) -> float:
        """Connect all clients; return the seconds that it took."""
        started = perf_counter()
        for child in self._processes:
            if child.stdin is not None:
                child.stdin.write("connect\n")
                child.stdin.flush()
        self._wait_for("connected")
        with self._control() as control:
            while (
                there := control.get("/v1/status")["counters"]["peers.connected"]
            ) < self.clients:
                print(f"{there} of {self.clients} are connected", file=sys.stderr)
                time.sleep(0.1)
        return perf_counter() - started

    def rounds(self, count: int) -> tuple[float, float]:
        """Make rounds; return the median seconds of one, and the processor's for the median."""
        took, spent = [], []
        with self._control() as control:
            for _ in range(_daemon_metrics.WARM_UP + count):
                cpu, started = self.cpu_s(), perf_counter()
                told = control.post(
                    "/v1/invoke",
                    {"target": "server", "inputs": {"tick": "trigger"}, "wait_s": 120.0},
                )
                took.append(perf_counter() - started)
                spent.append(self.cpu_s() - cpu)
                contributors = told["outputs"]["stats"]["contributors"] if told["ok"] else 0
                if contributors != self.clients:
                    raise SystemExit(f"{contributors} of {self.clients} answered: {told}")
        kept = slice(_daemon_metrics.WARM_UP, None)
        return statistics.median(took[kept]), statistics.median(spent[kept])

    def cpu_s(self) -> float:
        """Processor time of the server so far."""
        return _daemon_metrics.cpu_s(self.pid)

    def resident_bytes(self) -> int:
        """Memory that the server has now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text("ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _control(self) -> ControlClient:
        socket_path = paths.control_socket(self.node.state_dir)
        return ControlClient(socket_path, timeout_s=_daemon_metrics.PATIENCE_S)


def measure_server(clients: int, rounds: int, idle_s: float, transport: str) -> dict[str, float]:
    """Return the metrics of one server with so many clients."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), clients, transport)
        with server.running():
            before = server.resident_bytes()
            connect_s = server.connect_s()
            round_s, cpu_s = server.rounds(rounds)
            time.sleep(SETTLE_S)
            grown = server.resident_bytes() - before
            cpu = server.cpu_s()
            time.sleep(idle_s)
            cpu = server.cpu_s() - cpu
    return {
        f"connect_{clients}_s": connect_s,
        f"round_{clients}_clients_40kb_s": round_s,
        f"peer_ms_at_{clients}": 1e3 * round_s / clients,
        f"peer_cpu_ms_at_{clients}": 1e3 * cpu_s / clients,
        "server_mib_per_peer": grown / clients / MEBI,
        f"idle_cpu_percent_{clients}": 100 * cpu / idle_s,
    }


def stop_s(daemons: int) -> float:
    """Seconds until all of these daemons have stopped, which are told at once."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server, *others = _daemon_metrics.make(
            Path(folder), "IdleRound", daemons - 1, _daemon_metrics.SMALL_WEIGHTS, 0
        )
        running = [stack.enter_context(node.running())[0] for node in (server, *others)]
        with ControlClient(
            paths.control_socket(server.state_dir), timeout_s=_daemon_metrics.PATIENCE_S
        ) as control:
            while control.get("/v1/status")["counters"]["peers.connected"] < daemons - 1:
                time.sleep(0.2)
        started = perf_counter()
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        seconds = perf_counter() - started
        failed = [process.returncode for process in running if process.returncode != 0]
        if failed:
            raise SystemExit(f"{len(failed)} daemons ended with {failed[0]}")
    return seconds


def measure(options: Any) -> dict[str, float]:
    """All metrics of the module's docstring."""
    found: dict[str, float] = {}
    few = min(FEW_CLIENTS, options.clients)
    if options.clients:
        for of, transport in (("", "libp2p"), ("lean_", "lean")):
            at_few = measure_server(few, options.rounds, 0.1, transport)
            kept = {name: at_few[name] for name in (f"peer_ms_at_{few}", f"peer_cpu_ms_at_{few}")}
            kept |= measure_server(options.clients, options.rounds, options.idle, transport)
            found |= {f"{of}{name}": value for name, value in kept.items()}
    if options.daemons:
        found[f"stop_{options.daemons}_daemons_s"] = stop_s(options.daemons)
    if options.sim_clients:
        name = f"sim_{options.sim_clients}_clients_round_s"
        found[name] = _scale_tree.round_s(options.sim_clients)
    if options.splits:
        found |= _sim_split.measure(options.splits)
    return {name: round(value, 3) for name, value in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the metrics, as text or (`--json`) as one object of name to number."""
    parser = argparse.ArgumentParser(prog="scripts/bench scale", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--clients", type=int, default=CLIENTS, metavar="N", help="0: none")
    parser.add_argument("--daemons", type=int, default=DAEMONS, metavar="N", help="0: none")
    parser.add_argument(
        "--sim-clients", type=int, default=_scale_tree.CLIENTS, metavar="N", help="0: none"
    )
    parser.add_argument("--splits", type=int, default=SPLITS, metavar="N", help="0: none")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="median of N")
    parser.add_argument("--idle", type=float, default=IDLE_S, metavar="S", help="seconds at rest")
    options = parser.parse_args(argv)
    sizes = (options.clients, options.daemons, options.sim_clients, options.splits)
    if min(sizes) < 0 or options.rounds < 1:
        parser.error("--rounds takes 1 or more, the other numbers 0 or more")
    if options.daemons == 1:
        parser.error("--daemons takes 0, or a server and some others")
    raise_file_limit()
    found = measure(options)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        bound = f"  (at most {MOST[name]:g})" if name in MOST else ""
        print(f"{name:<30}{value:>10.3f}{bound}")


if __name__ == "__main__":
    main()
